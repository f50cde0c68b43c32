"""Measured calls of plans: what stage 3 learns from and what reports compare."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from doppler_jax.programs.blocks import flatten_args
from doppler_jax.training.paired import Measure as PairedMeasure
from doppler_jax.training.paired import Paired
from doppler_jax.types import Plan, Schedule, ShardedProgram

from .devices import Options
from .loop import Loop
from .placed import PlacedFunction, as_devices, as_plan, load
from .running import TaskError

_PATIENCE = 4.0
"""How far beyond the guard's limit a candidate's first run may go before it is cut short."""

_GRACE_S = 1.0
"""Added to that, for what a first run has to set up."""


def measure_s(step: PlacedFunction, *args: Any, repeats: int = 5, warmup: int = 1) -> float:
    """Returns the median seconds of `repeats` whole calls after `warmup` others.

    A whole call lasts until its outputs can be used: `PlacedFunction.whole_call`. What is
    carried is fed back from call to call. `step.schedule` has the makespan within the last one.

    Raises:
      ValueError: `repeats` is not positive, or `warmup` is negative.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; expected a positive integer")
    _check_warmup(warmup)
    run = _Run(step, args, {})
    _warm_up(run, warmup)
    return float(np.median([run.seconds() for _ in range(repeats)]))


class _Run:
    """A plan, and its calls in a row."""

    def __init__(
        self, step: PlacedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.step = step
        self.loop = Loop(step, step._loaded.sharded, args, kwargs)

    def seconds(self) -> float:
        """Runs the next call, awaits it, and returns what it took as a whole."""
        self.loop()
        return self.step.whole_call.seconds


def make_paired_measure(
    sharded: ShardedProgram,
    args: Sequence[Any],
    devices: Sequence[Any],
    mode: str | None = None,
    max_slowdown: float = 2.0,
    warmup: int = 1,
    kwargs: Mapping[str, Any] | None = None,
) -> PairedMeasure:
    """Returns `measure(candidate, incumbent, rounds)`, which runs two plans in alternation.

    Each round is a run of either, the order changing from round to round, so that drift of
    the machine and what one run leaves to the next hit both alike. A candidate whose first
    timed run takes more than `max_slowdown` times the incumbent's is not run again, and a
    first run beyond several times that is cut short.

    Args:
      sharded: the program.
      args: arguments to run it on.
      devices: where, as `dj.compile` takes them.
      mode: how tasks are dispatched, by default as each plan's queue has it; traces are kept
        where starts were seen, and there are no barriers.
      max_slowdown: the guard's limit.
      warmup: runs of a plan that are not timed, when it comes up.
      kwargs: arguments by keyword.

    Raises:
      ValueError: an unknown mode, bad devices, a number out of range, or arguments that are
        not what the program was traced with; `measure` raises it for a bad plan, and
        `TaskError` when a run fails.
    """
    _check_warmup(warmup)
    if not max_slowdown > 1:
        raise ValueError(f"max_slowdown is {max_slowdown}; expected a number above 1")
    options, placed_on = Options(mode=mode), as_devices(devices)
    placed_on.check_options(options)
    # Resident blocks are found again by the identity of the arrays.
    values = flatten_args(sharded, tuple(args), dict(kwargs or {}))
    laid, by_name = jax.tree.unflatten(sharded.in_tree, values[: len(sharded.arg_avals)])

    def load_plan(plan: Plan, timeout_s: float | None = None) -> _Run:
        limited = dataclasses.replace(options, timeout_s=timeout_s)
        return _Run(load(sharded, plan, placed_on, limited), laid, by_name)

    return _Pairing(load_plan, max_slowdown, warmup).measure


class _Pairing:
    """Alternates candidates with the incumbent, which it keeps loaded."""

    def __init__(
        self,
        load_plan: Callable[..., _Run],
        max_slowdown: float,
        warmup: int,
    ) -> None:
        self._load = load_plan
        self._max_slowdown = max_slowdown
        self._warmup = warmup
        self._incumbent: Plan | None = None
        self._run: _Run | None = None

    def measure(
        self, candidate: Plan | np.ndarray, incumbent: Plan | np.ndarray, rounds: int
    ) -> Paired:
        """Measures; see `make_paired_measure`."""
        candidate, incumbent = as_plan(candidate), as_plan(incumbent)
        if self._run is None or incumbent != self._incumbent:
            self._run = self._load(incumbent)
            self._incumbent = incumbent
            _warm_up(self._run, self._warmup)
        run = other = self._run
        if candidate != incumbent:
            usual_s = run.seconds()
            limit_s = _PATIENCE * self._max_slowdown * usual_s + _GRACE_S
            other = self._load(candidate, timeout_s=limit_s)
            try:
                _warm_up(other, self._warmup)
            except TaskError as error:
                if not isinstance(error.__cause__, TimeoutError):
                    raise
                return Paired((limit_s,), (usual_s,), is_aborted=True)
        runs: list[tuple[float, Schedule | None]] = []
        usual: list[float] = []
        for k in range(rounds):
            for is_candidate in (False, True) if k % 2 == 0 else (True, False):
                if is_candidate:
                    runs.append((other.seconds(), other.step.schedule))
                else:
                    usual.append(run.seconds())
            if k == 0 and runs[0][0] > self._max_slowdown * usual[0]:
                break
        step = other.step
        is_kept = not (step.starts_are_inferred or step.mode == "bulk_synchronous")
        _, median = sorted(runs, key=lambda timed: timed[0])[len(runs) // 2]
        return Paired(
            candidate_s=tuple(seconds for seconds, _ in runs),
            incumbent_s=tuple(usual),
            is_aborted=len(runs) < rounds,
            trace=median if is_kept else None,
        )


def _warm_up(run: _Run, count: int) -> None:
    """Runs calls that are not timed, each to its end."""
    for _ in range(count):
        jax.block_until_ready(run.loop())


def _check_warmup(warmup: int) -> None:
    if warmup < 0:
        raise ValueError(f"warmup is {warmup}; expected an integer >= 0")
