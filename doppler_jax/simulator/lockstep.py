"""The simulator for accelerators and for use inside other programs' `jit`: lock step.

A step starts, in every lane (one execution), the task of smallest (start time, queue key, id)
among those whose producers have all been started. Under links whose arrivals are known when
the producer starts (`parallel`, `serial`), that order of starts is the event simulator's.
A task is ready to be considered only after its ancestors started, so a chain
(`graphs/chains.py`) has one such task at most, and a slot per chain is enough.
Under `in_order` the next task is given, and nothing is looked for.

Starting a task releases its readers along its out-edges: a step starts a task in every lane
that has followed all out-edges of its last, and then follows one edge in every lane that has
one left. In whatever order a lane starts its tasks, that takes the same number of steps, so
all lanes end together. Were every lane to wait until all had followed theirs, most would be
idle on graphs where few tasks have many edges.

Everything is elementwise on `[slots, lanes]`, or gathers and writes of one number per lane.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.simulator.lanes import at, column, larger, least, pick, write
from doppler_jax.types import pytree

UNROLL = 4
"""Steps of an iteration on other platforms than the CPU, which ask the host after each."""

_AT_ONCE = 256
"""Placements of one chunk: its tables are of edges times devices."""


@pytree
class InHand:
    """The task that each lane started last, and those of its out-edges that are left."""

    edge: chex.Array  # [L] int32, the next one
    end: chex.Array  # [L] int32, behind the last one
    device: chex.Array  # [L] int32, where the task runs
    finish_s: chex.Array  # [L]

    @property
    def done(self) -> chex.Array:
        """Whether no edge is left `[L]`."""
        return self.edge == self.end


@pytree
class SerialLinks:
    """The D x D links of L executions."""

    free_s: chex.Array  # [L * D * D] when a link has carried all that was requested
    sent_s: chex.Array  # [D, L] when the tensor in hand reaches each device; -1 if not sent


@pytree
class _Tables:
    """What does not change during a run; per-task tables of L lanes are flat."""

    padded: PaddedProblem
    placement: chex.Array  # [L * (N + 1)] device of each task, as a float
    rank: chex.Array | None  # [L * (N + 1)] queue key; None under `fifo` and `in_order`
    order: chex.Array | None  # [L * (N + 1)] the tasks of `in_order`, the one of none behind
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
    started: chex.Array  # [L] int32, tasks that were started, under `in_order`
    free_s: chex.Array  # [D, L] when the device has finished what it started
    inputs: chex.Array  # [L * (N + 1) * 2] pairs: latest arrival, producers not started
    makespan_s: chex.Array  # [L]
    links: SerialLinks | None  # None under `parallel` links
    times_s: chex.Array | None  # [L * (N + 1) * 2] pairs: start, finish


def run_lockstep(
    shared: tuple[PaddedProblem, chex.Array | None],
    placement: chex.Array,
    rank: chex.Array | None,
    handling_s: chex.Array | None = None,
    *,
    serial: bool,
    in_order: bool,
    schedule: bool,
    native: bool,
) -> tuple[chex.Array, ...]:
    """Runs L executions to their end.

    Args:
      shared: the problem, and `[T, D]` factors of the transfers' durations or None. Times
        are in the problem's precision.
      placement: `[L, N + 1]` int32.
      rank: `[L, N + 1]` queue keys of `priority`, or None for `fifo`; under `in_order` the
        tasks by (rank, id), int32.
      handling_s: `[L, N + 1]` what tasks are longer by, or None.
      serial: whether a link carries one transfer at a time.
      in_order: whether devices take their tasks in a given order.
      schedule: whether the times of tasks are wanted.
      native: whether this is compiled as one CPU kernel (`lanes.run_batch`).

    Returns:
      Makespans `[L]`; with `schedule` also starts and finishes `[L, N + 1]`, inf for
      tasks that never start.
    """
    padded, transfer_factor = shared
    order = rank if in_order else None
    tables, state = _begin(
        padded, placement, None if in_order else rank, order, handling_s, transfer_factor,
        serial, schedule, native,
    )  # fmt: skip
    count, unroll = num_steps(padded), 1 if native else UNROLL

    def steps(i: chex.Array, carry: tuple[_State, InHand]) -> tuple[_State, InHand]:
        for k in range(unroll):
            counts = k == 0 or unroll * i + k < count  # the last iteration may have some spare
            if in_order:
                started = _start_next(tables, *carry, native=native)
            else:
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
    order: chex.Array | None,
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
        order=None if order is None else order.reshape(-1),
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
        started=jnp.zeros(lanes, jnp.int32),
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


def _start_next(
    tables: _Tables, state: _State, hand: InHand, *, native: bool
) -> tuple[_State, InHand]:
    """Starts the next task in order, in lanes that are done with their last."""
    padded, hold, order = tables.padded, tables.hold, tables.order
    assert order is not None
    devices, nobody = padded.num_devices, padded.padded_tasks
    task = jnp.where(hand.done, at(order, tables.base + state.started), nobody)
    starts, where = task != nobody, tables.base + task
    here = hold(at(tables.placement, where))
    device = here.astype(jnp.int32)
    start_s = hold(larger(at(state.inputs, 2 * where), pick(state.free_s, here)))
    seconds = at(padded.compute_s.reshape(-1), task * devices + device)
    if tables.handling_s is not None:
        seconds += at(tables.handling_s, where)
    finish_s = hold(start_s + seconds)
    mine = starts[None] & (column(devices, here) == here[None])
    times_s = state.times_s
    if times_s is not None:
        pair = jnp.stack([start_s, finish_s], axis=-1)
        times_s = write(times_s, 2 * where, pair, native)
    state = dataclasses.replace(
        state,
        free_s=jnp.where(mine, finish_s[None], state.free_s),
        makespan_s=jnp.where(starts, larger(state.makespan_s, finish_s), state.makespan_s),
        started=state.started + starts.astype(jnp.int32),
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
    if tables.order is not None:
        return dataclasses.replace(state, inputs=inputs, links=links), later

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


def num_steps(padded: PaddedProblem) -> chex.Array:
    """Returns the steps in which every lane starts all tasks and follows all edges."""
    steps = jnp.maximum(padded.num_edges, 1)  # a task without edges takes one, too
    return steps.sum(dtype=jnp.int32) - (len(steps) - padded.num_tasks)


def nothing_in_hand(lanes: int, dtype: jnp.dtype) -> InHand:
    """Returns what lanes have before they start their first task."""
    none = jnp.zeros(lanes, jnp.int32)
    return InHand(edge=none, end=none, device=none, finish_s=jnp.zeros(lanes, dtype))


def take_in_hand(
    hand: InHand,
    padded: PaddedProblem,
    *,
    starts: chex.Array,
    task: chex.Array,
    device: chex.Array,
    finish_s: chex.Array,
) -> InHand:
    """Returns what lanes have in hand after they started a task, where `starts` `[L]` says so.

    Args:
      hand: what they had.
      padded: the problem.
      starts: `[L]` bool.
      task: `[L]` int32.
      device: `[L]` int32, where the task runs.
      finish_s: `[L]`, when it ends.
    """
    first = at(padded.first_edge, task)
    return InHand(
        edge=jnp.where(starts, first, hand.edge),
        end=jnp.where(starts, first + at(padded.num_edges, task), hand.end),
        device=jnp.where(starts, device, hand.device),
        finish_s=jnp.where(starts, finish_s, hand.finish_s),
    )


def next_edge(hand: InHand, padded: PaddedProblem) -> tuple[chex.Array, InHand]:
    """Returns the edge that each lane follows next `[L]`, and what it has in hand then.

    Lanes that are done get the last edge, to the task that never runs.
    """
    nobody = padded.edge_reader.shape[0] - 1
    edge = jnp.where(hand.done, nobody, hand.edge)
    later = jnp.where(hand.done, hand.edge, hand.edge + 1)
    return edge, dataclasses.replace(hand, edge=later)


def arrive(
    padded: PaddedProblem,
    transfer_factor: chex.Array | None,
    links: SerialLinks | None,
    *,
    edge: chex.Array,
    source: chex.Array,
    destination: chex.Array,
    request_s: chex.Array,
    native: bool,
) -> tuple[chex.Array, SerialLinks | None]:
    """Sends the tensor of an edge of each lane to the edge's reader.

    Args:
      padded: the problem.
      transfer_factor: `[T * D]` of the transfers' durations, or None.
      links: None under `parallel` links.
      edge: `[L]` int32; the last is padding.
      source: `[L]` int32 device that made the tensor.
      destination: `[L]` int32 device of the reader.
      request_s: `[L]` when the tensor was made, seconds.
      native: see `lanes.run_batch`.

    Returns:
      Arrivals `[L]` in seconds, and the links after that.
    """
    link = source * padded.num_devices + destination
    move_s = at(padded.latency_s.reshape(-1), link) + at(padded.edge_bytes, edge) * at(
        padded.seconds_per_byte.reshape(-1), link
    )
    if transfer_factor is not None:
        tensor = at(padded.edge_tensor, edge)
        move_s *= at(transfer_factor, tensor * padded.num_devices + destination)
    if links is None:
        return request_s + move_s, None
    return send(
        links,
        source=source,
        destination=destination,
        request_s=request_s,
        move_s=move_s,
        opens=at(padded.edge_opens, edge),
        real=edge < padded.edge_reader.shape[0] - 1,
        native=native,
    )


def send(
    links: SerialLinks,
    *,
    source: chex.Array,
    destination: chex.Array,
    request_s: chex.Array,
    move_s: chex.Array,
    opens: chex.Array,
    real: chex.Array,
    native: bool,
) -> tuple[chex.Array, SerialLinks]:
    """Sends a tensor of each lane to a reader, unless its device has been sent it already.

    Args:
      links: as they are.
      source: `[L]` int32.
      destination: `[L]` int32, device of the reader.
      request_s: `[L]`.
      move_s: `[L]` duration of the transfer.
      opens: `[L]` bool, whether the tensor is another one than in the call before.
      real: `[L]` bool; where not, nothing is sent.
      native: see `lanes.run_batch`.

    Returns:
      Arrivals `[L]`, and the links as they are then.
    """
    devices, lanes = links.sent_s.shape
    there = destination.astype(request_s.dtype)
    sent_s = jnp.where(opens[None], -1.0, links.sent_s)
    earlier_s = pick(sent_s, there)
    first_link = jnp.arange(lanes, dtype=source.dtype) * devices**2
    link = first_link + source * devices + destination
    free_s = at(links.free_s, link)
    stays = source == destination
    new_s = jnp.where(stays, request_s, larger(free_s, request_s) + move_s)
    arrival_s = jnp.where(earlier_s >= 0, earlier_s, new_s)
    carried = real & ~stays & (earlier_s < 0)
    return arrival_s, SerialLinks(
        free_s=write(links.free_s, link, jnp.where(carried, new_s, free_s)[:, None], native),
        sent_s=jnp.where(column(devices, there) == there[None], arrival_s[None], sent_s),
    )


def carry_inputs(
    padded: PaddedProblem, placement: chex.Array, native: bool
) -> tuple[chex.Array, SerialLinks]:
    """Moves graph inputs from their homes, at time 0 and in the order of their ids.

    Returns when each task's are there `[L, N + 1]`, and the links after that.
    """
    lanes, rows = placement.shape
    devices, dtype = padded.num_devices, padded.compute_s.dtype
    where = jnp.arange(lanes, dtype=jnp.int32) * rows
    flat = placement.reshape(-1)
    links = SerialLinks(
        free_s=jnp.zeros(lanes * devices**2, dtype),
        sent_s=jnp.full((devices, lanes), -1.0, dtype),
    )

    def one(
        i: chex.Array, carry: tuple[chex.Array, SerialLinks]
    ) -> tuple[chex.Array, SerialLinks]:
        ready_s, links = carry
        read = where + padded.home_reader[i]
        destination = at(flat, read)
        source = jnp.broadcast_to(padded.home_device[i], (lanes,))
        move_s = at(padded.latency_s.reshape(-1), source * devices + destination)
        move_s += padded.home_bytes[i] * at(
            padded.seconds_per_byte.reshape(-1), source * devices + destination
        )
        arrival_s, links = send(
            links,
            source=source,
            destination=destination,
            request_s=jnp.zeros(lanes, dtype),
            move_s=move_s,
            opens=jnp.broadcast_to(padded.home_opens[i], (lanes,)),
            real=jnp.broadcast_to(padded.home_reader[i] < rows - 1, (lanes,)),
            native=native,
        )
        latest_s = larger(at(ready_s, read), arrival_s)
        return write(ready_s, read, latest_s[:, None], native), links

    ready_s = jnp.zeros(lanes * rows, dtype)
    if len(padded.home_reader) > 0:
        count = len(padded.home_reader)
        ready_s, links = jax.lax.fori_loop(0, count, one, (ready_s, links))
    return ready_s.reshape(lanes, rows), links


def handling_seconds(padded: PaddedProblem, placements: chex.Array) -> chex.Array | None:
    """Returns what tasks are longer by `[B, N + 1]` for what they send and receive, or None.

    Args:
      padded: the problem; None is returned if its devices spend no time.
      placements: `[B, N + 1]` int32.
    """
    if padded.handling_s is None or padded.handling_s_per_byte is None:
        return None
    return jax.lax.map(lambda one: _of_one(padded, one), placements, batch_size=_AT_ONCE)


def _of_one(padded: PaddedProblem, placement: chex.Array) -> chex.Array:
    """Returns the seconds `[N + 1]` of one placement `[N + 1]`."""
    rows, edges = len(placement), len(padded.edge_reader)
    tasks, edge = jnp.arange(rows, dtype=jnp.int32), jnp.arange(edges, dtype=jnp.int32)
    maker = jnp.repeat(tasks, padded.num_edges, total_repeat_length=edges)
    reader = padded.edge_reader
    there = placement[reader]
    # Edges of a tensor are neighbours, readers in the order of their ids.
    devices = jnp.arange(padded.num_devices, dtype=jnp.int32)
    reads = (there[:, None] == devices[None]).astype(jnp.int32)
    earlier = jnp.cumsum(reads, axis=0, dtype=jnp.int32) - reads
    opening = jax.lax.cummax(jnp.where(padded.edge_opens, edge, 0))
    mine = jnp.take_along_axis(earlier - earlier[opening], there[:, None], axis=1)[:, 0]
    moved = (mine == 0) & (there != placement[maker]) & (reader < rows - 1)

    dtype = padded.compute_s.dtype
    amounts = jnp.stack([jnp.ones(edges, dtype), padded.edge_bytes], axis=1)
    amounts = jnp.where(moved[:, None], amounts, 0)
    count, num_bytes = (
        jax.ops.segment_sum(amounts, maker, rows) + jax.ops.segment_sum(amounts, reader, rows)
    ).T
    each_s, per_byte = (
        jnp.asarray(y)[placement] for y in (padded.handling_s, padded.handling_s_per_byte)
    )
    return count * each_s + num_bytes * per_byte
