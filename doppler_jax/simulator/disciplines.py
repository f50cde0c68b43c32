"""The queue disciplines: which of its tasks a device starts next.

Everything that executes or judges a plan shares this definition. A device that is idle starts
the candidate of least (key, id). The key is the time at which the task became ready, or a rank
that is given. Candidates are the device's ready tasks, or under a discipline that `waits` only
the first of all its tasks that have not started, so that a device may idle on purpose.

To add one, write a row of `DISCIPLINES`. If its key is a given rank that is all. Otherwise give
`Discipline` a flag, and read it in `ReadySet`, which the oracle, the validator and the engine
use, in `native_kernels.py` and in `lockstep.py`; tables of ranks in tests then ask for it.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import task_edges
from doppler_jax.types import TaskGraph


@dataclasses.dataclass(frozen=True)
class Discipline:
    """How a device chooses what it starts next."""

    name: str
    ranked: bool = True  # the key is a given rank, not the ready time
    waits: bool = False  # never overtakes: only the first task that has not started may start
    per_draw: bool = False  # ranks are a permutation, of each draw its own

    @property
    def switches(self) -> int:
        """The flags as bits, `RANKED` and `WAITS` of `native_kernels.py`."""
        return 1 * self.ranked + 2 * self.waits


DISCIPLINES = {
    discipline.name: discipline
    for discipline in (
        Discipline("fifo", ranked=False),
        Discipline("priority"),
        Discipline("in_order", waits=True),
        Discipline("random", per_draw=True),
    )
}

QUEUES = tuple(DISCIPLINES)


def find_discipline(queue: str) -> Discipline:
    """Returns the discipline of a name, or raises a `ValueError` that lists the names."""
    if queue not in DISCIPLINES:
        raise ValueError(f"unknown queue {queue!r}; known: {', '.join(QUEUES)}")
    return DISCIPLINES[queue]


class ReadySet:
    """The ready tasks of one device, and which of them it starts next.

    Args:
      discipline: by which it chooses.
      ranks: `[N]` of all tasks; None where the discipline has none.
      tasks: all of the device's tasks.
    """

    def __init__(
        self, discipline: Discipline, ranks: Sequence[float] | None, tasks: Iterable[int]
    ) -> None:
        self._ranks = ranks if discipline.ranked else None
        self._heap: list[tuple[float, int]] = []
        # A device that waits starts no task but the first that remains.
        self._remaining: deque[int] | None = None
        if ranks is not None and discipline.waits:
            self._remaining = deque(sorted(sorted(tasks), key=ranks.__getitem__))  # stable

    def key(self, v: int, ready_s: float) -> float:
        """Returns the key of a task that becomes ready at a time."""
        return ready_s if self._ranks is None else self._ranks[v]

    def add(self, v: int, now_s: float) -> None:
        """Takes a task that has become ready."""
        heappush(self._heap, (self.key(v, now_s), v))

    def first(self) -> tuple[float, int] | None:
        """Returns (key, id) of the task that starts next, None if the device has to wait."""
        if not self._heap or (self._remaining and self._heap[0][1] != self._remaining[0]):
            return None
        return self._heap[0]

    def take(self) -> tuple[float, int] | None:
        """Returns what `first` does, and takes the task out."""
        if (first := self.first()) is not None:
            heappop(self._heap)
            if self._remaining:
                self._remaining.popleft()
        return first


def check_ranks(
    graph: TaskGraph, queue: str, priority: ArrayLike | None, names: Sequence[str] = ()
) -> np.ndarray | None:
    """Returns the ranks `[N]` of one execution in float64, None under `fifo`.

    Args:
      graph: the task graph, N tasks.
      queue: one of `QUEUES`.
      priority: `[N]` ranks, least first; ties go to the smaller id.
      names: `[N]` of the tasks, for messages.

    Raises:
      ValueError: the queue is unknown, ranks are given under `fifo` or missing elsewhere,
        their shape is wrong, one is not finite, those of `random` are no permutation, or
        those of `in_order` have a reader before its producer.
    """
    discipline = find_discipline(queue)
    if discipline.ranked == (priority is None):
        raise ValueError(
            f"queue {queue!r} needs a priority for every task"
            if discipline.ranked
            else f"queue {queue!r} takes no priority"
        )
    if priority is None:
        return None
    ranks = np.asarray(priority, np.float64)
    if ranks.shape != (graph.num_tasks,):
        raise ValueError(f"priority has shape {ranks.shape}, expected ({graph.num_tasks},)")
    for v in np.flatnonzero(~np.isfinite(ranks))[:1]:
        raise ValueError(f"priority[{v}] is {ranks[v]}; expected a finite number")
    if discipline.per_draw and not np.array_equal(np.sort(ranks), np.arange(ranks.size)):
        raise ValueError(f"queue {queue!r} needs a permutation of 0 to {ranks.size - 1}")
    if discipline.waits:
        _check_precedence(graph, ranks, names)
    return ranks


def rank_order(key: np.ndarray) -> np.ndarray:
    """Returns the tasks `[N]` by (key, id)."""
    return np.argsort(key, kind="stable")


def _check_precedence(graph: TaskGraph, ranks: np.ndarray, names: Sequence[str]) -> None:
    """Raises if a task comes before one that it reads from: its device would wait for ever."""
    position = np.empty(ranks.size, np.int64)
    position[rank_order(ranks)] = np.arange(ranks.size)
    senders, readers = task_edges(graph)
    for e in np.flatnonzero(position[senders] > position[readers])[:1]:
        u, v = (
            f"task {v} ({names[v] + ', ' if names else ''}rank {ranks[v]:.9g})"
            for v in (senders[e], readers[e])
        )
        raise ValueError(
            f"priority has {v} before {u}, from which it reads; queue 'in_order' would wait "
            "for ever"
        )
