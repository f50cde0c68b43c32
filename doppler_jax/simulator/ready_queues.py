"""Executions in lock step, with a ready queue per device: for wide graphs.

Starts tasks in the same order as `chain_slots.py`, at a cost per task that does not grow
with the graph's width. The task that a device would start next is kept at hand, and those
behind it in a queue (`queue_heaps.py` for `fifo`, `queue_trees.py` for `priority`), so the
best of all is the best of D tasks.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.simulator import queue_heaps, queue_trees
from doppler_jax.simulator.arrivals import arrive
from doppler_jax.simulator.chain_slots import run_chain_slots
from doppler_jax.simulator.in_hand import (
    InHand,
    next_edge,
    nothing_in_hand,
    num_steps,
    take_in_hand,
)
from doppler_jax.simulator.lanes import at, column, larger, least, pick, write
from doppler_jax.simulator.queue_heaps import Heaps, make_heaps
from doppler_jax.simulator.queue_trees import Trees, make_trees, queue_places, queue_positions
from doppler_jax.simulator.serial_links import SerialLinks, carry_inputs
from doppler_jax.types import pytree


@pytree
class _Ranked:
    """The order of the tasks under `priority`, in L lanes."""

    order: chex.Array  # [L * (N + 1)] int32, tasks by queue position
    position: chex.Array  # [L * (N + 1)] the inverse, as a float
    device_at: chex.Array  # [L * 2^k] device of the task at each position, 2^k >= N, a float


@pytree
class _Tables:
    """What does not change during a run; per-task tables of L lanes are flat."""

    padded: PaddedProblem
    placement: chex.Array  # [L * (N + 1)] device of each task, as a float
    ranked: _Ranked | None  # None under `fifo`, where a task's queue position is its id
    handling_s: chex.Array | None  # [L * (N + 1)], see `handling.py`
    transfer_factor: chex.Array | None  # [T * D] noise
    base: chex.Array  # [L] int32, where a lane's tasks begin
    one: chex.Array  # [] 1.0, see `hold`

    def hold(self, x: chex.Array) -> chex.Array:
        """Returns x. XLA repeats cheap operations in each of their readers, but no division."""
        return x / self.one


@pytree
class _State:
    """L executions in progress. A device's next task is not in its queue."""

    next_ready_s: chex.Array  # [D, L] of each device's next task; inf if none waits
    next_position: chex.Array  # [D, L] as a float
    free_s: chex.Array  # [D, L] when the device has finished what it started
    queues: Heaps | Trees
    inputs: chex.Array  # [L * (N + 1) * 2] pairs: latest arrival, producers not started
    makespan_s: chex.Array  # [L]
    links: SerialLinks | None  # None under `parallel` links
    times_s: chex.Array | None  # [L * (N + 1) * 2] pairs: start, finish


def run_ready_queues(
    shared: tuple[PaddedProblem, chex.Array | None],
    placement: chex.Array,
    order: chex.Array | None,
    handling_s: chex.Array | None = None,
    *,
    serial: bool,
    schedule: bool,
    native: bool,
) -> tuple[chex.Array, ...]:
    """Runs L executions to their end; other platforms than the CPU leave it to chain slots.

    Args:
      shared: as of `run_chain_slots`.
      placement: `[L, N + 1]` int32.
      order: `[L, N + 1]` int32, the `queue_order` of `priority`; None for `fifo`.
      handling_s: as of `run_chain_slots`.
      serial: the same, and so are the others and what is returned.
      schedule: whether the times of tasks are wanted.
      native: whether this is compiled as one CPU kernel.
    """
    if not native:
        rank = None if order is None else jnp.argsort(order, axis=-1)
        return run_chain_slots(
            shared, placement, rank, handling_s, serial=serial, schedule=schedule, native=False
        )
    padded, transfer_factor = shared
    tables = _tables(padded, placement, order, handling_s, transfer_factor)
    state = _begin(tables, placement, serial, schedule)

    def step(_: chex.Array, carry: tuple[_State, InHand]) -> tuple[_State, InHand]:
        return _release_reader(tables, *_start_best(tables, *carry))

    begun = state, nothing_in_hand(len(placement), state.makespan_s.dtype)
    state, _ = jax.lax.fori_loop(0, num_steps(padded), step, begun)
    if state.times_s is None:
        return (state.makespan_s,)
    start_s, finish_s = jnp.moveaxis(state.times_s.reshape(*placement.shape, 2), -1, 0)
    return state.makespan_s, start_s, finish_s


