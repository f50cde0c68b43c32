"""Is this schedule legal? Judges simulated schedules and measured traces alike.

What holds for every execution is checked on whole arrays. What the costs, the links and the
queue demand is checked by running the schedule again by its own times. With the oracle it
shares durations and disciplines, and no event loop, so that it can judge any simulator.
"""

import dataclasses
from collections.abc import Hashable
from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.objective import Objective
from doppler_jax.simulator.activities import Activities, list_activities, list_waits, pairs
from doppler_jax.simulator.disciplines import (
    Discipline,
    ReadySet,
    check_ranks,
    find_discipline,
    rank_order,
)
from doppler_jax.simulator.durations import (
    item_sources,
    list_reads,
    move_seconds,
    task_seconds,
)
from doppler_jax.types import RESIDENT, Costs, Schedule, TaskGraph


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
    input_factor: ArrayLike | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Raises unless the schedule is a legal execution of the graph.

    Without `costs` (a measured trace) only legality is asked: every task once, one
    at a time per device and under `in_order` by rank, no operand read before it is there,
    and one transfer record for every (tensor, destination) that needs one; those of graph
    inputs may be left out.
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
      input_factor: `[I, D]` multiplies those of each graph input's.
      tolerance: slack of every comparison of times, as a fraction of the makespan.
        Each comparison is local, so the default suits float32 schedules; 0 judges
        exactly. Equal ready times are ties by id; ones within the slack of each
        other may be taken in either order.

    Raises:
      ValueError: the first violation found, with its task, device and times.
    """
    ranks = check_ranks(graph, queue, priority)
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance}; expected a number >= 0")
    schedule = _as_arrays(graph, schedule)
    slack = tolerance * schedule.finish_s.max(initial=0.0)
    _check_ids(graph, schedule, costs)
    move_s = np.empty((0, 0))
    if costs is not None:
        factors = transfer_factor, input_factor
        move_s = move_seconds(graph, costs, schedule.placement, *factors)
        if objective.links == "parallel":
            schedule = _with_transfers(graph, schedule, move_s)
    done = list_activities(schedule)
    _check_records(graph, done)
    waits = list_waits(graph, done, need_inputs=costs is not None)
    _check_times(done, waits, slack)
    if costs is None:
        if ranks is not None and find_discipline(queue).waits:
            _check_sequence(done, ranks, slack)
    else:
        seconds = task_seconds(graph, costs, schedule.placement, compute_factor)
        moved = slice(graph.num_tasks, None)
        seconds = np.append(seconds, move_s[done.item[moved], done.device[moved]])
        for v in _where(~np.isfinite(seconds)):
            raise ValueError(f"{done.describe(v)}: the device cannot run the task")
        for k in _where(np.abs(done.start_s + seconds - done.finish_s) > slack):
            raise ValueError(f"{done.describe(k)} should take {seconds[k]:.9g} s")
        _Replay(done, waits, objective.links, find_discipline(queue), ranks, slack).run()


def _as_arrays(graph: TaskGraph, schedule: Schedule) -> Schedule:
    fields = {}
    for field in dataclasses.fields(schedule):
        array, is_time = np.asarray(getattr(schedule, field.name)), field.name.endswith("_s")
        is_transfer = field.name.startswith("transfer")
        size = np.size(schedule.transfer_tensor) if is_transfer else graph.num_tasks
        if array.shape != (size,):
            raise ValueError(f"{field.name} has shape {array.shape}, expected ({size},)")
        if array.size and not is_time and not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{field.name} must hold integers, holds {array.dtype}")
        fields[field.name] = array.astype(np.float64 if is_time else np.int64)
    return Schedule(**fields)


def _check_ids(graph: TaskGraph, schedule: Schedule, costs: Costs | None) -> None:
    limit = np.inf if costs is None else costs.num_devices
    if costs is not None and np.shape(costs.compute_s)[0] != graph.num_tasks:
        raise ValueError(
            f"costs are of {np.shape(costs.compute_s)[0]} tasks, expected {graph.num_tasks}"
        )
    for v in _where((schedule.placement < 0) | (schedule.placement >= limit)):
        raise ValueError(f"task {v} is on device {schedule.placement[v]}, of {limit} devices")
    for i in _where(graph.input_home >= limit):
        raise ValueError(
            f"graph input {i} lies on device {graph.input_home[i]}, which has no costs"
        )
    x = schedule.transfer_tensor
    for k in _where((x < -graph.num_inputs) | (x >= graph.num_tensors)):
        raise ValueError(
            f"transfer_tensor[{k}] is {x[k]}, of {graph.num_tensors} tensors and "
            f"{graph.num_inputs} graph inputs (input i is ~i)"
        )


def _with_transfers(graph: TaskGraph, schedule: Schedule, move_s: np.ndarray) -> Schedule:
    """Adds the transfers that were left out, as `parallel` links carry them.

    Those of tensors are all left out, or none; `move_s` is `[T + I, D]`.
    """
    reads = list_reads(graph, schedule.placement)
    derived = reads.moves & ((reads.item < 0) | (schedule.transfer_tensor < 0).all())
    left_out = set(pairs(reads.item[derived], reads.destination[derived]))
    left_out -= set(pairs(schedule.transfer_tensor, schedule.transfer_destination))
    item, destination = np.array(list(left_out), np.int64).reshape(-1, 2).T
    made_s = np.append(schedule.finish_s[graph.tensor_producer], np.zeros(graph.num_inputs))
    columns = {
        "transfer_tensor": item,
        "transfer_source": item_sources(graph, schedule.placement)[item],
        "transfer_destination": destination,
        "transfer_start_s": made_s[item],
        "transfer_finish_s": made_s[item] + move_s[item, destination],
    }
    columns = {
        name: np.append(getattr(schedule, name), added) for name, added in columns.items()
    }
    return dataclasses.replace(schedule, **columns)


def _check_records(graph: TaskGraph, done: Activities) -> None:
    """Every transfer moves something, once, from where it is to where it is read."""
    reads = list_reads(graph, done.device[: graph.num_tasks])
    source = item_sources(graph, done.device[: graph.num_tasks])
    needed = set(pairs(reads.item[reads.moves], reads.destination[reads.moves]))
    seen = set()
    for k in range(graph.num_tasks, done.item.size):
        x, fault = int(done.item[k]), ""
        if (pair := (x, int(done.device[k]))) in seen:
            fault = "happens twice"
        elif source[x] not in (RESIDENT, done.source[k]):
            fault = f"does not leave from device {source[x]}, which has it"
        elif pair not in needed:
            fault = "is needless: no task there waits for it"
        if fault:
            raise ValueError(f"{done.describe(k)} {fault}")
        seen.add(pair)


def _check_times(done: Activities, waits: tuple[np.ndarray, np.ndarray], slack: float) -> None:
    """Possible times, one task at a time on a device, and nothing before what it waits for."""
    start, finish = done.start_s, done.finish_s
    for violated, fault in (
        (~np.isfinite(start) | ~np.isfinite(finish), "has a time that is not finite"),
        (start < -slack, "starts before time 0"),
        (finish < start, "finishes before it starts"),
    ):
        for k in _where(violated):
            raise ValueError(f"{done.describe(k)} {fault}")
    tasks = slice(done.num_tasks)
    order = np.lexsort((finish[tasks], start[tasks], done.device[tasks]))
    before, after = order[:-1], order[1:]
    same = done.device[before] == done.device[after]
    # A task of no length may touch its neighbours.
    for i in _where(same & (start[after] < finish[before] - slack)):
        raise ValueError(f"{done.describe(before[i])} and {done.describe(after[i])} overlap")
    waiter, cause = waits
    for w in _where(start[waiter] < finish[cause] - slack):
        raise ValueError(
            f"{done.describe(waiter[w])} starts before {done.describe(cause[w])} ends"
        )


def _check_sequence(done: Activities, ranks: np.ndarray, slack: float) -> None:
    """No task starts before the one that its device has before it in the order of ranks."""
    order = rank_order(ranks)
    order = order[np.argsort(done.device[order], kind="stable")]
    before, after = order[:-1], order[1:]
    overtakes = done.start_s[after] < done.finish_s[before] - slack
    for i in _where(overtakes & (done.device[before] == done.device[after])):
        raise ValueError(
            f"{done.describe(after[i])} overtakes {done.describe(before[i])}, which comes "
            "before it in order"
        )


class _Replay:
    """Runs a schedule again, event by event, and raises where the rules start anything else.

    At one instant whatever ends is handled and transfers start, until there are none left;
    then the single best task over all idle devices starts; and again. All that started ends
    when the schedule says, so that each start is judged by the schedule's own times.
    """

    def __init__(
        self,
        done: Activities,
        waits: tuple[np.ndarray, np.ndarray],
        links: str,
        discipline: Discipline,
        ranks: np.ndarray | None,
        slack: float,
    ) -> None:
        n, size, (waiter, cause) = done.num_tasks, done.item.size, waits
        self.done, self.discipline, self.slack = done, discipline, slack
        self.device: list[int] = done.device.tolist()
        self.start_s: list[float] = done.start_s.tolist()
        self.finish_s: list[float] = done.finish_s.tolist()
        ready_s = np.zeros(size)
        np.maximum.at(ready_s, waiter, done.finish_s[cause])
        self.ready_s: list[float] = ready_s.tolist()
        self.missing: list[int] = np.bincount(waiter, minlength=size).tolist()
        self.waiters: list[list[int]] = [[] for _ in range(size)]
        for k, c in zip(waiter.tolist(), cause.tolist(), strict=True):
            self.waiters[c].append(k)
        # What each device starts by the schedule, the next one last.
        self.plan: list[list[int]] = [[] for _ in range(max(self.device[:n], default=-1) + 1)]
        for v in np.lexsort((done.finish_s[:n], done.start_s[:n]))[::-1].tolist():
            self.plan[self.device[v]].append(v)
        self.ranks: list[float] | None = None if ranks is None else ranks.tolist()
        self.ready = [ReadySet(discipline, self.ranks, tasks) for tasks in self.plan]
        self.idle = [True] * len(self.plan)
        self.last = [next(reversed(tasks), -1) for tasks in self.plan]  # begun, or planned
        self.started: set[int] = set()
        # What transfers need for themselves; those that need the same wait in one queue.
        self.links = links
        self.needs: list[tuple[Hashable, ...]] = [
            (s, ~d) if links == "duplex" else ((s, d),) * (links == "serial")
            for s, d in pairs(done.source, done.device)
        ]
        self.queues: dict[tuple[Hashable, ...], list[tuple[float, int]]] = {}
        self.busy: set[Hashable] = set()
        self.ends: list[tuple[float, int, int]] = []  # (time, number, activity)
        self.number = 0

    def run(self) -> None:
        """Runs from time 0 until nothing happens any more."""
        now = 0.0
        for k in [k for k, missing in enumerate(self.missing) if not missing]:
            self._release(k)
        self._drain(now)
        while (started := self._start_task(now)) or self.ends:
            now = now if started else max(now, self.ends[0][0])
            self._drain(now)

    def _release(self, k: int) -> None:
        """Lets an activity wait for its device or its link, now that its inputs are there."""
        if k < self.done.num_tasks:
            self.ready[self.device[k]].add(k, self.ready_s[k])
            return
        # What is requested at one time comes here by id: the order of `Activities`.
        self.number += 1
        turn = self.ready_s[k] if self.links == "duplex" else self.number
        heappush(self.queues.setdefault(self.needs[k], []), (turn, k))

    def _begin(self, k: int) -> None:
        self.started.add(k)
        self.number += 1
        heappush(self.ends, (self.finish_s[k], self.number, k))

    def _drain(self, now: float) -> None:
        """Handles whatever ends at this instant, and starts transfers."""
        while True:
            while self.ends and self.ends[0][0] <= now:
                _, _, ended = heappop(self.ends)
                if ended < self.done.num_tasks:
                    self.idle[self.device[ended]] = True
                else:
                    self.busy.difference_update(self.needs[ended])
                for k in self.waiters[ended]:
                    self.missing[k] -= 1
                    if not self.missing[k]:
                        self._release(k)
            heads = [
                (queue[0], needs)
                for needs, queue in self.queues.items()
                if self.busy.isdisjoint(needs)
            ]
            if not heads:
                return
            (_, k), needs = min(heads)
            if abs(self.start_s[k] - now) > self.slack:
                raise ValueError(
                    f"{self.done.describe(k)} should start at {now:.9g} s, when "
                    f"{self.links} links have it next"
                )
            heappop(self.queues[needs])
            if not self.queues[needs]:
                del self.queues[needs]
            self.busy.update(needs)
            self._begin(k)

    def _start_task(self, now: float) -> bool:
        """Starts the single best ready task over all idle devices, if there is one."""
        firsts = (self._first(d, now) for d, idle in enumerate(self.idle) if idle)
        best = min((first for first in firsts if first is not None), default=None)
        if best is None:
            return False
        v, d = best[1], self.device[best[1]]
        planned = self._planned(d)
        if self.start_s[planned] > now + self.slack:
            raise ValueError(
                f"device {d} idles from {now:.9g} s, when task {v} could start, to "
                f"{self.start_s[planned]:.9g} s, when task {planned} starts"
            )
        early, late = (planned, v) if self.start_s[v] > now else (v, self.last[d])
        if abs(self.start_s[v] - now) > self.slack:
            raise ValueError(
                f"device {d} starts task {early} (ready at {self.ready_s[early]:.9g} s) at "
                f"{self.start_s[early]:.9g} s before task {late} (ready at "
                f"{self.ready_s[late]:.9g} s), which its queue has first"
            )
        self._first(d, now, take=True)
        self.idle[d], self.last[d] = False, v
        self._begin(v)
        return True

    def _planned(self, d: int) -> int:
        """Returns the task that a device starts next by the schedule."""
        while self.plan[d][-1] in self.started:
            self.plan[d].pop()
        return self.plan[d][-1]

    def _first(self, d: int, now: float, *, take: bool = False) -> tuple[float, int] | None:
        """Returns (key, id) of the task that a device starts next; the schedule breaks ties."""
        ready, passed = self.ready[d], []
        while (first := ready.first()) is not None and self._may_wait(*first, now):
            ready.take()
            passed.append(first[1])
        if take:
            ready.take()
        for v in passed:
            ready.add(v, self.ready_s[v])
        return first

    def _may_wait(self, key: float, v: int, now: float) -> bool:
        """Whether a ready task may let pass the one that the schedule has next.

        So it is where their order hangs on times that are close, but not equal.
        """
        planned = self._planned(self.device[v])
        start_s, ready_s = self.start_s[planned], self.ready_s[planned]
        same = (self.start_s[v], self.finish_s[v]) == (start_s, self.finish_s[planned])
        is_coming = not self.missing[planned] or self.ends
        if same or self.discipline.waits or not is_coming:
            return False
        if self.ranks is None:
            return 0 < self.ready[self.device[v]].key(planned, ready_s) - key <= self.slack
        if (self.ranks[planned], planned) < (key, v):
            return ready_s - self.slack <= now < ready_s
        return start_s - self.slack <= self.ready_s[v] != start_s


def _where(violated: np.ndarray) -> list[int]:
    """Returns the first index at which something is violated, if there is one."""
    return np.flatnonzero(violated)[:1].tolist()
