"""The cells of `experiments.search`: one method on one problem, computed once and kept."""

import dataclasses
import pathlib
import time
from functools import cache
from typing import Any

import jax

import doppler_jax as dj
from doppler_jax.learned import policy_candidates, state_candidates
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.training.checkpoint import Policy
from doppler_jax.training.train import train_policy
from doppler_jax.types import Costs, TaskGraph
from experiments.cells import Cells
from experiments.method_cells import finished, placed_record

WARM_UP_S = 1.0
"""Of the run before the clock starts: every method compiles what it runs under such a bound."""

METHODS = ("doppler", "doppler+search", "memetic", "local_search", "annealing", "evolution")
"""`memetic` is the search of `doppler+search` from critical-path and HEFT placements."""

LISTED = ("critical_path", "heft", "cpop", "peft", "etf")
"""Of these the best is the table's list scheduler."""

_GENERATED = {
    "random_layered_1k": ("random_layered", {"num_tasks": 57}, "p100x4"),
    "llama_8": ("llama", {"num_layers": 8}, "p100x4"),
    "random_layered_4k": ("random_layered", {"num_tasks": 88}, "v100x8"),
    "llama_32": ("llama", {"num_layers": 32}, "v100x8"),
}
"""Workload at the sizes of its preset `paper` but for these, and cluster."""


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One problem under one budget: a row of the comparison."""

    graph: str
    links: str
    unit: str  # of the budget: "evaluations" or "seconds"
    amount: int


def load_problem(reference: pathlib.Path, name: str) -> tuple[TaskGraph, Costs]:
    """Returns a problem by name: a published graph on 4 devices, or a generated one.

    `random_layered_1k` (970 tasks) and `llama_8` (2,026) are on `p100x4`, `random_layered_4k`
    (3,944) and `llama_32` (19,874) on `v100x8`; all are cut uniformly, for as many shards
    as there are devices.
    """
    if (reference / f"{name}.txt").exists():
        graph = dj.load_graph(reference / f"{name}.txt")
        return graph, dj.reference_costs(graph, num_devices=4)
    return _generated_problem(name)


@cache
def _generated_problem(name: str) -> tuple[TaskGraph, Costs]:
    kind, sizes, cluster_name = _GENERATED[name]
    workload = dj.make_workload(kind, "paper", **sizes)
    cluster = dj.make_cluster(cluster_name)
    program = dj.trace(workload.fn, *workload.args)
    graph = dj.partition(
        program, num_shards=cluster.num_devices, strategy="uniform", cluster=cluster
    ).graph
    return graph, dj.make_costs(graph, cluster)


def learn_cell(
    cells: Cells, reference: pathlib.Path, name: str, budget_s: float, seed: int
) -> dict[str, Any]:
    """Returns what stages 1 and 2 make of a graph within seconds, compilation included."""

    def make() -> dict[str, Any]:
        graph, costs = load_problem(reference, name)
        jax.clear_caches()
        began = time.monotonic()
        problem = make_policy_inputs(graph, costs)
        trained = train_policy(problem, jax.random.key(seed), budget_s=budget_s)
        seconds = time.monotonic() - began
        found = state_candidates(trained.state, graph.num_tasks)
        placement, schedule = best_placement(graph, costs, found)
        policy = Policy(params=trained.state.params, config=trained.policy)
        greedy = policy_candidates(problem, policy, jax.random.key(seed), 1)[0]
        return {
            "makespan_s": dj.makespan_s(schedule),
            "greedy_s": dj.makespan_s(dj.simulate_oracle(graph, costs, greedy)),
            "seconds": seconds,
            "updates": int(trained.state.update),
            "episodes": int(trained.state.episodes),
            "evaluations": int(trained.state.evaluations),
            "placement": placement.tolist(),
        }

    return cells.get(f"learn-{name}-{seed}", {"budget_s": budget_s}, make)


def listed_cell(
    cells: Cells, reference: pathlib.Path, name: str, links: str, method: str
) -> dict[str, Any]:
    """Returns what a list scheduler makes of a problem."""

    def make() -> dict[str, Any]:
        placed = dj.place(
            *load_problem(reference, name), method=method, objective=dj.Objective(links)
        )
        return placed_record(placed)

    return cells.get(listed_name(name, links, method), {}, make)


def compare_cell(
    cells: Cells, reference: pathlib.Path, cell: Cell, method: str, seed: int
) -> dict[str, Any]:
    """Returns what a method finds within a cell's budget.

    A budget in seconds begins after a run that has compiled everything; `first_s` is what
    that run took.
    """

    def make() -> dict[str, Any]:
        problem = load_problem(reference, cell.graph)
        is_timed = cell.unit == "seconds"
        first_s = _warm_up(reference, cell.graph, cell.links, method) if is_timed else None
        placed = dj.place(
            *problem,
            method=method,
            objective=dj.Objective(cell.links),
            key=jax.random.key(seed),
            budget_s=cell.amount if is_timed else None,
            max_evaluations=None if is_timed else cell.amount,
        )
        return placed_record(placed) | {"first_s": first_s}

    return cells.get(compare_name(cell, method, seed), {cell.unit: cell.amount}, make)


def kept(cells: Cells, cell: Cell, method: str, seed: int) -> dict[str, Any] | None:
    """Returns the record of `compare_cell`, None if it was not made yet."""
    return cells.find(compare_name(cell, method, seed), {cell.unit: cell.amount})


def kept_listed(cells: Cells, name: str, links: str) -> float | None:
    """Returns the least makespan of the list schedulers, None unless all were run."""
    records = [cells.find(listed_name(name, links, method), {}) for method in LISTED]
    makespans = [record["makespan_s"] for record in records if record is not None]
    return min(makespans) if len(makespans) == len(LISTED) else None


@cache
def _warm_up(reference: pathlib.Path, name: str, links: str, method: str) -> float:
    """Returns the seconds of a method's first run in this process, nearly all compilation."""
    began = time.monotonic()
    finished(
        dj.place(
            *load_problem(reference, name),
            method=method,
            objective=dj.Objective(links),
            budget_s=WARM_UP_S,
        )
    )
    return time.monotonic() - began


def compare_name(cell: Cell, method: str, seed: int) -> str:
    """Returns the name of the record of `compare_cell`."""
    unit = "s" if cell.unit == "seconds" else ""
    return f"{cell.graph}-{cell.links}-{_file_name(method)}-{cell.amount}{unit}-{seed}"


def listed_name(graph: str, links: str, method: str) -> str:
    """Returns the name of the record of `listed_cell`."""
    return f"{graph}-{links}-{method}"


def _file_name(method: str) -> str:
    return method.replace("+", "_")
