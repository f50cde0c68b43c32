"""One call as the driver sees it: start every device, wait, and make one error of a failure."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

from .errors import TaskError
from .plan import Plan
from .ray_processes import RayDevice
from .ray_shipping import DeviceResult, Failure

_ANSWER_S = 5.0  # for a live process to take note of the end of a call
_POLL_S = 0.05  # between looks for Ctrl-C, for which Ray itself looks once a second
_END_S = 10.0  # for a stopped device to end what it is at


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a placed program."""

    number: int
    names: tuple[str, ...]  # [N]
    plan: Plan
    devices: tuple[RayDevice, ...]  # [D]

    def run(self, arguments: Sequence[tuple], timeout_s: float | None) -> list[DeviceResult]:
        """Runs the call with each device's arguments of `Worker.run`; returns its results.

        Raises:
          TaskError: a task or transfer failed, a device was lost, or time ran out. The
            devices have stopped then, save those that need over 10 s to end a task.
        """
        references: list[Any] = []
        try:
            for device, args in zip(self.devices, arguments, strict=True):
                references.append(device.call("run", *args))
            in_time = self._wait(references, timeout_s)
        except BaseException:
            self._stop(references)
            raise
        if in_time:
            outcomes = [_outcome(reference) for reference in references]
            if all(isinstance(o, DeviceResult) and o.failure is None for o in outcomes):
                return outcomes
        running = self._stop(references)
        outcomes = [_outcome(reference) for reference in references]
        raise self._error(outcomes) if in_time else self._timeout(running, outcomes, timeout_s)

    def _wait(self, references: list[Any], timeout_s: float | None) -> bool:
        """Waits for all devices or the first failure; returns False if time ran out."""
        import ray

        deadline_s = math.inf if timeout_s is None else time.perf_counter() + timeout_s
        pending = references
        while pending:
            left_s = deadline_s - time.perf_counter()
            if left_s <= 0:
                return False
            done, pending = ray.wait(pending, timeout=min(left_s, _POLL_S))
            for outcome in map(_outcome, done):
                if not isinstance(outcome, DeviceResult) or outcome.failure is not None:
                    return True
        return True

    def _stop(self, references: list[Any]) -> list[int | None]:
        """Ends the call on every device; returns the task `[D]` that each was running."""
        import ray

        told = [device.call("stop", self.number) for device in self.devices]
        ray.wait(told, num_returns=len(told), timeout=_ANSWER_S)
        ray.wait(references, num_returns=len(references), timeout=_END_S)
        answers = [_outcome(reference) for reference in told]
        return [answer if isinstance(answer, int) else None for answer in answers]

    def _timeout(
        self, running: list[int | None], outcomes: list[Any], timeout_s: float | None
    ) -> TaskError:
        """Names a task that was running, or else the first that has yet to run."""
        cause = TimeoutError(f"the call has taken more than {timeout_s} s")
        ended = {v for o in outcomes if isinstance(o, DeviceResult) for v, _, _ in o.tasks}
        at = [v for v in running if v is not None]
        for v in (*at, *(v for v in self.plan.order if v not in ended)):
            return self._task_error(v, cause)
        return TaskError("the call did not end", -1, -1, cause)

    def _error(self, outcomes: list[Any]) -> TaskError:
        """Returns the error of what went wrong first; a lost device takes others with it."""
        for d, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                return lost_device(self.devices, d, outcome)
        failures = [o.failure for o in outcomes if o is not None and o.failure is not None]
        order = {"lost": 0, "task": 1, "transfer": 2}
        first = min(failures, key=lambda failure: (order[failure.kind], failure.at_s))
        return self._failure_error(first)

    def _failure_error(self, failure: Failure) -> TaskError:
        cause = RuntimeError(failure.reason)
        if failure.kind == "lost":
            return lost_device(self.devices, failure.id, cause)
        if failure.kind == "task":
            return self._task_error(failure.id, cause)
        t = self.plan.transfers[failure.id]
        moved = f"tensor {t.tensor}" if t.producer >= 0 else f"graph input {~t.tensor}"
        d = t.destination
        what = (
            f"transfer of {moved} from device {t.source} to {d} ({self.devices[d].name}) failed"
        )
        return TaskError(what, t.producer, d, cause)

    def _task_error(self, v: int, cause: BaseException) -> TaskError:
        d = self.plan.placement[v]
        what = f"task {v} ({self.names[v]}) failed on device {d} ({self.devices[d].name})"
        return TaskError(what, v, d, cause)


def ask_all(devices: Sequence[RayDevice], method: str, arguments: Sequence[tuple]) -> list[Any]:
    """Returns the answers of every device's `Worker`, asked at once.

    Raises:
      TaskError: a device is lost.
    """
    references = [
        device.call(method, *args) for device, args in zip(devices, arguments, strict=True)
    ]
    answers = [_outcome(reference, wait_s=None) for reference in references]
    for d, answer in enumerate(answers):
        if isinstance(answer, BaseException):
            raise lost_device(devices, d, answer)
    return answers


def lost_device(devices: Sequence[RayDevice], d: int, cause: BaseException) -> TaskError:
    """Returns the error that says that device `d` is lost; it names no task (-1)."""
    return TaskError(f"device {d} ({devices[d].name}) was lost", -1, d, cause)


def _outcome(reference: Any, wait_s: float | None = 0.0) -> Any:
    """Returns what a process answered, the error by which it was lost, or None if neither.

    Raises:
      Exception: what the process raised.
    """
    import ray

    try:
        return ray.get(reference, timeout=wait_s)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as error:
        return error
