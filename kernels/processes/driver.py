"""Devices that are processes: placed programs on them, and a call as this process sees it.

`load` ships the whole agenda to every process once. A call then takes one message to each, with
the arguments that are new, and one back, by a line past the launcher (`line.py`). In between, a
process runs its own ready tasks in order and sends what others read straight to them, and the
driver only waits.

Last comes one clock for all devices: offsets between machines, and the record of a call.
"""

import dataclasses
import functools
import math
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from doppler_jax.programs.blocks import block_aval, join_output, slice_block
from doppler_jax.programs.outputs import Blocks, Output
from doppler_jax.types import ShardedProgram

from ..agenda import RULES, Agenda
from ..devices import Devices, LoadedProgram, Options, event_error
from ..running import Execution, Running, TaskError
from ..trace import Chore, Chores, Record
from .device import DeviceResult, Shipment
from .line import wait
from .session import ProcessDevice, Session, ask_all, lost_device, this_host
from .transport import to_device, to_host

_ANSWER_S = 5.0  # for a live process to answer
_LOOK_S = 1.0  # between looks at whether the launcher has lost a process
_END_S = 10.0  # for a stopped device to end what it is at
_NUM_TRIPS = 8  # to another machine, to read its clock


class ProcessDevices(Devices):
    """Device processes in order, which a launcher started.

    Close them when done, or use them as a context manager. Some of them, as a slice or a list,
    are devices, too.

    Raises:
      ValueError: `devices` is empty, one occurs twice, or they are of several sessions.
    """

    modes = tuple(sorted(RULES))

    def __init__(self, devices: Sequence[ProcessDevice]) -> None:
        super().__init__(devices)
        for i, device in enumerate(self._devices):
            if not isinstance(device, ProcessDevice):
                raise ValueError(f"devices[{i}] is {device!r}; expected a device process")
        self._session: Session = self._devices[0].session
        if any(device.session is not self._session for device in self._devices):
            raise ValueError("devices are of several sessions; expected one")
        self.backend, self.calls = self._session.backend, self._session.calls
        self.device_names = tuple(device.name for device in self._devices)
        self.device_kinds = tuple(device.kind for device in self._devices)
        self.capacity_bytes = np.full(len(self), np.inf)

    def __getitem__(self, i: Any) -> Any:
        return ProcessDevices(self._devices[i]) if isinstance(i, slice) else self._devices[i]

    def __enter__(self) -> "ProcessDevices":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.calls.abandon(ValueError("the devices were closed"))
        self.close()

    def close(self) -> None:
        """Ends all calls, all processes of the session, and the launcher if it started it."""
        with self.calls.none():
            self._session.close()

    def check_open(self) -> None:
        """Raises `ValueError` if the devices were closed."""
        self._session.check_open()

    def alive(self) -> tuple[int, ...]:
        """Returns the positions of the devices that answer; takes seconds if some do not."""
        answers = [device.call("process_id") for device in self._devices]
        self._session.wait(answers, _ANSWER_S, for_all=True)
        found = [self._session.outcome(answer) for answer in answers]
        return tuple(i for i, answer in enumerate(found) if isinstance(answer, int))

    def without_lost(self) -> "ProcessDevices":
        """Returns the devices that answer, to place on anew what a lost one had."""
        return ProcessDevices([self._devices[i] for i in self.alive()])

    def load(self, sharded: ShardedProgram, agenda: Agenda, options: Options) -> "_Program":
        """Returns the program ready to run, its kernels compiled where they are needed.

        Raises:
          ValueError: a kernel cannot be serialised, the devices are closed, or `out_device` is
            given, since outputs come to this process.
          TaskError: a kernel does not compile, or a device is lost.
        """
        self.check_open()
        if options.out_device is not None:
            raise ValueError(
                f"out_device is {options.out_device}, but device processes return their "
                "outputs to this process; expected None"
            )
        started = time.perf_counter()
        digests = _compile(sharded, agenda, self._devices)
        compile_s = time.perf_counter() - started
        session, avals = self._session, _slot_avals(sharded, agenda)
        number = session.new_number()
        program = _Program(
            sharded,
            agenda,
            options,
            self._devices,
            self.calls,
            compile_s,
            session,
            number,
            avals,
        )
        weakref.finalize(program, session.forgotten.append, ("program", number))
        peers = tuple(device.index for device in self._devices)
        shipment = Shipment(agenda, peers, digests, avals, options.check_nan)
        arguments = [(number, shipment, d) for d in range(len(self))]
        ask_all(self._devices, "load", arguments)
        return program


