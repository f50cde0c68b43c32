"""What list schedulers share: a schedule that grows task by task.

Links are `parallel`, as in the simulator: a tensor leaves for every device that reads it
when its producer finishes, once per device, and arrives after its transfer time.
"""

from bisect import bisect_right, insort

import numpy as np

from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.padded import input_ready_s
from doppler_jax.types import Costs, Schedule, TaskGraph


def list_readers(graph: TaskGraph) -> list[list[int]]:
    """Returns, per task, the reader of each edge that leaves it; repeated per tensor."""
    readers: list[list[int]] = [[] for _ in range(graph.num_tasks)]
    for u, v in zip(*(ends.tolist() for ends in task_edges(graph)), strict=True):
        readers[u].append(v)
    return readers


class ListSchedule:
    """A schedule that grows by one task at a time; a task comes after its producers."""

    def __init__(self, graph: TaskGraph, costs: Costs) -> None:
        n = graph.num_tasks
        senders, receivers = task_edges(graph)
        by_reader = np.argsort(receivers, kind="stable")
        self._first_edge = np.searchsorted(receivers[by_reader], np.arange(n + 1)).tolist()
        self._sender = senders[by_reader]
        self._bytes = np.asarray(costs.tensor_bytes, np.float64)[graph.edge_tensor][by_reader]
        self._latency_s = np.asarray(costs.latency_s, np.float64)
        self._seconds_per_byte = np.asarray(costs.seconds_per_byte, np.float64)
        self._input_ready_s = input_ready_s(graph, costs)
        self._busy = [_Busy() for _ in range(costs.num_devices)]
        self.compute_s = np.asarray(costs.compute_s, np.float64)
        self.placement = np.full(n, -1)
        self.start_s = np.zeros(n)
        self.finish_s = np.zeros(n)

    def released_s(self, task: int) -> float:
        """Returns when the last producer of a task finishes, seconds; 0 without one."""
        edges = slice(self._first_edge[task], self._first_edge[task + 1])
        return float(self.finish_s[self._sender[edges]].max(initial=0.0))

    def arrival_s(self, task: int) -> np.ndarray:
        """Returns when all inputs of a task can be on each device, `[D]` seconds."""
        edges = slice(self._first_edge[task], self._first_edge[task + 1])
        sender = self._sender[edges]
        source = self.placement[sender]
        move_s = self._bytes[edges, None] * self._seconds_per_byte[source]
        move_s += self._latency_s[source]
        there_s = self.finish_s[sender, None] + move_s
        return np.maximum(self._input_ready_s[task], there_s.max(axis=0, initial=0.0))

    def earliest_start_s(self, task: int) -> np.ndarray:
        """Returns the start `[D]` of a task in the first gap that holds it, seconds.

        A gap ends where another task starts, or never; inf where the device cannot run it.
        """
        ready_s, long_s = self.arrival_s(task).tolist(), self.compute_s[task].tolist()
        return np.array(
            [busy.first_gap(*at) for busy, *at in zip(self._busy, ready_s, long_s, strict=True)]
        )

    def put(self, task: int, device: int, start_s: float) -> None:
        """Runs a task on a device from `start_s` on."""
        self.placement[task] = device
        self.start_s[task] = start_s
        self.finish_s[task] = start_s + self.compute_s[task, device]
        self._busy[device].add(start_s, float(self.finish_s[task]))

    def schedule(self) -> Schedule:
        """Returns the plan; its transfers, left out, follow from the finish times."""
        none, never = np.zeros(0, np.int64), np.zeros(0)
        return Schedule(
            placement=self.placement.astype(np.int64),
            start_s=self.start_s,
            finish_s=self.finish_s,
            transfer_tensor=none,
            transfer_source=none,
            transfer_destination=none,
            transfer_start_s=never,
            transfer_finish_s=never,
        )


class _Busy:
    """When one device runs tasks: every one, and periods of tasks without a pause between.

    Periods are few where tasks are many, so that a gap is found by looking at few of them.
    """

    def __init__(self) -> None:
        self._tasks: list[tuple[float, float]] = []
        self._begins: list[float] = []  # of periods
        self._ends: list[float] = []

    def add(self, start_s: float, finish_s: float) -> None:
        """Notes a task, which overlaps with none."""
        insort(self._tasks, (start_s, finish_s))
        begins, ends = self._begins, self._ends
        i = bisect_right(begins, start_s)  # the period behind
        follows = i > 0 and ends[i - 1] >= start_s
        if i < len(begins) and begins[i] == finish_s:
            begins[i] = begins[i - 1] if follows else start_s
            if follows:
                del begins[i - 1], ends[i - 1]
        elif follows:
            ends[i - 1] = max(ends[i - 1], finish_s)
        else:
            begins.insert(i, start_s)
            ends.insert(i, finish_s)

    def first_gap(self, ready_s: float, long_s: float) -> float:
        """Returns when a task of `long_s`, ready at `ready_s`, can start; inf if never."""
        if long_s == np.inf:
            return np.inf
        begin_s, begins, ends = ready_s, self._begins, self._ends
        if ends and ends[-1] + long_s / 2 == ends[-1]:  # it may fit where nothing pauses
            return self._between_tasks(ready_s, long_s)
        for i in range(bisect_right(ends, ready_s), len(ends)):
            if begin_s + long_s <= begins[i]:
                break
            begin_s = ends[i]
        return begin_s

    def _between_tasks(self, ready_s: float, long_s: float) -> float:
        """Does what `first_gap` does for a task so short that it fits where nothing pauses."""
        begin_s, tasks = ready_s, self._tasks
        for i in range(bisect_right(tasks, ready_s, key=lambda task: task[1]), len(tasks)):
            if begin_s + long_s <= tasks[i][0]:
                break
            begin_s = tasks[i][1]
        return begin_s
