"""The blocks of a program's arguments, on the devices that hold them."""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from doppler_jax.programs.blocks import slice_block
from doppler_jax.types import RESIDENT, ShardedProgram

from .plan import Plan

Slots = list[jax.Array | np.ndarray | None]
"""The arrays of one call, by slot of its plan; None before they are made and after use."""


class Residents:
    """The latest blocks of a program's resident arguments, kept on their devices.

    They are found again as long as the caller brings the same arrays, in whatever placement;
    another array takes the place of the one before.
    """

    def __init__(self, sharded: ShardedProgram, devices: Sequence[jax.Device]) -> None:
        self._inputs = sharded.inputs
        self._homes = sharded.graph.input_home.tolist()
        self._devices = devices
        # By flat argument: which array it is, and its blocks by (graph input, device).
        self._kept: dict[int, tuple[weakref.ref[Any], dict[tuple[int, int], jax.Array]]] = {}

    def lay(self, plan: Plan, values: Sequence[Any]) -> Slots:
        """Returns a call's slots `[S]`, those of graph inputs filled with arrived blocks."""
        slots: Slots = [None] * len(plan.num_reads)
        cut: dict[int, jax.Array] = {}
        for i, device, slot in plan.inputs:
            block = self._inputs[i]
            kept = self._blocks(block.source, values[block.source])
            if (array := kept.get((i, device))) is None:
                if i not in cut:
                    cut[i] = slice_block(values[block.source], block)
                array = jax.device_put(cut[i], self._devices[device])
                if self._homes[i] == RESIDENT:
                    kept[i, device] = array
            slots[slot] = array
        jax.block_until_ready(slots)
        return slots

    def _blocks(self, source: int, value: Any) -> dict[tuple[int, int], jax.Array]:
        if source not in self._kept or self._kept[source][0]() is not value:
            self._kept[source] = (weakref.ref(value), {})
        return self._kept[source][1]
