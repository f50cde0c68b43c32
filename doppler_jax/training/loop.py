"""The loop of all training: updates until a bound is met, in memory or in a folder.

A run's folder has

config.json     what was asked for; another run is not put on top of it
metrics.jsonl   one line per update, null for what is not finite; cut back to the
                checkpoint on resumption
checkpoints/    see `checkpoint.py`
"""

import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, Generic, Self

import numpy as np
from chex import ArrayTree

from doppler_jax.budget import Budget
from doppler_jax.files import parse_json_object, read_text, write_json_atomic
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.checkpoint import Checkpoints
from doppler_jax.training.state import StateT, TrainState
from doppler_jax.types import Policy

Report = Callable[[TrainState, dict[str, float]], None]
"""Is told of every update: the state after it and its numbers."""


@dataclasses.dataclass(frozen=True)
class Phase(Generic[StateT]):
    """Updates of one kind, what they begin with and what one of them spends."""

    begin: Callable[[ArrayTree], StateT]  # from parameters
    # Returns the next state and numbers to report, by name.
    update: Callable[[StateT], tuple[StateT, dict[str, Any]]]
    num_updates: float = math.inf
    evaluations: int = 0  # executions that an update simulates
    episodes: int = 0  # that count against the budget


class RunFolder:
    """What a run keeps on disk; it goes on where it was stopped, or killed."""

    def __init__(
        self,
        folder: pathlib.Path,
        config: dict[str, Any],
        policy: PolicyConfig,
        save_every_s: float = 10.0,
    ) -> None:
        """Opens the folder, or makes it.

        Args:
          folder: of the run.
          config: all that decides its numbers, JSON.
          policy: sizes of the networks, saved beside every checkpoint.
          save_every_s: seconds between checkpoints.

        Raises:
          ValueError: it has a run with other settings.
        """
        self.folder = folder
        self._policy, self._save_every_s = policy, save_every_s
        self._config = json.loads(json.dumps(config))
        path = folder / "config.json"
        if path.exists():
            _check_same(path, parse_json_object(path, read_text(path)), self._config)
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_json_atomic(path, self._config)
        self._checkpoints = Checkpoints(folder / "checkpoints")
        self._metrics = folder / "metrics.jsonl"
        self._lines: list[str] = []  # of updates that no checkpoint has yet
        self._saved_at = time.monotonic()
        self.spent_s = 0.0  # by earlier runs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_new(self) -> bool:
        """Whether nothing was saved here."""
        return self._checkpoints.latest() is None

    def resume(self, start: StateT) -> StateT:
        """Returns the newest checkpoint's state, or `start` where there is none."""
        latest = self._checkpoints.latest()
        _truncate(self._metrics, latest or 0)
        if latest is None:
            return start
        state = self._checkpoints.restore(start)
        self.spent_s = self._checkpoints.meta()["seconds"]
        return state

    def record(self, state: TrainState, values: dict[str, float], seconds: float) -> None:
        """Takes the numbers of an update, and saves if it is time to."""
        entry = {name: v if np.isfinite(v) else None for name, v in values.items()}
        self._lines.append(json.dumps({"update": int(state.update), **entry}) + "\n")
        if time.monotonic() - self._saved_at >= self._save_every_s:
            self.save(state, seconds)

    def save(self, state: TrainState, seconds: float) -> None:
        """Writes a state that all runs together took so many seconds for."""
        with self._metrics.open("a") as file:
            file.writelines(self._lines)
        self._lines.clear()
        meta = {**self._config, "seconds": seconds}
        self._checkpoints.save(Policy(state.params, self._policy), meta, state)
        self._saved_at = time.monotonic()

    def close(self) -> None:
        """Releases the checkpoint manager."""
        self._checkpoints.close()


def train(
    phase: Phase[StateT],
    state: StateT,
    budget: Budget | None = None,
    *,
    folder: RunFolder | None = None,
    report: Report | None = None,
) -> tuple[StateT, bool]:
    """Updates until the phase or the budget ends, but once at least.

    The result does not depend on when anything was saved or stopped, unless seconds bound it.

    Args:
      phase: what to do.
      state: to begin with, or to go on from.
      budget: when to stop; what earlier runs in the folder spent counts.
      folder: where to save now and then and at the end; None keeps all in memory.
      report: told of every update.

    Returns:
      The last state, and whether Ctrl-C ended training. With a folder, or before the first
      update is done, Ctrl-C passes on.
    """
    budget = budget or Budget()
    if folder is not None:
        budget = budget.after(folder.spent_s)
    try:
        while int(state.update) < phase.num_updates:
            if int(state.update) and _reached(budget, phase, state):
                break
            new, metrics = phase.update(state)
            values = {name: float(np.asarray(value)) for name, value in metrics.items()}
            state = new  # Ctrl-C before this leaves no state without its line of metrics
            if folder is not None:
                folder.record(state, values, budget.seconds_spent())
            if report is not None:
                report(state, values)
    except KeyboardInterrupt:
        if folder is not None or int(state.update) == 0:
            raise
        return state, True
    finally:
        if folder is not None:
            folder.save(state, budget.seconds_spent())
    return state, False


def _reached(budget: Budget, phase: Phase[StateT], state: StateT) -> bool:
    """Returns whether the budget forbids another update."""
    return budget.reached(
        int(state.evaluations) + phase.evaluations if phase.evaluations else 0,
        int(state.episodes) + phase.episodes if phase.episodes else 0,
        float(state.best_makespan_s),
    )


def _check_same(path: pathlib.Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    names = sorted({*found, *wanted})
    differing = [name for name in names if found.get(name) != wanted.get(name)]
    if differing:
        details = "; ".join(
            f"{name} was {found.get(name)!r}, now {wanted.get(name)!r}" for name in differing
        )
        raise ValueError(
            f"{path} belongs to a run with other settings ({details}); "
            "choose another folder, or remove this one"
        )


def _truncate(path: pathlib.Path, last_update: int) -> None:
    """Drops the lines after `last_update`, and one that was cut off while being written."""
    if not path.exists():
        return
    kept = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), start=1):
        try:
            if not line.endswith("\n") or json.loads(line)["update"] > last_update:
                break
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{path}: line {number} is damaged: {error}") from error
        kept.append(line)
    os.truncate(path, len("".join(kept).encode()))
