"""A placed program made ready to run: its plan and its compiled kernels."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.types import ShardedProgram

from .errors import TaskError
from .ops import Executable, Executables
from .plan import Plan, make_plan

Slots = list[jax.Array | None]
"""The arrays of one call, by slot of its plan; None before they are made and after use."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What an executor runs, as often as wanted."""

    plan: Plan
    names: tuple[str, ...]  # [N]
    devices: tuple[jax.Device, ...]  # [D]
    executables: tuple[Executable, ...]  # [N]

    def task_error(self, v: int, cause: BaseException) -> TaskError:
        """Returns the error that says that task `v` failed."""
        device = self.plan.placement[v]
        what = f"task {v} ({self.names[v]}) failed on device {device} ({self.devices[device]})"
        return TaskError(what, v, device, cause)

    def transfer_error(self, k: int, cause: BaseException) -> TaskError:
        """Returns the error that says that transfer `k` of the plan failed."""
        t = self.plan.transfers[k]
        what = (
            f"transfer of tensor {t.tensor}, made by task {t.producer} "
            f"({self.names[t.producer]}) on device {t.source}, failed on its way to device "
            f"{t.destination} ({self.devices[t.destination]})"
        )
        return TaskError(what, t.producer, t.destination, cause)


def make_job(
    sharded: ShardedProgram,
    placement: ArrayLike,
    devices: Sequence[jax.Device],
    priority: ArrayLike | None,
    executables: Executables,
) -> Job:
    """Checks a placement and compiles the kernels it needs.

    Raises:
      ValueError: `placement` or `priority` is not `[N]`, or an entry names no device.
    """
    num_tasks = sharded.graph.num_tasks
    places = _check_placement(placement, num_tasks, len(devices))
    ranks = None if priority is None else _check_priority(priority, num_tasks)
    wanted = [(kernel, devices[d]) for kernel, d in zip(sharded.kernels, places, strict=True)]
    executables.prepare(wanted)
    return Job(
        plan=make_plan(sharded, places, ranks),
        names=sharded.names,
        devices=tuple(devices),
        executables=tuple(executables[key] for key in wanted),
    )


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


def _check_placement(placement: ArrayLike, num_tasks: int, num_devices: int) -> np.ndarray:
    places = np.asarray(placement)
    if places.shape != (num_tasks,):
        raise ValueError(f"placement has shape {places.shape}, expected ({num_tasks},)")
    if places.size and not np.issubdtype(places.dtype, np.integer):
        raise ValueError(f"placement must hold integers, holds {places.dtype}")
    for v in np.flatnonzero((places < 0) | (places >= num_devices)):
        raise ValueError(f"placement[{v}] is {places[v]}, but there are {num_devices} devices")
    return places.astype(np.int64)


def _check_priority(priority: ArrayLike, num_tasks: int) -> np.ndarray:
    ranks = np.asarray(priority, dtype=np.float64)
    if ranks.shape != (num_tasks,):
        raise ValueError(f"priority has shape {ranks.shape}, expected ({num_tasks},)")
    for v in np.flatnonzero(~np.isfinite(ranks)):
        raise ValueError(f"priority[{v}] is {ranks[v]}; expected a finite number")
    return ranks
