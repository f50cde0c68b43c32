"""Device processes as this process knows them, whoever started them.

A launcher is a file beside `ray.py` and does the following; nothing else here asks it.

1. It starts a process for each device, which knows a core or a GPU of its own before JAX is
   imported there, and in it makes a `device.Worker(index, host, secret, settings)`: its number,
   what `this_host()` says there, 32 random bytes that are the same for all, and settings of
   `jax.config` by name, with "jax_enable_x64" True and "jax_cpu_enable_async_dispatch" False.
2. Its `Session` asks them by number: `call`, `wait`, `outcome`, `lost`, `close`. Several calls
   of one worker may be on their way at once. Programs are run by `lines`, past the launcher.
3. It asks every worker to "describe" where peers and where this process may connect, and the
   name and kind of its device, tells all to "connect" to their peers, and sets `lines`.
4. It returns `driver.ProcessDevices` of a `ProcessDevice` each, and gets a row in `LAUNCHERS`
   (`__init__.py`).
"""

import abc
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax import export

from doppler_jax.types import Kernel, ShardedProgram

from ..running import Calls, TaskError
from .line import Line

Dropped = tuple[list[int], list[int]]
"""Numbers of programs, and of blocks, that processes need no more."""

BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Session(abc.ABC):
    """Processes that were started together, and what they share in this process.

    Attributes:
      backend: name of the launcher.
      num_processes: 0 once they are closed.
      lines: to each process.
      calls: what runs there; who uses the lines holds up others.
    """

    backend: str
    lines: list[Line]

    def __init__(self, platform: str) -> None:
        self.num_processes = 0
        self._platform = platform
        self._exports: weakref.WeakKeyDictionary[Kernel, tuple[str, bytes]] = (
            weakref.WeakKeyDictionary()
        )
        self.calls = Calls()
        self.forgotten: deque[tuple[str, int]] = deque()  # ("program" or "block", number)
        self._numbers = itertools.count(1)
        self._blocks: dict[int, dict[Any, int]] = {}  # by id of the array or call

    @property
    @abc.abstractmethod
    def is_open(self) -> bool:
        """Whether the processes may be asked; lost ones may be among them."""

    @abc.abstractmethod
    def call(self, index: int, method: str, *args: Any) -> Any:
        """Calls a method of a process's `Worker`; returns a reference to its answer."""

    @abc.abstractmethod
    def wait(
        self, references: Sequence[Any], timeout_s: float, *, for_all: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Returns the references with an answer and those without, once one (or all) have."""

    @abc.abstractmethod
    def outcome(self, reference: Any, wait_s: float | None = 0.0) -> Any:
        """Returns an answer, the error by which the process was lost, or None if neither.

        Raises:
          Exception: what the process raised.
        """

    @abc.abstractmethod
    def lost(self, index: int) -> BaseException | None:
        """Returns why a process is gone, as far as the launcher knows by now, or None."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all processes."""

    def check_open(self) -> None:
        """Raises `ValueError` if the processes have been ended."""
        if not self.is_open:
            raise ValueError("the devices were closed; start others")

    def new_number(self) -> int:
        """Returns a number that no program, block or call has had."""
        return next(self._numbers)

    def blocks_of(self, value: Any) -> dict[Any, int]:
        """Returns the blocks that lie on devices for an array or a call: numbers by place.

        They are forgotten when it is.
        """
        key = id(value)
        if key not in self._blocks:
            self._blocks[key] = {}
            weakref.finalize(value, self._forget_blocks, key).atexit = False
        return self._blocks[key]

    def _forget_blocks(self, key: int) -> None:
        self.forgotten.extend(("block", number) for number in self._blocks.pop(key).values())

    def export(self, sharded: ShardedProgram) -> tuple[tuple[str, ...], dict[str, bytes]]:
        """Returns the digest of each task's kernel `[N]`, and the kernels by digest.

        Each kernel is serialised once.

        Raises:
          ValueError: a kernel cannot be serialised; names its first task.
        """
        for v, kernel in enumerate(sharded.kernels):
            if kernel not in self._exports:
                try:
                    exported = export.export(jax.jit(kernel.fn), platforms=[self._platform])
                    serialised = bytes(exported(*kernel.operands).serialize())
                except Exception as error:
                    raise ValueError(
                        f"task {v} ({sharded.names[v]}): kernel {kernel.name!r} cannot be sent "
                        "to another process; expected one that jax.export serialises, which "
                        f"none is that calls back into Python, as jax.debug.print does: {error}"
                    ) from error
                self._exports[kernel] = hashlib.sha256(serialised).hexdigest(), serialised
        exports = [self._exports[kernel] for kernel in sharded.kernels]
        return tuple(digest for digest, _ in exports), dict(exports)

    def clear_up(self, callees: Collection[int]) -> Dropped:
        """Lets processes end what Ctrl-C may have left, and drop what is needed no more.

        Those that are called next are to be told with the call: of programs and blocks, by
        number. The caller is starting a call.
        """
        for index, line in enumerate(self.lines):
            if not line.is_connected:
                self.call(index, "stop", self.new_number())
        dropped: dict[str, list[int]] = {"program": [], "block": []}
        while self.forgotten:
            what, number = self.forgotten.popleft()
            dropped[what].append(number)
        others = set(range(len(self.lines))).difference(callees)
        for index in others if any(dropped.values()) else ():
            with contextlib.suppress(OSError):  # a lost one has nothing any more
                self.lines[index].send("forget", dropped["program"], dropped["block"])
        return dropped["program"], dropped["block"]


@dataclasses.dataclass(frozen=True, eq=False)
class ProcessDevice:
    """One device process."""

    name: str  # for people: where it runs
    kind: str  # what JAX calls such a device, and the machine: as fast as others of its kind
    index: int  # among all processes of its session
    host: str  # machine, whose processes share a clock
    session: Session

    def __str__(self) -> str:
        return self.name

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the process's `Worker`; returns a reference to its answer."""
        return self.session.call(self.index, method, *args)

    def send(self, method: str, *args: Any) -> None:
        """Calls it by the line; raises `OSError` if the process is lost."""
        self.session.lines[self.index].send(method, *args)


def ask_all(
    devices: Sequence[ProcessDevice], method: str, arguments: Sequence[tuple]
) -> list[Any]:
    """Returns the answers of every device's `Worker`, asked at once.

    Raises:
      TaskError: a device is lost.
    """
    references = [
        (device.session, device.call(method, *args))
        for device, args in zip(devices, arguments, strict=True)
    ]
    answers = [session.outcome(reference, wait_s=None) for session, reference in references]
    for d, answer in enumerate(answers):
        if isinstance(answer, BaseException):
            raise lost_device(devices, d, answer)
    return answers


def lost_device(devices: Sequence[ProcessDevice], d: int, cause: BaseException) -> TaskError:
    """Returns the error that says that device `d` is lost; it names no task (-1)."""
    return TaskError(f"device {d} ({devices[d]}) was lost", -1, d, cause)


@functools.cache
def this_host() -> str:
    """Returns what tells this machine, as long as it runs, from others."""
    with open(BOOT_ID) as file:
        return file.read().strip()
