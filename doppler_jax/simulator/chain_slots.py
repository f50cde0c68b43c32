"""Executions in lock step, at most one waiting task per chain.

The fast formulation of the simulator, for graphs that are not wide. A step starts, in every
lane (one execution), the task of smallest (start time, queue key, id) among those whose
producers have all been started. Under links whose arrivals are known when the producer
starts (`parallel`, `serial`), that order of starts is the event simulator's (DESIGN, rule
8). A task is ready to be considered only after its ancestors started, so a chain
(`graphs/chains.py`) holds one such task at most, and a slot per chain is enough. Starting a
task releases its readers along its out-edges.

Everything is elementwise on `[slots, lanes]`, or gathers and writes of one number per lane.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.simulator.arrivals import arrive
from doppler_jax.simulator.in_hand import (
    InHand,
    next_edge,
    nothing_in_hand,
    num_steps,
    take_in_hand,
)
from doppler_jax.simulator.lanes import at, column, larger, least, pick, write
from doppler_jax.simulator.serial_links import SerialLinks, carry_inputs
from doppler_jax.types import pytree

UNROLL = 4
"""Steps of an iteration on other platforms than the CPU, which ask the host after each."""


@pytree
class _Tables:
    """What does not change during a run; per-task tables of L lanes are flat."""

    padded: PaddedProblem
    placement: chex.Array  # [L * (N + 1)] device of each task, as a float
    rank: chex.Array | None  # [L * (N + 1)] queue key; None under `fifo`
    handling_s: chex.Array | None  # [L * (N + 1)], see `handling.py`
    transfer_factor: chex.Array | None  # [T * D] noise
    base: chex.Array  # [L] int32, where a lane's tasks begin
    one: chex.Array  # [] 1.0, see `hold`

    def hold(self, x: chex.Array) -> chex.Array:
        """Returns x. XLA repeats cheap operations in each of their readers, but no division."""
        return x / self.one


@pytree
class _State:
    """L executions in progress over W slots; an empty slot has start inf."""

    slot_start_s: chex.Array  # [W, L] when the waiting task could start
    slot_key: chex.Array  # [W, L] its ready time, or its rank
    slot_code: chex.Array  # [W, L] task * 2^k + device, as a float
    free_s: chex.Array  # [D, L] when the device has finished what it started
    inputs: chex.Array  # [L * (N + 1) * 2] pairs: latest arrival, producers not started
    makespan_s: chex.Array  # [L]
    links: SerialLinks | None  # None under `parallel` links
    times_s: chex.Array | None  # [L * (N + 1) * 2] pairs: start, finish


def run_chain_slots(
    shared: tuple[PaddedProblem, chex.Array | None],
    placement: chex.Array,
    rank: chex.Array | None,
    handling_s: chex.Array | None = None,
    *,
    serial: bool,
    schedule: bool,
    native: bool,
) -> tuple[chex.Array, ...]:
    """Runs L executions to their end.

    Args:
      shared: the problem, and `[T, D]` factors of the transfers' durations or None. Times
        are in the problem's precision.
      placement: `[L, N + 1]` int32.
      rank: `[L, N + 1]` queue keys of `priority`, or None for `fifo`.
      handling_s: `[L, N + 1]` what tasks are longer by, or None.
      serial: whether a link carries one transfer at a time.
      schedule: whether the times of tasks are wanted.
      native: whether this is compiled as one CPU kernel (`lockstep.run_batch`).

    Returns:
      Makespans `[L]`; with `schedule` also starts and finishes `[L, N + 1]`, inf for
      tasks that never start.
    """
    padded, transfer_factor = shared
    tables, state = _begin(
        padded, placement, rank, handling_s, transfer_factor, serial, schedule, native
    )

    count, unroll = num_steps(padded), 1 if native else UNROLL

    def steps(i: chex.Array, carry: tuple[_State, InHand]) -> tuple[_State, InHand]:
        for k in range(unroll):
            counts = k == 0 or unroll * i + k < count  # the last iteration may have some spare
            started = _start_best(tables, *carry, counts=counts, native=native)
            carry = _release_reader(tables, *started, native)
        return carry

    begun = state, nothing_in_hand(len(placement), state.makespan_s.dtype)
    iterations = jax.lax.div(count + (unroll - 1), jnp.int32(unroll))
    state, _ = jax.lax.fori_loop(0, iterations, steps, begun)
    if state.times_s is None:
        return (state.makespan_s,)
    start_s, finish_s = jnp.moveaxis(state.times_s.reshape(*placement.shape, 2), -1, 0)
    return state.makespan_s, start_s, finish_s


def _begin(
    padded: PaddedProblem,
    placement: chex.Array,
    rank: chex.Array | None,
    handling_s: chex.Array | None,
    transfer_factor: chex.Array | None,
    serial: bool,
    schedule: bool,
    native: bool,
) -> tuple[_Tables, _State]:
    lanes, rows = placement.shape
    dtype = jnp.result_type(padded.compute_s)
    devices = padded.num_devices
    tables = _Tables(
        padded=padded,
        placement=placement.reshape(-1).astype(dtype),
        rank=None if rank is None else rank.reshape(-1).astype(dtype),
        handling_s=None if handling_s is None else handling_s.reshape(-1),
        transfer_factor=None if transfer_factor is None else transfer_factor.reshape(-1),
        base=jnp.arange(lanes, dtype=jnp.int32) * rows,
        # A constant would be divided by at compile time; this one XLA cannot see through.
        one=jnp.where(padded.num_tasks >= 0, 1, 2).astype(dtype),
    )
    ready_s = jnp.take_along_axis(padded.input_ready_s, placement.T, axis=1)  # [N + 1, L]
    ready_s, links = ready_s.T, None
    if serial:
        ready_s, links = carry_inputs(padded, placement, native)
    head = padded.chain_head
    waits = (padded.num_producers[head] == 0) & (head < rows - 1)
    slot_start_s = jnp.where(waits[:, None], ready_s.T[head], jnp.inf)
    keys_s = slot_start_s if rank is None else rank.T[head].astype(dtype)
    missing = jnp.broadcast_to(padded.num_producers.astype(dtype), (lanes, rows))
    code = head[:, None] * _device_slots(devices) + placement.T[head]
    return tables, _State(
        slot_start_s=slot_start_s,
        slot_key=keys_s,
        slot_code=code.astype(dtype),
        free_s=jnp.zeros((devices, lanes), dtype),
        inputs=jnp.stack([ready_s, missing], axis=-1).reshape(-1),
        makespan_s=jnp.zeros(lanes, dtype),
        links=links,
        times_s=jnp.full(lanes * rows * 2, jnp.inf, dtype) if schedule else None,
    )


def _start_best(
    tables: _Tables, state: _State, hand: InHand, *, counts: chex.Array | bool, native: bool
) -> tuple[_State, InHand]:
    """Starts the best waiting task, in lanes that are done with their last.

    A step that does not count comes when all is over, and changes nothing.
    """
    padded, hold = tables.padded, tables.hold
    devices, slots = padded.num_devices, _device_slots(padded.num_devices)
    nobody = jnp.asarray(padded.padded_tasks * slots, state.slot_code.dtype)

    start_s = hold(least(state.slot_start_s))
    tied = state.slot_start_s == start_s[None]
    key = hold(least(jnp.where(tied, state.slot_key, jnp.inf)))
    tied &= state.slot_key == key[None]
    code = hold(least(jnp.where(tied, state.slot_code, nobody)))
    starts = hand.done & (start_s < jnp.inf)
    code = jnp.where(starts, code, nobody).astype(jnp.int32)
    task, device = code // slots, code % slots

    seconds = at(padded.compute_s.reshape(-1), task * devices + device)
    if tables.handling_s is not None:
        seconds += at(tables.handling_s, tables.base + task)
    finish_s = hold(start_s + seconds)
    here = hold(jnp.where(starts, device, devices).astype(start_s.dtype))[None]
    free_s = jnp.where(column(devices, here) == here, finish_s[None], state.free_s)
    slot_device = state.slot_code - jnp.floor(state.slot_code / slots) * slots
    waits = jnp.where(
        slot_device == here, larger(state.slot_start_s, finish_s[None]), state.slot_start_s
    )
    chain = jnp.where(starts, at(padded.chain, task), len(waits))
    chain = hold(chain.astype(start_s.dtype))[None]
    times_s = state.times_s
    if times_s is not None:
        pair = jnp.stack([start_s, finish_s], axis=-1)
        times_s = write(times_s, 2 * (tables.base + task), pair, native)
    state = dataclasses.replace(
        state,
        slot_start_s=jnp.where(column(len(waits), chain) == chain, jnp.inf, waits),
        free_s=free_s,
        # inf where a lane has nothing in hand and can start nothing: tasks that cannot run
        makespan_s=jnp.where(
            hand.done & counts, larger(state.makespan_s, finish_s), state.makespan_s
        ),
        times_s=times_s,
    )
    return state, take_in_hand(
        hand, padded, starts=starts, task=task, device=device, finish_s=finish_s
    )


def _release_reader(
    tables: _Tables, state: _State, hand: InHand, native: bool
) -> tuple[_State, InHand]:
    """Follows the next edge of each lane: tells the reader when what was made arrives."""
    padded, hold = tables.padded, tables.hold
    slots, dtype = _device_slots(padded.num_devices), state.free_s.dtype
    edge, later = next_edge(hand, padded)
    reader = hold(at(padded.edge_reader, edge).astype(dtype))
    where = tables.base + reader.astype(jnp.int32)
    there = hold(at(tables.placement, where))

    arrival_s, links = arrive(
        padded,
        tables.transfer_factor,
        state.links,
        edge=edge,
        source=hand.device,
        destination=there.astype(jnp.int32),
        request_s=hand.finish_s,
        native=native,
    )
    arrival_s = arrival_s if links is None else hold(arrival_s)
    pair = 2 * where
    ready_s = hold(larger(at(state.inputs, pair), arrival_s))
    missing = hold(at(state.inputs, pair + 1) - 1)
    inputs = write(state.inputs, pair, jnp.stack([ready_s, missing], axis=-1), native)

    chain = at(padded.chain, reader.astype(jnp.int32)).astype(dtype)
    slot = hold(jnp.where(missing == 0, chain, len(state.slot_start_s)))[None]
    entered = column(len(state.slot_start_s), slot) == slot
    start_s = hold(larger(ready_s, pick(state.free_s, there)))
    key = ready_s if tables.rank is None else hold(at(tables.rank, where))
    code = reader * slots + there
    state = dataclasses.replace(
        state,
        slot_start_s=jnp.where(entered, start_s[None], state.slot_start_s),
        slot_key=jnp.where(entered, key[None], state.slot_key),
        slot_code=jnp.where(entered, code[None], state.slot_code),
        inputs=inputs,
        links=links,
    )
    return state, later


def _device_slots(num_devices: int) -> int:
    """A power of two that holds every device: codes split without rounding."""
    return 1 << max(num_devices - 1, 1).bit_length()
