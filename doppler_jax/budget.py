"""What a search or a training may spend, and the record of what it got for it."""

import dataclasses
import math
import time

import numpy as np


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bounds of a search or a training; the first that is met ends it, None bounds nothing."""

    evaluations: int | None = None  # executions to simulate, never exceeded
    episodes: int | None = None  # of training in the simulator, never exceeded
    seconds: float | None = None  # compiling counts; checked after every chunk or update
    target_s: float | None = None  # makespan that is good enough
    # `time.monotonic()` from which seconds count: by default, of the making of the budget.
    began: float = dataclasses.field(default_factory=lambda: time.monotonic(), compare=False)

    @property
    def is_bounded(self) -> bool:
        """Whether it ends for sure: a target may never be met."""
        return {self.evaluations, self.episodes, self.seconds} != {None}

    def seconds_spent(self) -> float:
        """Returns the seconds since the beginning."""
        return time.monotonic() - self.began

    def after(self, seconds: float) -> "Budget":
        """Returns the budget as if it had begun so many seconds before now."""
        return dataclasses.replace(self, began=time.monotonic() - seconds)

    def progress(self, evaluations: int) -> float:
        """Returns the share of evaluations and seconds that is spent, 0 to 1."""
        share = 0.0 if self.evaluations is None else evaluations / self.evaluations
        if self.seconds is not None:
            share = max(share, self.seconds_spent() / self.seconds)
        return min(share, 1.0)

    def reached(
        self, evaluations: int = 0, episodes: int = 0, makespan_s: float = math.inf
    ) -> bool:
        """Returns whether a bound forbids the next step.

        Args:
          evaluations: executions that will have been simulated once it is done.
          episodes: likewise.
          makespan_s: of the best placement so far.
        """
        return (
            (self.evaluations is not None and evaluations > self.evaluations)
            or (self.episodes is not None and episodes > self.episodes)
            or (self.seconds is not None and self.seconds_spent() >= self.seconds)
            or (self.target_s is not None and makespan_s <= self.target_s)
        )


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

    def finish(self, evaluations: int, seconds: float, makespan_s: float) -> Curve:
        """Returns the curve, which ends at the oracle's word: nothing before is below it."""
        above = [row for row in self.rows if row[2] > makespan_s]
        columns = zip(*above, (evaluations, seconds, makespan_s), strict=True)
        return Curve(*(np.array(column) for column in columns))