def _tables(
    padded: PaddedProblem,
    placement: chex.Array,
    order: chex.Array | None,
    handling_s: chex.Array | None,
    transfer_factor: chex.Array | None,
) -> _Tables:
    lanes, rows = placement.shape
    dtype = jnp.result_type(padded.compute_s)
    base = jnp.arange(lanes, dtype=jnp.int32) * rows
    flat = placement.astype(dtype).reshape(-1)
    return _Tables(
        padded=padded,
        placement=flat,
        ranked=None if order is None else _ranked(order, flat, base),
        handling_s=None if handling_s is None else handling_s.reshape(-1),
        transfer_factor=None if transfer_factor is None else transfer_factor.reshape(-1),
        base=base,
        # A constant would be divided by at compile time; this one XLA cannot see through.
        one=jnp.where(padded.num_tasks >= 0, 1, 2).astype(dtype),
    )


def _ranked(order: chex.Array, placement: chex.Array, base: chex.Array) -> _Ranked:
    rows = order.shape[1]
    flat = order.reshape(-1)
    devices = at(placement, jnp.repeat(base, rows) + flat).reshape(order.shape)
    spare = queue_places(rows - 1) - (rows - 1)
    return _Ranked(
        order=flat,
        position=queue_positions(flat, base, placement.dtype),
        device_at=jnp.pad(devices[:, :-1], ((0, 0), (0, spare))).reshape(-1),
    )


def _begin(tables: _Tables, placement: chex.Array, serial: bool, schedule: bool) -> _State:
    padded = tables.padded
    lanes, rows = placement.shape
    devices, dtype = padded.num_devices, tables.placement.dtype
    if serial:
        ready_s, links = carry_inputs(padded, placement, native=True)
    else:
        ready_s = jnp.take_along_axis(padded.input_ready_s, placement.T, axis=1).T
        links = None
    missing = jnp.broadcast_to(padded.num_producers.astype(dtype), (lanes, rows))
    queues: Heaps | Trees
    if tables.ranked is None:  # one more: see `_start_best`
        queues = make_heaps(lanes, devices + 1, len(padded.chain_head), dtype)
    else:
        queues = make_trees(lanes, devices + 1, rows - 1, dtype)
    state = _State(
        next_ready_s=jnp.full((devices, lanes), jnp.inf, dtype),
        next_position=jnp.zeros((devices, lanes), dtype),
        free_s=jnp.zeros((devices, lanes), dtype),
        queues=queues,
        inputs=jnp.stack([ready_s, missing], axis=-1).reshape(-1),
        makespan_s=jnp.zeros(lanes, dtype),
        links=links,
        times_s=jnp.full(lanes * rows * 2, jnp.inf, dtype) if schedule else None,
    )

    def enter(v: chex.Array, state: _State) -> _State:
        task = jnp.broadcast_to(v, (lanes,))
        ready_s = tables.hold(at(state.inputs, 2 * (tables.base + task)))
        there = tables.hold(at(tables.placement, tables.base + task))
        return _enter(tables, state, task, there, ready_s, jnp.ones(lanes, bool))

    def look(v: chex.Array, state: _State) -> _State:
        waits = at(padded.num_producers, v) == 0
        return jax.lax.cond(waits, enter, lambda _, state: state, v, state)

    return jax.lax.fori_loop(0, padded.num_tasks, look, state)


