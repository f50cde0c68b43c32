"""Checks of what users give, before any work."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import ArrayLike

from .backend import Backend, Options


def check_devices(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """Returns the devices as a tuple.

    Raises:
      ValueError: there is none, or one occurs twice.
    """
    devices = tuple(devices)
    if not devices:
        raise ValueError("devices is empty; expected one device or more")
    for i, device in enumerate(devices):
        if device in devices[:i]:
            raise ValueError(f"devices[{i}] is {device}, which occurs before")
    return devices


def check_options(options: Options, backend: Backend) -> None:
    """Raises `ValueError` for a mode, timeout or output device that the backend has not."""
    if options.mode not in backend.modes:
        known = sorted(backend.modes)
        raise ValueError(f"unknown mode {options.mode!r}; the backend has: {known}")
    timeout_s = options.timeout_s
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"timeout_s is {timeout_s}; expected a number above 0, or None")
    num_devices = len(backend.device_names)
    if options.out_device is not None and not 0 <= options.out_device < num_devices:
        raise ValueError(
            f"out_device is {options.out_device}, but there are {num_devices} devices"
        )


def check_placement(placement: ArrayLike, num_tasks: int, num_devices: int) -> np.ndarray:
    """Returns the placement as int64 `[N]`.

    Raises:
      ValueError: it has another shape or type, or an entry names no device.
    """
    places = np.asarray(placement)
    if places.shape != (num_tasks,):
        raise ValueError(f"placement has shape {places.shape}, expected ({num_tasks},)")
    if places.size and not np.issubdtype(places.dtype, np.integer):
        raise ValueError(f"placement must hold integers, holds {places.dtype}")
    for v in np.flatnonzero((places < 0) | (places >= num_devices)):
        raise ValueError(f"placement[{v}] is {places[v]}, but there are {num_devices} devices")
    return places.astype(np.int64)


def check_priority(priority: ArrayLike | None, num_tasks: int) -> np.ndarray | None:
    """Returns the priority as float64 `[N]`, or None.

    Raises:
      ValueError: it has another shape, or an entry is not finite.
    """
    if priority is None:
        return None
    ranks = np.asarray(priority, dtype=np.float64)
    if ranks.shape != (num_tasks,):
        raise ValueError(f"priority has shape {ranks.shape}, expected ({num_tasks},)")
    for v in np.flatnonzero(~np.isfinite(ranks)):
        raise ValueError(f"priority[{v}] is {ranks[v]}; expected a finite number")
    return ranks
