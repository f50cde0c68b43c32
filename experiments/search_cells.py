"""The cells of `experiments.search`: one method on one problem, computed once and kept."""

import pathlib
import time
from functools import cache
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.learned import elite_placements, policy_candidates
from doppler_jax.policies.features import make_problem
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.training.checkpoint import Policy
from doppler_jax.training.train import train_policy
from doppler_jax.types import Costs, TaskGraph
from experiments.cells import Cells


@cache
def load_problem(graphs: pathlib.Path, name: str) -> tuple[TaskGraph, Costs]:
    """Returns a problem by name: a published graph on 4 devices, or a generated one.

    `random_layered_1k` and `llama_8` are on `p100x4`, `random_layered_4k` and `llama_32` on
    `v100x8`; all are cut uniformly, for as many shards as there are devices.
    """
    if (graphs / f"{name}.txt").exists():
        graph = dj.load_graph(graphs / f"{name}.txt")
        return graph, dj.reference_costs(graph, num_devices=4)
    workload, cluster_name = {
        "random_layered_1k": (dj.make_workload("random_layered", num_tasks=250), "p100x4"),
        "llama_8": (dj.make_workload("llama", "paper", num_layers=8), "p100x4"),
        "random_layered_4k": (dj.make_workload("random_layered", num_tasks=500), "v100x8"),
        "llama_32": (dj.make_workload("llama", "paper", num_layers=32), "v100x8"),
    }[name]
    cluster = dj.make_cluster(cluster_name)
    program = dj.trace(workload.fn, *workload.args)
    graph = dj.partition(
        program, num_shards=cluster.num_devices, strategy="uniform", cluster=cluster
    ).graph
    return graph, dj.make_costs(graph, cluster)


def learn_cell(
    cells: Cells, graphs: pathlib.Path, name: str, budget_s: float, seed: int
) -> dict[str, Any]:
    """Returns what stages 1 and 2 make of a graph within seconds, compilation included."""

    def make() -> dict[str, Any]:
        graph, costs = load_problem(graphs, name)
        jax.clear_caches()
        began = time.monotonic()
        problem = make_problem(graph, costs)
        trained = train_policy(problem, jax.random.key(seed), budget_s=budget_s)
        seconds = time.monotonic() - began
        found = elite_placements(trained.state, graph.num_tasks)
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


def compare_cell(
    cells: Cells,
    graphs: pathlib.Path,
    name: str,
    links: str,
    method: str,
    evaluations: int,
    seed: int,
) -> dict[str, Any]:
    """Returns what a method finds within a number of simulated executions."""

    def make() -> dict[str, Any]:
        placed = dj.place(
            *load_problem(graphs, name),
            method=method,
            links=links,
            key=jax.random.key(seed),
            max_evaluations=evaluations,
        )
        return {
            "makespan_s": placed.makespan_s,
            "lower_bound_s": placed.lower_bound_s,
            "evaluations": placed.evaluations,
            "seconds": placed.seconds,
            "compile_s": placed.compile_s,
            "curve": np.stack(
                [placed.curve.evaluations, placed.curve.seconds, placed.curve.makespan_s]
            ).tolist(),
        }

    label = f"{name}-{links}-{method.replace('+', '_')}-{evaluations}-{seed}"
    return cells.get(label, {"evaluations": evaluations}, make)
