"""The cells of `experiments.gaps`: one method on one problem, computed once and kept."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.baselines.brute_force import brute_force
from doppler_jax.baselines.exact import exact
from doppler_jax.costs.dnn_partitioning import load_dnn_partitioning, load_split
from doppler_jax.files import parse_json_object, read_text
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.types import Costs, Schedule, TaskGraph
from experiments.cells import Cells
from experiments.method_cells import placed_record
from experiments.neutral import load_published

TICKS_PER_S = 1024
"""Durations of the random graphs are multiples of 1 / TICKS_PER_S s: no rounding anywhere."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a method may spend on one problem."""

    evaluations: int
    budget_s: float | None
    seed: int


def small_problem(seed: int) -> tuple[TaskGraph, Costs]:
    """Returns a random graph of 5 to 10 tasks with costs on 2 or 3 devices.

    Every other pair of graphs has equal devices and links; transfers take a tenth of a
    task, about as long as one, or ten times as long.
    """
    rng = np.random.default_rng(seed)
    num_tasks, num_devices = int(rng.integers(5, 11)), 2 + seed % 2
    senders, readers = np.nonzero(np.triu(rng.random((num_tasks, num_tasks)) < 0.3, 1))
    graph = dj.make_graph(
        flops=np.ones(num_tasks),
        tensor_producer=np.arange(num_tasks),
        tensor_bytes=_times(rng, num_tasks) * rng.choice([0.125, 1.0, 8.0]),
        edge_tensor=senders,
        edge_reader=readers,
    )
    is_equal = seed // 2 % 2 == 0
    compute_s = _times(rng, (num_tasks, 1 if is_equal else num_devices))
    rate = np.ones((num_devices, num_devices))
    if not is_equal:
        rate = rng.choice([0.5, 1.0, 2.0], rate.shape)
    np.fill_diagonal(rate, 0.0)
    costs = Costs(
        compute_s=np.broadcast_to(compute_s, (num_tasks, num_devices)).copy(),
        tensor_bytes=graph.tensor_bytes.copy(),
        input_bytes=graph.input_bytes.copy(),
        latency_s=np.zeros_like(rate),
        seconds_per_byte=rate,
        capacity_bytes=np.full(num_devices, np.inf),
    )
    dj.check_costs(graph, costs)
    return graph, costs


def small_reference(cells: Cells, seed: int, exact_s: float) -> dict[str, Any]:
    """Returns the optimum of a random graph, its bound, and the best of all placements."""

    def make() -> dict[str, Any]:
        problem = small_problem(seed)
        optimum = exact(*problem, budget_s=exact_s)
        best = brute_force(*problem)
        return {
            "tasks": problem[0].num_tasks,
            "devices": problem[1].num_devices,
            "optimum_s": optimum.makespan_s,
            "bound_s": optimum.bound_s,
            "proven": optimum.proven,
            "fifo_best_s": best.makespan_s,
            "placements": best.evaluations,
        }

    return cells.get(f"small-{seed}-reference", {"exact_s": exact_s}, make)


def small_cell(cells: Cells, seed: int, method: str, budget: Budget) -> dict[str, Any]:
    """Returns a method's makespan on a random graph, queue `fifo`."""
    return cells.get(
        f"small-{seed}-{method}",
        dataclasses.asdict(budget),
        lambda: _place(small_problem(seed), method, budget)[0],
    )


