"""The arrays of one call: dropped after their last reader, and how much they take."""

from collections.abc import Iterable

import jax
import numpy as np

from doppler_jax.types import RESIDENT, TaskGraph

from .blocks import Slots
from .plan import Plan
from .trace import Record


class Buffers:
    """The arrays of one call by slot, each held until its last reader has used it."""

    def __init__(self, plan: Plan, slots: Slots) -> None:
        self._plan = plan
        self._slots = slots
        self._reads_left = list(plan.num_reads)

    def operands(self, v: int) -> list[jax.Array | np.ndarray | None]:
        """Returns what task `v` reads."""
        slots = self._slots
        return [slots[s] for s in self._plan.operands[v]]

    def get(self, slot: int) -> jax.Array:
        """Returns the array of a slot that has one; views are for kernels alone."""
        array = self._slots[slot]
        assert isinstance(array, jax.Array)
        return array

    def keep(self, slot: int, array: jax.Array | np.ndarray) -> None:
        """Holds a new array, if anything reads it."""
        if self._reads_left[slot]:
            self._slots[slot] = array

    def drop_reads(self, slots: Iterable[int]) -> None:
        """Counts one reader less of each slot."""
        for slot in slots:
            self._reads_left[slot] -= 1
            if not self._reads_left[slot]:
                self._slots[slot] = None


class Footprint:
    """How much memory the calls of a plan take (DESIGN, rule 9), from their times.

    A task's tensors lie on its device from its start, a copy from its transfer's start,
    each until the last task or transfer that reads it there ends; what is read by no one
    goes as its task ends. Resident blocks and outputs stay.
    """

    def __init__(self, graph: TaskGraph, plan: Plan, num_devices: int) -> None:
        num_tasks, num_slots = len(plan.placement), len(plan.num_reads)
        self._num_devices = num_devices
        self._bytes, self._device = np.zeros(num_slots), np.zeros(num_slots, np.int64)
        self._maker = np.full(num_slots, -1)  # event; -1: there before the call
        self._stays = np.zeros(num_slots, bool)
        reads = [(s, v) for v, of_task in enumerate(plan.operands) for s in of_task]
        for v, slots in enumerate(plan.results):
            self._set(slots, graph.tensor_bytes[list(slots)], plan.placement[v], v)
        for k, t in enumerate(plan.transfers):
            size = (
                graph.tensor_bytes[t.tensor]
                if t.producer >= 0
                else graph.input_bytes[~t.tensor]
            )
            self._set([t.slot], size, t.destination, num_tasks + k)
            reads.append((t.source_slot, num_tasks + k))
        for i, device, slot in plan.inputs:
            self._set([slot], graph.input_bytes[i], device, -1)
            self._stays[slot] = graph.input_home[i] == RESIDENT
        self._stays[[s for blocks in plan.outputs for s in blocks]] = True
        self._read_slot, self._reader = np.array(reads, np.int64).reshape(-1, 2).T

    def peak_bytes(self, record: Record) -> np.ndarray:
        """Returns the most bytes `[D]` held at once; at one instant frees come first."""
        start_s, finish_s = np.array([*record.start_s, 0.0]), np.array([*record.finish_s, 0.0])
        end_s = finish_s[self._maker]
        np.maximum.at(end_s, self._read_slot, finish_s[self._reader])
        end_s[self._stays] = np.inf
        times = np.concatenate([start_s[self._maker], end_s])
        change = np.concatenate([self._bytes, -self._bytes])
        order = np.lexsort((change, times))
        device, change = np.tile(self._device, 2)[order], change[order]
        held = np.where(device == np.arange(self._num_devices)[:, None], change, 0.0)
        return np.cumsum(held, axis=1).max(axis=1, initial=0.0)

    def _set(self, slots: Iterable[int], size: np.ndarray, device: int, maker: int) -> None:
        here = list(slots)
        self._bytes[here], self._device[here], self._maker[here] = size, device, maker
