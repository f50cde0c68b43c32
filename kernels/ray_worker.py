"""What lives in a device process between calls: kernels, arguments, programs, connections."""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from .ray_mesh import Mesh
from .ray_run import DeviceRun
from .ray_shipping import DeviceResult, Shipment, compile_kernel, to_device


class Worker:
    """One device's process; its methods are called through Ray, from several threads."""

    def __init__(self, index: int, host: str, secret: bytes, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            jax.config.update(name, value)
        self._mesh = Mesh(index, host, secret, self, jax.default_backend() == "cpu")
        self._executables: dict[str, Any] = {}  # by digest
        self._blocks: dict[int, jax.Array] = {}
        self._programs: dict[int, tuple[Shipment, int]] = {}
        self._one_call = threading.Lock()
        self._lock = threading.Lock()  # of what follows
        self._run: DeviceRun | None = None
        self._last_call = -1
        self._last_stopped = -1
        self._early: dict[int, list[tuple[int, float, np.ndarray]]] = {}
        self._lost: set[int] = set()

    def describe(self) -> tuple[str, str]:
        """Returns the name and the kind of the device."""
        device = jax.devices()[0]
        return str(device), device.device_kind

    def address(self) -> tuple[str, int]:
        return self._mesh.address

    def connect(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._mesh.connect(addresses)

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
                self._executables[digest] = compile_kernel(serialised)
            except Exception as error:
                return digest, f"{type(error).__name__}: {error}"
        return None

    def load(self, program: int, shipment: Shipment, device: int) -> None:
        """Keeps a program, of which this process is device `device`."""
        self._programs[program] = shipment, device

    def keep(self, blocks: dict[int, tuple[np.ndarray, jax.ShapeDtypeStruct]]) -> None:
        """Lays blocks of arguments here, by the numbers that the driver gives them."""
        for number, (host, aval) in blocks.items():
            self._blocks[number] = to_device(np.array(host), aval)
        jax.block_until_ready(list(self._blocks.values()))

    def forget(self, programs: Iterable[int], blocks: Iterable[int]) -> None:
        """Drops what the driver needs no more."""
        for number in programs:
            self._programs.pop(number, None)
        for number in blocks:
            self._blocks.pop(number, None)

    def run(
        self, program: int, call: int, laid: dict[int, int], start_at_s: float
    ) -> DeviceResult:
        """Runs this device's part of a call; `laid` tells the block in each slot."""
        self.stop(call - 1)  # Ctrl-C may have kept the driver from ending it everywhere
        with self._one_call:
            shipment, device = self._programs[program]
            slots = {slot: self._blocks[number] for slot, number in laid.items()}
            run = DeviceRun(shipment, device, call, self._executables, slots, self._mesh)
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
                return run.execute(start_at_s)
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
