"""Threads that live between calls, since to start one takes longer than many a task.

Whoever has jobs takes threads that rest, or starts what is missing; each goes back to rest by
itself. So there are as many as jobs have ever run at once, in this process.
"""

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

AT_REST = "at rest"
"""Name of a thread that has no job."""

_resting: list["_Hand"] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_resting.clear)  # they stay with the parent

Job = tuple[str, Callable[[], None]]
"""What to name the thread meanwhile, and what to run there; it raises nothing."""


class _Hand(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.jobs: SimpleQueue[tuple[Job, Crew]] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            (self.name, work), crew = self.jobs.get()
            try:
                work()
            except BaseException:
                crew.leave()
                raise
            self.name = AT_REST
            _resting.append(self)
            crew.leave()
            del work, crew  # a waiting thread keeps nothing


class Crew:
    """The threads that work at some jobs."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._num_left = len(jobs)
        self._lock = threading.Lock()
        self._working = threading.Lock()  # taken as long as anybody is
        if jobs:
            self._working.acquire()

    def start(self) -> None:
        """Sets a thread to each job."""
        jobs, self._jobs = self._jobs, ()  # no cycle is left of them and who has the crew
        for job in jobs:
            try:
                hand = _resting.pop()
            except IndexError:
                hand = _Hand()
            hand.jobs.put((job, self))

    def leave(self) -> None:
        """Tells that a job is done."""
        with self._lock:
            self._num_left -= 1
            if not self._num_left:
                self._working.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all jobs are done; returns False if time ran out."""
        most_s = -1 if timeout_s is None else timeout_s
        if self._num_left and self._working.acquire(timeout=most_s):
            self._working.release()
        return not self._num_left
