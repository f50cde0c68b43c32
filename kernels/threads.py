"""A placed program in this process, and the threads that run a call of it.

A call behind another has threads of its own: on each device they begin when the other call has
ended its part there, which its last task tells.

For each device one thread computes, which lives between calls (`crew.py`). What may run when is
for the rules of a mode to say (`agenda.py`). Every stamp is taken before what it allows can
begin, which makes the trace legal without tolerance.

On CPU devices a worker waits for its task before it takes the next. They share their memory, so
who has made a tensor hands it over. Accelerators have a queue of their own: there a worker
enqueues one task more while the device is at another, a second thread waits for them in turn,
so that the device never waits for the host, and a third one receives.
"""

import abc
import dataclasses
import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np

from doppler_jax.programs.blocks import is_float0, join_output
from doppler_jax.programs.outputs import Blocks

from . import ops
from .agenda import RULES, Next
from .crew import Crew, Job
from .devices import LoadedProgram, event_error
from .memory import Buffers, Later, Residents, Slots
from .running import Execution, Running, TaskError
from .trace import CALLER, Chore, Chores, Clock, Record

GRACE_S = 1.0
"""After a timeout, workers have this long to end what they are at; then they are left."""

Launched = tuple[int, Sequence[jax.Array], BaseException | None]
"""A task that was enqueued: its results, or why it could not be."""


@dataclasses.dataclass(frozen=True, eq=False)
class LocalProgram(LoadedProgram):
    """A placed program on devices of this process, its kernels compiled."""

    executables: tuple[ops.Executable, ...]  # [N]
    residents: Residents
    runner: "type[LocalCall]"

    @property
    def infers_starts(self) -> bool:
        return self.runner is not ThreadsCall

    def lay(self, values: Sequence[Any]) -> Slots:
        """Returns the slots of a call, with the blocks of its arguments there."""
        return self.residents.lay(self.agenda, values)

    def start(self, laid: Slots, chores: Chores, before: Running | None) -> "LocalCall":
        """Sets threads to a call; `laid` stays as it is."""
        assert before is None or isinstance(before, LocalCall)
        call = self.runner(self, list(laid), chores)
        call.start(before)
        call.started_s = time.perf_counter()
        return call

    def assemble(self, o: int, blocks: Blocks) -> jax.Array:
        return join_output(self.sharded.outputs[o], self.gather([*blocks.values()]))

    def gather(self, blocks: list[Any]) -> list[jax.Array]:
        """Returns an output's blocks where it is to be put together."""
        if is_float0(blocks[0]):
            return blocks
        d = self.options.out_device
        there = blocks[0].device if d is None else self.devices[d]
        # To put what is there takes as long as to move it.
        is_there = all(block.device == there for block in blocks)
        return blocks if is_there else jax.device_put(blocks, there)


def run_ahead(device: jax.Device) -> int:
    """Returns how many tasks a device may be given beyond the one that it is at.

    None on a CPU device, which has no queue worth keeping full: its workers wait for their
    tasks. Accelerators are given one, so that they need not wait for the host.
    """
    return 0 if device.platform == "cpu" else 1


class LocalCall(Running):
    """A call of a program whose threads leave outputs in slots, and drop all else after use.

    Attributes:
      record: when each task and transfer ran, as the threads saw it.
    """

    def __init__(self, program: LocalProgram, slots: Slots, chores: Chores) -> None:
        self.program, self.agenda = program, program.agenda
        self.record = Record(program.agenda)
        self.slots, self._chores = slots, chores
        self.began_s = self.started_s = time.perf_counter()
        self.staying = {
            o: Blocks(
                (b.bounds, Later(slots, b.slot, program.devices[b.device])) for b in blocks
            )
            for o, blocks in program.carried.items()
        }

    @abc.abstractmethod
    def start(self, before: "LocalCall | None") -> None:
        """Sets threads to it, behind another call."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits for its end; the other threads end after what they are at where one failed.

        Raises:
          TaskError: a task or transfer failed, or time ran out.
        """

    def finish(self) -> Execution:
        self.wait()
        self.ended_s, record = time.perf_counter(), self.record
        first_s = record.origin_s + min(record.start_s, default=0.0)
        dispatched_s = max(self.began_s, min(self.started_s, first_s))
        self._chores.append(Chore("dispatch", CALLER, self.began_s, dispatched_s))
        for blocks in self.staying.values():
            for bounds, block in blocks.items():
                blocks[bounds] = block.get() if isinstance(block, Later) else block
        program = self.program

        def gather(wanted: tuple[int, ...]) -> list[jax.Array]:
            return program.gather([self.slots[s] for s in wanted])

        allocated = list(map(ops.allocated_bytes, program.devices))
        return program.execution(lambda: record, gather, allocated, self._chores)


