"""From a function to a plan for devices: traced, cut, measured and placed, and kept on disk."""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax

import doppler_jax
from doppler_jax.caches import user_folder
from doppler_jax.costs.build import make_costs, reference_costs
from doppler_jax.costs.calibration import Calibration, load_calibration
from doppler_jax.costs.clusters import load_cluster, save_cluster
from doppler_jax.costs.digests import kernel_digests, problem_digest
from doppler_jax.costs.host import measure_host
from doppler_jax.costs.pins import Pins, Together, find_groups
from doppler_jax.costs.pins import pin as pinned
from doppler_jax.files import write_text_atomic
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
from doppler_jax.simulator.synchronous import hop_levels
from doppler_jax.types import Cluster, Costs, ShardedProgram

from .calibrate import measure_calibration
from .devices import Devices
from .local import LocalDevices

PLACING = 0.25
"""Share of the budget that placing gets at most: more buys little (docs/results/clock.md), and
what is left is for comparing."""

LEAST_PLACING_S = 1.0
"""Seconds that placing gets, however long calibration took."""

CALIBRATING = 0.5
"""Share of the budget until which cuts are measured; the first one is in any case."""

GROWTH = 2.0
"""By how much longer a cut is expected to take than the one before, half as fine."""


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
      by_cut: simulated seconds of whole calls of the plans compared, by blocks per tensor; the
        least is it. Where nobody has measured what calls take beyond makespans, as for a first
        cut alone, they are makespans.
    """

    program: Program
    sharded: ShardedProgram
    costs: Costs
    placed: Placed
    said: str
    by_cut: dict[int, float]


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
      budget_s: seconds for all; calibration has its share, of the coarsest cut in any case,
        and placing `PLACING`, or what is left.
      runs: whether it is to be called with these arguments, which shapes cannot be.
    """
    began = time.monotonic()
    folder = _folder(devices) if settings.cache else None
    program = trace(fn, *args, **settings.tracing, **kwargs)
    sizes, until_s = _granularities(len(devices), settings), began + CALIBRATING * budget_s

    def note(sharded: ShardedProgram) -> pathlib.Path | None:
        digests = kernel_digests(sharded.kernels)
        known = sizes, sharded.names, [digests[kernel] for kernel in sharded.kernels]
        return folder and _path(folder, "cut", known, settings, budget_s)

    tried = _cuts(program, _cluster(devices, folder), sizes, until_s, note)

    def check(sharded: ShardedProgram) -> None:
        if runs:
            flatten_args(sharded, args, kwargs)
        bare = reference_costs(sharded.graph, len(devices))  # of the right shape
        find_groups(sharded, pinned(sharded, bare, settings.pin or {}), settings.together)

    share = 0.5 if len(sizes) > 1 else 1.0  # the finer ones are to have some, too
    cuts, calibration, has_measured = _calibrate(tried, devices, folder, until_s, check, share)
    found, has_placed = _plans(cuts, calibration, folder, settings, budget_s, began)
    by_cut = {
        num_shards: placed.objective_s + _beyond_s(calibration, cut)
        for num_shards, (cut, _, placed) in found.items()
    }
    chosen = min(by_cut, key=by_cut.__getitem__)
    path = note(next(iter(cuts.values())))
    if path is not None and not found[chosen][2].interrupted:
        write_text_atomic(path, str(chosen))
    done = ["calibrated"] * has_measured + ["placed"] * has_placed
    took = f"{' and '.join(done)} in {time.monotonic() - began:.1f} s"
    said = took if done else f"calibration and plan are those in {folder}"
    best = f" (best of {len(found)} cuts)" if len(found) > 1 else ""
    tasks = f"{found[chosen][0].graph.num_tasks} tasks{best}"
    return Lowered(program, *found[chosen], f"{tasks}, {said}", by_cut)


def _beyond_s(calibration: Calibration, sharded: ShardedProgram) -> float:
    """Returns by how much a call takes longer than its makespan, 0 where it is not known."""
    return calibration.calls.beyond_s(sharded) if calibration.calls else 0.0


