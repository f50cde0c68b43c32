"""Is a simulated schedule work-conserving? The part of `validate` that judges decisions."""

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import task_edges
from doppler_jax.types import Schedule, TaskGraph


def check_conserving(
    graph: TaskGraph,
    schedule: Schedule,
    edge_arrival_s: np.ndarray,
    ready_s: np.ndarray,
    priority: ArrayLike | None,
    order: np.ndarray,
    slack: float,
) -> None:
    """Raises if a device idles while a task waits for it, or takes another than the first.

    Args:
      graph: the task graph.
      schedule: one that is legal otherwise, times in float64 seconds.
      edge_arrival_s: `[E]` when each edge's tensor is on its reader's device.
      ready_s: `[N]` when each task's last input is there.
      priority: `[N]` ranks of the priority queue, or None for fifo.
      order: `[N]` the tasks by start (`decision_order`).
      slack: seconds by which times may differ. Ready times closer than that are ties
        that either order breaks; equal ones are ties by id.

    Raises:
      ValueError: naming the device, the tasks and the times.
    """
    rank = _queue_rank(ready_s, priority)
    position = np.empty_like(rank)
    position[order] = np.arange(order.size)
    # A zero-length task releases its readers at the instant at which it started: which
    # starts of that instant they were there for is a matter of order, not of time.
    senders, readers = task_edges(graph)
    at_once = (edge_arrival_s == ready_s[readers]) & (
        schedule.start_s[senders] == ready_s[readers]
    )
    released = np.full(graph.num_tasks, -1)
    np.maximum.at(released, readers[at_once], position[senders[at_once]])

    for device in np.unique(schedule.placement):
        waiting = order[schedule.placement[order] == device]
        free_s = 0.0
        while waiting.size:
            v, waiting = waiting[0], waiting[1:]
            start, ready = schedule.start_s[v], ready_s[waiting]
            first_s = max(free_s, min(ready_s[v], ready.min(initial=np.inf)))
            if start > first_s + slack:
                raise ValueError(
                    f"device {device} idles from {first_s:.9g} s, when a task is ready for it, "
                    f"to {start:.9g} s, when task {v} starts"
                )
            is_there = (ready == start) & (released[waiting] < position[v])
            ahead = rank[waiting] < rank[v]
            if priority is None:
                is_there |= ready < start
                ahead &= (ready < ready_s[v] - slack) | (ready == ready_s[v])
            else:
                is_there |= ready < start - slack
            for i in np.flatnonzero(is_there & ahead):
                raise ValueError(
                    f"device {device} starts task {v} (ready at {ready_s[v]:.9g} s) at "
                    f"{start:.9g} s before task {waiting[i]} (ready at {ready[i]:.9g} s), "
                    "which its queue has first"
                )
            free_s = max(free_s, schedule.finish_s[v])


def _queue_rank(ready_s: np.ndarray, priority: ArrayLike | None) -> np.ndarray:
    """Returns each task's place `[N]` in the order (key, id), as if all were ready."""
    key = ready_s if priority is None else np.asarray(priority)
    ids = np.arange(key.size)
    rank = np.empty_like(ids)
    rank[np.lexsort((ids, key))] = ids
    return rank


def decision_order(
    graph: TaskGraph, schedule: Schedule, ready_s: np.ndarray, priority: ArrayLike | None
) -> np.ndarray:
    """Returns the tasks `[N]` by start; those of one instant as the rules must have taken them.

    At one instant a legal schedule starts the best ready task over all idle devices, again
    and again. A task of positive length fills its device, so zero-length ones went before.

    Args:
      graph: the task graph.
      schedule: its schedule.
      ready_s: `[N]` when each task's last input is there.
      priority: `[N]` ranks of the priority queue, or None for fifo.
    """
    rank = _queue_rank(ready_s, priority)
    start, brief = schedule.start_s, schedule.start_s == schedule.finish_s
    order = np.lexsort((rank, start))
    released_by: list[set[int]] = [set() for _ in order]
    for u, v in zip(*task_edges(graph), strict=True):
        if brief[u] and start[u] == start[v]:
            released_by[v].add(u)
    bounds = np.flatnonzero(np.diff(start[order], prepend=-np.inf))[1:]
    for instant in np.split(order, bounds):  # views into `order`, rearranged in place
        left = instant.tolist() if brief[instant].any() else []
        for i in range(len(left)):
            to_come = {u for u in left if brief[u]}
            taken = {schedule.placement[u] for u in to_come}
            instant[i] = next(
                v
                for v in left
                if not released_by[v] & to_come
                and (brief[v] or schedule.placement[v] not in taken)
            )
            left.remove(instant[i])
    return order
