"""Where arrays are: arguments on devices, and a call's arrays by slot."""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from doppler_jax.programs.blocks import num_bytes, slice_block
from doppler_jax.programs.outputs import Output
from doppler_jax.types import InputBlock, Kernel, ShardedProgram

from .agenda import Agenda
from .ops import wait_for

Slots = list[Any]
"""The arrays of one call, by slot of its agenda; None before they are made and after use."""


@dataclasses.dataclass(frozen=True, eq=False)
class Later:
    """A block that a call leaves in a slot, and that the call behind it reads."""

    slots: Slots
    slot: int
    device: jax.Device

    def get(self) -> jax.Array:
        """Returns it, once it has been made."""
        return self.slots[self.slot]


MIN_BYTES = 1 << 20
"""Smaller operands are kept: giving them away saves nothing, and costs an executable."""


class Residents:
    """The latest blocks of a program's resident arguments, kept on their devices.

    They are found again as long as the caller brings the same arrays, in whatever placement;
    another array takes the place of the one before.
    """

    def __init__(self, sharded: ShardedProgram, devices: Sequence[jax.Device]) -> None:
        self._inputs = sharded.inputs
        self._is_resident = sharded.graph.is_resident.tolist()
        self._devices = devices
        # By flat argument: which array it is, and its blocks by (graph input, device).
        self._kept: dict[int, tuple[weakref.ref[Any], dict[tuple[int, int], jax.Array]]] = {}

    def lay(self, agenda: Agenda, values: Sequence[Any]) -> Slots:
        """Returns a call's slots `[S]`, those of graph inputs filled with arrived blocks."""
        slots: Slots = [None] * len(agenda.num_reads)
        cut: dict[int, jax.Array] = {}
        moving: list[jax.Array] = []
        for i, device, slot in agenda.inputs:
            block, there = self._inputs[i], self._devices[device]
            value = values[block.source]
            kept = self._blocks(block.source, value) if self._is_resident[i] else {}
            array = kept.get((i, device))
            if array is None and isinstance(value, Output):
                array = _block_there(value, block, there)
            if array is None:
                if i not in cut:
                    cut[i] = slice_block(value, block)
                array = jax.device_put(cut[i], there)
                kept[i, device] = array
                moving.append(array)
            slots[slot] = array
        for array in moving:
            wait_for(array)
        return slots

    def _blocks(self, source: int, value: Any) -> dict[tuple[int, int], jax.Array]:
        if source not in self._kept or self._kept[source][0]() is not value:
            self._kept[source] = (weakref.ref(value), {})
        return self._kept[source][1]


def _block_there(value: Output, block: InputBlock, device: jax.Device) -> Any:
    """Returns a block of an array that an earlier call leaves on the device, or None."""
    found = None if value.blocks is None else value.blocks.get((block.start, block.limit))
    return found if found is not None and found.device == device else None


class Buffers:
    """The arrays of one call by slot, each held until its last reader has used it."""

    def __init__(self, agenda: Agenda, slots: Slots) -> None:
        self._agenda = agenda
        self._slots = slots
        self._reads_left = list(agenda.num_reads)

    def operands(self, v: int) -> list[jax.Array | np.ndarray | None]:
        """Returns what task `v` reads."""
        slots = self._slots
        return [slots[s] for s in self._agenda.operands[v]]

    def get(self, slot: int) -> jax.Array:
        """Returns the array of a slot that has one; views are for kernels alone."""
        array = self._slots[slot]
        assert isinstance(array, jax.Array)
        return array

    def keep(self, slot: int, array: jax.Array | np.ndarray) -> None:
        """Holds a new array, if anything reads it."""
        if self._reads_left[slot]:
            self._slots[slot] = array

    def made(self, v: int, results: Sequence[jax.Array]) -> None:
        """Takes what task `v` made, and drops what it was the last to read."""
        for slot, result in zip(self._agenda.results[v], results, strict=True):
            self.keep(slot, result)
        for slot in self._agenda.reads[v]:
            self.drop_read(slot)

    def moved(self, k: int, copy: jax.Array | np.ndarray) -> None:
        """Takes what transfer `k` brought."""
        self.keep(self._agenda.transfers[k].slot, copy)
        self.drop_read(self._agenda.transfers[k].source_slot)

    def drop_read(self, slot: int) -> None:
        """Counts one reader less of a slot, whose array goes with the last."""
        self._reads_left[slot] -= 1
        if not self._reads_left[slot]:
            self._slots[slot] = None


def donated_operands(agenda: Agenda, v: int, kernel: Kernel) -> tuple[int, ...]:
    """Returns the positions of the operands of task `v` whose memory its results may take.

    Those that the task alone reads, once, that were made or received in the same call, and
    that have the shape and type of a result that takes no other's memory. Who donates
    cannot ask the operand any more whether it is there, so this is for dispatch that waits
    for every task before it goes on.
    """
    laid = {slot for _, _, slot in agenda.inputs}
    free = [(result.shape, result.dtype) for result in kernel.results]
    donated = []
    for position, slot in enumerate(agenda.operands[v]):
        operand = kernel.operands[position]
        kind = (operand.shape, operand.dtype)
        once = agenda.num_reads[slot] == 1 and agenda.operands[v].count(slot) == 1
        if once and slot not in laid and kind in free and num_bytes(operand) >= MIN_BYTES:
            free.remove(kind)
            donated.append(position)
    return tuple(donated)
