"""Device operations: kernels compiled ahead of time, transfers, resident arguments."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from doppler_jax.programs.blocks import slice_block
from doppler_jax.types import Kernel, ShardedProgram

from .plan import Plan

Executable = Callable[..., Sequence[jax.Array]]


class Executables:
    """Compiled kernels by (kernel, device); each is compiled once, when first asked for.

    Share one between programs placed differently to share their compilations.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[Kernel, jax.Device], Executable] = {}
        self.compile_s = 0.0  # seconds spent so far

    def __len__(self) -> int:
        return len(self._compiled)

    def prepare(self, wanted: Iterable[tuple[Kernel, jax.Device]]) -> None:
        """Compiles what is wanted and not there yet, on several cores."""
        started = time.perf_counter()
        missing = [key for key in dict.fromkeys(wanted) if key not in self._compiled]
        # Traced here, since JAX's settings may differ by thread; XLA compiles outside the GIL.
        lowered = [_lower(kernel, device) for kernel, device in missing]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = pool.map(lambda stage: stage.compile(), lowered)
            self._compiled.update(zip(missing, compiled, strict=True))
        self.compile_s += time.perf_counter() - started

    def __getitem__(self, key: tuple[Kernel, jax.Device]) -> Executable:
        return self._compiled[key]


def _lower(kernel: Kernel, device: jax.Device) -> jax.stages.Lowered:
    here = SingleDeviceSharding(device)
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in kernel.operands]
    # Naming the output's device places kernels without operands too.
    return jax.jit(kernel.fn, out_shardings=here).lower(*operands)


def transfer(array: jax.Array, device: jax.Device) -> jax.Array:
    """Starts the copy of an array to another device and returns it, perhaps not yet there."""
    return jax.device_put(array, device)


class ResidentBlocks:
    """The blocks of a call's arguments, on the devices that read them."""

    def __init__(
        self, sharded: ShardedProgram, values: list[Any], devices: Sequence[jax.Device]
    ) -> None:
        self._inputs = sharded.inputs
        self._values = values
        self._devices = devices
        self._blocks: dict[int, jax.Array] = {}
        self._placed: dict[tuple[int, int], jax.Array] = {}

    def lay(self, plan: Plan) -> list[jax.Array | None]:
        """Returns a call's slots `[S]`, those of graph inputs filled with arrived blocks."""
        slots: list[jax.Array | None] = [None] * len(plan.num_reads)
        for i, device, slot in plan.inputs:
            slots[slot] = self._place(i, device)
        jax.block_until_ready(slots)
        return slots

    def _place(self, i: int, device: int) -> jax.Array:
        if i not in self._blocks:
            block = self._inputs[i]
            self._blocks[i] = slice_block(self._values[block.source], block)
        if (i, device) not in self._placed:
            self._placed[i, device] = jax.device_put(self._blocks[i], self._devices[device])
        return self._placed[i, device]
