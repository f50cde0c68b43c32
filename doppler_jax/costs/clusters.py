"""Clusters: presets from data sheets by name, and JSON files."""

import dataclasses
from collections.abc import Callable

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


def _host() -> Cluster:
    from doppler_jax.costs.host import measure_host

    return measure_host()


_FACTORIES: dict[str, Callable[[], Cluster]] = {
    "h200x8": _h200x8,
    "host": _host,
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


def find_cluster(name: str) -> Cluster:
    """Returns a preset by name, or the cluster of a JSON file."""
    return load_cluster(name) if name.endswith(".json") else make_cluster(name)
