"""Which of several placements is best, by the float64 oracle."""

import numpy as np

from doppler_jax.objective import Objective
from doppler_jax.simulator.oracle import simulate_oracle
from doppler_jax.simulator.simulate import simulate
from doppler_jax.types import Costs, Schedule, TaskGraph

NUM_FINALISTS = 16
"""Placements that searches and learners in float32 hand on, to be judged in float64."""


def best_placement(
    graph: TaskGraph, costs: Costs, placements: np.ndarray, links: str = "parallel"
) -> tuple[np.ndarray, Schedule]:
    """Returns the best of placements `[B, N]` and its oracle schedule (`fifo`).

    Ties go to the earlier placement.
    """
    objective = Objective(links)
    makespans_s = simulate(graph, costs, placements, objective=objective).makespan_s
    best = placements[int(np.argmin(makespans_s))]
    return best, simulate_oracle(graph, costs, best, links=links)


def start_order(schedule: Schedule, topological_rank: np.ndarray) -> np.ndarray:
    """Returns priorities `[N]`: each task's position in the order of starts.

    Ties go to the earlier finish (of two tasks that start together on a device the first
    takes no time), then to the topologically earlier task. Under the `priority` queue they
    replay a `fifo` schedule.
    """
    rank = np.empty(len(schedule.start_s), np.int64)
    order = np.lexsort((topological_rank, schedule.finish_s, schedule.start_s))
    rank[order] = np.arange(len(rank))
    return rank
