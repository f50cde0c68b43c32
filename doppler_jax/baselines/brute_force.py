"""The best placement of a small graph, by trying them all under `fifo`.

What no placement method can beat as long as devices are work-conserving: an optimal
schedule (`exact`) may idle or reorder, and can be shorter.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from doppler_jax.baselines.exact_model import device_classes
from doppler_jax.costs.build import check_costs
from doppler_jax.graphs.build import check_graph
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.simulator.oracle import makespan_s
from doppler_jax.types import Costs, TaskGraph

MAX_PLACEMENTS = 1 << 20
"""Devices to the power of tasks, beyond which `brute_force` refuses."""

CHUNK = 1 << 14
"""Placements listed, and at most simulated, in one call."""


@dataclasses.dataclass(frozen=True)
class BruteForceResult:
    """The best of all placements, links `parallel`, queue `fifo`."""

    placement: np.ndarray  # [N] int64
    makespan_s: float  # by the float64 oracle
    evaluations: int  # placements simulated, of each set of equivalent ones one


def brute_force(graph: TaskGraph, costs: Costs) -> BruteForceResult:
    """Simulates every placement, but for exchanges of devices that change nothing.

    Memory capacities are not looked at.

    Args:
      graph: the task graph; about 10 tasks.
      costs: its costs, seconds; about 3 devices.

    Returns:
      The placement of least makespan; of equal ones the lexicographically first.

    Raises:
      ValueError: the graph or its costs are invalid, or there are more than
        `MAX_PLACEMENTS` placements.
    """
    check_graph(graph)
    check_costs(graph, costs)
    if costs.num_devices**graph.num_tasks > MAX_PLACEMENTS:
        raise ValueError(
            f"{graph.num_tasks} tasks on {costs.num_devices} devices have more than "
            f"{MAX_PLACEMENTS} placements; expected a smaller graph"
        )
    classes = device_classes(graph, costs)
    finalists, evaluations = [], 0
    for placements in _chunks(costs, classes):
        if len(placements) == 0:
            continue
        evaluations += len(placements)
        finalists.append(best_placement(graph, costs, placements)[0])
    placement, schedule = best_placement(graph, costs, np.stack(finalists))
    return BruteForceResult(placement.astype(np.int64), makespan_s(schedule), evaluations)


def _chunks(costs: Costs, classes: list[list[int]]) -> Iterator[np.ndarray]:
    """Yields placements `[B, N]` in lexicographic order, one of each set of equivalent ones.

    That one uses the devices of every class in ascending order.
    """
    able = np.isfinite(np.asarray(costs.compute_s))
    num_tasks, num_devices = able.shape
    tasks = np.arange(num_tasks)
    weight = num_devices ** tasks[::-1]
    count = num_devices**num_tasks
    for first in range(0, count, CHUNK):
        numbers = np.arange(first, min(first + CHUNK, count))
        placements = numbers[:, None] // weight % num_devices
        keep = able[tasks, placements].all(axis=1)
        for members in classes:
            uses = placements[:, :, None] == np.array(members)
            # The first task on each device; N for one that is not used.
            entry = np.where(uses, tasks[:, None], num_tasks).min(axis=1, initial=num_tasks)
            keep &= (np.diff(entry, axis=1) >= 0).all(axis=1)
        yield placements[keep]
