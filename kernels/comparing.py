"""Which of several functions runs from now on, by whole calls of each in turns."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from doppler_jax.training.paired import median_interval

ROUNDS = (3, 8, 15, 30, 60, 120)
"""After so many turns of each, rivals drop out that are slower beyond doubt.
The last ends it."""

FAR = 1.15
"""A rival also drops out if it took so many times as long as the fastest in every turn."""

LOOKS = 0.99
"""Level of the intervals for that: what four looks find holds at 95% together."""

CLOSE = 1.01
"""Turns also end where the fastest so far is at most so many times as slow as any other."""

SURE = 6
"""Of these without which nothing is beyond doubt: they may take `LATE_S` beyond the budget."""

LATE_S = 2.0

TURN, TURN_S = 5, 0.03
"""Calls in a row, and seconds of them, that end a rival's turn; their median counts. Threads of
the rival before may still spin beside the first one."""

TRIALS, TRIAL_S = 2, 0.2
"""Calls of each way at least, and seconds of them; their median counts."""

NEAR = 1.1
"""Times the fastest that the next one may take to be kept beside it."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """What a plan was compared with, in whole calls until their outputs can be used.

    Attributes:
      call_s: seconds of a call in each turn, by rival: "plan", "plan, fused" (one task of
        those that wait for the same transfers), "jit on <device>", "jit, sharded [by ...] over
        <N> devices".
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

    A second one that is nearly as fast is returned, too: so few calls do not tell them apart.
    The first is always tried. Another is tried if it ends before `until_s`, should it take as
    long as the one before. Beside the best two so far but one has arrays on the devices.

    Args:
      runs: functions, by name.
      loop: makes calls of one.
      until_s: of `time.monotonic`.
    """
    best, failed = dict[str, tuple[float, Callable[..., Any]]](), dict[str, str]()
    took_s = 0.0
    for name, run in runs:
        began = time.monotonic()
        if (best or failed) and began + took_s > until_s:
            break
        try:
            best[name] = _trial_s(loop(run)), run
        except Exception as error:  # memory is short, or JAX does not shard it so
            failed[name] = _first_line(error)
        took_s = time.monotonic() - began
        ordered = sorted(best, key=lambda name: best[name][0])[:2]
        best = {n: best[n] for n in ordered if best[n][0] <= NEAR * best[ordered[0]][0]}
    return {name: run for name, (_, run) in best.items()}, failed


def _trial_s(call: Callable[[], Any]) -> float:
    jax.block_until_ready(call())  # compiles
    spent: list[float] = []
    while len(spent) < TRIALS or sum(spent) < TRIAL_S:
        spent.append(_seconds(call))
    return float(np.median(spent))


def _turn_s(call: Callable[[], Any]) -> float:
    spent: list[float] = []
    while not spent or (len(spent) < TURN and sum(spent) < TURN_S):
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
    Beyond doubt is where the 95% interval of the median ratio of neighbouring turns is below 1.
    Close rivals have more turns (racing, Maron and Moore 1994, by order statistics).
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
    racing, began = list(times), time.monotonic()
    for k in range(ROUNDS[-1]):
        if k in ROUNDS:
            racing = _remaining({name: times[name] for name in racing})
            if len(racing) == 1:
                break
        now = time.monotonic()
        if k and now > (until_s if k >= SURE else max(until_s, began + LATE_S)):
            break
        for name in racing[:: 1 if k % 2 else -1]:
            times[name].append(_turn_s(rivals[name]))
    chosen = _best({name: times[name] for name in racing})
    return Compared({name: tuple(found) for name, found in times.items()}, chosen, failed)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _remaining(times: Mapping[str, list[float]]) -> list[str]:
    """Returns rivals of which more turns may tell the fastest; that alone, if it is told."""
    least = min(times, key=lambda name: float(np.median(times[name])))
    lows = dict[str, float]()  # of what others take over that
    for name in times.keys() - {least}:
        ratios = np.array(times[name]) / times[least]
        lows[name] = median_interval(ratios, LOOKS)[0]
        if not least.startswith("plan") or name.startswith("plan"):  # a plan has to be sure
            lows[name] = max(lows[name], float(ratios.min()) / FAR)
    is_told = all(low >= 1 / CLOSE for low in lows.values()) and _best(times) == least
    return [name for name in times if name == least or (not is_told and lows[name] <= 1)]


def _best(times: Mapping[str, list[float]]) -> str:
    """Returns which rival is chosen by the seconds of its calls."""
    ordered = sorted(times, key=lambda name: float(np.median(times[name])))
    plan = next((name for name in ordered if name.startswith("plan")), None)
    others = [name for name in ordered if not name.startswith("plan")]
    if plan is None:
        return others[0]
    ratios = [np.array(times[plan]) / times[other] for other in others]
    return plan if all(median_interval(ratio)[1] < 1 for ratio in ratios) else others[0]
