"""Work-conserving dispatch: one worker per device takes the next ready task.

A worker blocks until its task's result is there, stamps it and releases the readers;
copies run in workers of their own, one per receiving device, so that no compute worker
ever waits for a copy. Every stamp is taken before what it allows can begin, which makes
the trace legal without tolerance.
"""

import threading
from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush

import jax

from doppler_jax.types import Schedule

from . import ops
from .errors import TaskError
from .job import Job, Slots
from .trace import Clock, Record


def run_work_conserving(job: Job, slots: Slots) -> Schedule:
    """Runs a job; leaves the outputs in `slots`, from which all else is dropped after use.

    Returns:
      When each task and transfer ran, as the workers saw it.

    Raises:
      TaskError: a task or transfer failed; the other workers end after what they are at.
    """
    run = _Run(job, slots)
    try:
        for thread in run.threads:
            thread.start()
        run.begin()
        run.ended.wait()
    finally:
        run.stop()
        for thread in run.threads:
            if thread.ident is not None:
                thread.join()
    if run.error is not None:
        raise run.error
    return run.record.schedule()


class _Run:
    """State of one execution; what the workers share is guarded by `_lock`."""

    def __init__(self, job: Job, slots: Slots) -> None:
        self.record = Record(job.plan)
        self.error: TaskError | None = None
        self.ended = threading.Event()
        self._job = job
        self._plan = job.plan
        self._slots = slots
        self._clock = Clock()
        self._stopped = False
        self._num_unfinished = len(job.names)
        self._inputs_left = list(job.plan.num_inputs)
        self._reads_left = list(job.plan.num_reads)
        self._lock = threading.Lock()
        devices = range(len(job.devices))
        self._ready: list[list[tuple[float, int]]] = [[] for _ in devices]  # heaps
        self._requested: list[deque[int]] = [deque() for _ in devices]
        self._has_ready = [threading.Condition(self._lock) for _ in devices]
        self._has_request = [threading.Condition(self._lock) for _ in devices]
        self.threads = [
            threading.Thread(target=worker, args=(d,), name=f"{what} {d}", daemon=True)
            for d in devices
            for what, worker in (("compute", self._compute), ("receive", self._receive))
        ]

    def begin(self) -> None:
        """Starts the clock and releases the tasks that wait for no other."""
        with self._lock:
            self._clock = Clock()
            if not self._num_unfinished:
                self.ended.set()
            for v, count in enumerate(self._inputs_left):
                if count == 0:
                    self._make_ready(v, 0.0)

    def stop(self) -> None:
        """Tells every worker to end after what it is doing."""
        with self._lock:
            self._stopped = True
            for condition in (*self._has_ready, *self._has_request):
                condition.notify_all()
        self.ended.set()

    def _compute(self, device: int) -> None:
        while (v := self._next_task(device)) is not None:
            try:
                self._run_task(v)
            except BaseException as error:
                self._fail(self._job.task_error(v, error))

    def _next_task(self, device: int) -> int | None:
        with self._lock:
            while not self._ready[device] and not self._stopped:
                self._has_ready[device].wait()
            return None if self._stopped else heappop(self._ready[device])[1]

    def _run_task(self, v: int) -> None:
        operands = [self._slots[s] for s in self._plan.operands[v]]
        start_s = self._clock.now_s()
        results = self._job.executables[v](*operands)
        jax.block_until_ready(results)
        finish_s = self._clock.now_s()
        with self._lock:
            self.record.start_s[v], self.record.finish_s[v] = start_s, finish_s
            for slot, result in zip(self._plan.results[v], results, strict=True):
                if self._reads_left[slot]:
                    self._slots[slot] = result
            self._drop_reads(set(self._plan.operands[v]))
            self._release(self._plan.local_readers[v], finish_s)
            for k in self._plan.task_transfers[v]:
                destination = self._plan.transfers[k].destination
                self._requested[destination].append(k)
                self._has_request[destination].notify()
            self._num_unfinished -= 1
            if not self._num_unfinished:
                self.ended.set()

    def _receive(self, device: int) -> None:
        while (batch := self._next_transfers(device)) is not None:
            k = batch[0]
            try:
                # All copies that were asked for are under way before the first is awaited.
                copies = []
                for k in batch:
                    copies.append((k, self._clock.now_s(), self._start_transfer(k)))
                while copies:
                    k, start_s, copy = copies.pop(0)
                    self._finish_transfer(k, start_s, copy)
                    del copy
            except BaseException as error:
                self._fail(self._job.transfer_error(k, error))

    def _next_transfers(self, device: int) -> list[int] | None:
        with self._lock:
            while not self._requested[device] and not self._stopped:
                self._has_request[device].wait()
            if self._stopped:
                return None
            batch = list(self._requested[device])
            self._requested[device].clear()
            return batch

    def _start_transfer(self, k: int) -> jax.Array:
        transfer = self._plan.transfers[k]
        source = self._slots[transfer.tensor]
        assert source is not None
        return ops.transfer(source, self._job.devices[transfer.destination])

    def _finish_transfer(self, k: int, start_s: float, copy: jax.Array) -> None:
        copy.block_until_ready()
        finish_s = self._clock.now_s()
        transfer, event = self._plan.transfers[k], len(self._job.names) + k
        with self._lock:
            self.record.start_s[event], self.record.finish_s[event] = start_s, finish_s
            self._slots[transfer.slot] = copy
            self._drop_reads([transfer.tensor])
            self._release(transfer.readers, finish_s)

    def _release(self, readers: Iterable[int], now_s: float) -> None:
        for v in readers:
            self._inputs_left[v] -= 1
            if not self._inputs_left[v]:
                self._make_ready(v, now_s)

    def _make_ready(self, v: int, now_s: float) -> None:
        device, rank = self._plan.placement[v], self._plan.rank
        heappush(self._ready[device], (now_s if rank is None else rank[v], v))
        self._has_ready[device].notify()

    def _drop_reads(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._reads_left[slot] -= 1
            if not self._reads_left[slot]:
                self._slots[slot] = None

    def _fail(self, error: TaskError) -> None:
        with self._lock:
            self.error = self.error or error
        self.stop()
