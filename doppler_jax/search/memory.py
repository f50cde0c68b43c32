"""Peak memory per device, vectorised over placements: the guide of a search, not its judge.

The judge is `doppler_jax.simulator.memory.peak_memory_bytes`, whose rules these are. Under
`parallel` links without noise the two agree up to rounding; elsewhere transfers are taken
to start when they are requested, so the numbers here are near the truth but no bound.
"""

from collections.abc import Callable
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.types import RESIDENT, Costs, TaskGraph, pytree

INTERVALS = 256
"""Parts of a makespan in which a placement is looked at before its events are sorted."""


@pytree
class MemoryTable:
    """What lies in memory: X items, the T tensors and then the I graph inputs, and capacity."""

    item_bytes: chex.Array  # [X]
    producer: chex.Array  # [X] int32 task; padded_tasks for inputs
    home: chex.Array  # [X] int32 device of an input, RESIDENT, or D for tensors
    edge_item: chex.Array  # [E + F] int32 item that is read
    edge_reader: chex.Array  # [E + F] int32 task that reads it
    is_result: chex.Array  # [X] tensors that no task reads
    capacity_bytes: chex.Array  # [D]


def can_overflow(graph: TaskGraph, costs: Costs) -> bool:
    """Returns whether some device could not hold every tensor and graph input at once."""
    total = np.sum(costs.tensor_bytes, dtype=float) + np.sum(costs.input_bytes, dtype=float)
    return bool(graph.num_tasks) and bool(total > np.min(costs.capacity_bytes))


def make_memory_table(graph: TaskGraph, costs: Costs, padded: PaddedProblem) -> MemoryTable:
    """Returns the table of a graph; sizes are of the padded's precision."""
    dtype = padded.compute_s.dtype
    t, i = graph.num_tensors, graph.num_inputs
    is_read = np.zeros(t, dtype=bool)
    is_read[graph.edge_tensor] = True
    return MemoryTable(
        item_bytes=np.concatenate([costs.tensor_bytes, costs.input_bytes]).astype(dtype),
        producer=np.concatenate(
            [graph.tensor_producer, np.full(i, padded.padded_tasks)]
        ).astype(np.int32),
        home=np.concatenate([np.full(t, costs.num_devices), graph.input_home]).astype(np.int32),
        edge_item=np.concatenate([graph.edge_tensor, t + graph.input_edge_input]).astype(
            np.int32
        ),
        edge_reader=np.concatenate([graph.edge_reader, graph.input_edge_reader]).astype(
            np.int32
        ),
        is_result=np.concatenate([~is_read, np.zeros(i, dtype=bool)]),
        capacity_bytes=np.asarray(costs.capacity_bytes, dtype),
    )


def excess(
    table: MemoryTable,
    padded: PaddedProblem,
    placements: chex.Array,
    start_s: chex.Array,
    finish_s: chex.Array,
    matters: chex.Array,
) -> chex.Array:
    """Returns `[B]` by how much the devices' peaks exceed capacity, in capacities, summed.

    0 of placements that do not matter, which cost next to nothing. Events are sorted only
    where they may tell: if a device could not hold at once all that it ever holds, nor all that
    it may hold within one of `INTERVALS` equal parts of the makespan.

    Args:
      table: items and capacities.
      padded: the problem.
      placements: `[B, N]` devices.
      start_s: `[B, N]` starts, seconds.
      finish_s: `[B, N]` finishes.
      matters: `[B]` bool.
    """
    run = partial(_excess, table, padded)

    def one_by_one(*columns: chex.Array) -> chex.Array:
        # What one placement takes stays in cache, and a tight one makes no other wait.
        return jax.lax.map(lambda lane: run(*(a[None] for a in lane))[0], columns)

    return jax.lax.platform_dependent(
        placements, start_s, finish_s, matters, cpu=one_by_one, default=run
    )


def _excess(
    table: MemoryTable,
    padded: PaddedProblem,
    placements: chex.Array,
    start_s: chex.Array,
    finish_s: chex.Array,
    matters: chex.Array,
) -> chex.Array:
    """Does `excess`'s work on a batch `[B, N]`, all of it as far as any of it needs."""
    capacity = table.capacity_bytes[None]

    def none_over() -> chex.Array:
        return jnp.zeros(len(placements))

    def unless_fits(bytes_: chex.Array, otherwise: Callable[[], chex.Array]) -> chex.Array:
        fits = (bytes_ <= capacity * (1 - 1e-5)).all(1)
        return jax.lax.cond((fits | ~matters).all(), none_over, otherwise)

    def of_items() -> chex.Array:
        held = jax.vmap(_held_bytes, in_axes=(None, None, 0))(table, padded, placements)
        return unless_fits(held.sum(1), partial(of_parts, held))

    def of_parts(held: chex.Array) -> chex.Array:
        most = jax.vmap(_most_bytes, in_axes=(None, None, 0, 0, 0))
        return unless_fits(most(table, padded, held, start_s, finish_s), of_peaks)

    def of_peaks() -> chex.Array:
        peak = jax.vmap(_peak_bytes, in_axes=(None, None, 0, 0, 0))
        # Sums of float32 sizes are off by rounding; a placement that fits exactly must pass.
        over = peak(table, padded, placements, start_s, finish_s) - capacity * (1 + 1e-6)
        share = jnp.where(jnp.isinf(capacity), 0.0, over / jnp.maximum(capacity, 1.0))
        return jnp.where(matters, jnp.maximum(share, 0.0).sum(1), 0.0)

    return jax.lax.cond(matters.any(), of_items, none_over)


