"""Stream dispatch: the host enqueues everything in one order and waits only at the end.

JAX runs what one thread gives to a device in the order in which it was given, so each
device's queue holds its tasks in the plan's order. JAX tells no device times: the host
looks now and then, while it enqueues, at what has finished; what is left at the end is
awaited by a thread per queue, and `infer_times` derives the starts.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from . import ops
from .blocks import Slots
from .buffers import Buffers
from .errors import TaskError
from .job import Job
from .trace import Clock, Record, infer_times
from .workers import GRACE_S

LOOK_S = 2e-4
"""While the host enqueues, it looks this often at what has finished."""

Watched = tuple[int, int, Sequence[Any]]
"""Place in the order of dispatch, event, and arrays that are there when it has finished."""


def run_stream(job: Job, slots: Slots) -> Record:
    """Runs a job; leaves the outputs in `slots`, from which all else is dropped after use.

    Returns:
      When each task and transfer ran, with inferred starts.

    Raises:
      TaskError: time ran out, or a task or transfer failed; the earliest in the order of
        dispatch, which is no victim of another.
    """
    run = _StreamRun(job, slots)
    # In a thread of its own, for a device that computes at once may keep it for long.
    host = threading.Thread(target=run.work, name="stream", daemon=True)
    grace_s = None
    try:
        host.start()
        if not run.ended.wait(job.options.timeout_s):
            run.time_out()
            grace_s = GRACE_S
    finally:
        run.abandoned = True  # after a normal end there is nothing left to skip
        host.join(grace_s)
    if run.failures:
        raise min(run.failures, key=lambda failure: failure[0])[1]
    infer_times(run.record, job.plan)
    return run.record


class _StreamRun:
    """State of one execution."""

    def __init__(self, job: Job, slots: Slots) -> None:
        self.record = Record(job.plan)
        self.ended = threading.Event()
        self.abandoned = False
        self.failures: list[tuple[int, TaskError]] = []  # (place in the dispatch order, error)
        self._job = job
        self._buffers = Buffers(job.plan, slots)
        self._clock = Clock()
        self._look_s = LOOK_S  # when to look next
        self._num_dispatched = 0
        # Tasks and incoming transfers of a device finish in no common order: a queue each.
        self._queues: list[deque[Watched]] = [deque() for _ in range(2 * len(job.devices))]

    def work(self) -> None:
        """Enqueues everything and waits for it."""
        try:
            self._dispatch()
            self._look()
            watchers = [
                threading.Thread(target=self._watch, args=(queue,), daemon=True)
                for queue in filter(None, self._queues)
            ]
            for thread in watchers:
                thread.start()
            for thread in watchers:
                thread.join()
        except BaseException as error:
            self._fail(self.record.first_unfinished(), self._num_dispatched, error)
        finally:
            self.ended.set()

    def time_out(self) -> None:
        """Records that time ran out, and at what."""
        self.abandoned = True
        for _, event, arrays in (item for queue in self._queues for item in queue.copy()):
            if ops.are_ready(arrays):
                self.record.finish_s[event] = self._clock.now_s()
        cause = TimeoutError(f"the call has taken more than {self._job.options.timeout_s} s")
        error = self._job.event_error(self.record.first_unfinished(), cause)
        self.failures.append((-1, error))

    def _dispatch(self) -> None:
        """Enqueues every task, and right after it its transfers; stops at a failure."""
        plan = self._job.plan
        self._clock = Clock()
        for k in plan.initial_transfers:
            if not self._dispatch_transfer(k):
                return
        for v in plan.order:
            if not self._dispatch_task(v):
                return
            for k in plan.task_transfers[v]:
                if not self._dispatch_transfer(k):
                    return

    def _dispatch_task(self, v: int) -> bool:
        plan, now_s = self._job.plan, self._clock.now_s()
        self.record.start_s[v] = now_s
        try:
            results = self._job.executables[v](*self._buffers.operands(v))
        except Exception as error:
            self._fail(v, self._num_dispatched, error)
            return False
        self._watch_later(plan.placement[v], v, results)
        for slot, result in zip(plan.results[v], results, strict=True):
            self._buffers.keep(slot, result)
        self._buffers.drop_reads(set(plan.operands[v]))
        return self._goes_on(now_s)

    def _dispatch_transfer(self, k: int) -> bool:
        transfer, event = self._job.plan.transfers[k], self.record.num_tasks + k
        device, now_s = self._job.devices[transfer.destination], self._clock.now_s()
        self.record.start_s[event] = now_s
        try:
            copy = ops.transfer(self._buffers.get(transfer.source_slot), device)
        except Exception as error:
            self._fail(event, self._num_dispatched, error)
            return False
        self._watch_later(len(self._job.devices) + transfer.destination, event, (copy,))
        self._buffers.keep(transfer.slot, copy)
        self._buffers.drop_reads([transfer.source_slot])
        return self._goes_on(now_s)

    def _goes_on(self, now_s: float) -> bool:
        if now_s < self._look_s and not self.abandoned:
            return True
        self._look()
        self._look_s = self._clock.now_s() + LOOK_S
        return not (self.abandoned or self.failures)

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
            if self._job.options.check_nan and event < self.record.num_tasks:
                ops.refuse_nan(arrays)
        except BaseException as error:
            self._fail(event, place, error)
        self.record.finish_s[event] = self._clock.now_s()

    def _fail(self, event: int, place: int, cause: BaseException) -> None:
        self.failures.append((place, self._job.event_error(event, cause)))
