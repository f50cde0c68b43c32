"""Threads that run one call: for each device one that computes and one that receives.

What may run when is for the rules of a mode (a subclass of `Run`) to say. Every stamp is
taken before what it allows can begin, which makes the trace legal without tolerance.

On CPU devices a worker waits for its task before it takes the next. Accelerators have a
queue of their own: there a worker enqueues one task more while the device is at another,
and a third thread waits for them in turn, so that the device never waits for the host.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from queue import SimpleQueue

import jax
import numpy as np

from . import ops
from .blocks import Slots
from .buffers import Buffers
from .errors import TaskError
from .job import Job, run_ahead
from .trace import Clock, Record

GRACE_S = 1.0
"""After a timeout, workers have this long to end what they are at; then they are left."""

Launched = tuple[int, Sequence[jax.Array], BaseException | None]
"""A task that was enqueued: its results, or why it could not be."""


class Run:
    """One call; a subclass holds the rules of a mode, which are called with the lock held."""

    def __init__(self, job: Job, slots: Slots) -> None:
        self.job = job
        self.plan = job.plan
        self.record = Record(job.plan)
        self._buffers = Buffers(job.plan, slots)
        self._clock = Clock()
        self._error: TaskError | None = None
        self._ended = threading.Event()
        self._stopped = False
        self._lock = threading.Lock()  # guards all that the workers share
        devices = range(len(job.devices))
        self._room = [1 + run_ahead(device) for device in job.devices]  # for more tasks
        self._ready: list[list[tuple[float, int]]] = [[] for _ in devices]  # heaps
        self._requested: list[deque[int]] = [deque() for _ in devices]
        self._in_flight: list[SimpleQueue[Launched | None]] = [SimpleQueue() for _ in devices]
        self._has_ready = [threading.Condition(self._lock) for _ in devices]
        self._has_request = [threading.Condition(self._lock) for _ in devices]
        self._threads = [
            threading.Thread(
                target=self._work, args=(worker, d), name=f"{what} {d}", daemon=True
            )
            for d in devices
            for what, worker in self._workers(job.devices[d])
        ]

    def run(self) -> Record:
        """Runs everything and returns when it ran.

        Raises:
          TaskError: a task or transfer failed, or time ran out.
        """
        grace_s = None
        try:
            for thread in self._threads:
                thread.start()
            with self._lock:
                self._clock = Clock()
                self.begin()
            if not self._ended.wait(self.job.options.timeout_s):
                self._time_out()
                grace_s = GRACE_S
        finally:
            self._stop()
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(grace_s)
        if self._error is not None:
            raise self._error
        return self.record

    def begin(self) -> None:
        """Rule: releases what waits for nothing."""
        raise NotImplementedError

    def launched(self, v: int, now_s: float) -> None:
        """Rule: task `v` has run, or will have before any task given to its device later."""

    def finished(self, v: int, now_s: float) -> None:
        """Rule: task `v` has finished."""
        raise NotImplementedError

    def arrived(self, k: int, now_s: float) -> None:
        """Rule: transfer `k` has arrived."""
        raise NotImplementedError

    def make_ready(self, v: int, now_s: float) -> None:
        """Gives task `v` to its device."""
        device, rank = self.plan.placement[v], self.plan.rank
        heappush(self._ready[device], (now_s if rank is None else rank[v], v))
        self._has_ready[device].notify()

    def request(self, k: int) -> None:
        """Starts transfer `k`."""
        destination = self.plan.transfers[k].destination
        self._requested[destination].append(k)
        self._has_request[destination].notify()

    def end(self) -> None:
        """Lets the call return: everything has run."""
        self._ended.set()

    def _workers(self, device: jax.Device) -> list[tuple[str, Callable[[int], None]]]:
        receive = ("receive", self._receive)
        if run_ahead(device):
            return [("launch", self._launch_ahead), ("await", self._await_launched), receive]
        return [("compute", self._compute), receive]

    def _work(self, worker: Callable[[int], None], device: int) -> None:
        try:
            worker(device)
        except BaseException as error:
            name = threading.current_thread().name
            what = f"worker '{name}' died on device {device} ({self.job.devices[device]})"
            self._fail(TaskError(what, -1, device, error))

    def _compute(self, device: int) -> None:
        with self._lock:
            v = self._take(device)
        while v is not None:
            try:
                results = self._launch(v)
                self._wait_for(results)
            except BaseException as error:
                self._fail(self.job.task_error(v, error))
                return
            self.record.finish_s[v] = finish_s = self._clock.now_s()
            with self._lock:
                self._keep(v, results)
                self.launched(v, finish_s)
                self.finished(v, finish_s)
                self._room[device] += 1
                v = self._take(device)

    def _launch_ahead(self, device: int) -> None:
        while True:
            with self._lock:
                v = self._take(device)
            if v is None:
                self._in_flight[device].put(None)
                return
            try:
                results = self._launch(v)
                with self._lock:
                    self._keep(v, results)
                    self.launched(v, self._clock.now_s())
                self._in_flight[device].put((v, results, None))
                del results
            except BaseException as error:
                # It may be the victim of one in flight, which is awaited first.
                self._in_flight[device].put((v, (), error))

    def _await_launched(self, device: int) -> None:
        free_s = 0.0
        while (item := self._in_flight[device].get()) is not None and not self._stopped:
            v, results, failure = item
            try:
                if failure is not None:
                    raise failure
                self._wait_for(results)
            except BaseException as error:
                self._fail(self.job.task_error(v, error))
                return
            finish_s = self._clock.now_s()
            self.record.start_s[v] = max(self.record.start_s[v], free_s)
            self.record.finish_s[v] = free_s = finish_s
            del item, results  # else a waiting worker would keep them
            with self._lock:
                self.finished(v, finish_s)
                self._room[device] += 1
                self._has_ready[device].notify()

    def _take(self, device: int) -> int | None:
        """Waits, with the lock held, for the next task of a device; None: there is no more."""
        while not (self._stopped or (self._ready[device] and self._room[device])):
            self._has_ready[device].wait()
        if self._stopped:
            return None
        self._room[device] -= 1
        return heappop(self._ready[device])[1]

    def _launch(self, v: int) -> Sequence[jax.Array]:
        operands = self._buffers.operands(v)
        self.record.start_s[v] = self._clock.now_s()
        return self.job.executables[v](*operands)

    def _wait_for(self, results: Sequence[jax.Array]) -> None:
        for result in results:
            result.block_until_ready()
        if self.job.options.check_nan:
            ops.refuse_nan(results)

    def _keep(self, v: int, results: Sequence[jax.Array]) -> None:
        for slot, result in zip(self.plan.results[v], results, strict=True):
            self._buffers.keep(slot, result)
        self._buffers.drop_reads(set(self.plan.operands[v]))

    def _receive(self, device: int) -> None:
        while batch := self._next_transfers(device):
            k = batch[0]
            try:
                # All copies that were asked for are under way before the first is awaited.
                copies: deque[tuple[int, jax.Array | np.ndarray]] = deque()
                for k in batch:
                    copies.append((k, self._start_transfer(k)))
                while copies:
                    k, copy = copies.popleft()
                    ops.wait_for(copy)
                    self._finish_transfer(k, copy)
                    del copy
            except BaseException as error:
                self._fail(self.job.transfer_error(k, error))
                return

    def _next_transfers(self, device: int) -> list[int]:
        with self._lock:
            while not self._requested[device] and not self._stopped:
                self._has_request[device].wait()
            batch = [] if self._stopped else list(self._requested[device])
            self._requested[device].clear()
            return batch

    def _start_transfer(self, k: int) -> jax.Array | np.ndarray:
        transfer = self.plan.transfers[k]
        source = self._buffers.get(transfer.source_slot)
        device = self.job.devices[transfer.destination]
        self.record.start_s[self.record.num_tasks + k] = self._clock.now_s()
        return ops.transfer(source, device)

    def _finish_transfer(self, k: int, copy: jax.Array | np.ndarray) -> None:
        transfer, finish_s = self.plan.transfers[k], self._clock.now_s()
        self.record.finish_s[self.record.num_tasks + k] = finish_s
        with self._lock:
            self._buffers.keep(transfer.slot, copy)
            self._buffers.drop_reads([transfer.source_slot])
            self.arrived(k, finish_s)

    def _time_out(self) -> None:
        cause = TimeoutError(f"the call has taken more than {self.job.options.timeout_s} s")
        self._fail(self.job.event_error(self.record.first_unfinished(), cause))

    def _fail(self, error: TaskError) -> None:
        with self._lock:
            self._error = self._error or error
        self._stop()

    def _stop(self) -> None:
        """Tells every worker to end after what it is doing, and the call to return."""
        with self._lock:
            self._stopped = True
            for condition in (*self._has_ready, *self._has_request):
                condition.notify_all()
        self._ended.set()
