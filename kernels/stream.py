"""Mode `in_order` on accelerators: the host enqueues everything and waits only at the end.

JAX runs what one thread gives to a device in the order in which it was given, so each
device's queue holds its tasks in the agenda's order. JAX tells no device times: the host
looks now and then, while it enqueues, at what has finished; what is left at the end is
awaited by a thread per queue, and `infer_times` derives the starts.
"""

import functools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from . import ops
from .agenda import Agenda
from .crew import Crew
from .devices import event_error
from .memory import Buffers, Later, Slots
from .running import TaskError
from .threads import GRACE_S, LocalCall, LocalProgram
from .trace import Chores, Clock, Record

LOOK_S = 2e-4
"""While the host enqueues, it looks this often at what has finished."""

Watched = tuple[int, int, Sequence[Any]]
"""Place in the order of dispatch, event, and arrays that are there when it has finished."""


class StreamCall(LocalCall):
    """A call as one queue of work; starts are inferred.

    Behind another it is enqueued when that has ended.
    """

    def __init__(self, program: LocalProgram, slots: Slots, chores: Chores) -> None:
        super().__init__(program, slots, chores)
        self.abandoned = False
        self.failures: list[tuple[int, TaskError]] = []  # (place in the dispatch order, error)
        self._program = program
        self._buffers = Buffers(program.agenda, slots)
        self._clock = Clock()
        self._look_s = LOOK_S  # when to look next
        self._num_dispatched = 0
        # Tasks and incoming transfers of a device finish in no common order: a queue each.
        self._queues: list[deque[Watched]] = [deque() for _ in range(2 * len(program.devices))]
        self._before: StreamCall | None = None
        # In a thread of its own, for a device that computes at once may keep it for long.
        self._host = Crew([("stream", ops.inherit(self.work))])

    def start(self, before: LocalCall | None) -> None:
        assert before is None or isinstance(before, StreamCall)
        self._before = before
        try:
            self._host.start()
        except BaseException:
            self.abandoned = True
            self._host.wait(GRACE_S)  # it may not have been started
            raise

    def is_ready(self) -> bool:
        return self._host.wait(0.0)

    def wait(self) -> None:
        """Waits for its end.

        Raises:
          TaskError: time ran out, or a task or transfer failed; the earliest in the order of
            dispatch, which is no victim of another.
        """
        since_s = max(self._clock.origin_s, self._before.ended_s if self._before else 0.0)
        grace_s, timeout_s = None, self._program.options.timeout_s
        left_s = timeout_s and max(0.0, since_s + timeout_s - time.perf_counter())
        try:
            if not self._host.wait(left_s):
                self.time_out()
                grace_s = GRACE_S
        finally:
            self.abandoned = True  # after a normal end there is nothing left to skip
            self._host.wait(grace_s)
            self._before = None  # the thread has looked at it, however late it woke
        if self.failures:
            raise min(self.failures, key=lambda failure: failure[0])[1]
        infer_times(self.record, self._program.agenda)

    def abandon(self, error: TaskError) -> None:
        self.abandoned = True
        self._host.wait(GRACE_S)

    def work(self) -> None:
        """Enqueues everything and waits for it."""
        try:
            if self._before is not None and not self._follow(self._before):
                return
            self._dispatch()
            self._look()
            watch = ops.inherit(self._watch)
            queues = filter(None, self._queues)
            watchers = Crew([("watch", functools.partial(watch, queue)) for queue in queues])
            watchers.start()
            watchers.wait()
        except BaseException as error:
            self._fail(self.record.first_unfinished(), self._num_dispatched, error)

    def _follow(self, before: "StreamCall") -> bool:
        """Waits for the call before, and takes what it left; returns whether it ended well."""
        before._host.wait()
        if self.abandoned or before.failures:
            return False
        for s, block in enumerate(self.slots):
            if isinstance(block, Later):
                self.slots[s] = block.get()
        return True

    def time_out(self) -> None:
        """Records that time ran out, and at what."""
        self.abandoned = True
        for _, event, arrays in (item for queue in self._queues for item in queue.copy()):
            if ops.are_ready(arrays):
                self.record.finish_s[event] = self._clock.now_s()
        cause = TimeoutError(
            f"the call has taken more than {self._program.options.timeout_s} s"
        )
        self._fail(self.record.first_unfinished(), -1, cause)

    def _dispatch(self) -> None:
        """Enqueues every task and transfer; stops at a failure."""
        self._clock = Clock()
        self.record.origin_s = self._clock.origin_s
        for event in dispatch_order(self._program.agenda):
            self.record.start_s[event] = now_s = self._clock.now_s()
            try:
                self._enqueue(event)
            except Exception as error:
                self._fail(event, self._num_dispatched, error)
                return
            if now_s >= self._look_s or self.abandoned:
                self._look()
                self._look_s = self._clock.now_s() + LOOK_S
                if self.abandoned or self.failures:
                    return

    def _enqueue(self, event: int) -> None:
        program, k = self._program, event - self.record.num_tasks
        if k < 0:
            results = program.executables[event](*self._buffers.operands(event))
            self._watch_later(program.agenda.placement[event], event, results)
            self._buffers.made(event, results)
        else:
            transfer = program.agenda.transfers[k]
            device = program.devices[transfer.destination]
            copy = ops.transfer(self._buffers.get(transfer.source_slot), device)
            self._watch_later(len(program.devices) + transfer.destination, event, (copy,))
            self._buffers.moved(k, copy)

    def _watch_later(self, queue: int, event: int, arrays: Sequence[Any]) -> None:
        """Sees an event at once if it has finished, as tiny tasks on CPU devices have."""
        place, waiting = self._num_dispatched, self._queues[queue]
        self._num_dispatched += 1
        if not waiting and ops.are_ready(arrays):
            self._see(place, event, arrays)
        else:
            waiting.append((place, event, arrays))

    def _look(self) -> None:
        """Notes what has finished since the last look."""
        for queue in self._queues:
            while queue and ops.are_ready(queue[0][2]):
                self._see(*queue.popleft())

    def _watch(self, queue: deque[Watched]) -> None:
        while queue and not self.abandoned:
            self._see(*queue[0])
            queue.popleft()

    def _see(self, place: int, event: int, arrays: Sequence[Any]) -> None:
        try:
            for array in arrays:
                ops.wait_for(array)
            if self._program.options.check_nan and event < self.record.num_tasks:
                ops.refuse_nan(arrays)
        except BaseException as error:
            self._fail(event, place, error)
        self.record.finish_s[event] = self._clock.now_s()

    def _fail(self, event: int, place: int, cause: BaseException) -> None:
        program = self._program
        self.failures.append(
            (place, event_error(program.agenda, program.devices, event, cause))
        )