def stg_cell(
    cells: Cells, folder: pathlib.Path, name: str, num_devices: int, method: str, budget: Budget
) -> dict[str, Any]:
    """Returns a method's makespan on a graph of the Standard Task Graph set, by `priority`.

    The better of two priorities counts: the start order of the method's own simulated
    schedule, and the b-level, largest first.

    Raises:
      ValueError: no makespan is published for the graph.
    """

    def make() -> dict[str, Any]:
        published = load_published(folder / f"Case50_{num_devices}_OPT.csv")
        if f"{name}.stg" not in published:
            raise ValueError(f"{name}: no makespan is published for {num_devices} devices")
        known = published[f"{name}.stg"]
        weights, edges = dj.load_stg(folder / f"{name}.stg")
        graph, costs = dj.from_edge_delays(weights, edges, num_devices=num_devices)
        record, placed = _place((graph, costs), method, budget)
        record |= dataclasses.asdict(known)
        if placed is None:
            return record
        ranks = {"start order": placed.priority, "b-level": -dj.b_level(graph, costs)}
        by_rank = {
            rank: dj.makespan_s(
                dj.simulate_oracle(
                    graph, costs, placed.placement, queue="priority", priority=priority
                )
            )
            for rank, priority in ranks.items()
        }
        chosen = min(by_rank, key=by_rank.__getitem__)
        return record | {
            "placed_s": placed.makespan_s,
            "makespan_s": by_rank[chosen],
            "priority": chosen,
        }

    return cells.get(f"stg-{name}-{num_devices}-{method}", dataclasses.asdict(budget), make)


def dnn_cell(
    cells: Cells, folder: pathlib.Path, name: str, method: str, budget: Budget
) -> dict[str, Any]:
    """Returns a method's makespan and memory on a network with memory limits."""

    def make() -> dict[str, Any]:
        problem = load_dnn_partitioning(folder / "LayerGraphs" / f"{name}.json")
        record, placed = _place(problem, method, budget)
        return record | ({} if placed is None else memory(*problem, placed.schedule))

    return cells.get(f"dnn-{name}-{method}", dataclasses.asdict(budget), make)


def expert_cell(cells: Cells, folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Returns the same for the human expert's split of a network, if there is one.

    The published splits use six accelerators and were made for larger memories: a network
    with fewer gets six here, and the limits may be exceeded.
    """

    def make() -> dict[str, Any]:
        path = folder / "human-experts" / f"{name}_expert.json"
        if not path.exists():
            return {"refused": "no split is published"}
        network = folder / "LayerGraphs" / f"{name}.json"
        num_used = len(parse_json_object(path, read_text(path))["fpgas"])
        num_named = int(np.isfinite(load_dnn_partitioning(network)[1].capacity_bytes).sum())
        count = max(num_used, num_named)
        problem = load_dnn_partitioning(network, num_accelerators=count)
        schedule = dj.simulate_oracle(*problem, load_split(path, count))
        return {
            "makespan_s": dj.makespan_s(schedule),
            "lower_bound_s": dj.lower_bound_s(*problem),
            **memory(*problem, schedule),
        }

    return cells.get(f"dnn-{name}-expert", {}, make)


def memory(graph: TaskGraph, costs: Costs, schedule: Schedule) -> dict[str, Any]:
    """Returns the peak memory per device, and how a schedule uses the accelerators."""
    peak = peak_memory_bytes(graph, costs, schedule)
    limited = np.isfinite(costs.capacity_bytes)
    filled = peak[limited] / costs.capacity_bytes[limited]
    return {
        "peak_bytes": peak.tolist(),
        "filled": float(filled.max(initial=0.0)),  # of the fullest accelerator
        "accelerators": int(np.isin(np.flatnonzero(limited), schedule.placement).sum()),
        "tasks_elsewhere": int((~limited[schedule.placement]).sum()),
    }


def _place(
    problem: tuple[TaskGraph, Costs], method: str, budget: Budget
) -> tuple[dict[str, Any], dj.Placed | None]:
    """Returns the record of a method's placement, and the placement unless it refused.

    Raises:
      KeyboardInterrupt: the method was stopped.
    """
    try:
        placed = dj.place(
            *problem,
            method=method,
            key=jax.random.key(budget.seed),
            budget_s=budget.budget_s,
            max_evaluations=budget.evaluations,
        )
    except ValueError as error:
        return {"method": method, "refused": str(error)}, None
    record = placed_record(placed)
    kept = ("makespan_s", "lower_bound_s", "evaluations", "seconds")
    return {"method": method} | {field: record[field] for field in kept}, placed


def _times(rng: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
    return np.ceil(rng.lognormal(0.0, 0.75, shape) * TICKS_PER_S) / TICKS_PER_S