_ROOM = 1 << 16
"""Bytes of new arguments that are sent to processes which may not read them at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Laid:
    """A call's arguments on their devices."""

    blocks: list[dict[int, int]]  # [D] number of the block in each slot
    new: list[dict[int, np.ndarray]]  # [D] by number, what has yet to be laid
    values: tuple[Any, ...]  # kept, so that their blocks are
    to_note: list[tuple[dict[Any, int], Any, int]]  # of what is new, once it is sent


class _Outcomes:
    """What the devices of a call have answered so far, see `of`."""

    def __init__(self, devices: Sequence[ProcessDevice]) -> None:
        self.of: list[Any] = [None] * len(devices)  # a result, or why a device failed
        self._pending: dict[int, ProcessDevice] = {}
        self._devices = devices

    def send(self, d: int, method: str, *args: Any) -> None:
        """Asks device `d`; if it is lost, that is its answer."""
        try:
            self._devices[d].send(method, *args)
            self._pending[d] = self._devices[d]
        except OSError as error:
            self.of[d] = error

    def has_failure(self) -> bool:
        """Returns whether a device has failed, or was lost."""
        found = (o for o in self.of if o is not None)
        return any(isinstance(o, BaseException) or o.failure is not None for o in found)

    def wait(
        self, timeout_s: float | None, chores: Chores | None = None, *, for_all: bool = False
    ) -> bool:
        """Waits for a failure or all answers; returns False if time ran out.

        Args:
          timeout_s: None: for ever.
          chores: to which reading of answers is added.
          for_all: whether to wait for the others after a failure.
        """
        deadline_s = time.perf_counter() + (math.inf if timeout_s is None else timeout_s)
        while self._pending and (for_all or not self.has_failure()):
            left_s = max(0.0, deadline_s - time.perf_counter())
            lines = {d: dev.session.lines[dev.index] for d, dev in self._pending.items()}
            ready = wait(lines, min(left_s, _LOOK_S))
            if not ready and not left_s:
                return False
            for d in ready:
                with (chores or Chores()).doing("receive outputs"):
                    self.of[d] = lines[d].receive()
            for d in [] if ready else lines:
                self.of[d] = self._devices[d].session.lost(self._devices[d].index)
            for d in [d for d in lines if self.of[d] is not None]:
                del self._pending[d]
        return True


