"""The local backend: threads of this process over JAX devices, one runner per mode."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from doppler_jax.programs.blocks import assemble_output
from doppler_jax.types import ShardedProgram

from .backend import Execution, Options
from .blocks import Residents, Slots
from .bulk_synchronous import run_bulk_synchronous
from .checks import check_devices
from .job import Job, make_job
from .ops import Executables
from .plan import Plan
from .stream import run_stream
from .trace import Record
from .work_conserving import run_work_conserving

Runner = Callable[[Job, Slots], Record]

MODES: dict[str, Runner] = {
    "bulk_synchronous": run_bulk_synchronous,
    "stream": run_stream,
    "work_conserving": run_work_conserving,
}


class LocalBackend:
    """JAX devices of this process."""

    modes = tuple(sorted(MODES))

    def __init__(
        self, devices: Sequence[jax.Device], executables: Executables | None = None
    ) -> None:
        self._devices = check_devices(devices)
        self._executables = Executables() if executables is None else executables
        self._residents: weakref.WeakKeyDictionary[ShardedProgram, Residents] = (
            weakref.WeakKeyDictionary()
        )
        self.device_names = tuple(map(str, self._devices))
        self.device_kinds = tuple(device.device_kind for device in self._devices)

    def load(self, sharded: ShardedProgram, plan: Plan, options: Options) -> "LocalProgram":
        """Returns the program ready to run; placements of one share its resident blocks.

        Raises:
          TaskError: a kernel does not compile.
        """
        spent_s = self._executables.compile_s
        job = make_job(sharded, plan, self._devices, self._executables, options)
        if sharded not in self._residents:
            self._residents[sharded] = Residents(sharded, self._devices)
        compile_s = self._executables.compile_s - spent_s
        return LocalProgram(sharded, job, self._residents[sharded], compile_s)


class LocalProgram:
    """A placed program on devices of this process."""

    def __init__(
        self, sharded: ShardedProgram, job: Job, residents: Residents, compile_s: float
    ) -> None:
        self.compile_s = compile_s
        self._sharded = sharded
        self._job = job
        self._residents = residents

    def lay(self, values: Sequence[Any]) -> Slots:
        """Returns the slots of a call, with the blocks of its arguments there."""
        return self._residents.lay(self._job.plan, values)

    def run(self, laid: Slots) -> Execution:
        """Returns one execution; `laid` stays as it is.

        Raises:
          TaskError: a task or transfer failed, or time ran out.
        """
        job, slots = self._job, list(laid)
        record = MODES[job.options.mode](job, slots)
        outputs = [
            assemble_output(output, self._gather([slots[s] for s in blocks]))
            for output, blocks in zip(self._sharded.outputs, job.plan.outputs, strict=True)
        ]
        return Execution(outputs, record.schedule(), record.handling, self._peak_bytes(record))

    def _gather(self, blocks: list[Any]) -> list[jax.Array]:
        """Returns an output's blocks on the device where it shall land."""
        out_device = self._job.options.out_device
        if out_device is None:
            (where,) = blocks[0].devices()
        else:
            where = self._job.devices[out_device]
        return jax.device_put(blocks, where)

    def _peak_bytes(self, record: Record) -> np.ndarray:
        """Returns `[D]` by our own count, or by the allocator's where a device has one.

        The allocator's is the most since the process began, whatever held it.
        """
        peak = self._job.footprint.peak_bytes(record)
        for d, device in enumerate(self._job.devices):
            peak[d] = (device.memory_stats() or {}).get("peak_bytes_in_use", peak[d])
        return peak
