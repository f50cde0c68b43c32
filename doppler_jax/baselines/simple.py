"""Placements that need no insight: one device, round robin, random, and the best of all."""

import numpy as np

from doppler_jax.graphs.build import topological_order
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.types import Costs, TaskGraph

MAX_PLACEMENTS = 1 << 20
"""Devices to the power of tasks, beyond which `brute_force` refuses."""

CHUNK = 1 << 14
"""Placements that `brute_force` simulates in one call, at most."""


def single(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` on the one device of least total compute.

    Raises:
      ValueError: no device can run every task.
    """
    total_s = costs.compute_s.sum(axis=0)
    if not np.isfinite(total_s).any():
        raise ValueError("method 'single': no device can run every task")
    return np.full(graph.num_tasks, int(np.argmin(total_s)))


def round_robin(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` that deals the tasks out in topological order.

    A task passes by devices that cannot run it.
    """
    placement = np.zeros(graph.num_tasks, np.int64)
    for position, v in enumerate(topological_order(graph).tolist()):
        able = np.flatnonzero(np.isfinite(costs.compute_s[v]))
        placement[v] = able[np.searchsorted(able, position % costs.num_devices) % len(able)]
    return placement


def random_placements(costs: Costs, rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns `[count, N]` placements, uniform over the devices that can run each task."""
    able = np.isfinite(costs.compute_s)
    number = rng.integers(0, able.sum(axis=1), (count, len(able)))  # among the able ones
    return np.argsort(~able, axis=1, kind="stable")[np.arange(len(able)), number]


def brute_force(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` of least makespan under `fifo` and `parallel` links.

    It simulates all of them, and of equal ones returns the lexicographically first. As long
    as devices are work-conserving no method can beat it; an optimal schedule (`exact`) may idle
    or reorder, and can be shorter. Memory capacities are not looked at.

    Raises:
      ValueError: there are more than `MAX_PLACEMENTS` placements.
    """
    able = np.isfinite(costs.compute_s)
    count, tasks = costs.num_devices**graph.num_tasks, np.arange(graph.num_tasks)
    if count > MAX_PLACEMENTS:
        raise ValueError(
            f"{graph.num_tasks} tasks on {costs.num_devices} devices have more than "
            f"{MAX_PLACEMENTS} placements; expected a smaller graph"
        )
    finalists = []
    for first in range(0, count, CHUNK):
        numbers = np.arange(first, min(first + CHUNK, count))[:, None]
        placements = numbers // costs.num_devices ** tasks[::-1] % costs.num_devices
        placements = placements[able[tasks, placements].all(axis=1)]
        if len(placements):
            finalists.append(best_placement(graph, costs, placements)[0])
    return best_placement(graph, costs, np.stack(finalists))[0]
