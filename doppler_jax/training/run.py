"""A run's folder: its settings, metrics and checkpoints; resumes where it was stopped.

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
from typing import Any

import numpy as np

from doppler_jax.files import parse_json_object, read_text, write_json_atomic
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.checkpoint import Checkpoints
from doppler_jax.training.state import TrainState

Update = Callable[[TrainState], tuple[TrainState, dict[str, Any]]]
Report = Callable[[int, dict[str, float]], None]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """When training ends before its last update; what earlier sessions spent counts."""

    episodes: float = math.inf  # after which no update starts
    seconds: float = math.inf  # likewise, compilation included
    makespan_s: float = 0.0  # of the best placement, once it is as short

    def reached(self, state: TrainState, seconds: float) -> bool:
        """Returns whether a state, after so many seconds, is the last."""
        return (
            seconds >= self.seconds
            or int(state.episodes) >= self.episodes
            or float(state.best_makespan_s) <= self.makespan_s
        )


class Run:
    """Trains a state by repeated updates inside a folder."""

    def __init__(
        self, folder: pathlib.Path, config: dict[str, Any], policy: PolicyConfig
    ) -> None:
        """Opens the folder, or makes it.

        Raises:
          ValueError: it holds a run with other settings.
        """
        self.folder = folder
        self._policy = policy
        self._config = json.loads(json.dumps(config))
        path = folder / "config.json"
        if path.exists():
            _check_same(path, parse_json_object(path, read_text(path)), self._config)
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_json_atomic(path, self._config)
        self._checkpoints = Checkpoints(folder / "checkpoints")
        self._metrics = folder / "metrics.jsonl"
        self._spent_s = 0.0  # by earlier sessions

    def resume(self, start: TrainState) -> TrainState:
        """Returns the newest checkpoint's state, or `start` where there is none."""
        latest = self._checkpoints.latest()
        _truncate(self._metrics, latest or 0)
        if latest is None:
            return start
        state = self._checkpoints.restore(start)
        self._spent_s = self._checkpoints.meta()["seconds"]
        return state

    def train(
        self,
        state: TrainState,
        update: Update,
        num_updates: int,
        *,
        bounds: Bounds | None = None,
        save_every_s: float = 10.0,
        report: Report | None = None,
    ) -> TrainState:
        """Updates until `num_updates` are done or a bound is reached, saving now and then.

        It saves at the end, too; Ctrl-C saves the last finished update and passes on. The
        result does not depend on when anything was saved or stopped, unless seconds bound it.
        """
        bounds = bounds or Bounds()
        lines: list[str] = []
        began = saved_at = time.monotonic()
        before_s = self._spent_s
        try:
            while int(state.update) < num_updates:
                self._spent_s = before_s + time.monotonic() - began
                if bounds.reached(state, self._spent_s):
                    break
                state, metrics = update(state)
                values = {name: float(np.asarray(value)) for name, value in metrics.items()}
                entry = {k: v if np.isfinite(v) else None for k, v in values.items()}
                lines.append(json.dumps({"update": int(state.update), **entry}) + "\n")
                if report is not None:
                    report(int(state.update), values)
                if time.monotonic() - saved_at >= save_every_s:
                    self._save(state, lines)
                    saved_at = time.monotonic()
        finally:
            self._spent_s = before_s + time.monotonic() - began
            self._save(state, lines)
        return state

    def close(self) -> None:
        """Releases the checkpoint manager."""
        self._checkpoints.close()

    def _save(self, state: TrainState, lines: list[str]) -> None:
        with self._metrics.open("a") as file:
            file.writelines(lines)
        lines.clear()
        meta = {**self._config, "seconds": self._spent_s}
        self._checkpoints.save(state, self._policy, meta)


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
