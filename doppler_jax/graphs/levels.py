"""Longest paths through a task graph: b-level and t-level.

Host code in float64. A task counts with its mean cost over the devices that can run
it, an edge with the mean transfer time of its tensor over all pairs of devices. What
a graph input costs to move is left out.

Reference: Topcuoglu et al. 2002 (upward and downward rank are b-level and t-level).
"""

import numpy as np

from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.types import Costs, TaskGraph


def mean_compute_s(costs: Costs) -> np.ndarray:
    """Returns the mean seconds `[N]` of each task over the devices that can run it."""
    compute_s = np.asarray(costs.compute_s, dtype=np.float64)
    runnable = np.isfinite(compute_s)
    total_s = np.where(runnable, compute_s, 0.0).sum(axis=1)
    return total_s / np.maximum(runnable.sum(axis=1), 1)


def mean_transfer_s(costs: Costs) -> np.ndarray:
    """Returns the mean seconds `[T]` of moving each tensor between two different devices.

    With a single device nothing moves, and the means are 0.
    """
    num_pairs = costs.num_devices * (costs.num_devices - 1)
    tensor_bytes = np.asarray(costs.tensor_bytes, dtype=np.float64)
    if num_pairs == 0:
        return np.zeros_like(tensor_bytes)
    # The diagonals are 0, so the sums are those over s != d.
    latency_s = np.asarray(costs.latency_s, dtype=np.float64).sum() / num_pairs
    seconds_per_byte = np.asarray(costs.seconds_per_byte, dtype=np.float64).sum() / num_pairs
    return latency_s + tensor_bytes * seconds_per_byte


def b_level(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the seconds `[N]` of the longest path to an exit.

    A task's own cost and the transfers on the way are included: with several outputs,
    the largest of (transfer + b-level of a reader) counts.

    Raises:
      ValueError: the costs are of another graph.
    """
    tail_s, _ = _mean_paths(graph, costs, backwards=True)
    return mean_compute_s(costs) + tail_s


def t_level(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the seconds `[N]` of the longest path from an entry.

    The transfers on the way are included, the task's own cost is not.

    Raises:
      ValueError: the costs are of another graph.
    """
    head_s, _ = _mean_paths(graph, costs)
    return head_s


def b_path(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the next task `[N]` on the longest path to an exit, -1 at exits.

    Ties go to the smaller id.
    """
    return _mean_paths(graph, costs, backwards=True)[1]


def t_path(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the previous task `[N]` on the longest path from an entry, -1 at entries.

    Ties go to the smaller id.
    """
    return _mean_paths(graph, costs)[1]


def _mean_paths(
    graph: TaskGraph, costs: Costs, *, backwards: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `longest_paths` does, with mean costs."""
    check_sizes(graph, costs)
    transfer_s = mean_transfer_s(costs)[graph.edge_tensor]
    return longest_paths(graph, transfer_s, mean_compute_s(costs), backwards=backwards)


def longest_paths(
    graph: TaskGraph, transfer_s: np.ndarray, compute_s: np.ndarray, *, backwards: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the longest path `[N]` up to each task, own cost excluded, and where from `[N]`.

    Backwards, they come from the exits. `transfer_s` is per edge `[E]`, `compute_s` per task.
    """
    order, ends = topological_order(graph), task_edges(graph)
    if backwards:
        order, ends = order[::-1], ends[::-1]
    incoming: list[list[tuple[int, float]]] = [[] for _ in range(order.size)]
    for u, v, seconds in zip(*(x.tolist() for x in (*ends, transfer_s)), strict=True):
        incoming[v].append((u, seconds))
    compute = compute_s.tolist()
    length, origin = [0.0] * order.size, [-1] * order.size
    for v in order.tolist():
        for u, seconds in incoming[v]:
            reach = length[u] + compute[u] + seconds
            is_tie = reach == length[v] and (origin[v] < 0 or u < origin[v])
            if reach > length[v] or is_tie:
                length[v], origin[v] = reach, u
    return np.array(length, dtype=np.float64), np.array(origin, dtype=np.int64)


def check_sizes(graph: TaskGraph, costs: Costs) -> None:
    """Raises `ValueError` where the costs are of another graph."""
    expected = (graph.num_tasks, graph.num_tensors)
    given = (costs.compute_s.shape[0], costs.tensor_bytes.shape[0])
    if given != expected:
        raise ValueError(
            f"costs are of {given[0]} tasks and {given[1]} tensors, "
            f"the graph has {expected[0]} and {expected[1]}"
        )
