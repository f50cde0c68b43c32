"""Work-conserving dispatch: a device that has a ready task runs one.

A task that finishes releases those on its device that wait only for it, and starts the
transfers of what it made; an arrival releases likewise.
"""

from collections.abc import Iterable

from .blocks import Slots
from .job import Job
from .trace import Record
from .workers import Run


def run_work_conserving(job: Job, slots: Slots) -> Record:
    """Runs a job; leaves the outputs in `slots`, from which all else is dropped after use.

    Returns:
      When each task and transfer ran, as the workers saw it.

    Raises:
      TaskError: a task or transfer failed, or time ran out; the other workers end after
        what they are at.
    """
    return _WorkConserving(job, slots).run()


class _WorkConserving(Run):
    def __init__(self, job: Job, slots: Slots) -> None:
        super().__init__(job, slots)
        self._num_unfinished = len(job.names)
        self._inputs_left = list(job.plan.num_inputs)

    def begin(self) -> None:
        for k in self.plan.initial_transfers:
            self.request(k)
        for v, count in enumerate(self._inputs_left):
            if count == 0:
                self.make_ready(v, 0.0)
        if not self._num_unfinished:
            self.end()

    def launched(self, v: int, now_s: float) -> None:
        self._release(self.plan.local_readers[v], now_s)

    def finished(self, v: int, now_s: float) -> None:
        for k in self.plan.task_transfers[v]:
            self.request(k)
        self._num_unfinished -= 1
        if not self._num_unfinished:
            self.end()

    def arrived(self, k: int, now_s: float) -> None:
        self._release(self.plan.transfers[k].readers, now_s)

    def _release(self, readers: Iterable[int], now_s: float) -> None:
        for v in readers:
            self._inputs_left[v] -= 1
            if not self._inputs_left[v]:
                self.make_ready(v, now_s)