@dataclasses.dataclass(frozen=True, eq=False)
class _Program(LoadedProgram):
    """A placed program on device processes."""

    session: Session
    number: int
    avals: tuple[jax.ShapeDtypeStruct, ...]  # [S] what lies in each slot

    def lay(self, values: Sequence[Any]) -> _Laid:
        """Returns the flat arguments by block; those that are new go with the call.

        Raises:
          ValueError: the devices are closed.
        """
        self.session.check_open()
        is_resident = self.sharded.graph.is_resident
        laid = _Laid([{} for _ in self.devices], [{} for _ in self.devices], tuple(values), [])
        for i, d, slot in self.agenda.inputs:
            block = self.sharded.inputs[i]
            value = values[block.source]
            # They are forgotten with the array, or else with this call.
            owner = value if is_resident[i] else laid
            if isinstance(value, Output) and value.blocks is not None:
                owner = value = value.blocks
            blocks = self.session.blocks_of(owner)
            place = (id(value), block.start, block.limit, self.devices[d].index)
            if (number := blocks.get(place)) is None:
                number = self.session.new_number()
                laid.new[d][number] = to_host(slice_block(values[block.source], block))
                laid.to_note.append((blocks, place, number))
            laid.blocks[d][slot] = number
        num_bytes = sum(host.nbytes for new in laid.new for host in new.values())
        if num_bytes > _ROOM and self.calls.latest is not None:
            self.calls.latest.finish()
        return laid

    def start(self, laid: _Laid, chores: Chores, before: Running | None) -> "_Call":
        """Sends a call; the outputs come to this process."""
        numbers = {
            o: [self.session.new_number() for _ in blocks] for o, blocks in self.carried.items()
        }
        call = _Call(self, laid, self._kept(numbers), chores, before)
        call.staying = {o: self._stay(o, found) for o, found in numbers.items()}
        call.send()
        return call

    def _kept(self, numbers: dict[int, list[int]]) -> list[dict[int, int]]:
        """Returns the slots `[D]` of what is to stay on each device, by the number it gets."""
        kept: list[dict[int, int]] = [{} for _ in self.devices]
        for o, blocks in self.carried.items():
            for block, number in zip(blocks, numbers[o], strict=True):
                kept[block.device][number] = block.slot
        return kept

    def _stay(self, o: int, numbers: list[int]) -> Blocks:
        """Returns an output's blocks, which are on the devices by these numbers."""
        blocks = Blocks()
        known = self.session.blocks_of(blocks)
        for block, number in zip(self.carried[o], numbers, strict=True):
            blocks[block.bounds] = block, number
            known[id(blocks), *block.bounds, self.devices[block.device].index] = number
        return blocks

    def assemble(self, o: int, blocks: Blocks) -> jax.Array:
        self.session.check_open()
        wanted: dict[int, list[int]] = defaultdict(list)  # numbers by device
        for block, number in blocks.values():
            wanted[block.device].append(number)
        outcomes = _Outcomes(self.devices)
        with self.calls.none():
            try:
                for d, numbers in wanted.items():
                    outcomes.send(d, "fetch", numbers)
                outcomes.wait(None, for_all=True)
            except BaseException:
                for d in wanted:
                    self.session.lines[self.devices[d].index].hang_up()
                raise
        if any(isinstance(outcome, BaseException) for outcome in outcomes.of):
            raise self.error(outcomes.of)
        hosts: dict[int, np.ndarray] = {}
        for d, numbers in wanted.items():
            hosts.update(zip(numbers, outcomes.of[d], strict=True))
        found = [to_device(hosts[n], self.avals[block.slot]) for block, n in blocks.values()]
        return join_output(self.sharded.outputs[o], found)

    def timeout(self, running: list[int | None], outcomes: list[Any]) -> TaskError:
        """Names a task that was running, or else the first that has yet to run."""
        cause = TimeoutError(f"the call has taken more than {self.options.timeout_s} s")
        ended = {v for o in outcomes if isinstance(o, DeviceResult) for v, _, _ in o.tasks}
        at = [v for v in running if v is not None]
        for v in (*at, *(v for v in self.agenda.order if v not in ended)):
            return event_error(self.agenda, self.devices, v, cause)
        return TaskError("the call did not end", -1, -1, cause)

    def error(self, outcomes: list[Any]) -> TaskError:
        """Returns the error of what went wrong first; a lost device takes others with it."""
        for d, outcome in enumerate(outcomes):
            if isinstance(outcome, RuntimeError):  # its own words, so it is there
                what = f"device {d} ({self.devices[d]}) could not run the call"
                return TaskError(what, -1, d, outcome)
            if isinstance(outcome, BaseException):
                return lost_device(self.devices, d, outcome)
        failures = [o.failure for o in outcomes if o is not None and o.failure is not None]
        order = {"lost": 0, "task": 1, "transfer": 2}
        first = min(failures, key=lambda failure: (order[failure.kind], failure.at_s))
        cause = RuntimeError(first.reason)
        if first.kind == "lost":
            return lost_device(self.devices, first.id, cause)
        event = first.id + (first.kind == "transfer") * len(self.agenda.names)
        return event_error(self.agenda, self.devices, event, cause)


