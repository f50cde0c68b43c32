"""Whether calls have become slower than they were when their plan was chosen."""

import numpy as np

WINDOW = 16
"""Calls in a row whose median counts."""

DRIFT = 1.5
"""Times the usual seconds from which on calls have become slower: noise is less."""


class Drift:
    """Watches the calls of a plan.

    Args:
      usual_s: seconds of a call when the plan was chosen; None: of the first `WINDOW` calls.
    """

    def __init__(self, usual_s: float | None) -> None:
        self.usual_s = usual_s
        self._recent: list[float] = []
        self._told = False

    def note(self, seconds: float) -> float | None:
        """Takes the seconds of a call; returns what calls take, the first time it is more."""
        if self._told:
            return None
        self._recent.append(seconds)
        if len(self._recent) < WINDOW:  # a median at every call would cost what calls do
            return None
        recent_s = float(np.median(self._recent))
        self._recent.clear()
        if self.usual_s is None:
            self.usual_s = recent_s
        self._told = recent_s > DRIFT * self.usual_s
        return recent_s if self._told else None
