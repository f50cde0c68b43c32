"""Executions in lock step, with a ready queue per device: for wide graphs.

Starts tasks in the same order as `chain_slots.py`, at a cost per task that does not grow
with the graph's width. The task that a device would start next is kept at hand, and those
behind it in a queue (`queue_trees.py`), so the best of all is the best of D tasks.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from doppler_jax.graphs.instance import Instance
from doppler_jax.simulator.arrivals import arrive
from doppler_jax.simulator.chain_slots import run_chain_slots
from doppler_jax.simulator.lanes import at, column, larger, largest, least, pick, write
from doppler_jax.simulator.queue_trees import (
    Queues,
    make_queues,
    put,
    queue_places,
    queue_positions,
    take_first,
)
from doppler_jax.simulator.serial_links import SerialLinks, carry_inputs
from doppler_jax.types import pytree


@pytree
class _Tables:
    """What does not change during a run; per-task tables of L lanes are flat."""

    instance: Instance
    placement: chex.Array  # [L * (N + 1)] device of each task, as a float
    device_at: chex.Array  # [L * 2^k] the same by queue position, 2^k >= N
    position: chex.Array | None  # [L * (N + 1)] in the queue, as a float; None: the task's id
    order: chex.Array | None  # [L * (N + 1)] int32, the inverse
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
    queues: Queues
    inputs: chex.Array  # [L * (N + 1) * 2] pairs: latest arrival, producers not started
    makespan_s: chex.Array  # [L]
    links: SerialLinks | None  # None under `parallel` links
    times_s: chex.Array | None  # [L * (N + 1) * 2] pairs: start, finish


@pytree
class _Started:
    """The task that each lane has just started."""

    task: chex.Array  # [L] int32
    device: chex.Array  # [L] int32
    start_s: chex.Array  # [L]
    finish_s: chex.Array  # [L]


def run_ready_queues(
    shared: tuple[Instance, chex.Array | None],
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
    instance, transfer_factor = shared
    tables = _tables(instance, placement, order, handling_s, transfer_factor)
    state = _begin(tables, placement, serial, schedule)

    def step(state: _State) -> _State:
        state, started = _start_best(tables, state)
        return _release_readers(tables, state, started)

    state = jax.lax.fori_loop(0, instance.num_tasks, lambda _, state: step(state), state)
    if state.times_s is None:
        return (state.makespan_s,)
    start_s, finish_s = jnp.moveaxis(state.times_s.reshape(*placement.shape, 2), -1, 0)
    return state.makespan_s, start_s, finish_s


def _tables(
    instance: Instance,
    placement: chex.Array,
    order: chex.Array | None,
    handling_s: chex.Array | None,
    transfer_factor: chex.Array | None,
) -> _Tables:
    lanes, rows = placement.shape
    dtype = jnp.result_type(instance.compute_s)
    base = jnp.arange(lanes, dtype=jnp.int32) * rows
    devices, position = placement.astype(dtype), None
    flat = devices.reshape(-1)
    if order is not None:
        order = order.reshape(-1)
        devices = at(flat, jnp.repeat(base, rows) + order).reshape(lanes, rows)
        position = queue_positions(order, base, dtype)
    spare = queue_places(rows - 1) - (rows - 1)
    return _Tables(
        instance=instance,
        placement=flat,
        device_at=jnp.pad(devices[:, :-1], ((0, 0), (0, spare))).reshape(-1),
        position=position,
        order=order,
        handling_s=None if handling_s is None else handling_s.reshape(-1),
        transfer_factor=None if transfer_factor is None else transfer_factor.reshape(-1),
        base=base,
        # A constant would be divided by at compile time; this one XLA cannot see through.
        one=jnp.where(instance.num_tasks >= 0, 1, 2).astype(dtype),
    )


def _begin(tables: _Tables, placement: chex.Array, serial: bool, schedule: bool) -> _State:
    instance = tables.instance
    lanes, rows = placement.shape
    devices, dtype = instance.num_devices, tables.placement.dtype
    if serial:
        ready_s, links = carry_inputs(instance, placement, native=True)
    else:
        ready_s = jnp.take_along_axis(instance.input_ready_s, placement.T, axis=1).T
        links = None
    missing = jnp.broadcast_to(instance.num_producers.astype(dtype), (lanes, rows))
    state = _State(
        next_ready_s=jnp.full((devices, lanes), jnp.inf, dtype),
        next_position=jnp.zeros((devices, lanes), dtype),
        free_s=jnp.zeros((devices, lanes), dtype),
        queues=make_queues(lanes, devices, rows - 1, dtype),
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
        waits = at(instance.num_producers, v) == 0
        return jax.lax.cond(waits, enter, lambda _, state: state, v, state)

    return jax.lax.fori_loop(0, instance.num_tasks, look, state)


def _start_best(tables: _Tables, state: _State) -> tuple[_State, _Started]:
    """Starts the best waiting task of each lane."""
    instance, hold = tables.instance, tables.hold
    devices, nobody = instance.num_devices, instance.padded_tasks

    starts_s = larger(state.next_ready_s, state.free_s)
    start_s = hold(least(starts_s))
    tied = starts_s == start_s[None]
    if tables.position is None:
        key = least(jnp.where(tied, state.next_ready_s, jnp.inf))
        tied &= state.next_ready_s == key[None]
    position = hold(least(jnp.where(tied, state.next_position, jnp.inf)))
    tied &= state.next_position == position[None]
    here = hold(least(jnp.where(tied, column(devices, start_s), devices)))
    device, task = here.astype(jnp.int32), position.astype(jnp.int32)
    if tables.order is not None:
        task = at(tables.order, tables.base + task)
    task = jnp.where(start_s < jnp.inf, task, nobody)

    seconds = at(instance.compute_s.reshape(-1), task * devices + device)
    if tables.handling_s is not None:
        seconds += at(tables.handling_s, tables.base + task)
    finish_s = hold(start_s + seconds)
    times_s = state.times_s
    if times_s is not None:
        pair = jnp.stack([start_s, finish_s], axis=-1)
        times_s = write(times_s, 2 * (tables.base + task), pair, True)
    ready_s, position, queues = take_first(
        state.queues,
        device,
        tables.device_at,
        free_s=None if tables.position is None else finish_s,
        hold=hold,
    )
    started = column(devices, here) == here[None]
    state = dataclasses.replace(
        state,
        next_ready_s=jnp.where(started, ready_s[None], state.next_ready_s),
        next_position=jnp.where(started, position[None], state.next_position),
        free_s=jnp.where(started, finish_s[None], state.free_s),
        queues=queues,
        makespan_s=larger(state.makespan_s, finish_s),
        times_s=times_s,
    )
    return state, _Started(task=task, device=device, start_s=start_s, finish_s=finish_s)


def _release_readers(tables: _Tables, state: _State, started: _Started) -> _State:
    """Tells the readers of what was started when it reaches them."""
    degree = at(tables.instance.num_edges, started.task)

    def edge(carry: tuple[chex.Array, _State]) -> tuple[chex.Array, _State]:
        k, state = carry
        return k + 1, _release_reader(tables, state, started, k, degree)

    most = largest(degree)
    _, state = jax.lax.while_loop(lambda carry: carry[0] < most, edge, (jnp.int32(0), state))
    return state


def _release_reader(
    tables: _Tables, state: _State, started: _Started, k: chex.Array, degree: chex.Array
) -> _State:
    """Handles the k-th out-edge of each started task, where it has one."""
    instance, hold = tables.instance, tables.hold
    nobody = instance.edge_reader.shape[0] - 1  # an edge to the task that never runs
    edge = jnp.where(k < degree, at(instance.first_edge, started.task) + k, nobody)
    reader = hold(at(instance.edge_reader, edge).astype(started.finish_s.dtype))
    task = reader.astype(jnp.int32)
    where = tables.base + task
    there = hold(at(tables.placement, where))
    arrival_s, links = arrive(
        instance,
        tables.transfer_factor,
        state.links,
        edge=edge,
        source=started.device,
        destination=there.astype(jnp.int32),
        request_s=started.finish_s,
        native=True,
    )
    pair = 2 * where
    ready_s = hold(larger(at(state.inputs, pair), hold(arrival_s)))
    missing = hold(at(state.inputs, pair + 1) - 1)
    inputs = write(state.inputs, pair, jnp.stack([ready_s, missing], axis=-1), True)
    state = dataclasses.replace(state, inputs=inputs, links=links)
    return _enter(tables, state, task, there, ready_s, missing == 0)


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
    if tables.position is not None:
        position = hold(at(tables.position, tables.base + task))
    other_ready_s = hold(pick(state.next_ready_s, there))
    other_position = hold(pick(state.next_position, there))
    key, other_key = ready_s, other_ready_s
    if tables.position is not None:
        free_s = pick(state.free_s, there)
        key, other_key = larger(ready_s, free_s), larger(other_ready_s, free_s)
    first = (key < other_key) | ((key == other_key) & (position < other_position))
    first &= waits
    takes = first[None] & (column(len(state.free_s), there) == there[None])
    later_s = jnp.where(first, other_ready_s, jnp.where(waits, ready_s, jnp.inf))
    later = jnp.where(first, other_position, jnp.where(waits, position, 0))
    return dataclasses.replace(
        state,
        next_ready_s=jnp.where(takes, ready_s[None], state.next_ready_s),
        next_position=jnp.where(takes, position[None], state.next_position),
        queues=put(state.queues, there, hold(later), hold(later_s), hold),
    )
