"""This machine as a cluster, measured."""

import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.types import Cluster

WARM_UPS = 4  # beyond compilation: the allocator starts to reuse memory after a few
REPEATS = 9
LONG_CALL_S = 1e-3  # beside it a launch is about a percent
LONG_TRANSFER = 4.0  # latencies; the latency itself is subtracted
MATMUL_SIZES = (1024, 2048, 4096, 8192)
COPY_BYTES = (64 << 20, 256 << 20, 1 << 30)
TRANSFER_BYTES = (8 << 20, 64 << 20, 512 << 20)
SMALL_BYTES = 256

Call = Callable[[], jax.Array]


def measure_host(devices: Sequence[jax.Device] | None = None) -> Cluster:
    """Returns the cluster of these devices (default: all that JAX has), measured.

    One device of each kind is timed, and every ordered pair of devices: float32
    matrix products at JAX's default precision, a copy in memory, a tiny compiled call,
    and transfers by `device_put`. Each is the median of warm repeats.

    Raises:
      ValueError: `devices` is empty.
    """
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise ValueError("devices is empty; expected at least one")
    rates: dict[str, tuple[float, float, float]] = {}
    for device in devices:
        if device.device_kind not in rates:
            rates[device.device_kind] = _measure_device(device)
    per_device = np.array([rates[device.device_kind] for device in devices])
    latency_s, link_bytes_per_s = _measure_links(devices)
    return Cluster(
        flops_per_s=per_device[:, 0],
        memory_bytes_per_s=per_device[:, 1],
        memory_bytes=np.array([memory_bytes(device, devices) for device in devices]),
        launch_s=per_device[:, 2],
        latency_s=latency_s,
        link_bytes_per_s=link_bytes_per_s,
    )


def memory_bytes(device: jax.Device, devices: Sequence[jax.Device]) -> float:
    """Returns what a device can hold, as the allocator says or as its share of the machine."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    # CPU devices report nothing: they share the machine's memory.
    sharing = sum(other.platform == device.platform for other in devices)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / sharing


def _measure_device(device: jax.Device) -> tuple[float, float, float]:
    """Returns (flop/s, memory bytes/s, launch seconds)."""
    increment = jax.jit(lambda x: x + 1.0)
    product = jax.jit(jnp.matmul)
    tiny = _ones((8,), device)
    launch_s = _median_s(lambda: increment(tiny))

    def multiply(size: int) -> Call:
        square = _ones((size, size), device)
        return lambda: product(square, square)

    def copy(num_bytes: int) -> Call:
        vector = _ones((num_bytes // 4,), device)
        return lambda: increment(vector)

    size, product_s = _time_long(MATMUL_SIZES, multiply, LONG_CALL_S)
    num_bytes, copy_s = _time_long(COPY_BYTES, copy, LONG_CALL_S)
    return 2.0 * size**3 / product_s, 2.0 * num_bytes / copy_s, launch_s


def _measure_links(devices: Sequence[jax.Device]) -> tuple[np.ndarray, np.ndarray]:
    """Returns latency `[D, D]` in seconds and bandwidth `[D, D]` in bytes per second."""
    d = len(devices)
    latency_s, bytes_per_s = np.zeros((d, d)), np.full((d, d), np.inf)

    def send(num_bytes: int, source: jax.Device, target: jax.Device) -> Call:
        block = _ones((num_bytes // 4,), source)
        return lambda: jax.device_put(block, target)

    for s, t in itertools.permutations(range(d), 2):
        send_pair = functools.partial(send, source=devices[s], target=devices[t])
        latency_s[s, t] = _median_s(send_pair(SMALL_BYTES))
        long_s = LONG_TRANSFER * latency_s[s, t]
        num_bytes, large_s = _time_long(TRANSFER_BYTES, send_pair, long_s)
        # Noise must not turn the difference negative or the rate absurd.
        bytes_per_s[s, t] = num_bytes / max(large_s - latency_s[s, t], large_s / 2)
    return latency_s, bytes_per_s


def _ones(shape: tuple[int, ...], device: jax.Device) -> jax.Array:
    return jax.device_put(np.ones(shape, np.float32), device)


def _time_long(
    sizes: Sequence[int], make_call: Callable[[int], Call], long_s: float
) -> tuple[int, float]:
    """Returns the first size whose call takes `long_s`, or the last, and its seconds."""
    for size in sizes:
        seconds = _median_s(make_call(size))
        if seconds > long_s:
            break
    return size, seconds


def _median_s(call: Call) -> float:
    for _ in range(WARM_UPS):
        call().block_until_ready()
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call().block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
