"""Memory in the model of `exact`: what lies where counts as if it lay there always.

Two versions. The loose one counts resident graph inputs only: every schedule that respects
the memory passes, so that a bound found with it is one. The strict one counts each tensor,
each input at home and each received copy as well: whatever passes respects the memory,
though not the other way round.
"""

import dataclasses

import numpy as np

from doppler_jax.types import RESIDENT, Costs, TaskGraph

BITS = 30
"""Bits to which the largest limited memory is resolved."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Sizes in a unit that makes them whole numbers."""

    capacity: list[int | None]  # [D] less what is at home there; None is unlimited
    items: list[tuple[int, list[int]]]  # size, and tasks that each bring it to their device


def is_limited(costs: Costs) -> bool:
    """Returns whether some device could not hold all graph inputs and tensors at once."""
    total = float(np.sum(costs.input_bytes) + np.sum(costs.tensor_bytes))
    return total > np.min(costs.capacity_bytes)


def make_memory(graph: TaskGraph, costs: Costs, *, strict: bool) -> Memory:
    """Returns what must fit on each device, in one of the two versions."""
    capacity = np.asarray(costs.capacity_bytes, np.float64)
    unit = 2.0 ** (np.ceil(np.log2(max(capacity[np.isfinite(capacity)].max(), 1.0))) - BITS)
    whole = np.ceil if strict else np.floor
    readers: list[list[int]] = [[] for _ in range(graph.num_inputs)]
    for i, v in zip(graph.input_edge_input, graph.input_edge_reader, strict=True):
        readers[i].append(int(v))
    room = capacity.copy()
    items = []
    for i, tasks in enumerate(readers):
        size = float(costs.input_bytes[i])
        is_resident = graph.input_home[i] == RESIDENT
        if strict and tasks and not is_resident:  # a reader at home counts it once more
            room[graph.input_home[i]] -= size
        if tasks and (is_resident or strict):
            items.append((int(whole(size / unit)), tasks))
    if strict:
        touching = [[int(u)] for u in graph.tensor_producer]
        for x, v in zip(graph.edge_tensor, graph.edge_reader, strict=True):
            touching[x].append(int(v))
        sizes = whole(np.asarray(costs.tensor_bytes) / unit).astype(int).tolist()
        items += list(zip(sizes, touching, strict=True))
    limits = [int(np.floor(r / unit)) if np.isfinite(r) else None for r in room]
    return Memory(limits, [item for item in items if item[0]])


def fits(memory: Memory, placement: np.ndarray) -> bool:
    """Returns whether what the tasks of a placement `[N]` bring to their devices fits."""
    held = np.zeros(len(memory.capacity), np.int64)
    for size, tasks in memory.items:
        held[np.unique(placement[tasks])] += size
    return all(
        limit is None or amount <= limit
        for amount, limit in zip(held.tolist(), memory.capacity, strict=True)
    )
