"""The Ray backend: placed programs on device processes, each of which works on its own.

`load` ships the whole plan to every process once. A call then takes one message to each
and one back: in between, a process runs its own ready tasks in order and sends what others
read straight to them, and the driver only waits.
"""

import dataclasses
import time
import weakref
from collections.abc import Sequence
from typing import Any

from doppler_jax.programs.blocks import assemble_output, slice_block
from doppler_jax.simulator.synchronous import hop_levels
from doppler_jax.types import RESIDENT, ShardedProgram

from .backend import Execution, Options
from .buffers import Footprint
from .checks import check_devices
from .errors import TaskError
from .plan import Plan
from .ray_call import Call, ask_all
from .ray_clocks import clock_offsets_s, make_record
from .ray_processes import RayDevice
from .ray_shipping import Shipment, slot_avals, to_device, to_host

MODES = ("bulk_synchronous", "work_conserving")
_LEAD_S = 3e-3  # until the agreed start, in which the call reaches every process
_LEAD_PER_TASK_S = 2e-6  # and is made ready there


class RayBackend:
    """Device processes that `dj.ray_devices` started.

    Raises:
      ValueError: there is none, one occurs twice, or they are of several sessions.
    """

    modes = MODES

    def __init__(self, devices: Sequence[RayDevice]) -> None:
        devices = tuple(devices)
        for i, device in enumerate(devices):
            if not isinstance(device, RayDevice):
                raise ValueError(
                    f"devices[{i}] is {device!r}; backend 'ray' expects dj.ray_devices"
                )
        self._devices = check_devices(devices)
        if len({device.session for device in devices}) > 1:
            raise ValueError("devices are of several calls of ray_devices; expected one")
        self.device_names = tuple(device.name for device in devices)
        self.device_kinds = tuple(device.kind for device in devices)

    def load(self, sharded: ShardedProgram, plan: Plan, options: Options) -> "RayProgram":
        """Returns the program ready to run, its kernels compiled where they are needed.

        Raises:
          ValueError: a kernel cannot be serialised, or `out_device` is given, since outputs
            come to this process.
          TaskError: a kernel does not compile, or a device is lost.
        """
        if options.out_device is not None:
            raise ValueError(
                f"out_device is {options.out_device}, but backend 'ray' returns its outputs to "
                "this process; expected None"
            )
        started = time.perf_counter()
        digests = _compile(sharded, plan, self._devices)
        compile_s = time.perf_counter() - started
        avals = slot_avals(sharded, plan)
        levels = hop_levels(sharded.graph).tolist()
        shipment = Shipment(
            plan=plan,
            peers=tuple(device.index for device in self._devices),
            digests=digests,
            avals=avals,
            levels=tuple(levels) if options.mode == "bulk_synchronous" else None,
            check_nan=options.check_nan,
        )
        return RayProgram(sharded, shipment, options.timeout_s, self._devices, compile_s)


@dataclasses.dataclass(frozen=True)
class Laid:
    """A call's arguments on their devices."""

    blocks: tuple[dict[int, int], ...]  # [D] number of the block in each slot
    values: tuple[Any, ...]  # kept, so that their blocks are


