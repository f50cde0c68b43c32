"""Is this schedule legal? Judges simulated schedules and measured traces alike.

It shares no code with the simulators: every rule is checked on the schedule's own
times, so that it can judge any of them.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import task_edges
from doppler_jax.simulator.conserving import check_conserving
from doppler_jax.types import RESIDENT, Costs, Schedule, TaskGraph

QUEUES = ("fifo", "priority")


def validate(
    graph: TaskGraph,
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    queue: str = "fifo",
    priority: ArrayLike | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Raises unless the schedule is a legal execution of the graph.

    Without `costs` (a measured trace) only legality is asked: every task once, one
    at a time per device, no operand read before it is there, and one transfer record
    for every (tensor, destination) that needs one. With `costs` (a simulated schedule
    under `parallel` links) durations and arrivals must be those of the costs as well,
    and execution work-conserving in the order of the queue; transfer records may then
    be left out.

    Args:
      graph: the task graph, N tasks.
      schedule: what to judge.
      costs: seconds of tasks and transfers, D devices.
      queue: "fifo" (ready time, then id) or "priority" (given rank, then id).
      priority: `[N]` ranks of the priority queue, smallest first.
      tolerance: slack of every comparison of times, as a fraction of the makespan.
        Each comparison is local, so the default suits float32 schedules; 0 judges
        exactly. Equal ready times are ties by id; ones within the slack of each
        other may be taken in either order.

    Raises:
      ValueError: the first violation found, with its task, device and times.
    """
    if queue not in QUEUES:
        raise ValueError(f"unknown queue {queue!r}; known: {list(QUEUES)}")
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance}; expected a number >= 0")
    schedule = _as_arrays(schedule)
    _check_tasks(graph, schedule, costs)
    slack = tolerance * schedule.finish_s.max(initial=0.0)
    _check_times(schedule, slack)
    _check_overlap(schedule, slack)
    if costs is not None:
        _check_durations(schedule, costs, slack)
    edge_arrival_s = _edge_arrivals(graph, schedule, costs, slack)
    _check_reads(graph, schedule, edge_arrival_s, slack)
    if costs is None:
        return
    input_arrival_s = _input_arrivals(graph, schedule, costs, slack)
    ready_s = np.zeros(graph.num_tasks)
    np.maximum.at(ready_s, graph.edge_reader, edge_arrival_s)
    np.maximum.at(ready_s, graph.input_edge_reader, input_arrival_s)
    if queue == "fifo":
        priority = None
    elif priority is None or np.shape(priority) != ready_s.shape:
        raise ValueError(f"queue 'priority' needs priority of shape {ready_s.shape}")
    check_conserving(graph, schedule, edge_arrival_s, ready_s, priority, slack)


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


def _check_durations(schedule: Schedule, costs: Costs, slack: float) -> None:
    tasks = np.arange(schedule.placement.shape[0])
    compute = np.asarray(costs.compute_s, dtype=np.float64)[tasks, schedule.placement]
    for v in _where(~np.isfinite(compute)):
        raise ValueError(f"{_task(schedule, v)}: the device cannot run the task")
    for v in _where(np.abs(schedule.start_s + compute - schedule.finish_s) > slack):
        raise ValueError(f"{_task(schedule, v)}: its cost is {compute[v]:.9g} s")


def _edge_arrivals(
    graph: TaskGraph, schedule: Schedule, costs: Costs | None, slack: float
) -> np.ndarray:
    """Returns when each edge's tensor is on its reader's device, `[E]` seconds."""
    senders, readers = task_edges(graph)
    source, destination = schedule.placement[senders], schedule.placement[readers]
    arrival = schedule.finish_s[senders]
    moves = source != destination
    if costs is not None and schedule.transfer_tensor.size == 0:
        wire = _transfer_s(costs, costs.tensor_bytes, graph.edge_tensor, source, destination)
        return np.where(moves, arrival + wire, arrival)
    _check_transfers(graph, schedule, slack)
    if costs is not None:
        _check_transfer_costs(graph, schedule, costs, slack)
    pairs = zip(schedule.transfer_tensor, schedule.transfer_destination, strict=True)
    record = {pair: k for k, pair in enumerate(pairs)}
    for e in _where(moves):
        pair = (graph.edge_tensor[e], destination[e])
        if pair not in record:
            raise ValueError(
                f"tensor {pair[0]} has no transfer to device {pair[1]}, where "
                f"{_task(schedule, readers[e])} reads it from {_task(schedule, senders[e])}"
            )
        arrival[e] = schedule.transfer_finish_s[record[pair]]
    return arrival


