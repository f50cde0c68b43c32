"""The public door: a sharded program and a placement in, a callable out."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.programs.blocks import flatten_args
from doppler_jax.reports.perfetto import write_chrome_trace
from doppler_jax.simulator.disciplines import check_ranks
from doppler_jax.simulator.durations import check_placement
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.types import InputRef, Schedule, ShardedProgram, TaskGraph

from .devices import Devices, LoadedProgram, Options
from .local import LocalDevices
from .plan import make_plan
from .processes.driver import ProcessDevices
from .processes.session import ProcessDevice
from .profile import Profile, measured_costs, profile
from .segments import fuse_segments as fuse
from .trace import Handled


def compile(
    sharded: ShardedProgram,
    placement: ArrayLike,
    *,
    devices: Sequence[Any],
    mode: str = "work_conserving",
    priority: ArrayLike | None = None,
    fuse_segments: bool = False,
    check_nan: bool = False,
    timeout_s: float | None = None,
    out_device: int | None = None,
) -> "PlacedFunction":
    """Returns the program as a function that runs each task where it is placed.

    Args:
      sharded: the program, N tasks.
      placement: `[N]` int, position in `devices` of each task.
      devices: where to run: JAX devices, on which threads of this process run tasks, or
        `dj.ray_devices(...)`, a process per device. `dj.LocalDevices(...)` in place of a list
        keeps compiled kernels for other placements; processes always do.
      mode: "work_conserving" (a device takes its next ready task), "bulk_synchronous"
        (level by level, with barriers before and after each level's transfers) or, on JAX
        devices only, "stream" (the host enqueues everything in one order and waits at the end).
      priority: `[N]` order of tasks, smallest first: among the ready ones (default: ready
        time, then id), and in stream of enqueuing among those whose producers are
        enqueued (default: id).
      fuse_segments: whether tasks of one device that nothing separates become one task;
        the trace is then of the tasks of `PlacedFunction.graph`.
      check_nan: whether a NaN in what a task made ends the call with a `TaskError`.
      timeout_s: after which a call ends with a `TaskError`.
      out_device: position in `devices` where outputs land; by default each lands where its
        first block was made.

    Raises:
      ValueError: an unknown mode, no devices, one twice or closed ones, an option out of
        range, or a placement or priority of another shape or out of range. Nothing is
        compiled then.
      TaskError: a kernel does not compile.
    """
    options = Options(mode, check_nan, timeout_s, out_device)
    return load(
        sharded, placement, priority, as_devices(devices), options, fuse_segments=fuse_segments
    )


def as_devices(devices: Sequence[Any]) -> Devices:
    """Returns what runs programs on the devices given, which say themselves what they are.

    Raises:
      ValueError: `devices` is empty, one occurs twice, they are of different sorts or closed.
    """
    if not isinstance(devices, Devices):
        are_processes = any(isinstance(device, ProcessDevice) for device in devices)
        devices = ProcessDevices(devices) if are_processes else LocalDevices(devices)
    devices.check_open()
    return devices


def load(
    sharded: ShardedProgram,
    placement: ArrayLike,
    priority: ArrayLike | None,
    devices: Devices,
    options: Options,
    *,
    fuse_segments: bool = False,
) -> "PlacedFunction":
    """Returns the placed program on devices, which many placements may share.

    Raises:
      ValueError: a placement or priority of another shape or out of range, or an option.
      TaskError: a kernel does not compile.
    """
    devices.check_options(options)
    places = check_placement(sharded.graph, len(devices), placement)
    queue = "fifo" if priority is None else "priority"
    ranks = check_ranks(sharded.graph, queue, priority)
    if fuse_segments:
        sharded, places, ranks = fuse(sharded, places, ranks)
    loaded = devices.load(sharded, make_plan(sharded, places, ranks), options)
    return PlacedFunction(loaded, devices.device_names)


class PlacedFunction:
    """A function whose tasks run on several devices; call it like the plain function.

    Attributes:
      graph: the tasks that run, N of them; not the program's if segments were fused.
      names: `[N]` of the tasks.
      device_names: `[D]` of the devices.
      mode: how tasks are dispatched.
      compile_s: seconds spent compiling, shared executables not counted.
      trace: `Schedule` of the latest call, in seconds from the dispatch of its first task
        or input transfer, with transfers; None before. Arguments are laid on the devices
        that read them before that, outputs are assembled after it.
      handling: device, start and finish of each time that a device itself moved tensors
        between two tasks in the latest call, on the trace's clock: on CPU processes of one
        machine, else never; None before.
      starts_are_inferred: whether the trace's starts (and, in part, finishes) follow from
        dispatch times and finishes that the host saw. So in `stream`.
    """

    def __init__(self, loaded: LoadedProgram, device_names: tuple[str, ...]) -> None:
        self.graph: TaskGraph = loaded.sharded.graph
        self.names = loaded.sharded.names
        self.device_names = device_names
        self.mode = loaded.options.mode
        self.starts_are_inferred = self.mode == "stream"
        self.compile_s = loaded.compile_s
        self.trace: Schedule | None = None
        self.handling: Handled | None = None
        self._loaded = loaded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program and returns the function's own pytree.

        Raises:
          ValueError: the arguments are not what the program was traced with.
          TaskError: a task or a transfer failed, a device was lost or time ran out.
        """
        sharded = self._loaded.sharded
        values = flatten_args(sharded, args, kwargs)
        execution = self._loaded.run(self._loaded.lay(values))
        self.trace, self.handling = execution.trace, execution.handling
        self._allocated_bytes = execution.allocated_bytes
        return jax.tree.unflatten(sharded.out_tree, execution.outputs)

    def run_traced(self, *args: Any, **kwargs: Any) -> Schedule:
        """Runs the program and returns the trace of that call; raises what a call raises."""
        self(*args, **kwargs)
        return self._called()[0]

    @property
    def peak_bytes(self) -> np.ndarray:
        """`[D]` most memory that the latest call held at once, arguments included.

        An allocator that tells is believed: the most since the process began, whatever took it.

        Raises:
          ValueError: there was no call yet.
        """
        trace, _ = self._called()
        outputs = [ref for output in self._loaded.sharded.outputs for ref in output.blocks]
        results = {~ref.input if isinstance(ref, InputRef) else ref.tensor for ref in outputs}
        costs = measured_costs(self.graph, trace, len(self.device_names))
        counted = peak_memory_bytes(self.graph, costs, trace, results)
        told = zip(self._allocated_bytes, counted, strict=True)
        return np.array([own if most is None else most for most, own in told], np.float64)

    def profile(self) -> Profile:
        """Returns what the time of the latest call went on, to print.

        Raises:
          ValueError: there was no call yet.
        """
        trace, handling = self._called()
        return profile(
            self.graph, trace, self.names, self.device_names, self.peak_bytes, handling
        )

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the latest call's trace as Chrome trace JSON, which Perfetto opens.

        Raises:
          ValueError: there was no call yet, or the path cannot be written.
        """
        trace, handling = self._called()
        write_chrome_trace(
            path,
            trace,
            self.names,
            device_names=self.device_names,
            inferred_starts=self.starts_are_inferred,
            handling=handling,
        )

    def _called(self) -> tuple[Schedule, Handled]:
        if self.trace is None or self.handling is None:
            raise ValueError("there is no trace: call the function first")
        return self.trace, self.handling