def infer_times(record: Record, agenda: Agenda) -> None:
    """Turns dispatch times and watched finishes into the tightest times that they prove.

    On entry `start_s` holds when the host enqueued each event and `finish_s` when a
    watcher saw it finished: a lower bound of the start and an upper bound of the finish.
    What ran after an event proves it finished, however late its watcher woke; an event
    then starts when it is enqueued and all that it waits for has finished.
    """
    events = dispatch_order(agenda)
    waits = _dependences(agenda, events)
    start, finish = record.start_s, record.finish_s
    for event in reversed(events):
        for before in waits[event]:
            finish[before] = min(finish[before], finish[event])
    for event in events:
        start[event] = max([start[event], *(finish[before] for before in waits[event])])


def dispatch_order(agenda: Agenda) -> list[int]:
    """Returns all events; the transfers of what a task makes come right behind it."""
    num_tasks = len(agenda.placement)
    events = [num_tasks + k for k in agenda.initial_transfers]
    for v in agenda.order:
        events += [v, *(num_tasks + k for k in agenda.task_transfers[v])]
    return events


def _dependences(agenda: Agenda, events: list[int]) -> list[list[int]]:
    """Returns for each event those that it waits for, given all in the order of dispatch.

    A task waits for its inputs and the task before it on its device, a transfer for its
    producer.
    """
    num_tasks = len(agenda.placement)
    waits: list[list[int]] = [[] for _ in events]
    last: dict[int, int] = {}
    for event in events:
        if event < num_tasks:
            device, readers = agenda.placement[event], agenda.local_readers[event]
            waits[event] += [last[device]] if device in last else []
            last[device] = event
        else:
            transfer = agenda.transfers[event - num_tasks]
            readers = transfer.readers
            waits[event] += [transfer.producer] if transfer.producer >= 0 else []
        for reader in readers:
            waits[reader].append(event)
    return waits