class _Call(Running):
    """A call on device processes.

    They take one after another, each as it has ended its part of the one before, whatever the
    others are at.
    """

    def __init__(
        self,
        program: _Program,
        laid: _Laid,
        kept: list[dict[int, int]],
        chores: Chores,
        before: Running | None,
    ) -> None:
        self._program, self._laid, self._kept = program, laid, kept
        parts: list[dict[int, Any]] = [*laid.new, *kept]
        self._new = [number for part in parts for number in part]
        self._chores, self._before = chores, before
        self._outcomes = _Outcomes(program.devices)

    def send(self) -> None:
        """Tells the devices; a lost one has answered."""
        program, session = self._program, self._program.session
        self._offsets_s = clock_offsets_s(program.devices)
        dropped = session.clear_up({device.index for device in program.devices})
        number = session.new_number()
        try:
            with self._chores.doing("send the call"):
                for d, blocks in enumerate(self._laid.blocks):
                    parts = self._laid.new[d], blocks, self._kept[d], dropped
                    self._outcomes.send(d, "run", program.number, number, *parts)
        except BaseException as error:
            try:
                self._stop()
            finally:
                program.calls.abandon(error)  # of the call before the lines are gone, too
            raise
        self._sent_s = time.perf_counter()
        for blocks, place, block in self._laid.to_note:
            blocks[place] = block
        for new in self._laid.new:
            new.clear()

    def is_ready(self) -> bool:
        return self._outcomes.wait(0.0, self._chores)

    def finish(self) -> Execution:
        program, timeout_s = self._program, self._program.options.timeout_s
        since_s = max(self._sent_s, self._before.ended_s if self._before else 0.0)
        self._before = None
        left_s = timeout_s and since_s + timeout_s - time.perf_counter()
        try:
            in_time = self._outcomes.wait(left_s, self._chores)
        except BaseException:
            self._stop()
            raise
        self.ended_s = time.perf_counter()
        results: list[Any] = self._outcomes.of
        if not in_time or self._outcomes.has_failure():
            running = self._stop()
            raise program.error(results) if in_time else program.timeout(running, results)
        slots = {slot: host for result in results for slot, host in result.outputs.items()}
        told = program.agenda, results, self._offsets_s, self._chores
        execution = program.execution(
            functools.partial(make_record, *told),
            lambda blocks: [to_device(slots[s], program.avals[s]) for s in blocks],
            [result.peak_bytes for result in results],
            self._chores,
        )
        for result in results:
            result.outputs.clear()
        return execution

    def abandon(self, error: TaskError) -> None:
        """Forgets it; the devices have been told to stop with the call before, or will be."""
        for device in self._program.devices:
            self._program.session.lines[device.index].hang_up()
        self._forget()

    def _forget(self) -> None:
        """Forgets what is new on the devices; some may be there, and nothing asks for it."""
        for blocks, place, _ in self._laid.to_note:
            blocks.pop(place, None)
        for staying in self.staying.values():
            self._program.session.blocks_of(staying).clear()
        self._program.session.forgotten.extend(("block", number) for number in self._new)
        self._new = []

    def _stop(self) -> list[int | None]:
        """Ends all calls on every device; returns the task `[D]` that each was running.

        The devices have stopped then, save those that need over 10 s to end a task. What is
        new there is forgotten.
        """
        program, session = self._program, self._program.session
        try:
            number = session.new_number()
            told = [device.call("stop", number) for device in program.devices]
            session.wait(told, _ANSWER_S, for_all=True)
            self._outcomes.wait(_END_S, for_all=True)
            answers = [session.outcome(reference) for reference in told]
            return [answer if isinstance(answer, int) else None for answer in answers]
        finally:
            for device in program.devices:
                session.lines[device.index].hang_up()
            self._forget()


