"""Which of several placements is best, by the float64 oracle."""

import numpy as np

from doppler_jax.objective import Objective
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.simulate import simulate
from doppler_jax.types import Costs, Schedule, TaskGraph

NUM_FINALISTS = 16
"""Placements that the oracle ranks again; far fewer differ by rounding alone."""


def best_placement(
    graph: TaskGraph, costs: Costs, placements: np.ndarray, links: str = "parallel"
) -> tuple[np.ndarray, Schedule]:
    """Returns the best of placements `[B, N]` and its oracle schedule (`fifo`).

    The vectorised simulator chooses the finalists, the oracle among them; ties go to the
    earlier placement.
    """
    if len(placements) > NUM_FINALISTS:
        rough_s = simulate(
            graph, costs, placements, objective=Objective(links), schedule=False
        ).makespan_s
        chosen = np.sort(np.argsort(np.asarray(rough_s), kind="stable")[:NUM_FINALISTS])
        placements = placements[chosen]
    schedules = [
        simulate_oracle(graph, costs, placement, links=links) for placement in placements
    ]
    best = int(np.argmin([makespan_s(schedule) for schedule in schedules]))
    return placements[best], schedules[best]


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
