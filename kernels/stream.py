"""Stream dispatch: the host enqueues everything in one order and waits only at the end.

JAX runs what one thread gives to a device in the order in which it was given, so each
device's queue holds its tasks in the plan's order. JAX tells no device times: threads
watch the results, and `infer_times` derives the starts.
"""

import threading
from queue import SimpleQueue
from typing import Any

import jax

from doppler_jax.types import Schedule

from . import ops
from .errors import TaskError
from .job import Job, Slots
from .trace import Clock, Record, infer_times


def run_stream(job: Job, slots: Slots) -> Schedule:
    """Runs a job; leaves the outputs in `slots`, from which all else is dropped after use.

    Returns:
      When each task and transfer ran, with inferred starts.

    Raises:
      TaskError: a task or transfer failed; the earliest in the order of dispatch, which
        is no victim of another.
    """
    run = _StreamRun(job, slots)
    try:
        for thread in run.watchers:
            thread.start()
        run.dispatch()
        run.finish_watching()
    finally:
        run.abandoned = True  # after a normal end there is nothing left to skip
        run.finish_watching()
    if run.failures:
        raise min(run.failures, key=lambda failure: failure[0])[1]
    infer_times(run.record, job.plan)
    return run.record.schedule()


class _StreamRun:
    """State of one execution."""

    def __init__(self, job: Job, slots: Slots) -> None:
        self.job = job
        self.slots = slots
        self.record = Record(job.plan)
        self.clock = Clock()
        self.abandoned = False
        self.failures: list[tuple[int, TaskError]] = []  # (place in the dispatch order, error)
        self.reads_left = list(job.plan.num_reads)
        self.num_dispatched = 0
        # Tasks and incoming transfers of a device finish in no common order: a queue each.
        self.queues: list[SimpleQueue[tuple[int, int, Any] | None]] = [
            SimpleQueue() for _ in range(2 * len(job.devices))
        ]
        self.watchers = [
            threading.Thread(target=self._watch, args=(queue,), daemon=True)
            for queue in self.queues
        ]

    def dispatch(self) -> None:
        """Enqueues every task, and right after it its transfers; stops at a failure."""
        plan = self.job.plan
        self.clock = Clock()
        for v in plan.order:
            if self.failures or not self._dispatch_task(v):
                return
            for k in plan.task_transfers[v]:
                if not self._dispatch_transfer(k):
                    return

    def _dispatch_task(self, v: int) -> bool:
        plan = self.job.plan
        self.record.start_s[v] = self.clock.now_s()
        try:
            results = self.job.executables[v](*[self.slots[s] for s in plan.operands[v]])
        except Exception as error:
            self._fail(v, self.num_dispatched, error)
            return False
        self._watch_later(plan.placement[v], v, results)
        for slot, result in zip(plan.results[v], results, strict=True):
            if self.reads_left[slot]:
                self.slots[slot] = result
        for slot in set(plan.operands[v]):
            self._drop_read(slot)
        return True

    def _dispatch_transfer(self, k: int) -> bool:
        transfer, event = self.job.plan.transfers[k], len(self.job.names) + k
        source, device = self.slots[transfer.tensor], self.job.devices[transfer.destination]
        assert source is not None
        self.record.start_s[event] = self.clock.now_s()
        try:
            self.slots[transfer.slot] = ops.transfer(source, device)
        except Exception as error:
            self._fail(event, self.num_dispatched, error)
            return False
        queue = len(self.job.devices) + transfer.destination
        self._watch_later(queue, event, self.slots[transfer.slot])
        self._drop_read(transfer.tensor)
        return True

    def finish_watching(self) -> None:
        """Ends the watchers: after all that was enqueued, or soon if abandoned."""
        for queue in self.queues:
            queue.put(None)
        for thread in self.watchers:
            if thread.ident is not None:
                thread.join()

    def _watch_later(self, queue: int, event: int, arrays: Any) -> None:
        self.queues[queue].put((self.num_dispatched, event, arrays))
        self.num_dispatched += 1

    def _watch(self, queue: "SimpleQueue[tuple[int, int, Any] | None]") -> None:
        while (item := queue.get()) is not None and not self.abandoned:
            place, event, arrays = item
            try:
                jax.block_until_ready(arrays)
            except BaseException as error:
                self._fail(event, place, error)
            self.record.finish_s[event] = self.clock.now_s()
            del item, arrays  # else a waiting watcher would keep the buffers

    def _fail(self, event: int, place: int, cause: BaseException) -> None:
        num_tasks = len(self.job.names)
        if event < num_tasks:
            error = self.job.task_error(event, cause)
        else:
            error = self.job.transfer_error(event - num_tasks, cause)
        self.failures.append((place, error))

    def _drop_read(self, slot: int) -> None:
        self.reads_left[slot] -= 1
        if self.reads_left[slot] == 0:
            self.slots[slot] = None
