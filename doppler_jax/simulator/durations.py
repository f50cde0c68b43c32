"""Who reads what from where, and the seconds of tasks and transfers once devices are chosen.

Items are what is moved: tensor x is x, graph input i is ~i. So tables of items end with the
graph inputs, in reverse: an item is an index into them. Seconds are float64, noise included.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.costs.handling import task_handling_s
from doppler_jax.types import RESIDENT, Costs, TaskGraph


class Reads(NamedTuple):
    """What tasks read: a row for each edge, then for each read of a graph input."""

    item: np.ndarray  # [E + F]
    reader: np.ndarray  # [E + F] task
    source: np.ndarray  # [E + F] device that has the item first; `RESIDENT` if all have it
    destination: np.ndarray  # [E + F] device of the reader

    @property
    def moves(self) -> np.ndarray:
        """Whether the item has to be moved `[E + F]`."""
        return (self.source != RESIDENT) & (self.source != self.destination)


def list_reads(graph: TaskGraph, device: np.ndarray) -> Reads:
    """Returns what tasks on devices `[N]` read."""
    item = np.concatenate([graph.edge_tensor, ~graph.input_edge_input])
    reader = np.concatenate([graph.edge_reader, graph.input_edge_reader])
    return Reads(item, reader, item_sources(graph, device)[item], device[reader])


def item_sources(graph: TaskGraph, device: np.ndarray) -> np.ndarray:
    """Returns the device `[T + I]` that has each item first, `RESIDENT` if all have it."""
    return np.concatenate([device[graph.tensor_producer], graph.homes(device)[::-1]])


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
    for b, v in np.argwhere((array < 0) | (array >= costs.num_devices))[:1]:
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


def move_seconds(
    graph: TaskGraph,
    costs: Costs,
    device: np.ndarray,
    transfer_factor: ArrayLike | None,
    input_factor: ArrayLike | None,
) -> np.ndarray:
    """Returns the seconds `[T + I, D]` of moving each item from its source to each device.

    Those of tensors are multiplied by factors `[T, D]`, those of graph inputs by `[I, D]`.
    Resident inputs take none.
    """
    source = item_sources(graph, device)
    num_bytes = np.concatenate([costs.tensor_bytes, np.asarray(costs.input_bytes)[::-1]])
    latency_s = np.asarray(costs.latency_s, np.float64)[source]
    per_byte = np.asarray(costs.seconds_per_byte, np.float64)[source]
    seconds = latency_s + num_bytes.astype(np.float64)[:, None] * per_byte
    tensors, inputs = seconds[: graph.num_tensors], seconds[graph.num_tensors :]
    tensors *= check_factor("transfer_factor", transfer_factor, tensors.shape)
    inputs *= check_factor("input_factor", input_factor, inputs.shape)[::-1]
    seconds[source == RESIDENT] = 0.0
    return seconds


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
    for where in np.argwhere(~((array > 0) & np.isfinite(array)))[:1].tolist():
        raise ValueError(f"{name}{where} is {array[tuple(where)]}; expected a positive number")
    return array
