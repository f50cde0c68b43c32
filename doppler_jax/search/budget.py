"""What a search may spend, and the record of what it got for it."""

import dataclasses
import math
import time

import numpy as np


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bounds of a search; the first that is met ends it."""

    evaluations: int | None = None  # executions to simulate, never exceeded
    seconds: float | None = None  # compilation counts; checked after every block
    began: float = 0.0  # `time.monotonic()` from which seconds count

    @property
    def is_bounded(self) -> bool:
        return self.evaluations is not None or self.seconds is not None

    def seconds_spent(self) -> float:
        """Returns the seconds since the beginning."""
        return time.monotonic() - self.began

    def progress(self, evaluations: int) -> float:
        """Returns the share that is spent, 0 to 1."""
        share = 0.0 if self.evaluations is None else evaluations / self.evaluations
        if self.seconds is not None:
            share = max(share, self.seconds_spent() / self.seconds)
        return min(share, 1.0)


@dataclasses.dataclass(frozen=True)
class Curve:
    """The best objective so far against what had been spent; every row improves."""

    evaluations: np.ndarray  # [K] int
    seconds: np.ndarray  # [K]
    makespan_s: np.ndarray  # [K] falling; of the objective, so a statistic under noise


class CurveRecorder:
    """Takes the rows of a curve."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, float]] = []

    def add(self, evaluations: int, seconds: float, makespan_s: float) -> None:
        """Adds a row, if it is better than the last."""
        last_s = self.rows[-1][2] if self.rows else math.inf
        if makespan_s < last_s:
            self.rows.append((evaluations, seconds, makespan_s))

    def correct(self, evaluations: int, seconds: float, makespan_s: float) -> None:
        """Ends the rows at the oracle's word, with nothing below it before."""
        self.rows = [row for row in self.rows if row[2] > makespan_s]
        self.rows.append((evaluations, seconds, makespan_s))

    def finish(self, evaluations: int, seconds: float, makespan_s: float) -> Curve:
        """Returns the curve, which ends at the oracle's word."""
        self.correct(evaluations, seconds, makespan_s)
        columns = zip(*self.rows, strict=True)
        return Curve(*(np.array(column) for column in columns))


def fit_batch(members: int, proposals: int, evaluations: int) -> tuple[int, int]:
    """Returns members, and proposals of each, so that a budget allows several steps."""
    most = evaluations // 8
    members = min(members, max(most // 8, 1))
    while members * proposals > most and proposals > 2:
        proposals //= 2
    return members, proposals
