"""The public door: a sharded program and a placement in, a callable out."""

import os
from collections.abc import Sequence
from typing import Any

import jax
from numpy.typing import ArrayLike

from doppler_jax.programs.blocks import assemble_output, flatten_args
from doppler_jax.reports.perfetto import write_chrome_trace
from doppler_jax.types import Schedule, ShardedProgram

from . import local
from .job import Job, check_devices, make_job
from .ops import Executables, ResidentBlocks

_BACKENDS = {"local": local.MODES}


def compile(
    sharded: ShardedProgram,
    placement: ArrayLike,
    *,
    devices: Sequence[jax.Device],
    mode: str = "work_conserving",
    backend: str = "local",
    priority: ArrayLike | None = None,
    executables: Executables | None = None,
) -> "PlacedFunction":
    """Returns the program as a function that runs each task where it is placed.

    Args:
      sharded: the program, N tasks.
      placement: `[N]` int, position in `devices` of each task.
      devices: where to run.
      mode: "work_conserving" (a device takes its next ready task) or "stream" (the host
        enqueues everything in one order and waits at the end).
      backend: "local", threads of this process.
      priority: `[N]` order of tasks, smallest first: among the ready ones in
        work_conserving (default: ready time, then id), and of enqueuing among those
        whose producers are enqueued in stream (default: id).
      executables: compiled kernels to share with other placements.

    Raises:
      ValueError: an unknown mode or backend, no devices or one twice, or a placement or
        priority of another shape or out of range. Nothing is compiled then.
    """
    runner = get_runner(backend, mode)
    devices = check_devices(devices)
    executables = Executables() if executables is None else executables
    spent_s = executables.compile_s
    job = make_job(sharded, placement, devices, priority, executables)
    return PlacedFunction(sharded, job, mode, runner, executables.compile_s - spent_s)


def get_runner(backend: str, mode: str) -> local.Runner:
    """Returns what runs a job in this mode.

    Raises:
      ValueError: unknown backend or mode.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; known: {sorted(_BACKENDS)}")
    modes = _BACKENDS[backend]
    if mode not in modes:
        raise ValueError(f"unknown mode {mode!r}; {backend} has: {sorted(modes)}")
    return modes[mode]


class PlacedFunction:
    """A function whose tasks run on several devices; call it like the plain function.

    Attributes:
      names: `[N]` of the tasks.
      mode: how tasks are dispatched.
      compile_s: seconds spent compiling, shared executables not counted.
      trace: `Schedule` of the latest call, in seconds from the dispatch of its first task,
        with transfers; None before. Arguments are cut and laid on the devices that read
        them before that, outputs are assembled after it.
      starts_are_inferred: whether the trace's starts (and, in part, finishes) follow from
        dispatch times and finishes that threads watched. So in `stream`.
    """

    def __init__(
        self,
        sharded: ShardedProgram,
        job: Job,
        mode: str,
        runner: local.Runner,
        compile_s: float,
    ) -> None:
        self.names = sharded.names
        self.mode = mode
        self.compile_s = compile_s
        self.trace: Schedule | None = None
        self._sharded = sharded
        self._job = job
        self._runner = runner

    @property
    def starts_are_inferred(self) -> bool:
        return self.mode == "stream"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program and returns the function's own pytree, on the first device.

        Raises:
          ValueError: the arguments are not what the program was traced with.
          TaskError: a task or a transfer failed.
        """
        sharded, job = self._sharded, self._job
        values = flatten_args(sharded, args, kwargs)
        slots = ResidentBlocks(sharded, values, job.devices).lay(job.plan)
        self.trace = self._runner(job, slots)
        outputs = []
        for output, blocks in zip(sharded.outputs, job.plan.outputs, strict=True):
            arrays = jax.device_put([slots[s] for s in blocks], job.devices[0])
            outputs.append(assemble_output(output, arrays))
        return jax.tree.unflatten(sharded.out_tree, outputs)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the latest call's trace as Chrome trace JSON, which Perfetto opens.

        Raises:
          ValueError: there was no call yet, or the path cannot be written.
        """
        if self.trace is None:
            raise ValueError("there is no trace to save: call the function first")
        write_chrome_trace(
            path,
            self.trace,
            self.names,
            device_names=[str(device) for device in self._job.devices],
            inferred_starts=self.starts_are_inferred,
        )
