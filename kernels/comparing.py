"""Which of several functions runs from now on, by whole calls of each in turns."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from doppler_jax.training.paired import median_interval

ROUNDS = (15, 30, 60, 120)
"""Calls of each rival, in turns: more while a plan seems to be faster, but not beyond doubt."""

SURE = 6
"""Of these without which nothing is beyond doubt: they may take `LATE_S` beyond the budget."""

LATE_S = 2.0

TRIALS, TRIAL_S = 2, 0.2
"""Calls of each way at least, and seconds of them; their median counts."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """What a plan was compared with, in whole calls until their outputs can be used.

    Attributes:
      call_s: seconds of every call, by rival: "plan", "plan, fused" (one task of those that
        wait for the same transfers), "jit on <device>", "jit, sharded [by ...] over <N>
        devices".
      chosen: which of them runs from now on.
      failed: what those raised that could not run here, by rival.
    """

    call_s: dict[str, tuple[float, ...]]
    chosen: str
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        medians = ", ".join(
            f"{name} {1e3 * float(np.median(times)):.3g} ms"
            for name, times in self.call_s.items()
        )
        failed = "".join(f"; {name} failed: {why}" for name, why in self.failed.items())
        return f"{self.chosen} runs from now on; a call takes, at the median: {medians}{failed}"


def fastest(
    runs: Iterable[tuple[str, Callable[..., Any]]],
    loop: Callable[[Callable[..., Any]], Callable[[], Any]],
    until_s: float,
) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """Returns that whose calls are fastest, by few of each, and what others raised, by name.

    None is tried after `until_s` but the first. Beside the best so far but one has arrays on
    the devices.

    Args:
      runs: functions, by name.
      loop: makes calls of one.
      until_s: of `time.monotonic`.
    """
    least_s, best, failed = np.inf, dict[str, Callable[..., Any]](), dict[str, str]()
    for name, run in runs:
        if (best or failed) and time.monotonic() > until_s:
            break
        try:
            took_s = _trial_s(loop(run))
        except Exception as error:  # memory is short, or JAX does not shard it so
            failed[name] = _first_line(error)
        else:
            if took_s < least_s:
                least_s, best = took_s, {name: run}
    return best, failed


def _trial_s(call: Callable[[], Any]) -> float:
    jax.block_until_ready(call())  # compiles
    spent: list[float] = []
    while len(spent) < TRIALS or sum(spent) < TRIAL_S:
        spent.append(_seconds(call))
    return float(np.median(spent))


def _seconds(call: Callable[[], Any]) -> float:
    """Returns what a call takes until its outputs can be used."""
    began_s = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began_s


def compare_calls(rivals: Mapping[str, Callable[[], Any]], until_s: float) -> Compared:
    """Runs rivals in turns; a plan is chosen if it is faster than all others beyond doubt.

    Else that of the others is whose median is least; of two plans the faster one competes.
    Beyond doubt is where the 95% interval of the median ratio of neighbouring calls is below 1.
    What cannot run here, as where memory is short, is no rival; the first one has to.

    Args:
      rivals: what calls each, by name; those of plans begin with "plan".
      until_s: of `time.monotonic`, when to stop; each runs at least once, and short ones
        `SURE` times.
    """
    failed: dict[str, str] = {}
    for k, (name, call) in enumerate(rivals.items()):
        try:  # compiles, and brings what stays to its devices; nothing of it is held
            jax.block_until_ready(call())
        except RuntimeError as error:  # XLA's are, and a TaskError is
            if k == 0:
                raise
            failed[name] = _first_line(error)
    times: dict[str, list[float]] = {name: [] for name in rivals if name not in failed}
    began = time.monotonic()
    for k in range(ROUNDS[-1]):
        if k in ROUNDS and not _is_open(times):
            break
        now = time.monotonic()
        if k and now > (until_s if k >= SURE else max(until_s, began + LATE_S)):
            break
        for name in list(times)[:: 1 if k % 2 else -1]:
            times[name].append(_seconds(rivals[name]))
    return Compared({name: tuple(found) for name, found in times.items()}, _best(times), failed)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _is_open(times: Mapping[str, list[float]]) -> bool:
    """Returns whether the rival that takes least is a plan, and not chosen."""
    least = min(times, key=lambda name: float(np.median(times[name])))
    return least.startswith("plan") and not _best(times).startswith("plan")


def _best(times: Mapping[str, list[float]]) -> str:
    """Returns which rival is chosen by the seconds of its calls."""
    ordered = sorted(times, key=lambda name: float(np.median(times[name])))
    plan = next(name for name in ordered if name.startswith("plan"))
    others = [name for name in ordered if not name.startswith("plan")]
    ratios = [np.array(times[plan]) / np.array(times[other]) for other in others]
    return plan if all(median_interval(ratio)[1] < 1 for ratio in ratios) else others[0]