def _check_transfers(graph: TaskGraph, schedule: Schedule, slack: float) -> None:
    """Each record moves a tensor from its producer, once, to where it is read."""
    x, destination = schedule.transfer_tensor, schedule.transfer_destination
    start, finish = schedule.transfer_start_s, schedule.transfer_finish_s
    for k in _where((x < 0) | (x >= graph.num_tensors)):
        raise ValueError(f"transfer_tensor[{k}] is {x[k]}, of {graph.num_tensors} tensors")
    producer = graph.tensor_producer[x]
    places = schedule.placement[graph.edge_reader]
    needed = set(zip(graph.edge_tensor.tolist(), places.tolist(), strict=True))
    seen = set()
    for k, pair in enumerate(zip(x.tolist(), destination.tolist(), strict=True)):
        what = _transfer(schedule, k)
        if pair in seen:
            raise ValueError(f"{what} happens twice")
        if schedule.transfer_source[k] != schedule.placement[producer[k]]:
            raise ValueError(f"{what} does not leave from {_task(schedule, producer[k])}")
        if pair not in needed or pair[1] == schedule.transfer_source[k]:
            raise ValueError(f"{what} is needless: no task there waits for it")
        if not (np.isfinite(start[k]) and np.isfinite(finish[k])):
            raise ValueError(f"{what} has a time that is not finite")
        if finish[k] < start[k]:
            raise ValueError(f"{what} finishes before it starts")
        if start[k] < schedule.finish_s[producer[k]] - slack:
            raise ValueError(f"{what} starts before {_task(schedule, producer[k])} finishes")
        seen.add(pair)


def _check_transfer_costs(
    graph: TaskGraph, schedule: Schedule, costs: Costs, slack: float
) -> None:
    """Under `parallel` links a transfer starts at once and takes what its link costs."""
    x = schedule.transfer_tensor
    made = schedule.finish_s[graph.tensor_producer[x]]
    wire = _transfer_s(
        costs, costs.tensor_bytes, x, schedule.transfer_source, schedule.transfer_destination
    )
    start, finish = schedule.transfer_start_s, schedule.transfer_finish_s
    for k in _where((start > made + slack) | (np.abs(start + wire - finish) > slack)):
        raise ValueError(
            f"{_transfer(schedule, k)} should run from {made[k]:.9g} to "
            f"{made[k] + wire[k]:.9g} s"
        )


def _check_reads(
    graph: TaskGraph, schedule: Schedule, arrival_s: np.ndarray, slack: float
) -> None:
    senders, readers = task_edges(graph)
    for e in _where(schedule.start_s[readers] < arrival_s - slack):
        raise ValueError(
            f"{_task(schedule, readers[e])} starts before tensor {graph.edge_tensor[e]} of "
            f"{_task(schedule, senders[e])} is there at {arrival_s[e]:.9g} s"
        )


def _input_arrivals(
    graph: TaskGraph, schedule: Schedule, costs: Costs, slack: float
) -> np.ndarray:
    """Returns when each graph input is on its reader's device, `[F]` seconds, and checks it."""
    inputs, readers = graph.input_edge_input, graph.input_edge_reader
    home, device = graph.input_home[inputs], schedule.placement[readers]
    for f in _where(home >= costs.num_devices):
        raise ValueError(
            f"graph input {inputs[f]} lies on device {home[f]}, which has no costs"
        )
    source = np.where(home == RESIDENT, device, home)
    wire = _transfer_s(costs, costs.input_bytes, inputs, source, device)
    arrival = np.where(source == device, 0.0, wire)
    for f in _where(schedule.start_s[readers] < arrival - slack):
        raise ValueError(
            f"{_task(schedule, readers[f])} starts before graph input {inputs[f]} is there "
            f"at {arrival[f]:.9g} s"
        )
    return arrival


def _transfer_s(
    costs: Costs,
    sizes: np.ndarray,
    ids: np.ndarray,
    source: np.ndarray,
    destination: np.ndarray,
) -> np.ndarray:
    """Returns the seconds that moving each item from `source` to `destination` takes."""
    latency = np.asarray(costs.latency_s, dtype=np.float64)[source, destination]
    per_byte = np.asarray(costs.seconds_per_byte, dtype=np.float64)[source, destination]
    return latency + np.asarray(sizes, dtype=np.float64)[ids] * per_byte


def _where(violated: np.ndarray) -> list[int]:
    return np.flatnonzero(violated).tolist()


def _task(schedule: Schedule, v: int) -> str:
    return (
        f"task {v} on device {schedule.placement[v]} "
        f"({schedule.start_s[v]:.9g} to {schedule.finish_s[v]:.9g} s)"
    )


def _transfer(schedule: Schedule, k: int) -> str:
    return (
        f"transfer of tensor {schedule.transfer_tensor[k]} from device "
        f"{schedule.transfer_source[k]} to {schedule.transfer_destination[k]} "
        f"({schedule.transfer_start_s[k]:.9g} to {schedule.transfer_finish_s[k]:.9g} s)"
    )
