"""Bulk-synchronous dispatch, for comparison: levels of tasks, transfers, and barriers.

The level of a task is its longest path in hops from an entry. When a level's last task has
finished, what its tasks made is moved; when the last of that has arrived, the next level
starts. Inputs with a home are moved before the first.
"""

from .blocks import Slots
from .job import Job
from .trace import Record
from .workers import Run


def run_bulk_synchronous(job: Job, slots: Slots) -> Record:
    """Runs a job level by level; otherwise as `run_work_conserving`."""
    return _BulkSynchronous(job, slots).run()


class _BulkSynchronous(Run):
    def __init__(self, job: Job, slots: Slots) -> None:
        super().__init__(job, slots)
        self._tasks: list[list[int]] = [[] for _ in range(max(job.levels, default=-1) + 1)]
        for v, level in enumerate(job.levels):
            self._tasks[level].append(v)
        self._level = -1  # whose tasks run, or have run
        self._tasks_left = 0  # before the barrier
        self._transfers_left = 0

    def begin(self) -> None:
        self._move(list(self.plan.initial_transfers), 0.0)

    def finished(self, v: int, now_s: float) -> None:
        self._tasks_left -= 1
        if not self._tasks_left:
            tasks = self._tasks[self._level]
            self._move([k for v in tasks for k in self.plan.task_transfers[v]], now_s)

    def arrived(self, k: int, now_s: float) -> None:
        self._transfers_left -= 1
        if not self._transfers_left:
            self._next_level(now_s)

    def _move(self, transfers: list[int], now_s: float) -> None:
        self._transfers_left = len(transfers)
        for k in transfers:
            self.request(k)
        if not transfers:
            self._next_level(now_s)

    def _next_level(self, now_s: float) -> None:
        self._level += 1
        if self._level == len(self._tasks):
            self.end()
            return
        tasks = self._tasks[self._level]
        self._tasks_left = len(tasks)
        for v in tasks:
            self.make_ready(v, now_s)
