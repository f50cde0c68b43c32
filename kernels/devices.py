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
from doppler_jax.programs.outputs import Blocks, Output
from doppler_jax.types import ShardedProgram

from .agenda import Agenda
from .ops import wait_for
from .running import Call, Calls, Execution, Running, TaskError
from .trace import Chores, Record


@dataclasses.dataclass(frozen=True)
class Options:
    """How the calls of a placed program run."""

    mode: str | None = None  # None: by the plan's queue
    check_nan: bool = False  # whether a NaN among a task's results ends the call
    timeout_s: float | None = None  # of one call
    out_device: int | None = None  # where outputs land; None: where their first block is


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
    calls: Calls  # on them
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

    @functools.cached_property
    def output_avals(self) -> tuple[jax.core.ShapedArray, ...]:
        """What the outputs are."""
        return tuple(
            jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=bool(aval.weak_type))
            for aval in (output.aval for output in self.sharded.outputs)
        )

    def outputs(self, call: Call) -> list[Any]:
        """Returns the flat outputs that a call makes; None: an argument unchanged."""
        staying = call.running.staying if call.running else {}
        outputs: list[Any] = [None] * len(self.output_avals)
        for o, aval in enumerate(self.output_avals):
            if not self.agenda.outputs[o]:
                continue
            if aval.dtype == jax.dtypes.float0:  # without content, and never on a device
                outputs[o] = np.zeros(aval.shape, aval.dtype)
            else:
                assemble = functools.partial(self.assemble, o)
                outputs[o] = Output(aval, call, assemble, staying.get(o))
        return outputs

    def execution(
        self,
        make_record: Callable[[], Record],
        blocks_of: Callable[[tuple[int, ...]], list[jax.Array]],
        allocated_bytes: Sequence[int | None],
        chores: Chores,
    ) -> Execution:
        """Returns what a call gives back.

        Args:
          make_record: see `Execution`.
          blocks_of: gathers an output's blocks by slot.
          allocated_bytes: see `Execution`.
          chores: of the call, which are added to.
        """
        with chores.doing("assemble outputs"):
            outputs: list[Any] = [
                join_output(self.sharded.outputs[o], blocks_of(blocks))
                if blocks and o not in self.carried
                else None
                for o, blocks in enumerate(self.agenda.outputs)
            ]
            for output in outputs:
                if output is not None:
                    wait_for(output)
        return Execution(outputs, make_record, allocated_bytes)

    @abc.abstractmethod
    def lay(self, values: Sequence[Any]) -> Any:
        """Returns the flat arguments (`flatten_args`) laid on the devices that read them.

        Resident ones stay there, and are found again if the next call brings the same array.
        What is carried from a call that still runs may be laid as it ends.

        Raises:
          ValueError: the devices are closed.
          TaskError: a device is lost, or an argument's call failed.
        """

    @abc.abstractmethod
    def start(self, laid: Any, chores: Chores, before: Running | None) -> Running:
        """Starts a call, and adds to its chores.

        Args:
          laid: what `lay` gave.
          chores: of the call.
          before: the call of this program that still runs; each device begins when it has
            ended its part of that.
        """

    @abc.abstractmethod
    def assemble(self, o: int, blocks: Blocks) -> jax.Array:
        """Returns an output that stayed in blocks, put together.

        Raises:
          ValueError: the devices are closed.
          TaskError: a device is lost.
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
      calls: what runs there.
    """

    backend: str
    modes: tuple[str, ...]
    device_names: tuple[str, ...]
    device_kinds: tuple[str, ...]
    capacity_bytes: np.ndarray
    calls: Calls

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
