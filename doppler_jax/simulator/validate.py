"""Is this schedule legal? Judges simulated schedules and measured traces alike.

It shares no rule with the simulators: each is checked on the schedule's own times, so
that it can judge any of them.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import task_edges
from doppler_jax.objective import LINKS
from doppler_jax.simulator.conserving import check_conserving, decision_order
from doppler_jax.simulator.durations import task_seconds
from doppler_jax.simulator.link_rules import check_links
from doppler_jax.simulator.transfer_rules import (
    check_transfer_seconds,
    check_transfers,
    edge_arrivals,
    input_arrivals,
)
from doppler_jax.types import Costs, Schedule, TaskGraph

QUEUES = ("fifo", "priority", "random")


def validate(
    graph: TaskGraph,
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    links: str = "parallel",
    queue: str = "fifo",
    priority: ArrayLike | None = None,
    compute_factor: ArrayLike | None = None,
    transfer_factor: ArrayLike | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Raises unless the schedule is a legal execution of the graph.

    Without `costs` (a measured trace) only legality is asked: every task once, one
    at a time per device, no operand read before it is there, and one transfer record
    for every (tensor, destination) that needs one; those of graph inputs may be left out.
    With `costs` (a simulated schedule) durations must be those of the costs as well,
    transfers must keep the rules of the links, and execution must be work-conserving in
    the order of the queue. Under `parallel` links the transfer records may be left out.

    Args:
      graph: the task graph, N tasks.
      schedule: what to judge.
      costs: seconds of tasks and transfers, D devices.
      links: "parallel", "serial" or "duplex", as for `simulate_oracle`.
      queue: "fifo" (ready time, then id), "priority" (given rank, then id) or "random"
        (the same).
      priority: `[N]` ranks of the priority queue, smallest first.
      compute_factor: `[N]` multiplies the seconds of each task.
      transfer_factor: `[T, D]` multiplies those of each tensor's transfer to each device.
      tolerance: slack of every comparison of times, as a fraction of the makespan.
        Each comparison is local, so the default suits float32 schedules; 0 judges
        exactly. Equal ready times are ties by id; ones within the slack of each
        other may be taken in either order.

    Raises:
      ValueError: the first violation found, with its task, device and times.
    """
    for what, name, known in (("links", links, LINKS), ("queue", queue, QUEUES)):
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; known: {list(known)}")
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance}; expected a number >= 0")
    schedule = _as_arrays(schedule)
    _check_tasks(graph, schedule, costs)
    slack = tolerance * schedule.finish_s.max(initial=0.0)
    _check_times(schedule, slack)
    _check_overlap(schedule, slack)
    if costs is not None:
        _check_durations(graph, schedule, costs, compute_factor, slack)
    transfers = check_transfers(graph, schedule, slack)
    edge_s = edge_arrivals(
        graph, schedule, transfers, costs if links == "parallel" else None, transfer_factor
    )
    derive = links == "parallel" or costs is None
    input_s = input_arrivals(graph, schedule, transfers, costs, derive=derive)
    _check_reads(graph, schedule, edge_s, input_s, slack)
    if costs is None:
        return
    check_transfer_seconds(transfers, costs, transfer_factor, slack)
    ready_s = np.zeros(graph.num_tasks)
    np.maximum.at(ready_s, graph.edge_reader, edge_s)
    np.maximum.at(ready_s, graph.input_edge_reader, input_s)
    if queue == "fifo":
        priority = None
    elif priority is None or np.shape(priority) != ready_s.shape:
        raise ValueError(f"queue {queue!r} needs priority of shape {ready_s.shape}")
    order = decision_order(graph, schedule, ready_s, priority)
    check_links(links, transfers, schedule, order, slack)
    check_conserving(graph, schedule, edge_s, ready_s, priority, order, slack)


def _as_arrays(schedule: Schedule) -> Schedule:
    fields = {}
    for field in dataclasses.fields(schedule):
        array = np.asarray(getattr(schedule, field.name))
        if array.ndim != 1:
            raise ValueError(f"{field.name} must have one dimension, has shape {array.shape}")
        is_time = field.name.endswith("_s")
        if array.size and not is_time and not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{field.name} must hold integers, holds {array.dtype}")
        fields[field.name] = array.astype(np.float64 if is_time else np.int64)
    return Schedule(**fields)


