"""Placements that need no insight: one device, round robin, random."""

import numpy as np

from doppler_jax.graphs.build import topological_order
from doppler_jax.types import Costs, TaskGraph


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
