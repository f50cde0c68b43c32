"""Device operations: kernels compiled ahead of time and kept, transfers, a look for NaN.

And JAX's settings, which threads do not inherit.
"""

import contextlib
import operator
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from doppler_jax.types import Kernel

from .agenda import Agenda
from .running import TaskError

Executable = Callable[..., Sequence[jax.Array]]


_SETTINGS = tuple(
    name
    for name in sorted(jax.config.values)
    # Guards are about what the caller does. What moves here was asked for. And what has been
    # compiled cannot run op by op.
    if callable(getattr(jax, name.removeprefix("jax_"), None))
    and "_guard" not in name
    and name != "jax_disable_jit"
)
"""Of JAX, those that a context manager of the same name sets for one thread."""


_settings = operator.attrgetter(*_SETTINGS)


def inherit(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function so that in any thread it runs under the settings that JAX has here.

    Those are, for one, what `with jax.enable_x64(True)` has set.
    """
    settings = _settings(jax.config)

    def run_as_here(*args: Any) -> Any:
        if (there := _settings(jax.config)) == settings:
            return run(*args)
        with contextlib.ExitStack() as stack:
            for name, value, other in zip(_SETTINGS, settings, there, strict=True):
                if value != other:
                    stack.enter_context(getattr(jax, name.removeprefix("jax_"))(value))
            return run(*args)

    return run_as_here


class ExecutableKey(NamedTuple):
    """What is compiled once."""

    kernel: Kernel
    device: jax.Device
    donated: tuple[int, ...] = ()  # operands whose memory the results may take


def compile_missing(
    known: dict[ExecutableKey, Executable], wanted: Sequence[ExecutableKey], agenda: Agenda
) -> None:
    """Adds to the kernels `known` what is `wanted` beyond them, compiled on several cores.

    Raises:
      TaskError: the kernel of a task of the agenda `[N]` does not compile; those before it are
        kept.
    """
    stages: dict[ExecutableKey, Future[Executable]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            # Traced here: JAX's settings may differ by thread. XLA compiles outside the GIL.
            for key in dict.fromkeys(wanted):
                if key not in known:
                    stages[key] = pool.submit(inherit(_lower(*key).compile))
            for key, stage in stages.items():
                known[key] = choose(_jit(*key), stage.result(), key.kernel.operands)
        except Exception as error:
            pool.shutdown(cancel_futures=True)
            v = wanted.index(key)
            kernel = f"kernel {key.kernel.name} does not compile for {key.device}"
            what = f"task {v} ({agenda.names[v]}): {kernel}"
            raise TaskError(what, v, agenda.placement[v], error) from error


def _jit(kernel: Kernel, device: jax.Device, donated: tuple[int, ...]) -> Any:
    # Naming the output's device places kernels without operands too.
    here = SingleDeviceSharding(device)
    return jax.jit(kernel.fn, out_shardings=here, donate_argnums=donated)


def _lower(kernel: Kernel, device: jax.Device, donated: tuple[int, ...]) -> jax.stages.Lowered:
    here = SingleDeviceSharding(device)
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in kernel.operands]
    return _jit(kernel, device, donated).lower(*operands)


def choose(
    jitted: Executable, compiled: Executable, operands: Sequence[jax.ShapeDtypeStruct]
) -> Executable:
    """Returns what to call: what was compiled, if it takes arrays that JAX has moved or made.

    Where numbers take less than a byte, as int4 does, it refuses them for their layout
    (jax#21339), and only a jitted function takes them.
    """
    for dtype in {aval.dtype for aval in operands}:
        for kind, info in ((jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo)):
            if jnp.issubdtype(dtype, kind) and info(dtype).bits < 8:
                return jitted
    return compiled


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
