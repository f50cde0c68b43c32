"""What travels to device processes: kernels, arrays, and each call's result."""

import ctypes
import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from doppler_jax.types import Kernel, ShardedProgram

from .plan import Plan


@dataclasses.dataclass(frozen=True)
class Shipment:
    """A placed program as every device process gets it."""

    plan: Plan
    peers: tuple[int, ...]  # [D] index in the mesh of each device
    digests: tuple[str, ...]  # [N] kernel of each task
    avals: tuple[jax.ShapeDtypeStruct, ...]  # [S] what lies in each slot
    levels: tuple[int, ...] | None  # [N] to run level by level; None: work-conserving
    check_nan: bool


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a device ended a call early."""

    kind: str  # "task", "transfer" or "lost"
    id: int  # task, transfer, or device that was lost
    at_s: float  # on the clock of the device that tells
    reason: str


@dataclasses.dataclass(frozen=True)
class DeviceResult:
    """What one device has to tell after a call; seconds on its own clock."""

    tasks: list[tuple[int, float, float]]  # (task, start, finish)
    received: list[tuple[int, float, float]]  # (transfer, start by the source's clock, finish)
    handled: list[tuple[float, float]]  # (start, finish) of moving tensors between tasks
    outputs: dict[int, np.ndarray]  # by slot
    failure: Failure | None
    peak_bytes: int | None  # most since the process began, where the allocator tells


class KernelExports:
    """Serialised kernels by object; each is exported once."""

    def __init__(self, platform: str) -> None:
        self._platform = platform
        self._exports: weakref.WeakKeyDictionary[Kernel, tuple[str, bytes]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, sharded: ShardedProgram) -> tuple[tuple[str, ...], dict[str, bytes]]:
        """Returns the digest of each task's kernel `[N]`, and the kernels by digest.

        Raises:
          ValueError: a kernel cannot be serialised; names its first task.
        """
        for v, kernel in enumerate(sharded.kernels):
            if kernel not in self._exports:
                try:
                    self._exports[kernel] = _export(kernel, self._platform)
                except Exception as error:
                    raise ValueError(
                        f"task {v} ({sharded.names[v]}): kernel {kernel.name!r} cannot be sent "
                        f"to another process; expected one that jax.export serialises: {error}"
                    ) from error
        exports = [self._exports[kernel] for kernel in sharded.kernels]
        return tuple(digest for digest, _ in exports), dict(exports)


def _export(kernel: Kernel, platform: str) -> tuple[str, bytes]:
    exported = export.export(jax.jit(kernel.fn), platforms=[platform])(*kernel.operands)
    serialised = bytes(exported.serialize())
    return hashlib.sha256(serialised).hexdigest(), serialised


def compile_kernel(serialised: bytes) -> Any:
    """Returns the kernel compiled for this process's device."""
    exported = export.deserialize(bytearray(serialised))
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals]
    return jax.jit(exported.call).lower(*operands).compile()


def slot_avals(sharded: ShardedProgram, plan: Plan) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns what lies in each slot of a plan `[S]`."""
    avals: dict[int, jax.ShapeDtypeStruct] = {}
    for kernel, slots in zip(sharded.kernels, plan.results, strict=True):
        avals.update(zip(slots, kernel.results, strict=True))
    for i, _, slot in plan.inputs:
        avals[slot] = _block_aval(sharded, i)
    for transfer in plan.transfers:
        avals[transfer.slot] = avals[transfer.source_slot]
    return tuple(avals[s] for s in range(len(plan.num_reads)))


def _block_aval(sharded: ShardedProgram, i: int) -> jax.ShapeDtypeStruct:
    block = sharded.inputs[i]
    values: Sequence[Any] = (*sharded.arg_avals, *sharded.consts)
    shape = tuple(b - a for a, b in zip(block.start, block.limit, strict=True))
    return jax.ShapeDtypeStruct(shape, values[block.source].dtype)


def to_host(array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns an array's content, that of random keys as integers; a view where possible."""
    if not isinstance(array.dtype, np.dtype):
        array = jax.random.key_data(array)
    return np.asarray(array)


def to_device(host: np.ndarray, aval: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the array on this process's device; the inverse of `to_host`."""
    array = jax.device_put(host)
    if not isinstance(aval.dtype, np.dtype):
        return jax.random.wrap_key_data(array, impl=_key_impl(aval))
    return array


def _key_impl(aval: jax.ShapeDtypeStruct) -> Any:
    return jax.random.key_impl(jax.numpy.empty((), aval.dtype))


def to_bytes(array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns an array's content as uint8 `[bytes]`; a view where possible."""
    try:
        return np.frombuffer(array, np.uint8)  # type: ignore[arg-type]
    except (BufferError, TypeError, ValueError):  # keys, bfloat16, accelerators
        return np.ascontiguousarray(to_host(array)).reshape(-1).view(np.uint8)


def from_bytes(body: np.ndarray, aval: jax.ShapeDtypeStruct) -> jax.Array | np.ndarray:
    """Returns an array that kernels here can take as it is; the inverse of `to_bytes`."""
    if not isinstance(aval.dtype, np.dtype):
        data = jax.eval_shape(jax.random.key_data, aval)
        return jax.block_until_ready(to_device(body.view(data.dtype).reshape(data.shape), aval))
    host = body.view(aval.dtype).reshape(aval.shape)
    # A CPU kernel reads it where it lies; to make a JAX array of it first is only dispatch.
    if _computes_on_cpu():
        return host
    return jax.block_until_ready(to_device(host, aval))


@functools.cache
def _computes_on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def aligned_bytes(num_bytes: int) -> np.ndarray:
    """Returns room `[num_bytes]` that JAX can take as an array on a CPU without a copy."""
    room = np.empty(num_bytes + 64, np.uint8)
    # `room.ctypes.data` tells the same by way of more code.
    start = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % 64  # type: ignore[arg-type]
    return room[start : start + num_bytes]
