"""A placed program made ready to run in this process: its plan and its compiled kernels."""

import dataclasses

import jax

from doppler_jax.simulator.synchronous import hop_levels
from doppler_jax.types import ShardedProgram

from .backend import Options
from .buffers import Footprint
from .donation import donated_operands
from .errors import TaskError
from .ops import CompileError, Executable, ExecutableKey, Executables
from .plan import Plan


@dataclasses.dataclass(frozen=True)
class Job:
    """What an executor runs, as often as wanted."""

    plan: Plan
    names: tuple[str, ...]  # [N]
    devices: tuple[jax.Device, ...]  # [D]
    executables: tuple[Executable, ...]  # [N]
    levels: tuple[int, ...]  # [N] hops from an entry
    footprint: Footprint
    options: Options

    def event_error(self, event: int, cause: BaseException) -> TaskError:
        """Returns the error for an event of a `Record`."""
        num_tasks = len(self.names)
        if event < num_tasks:
            return self.task_error(event, cause)
        return self.transfer_error(event - num_tasks, cause)

    def task_error(self, v: int, cause: BaseException) -> TaskError:
        """Returns the error that says that task `v` failed."""
        device = self.plan.placement[v]
        what = f"task {v} ({self.names[v]}) failed on device {device} ({self.devices[device]})"
        return TaskError(what, v, device, cause)

    def transfer_error(self, k: int, cause: BaseException) -> TaskError:
        """Returns the error that says that transfer `k` of the plan failed."""
        t = self.plan.transfers[k]
        if t.producer < 0:
            moved = f"graph input {~t.tensor}, at home"
        else:
            moved = f"tensor {t.tensor}, made by task {t.producer} ({self.names[t.producer]})"
        what = (
            f"transfer of {moved} on device {t.source}, failed on its way to device "
            f"{t.destination} ({self.devices[t.destination]})"
        )
        return TaskError(what, t.producer, t.destination, cause)


def make_job(
    sharded: ShardedProgram,
    plan: Plan,
    devices: tuple[jax.Device, ...],
    executables: Executables,
    options: Options,
) -> Job:
    """Compiles the kernels that a plan needs.

    Raises:
      TaskError: one does not compile.
    """
    wanted = []
    for v, (kernel, d) in enumerate(zip(sharded.kernels, plan.placement, strict=True)):
        waits = options.mode != "stream" and not run_ahead(devices[d])
        donated = donated_operands(plan, v, kernel) if waits else ()
        wanted.append(ExecutableKey(kernel, devices[d], donated))
    try:
        executables.prepare(wanted)
    except CompileError as error:
        v = wanted.index(error.key)
        what = f"task {v} ({sharded.names[v]}): {error}"
        raise TaskError(what, v, plan.placement[v], error.cause) from error.cause
    return Job(
        plan=plan,
        names=sharded.names,
        devices=devices,
        executables=tuple(executables[key] for key in wanted),
        levels=tuple(hop_levels(sharded.graph).tolist()),
        footprint=Footprint(sharded.graph, plan, len(devices)),
        options=options,
    )


def run_ahead(device: jax.Device) -> int:
    """Returns how many tasks a device may be given beyond the one that it is at.

    None on a CPU device, which has no queue worth keeping full: its workers wait for their
    tasks. Accelerators are given one, so that they need not wait for the host.
    """
    return 0 if device.platform == "cpu" else 1
