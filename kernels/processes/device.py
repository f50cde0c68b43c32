"""What a device process does: all that lives there between calls, and one call.

A `Worker` keeps kernels, arguments, programs and connections. A `DeviceCall` is one call on one
device. The thread that calls `execute` computes, and polls the mesh between tasks; where
processes share no memory, threads of the mesh deliver and send. The device needs nobody else's
word to go on: its own tasks release its own tasks, and what other devices make comes straight
from them.
"""

import dataclasses
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from ..agenda import Agenda, Asynchronous, phases
from ..memory import Buffers, Slots
from ..ops import allocated_bytes, choose, refuse_nan
from .line import serve
from .transport import RINGS, Mesh, Packet, from_bytes, to_bytes, to_device, to_host

_WAKE_S = 1e-3  # from the last arrival on that the next one is waited for awake
_LOOKS_S = (1e-4, 1e-3)  # between looks after that, the longer the wait


@dataclasses.dataclass(frozen=True)
class Shipment:
    """A placed program as every device process gets it."""

    agenda: Agenda
    peers: tuple[int, ...]  # [D] index in the mesh of each device
    digests: tuple[str, ...]  # [N] kernel of each task
    avals: tuple[jax.ShapeDtypeStruct, ...]  # [S] what lies in each slot
    check_nan: bool


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a device ended a call early."""

    kind: str  # "task", "transfer" or "lost"
    id: int  # task, transfer, or device that was lost
    at_s: float  # on the clock of the device that tells
    reason: str


@dataclasses.dataclass
class DeviceResult:
    """What one device has to tell after a call; seconds on its own clock."""

    tasks: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    """(task, start, finish)"""
    received: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    """(transfer, start by the source's clock, finish)"""
    handled: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """(start, finish) of moving tensors between tasks"""
    outputs: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    """By slot; not of outputs that are carried."""
    failure: Failure | None = None
    chores: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
    """(what, start, finish) beside those"""
    peak_bytes: int | None = None  # most since the process began, where the allocator tells


class Worker:
    """One device's process; its launcher calls its methods, from several threads.

    `run`, `fetch` and `forget` are called by the line alone, one after another.
    """

    def __init__(self, index: int, host: str, secret: bytes, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            jax.config.update(name, value)
        may_share = jax.default_backend() == "cpu" and os.environ.get(RINGS) != "off"
        self._mesh = Mesh(index, host, secret, self, may_share)
        self._listener = socket.create_server((host, 0))
        self._secret = secret
        self._executables: dict[str, Any] = {}  # by digest
        self._blocks: dict[int, jax.Array] = {}
        self._programs: dict[int, tuple[Shipment, int]] = {}
        self._lock = threading.Lock()  # of what follows
        self._run: DeviceCall | None = None
        self._last_call = -1
        self._last_stopped = -1
        self._early: dict[int, list[tuple[int, float, np.ndarray]]] = {}
        self._lost: set[int] = set()

    def describe(self) -> tuple[tuple[str, int], tuple[str, int], str, str]:
        """Returns where peers and the driver may connect, and the device's name and kind."""
        device, line = jax.devices()[0], self._listener.getsockname()[:2]
        return self._mesh.address, line, str(device), device.device_kind

    def connect(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Links this process with all others, and begins to take calls."""
        self._mesh.connect(addresses)
        arguments = self._listener, self._secret, lambda name, *args: getattr(self, name)(*args)
        threading.Thread(target=serve, args=arguments, name="line", daemon=True).start()

    def now_s(self) -> float:
        return time.perf_counter()

    def process_id(self) -> int:
        return os.getpid()

    def missing_kernels(self, digests: Iterable[str]) -> set[str]:
        """Returns those of the digests whose kernels are not compiled here."""
        return set(digests) - self._executables.keys()

    def compile(self, kernels: dict[str, bytes]) -> tuple[str, str] | None:
        """Compiles kernels by digest; returns the one that fails, and why."""
        for digest, serialised in kernels.items():
            try:
                exported = export.deserialize(bytearray(serialised))
                avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals]
                jitted = jax.jit(exported.call)
                compiled = jitted.lower(*avals).compile()
                self._executables[digest] = choose(jitted, compiled, avals)
            except Exception as error:
                return digest, f"{type(error).__name__}: {error}"
        return None

    def load(self, program: int, shipment: Shipment, device: int) -> None:
        """Keeps a program, of which this process is device `device`."""
        self._programs[program] = shipment, device

    def forget(self, programs: Iterable[int], blocks: Iterable[int]) -> None:
        """Drops what the driver needs no more."""
        for number in programs:
            self._programs.pop(number, None)
        for number in blocks:
            self._blocks.pop(number, None)

    def fetch(self, blocks: Sequence[int]) -> list[np.ndarray]:
        """Returns blocks that earlier calls left here, by their numbers."""
        return [to_host(self._blocks[number]) for number in blocks]

    def run(
        self,
        program: int,
        call: int,
        new: dict[int, np.ndarray],
        laid: dict[int, int],
        kept: dict[int, int],
        dropped: tuple[Sequence[int], Sequence[int]],
    ) -> DeviceResult:
        """Runs this device's part of a call.

        Args:
          program: its number.
          call: its number.
          new: blocks of arguments, by the numbers that the driver gives them.
          laid: number of the block in each slot.
          kept: by the number that it gets, the slot of each block that stays here.
          dropped: programs and blocks to forget before.
        """
        began_s = time.perf_counter()
        self.forget(*dropped)
        shipment, device = self._programs[program]
        avals = {number: shipment.avals[slot] for slot, number in laid.items()}
        for number, host in new.items():
            self._blocks[number] = to_device(host, avals[number])
        jax.block_until_ready([self._blocks[number] for number in new])
        laid_s = time.perf_counter()
        slots = {slot: self._blocks[number] for slot, number in laid.items()}
        run = DeviceCall(shipment, device, call, self._executables, slots, self._mesh)
        with self._lock:
            self._run, self._last_call = run, max(self._last_call, call)
            early = self._early.pop(call, [])
            self._early = {c: items for c, items in self._early.items() if c > call}
            lost, is_stopped = set(self._lost), call <= self._last_stopped
        for item in early:
            run.arrived(*item)
        for peer in lost:
            run.lose(peer)
        if is_stopped:
            run.stop()
        try:
            result = run.execute(laid_s)
            self._blocks.update(run.take(kept))
            result.chores.append(("lay arguments", began_s, laid_s))
            return result
        finally:
            with self._lock:
                self._run = None

    def stop(self, call: int) -> int | None:
        """Ends a call, begun or not, and all before it; returns the task that is running."""
        with self._lock:
            self._last_stopped = max(self._last_stopped, call)
            run = self._run
        return run.stop() if run is not None and run.call <= call else None

    def arrived(self, call: int, item: int, start_s: float, body: np.ndarray) -> None:
        """Part of `Inbox`; what comes before the call has begun here waits for it."""
        with self._lock:
            run = self._run
            if call > self._last_call:
                self._early.setdefault(call, []).append((item, start_s, body))
        if run is not None and run.call == call:
            run.arrived(item, start_s, body)

    def lost(self, peer: int) -> None:
        """Part of `Inbox`."""
        with self._lock:
            self._lost.add(peer)
            run = self._run
        if run is not None:
            run.lose(peer)


class DeviceCall:
    """State of one call; what the threads share is guarded by `_lock`."""

    def __init__(
        self,
        shipment: Shipment,
        device: int,
        call: int,
        executables: Mapping[str, Any],
        laid: dict[int, jax.Array],
        mesh: Mesh,
    ) -> None:
        agenda = shipment.agenda
        self.call = call
        self._shipment = shipment
        self._agenda = agenda
        self._device = device
        self._mesh = mesh
        self._executables = executables  # by digest
        self._slots: Slots = [laid.get(s) for s in range(len(agenda.num_reads))]
        self._buffers = Buffers(agenda, self._slots)
        self._lock = threading.RLock()  # taken between tasks: a Condition's own takes longer
        self._changed = threading.Condition(self._lock)
        self._is_asleep = False
        self._rules = Asynchronous(agenda)
        self._ready = agenda.ready_set(device)
        self._result = DeviceResult()
        self._signals: Counter[int] = Counter()
        self._num_unsent = 0
        self._num_awaited = 0  # transfers, so far, by bulk-synchronous rules
        self._stopped = False
        self._running: int | None = None
        ready, self._first_transfers = self._rules.begin()
        self._make_ready((v for v in ready if agenda.placement[v] == device), 0.0)

    def execute(self, began_s: float) -> DeviceResult:
        """Runs this device's part, and returns what it did; it is being set up since then."""
        self._result.chores.append(("set up", began_s, time.perf_counter()))
        if self._agenda.mode == "bulk_synchronous":
            self._bulk_synchronous()
        else:
            self._asynchronous()
        self._wait(lambda: not self._num_unsent)
        ended_s = time.perf_counter()
        if not self._stopped:
            carried, outputs = self._agenda.carried, enumerate(self._agenda.outputs)
            wanted = {s for o, blocks in outputs if o not in carried for s in blocks}
            here = ((s, self._slots[s]) for s in wanted)
            self._result.outputs = {s: to_host(a) for s, a in here if a is not None}
        self._result.peak_bytes = allocated_bytes(jax.devices()[0])
        self._result.chores.append(("hand over outputs", ended_s, time.perf_counter()))
        return self._result

    def take(self, kept: Mapping[int, int]) -> dict[int, jax.Array]:
        """Lets go of all arrays; returns those of some slots, unless the call has failed."""
        found = {} if self._stopped else {n: self._buffers.get(s) for n, s in kept.items()}
        self._slots[:] = [None] * len(self._slots)
        return found

    def stop(self) -> int | None:
        """Ends the call after what it is at; returns the task that is running."""
        with self._lock:
            self._stopped = True
            self._tell()
            return self._running

    def fail(self, kind: str, what: int, error: BaseException) -> None:
        """Ends the call for a failure; the first one counts."""
        reason = f"{type(error).__name__}: {error}"
        with self._lock:
            if not self._stopped:
                self._result.failure = Failure(kind, what, time.perf_counter(), reason)
        self.stop()

    def lose(self, peer: int) -> None:
        """Ends the call if the process that was lost is part of it."""
        if peer in self._shipment.peers:
            device = self._shipment.peers.index(peer)
            self.fail("lost", device, ConnectionError("its process is gone"))

    def arrived(self, item: int, start_s: float, body: np.ndarray) -> None:
        """Takes a tensor (its transfer's number) or a signal (below 0) from another device."""
        if item < 0:
            with self._lock:
                self._signals[item] += 1
                self._tell()
            return
        transfer = self._agenda.transfers[item]
        try:
            array = from_bytes(body, self._shipment.avals[transfer.slot])
        except BaseException as error:
            self.fail("transfer", item, error)
            return
        with self._lock:
            finish_s = time.perf_counter()
            self._result.received.append((item, start_s, finish_s))
            self._buffers.keep(transfer.slot, array)
            self._make_ready(self._rules.arrived(item)[0], finish_s)
            self._tell()

    def _asynchronous(self) -> None:
        self._start_transfers(self._first_transfers)
        for _ in range(self._agenda.placement.count(self._device)):
            first = self._wait(self._ready.take)
            if first is None or not self._run_task(first[1]):
                return
            self._start_transfers(self._rules.finished(first[1])[1])

    def _bulk_synchronous(self) -> None:
        for number, (tasks, transfers) in enumerate(phases(self._agenda)):
            for v in tasks:
                if self._agenda.placement[v] == self._device and not self._run_task(v):
                    return
            self._barrier(2 * number)
            self._start_transfers(transfers)
            destinations = [self._agenda.transfers[k].destination for k in transfers]
            self._num_awaited += destinations.count(self._device)
            self._wait(lambda: len(self._result.received) == self._num_awaited)
            if transfers:
                self._barrier(2 * number + 1)

    def _barrier(self, number: int) -> None:
        """Waits until every device has come to barrier `number`."""
        peers = [peer for d, peer in enumerate(self._shipment.peers) if d != self._device]
        for peer in peers:
            self._mesh.send(peer, Packet(self.call, ~number, self))
        self._wait(lambda: self._signals[~number] == len(peers))

    def _wait(self, done: Callable[[], Any]) -> Any:
        """Returns what `done` returns once it is true, or None if the call has ended.

        Looks for arrivals at least once. `done` is called with `_changed` held.
        """
        last_s = began_s = time.perf_counter()
        while True:
            if self._mesh.poll():
                last_s = time.perf_counter()
                self._result.handled.append((began_s, last_s))
            with self._lock:
                if self._stopped:
                    return None
                if found := done():
                    return found
                idle_s = time.perf_counter() - last_s
                if idle_s > _WAKE_S or not self._mesh.has_rings:
                    most_s = min(max(idle_s / 16, _LOOKS_S[0]), _LOOKS_S[1])
                    self._is_asleep = True
                    # Where there are no rings, threads deliver, and tell.
                    self._changed.wait(most_s if self._mesh.has_rings else None)
                    self._is_asleep = False
            time.sleep(0)  # for whom else this core serves
            began_s = time.perf_counter()

    def _tell(self) -> None:
        """Wakes the thread that computes, where it is not the one that calls this."""
        if self._is_asleep:
            self._changed.notify_all()

    def _run_task(self, v: int) -> bool:
        """Runs task `v`; returns whether the call goes on."""
        kernel = self._executables[self._shipment.digests[v]]
        with self._lock:  # who stops the call is told what runs
            if self._stopped:
                return False
            self._running = v
        operands = self._buffers.operands(v)
        try:
            start_s = time.perf_counter()
            results = jax.block_until_ready(kernel(*operands))
            finish_s = time.perf_counter()
            if self._shipment.check_nan:
                refuse_nan(results)
        except BaseException as error:
            self.fail("task", v, error)
            return False
        del operands
        with self._lock:
            self._result.tasks.append((v, start_s, finish_s))
            self._buffers.made(v, results)
            del results
            self._make_ready(self._rules.launched(v)[0], finish_s)
            self._running = None
        return True

    def _start_transfers(self, transfers: Iterable[int]) -> None:
        mine = [k for k in transfers if self._agenda.transfers[k].source == self._device]
        if not mine:
            return
        began_s = time.perf_counter()
        with self._lock:
            self._num_unsent += len(mine)
        for k in mine:
            peer = self._shipment.peers[self._agenda.transfers[k].destination]
            self._mesh.send(peer, Packet(self.call, k, self))
        if self._mesh.has_rings:
            self._result.handled.append((began_s, time.perf_counter()))

    def open(self, item: int) -> tuple[float, np.ndarray] | None:
        """Part of `Sender`; the items are those of `arrived`."""
        if item < 0:
            return time.perf_counter(), np.empty(0, np.uint8)
        with self._lock:
            if self._stopped:
                return None
            array = self._buffers.get(self._agenda.transfers[item].source_slot)
            start_s = time.perf_counter()
        return start_s, to_bytes(array)

    def sent(self, item: int) -> None:
        """Part of `Sender`."""
        if item < 0:
            return
        with self._lock:
            self._num_unsent -= 1
            if not self._stopped:
                self._buffers.drop_read(self._agenda.transfers[item].source_slot)
            self._tell()

    def failed(self, item: int, error: BaseException) -> None:
        """Part of `Sender`."""
        if item >= 0:
            self.fail("transfer", item, error)

    def _make_ready(self, tasks: Iterable[int], now_s: float) -> None:
        for v in tasks:
            self._ready.add(v, now_s)