def _start_best(tables: _Tables, state: _State, hand: InHand) -> tuple[_State, InHand]:
    """Starts the best waiting task, in lanes that are done with their last."""
    padded, hold = tables.padded, tables.hold
    devices, nobody = padded.num_devices, padded.padded_tasks

    starts_s = larger(state.next_ready_s, state.free_s)
    start_s = hold(least(starts_s))
    tied = starts_s == start_s[None]
    if tables.ranked is None:
        key = least(jnp.where(tied, state.next_ready_s, jnp.inf))
        tied &= state.next_ready_s == key[None]
    position = hold(least(jnp.where(tied, state.next_position, jnp.inf)))
    tied &= state.next_position == position[None]
    here = hold(least(jnp.where(tied, column(devices, start_s), devices)))
    starts = hand.done & (start_s < jnp.inf)
    # Lanes that start nothing take from a queue that is always empty.
    here = hold(jnp.where(starts, here, devices))
    device, task = here.astype(jnp.int32), position.astype(jnp.int32)
    if tables.ranked is not None:
        task = at(tables.ranked.order, tables.base + task)
    task = jnp.where(starts, task, nobody)

    costs = task * devices + jnp.where(starts, device, 0)
    seconds = at(padded.compute_s.reshape(-1), costs)
    if tables.handling_s is not None:
        seconds += at(tables.handling_s, tables.base + task)
    finish_s = hold(start_s + seconds)
    times_s = state.times_s
    if times_s is not None:
        pair = jnp.stack([start_s, finish_s], axis=-1)
        times_s = write(times_s, 2 * (tables.base + task), pair, True)
    ready_s, position, queues = _take_first(tables, state.queues, device, finish_s)
    started = column(devices, here) == here[None]
    state = dataclasses.replace(
        state,
        next_ready_s=jnp.where(started, ready_s[None], state.next_ready_s),
        next_position=jnp.where(started, position[None], state.next_position),
        free_s=jnp.where(started, finish_s[None], state.free_s),
        queues=queues,
        # inf where a lane has nothing in hand and can start nothing: tasks that cannot run
        makespan_s=jnp.where(hand.done, larger(state.makespan_s, finish_s), state.makespan_s),
        times_s=times_s,
    )
    return state, take_in_hand(
        hand, padded, starts=starts, task=task, device=device, finish_s=finish_s
    )


def _take_first(
    tables: _Tables, queues: Heaps | Trees, device: chex.Array, free_s: chex.Array
) -> tuple[chex.Array, chex.Array, Heaps | Trees]:
    """Takes what a device `[L]`, free at `free_s` `[L]`, would start first."""
    if isinstance(queues, Heaps):
        return queue_heaps.take_first(queues, device, tables.hold)
    assert tables.ranked is not None
    device_at = tables.ranked.device_at
    return queue_trees.take_first(queues, device, device_at, free_s=free_s, hold=tables.hold)


def _release_reader(tables: _Tables, state: _State, hand: InHand) -> tuple[_State, InHand]:
    """Follows the next edge of each lane: tells the reader when what was made arrives."""
    padded, hold = tables.padded, tables.hold
    edge, later = next_edge(hand, padded)
    reader = hold(at(padded.edge_reader, edge).astype(hand.finish_s.dtype))
    task = reader.astype(jnp.int32)
    where = tables.base + task
    there = hold(at(tables.placement, where))
    arrival_s, links = arrive(
        padded,
        tables.transfer_factor,
        state.links,
        edge=edge,
        source=hand.device,
        destination=there.astype(jnp.int32),
        request_s=hand.finish_s,
        native=True,
    )
    pair = 2 * where
    ready_s = hold(larger(at(state.inputs, pair), hold(arrival_s)))
    missing = hold(at(state.inputs, pair + 1) - 1)
    inputs = write(state.inputs, pair, jnp.stack([ready_s, missing], axis=-1), True)
    state = dataclasses.replace(state, inputs=inputs, links=links)
    return _enter(tables, state, task, there, ready_s, missing == 0), later


def _enter(
    tables: _Tables,
    state: _State,
    task: chex.Array,
    there: chex.Array,
    ready_s: chex.Array,
    waits: chex.Array,
) -> _State:
    """Queues a task `[L]` on its device `[L]`, in lanes where it waits from now on."""
    hold = tables.hold
    position = task.astype(ready_s.dtype)
    if tables.ranked is not None:
        position = hold(at(tables.ranked.position, tables.base + task))
    other_ready_s = hold(pick(state.next_ready_s, there))
    other_position = hold(pick(state.next_position, there))
    key, other_key = ready_s, other_ready_s
    if tables.ranked is not None:
        free_s = pick(state.free_s, there)
        key, other_key = larger(ready_s, free_s), larger(other_ready_s, free_s)
    first = (key < other_key) | ((key == other_key) & (position < other_position))
    first &= waits
    takes = first[None] & (column(len(state.free_s), there) == there[None])
    later_s = jnp.where(first, other_ready_s, jnp.where(waits, ready_s, jnp.inf))
    later = jnp.where(first, other_position, jnp.where(waits, position, 0))
    later, later_s = hold(later), hold(later_s)
    if isinstance(state.queues, Heaps):
        queues: Heaps | Trees = queue_heaps.put(state.queues, there, later, later_s, hold)
    else:
        queues = queue_trees.put(state.queues, there, later, later_s, hold)
    return dataclasses.replace(
        state,
        next_ready_s=jnp.where(takes, ready_s[None], state.next_ready_s),
        next_position=jnp.where(takes, position[None], state.next_position),
        queues=queues,
    )