def _held_bytes(table: MemoryTable, padded: PaddedProblem, placement: chex.Array) -> chex.Array:
    """Returns the bytes `[X, D]` of the items that one placement `[N]` puts on each device."""
    placement = jnp.pad(placement, (0, 1))
    devices = jnp.arange(padded.num_devices, dtype=jnp.int32)[None]
    source = jnp.where(table.home == padded.num_devices, placement[table.producer], table.home)
    is_held = devices == source[:, None]
    is_held = is_held.at[table.edge_item, placement[table.edge_reader]].set(True)
    return jnp.where(is_held, table.item_bytes[:, None], 0.0)


def _most_bytes(
    table: MemoryTable,
    padded: PaddedProblem,
    held: chex.Array,
    start_s: chex.Array,
    finish_s: chex.Array,
) -> chex.Array:
    """Returns `[D]` bytes that no peak of one placement is above.

    Every device counts an item that it ever holds, `held` `[X, D]`, from when it is made
    until it is read for the last time anywhere, in whole intervals.
    """
    start_s, finish_s = (jnp.pad(a, (0, 1)) for a in (start_s, finish_s))
    is_tensor = table.home == padded.num_devices
    made_s = jnp.where(is_tensor, start_s[table.producer], 0.0)
    sent_s = jnp.where(is_tensor, finish_s[table.producer], 0.0)
    sent_s += padded.latency_s.max() + table.item_bytes * padded.seconds_per_byte.max()
    is_sent = (held > 0).sum(1) > 1
    gone_s = jnp.where(is_sent, sent_s, made_s)
    gone_s = gone_s.at[table.edge_item].max(finish_s[table.edge_reader])
    last_s = gone_s.max(initial=0.0)
    gone_s = jnp.where(table.is_result | (table.home == RESIDENT), last_s, gone_s)

    def interval(time_s: chex.Array) -> chex.Array:
        share = jnp.where(last_s > 0, time_s / last_s, 0.0)
        return (jnp.clip(share, 0.0, 1.0) * (INTERVALS - 1)).astype(jnp.int32)

    change = jnp.zeros((INTERVALS + 1, padded.num_devices))
    change = change.at[interval(made_s)].add(held).at[interval(gone_s) + 1].add(-held)
    return jnp.cumsum(change, axis=0).max(0)


@pytree
class _Spans:
    """When each of X items is on each device, and how large it is there, of one placement."""

    from_s: chex.Array  # [X, D]
    until_s: chex.Array  # [X, D]
    held: chex.Array  # [X, D] bytes, 0 where it never is


def _spans(
    table: MemoryTable,
    padded: PaddedProblem,
    placement: chex.Array,
    start_s: chex.Array,
    finish_s: chex.Array,
) -> _Spans:
    """Returns the spans of one placement `[N]`."""
    num_devices, num_items = padded.num_devices, len(table.item_bytes)
    devices = jnp.arange(num_devices, dtype=jnp.int32)[None]
    start_s, finish_s, placement = (jnp.pad(a, (0, 1)) for a in (start_s, finish_s, placement))

    until_s = jnp.full((num_items, num_devices), -jnp.inf, finish_s.dtype)
    readers = table.edge_reader
    until_s = until_s.at[table.edge_item, placement[readers]].max(finish_s[readers])
    is_read = until_s > -jnp.inf

    is_tensor = table.home == num_devices
    source = jnp.where(is_tensor, placement[table.producer], table.home)
    is_home = devices == source[:, None]
    sent_s = jnp.where(is_tensor, finish_s[table.producer], 0.0)
    move_s = padded.latency_s[source] + (
        table.item_bytes[:, None] * padded.seconds_per_byte[source]
    )
    last_sent_s = jnp.where(is_read & ~is_home, sent_s[:, None] + move_s, -jnp.inf).max(1)
    until_s = jnp.where(is_home, jnp.maximum(until_s, last_sent_s[:, None]), until_s)
    is_resident = (table.home == RESIDENT)[:, None]
    stays = (table.is_result[:, None] & is_home) | (is_resident & is_read)
    until_s = jnp.where(stays, jnp.inf, until_s)
    made_s = jnp.where(is_tensor, start_s[table.producer], 0.0)
    from_s = jnp.where(is_home, made_s[:, None], sent_s[:, None])
    from_s = jnp.where(is_resident, 0.0, from_s)

    held = jnp.where(until_s > -jnp.inf, table.item_bytes[:, None], 0.0)
    return _Spans(from_s=from_s, until_s=until_s, held=held)


def _peak_bytes(
    table: MemoryTable,
    padded: PaddedProblem,
    placement: chex.Array,
    start_s: chex.Array,
    finish_s: chex.Array,
) -> chex.Array:
    """Returns the peak `[D]` of one placement `[N]`."""
    spans = _spans(table, padded, placement, start_s, finish_s)
    times = jnp.concatenate([spans.until_s, spans.from_s])
    is_new = jnp.broadcast_to(
        (jnp.arange(len(times)) >= len(spans.held))[:, None].astype(jnp.int32), times.shape
    )
    # Frees come before allocations of the same instant.
    changes = jnp.concatenate([-spans.held, spans.held])
    _, _, change = jax.lax.sort((times, is_new, changes), dimension=0, num_keys=2)
    return jnp.cumsum(change, axis=0).max(0, initial=0.0)
