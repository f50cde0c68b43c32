"""From a function to a plan for devices: traced, cut, measured and placed, and kept on disk."""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import chex
import jax

import doppler_jax
from doppler_jax.caches import user_folder
from doppler_jax.costs.build import make_costs
from doppler_jax.costs.calibration import load_calibration
from doppler_jax.costs.clusters import load_cluster, save_cluster
from doppler_jax.costs.digests import problem_digest
from doppler_jax.costs.host import measure_host
from doppler_jax.costs.pins import Pins, Together
from doppler_jax.costs.pins import pin as pinned
from doppler_jax.methods.registry import DEFAULT_METHOD
from doppler_jax.methods.request import Method, key_words
from doppler_jax.native import processor
from doppler_jax.objective import Objective
from doppler_jax.placed import Placed, load_placed
from doppler_jax.placing import is_told_apart, place
from doppler_jax.programs.arguments import Carry, Resident
from doppler_jax.programs.blocks import flatten_args
from doppler_jax.programs.partition import partition
from doppler_jax.programs.program import Program
from doppler_jax.programs.trace import trace
from doppler_jax.simulator.native import num_cores
from doppler_jax.types import Cluster, Costs, ShardedProgram

from .calibrate import measure_calibration
from .devices import Devices
from .local import LocalDevices

LEAST_PLACING_S = 1.0
"""Seconds that placing gets, however long calibration took."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What planning is told, as `distribute` describes it."""

    mode: str | None = None
    method: str | Method = DEFAULT_METHOD
    objective: Objective = Objective("serial")  # noqa: RUF009, frozen
    key: chex.PRNGKey | int = 0
    num_shards: int | None = None
    resident: Resident = None
    carry: Carry = None
    unroll_scans: bool | None = None
    pin: Pins | None = None
    together: Together = ()
    cache: bool = True

    @property
    def tracing(self) -> dict[str, Any]:
        """Arguments of `trace`."""
        names = ("resident", "carry", "unroll_scans")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The stages between a function and the plan that runs.

    Attributes:
      program: the function, traced.
      sharded: cut into tasks.
      costs: what these and their transfers cost on the devices, as measured, with pins.
      placed: the plan.
      said: how long that took, or what of it was there from an earlier process.
    """

    program: Program
    sharded: ShardedProgram
    costs: Costs
    placed: Placed
    said: str


def lower(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    devices: Devices,
    settings: Settings,
    budget_s: float,
    *,
    runs: bool = True,
) -> Lowered:
    """Returns the stages for a function on devices; what is in the user's cache is not redone.

    Args:
      fn: the function.
      args: its arguments, or their shapes.
      kwargs: those by keyword.
      devices: where it is to run.
      settings: what the caller wants.
      budget_s: seconds for all; calibration takes what it needs, placing the rest.
      runs: whether it is to be called with these arguments, which shapes cannot be.
    """
    began, folder = time.monotonic(), _folder(devices) if settings.cache else None
    num_shards = settings.num_shards or 1 << (len(devices) - 1).bit_length()
    program = trace(fn, *args, **settings.tracing, **kwargs)
    sharded = partition(program, num_shards, cluster=_cluster(devices, folder))
    if runs:
        flatten_args(sharded, args, kwargs)
    steps: list[str] = []
    calibration = measure_calibration(
        sharded,
        devices,
        path=folder and _readable(folder / "calibration.json"),
        progress=lambda what, done, total: steps.append(what),
    )
    costs = pinned(sharded, make_costs(sharded, calibration), settings.pin or {})
    path = folder and _plan_path(folder, sharded, costs, settings, budget_s)
    placed = _recall(path, sharded, costs)
    is_kept = placed is not None
    if placed is None:
        placed = place(
            sharded, costs, method=settings.method, objective=settings.objective,
            key=settings.key, together=settings.together,
            budget_s=max(budget_s - (time.monotonic() - began), LEAST_PLACING_S),
        )  # fmt: skip
        if path is not None and not placed.interrupted:
            placed.save(path)
    done = [] if len(steps) == 1 else ["calibrated"]  # the last step is "done"
    done += [] if is_kept else ["placed"]
    took = f"{' and '.join(done)} in {time.monotonic() - began:.1f} s"
    said = took if done else f"calibration and plan are those in {folder}"
    return Lowered(program, sharded, costs, placed, f"{sharded.graph.num_tasks} tasks, {said}")


def _folder(devices: Devices) -> pathlib.Path | None:
    """Returns the folder of what is known of devices by these versions; None: there is none."""
    found = user_folder()
    if found is None:
        return None
    told = devices.backend, devices.device_names, devices.device_kinds, processor(), num_cores()
    known = told, jax.__version__, doppler_jax.__version__
    folder = found / "devices" / hashlib.sha256(repr(known).encode()).hexdigest()[:32]
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else None


def _cluster(devices: Devices, folder: pathlib.Path | None) -> Cluster | None:
    """Returns rates of devices of this process, by which a program is cut."""
    if not isinstance(devices, LocalDevices):
        return None
    path = folder and folder / "cluster.json"
    if path is not None and path.exists():
        with contextlib.suppress(ValueError):  # damaged
            return load_cluster(path)
    cluster = measure_host(devices)
    if path is not None:
        save_cluster(path, cluster)
    return cluster


def _readable(path: pathlib.Path) -> pathlib.Path:
    """Returns the path; a damaged file there is removed."""
    try:
        load_calibration(path)
    except ValueError:
        path.unlink(missing_ok=True)
    return path


def _plan_path(
    folder: pathlib.Path,
    sharded: ShardedProgram,
    costs: Costs,
    settings: Settings,
    budget_s: float,
) -> pathlib.Path | None:
    """Returns where the plan of a problem is; None if its method cannot be told from others."""
    if not is_told_apart(settings.method):
        return None
    asked = settings.method, settings.objective, key_words(settings.key).tolist(), budget_s
    known = problem_digest(sharded.graph, costs), sharded.names, settings.together, asked
    return folder / f"plan-{hashlib.sha256(repr(known).encode()).hexdigest()[:32]}.json"


def _recall(path: pathlib.Path | None, sharded: ShardedProgram, costs: Costs) -> Placed | None:
    """Returns the plan in a file, None if there is none that the oracle confirms."""
    if path is None or not path.exists():
        return None
    try:
        placed = load_placed(path, sharded.graph, costs)
    except ValueError:
        return None
    return dataclasses.replace(placed, names=tuple(sharded.names))