def _granularities(num_devices: int, settings: Settings) -> list[int]:
    """Returns into how many blocks tensors are cut, by what is tried in turn.

    Tasks that are held by their names have to have them, so they are cut once.
    """
    usual = 1 << (num_devices - 1).bit_length()
    if settings.num_shards or settings.pin or settings.together or num_devices == 1:
        return [settings.num_shards or usual]
    return sorted({1, usual // 2, usual, 2 * usual})


def _cuts(
    program: Program,
    cluster: Cluster | None,
    sizes: list[int],
    until_s: float,
    note: Callable[[ShardedProgram], pathlib.Path | None],
) -> Iterator[tuple[int, ShardedProgram]]:
    """Yields the program cut into blocks of these numbers, while there is time for the next.

    Chains leave nothing to distribute, so they are left out but where there is nothing else,
    and so is what is like an earlier cut. Where an earlier process chose one, as its note on
    the first one says, there is but that.
    """
    known: list[tuple[str, ...]] = []
    chosen, took_s = None, 0.0
    for num_shards in sizes:
        began = time.monotonic()
        if known and began + GROWTH * took_s > until_s:
            return
        if chosen not in (None, num_shards):
            continue
        sharded = partition(program, num_shards, cluster=cluster)
        took_s = time.monotonic() - began
        is_chain = hop_levels(sharded.graph).max(initial=-1) + 1 == sharded.graph.num_tasks
        is_only = num_shards == chosen or (num_shards == sizes[-1] and not known)
        if (is_chain and not is_only) or tuple(sharded.names) in known:
            continue
        if chosen is None and not known:
            chosen = _chosen(note(sharded), sizes)
            if chosen not in (None, num_shards):
                continue
        known.append(tuple(sharded.names))
        yield num_shards, sharded


class _OutOfTimeError(Exception):
    """Calibration has had its share of the budget."""


def _calibrate(
    tried: Iterator[tuple[int, ShardedProgram]],
    devices: Devices,
    folder: pathlib.Path | None,
    until_s: float,
    check: Callable[[ShardedProgram], object],
    share: float,
) -> tuple[dict[int, ShardedProgram], Calibration, bool]:
    """Returns cuts and what all of them cost: the first in any case, others until `until_s`.

    Each gets a share of the seconds left then. What calls take beyond makespans differs between
    cuts alone, so it is measured with the second one. The third result is whether anything was
    measured.
    """
    cuts: dict[int, ShardedProgram] = {}
    measured: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        if done < total:
            if cuts and time.monotonic() > until_s:
                raise _OutOfTimeError
            measured.append(what)

    with tempfile.TemporaryDirectory() as scratch:
        path = _readable((folder or pathlib.Path(scratch)) / "calibration.json")
        for num_shards, sharded in tried:
            check(sharded)
            try:
                left_s = max(until_s - time.monotonic(), 0.0)
                found = measure_calibration(
                    sharded, devices, path=path, progress=progress, budget_s=left_s * share,
                    calls=bool(cuts),
                )  # fmt: skip
            except _OutOfTimeError:
                found = load_calibration(path)  # as later processes find it
                break
            cuts[num_shards] = sharded
    return cuts, found, bool(measured)


def _plans(
    cuts: dict[int, ShardedProgram],
    calibration: Calibration,
    folder: pathlib.Path | None,
    settings: Settings,
    budget_s: float,
    began: float,
) -> tuple[dict[int, tuple[ShardedProgram, Costs, Placed]], bool]:
    """Returns cuts with costs and plans, which share the seconds for placing.

    The second result is whether any was searched for.
    """
    found: dict[int, tuple[ShardedProgram, Costs, Placed]] = {}
    has_placed = False
    until_s = min(began + budget_s, time.monotonic() + PLACING * budget_s)
    for num_shards, sharded in cuts.items():
        costs = pinned(sharded, make_costs(sharded, calibration), settings.pin or {})
        known = problem_digest(sharded.graph, costs), sharded.names
        path = folder and _path(folder, "plan", known, settings, budget_s)
        placed = _recall(path, sharded, costs)
        if placed is None:
            has_placed = True
            left_s = max(until_s - time.monotonic(), LEAST_PLACING_S)
            share_s = left_s / (len(cuts) - len(found))
            placed = _place(path, sharded, costs, settings, share_s)
        found[num_shards] = sharded, costs, placed
        if placed.interrupted:
            break
    return found, has_placed


def _chosen(path: pathlib.Path | None, sizes: list[int]) -> int | None:
    """Returns the granularity that an earlier process chose, None if it is not known."""
    with contextlib.suppress(OSError, ValueError):  # none there, or damaged
        if path is not None and (found := int(path.read_text())) in sizes:
            return found
    return None


def _place(
    path: pathlib.Path | None,
    sharded: ShardedProgram,
    costs: Costs,
    settings: Settings,
    budget_s: float,
) -> Placed:
    """Returns a new plan, which is kept."""
    placed = place(
        sharded, costs, method=settings.method, objective=settings.objective,
        key=settings.key, together=settings.together, budget_s=budget_s,
    )  # fmt: skip
    if path is not None and not placed.interrupted:
        placed.save(path)
    return placed


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


def _path(
    folder: pathlib.Path, what: str, known: tuple[Any, ...], settings: Settings, budget_s: float
) -> pathlib.Path | None:
    """Returns where what was found is kept; None if its method cannot be told from others."""
    if not is_told_apart(settings.method):
        return None
    asked = settings.method, settings.objective, key_words(settings.key).tolist(), budget_s
    told = *known, settings.together, asked
    return folder / f"{what}-{hashlib.sha256(repr(told).encode()).hexdigest()[:32]}.json"


def _recall(path: pathlib.Path | None, sharded: ShardedProgram, costs: Costs) -> Placed | None:
    """Returns the plan in a file, None if there is none that the oracle confirms."""
    if path is None or not path.exists():
        return None
    try:
        placed = load_placed(path, sharded.graph, costs)
    except ValueError:
        return None
    return dataclasses.replace(placed, names=tuple(sharded.names))