class ThreadsCall(LocalCall):
    """A call by a thread for each device; the rules are asked with the lock taken."""

    def __init__(self, program: LocalProgram, slots: Slots, chores: Chores) -> None:
        super().__init__(program, slots, chores)
        rules = RULES[program.agenda.mode](program.agenda)
        self._rules, self._first = rules, rules.begin()
        self._num_unfinished = len(self.agenda.placement)
        self._num_left = list(map(len, self.agenda.tasks))  # [D] tasks of each device
        self._behind: ThreadsCall | None = None
        self._has_begun = [False for _ in program.devices]
        self._buffers = Buffers(program.agenda, slots)
        self._clock = Clock()
        self._error: TaskError | None = None
        self._stopped = False
        self._lock = threading.Lock()  # guards all that the workers share
        devices = range(len(program.devices))
        self._room = [1 + run_ahead(device) for device in program.devices]  # for more tasks
        self._share_memory = not any(map(run_ahead, program.devices))
        self._ready = [program.agenda.ready_set(d) for d in devices]
        self._requested: list[deque[int]] = [deque() for _ in devices]
        self._in_flight: list[SimpleQueue[Launched | None]] = [SimpleQueue() for _ in devices]
        # Made by who waits: to make one takes longer than to dispatch a task.
        make = functools.partial(threading.Condition, self._lock)
        self._has_ready: dict[int, threading.Condition] = defaultdict(make)
        self._has_request: dict[int, threading.Condition] = defaultdict(make)
        work = ops.inherit(self._work)
        jobs: list[Job] = [
            (f"{what} {d}", functools.partial(work, worker, d))
            for d, tasks in enumerate(program.agenda.tasks)
            if tasks
            for what, worker in self._workers(program.devices[d])
        ]
        self._crew = Crew(jobs)

    def start(self, before: LocalCall | None) -> None:
        assert before is None or isinstance(before, ThreadsCall)
        try:
            if before is None:
                self._begin(None)
            else:
                self._follow(before)
            self._crew.start()
            self._hand_over()
        except BaseException:
            self._stop()
            self._crew.wait(GRACE_S)  # not all may have been started
            raise

    def is_ready(self) -> bool:
        return self._crew.wait(0.0)

    def wait(self) -> None:
        grace_s, timeout_s = None, self.program.options.timeout_s
        left_s = timeout_s and max(0.0, timeout_s - self._clock.now_s())
        try:
            if not self._crew.wait(left_s):
                timeout = f"the call has taken more than {timeout_s} s"
                self._fail(self.record.first_unfinished(), TimeoutError(timeout))
                grace_s = GRACE_S
        finally:
            self._stop()
            self._crew.wait(grace_s)
        if self._error is not None:
            raise self._error

    def abandon(self, error: TaskError) -> None:
        self._end_by(error)
        self._crew.wait(GRACE_S)

    def _follow(self, before: "ThreadsCall") -> None:
        """Begins on each device when the call before has ended its part there."""
        with before._lock:
            before._behind = self
            ended = before._parts_ended(range(len(self._ready)))
            if ended:
                self._begin(ended)

    def _parts_ended(self, devices: Iterable[int]) -> list[int]:
        """Returns which of the devices may begin the next call; the lock is taken."""
        if self.agenda.mode == "bulk_synchronous":
            return [] if self._num_unfinished else list(range(len(self._ready)))
        left = self._num_left
        return [d for d in devices if d >= len(left) or not left[d]]

    def _begin(self, devices: Sequence[int] | None) -> None:
        """Lets devices begin, or all; what is carried to them from the call before is there."""
        with self._lock:
            if not any(self._has_begun):
                self._clock = Clock()
                self.record.origin_s = self._clock.origin_s
            if devices is None:
                self._has_begun = [True for _ in self._has_begun]
                self._go_on(self._first, 0.0)
                return
            for d in devices:
                self._has_begun[d] = True
                _notify(self._has_ready, d)  # others may have made something ready
            here = [self.program.devices[d] for d in devices]
            for s, block in enumerate(self.slots):
                if isinstance(block, Later) and block.device in here:
                    self.slots[s] = block.get()
            tasks, transfers = self._first
            first = [v for v in tasks if self.agenda.placement[v] in devices]
            moved = [k for k in transfers if self.agenda.transfers[k].source in devices]
            self._go_on((first, moved), self._clock.now_s())

    def _go_on(self, following: Next, now_s: float) -> None:
        """Requests transfers and gives tasks to their devices, as the rules say."""
        tasks, transfers = following
        for k in transfers:
            destination = self.agenda.transfers[k].destination
            self._requested[destination].append(k)
            _notify(self._has_request, destination)
        for v in tasks:
            device = self.agenda.placement[v]
            self._ready[device].add(v, now_s)
            _notify(self._has_ready, device)

    def _finished(self, v: int, now_s: float) -> None:
        self._go_on(self._rules.finished(v), now_s)
        self._num_unfinished -= 1
        device = self.agenda.placement[v]
        self._num_left[device] -= 1
        if self._behind is not None and (ended := self._parts_ended([device])):
            self._behind._begin(ended)
        if not self._num_unfinished:
            self._let_go()

    def _workers(self, device: jax.Device) -> list[tuple[str, Callable[[int], None]]]:
        if self._share_memory:
            return [("compute", self._compute)]
        receive = ("receive", self._receive)
        if run_ahead(device):
            return [("launch", self._launch_ahead), ("await", self._await_launched), receive]
        return [("compute", self._compute), receive]

    def _work(self, worker: Callable[[int], None], device: int) -> None:
        try:
            worker(device)
        except BaseException as error:
            name = threading.current_thread().name
            what = f"worker '{name}' died on device {device} ({self.program.devices[device]})"
            self._end_by(TaskError(what, -1, device, error))

    def _compute(self, device: int) -> None:
        with self._lock:
            v = self._take(device)
        while v is not None:
            try:
                results = self._launch(v)
                self._wait_for(results)
            except BaseException as error:
                self._fail(v, error)
                return
            self.record.finish_s[v] = finish_s = self._clock.now_s()
            with self._lock:
                self._buffers.made(v, results)
                self._go_on(self._rules.launched(v), finish_s)
                self._finished(v, finish_s)
                self._room[device] += 1
            self._hand_over()
            if self._behind is not None:
                self._behind._hand_over()  # what has just been begun
            with self._lock:
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
                    self._buffers.made(v, results)
                    self._go_on(self._rules.launched(v), self._clock.now_s())
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
                self._fail(v, error)
                return
            finish_s = self._clock.now_s()
            self.record.start_s[v] = max(self.record.start_s[v], free_s)
            self.record.finish_s[v] = free_s = finish_s
            del item, results  # else a waiting worker would keep them
            with self._lock:
                self._finished(v, finish_s)
                self._room[device] += 1
                _notify(self._has_ready, device)

    def _take(self, device: int) -> int | None:
        """Waits, with the lock held, for the next task of a device; None: there is no more."""
        while not self._stopped:
            may_run = self._has_begun[device] and self._room[device]
            if may_run and (first := self._ready[device].take()):
                self._room[device] -= 1
                return first[1]
            self._has_ready[device].wait()
        return None

    def _launch(self, v: int) -> Sequence[jax.Array]:
        operands = self._buffers.operands(v)
        self.record.start_s[v] = self._clock.now_s()
        return self.program.executables[v](*operands)

    def _wait_for(self, results: Sequence[jax.Array]) -> None:
        for result in results:
            result.block_until_ready()
        if self.program.options.check_nan:
            ops.refuse_nan(results)

    def _receive(self, device: int) -> None:
        while batch := self._next_transfers(device):
            self._move(batch)

    def _hand_over(self) -> None:
        """Moves whatever was requested, between devices that share their memory."""
        while self._share_memory and any(self._requested) and not self._stopped:
            with self._lock:
                batch = [k for requested in self._requested for k in requested]
                for requested in self._requested:
                    requested.clear()
            if batch:
                self._move(batch)

    def _move(self, batch: list[int]) -> None:
        """Does transfers; a failure ends the call."""
        num_tasks, k = self.record.num_tasks, batch[0]
        try:
            # All copies that were asked for are under way before the first is awaited.
            copies: deque[tuple[int, jax.Array | np.ndarray]] = deque()
            for k in batch:
                transfer = self.agenda.transfers[k]
                self.record.start_s[num_tasks + k] = self._clock.now_s()
                there = self.program.devices[transfer.destination]
                copies.append((k, ops.transfer(self._buffers.get(transfer.source_slot), there)))
            while copies:
                k, copy = copies.popleft()
                ops.wait_for(copy)
                self.record.finish_s[num_tasks + k] = finish_s = self._clock.now_s()
                with self._lock:
                    self._buffers.moved(k, copy)
                    self._go_on(self._rules.arrived(k), finish_s)
                del copy
        except BaseException as error:
            self._fail(num_tasks + k, error)

    def _next_transfers(self, device: int) -> list[int]:
        with self._lock:
            while not self._requested[device] and not self._stopped:
                self._has_request[device].wait()
            batch = [] if self._stopped else list(self._requested[device])
            self._requested[device].clear()
            return batch

    def _fail(self, event: int, cause: BaseException) -> None:
        self._end_by(event_error(self.agenda, self.program.devices, event, cause))

    def _end_by(self, error: TaskError) -> None:
        with self._lock:
            self._error = self._error or error
        self._stop()

    def _stop(self) -> None:
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        """Tells every worker, with the lock held, to end after what it is doing."""
        self._stopped = True
        for condition in (*self._has_ready.values(), *self._has_request.values()):
            condition.notify_all()


def _notify(conditions: Mapping[int, threading.Condition], device: int) -> None:
    """Wakes who waits for something on a device, if there is anybody; the lock is taken."""
    if device in conditions:
        conditions[device].notify()
