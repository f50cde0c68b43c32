"""Seconds of tasks and transfers once devices are chosen, noise included; float64."""

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.costs.handling import task_handling_s
from doppler_jax.types import RESIDENT, Costs, TaskGraph


def check_placement(graph: TaskGraph, num_devices: int, placement: ArrayLike) -> np.ndarray:
    """Returns the device `[N]` of each task, or raises a `ValueError` that says why not."""
    device = np.asarray(placement)
    if device.shape != (graph.num_tasks,):
        raise ValueError(f"placement has shape {device.shape}, expected ({graph.num_tasks},)")
    if device.size and not np.issubdtype(device.dtype, np.integer):
        raise ValueError(f"placement must hold integers, holds {device.dtype}")
    for v in np.flatnonzero((device < 0) | (device >= num_devices))[:1]:
        raise ValueError(
            f"placement puts task {v} on device {device[v]}; devices are 0 to {num_devices - 1}"
        )
    return device.astype(np.int64)


def check_placements(graph: TaskGraph, costs: Costs, placements: ArrayLike) -> np.ndarray:
    """Returns the placements as int32 `[B, N]`, or raises a `ValueError` that says why not."""
    array = np.atleast_2d(np.asarray(placements))
    if array.ndim != 2 or array.shape[1] != graph.num_tasks:
        raise ValueError(
            f"placements have shape {np.shape(placements)}, expected [B, {graph.num_tasks}]"
        )
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"placements must hold integers, hold {array.dtype}")
    bad = np.argwhere((array < 0) | (array >= costs.num_devices))
    if len(bad):
        b, v = bad[0]
        raise ValueError(
            f"placement {b} puts task {v} on device {array[b, v]}; "
            f"devices are 0 to {costs.num_devices - 1}"
        )
    return array.astype(np.int32)


def task_seconds(
    graph: TaskGraph, costs: Costs, device: np.ndarray, factor: ArrayLike | None
) -> np.ndarray:
    """Returns the seconds `[N]` of each task on its device.

    They are those of computing, times its factor `[N]`, and of handling transfers.
    """
    compute_s = np.asarray(costs.compute_s, np.float64)
    seconds = compute_s[np.arange(device.size), device]
    seconds = seconds * check_factor("compute_factor", factor, seconds.shape)
    return seconds + task_handling_s(graph, costs, device)


def transfer_seconds(
    graph: TaskGraph, costs: Costs, device: np.ndarray, factor: ArrayLike | None
) -> np.ndarray:
    """Returns the seconds `[T, D]` of moving each tensor from its producer to each device.

    They are multiplied by the factors `[T, D]`; without a move they are 0.
    """
    seconds = _move_s(costs, costs.tensor_bytes, device[graph.tensor_producer])
    return seconds * check_factor("transfer_factor", factor, seconds.shape)


def input_seconds(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the seconds `[I, D]` of moving each graph input from its home to each device.

    Those of resident inputs are 0.
    """
    home = np.asarray(graph.input_home)
    resident = (home == RESIDENT)[:, None]
    return np.where(resident, 0.0, _move_s(costs, costs.input_bytes, home))


def check_factor(name: str, factor: ArrayLike | None, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the factors of noise as float64, ones for None.

    Raises:
      ValueError: the shape is not `shape`, or one is not a positive finite number.
    """
    if factor is None:
        return np.ones(shape)
    array = np.asarray(factor, np.float64)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    bad = np.argwhere(~((array > 0) & np.isfinite(array)))
    if len(bad):
        where = tuple(bad[0].tolist())
        index = ", ".join(map(str, where))
        raise ValueError(f"{name}[{index}] is {array[where]}; expected a positive number")
    return array


def _move_s(costs: Costs, num_bytes: ArrayLike, source: np.ndarray) -> np.ndarray:
    """Returns the seconds `[X, D]` of moving items of `num_bytes` `[X]` from `source` `[X]`."""
    latency_s = np.asarray(costs.latency_s, np.float64)[source]
    per_byte = np.asarray(costs.seconds_per_byte, np.float64)[source]
    return latency_s + np.asarray(num_bytes, np.float64)[:, None] * per_byte
