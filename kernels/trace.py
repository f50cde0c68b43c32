"""Event records of an execution, and the `Schedule` that they make.

A call is more than its tasks and transfers, which a `Schedule` has: what else it does are its
chores.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from doppler_jax.types import Schedule

from .agenda import Agenda

Handled = list[tuple[int, float, float]]
"""Device, start and finish of each time that a device sent or received with what it computes
on, between two tasks: tensors, and what tells that it has come to a barrier."""


CALLER = -1
"""The device of what the calling thread does."""


class Chore(NamedTuple):
    """Something that a call does beside its tasks and transfers."""

    name: str
    device: int  # or `CALLER`
    start_s: float
    finish_s: float


class Chores(list[Chore]):
    """Those of a call so far, in seconds of this process's clock."""

    @contextlib.contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """Notes what the calling thread does meanwhile."""
        start_s = time.perf_counter()
        yield
        self.append(Chore(name, CALLER, start_s, time.perf_counter()))


@dataclasses.dataclass(frozen=True)
class WholeCall:
    """From when a function was called until its outputs could be used.

    On the clock of the call's trace, which a task or transfer starts at 0 or thereafter.
    """

    start_s: float
    finish_s: float
    chores: tuple[Chore, ...]

    @property
    def seconds(self) -> float:
        return self.finish_s - self.start_s


class Clock:
    """Seconds since the execution began."""

    def __init__(self) -> None:
        self.origin_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self.origin_s


class Record:
    """Start and finish of every task and transfer of one call, in seconds.

    Events are numbered: task v is event v, transfer k is event N + k.
    """

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self.num_tasks = len(agenda.placement)
        num_events = self.num_tasks + len(agenda.transfers)
        self.start_s = [float("nan")] * num_events
        self.finish_s = [float("nan")] * num_events
        self.handling: Handled = []  # where threads move tensors, devices spend nothing
        self.origin_s = math.nan  # on this process's clock

    def first_unfinished(self) -> int:
        """Returns what has run for longest, or else the first task that has yet to run."""
        waiting = {e for e, finish_s in enumerate(self.finish_s) if math.isnan(finish_s)}
        running = [e for e in waiting if not math.isnan(self.start_s[e])]
        if running:
            return min(running, key=self.start_s.__getitem__)
        return next((v for v in self._agenda.order if v in waiting), self._agenda.order[-1])

    def schedule(self) -> Schedule:
        """Returns the record as a schedule."""
        n, transfers = self.num_tasks, self._agenda.transfers
        return Schedule(
            placement=np.array(self._agenda.placement, dtype=np.int64),
            start_s=np.array(self.start_s[:n], dtype=np.float64),
            finish_s=np.array(self.finish_s[:n], dtype=np.float64),
            transfer_tensor=np.array([t.tensor for t in transfers], dtype=np.int64),
            transfer_source=np.array([t.source for t in transfers], dtype=np.int64),
            transfer_destination=np.array([t.destination for t in transfers], dtype=np.int64),
            transfer_start_s=np.array(self.start_s[n:], dtype=np.float64),
            transfer_finish_s=np.array(self.finish_s[n:], dtype=np.float64),
        )
