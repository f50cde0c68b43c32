"""Measured makespans: what stage 3 learns from and what reports compare."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.programs.blocks import flatten_args
from doppler_jax.types import Schedule, ShardedProgram

from .compile import PlacedFunction, get_runner
from .job import check_devices, make_job
from .ops import Executables, ResidentBlocks

Measure = Callable[[ArrayLike, ArrayLike | None], float]
"""Seconds of a placement `[N]`, run in the order of a priority `[N]` or the default one."""


def measure_s(step: PlacedFunction, *args: Any, repeats: int = 5, warmup: int = 1) -> float:
    """Returns the median makespan, in seconds, of `repeats` calls after `warmup` others.

    Timed is the execution, on the host's clock: from the dispatch of the first task until
    the host has seen the last one finish, every transfer between tasks included. Not timed
    are compilation, laying the arguments on their devices, and assembling the outputs.

    Raises:
      ValueError: `repeats` is not positive, or `warmup` is negative.
    """
    _check_counts(repeats, warmup)

    def run() -> Schedule:
        step(*args)
        assert step.trace is not None
        return step.trace

    return _median_s(run, repeats, warmup)


def make_measure(
    sharded: ShardedProgram,
    args: Sequence[Any],
    devices: Sequence[jax.Device],
    mode: str = "work_conserving",
    repeats: int = 5,
    warmup: int = 1,
    executables: Executables | None = None,
) -> Measure:
    """Returns `measure(placement, priority) -> seconds`, timed as by `measure_s`.

    Compiled kernels and argument blocks are kept from one placement to the next, so a new
    placement costs its runs and only what no other put on that device before.

    Raises:
      ValueError: an unknown mode, bad devices or counts, or arguments that are not what
        the program was traced with; `measure` raises it for a bad placement or priority,
        and `TaskError` when a run fails.
    """
    _check_counts(repeats, warmup)
    runner = get_runner("local", mode)
    devices = check_devices(devices)
    blocks = ResidentBlocks(sharded, flatten_args(sharded, tuple(args), {}), devices)
    shared = Executables() if executables is None else executables

    def measure(placement: ArrayLike, priority: ArrayLike | None = None) -> float:
        job = make_job(sharded, placement, devices, priority, shared)
        return _median_s(lambda: runner(job, blocks.lay(job.plan)), repeats, warmup)

    return measure


def _check_counts(repeats: int, warmup: int) -> None:
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; expected a positive integer")
    if warmup < 0:
        raise ValueError(f"warmup is {warmup}; expected an integer >= 0")


def _median_s(run: Callable[[], Schedule], repeats: int, warmup: int) -> float:
    for _ in range(warmup):
        run()
    return float(np.median([run().finish_s.max(initial=0.0) for _ in range(repeats)]))