def _compile(
    sharded: ShardedProgram, agenda: Agenda, devices: tuple[ProcessDevice, ...]
) -> tuple[str, ...]:
    """Compiles each kernel where it is needed and not there yet; returns the digests `[N]`."""
    digests, kernels = devices[0].session.export(sharded)
    needed: list[set[str]] = [set() for _ in devices]
    for digest, d in zip(digests, agenda.placement, strict=True):
        needed[d].add(digest)
    missing = ask_all(devices, "missing_kernels", [(digests,) for digests in needed])
    wanted = [({digest: kernels[digest] for digest in sorted(some)},) for some in missing]
    for d, failure in enumerate(ask_all(devices, "compile", wanted)):
        if failure is not None:
            digest, reason = failure
            v = digests.index(digest)
            what = f"task {v} ({sharded.names[v]}) does not compile on device {d}"
            raise TaskError(f"{what} ({devices[d]})", v, d, RuntimeError(reason))
    return digests


def _slot_avals(sharded: ShardedProgram, agenda: Agenda) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns what lies in each slot of an agenda `[S]`."""
    avals: dict[int, jax.ShapeDtypeStruct] = {}
    for kernel, slots in zip(sharded.kernels, agenda.results, strict=True):
        avals.update(zip(slots, kernel.results, strict=True))
    values: Sequence[Any] = (*sharded.arg_avals, *sharded.consts)
    for i, _, slot in agenda.inputs:
        block = sharded.inputs[i]
        avals[slot] = block_aval(block, values[block.source])
    for transfer in agenda.transfers:
        avals[transfer.slot] = avals[transfer.source_slot]
    return tuple(avals[s] for s in range(len(agenda.num_reads)))


def clock_offsets_s(devices: Sequence[ProcessDevice]) -> list[float]:
    """Returns how far each device's clock `[D]` is ahead of this process's.

    Processes of one machine share its monotonic clock. Another machine's is read in the
    middle of the shortest of some round trips.
    """
    here = this_host()
    return [0.0 if device.host == here else _offset_s(device) for device in devices]


def _offset_s(device: ProcessDevice) -> float:
    trips = []
    for _ in range(_NUM_TRIPS):
        sent_s = time.perf_counter()
        (there_s,) = ask_all([device], "now_s", [()])
        back_s = time.perf_counter()
        trips.append((back_s - sent_s, there_s - (sent_s + back_s) / 2))
    return min(trips)[1]


def make_record(
    agenda: Agenda,
    results: Sequence[DeviceResult],
    offsets_s: Sequence[float],
    chores: Chores,
) -> Record:
    """Returns what the devices `[D]` did on one clock, from its first start.

    Offsets that were measured are inexact. Where they would let a tensor arrive before it
    was sent, the receiver's clock is moved on: whatever the clocks say, that did not happen.
    Their chores are added to those of the call.
    """
    record, num_tasks = Record(agenda), len(agenda.placement)
    start_s, finish_s = np.array(record.start_s), np.array(record.finish_s)
    for result in results:
        for v, *times_s in result.tasks:
            start_s[v], finish_s[v] = times_s
        for k, *times_s in result.received:
            start_s[num_tasks + k], finish_s[num_tasks + k] = times_s
    starts_on = np.array([*agenda.placement, *(t.source for t in agenda.transfers)], np.int64)
    ends_on = np.array(
        [*agenda.placement, *(t.destination for t in agenda.transfers)], np.int64
    )
    offsets = np.array(offsets_s)
    for _ in offsets:  # to lessen one may ask for another, each at most once
        gaps_s = (start_s - offsets[starts_on]) - (finish_s - offsets[ends_on])
        late_s = np.zeros_like(offsets)
        np.maximum.at(late_s, ends_on, gaps_s)
        offsets -= late_s
    start_s, finish_s = start_s - offsets[starts_on], finish_s - offsets[ends_on]
    record.origin_s = origin_s = start_s.min(initial=np.inf)
    record.start_s, record.finish_s = (
        (start_s - origin_s).tolist(),
        (finish_s - origin_s).tolist(),
    )
    since_s = offsets + origin_s
    record.handling = [
        (d, float(a - since_s[d]), float(b - since_s[d]))
        for d, result in enumerate(results)
        for a, b in result.handled
    ]
    chores += [
        Chore(name, d, float(a - offsets[d]), float(b - offsets[d]))
        for d, result in enumerate(results)
        for name, a, b in result.chores
    ]
    return record
