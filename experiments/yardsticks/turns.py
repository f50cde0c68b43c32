"""Competitors timed in turns, so that a noisy machine is noisy for all of them."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """What a competitor runs; it returns when its results are there."""

    batch: int  # placements that it simulates
    run: Callable[[], Any]
    compiles: bool = True  # when it runs first

    def seconds(self) -> float:
        """Runs it, and returns the seconds that took."""
        began = time.perf_counter()
        self.run()
        return time.perf_counter() - began


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a call that simulates `batch` placements."""

    batch: int
    compile_s: float  # of the first call, less the median
    seconds: tuple[float, ...]  # of the calls after it, one per round

    @property
    def placement_s(self) -> float:
        """Median seconds per placement."""
        return float(np.median(self.seconds)) / self.batch

    def times_as_fast_as(self, other: "Timing") -> float:
        """Median over rounds of the other's seconds per placement over this one's."""
        own = np.array(self.seconds) / self.batch
        return float(np.median(np.array(other.seconds) / other.batch / own))


def take_turns(calls: dict[str, Call], repeats: int) -> dict[str, Timing]:
    """Times every call once to compile, then all of them in turn, round after round.

    Args:
      calls: of each competitor.
      repeats: rounds.
    """
    first_s = {what: call.seconds() for what, call in calls.items()}
    rounds: dict[str, list[float]] = {what: [] for what in calls}
    for _ in range(repeats):
        for what, call in calls.items():
            time.sleep(0.01)  # threads of the call before may spin for a while
            rounds[what].append(call.seconds())
    return {
        what: Timing(
            batch=call.batch,
            compile_s=call.compiles * max(first_s[what] - np.median(rounds[what]).item(), 0.0),
            seconds=tuple(rounds[what]),
        )
        for what, call in calls.items()
    }
