"""Is this schedule legal? Judges simulated schedules and measured traces alike.

It shares no rule with the simulators: each is checked on the schedule's own times, so
that it can judge any of them.
"""

import dataclasses
from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import task_edges
from doppler_jax.objective import Objective
from doppler_jax.simulator.disciplines import (
    Discipline,
    check_ranks,
    find_discipline,
    rank_order,
)
from doppler_jax.simulator.durations import task_seconds
from doppler_jax.simulator.validate_transfers import (
    check_links,
    check_transfer_seconds,
    check_transfers,
    edge_arrivals,
    input_arrivals,
)
from doppler_jax.types import Costs, Schedule, TaskGraph


def validate(
    graph: TaskGraph,
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    objective: Objective = Objective(),  # noqa: B008, frozen
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
    transfers must keep the rules of the links, and execution must be that of the queue:
    work-conserving, or under `in_order` without overtaking and without further delay. Under
    `parallel` links the transfer records may be left out.

    Args:
      graph: the task graph, N tasks.
      schedule: what to judge.
      costs: seconds of tasks and transfers, D devices.
      objective: whose links count, as for `simulate_oracle`; noise comes as factors.
      queue: one of `disciplines.QUEUES`.
      priority: `[N]` ranks, smallest first; none under `fifo`.
      compute_factor: `[N]` multiplies the seconds of each task.
      transfer_factor: `[T, D]` multiplies those of each tensor's transfer to each device.
      tolerance: slack of every comparison of times, as a fraction of the makespan.
        Each comparison is local, so the default suits float32 schedules; 0 judges
        exactly. Equal ready times are ties by id; ones within the slack of each
        other may be taken in either order.

    Raises:
      ValueError: the first violation found, with its task, device and times.
    """
    links = objective.links
    ranks = check_ranks(graph, queue, priority)
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
    discipline = find_discipline(queue)
    order = _decision_order(graph, schedule, ready_s if ranks is None else ranks, discipline)
    check_links(links, transfers, schedule, order, slack)
    if ranks is not None and discipline.waits:
        _check_in_order(schedule, ready_s, ranks, slack)
    else:
        _check_conserving(graph, schedule, edge_s, ready_s, ranks, order, slack)


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


def _check_conserving(
    graph: TaskGraph,
    schedule: Schedule,
    edge_arrival_s: np.ndarray,
    ready_s: np.ndarray,
    ranks: np.ndarray | None,
    order: np.ndarray,
    slack: float,
) -> None:
    """Raises if a device idles while a task waits for it, or takes another than the first.

    Args:
      graph: the task graph.
      schedule: one that is legal otherwise, times in float64 seconds.
      edge_arrival_s: `[E]` when each edge's tensor is on its reader's device.
      ready_s: `[N]` when each task's last input is there.
      ranks: `[N]` of the queue, or None for fifo.
      order: `[N]` the tasks by start (`_decision_order`).
      slack: seconds by which times may differ. Ready times closer than that are ties
        that either order breaks; equal ones are ties by id.

    Raises:
      ValueError: naming the device, the tasks and the times.
    """
    rank = _positions(ready_s if ranks is None else ranks)
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
        mine = order[schedule.placement[order] == device]
        start_s, finish_s = schedule.start_s[mine], schedule.finish_s[mine]
        idle_s = np.maximum.accumulate(np.append(0.0, finish_s))[:-1]
        first_s = np.maximum(idle_s, np.minimum.accumulate(ready_s[mine][::-1])[::-1])
        idles = _where(start_s > first_s + slack)[:1]
        for k in _overtakers(mine[: idles[0] if idles else None], mine, start_s, ready_s, rank):
            v, waiting = mine[k], mine[k + 1 :]
            start, ready = start_s[k], ready_s[waiting]
            is_there = (ready == start) & (released[waiting] < position[v])
            ahead = rank[waiting] < rank[v]
            if ranks is None:
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
        for k in idles:
            raise ValueError(
                f"device {device} idles from {first_s[k]:.9g} s, when a task is ready for it, "
                f"to {start_s[k]:.9g} s, when task {mine[k]} starts"
            )


def _overtakers(
    some: np.ndarray,
    mine: np.ndarray,
    start_s: np.ndarray,
    ready_s: np.ndarray,
    rank: np.ndarray,
) -> Iterator[int]:
    """Yields which of the first tasks of a device start while one of less rank may be ready.

    These are few, and looked at closer. `mine` are the device's tasks by their starts.
    """
    coming = mine[np.argsort(ready_s[mine], kind="stable")].tolist()
    ready: list[tuple[int, int]] = []
    started, arrived = set(), 0
    for k, v in enumerate(some.tolist()):
        while arrived < len(coming) and ready_s[coming[arrived]] <= start_s[k]:
            heappush(ready, (rank[coming[arrived]], coming[arrived]))
            arrived += 1
        started.add(v)
        while ready and ready[0][1] in started:
            heappop(ready)
        if ready and ready[0][0] < rank[v]:
            yield k


def _check_in_order(
    schedule: Schedule, ready_s: np.ndarray, ranks: np.ndarray, slack: float
) -> None:
    """Raises unless every device takes its tasks by (rank, id), each as soon as it can."""
    free_s = np.zeros(schedule.placement.max(initial=0) + 1)
    last = np.full(free_s.size, -1)
    for v in rank_order(ranks).tolist():
        d, start_s = schedule.placement[v], schedule.start_s[v]
        due_s = max(free_s[d], ready_s[v])
        if start_s < free_s[d] - slack:
            raise ValueError(
                f"{_task(schedule, v)} overtakes task {last[d]}, which comes first in order"
            )
        if start_s > due_s + slack:
            raise ValueError(
                f"device {d} idles from {due_s:.9g} s, when the next task in its order could "
                f"start, to {start_s:.9g} s, when task {v} starts"
            )
        free_s[d], last[d] = max(free_s[d], schedule.finish_s[v]), v


def _positions(key: np.ndarray) -> np.ndarray:
    """Returns each task's place `[N]` in the order (key, id)."""
    position = np.empty(key.size, np.int64)
    position[rank_order(key)] = np.arange(key.size)
    return position


def _decision_order(
    graph: TaskGraph, schedule: Schedule, key: np.ndarray, discipline: Discipline
) -> np.ndarray:
    """Returns the tasks `[N]` by start; those of one instant as the rules must have taken them.

    At one instant a legal schedule starts the best ready task over all idle devices, again
    and again. A task of positive length fills its device, so zero-length ones went before.

    Args:
      graph: the task graph.
      schedule: its schedule.
      key: `[N]` ready times or ranks.
      discipline: whose they are.
    """
    rank = _positions(key)
    start, brief = schedule.start_s, schedule.start_s == schedule.finish_s
    order = np.lexsort((rank, start))
    senders, readers = task_edges(graph)
    at_once = brief[senders] & (start[senders] == start[readers])
    released_by: dict[int, set[int]] = {}
    for u, v in zip(senders[at_once].tolist(), readers[at_once].tolist(), strict=True):
        released_by.setdefault(v, set()).add(u)
    instants_s, ordered_s = np.unique(start[brief]), start[order]
    firsts = np.searchsorted(ordered_s, instants_s, "left")
    ends = np.searchsorted(ordered_s, instants_s, "right")
    for first, end in zip(firsts, ends, strict=True):
        instant = order[first:end]  # a view, rearranged in place
        left = instant.tolist()
        for i in range(len(left)):
            to_come = {u for u in left if brief[u]}
            taken = {schedule.placement[u] for u in to_come}
            heads: dict[int, int] = {}
            for v in left:
                heads.setdefault(schedule.placement[v], v)
            instant[i] = next(
                v
                for v in (heads.values() if discipline.waits else left)
                if not released_by.get(v, set()) & to_come
                and (brief[v] or discipline.waits or schedule.placement[v] not in taken)
            )
            left.remove(instant[i])
    return order


def _where(violated: np.ndarray) -> list[int]:
    return np.flatnonzero(violated).tolist()


def _task(schedule: Schedule, v: int) -> str:
    return (
        f"task {v} on device {schedule.placement[v]} "
        f"({schedule.start_s[v]:.9g} to {schedule.finish_s[v]:.9g} s)"
    )
