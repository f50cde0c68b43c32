"""Measurements of a plan beside another, so that drift of the machine cancels."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from doppler_jax.files import parse_json_object
from doppler_jax.types import Plan, Schedule


@dataclasses.dataclass(frozen=True)
class Paired:
    """R runs of a candidate in alternation with R runs of the incumbent."""

    candidate_s: tuple[float, ...]  # [R] of whole calls
    incumbent_s: tuple[float, ...]  # [R] of the neighbouring runs
    is_aborted: bool = False  # it was too slow to be repeated: its times are lower bounds
    trace: Schedule | None = None  # of the candidate's run of median length

    @property
    def ratios(self) -> np.ndarray:
        """Candidate over incumbent, `[R]`."""
        return np.array(self.candidate_s) / np.array(self.incumbent_s)

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return float(np.median(self.ratios))

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Returns bounds of the true median ratio; see `median_interval`."""
        return median_interval(self.ratios, level)


Measure = Callable[[Plan | np.ndarray, Plan | np.ndarray, int], Paired]
"""Measures a candidate against the incumbent in so many pairs of runs; see `dj.compile`."""


def median_interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Returns a confidence interval of the median of what `values` `[R]` were drawn from.

    It lies between order statistics, as the sign test has it, and so assumes nothing of the
    distribution. Where R is too small for the level it is (-inf, inf); 95% takes 6.
    """
    from scipy.stats import binom

    ordered, count = np.sort(values), len(values)
    for k in range((count + 1) // 2, 0, -1):
        if 2 * binom.cdf(k - 1, count, 0.5) <= 1 - level:
            return float(ordered[k - 1]), float(ordered[count - k])
    return -np.inf, np.inf


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One line of the log."""

    update: int
    episode: int
    candidate: Plan
    incumbent: Plan
    rounds: int
    worth_s: float  # the incumbent's worth times the median ratio
    paired: Paired


class MeasurementLog:
    """Every measurement of a run, one JSON line each, written before it is used.

    A resumed run takes from here what was measured before it was stopped, so that it goes
    on exactly as it would have.
    """

    def __init__(self, path: pathlib.Path, measure: Measure) -> None:
        """Reads the log, dropping a line that was cut off while being written."""
        self._path = path
        self._measure = measure
        self._known: dict[tuple[int, int], Measurement] = {}
        if path.exists():
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]
            os.truncate(path, len(whole.encode()))
            for line in whole.splitlines():
                found = _from_json(parse_json_object(path, line))
                self._known[found.update, found.episode] = found

    def before(self, update: int) -> list[Measurement]:
        """Returns what was measured in earlier updates, in that order."""
        return [found for found in self._known.values() if found.update < update]

    def take(
        self,
        update: int,
        episode: int,
        candidate: Plan,
        incumbent: Plan,
        incumbent_s: float | None,
        rounds: int,
    ) -> Measurement:
        """Returns a measurement, doing it unless the log has it.

        Args:
          update: when it is used.
          episode: its number within the update.
          candidate: plan to measure.
          incumbent: plan to measure it against.
          incumbent_s: what that is worth; None: the median of its runs here.
          rounds: pairs of runs.

        Raises:
          ValueError: the log has another one there, so it is another run's; or a measured
            time is no positive finite number.
        """
        wanted = candidate, incumbent, rounds
        found = self._known.get((update, episode))
        if found is not None:
            if (found.candidate, found.incumbent, found.rounds) != wanted:
                raise ValueError(
                    f"{self._path}: update {update}, episode {episode} measured other "
                    "plans than this run asks for; it is the log of another run"
                )
            return found
        paired = self._measure(candidate, incumbent, rounds)
        for seconds in (*paired.candidate_s, *paired.incumbent_s):
            if not 0 < seconds < np.inf:
                raise ValueError(f"update {update}, episode {episode}: measured {seconds} s")
        if incumbent_s is None:
            incumbent_s = float(np.median(paired.incumbent_s))
        found = Measurement(update, episode, *wanted, incumbent_s * paired.ratio, paired)
        with self._path.open("a") as file:
            line = json.dumps(
                dataclasses.asdict(found), default=lambda x: np.asarray(x).tolist()
            )
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._known[update, episode] = found
        return found


def _from_json(entry: dict[str, Any]) -> Measurement:
    def fields_of(part: dict[str, Any], **others: Any) -> dict[str, Any]:
        frozen = {k: tuple(v) if isinstance(v, list) else v for k, v in part.items()}
        return {**frozen, **others}

    trace = entry["paired"]["trace"]
    if trace is not None:
        trace = Schedule(
            **{
                name: np.array(values, np.float64 if name.endswith("_s") else np.int64)
                for name, values in trace.items()
            }
        )
    paired = Paired(**fields_of(entry["paired"], trace=trace))
    plans = {
        name: Plan(np.array(plan["placement"]), _array(plan["priority"]), plan["queue"])
        for name in ("candidate", "incumbent")
        if (plan := entry[name])
    }
    return Measurement(**fields_of(entry, paired=paired, **plans))


def _array(values: list[float] | None) -> np.ndarray | None:
    return None if values is None else np.array(values)
