"""Device operations: kernels compiled ahead of time and kept, transfers, a look for NaN."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from doppler_jax.types import Kernel

Executable = Callable[..., Sequence[jax.Array]]


class ExecutableKey(NamedTuple):
    """What is compiled once."""

    kernel: Kernel
    device: jax.Device
    donated: tuple[int, ...] = ()  # operands whose memory the results may take


class CompileError(Exception):
    """A kernel does not compile."""

    def __init__(self, key: ExecutableKey, cause: Exception) -> None:
        super().__init__(f"kernel {key.kernel.name} does not compile for {key.device}")
        self.key = key
        self.cause = cause


class Executables:
    """Compiled kernels by (kernel, device); each is compiled once, when first asked for."""

    def __init__(self) -> None:
        self._compiled: dict[ExecutableKey, Executable] = {}
        self.compile_s = 0.0  # seconds spent so far

    def __len__(self) -> int:
        return len(self._compiled)

    def prepare(self, wanted: Iterable[ExecutableKey]) -> None:
        """Compiles what is wanted and not there yet, on several cores.

        Raises:
          CompileError: a kernel does not compile; those before it are kept.
        """
        started = time.perf_counter()
        stages: dict[ExecutableKey, Future[Executable]] = {}
        missing = [key for key in dict.fromkeys(wanted) if key not in self._compiled]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            try:
                # Traced here, since JAX's settings may differ by thread; XLA compiles outside
                # the GIL.
                for key in missing:
                    stages[key] = pool.submit(_lower(*key).compile)
                for key, stage in stages.items():
                    self._compiled[key] = stage.result()
            except Exception as error:
                pool.shutdown(cancel_futures=True)
                raise CompileError(key, error) from error
        self.compile_s += time.perf_counter() - started

    def __getitem__(self, key: ExecutableKey) -> Executable:
        return self._compiled[key]


def _lower(kernel: Kernel, device: jax.Device, donated: tuple[int, ...]) -> jax.stages.Lowered:
    here = SingleDeviceSharding(device)
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in kernel.operands]
    # Naming the output's device places kernels without operands too.
    return jax.jit(kernel.fn, out_shardings=here, donate_argnums=donated).lower(*operands)


def transfer(array: jax.Array, device: jax.Device) -> jax.Array | np.ndarray:
    """Starts the move of an array that a kernel on another device will read, and returns it.

    Between CPU devices, which share their memory, one that has been computed is not copied:
    what is returned is a view, which the compiled kernel wraps as it is called, for a fraction
    of what `jax.device_put` takes. The old array must not be donated then, the view may be:
    JAX copies it first.
    """
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    on_cpu = all(end.platform == "cpu" for end in (device, *array.devices()))
    shares = on_cpu and not is_key and are_ready([array])
    return np.asarray(array) if shares else jax.device_put(array, device)


def wait_for(array: Any) -> None:
    """Waits until an array has been computed, or moved; a view has been."""
    if not isinstance(array, np.ndarray):
        array.block_until_ready()


def are_ready(arrays: Sequence[Any]) -> bool:
    """Returns whether all arrays have been computed; waits for nothing."""
    for array in arrays:
        if isinstance(array, np.ndarray):
            continue
        # Typed random keys cannot be asked, their data can.
        data: Any = array if hasattr(array, "is_ready") else jax.random.key_data(array)
        if not data.is_ready():
            return False
    return True


def allocated_bytes(device: jax.Device) -> int | None:
    """Returns the most since the process began, where the device's allocator tells."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def refuse_nan(results: Sequence[jax.Array]) -> None:
    """Waits for a task's results, and raises `FloatingPointError` if one holds a NaN."""
    for i, result in enumerate(results):
        if jnp.issubdtype(result.dtype, jnp.inexact) and _has_nan(result):
            raise FloatingPointError(f"result {i} of {len(results)} holds a NaN")


@jax.jit
def _has_nan(array: jax.Array) -> jax.Array:
    return jnp.isnan(array).any()
