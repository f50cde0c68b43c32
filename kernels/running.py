"""Calls that have been started: one may run ahead of another, and each ends once.

A call is started by who calls a function and ended by who looks at its outputs, with no thread
between them. There its error is raised, and what it took is given back.
"""

import abc
import contextlib
import dataclasses
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from doppler_jax.programs.outputs import Blocks, Output
from doppler_jax.types import Schedule

from .drift import WINDOW
from .trace import Chores, Record

_WAYS = "host_to_device", "device_to_host", "device_to_device"
_GUARDS = [f"jax_transfer_guard_{way}" for way in _WAYS]


def allow_transfers() -> contextlib.AbstractContextManager[Any]:
    """Lets what was asked for move under any transfer guard; takes nothing where none is."""
    has_guard = any(getattr(jax.config, name) is not None for name in _GUARDS)
    return jax.transfer_guard("allow") if has_guard else contextlib.nullcontext()


class TaskError(RuntimeError):
    """A task or a transfer failed; says which, in which call, and keeps the cause.

    It is the one error by which an execution ends, and that of the calls queued behind it.
    """

    def __init__(self, what: str, task: int, device: int, cause: BaseException) -> None:
        lines = str(cause).strip().splitlines() or [""]
        reason = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        self._words = what, f"{type(cause).__name__}: {reason}"
        super().__init__(": ".join(self._words))
        self.task = task  # that failed, or whose tensor could not be moved; -1 if none
        self.device = device  # position in `devices` of where it should have been
        self.call = 0  # of the function, from 1; 0: it was in none
        self.was_raised = False
        self.__cause__ = cause

    def told(self, call: int) -> "TaskError":
        """Returns itself, of a call."""
        self.call = call
        self.args = (f"{self._words[0]}, in call {call}: {self._words[1]}",)
        return self

    def raised(self) -> "TaskError":
        """Returns itself, to be raised, maybe not for the first time."""
        self.was_raised = True
        return self.with_traceback(None)


@dataclasses.dataclass(frozen=True)
class Execution:
    """One call: what it made, how to tell when what ran, and what allocators tell."""

    outputs: Sequence[jax.Array | None]  # flat; None: it stays in blocks, or is an argument
    make_record: Callable[[], Record]  # tells when what ran, to be asked once
    allocated_bytes: Sequence[int | None]  # [D] most since the process began, where known