def _check_tasks(graph: TaskGraph, schedule: Schedule, costs: Costs | None) -> None:
    """Shapes and ids: every task has one device and two times."""
    n = graph.num_tasks
    for name in ("placement", "start_s", "finish_s"):
        if (shape := getattr(schedule, name).shape) != (n,):
            raise ValueError(f"{name} has shape {shape}, expected ({n},)")
    for name in ("source", "destination", "start_s", "finish_s"):
        if getattr(schedule, f"transfer_{name}").shape != schedule.transfer_tensor.shape:
            raise ValueError(
                f"transfer_{name} has not the {schedule.transfer_tensor.size} entries of "
                "transfer_tensor"
            )
    if costs is not None and np.shape(costs.compute_s)[0] != n:
        raise ValueError(f"costs are of {np.shape(costs.compute_s)[0]} tasks, expected {n}")
    limit = np.inf if costs is None else costs.num_devices
    for v in _where((schedule.placement < 0) | (schedule.placement >= limit)):
        raise ValueError(f"task {v} is on device {schedule.placement[v]}, of {limit} devices")
    for i in _where(graph.input_home >= limit):
        raise ValueError(
            f"graph input {i} lies on device {graph.input_home[i]}, which has no costs"
        )


def _check_times(schedule: Schedule, slack: float) -> None:
    start, finish = schedule.start_s, schedule.finish_s
    for v in _where(~np.isfinite(start) | ~np.isfinite(finish)):
        raise ValueError(f"{_task(schedule, v)} has a time that is not finite")
    for v in _where(start < -slack):
        raise ValueError(f"{_task(schedule, v)} starts before time 0")
    for v in _where(finish < start):
        raise ValueError(f"{_task(schedule, v)} finishes before it starts")


def _check_overlap(schedule: Schedule, slack: float) -> None:
    """One task at a time on a device; a zero-length task may touch its neighbours."""
    order = np.lexsort((schedule.finish_s, schedule.start_s, schedule.placement))
    before, after = order[:-1], order[1:]
    same = schedule.placement[before] == schedule.placement[after]
    for i in _where(same & (schedule.start_s[after] < schedule.finish_s[before] - slack)):
        raise ValueError(
            f"{_task(schedule, before[i])} and {_task(schedule, after[i])} overlap"
        )


def _check_durations(
    graph: TaskGraph, schedule: Schedule, costs: Costs, factor: ArrayLike | None, slack: float
) -> None:
    seconds = task_seconds(graph, costs, schedule.placement, factor)
    for v in _where(~np.isfinite(seconds)):
        raise ValueError(f"{_task(schedule, v)}: the device cannot run the task")
    for v in _where(np.abs(schedule.start_s + seconds - schedule.finish_s) > slack):
        raise ValueError(f"{_task(schedule, v)}: its cost is {seconds[v]:.9g} s")


def _check_reads(
    graph: TaskGraph, schedule: Schedule, edge_s: np.ndarray, input_s: np.ndarray, slack: float
) -> None:
    """No task starts before its operands `[E]` and graph inputs `[F]` are on its device."""
    senders, readers = task_edges(graph)
    for e in _where(schedule.start_s[readers] < edge_s - slack):
        raise ValueError(
            f"{_task(schedule, readers[e])} starts before tensor {graph.edge_tensor[e]} of "
            f"{_task(schedule, senders[e])} is there at {edge_s[e]:.9g} s"
        )
    readers = graph.input_edge_reader
    for f in _where(schedule.start_s[readers] < input_s - slack):
        raise ValueError(
            f"{_task(schedule, readers[f])} starts before graph input "
            f"{graph.input_edge_input[f]} is there at {input_s[f]:.9g} s"
        )


def _where(violated: np.ndarray) -> list[int]:
    return np.flatnonzero(violated).tolist()


def _task(schedule: Schedule, v: int) -> str:
    return (
        f"task {v} on device {schedule.placement[v]} "
        f"({schedule.start_s[v]:.9g} to {schedule.finish_s[v]:.9g} s)"
    )
