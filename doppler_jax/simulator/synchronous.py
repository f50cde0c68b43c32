"""Bulk-synchronous execution of a placement: the contrast to work-conserving execution."""

import heapq
import math

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.simulator.durations import check_placement, task_seconds
from doppler_jax.simulator.oracle import (
    Links,
    Transfer,
    list_transfers,
    make_schedule,
)
from doppler_jax.types import Costs, Schedule, TaskGraph


def simulate_synchronous(
    graph: TaskGraph,
    costs: Costs,
    placement: ArrayLike,
    *,
    links: str = "parallel",
    compute_factor: ArrayLike | None = None,
    transfer_factor: ArrayLike | None = None,
    input_factor: ArrayLike | None = None,
) -> Schedule:
    """Returns the bulk-synchronous schedule of one placement, transfers included.

    Tasks run level by level (`hop_levels`), each device those of a level in the order of
    their ids. When the last of a level has finished, all its tensors are requested by
    the devices that read them; when the last has arrived, the next level starts. Graph
    inputs with a home are moved before the first level.

    Args:
      graph: the task graph, N tasks and T tensors.
      costs: its costs on D devices, seconds.
      placement: `[N]` device of each task.
      links: `parallel`, `serial` or `duplex`, as for `simulate_oracle`.
      compute_factor: `[N]` multiplies the seconds of each task.
      transfer_factor: `[T, D]` multiplies those of each tensor's transfer to each device.
      input_factor: `[I, D]` multiplies those of each graph input's.

    Returns:
      The schedule. Behind a task that cannot run on its device everything is at inf.

    Raises:
      ValueError: a name or a shape is wrong, a device does not exist, or a factor is no
        positive number.
    """
    device = check_placement(graph, costs.num_devices, placement)
    task_s = task_seconds(graph, costs, device, compute_factor)
    transfers = list_transfers(graph, costs, device, transfer_factor, input_factor)
    start_s, finish_s = np.zeros(graph.num_tasks), np.zeros(graph.num_tasks)
    carried: list[Transfer] = []
    barrier_s = _carry(transfers[-1], links, 0.0, carried)
    level = hop_levels(graph)
    for tasks in (np.flatnonzero(level == k) for k in range(level.max(initial=-1) + 1)):
        free_s = np.full(costs.num_devices, barrier_s)
        for v in tasks:
            start_s[v] = free_s[device[v]]
            finish_s[v] = free_s[device[v]] = start_s[v] + task_s[v]
        sent = [transfer for v in tasks for transfer in transfers[v]]
        barrier_s = _carry(sent, links, float(free_s.max()), carried)
    return make_schedule(device, start_s, finish_s, carried)


def hop_levels(graph: TaskGraph) -> np.ndarray:
    """Returns the level `[N]` of each task: the edges of the longest path from an entry."""
    senders, readers = task_edges(graph)
    successors: list[list[int]] = [[] for _ in range(graph.num_tasks)]
    for u, v in zip(senders.tolist(), readers.tolist(), strict=True):
        successors[u].append(v)
    level = np.zeros(graph.num_tasks, np.int64)
    for u in topological_order(graph).tolist():
        level[successors[u]] = np.maximum(level[successors[u]], level[u] + 1)
    return level


def _carry(
    requests: list[Transfer], links: str, barrier_s: float, carried: list[Transfer]
) -> float:
    """Carries transfers that are all requested at the barrier; returns when the last ends."""
    network, now = Links(links), barrier_s
    ends: list[tuple[float, int, Transfer]] = []
    if math.isinf(now):
        return now
    for transfer in requests:
        network.request(transfer, now)
    while True:
        while ends and ends[0][0] == now:
            network.end(heapq.heappop(ends)[2])
        started = network.start_next(now)
        if started is not None:
            heapq.heappush(ends, (now + started.duration_s, len(carried), started))
            carried.append(started)
        elif ends:
            now = ends[0][0]
        else:
            return now