class RayProgram:
    """A placed program on device processes."""

    def __init__(
        self,
        sharded: ShardedProgram,
        shipment: Shipment,
        timeout_s: float | None,
        devices: tuple[RayDevice, ...],
        compile_s: float,
    ) -> None:
        self.compile_s = compile_s
        self._sharded = sharded
        self._shipment = shipment
        self._timeout_s = timeout_s
        self._devices = devices
        self._footprint = Footprint(sharded.graph, shipment.plan, len(devices))
        self._session = session = devices[0].session
        self._number = session.new_number()
        session.tell_forgotten()
        weakref.finalize(self, session.forgotten.append, ("program", self._number))
        ask_all(devices, "load", [(self._number, shipment, d) for d in range(len(devices))])

    def lay(self, values: Sequence[Any]) -> Laid:
        """Returns the flat arguments on the devices that hold them.

        Raises:
          TaskError: a device is lost.
        """
        self._session.tell_forgotten()
        plan, homes = self._shipment.plan, self._sharded.graph.input_home
        laid: list[dict[int, int]] = [{} for _ in self._devices]
        new: list[dict[int, Any]] = [{} for _ in self._devices]
        kept = []  # to be noted once they are there
        for i, d, slot in plan.inputs:
            block = self._sharded.inputs[i]
            value = values[block.source]
            blocks = self._session.blocks_of(value) if homes[i] == RESIDENT else {}
            place = (block.start, block.limit, self._devices[d].index)
            if (number := blocks.get(place)) is None:
                number = self._session.new_number()
                new[d][number] = to_host(slice_block(value, block)), self._shipment.avals[slot]
                kept.append((blocks, place, number))
            laid[d][slot] = number
        if kept:
            try:
                ask_all(self._devices, "keep", [(blocks,) for blocks in new])
            except BaseException:  # some may be there, and nothing will ask for them
                numbers = (number for blocks in new for number in blocks)
                self._session.forgotten.extend(("block", number) for number in numbers)
                raise
        for blocks, place, number in kept:
            blocks[place] = number
        result = Laid(tuple(laid), tuple(values))
        for i, d, slot in plan.inputs:
            if homes[i] != RESIDENT:
                forget = ("block", laid[d][slot])
                weakref.finalize(result, self._session.forgotten.append, forget)
        return result

    def run(self, laid: Laid) -> Execution:
        """Returns one execution; the outputs come to this process.

        Raises:
          TaskError: a task or transfer failed, a device was lost, or time ran out.
        """
        plan, devices = self._shipment.plan, self._devices
        with self._session.one_call:
            offsets_s = clock_offsets_s(devices)
            call = Call(self._session.new_number(), self._sharded.names, plan, devices)
            lead_s = _LEAD_S + _LEAD_PER_TASK_S * len(plan.placement)
            start_s = time.perf_counter() + lead_s
            arguments = [
                (self._number, call.number, blocks, start_s + offset_s)
                for blocks, offset_s in zip(laid.blocks, offsets_s, strict=True)
            ]
            results = call.run(arguments, self._timeout_s)
        slots = {slot: host for result in results for slot, host in result.outputs.items()}
        avals = self._shipment.avals
        outputs = [
            assemble_output(output, [to_device(slots[s].copy(), avals[s]) for s in blocks])
            for output, blocks in zip(self._sharded.outputs, plan.outputs, strict=True)
        ]
        record = make_record(plan, results, offsets_s)
        peak_bytes = self._footprint.peak_bytes(record)
        for d, result in enumerate(results):
            if result.peak_bytes is not None:
                peak_bytes[d] = result.peak_bytes
        return Execution(outputs, record.schedule(), record.handling, peak_bytes)


def _compile(
    sharded: ShardedProgram, plan: Plan, devices: tuple[RayDevice, ...]
) -> tuple[str, ...]:
    """Compiles each kernel where it is needed and not there yet; returns the digests `[N]`."""
    digests, kernels = devices[0].session.exports.of(sharded)
    needed: list[set[str]] = [set() for _ in devices]
    for digest, d in zip(digests, plan.placement, strict=True):
        needed[d].add(digest)
    missing = ask_all(devices, "missing_kernels", [(digests,) for digests in needed])
    wanted = [({digest: kernels[digest] for digest in sorted(some)},) for some in missing]
    for d, failure in enumerate(ask_all(devices, "compile", wanted)):
        if failure is not None:
            digest, reason = failure
            v = digests.index(digest)
            what = f"task {v} ({sharded.names[v]}) does not compile on device {d}"
            raise TaskError(f"{what} ({devices[d].name})", v, d, RuntimeError(reason))
    return digests