class Running(abc.ABC):
    """A call on its devices, as those who run it know it.

    Attributes:
      staying: the blocks of each output that is carried; what they hold may yet change.
      ended_s: when it was seen to end, on this process's clock.
    """

    staying: dict[int, Blocks]
    ended_s = -math.inf

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Returns whether it has ended; waits for nothing."""

    @abc.abstractmethod
    def finish(self) -> Execution:
        """Waits for the end of the call; all before it have ended.

        Raises:
          TaskError: a task or transfer failed, a device was lost or time ran out.
        """

    @abc.abstractmethod
    def abandon(self, error: TaskError) -> None:
        """Ends what one that failed before it leaves no sense."""


@dataclasses.dataclass
class History:
    """The calls of a function, as far as they are of interest later."""

    latest: "Call | None" = None
    ended: "Call | None" = None  # the latest that ended well
    new: "deque[Call]" = dataclasses.field(default_factory=lambda: deque(maxlen=WINDOW))
    """Calls that have ended well, as far as nobody has taken note of them."""


class Call:
    """A call of a placed function, from its start until its outputs can be used.

    Attributes:
      number: of the function's calls, from 1.
      began_s: when the function was called.
      ended_s: when its outputs could be used by who looked at them first.
      execution: what came of it, without outputs; None before.
      error: by which it failed.
    """

    def __init__(
        self, calls: "Calls", history: History, owner: object, began_s: float, chores: Chores
    ) -> None:
        self._calls, self.owner = calls, owner
        self._history: History | None = history
        self.began_s, self.chores = began_s, chores
        self.number: int = 1 + (history.latest.number if history.latest else 0)
        self.ended_s = math.nan
        self.execution: Execution | None = None
        self.error: TaskError | None = None
        self.is_running = True
        self.running: Running | None = None  # on its devices
        self.outputs: Sequence[Any] = ()  # flat; those that it makes are `Output`s
        self.taken: list[Any] = []
        self._finish: Callable[[], Execution] | None = None

    @functools.cached_property
    def record(self) -> Record:
        """When what ran."""
        assert self.execution is not None  # it ended well
        return self.execution.make_record()

    @functools.cached_property
    def seconds(self) -> float:
        """What it took by itself: not behind the one before, nor while nobody looked."""
        began_s = max(self._since_s, self.began_s)
        if not (self._was_ready and self.record.finish_s):
            return self.ended_s - began_s
        ran_s = self.record.origin_s + max(self.record.finish_s)
        return max(0.0, ran_s - began_s) + self.ended_s - self._looked_s

    @property
    def allocated_bytes(self) -> Sequence[int | None]:
        assert self.execution is not None
        return self.execution.allocated_bytes

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Its trace."""
        return self.record.schedule()

    def begun(self, finish: Callable[[], Execution], taken: Sequence[Any]) -> None:
        """Tells how what `running` does is finished, and what it takes."""
        self._finish, self.taken = finish, list(taken)
        assert self._history is not None
        self._history.latest = self
        for array in self.taken:
            if isinstance(array, Output):
                array.lend()

    def finish(self) -> None:
        """Part of `Pending`."""
        if self.is_running:
            self._calls.finish(self)
        self.check()

    def check(self) -> None:
        """Part of `Pending`."""
        if self.error is not None:
            raise self.error.raised()

    def is_ready(self) -> bool:
        """Part of `Pending`."""
        return not self.is_running or self._calls.is_ready(self)

    def has_ended(self) -> bool:
        """Returns whether nothing of it is left to be done by the devices."""
        return self.running is None or self.running.is_ready()

    def abandon(self, error: TaskError) -> None:
        """Ends it on the devices, since its outputs are of no use."""
        if self.running is not None:
            self.running.abandon(error)

    def end(self, since_s: float) -> None:
        """Waits for its end; the one before has ended `since_s`."""
        self._since_s, self._looked_s = since_s, time.perf_counter()
        self._was_ready = self.has_ended()
        assert self._finish is not None
        execution = self._finish()
        self.ended_s = time.perf_counter()
        for made, output in zip(execution.outputs, self.outputs, strict=True):
            if isinstance(output, Output):
                output.made(made)
        for array in self.taken:
            array.delete()
        self.execution = Execution((), execution.make_record, execution.allocated_bytes)
        assert self._history is not None
        self._history.ended = self
        self._history.new.append(self)
        self._forget()

    def fail(self, error: TaskError) -> None:
        """Ends it by an error, and gives back what it has taken."""
        self.error = error
        for array in self.taken:
            if isinstance(array, Output):
                array.give_back()
        self._forget()

    def _forget(self) -> None:
        self.is_running = False
        self.running = self.owner = self._history = self._finish = None
        self.outputs, self.taken = (), []


class Calls:
    """The calls on some devices that have been started and not ended, in their order."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: deque[Call] = deque()
        self._ended_s = -math.inf

    @contextlib.contextmanager
    def starting(self, call: Call) -> Iterator[None]:
        """Keeps others from starting, and ends calls until this may be started.

        It may run ahead of one of its owner's. Afterwards it is one of those that run, if it
        has begun.
        """
        with self._lock:
            while self._running and (
                len(self._running) > 1 or self._running[0].owner is not call.owner
            ):
                self._end_first()
            try:
                yield
            except BaseException as error:
                if call.running is not None:  # Ctrl-C came when it had just begun
                    self._running.append(call)
                    self.abandon(error)
                raise
            self._running.append(call)

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        """Ends all calls, and keeps others from starting."""
        with self._lock:
            while self._running:
                self._end_first()
            yield

    @property
    def latest(self) -> Call | None:
        """What a call that is being started would run behind."""
        return self._running[-1] if self._running else None

    def finish(self, call: Call) -> None:
        """Ends a call and those before it; `call.error` says how."""
        with self._lock:
            while call.is_running:
                self._end_first()

    def is_ready(self, call: Call) -> bool:
        """Returns whether a call has ended; waits for nothing."""
        if not self._lock.acquire(blocking=False):
            return False  # somebody waits
        try:
            while call.is_running and self._running[0].has_ended():
                self._end_first()
            return not call.is_running
        finally:
            self._lock.release()

    def abandon(self, cause: BaseException) -> None:
        """Fails what runs; whoever says so has stopped the devices, or knows them lost."""
        with self._lock:
            error = TaskError("the call was interrupted", -1, -1, cause)
            error.was_raised = True
            for call in self._running:
                call.abandon(error)
            self._fail(error)

    def _end_first(self) -> None:
        try:
            with allow_transfers():
                self._running[0].end(self._ended_s)
        except TaskError as error:
            for behind in list(self._running)[1:]:
                behind.abandon(error)
            self._fail(error)
        except BaseException as error:
            self.abandon(error)
            raise
        else:
            self._ended_s = self._running.popleft().ended_s

    def _fail(self, error: TaskError) -> None:
        """Fails the first call, and by the same error those behind it."""
        ending = list(self._running)
        self._running.clear()
        for call in ending:
            call.fail(error if error.call else error.told(call.number))
