"""Clusters: presets from data sheets by name, this machine as measured, JSON files."""

import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.costs.calibration import Calibration, load_calibration, save_calibration
from doppler_jax.files import PathLike, nulls, read_fields, read_numbers, write_fields
from doppler_jax.types import Cluster

__all__ = [
    "Calibration",
    "list_clusters",
    "load_calibration",
    "load_cluster",
    "make_cluster",
    "save_calibration",
    "save_cluster",
]

FORMAT = "doppler_jax.cluster"
_DEPTH = {
    field.name: 2 if field.name in ("latency_s", "link_bytes_per_s") else 1
    for field in dataclasses.fields(Cluster)
}  # field to number of dimensions

WARM_UPS = 4  # beyond compilation: the allocator starts to reuse memory after a few
REPEATS = 9
LONG_CALL_S = 1e-3  # beside it a launch is about a percent
LONG_TRANSFER = 4.0  # latencies; the latency itself is subtracted
MATMUL_SIZES = (1024, 2048, 4096, 8192)
COPY_BYTES = (64 << 20, 256 << 20, 1 << 30)
TRANSFER_BYTES = (8 << 20, 64 << 20, 512 << 20)
SMALL_BYTES = 256

Call = Callable[[], jax.Array]


def reference_cluster(num_devices: int, rate: float = 1e10) -> Cluster:
    """Returns equal devices without overheads, by default those of the reference's simulator.

    Args:
      num_devices: D.
      rate: operations a second of each device, and bytes a second of each link.

    Raises:
      ValueError: fewer than one device.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices is {num_devices}; expected at least 1")
    return Cluster(flops_per_s=[rate] * num_devices, link_bytes_per_s=rate)


def _equal_devices(
    count: int,
    flops_per_s: float,
    memory_bytes_per_s: float,
    memory_bytes: float,
    link_bytes_per_s: float,
) -> Cluster:
    # Launch and latency are the usual order of magnitude, 10 us, not a measurement.
    return Cluster(
        flops_per_s=[flops_per_s] * count,
        memory_bytes_per_s=memory_bytes_per_s,
        memory_bytes=memory_bytes,
        launch_s=10e-6,
        latency_s=10e-6,
        link_bytes_per_s=link_bytes_per_s,
    )


def _p100x4() -> Cluster:
    # NVIDIA Tesla P100 for PCIe data sheet (16 GB): 9.3 TFLOP/s float32, 732 GB/s HBM2.
    # PCIe 3.0 x16 moves 15.75 GB/s raw, about 12 GB/s in peer copies.
    return _equal_devices(4, 9.3e12, 732e9, 16e9, 12e9)


def _v100x8() -> Cluster:
    # NVIDIA V100 SXM2 data sheet (32 GB): 15.7 TFLOP/s float32, 900 GB/s HBM2. NVLink 2
    # carries 25 GB/s per link and direction; pairs of an island are taken to have two.
    # Between the islands: through PCIe and the processors' link, about 10 GB/s.
    cluster = _equal_devices(8, 15.7e12, 900e9, 32e9, 50e9)
    island = np.arange(8) // 4
    across = island[:, None] != island[None, :]
    return dataclasses.replace(
        cluster,
        latency_s=np.where(across, 20e-6, cluster.latency_s),
        link_bytes_per_s=np.where(across, 10e9, cluster.link_bytes_per_s),
    )


def _h200x8() -> Cluster:
    # NVIDIA H200 SXM data sheet: 67 TFLOP/s float32 (without tensor cores; TF32 would be
    # several times that), 4.8 TB/s HBM3e, 141 GB; NVLink 4 through NVSwitch 900 GB/s in
    # both directions together, so 450 GB/s each way between any pair.
    return _equal_devices(8, 67e12, 4.8e12, 141e9, 450e9)


def load_cluster(path: PathLike) -> Cluster:
    """Returns the cluster in a JSON file (see `save_cluster`); `null` stands for infinity.

    Example:
      >>> dj.clusters.save_cluster("four.json", dj.make_cluster("p100x4"))
      >>> dj.load_cluster("four.json").num_devices
      4

    Raises:
      ValueError: the file cannot be read or holds no valid cluster. The message starts
        with the path and names the field.
    """
    data = read_fields(path, FORMAT, _DEPTH)
    fields = {
        name: read_numbers(path, data, name, ndim=ndim, null=np.inf)
        for name, ndim in _DEPTH.items()
    }
    try:
        return Cluster(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def save_cluster(path: PathLike, cluster: Cluster) -> None:
    """Writes a cluster as JSON that `load_cluster` reads back exactly.

    An existing file is replaced in one step or left as it was.

    Raises:
      ValueError: the file cannot be written.
    """
    fields = {name: nulls(getattr(cluster, name)) for name in _DEPTH}
    write_fields(path, FORMAT, **fields)


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


_FACTORIES: dict[str, Callable[[], Cluster]] = {
    "h200x8": _h200x8,
    "host": measure_host,
    "p100x4": _p100x4,
    "reference_x4": lambda: reference_cluster(4),
    "reference_x8": lambda: reference_cluster(8),
    "v100x8": _v100x8,
}


def list_clusters() -> list[str]:
    """Returns the names that `make_cluster` knows, sorted."""
    return sorted(_FACTORIES)


def make_cluster(name: str) -> Cluster:
    """Returns the cluster of that name; `host` is this machine, measured now (about 2 s).

    Example:
      >>> dj.make_cluster("p100x4").num_devices
      4

    Raises:
      ValueError: no cluster has that name; the message lists those that exist.
    """
    if name not in _FACTORIES:
        raise ValueError(f"unknown cluster {name!r}; known: {', '.join(list_clusters())}")
    return _FACTORIES[name]()
