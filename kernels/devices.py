"""What every function of the engine takes as `devices`, and what a call gives back.

There are two kinds: `LocalDevices`, threads of this process over JAX devices, and
`ProcessDevices`, a process per device. Either keeps what was compiled for it, so one object
given to calibration, measurements and the program compiles each kernel once a device.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from doppler_jax.programs.blocks import join_output, output_bounds
from doppler_jax.programs.carried import Carried
from doppler_jax.types import ShardedProgram

from .agenda import Agenda
from .trace import Chores, Record


class TaskError(RuntimeError):
    """A task or a transfer failed; says which, and keeps the cause as `__cause__`.

    It is the one error by which an execution ends.
    """

    def __init__(self, what: str, task: int, device: int, cause: BaseException) -> None:
        lines = str(cause).strip().splitlines() or [""]
        reason = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        super().__init__(f"{what}: {type(cause).__name__}: {reason}")
        self.task = task  # that failed, or whose tensor could not be moved; -1 if none
        self.device = device  # position in `devices` of where it should have been
        self.__cause__ = cause


@dataclasses.dataclass(frozen=True)
class Options:
    """How the calls of a placed program run."""

    mode: str | None = None  # None: by the plan's queue
    check_nan: bool = False  # whether a NaN among a task's results ends the call
    timeout_s: float | None = None  # of one call
    out_device: int | None = None  # where outputs land; None: where their first block is


@dataclasses.dataclass(frozen=True)
class Execution:
    """One call: what it returned, when what ran, and what allocators tell of memory."""

    outputs: list[Any]  # flat, assembled from their blocks but for those that are carried
    record: Record  # when what ran
    allocated_bytes: Sequence[int | None]  # [D] most since the process began, where known


class Staying(NamedTuple):
    """A block of an output that stays where it was made."""

    bounds: tuple[tuple[int, ...], tuple[int, ...]]  # start and limit
    device: int
    slot: int


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedProgram(abc.ABC):
    """A placed program on its devices."""

    sharded: ShardedProgram
    agenda: Agenda
    options: Options
    devices: tuple[Any, ...]  # [D]
    compile_s: float  # spent on it, kernels compiled before not counted

    @property
    def infers_starts(self) -> bool:
        """Whether a record's starts follow from dispatch times and finishes."""
        return False

    @functools.cached_property
    def carried(self) -> dict[int, tuple[Staying, ...]]:
        """The blocks of each output that is carried."""
        places, makers = self.agenda.placement, self.sharded.graph.tensor_producer.tolist()
        outputs, slots = self.sharded.outputs, self.agenda.outputs
        return {
            o: tuple(
                Staying(bounds, places[makers[slot]], slot)
                for bounds, slot in zip(output_bounds(outputs[o]), slots[o], strict=True)
            )
            for o in sorted(self.agenda.carried)
        }

    def execution(
        self,
        record: Record,
        blocks_of: Callable[[tuple[int, ...]], list[jax.Array]],
        stay: Callable[[int], Carried],
        allocated_bytes: Sequence[int | None],
        chores: Chores,
    ) -> Execution:
        """Returns what a call gives back.

        Args:
          record: when what ran.
          blocks_of: gathers an output's blocks by slot.
          stay: returns an output that is carried, by its number.
          allocated_bytes: see `Execution`.
          chores: of the call, which are added to.
        """
        with chores.doing("assemble outputs"):
            outputs: list[Any] = []
            for o, blocks in enumerate(self.agenda.outputs):
                if o in self.carried:
                    outputs.append(stay(o))
                else:  # what has no blocks is an argument unchanged
                    output = self.sharded.outputs[o]
                    outputs.append(join_output(output, blocks_of(blocks)) if blocks else None)
            jax.block_until_ready(outputs)
        return Execution(outputs, record, allocated_bytes)

    @abc.abstractmethod
    def lay(self, values: Sequence[Any]) -> Any:
        """Returns the flat arguments (`flatten_args`) laid on the devices that read them.

        Resident ones stay there, and are found again if the next call brings the same array.

        Raises:
          ValueError: the devices are closed.
          TaskError: a device is lost.
        """

    @abc.abstractmethod
    def run(self, laid: Any, chores: Chores) -> Execution:
        """Returns one execution, and adds to the chores; what `lay` gave may be run again.

        Raises:
          TaskError: a task or transfer failed, a device was lost or time ran out.
        """


class Devices(Sequence[Any]):
    """Devices in order, what was compiled for them, and the arguments that stay on them.

    Raises:
      ValueError: `devices` is empty, or one occurs twice.

    Attributes:
      backend: what runs programs there: "local" (threads of this process) or a launcher's name.
      modes: names of the ways of dispatch that it knows.
      device_names: `[D]`, for people to read.
      device_kinds: `[D]`; devices of one kind are equally fast, but for what else runs on them.
      capacity_bytes: `[D]` memory of each, inf where it is not known.
    """

    backend: str
    modes: tuple[str, ...]
    device_names: tuple[str, ...]
    device_kinds: tuple[str, ...]
    capacity_bytes: np.ndarray

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = tuple(devices)
        if not self._devices:
            raise ValueError("devices is empty; expected one device or more")
        for i, device in enumerate(self._devices):
            if device in self._devices[:i]:
                raise ValueError(f"devices[{i}] is {device}, which occurs before")

    def __len__(self) -> int:
        return len(self._devices)

    @abc.abstractmethod
    def __getitem__(self, i: Any) -> Any:
        """Returns a device, or for a slice such devices, which share what was compiled."""

    @abc.abstractmethod
    def load(self, sharded: ShardedProgram, agenda: Agenda, options: Options) -> LoadedProgram:
        """Returns the program ready to run, its kernels compiled; options are checked.

        Raises:
          ValueError: these devices cannot run the program.
          TaskError: a kernel does not compile.
        """

    def check_open(self) -> None:
        """Raises `ValueError` if the devices were closed."""

    def check_options(self, options: Options) -> None:
        """Raises `ValueError` for a mode, timeout or output device that there is not."""
        if options.mode not in (None, *self.modes):
            raise ValueError(
                f"unknown mode {options.mode!r}; {self.backend} devices have: "
                f"{sorted(self.modes)}"
            )
        timeout_s = options.timeout_s
        if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s is {timeout_s}; expected a number above 0, or None")
        if options.out_device is not None and not 0 <= options.out_device < len(self):
            raise ValueError(
                f"out_device is {options.out_device}, but there are {len(self)} devices"
            )


def event_error(
    agenda: Agenda, devices: Sequence[Any], event: int, cause: BaseException
) -> TaskError:
    """Returns the error of task `event`, or of transfer `event - N`.

    Args:
      agenda: what was to be done.
      devices: `[D]` as people know them.
      event: as in a `Record`.
      cause: what went wrong.
    """
    names, num_tasks = agenda.names, len(agenda.names)
    if event < num_tasks:
        d = agenda.placement[event]
        what = f"task {event} ({names[event]}) failed on device {d} ({devices[d]})"
        return TaskError(what, event, d, cause)
    t = agenda.transfers[event - num_tasks]
    if t.producer < 0:
        moved = f"graph input {~t.tensor}, at home"
    else:
        moved = f"tensor {t.tensor}, made by task {t.producer} ({names[t.producer]})"
    what = (
        f"transfer of {moved} on device {t.source}, failed on its way to device "
        f"{t.destination} ({devices[t.destination]})"
    )
    return TaskError(what, t.producer, t.destination, cause)
