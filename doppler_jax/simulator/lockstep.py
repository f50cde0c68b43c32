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
from functools import partial

import chex
import jax
import jax.numpy as jnp

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.simulator.disciplines import Discipline
from doppler_jax.simulator.lanes import at, column, larger, least, pick, write
from doppler_jax.types import pytree

UNROLL = 4
"""Steps of an iteration on other platforms than the CPU, which ask the host after each."""

_AT_ONCE = 256
"""Placements of one chunk: its tables are of edges times devices."""


@pytree
class SerialLinks:
    """The D x D links of L executions."""

    free_s: chex.Array  # [L * D * D] when a link has carried all that was requested
    sent_s: chex.Array  # [D, L] when the tensor in hand reaches each device; -1 if not sent


@dataclasses.dataclass(frozen=True)
class _Tables:
    """What does not change during a run; per-task tables of L lanes are flat."""

    padded: PaddedProblem
    placement: chex.Array  # [L * (N + 1)] device of each task, as a float
    rank: chex.Array | None  # [L * (N + 1)] queue key; None under `fifo` and `in_order`
    order: chex.Array | None  # [L * (N + 1)] the tasks of `in_order`, the one of none behind
    handling_s: chex.Array | None  # [L * (N + 1)], see `handling.py`
    factors: tuple[chex.Array, chex.Array] | None  # [T, D] and [I, D], noise of transfers
    base: chex.Array  # [L] int32, where a lane's tasks begin
    one: chex.Array  # [] 1.0, see `hold`
    native: bool  # whether this is compiled as one CPU kernel (`lanes.run_batch`)

    def hold(self, x: chex.Array) -> chex.Array:
        """Returns x. XLA repeats cheap operations in each of their readers, but no division."""
        return x / self.one

    def write(self, table: chex.Array, index: chex.Array, *columns: chex.Array) -> chex.Array:
        """Returns the flat table with one number of each column `[L]` from `index[l]` on."""
        return write(table, index, jnp.stack(columns, axis=-1), self.native)

    def move_s(
        self, source: chex.Array, destination: chex.Array, num_bytes: chex.Array
    ) -> chex.Array:
        """Returns the seconds `[L]` of a transfer, from device and to device `[L]` int32."""
        link, padded = source * self.padded.num_devices + destination, self.padded
        seconds_per_byte = at(padded.seconds_per_byte.reshape(-1), link)
        return at(padded.latency_s.reshape(-1), link) + num_bytes * seconds_per_byte

    def noisy(
        self, move_s: chex.Array, k: int, items: chex.Array, i: chex.Array, there: chex.Array
    ) -> chex.Array:
        """Returns seconds `[L]` of moving `items[i]` times the k-th factor of device `[L]`."""
        if self.factors is None:
            return move_s  # before `items` is looked at: XLA aborts at tables without use
        where = at(items, i) * self.padded.num_devices + there
        return move_s * at(self.factors[k].reshape(-1), where)

    def home(self, i: chex.Array) -> chex.Array:
        """Returns the device `[L]` on which the graph input of the i-th read lies, int32."""
        maker = self.padded.home_maker[i]
        made = at(self.placement, self.base + maker).astype(jnp.int32)
        return jnp.where(maker < self.padded.padded_tasks, made, self.padded.home_device[i])


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
    # The task that each lane started last is in its hand while out-edges of it are left.
    edge: chex.Array  # [L] int32, the next one
    end: chex.Array  # [L] int32, behind the last one
    source: chex.Array  # [L] int32, where the task runs
    made_s: chex.Array  # [L] when it ends

    @property
    def done(self) -> chex.Array:
        """Whether no edge is left `[L]`."""
        return self.edge == self.end


def run_lockstep(
    shared: tuple[PaddedProblem, tuple[chex.Array, chex.Array] | None],
    placement: chex.Array,
    rank: chex.Array | None,
    handling_s: chex.Array | None = None,
    *,
    serial: bool,
    discipline: Discipline,
    schedule: bool,
    native: bool,
) -> tuple[chex.Array, ...]:
    """Runs L executions to their end.

    Args:
      shared: the problem, and the factors of the durations of transfers, `[T, D]` of tensors
        and `[I, D]` of graph inputs, or None. Times are in the problem's precision.
      placement: `[L, N + 1]` int32.
      rank: `[L, N + 1]` queue keys of `priority`, or None for `fifo`; under `in_order` the
        tasks by (rank, id), int32.
      handling_s: `[L, N + 1]` what tasks are longer by, or None.
      serial: whether a link carries one transfer at a time.
      discipline: how devices choose.
      schedule: whether the times of tasks are wanted.
      native: whether this is compiled as one CPU kernel (`lanes.run_batch`).

    Returns:
      Makespans `[L]`; with `schedule` also starts and finishes `[L, N + 1]`, inf for
      tasks that never start.
    """
    padded, factors = shared
    lanes, rows = placement.shape
    dtype = jnp.result_type(padded.compute_s)
    tables = _Tables(
        padded=padded,
        placement=placement.reshape(-1).astype(dtype),
        rank=None if rank is None or discipline.waits else rank.reshape(-1).astype(dtype),
        order=rank.reshape(-1) if rank is not None and discipline.waits else None,
        handling_s=None if handling_s is None else handling_s.reshape(-1),
        factors=factors,
        base=jnp.arange(lanes, dtype=jnp.int32) * rows,
        # A constant would be divided by at compile time; this one XLA cannot see through.
        one=jnp.where(padded.num_tasks >= 0, 1, 2).astype(dtype),
        native=native,
    )
    count, unroll = num_steps(padded), 1 if native else UNROLL

    def steps(i: chex.Array, state: _State) -> _State:
        for k in range(unroll):
            counts = k == 0 or unroll * i + k < count  # the last iteration may have some spare
            start = _start_next if discipline.waits else partial(_start_best, counts=counts)
            state = _release_reader(tables, start(tables, state))
        return state

    begun = _begin(tables, placement, serial=serial, schedule=schedule)
    iterations = jax.lax.div(count + (unroll - 1), jnp.int32(unroll))
    state = jax.lax.fori_loop(0, iterations, steps, begun)
    if state.times_s is None:
        return (state.makespan_s,)
    start_s, finish_s = jnp.moveaxis(state.times_s.reshape(lanes, rows, 2), -1, 0)
    return state.makespan_s, start_s, finish_s


def _begin(tables: _Tables, placement: chex.Array, *, serial: bool, schedule: bool) -> _State:
    """Returns the state at time 0, graph inputs moved, of placements `[L, N + 1]`."""
    padded, (lanes, rows) = tables.padded, placement.shape
    dtype, devices = tables.placement.dtype, padded.num_devices
    ready_s, links = _carry_inputs(tables, rows, serial=serial)
    head = padded.chain_head
    waits = (padded.num_producers[head] == 0) & (head < rows - 1)
    slot_start_s = jnp.where(waits[:, None], ready_s.T[head], jnp.inf)
    missing = jnp.broadcast_to(padded.num_producers.astype(dtype), (lanes, rows))
    code = head[:, None] * _device_slots(devices) + placement.T[head]
    rank, none = tables.rank, jnp.zeros(lanes, jnp.int32)
    return _State(
        slot_start_s=slot_start_s,
        slot_key=slot_start_s if rank is None else rank.reshape(lanes, rows).T[head],
        slot_code=code.astype(dtype),
        free_s=jnp.zeros((devices, lanes), dtype),
        inputs=jnp.stack([ready_s, missing], axis=-1).reshape(-1),
        makespan_s=jnp.zeros(lanes, dtype),
        links=links,
        started=none,
        times_s=jnp.full(lanes * rows * 2, jnp.inf, dtype) if schedule else None,
        edge=none,
        end=none,
        source=none,
        made_s=jnp.zeros(lanes, dtype),
    )


def _start_best(tables: _Tables, state: _State, *, counts: chex.Array | bool) -> _State:
    """Starts the best waiting task, in lanes that are done with their last.

    A step that does not count comes when all is over, and changes nothing.
    """
    padded, hold = tables.padded, tables.hold
    slots = _device_slots(padded.num_devices)
    nobody = jnp.asarray(padded.padded_tasks * slots, state.slot_code.dtype)

    start_s = hold(least(state.slot_start_s))
    tied = state.slot_start_s == start_s[None]
    key = hold(least(jnp.where(tied, state.slot_key, jnp.inf)))
    tied &= state.slot_key == key[None]
    code = hold(least(jnp.where(tied, state.slot_code, nobody)))
    starts = state.done & (start_s < jnp.inf)
    code = jnp.where(starts, code, nobody).astype(jnp.int32)
    task, device = code // slots, code % slots

    # inf where a lane has nothing in hand and can start nothing: tasks that cannot run
    ends = state.done & counts
    state, here, finish_s = _start(tables, state, task, device, start_s, starts, ends)
    slot_device = state.slot_code - jnp.floor(state.slot_code / slots) * slots
    waits = jnp.where(
        slot_device == here, larger(state.slot_start_s, finish_s[None]), state.slot_start_s
    )
    chain = jnp.where(starts, at(padded.chain, task), len(waits))
    chain = tables.hold(chain.astype(start_s.dtype))[None]
    waits = jnp.where(column(len(waits), chain) == chain, jnp.inf, waits)
    return dataclasses.replace(state, slot_start_s=waits)


def _start_next(tables: _Tables, state: _State) -> _State:
    """Starts the next task in order, in lanes that are done with their last."""
    nobody, order = tables.padded.padded_tasks, tables.order
    assert order is not None
    task = jnp.where(state.done, at(order, tables.base + state.started), nobody)
    starts, where = task != nobody, tables.base + task
    here = tables.hold(at(tables.placement, where))
    start_s = tables.hold(larger(at(state.inputs, 2 * where), pick(state.free_s, here)))
    state = dataclasses.replace(state, started=state.started + starts.astype(jnp.int32))
    device = here.astype(jnp.int32)
    return _start(tables, state, task, device, start_s, starts, starts)[0]


def _start(
    tables: _Tables,
    state: _State,
    task: chex.Array,
    device: chex.Array,
    start_s: chex.Array,
    starts: chex.Array,
    ends: chex.Array,
) -> tuple[_State, chex.Array, chex.Array]:
    """Starts a task `[L]` on its device `[L]`, in lanes where `starts` `[L]` says so.

    Returns the state, its makespan moved where `ends` `[L]` says so; the device as a float
    `[1, L]`, D where nothing starts; and the finish `[L]`.
    """
    padded, where, times_s = tables.padded, tables.base + task, state.times_s
    seconds = at(padded.compute_s.reshape(-1), task * padded.num_devices + device)
    if tables.handling_s is not None:
        seconds += at(tables.handling_s, where)
    finish_s = tables.hold(start_s + seconds)
    here = jnp.where(starts, device, padded.num_devices).astype(start_s.dtype)
    here = tables.hold(here)[None]
    if times_s is not None:
        times_s = tables.write(times_s, 2 * where, start_s, finish_s)
    first = at(padded.first_edge, task)
    state = dataclasses.replace(
        state,
        free_s=jnp.where(column(len(state.free_s), here) == here, finish_s[None], state.free_s),
        makespan_s=jnp.where(ends, larger(state.makespan_s, finish_s), state.makespan_s),
        times_s=times_s,
        edge=jnp.where(starts, first, state.edge),
        end=jnp.where(starts, first + at(padded.num_edges, task), state.end),
        source=jnp.where(starts, device, state.source),
        made_s=jnp.where(starts, finish_s, state.made_s),
    )
    return state, here, finish_s


def _release_reader(tables: _Tables, state: _State) -> _State:
    """Follows the next edge of each lane: tells the reader when what was made arrives.

    Lanes that are done get the last edge, to the task that never runs.
    """
    padded, hold, dtype = tables.padded, tables.hold, state.free_s.dtype
    slots, last = _device_slots(padded.num_devices), padded.edge_reader.shape[0] - 1
    edge = jnp.where(state.done, last, state.edge)
    later = jnp.where(state.done, state.edge, state.edge + 1)
    reader = hold(at(padded.edge_reader, edge).astype(dtype))
    where = tables.base + reader.astype(jnp.int32)
    there = hold(at(tables.placement, where))

    destination = there.astype(jnp.int32)
    move_s = tables.move_s(state.source, destination, at(padded.edge_bytes, edge))
    move_s = tables.noisy(move_s, 0, padded.edge_tensor, edge, destination)
    arrival_s, links = state.made_s + move_s, None
    if state.links is not None:
        opens, ends = at(padded.edge_opens, edge), (state.source, destination)
        arrival_s, links = _send(
            tables, state.links, ends, state.made_s, move_s, opens, edge < last
        )
        arrival_s = hold(arrival_s)
    ready_s = hold(larger(at(state.inputs, 2 * where), arrival_s))
    missing = hold(at(state.inputs, 2 * where + 1) - 1)
    inputs = tables.write(state.inputs, 2 * where, ready_s, missing)
    state = dataclasses.replace(state, inputs=inputs, links=links, edge=later)
    if tables.order is not None:
        return state

    chain = at(padded.chain, reader.astype(jnp.int32)).astype(dtype)
    slot = hold(jnp.where(missing == 0, chain, len(state.slot_start_s)))[None]
    entered = column(len(state.slot_start_s), slot) == slot
    start_s = hold(larger(ready_s, pick(state.free_s, there)))
    key = ready_s if tables.rank is None else hold(at(tables.rank, where))
    code = reader * slots + there
    return dataclasses.replace(
        state,
        slot_start_s=jnp.where(entered, start_s[None], state.slot_start_s),
        slot_key=jnp.where(entered, key[None], state.slot_key),
        slot_code=jnp.where(entered, code[None], state.slot_code),
    )


def _device_slots(num_devices: int) -> int:
    """A power of two that holds every device: codes split without rounding."""
    return 1 << max(num_devices - 1, 1).bit_length()


def num_steps(padded: PaddedProblem) -> chex.Array:
    """Returns the steps in which every lane starts all tasks and follows all edges."""
    steps = jnp.maximum(padded.num_edges, 1)  # a task without edges takes one, too
    return steps.sum(dtype=jnp.int32) - (len(steps) - padded.num_tasks)


def _send(
    tables: _Tables,
    links: SerialLinks,
    ends: tuple[chex.Array, chex.Array],
    request_s: chex.Array,
    move_s: chex.Array,
    opens: chex.Array,
    real: chex.Array,
) -> tuple[chex.Array, SerialLinks]:
    """Sends a tensor of each lane to a reader, unless its device has been sent it already.

    Args:
      tables: of the run.
      links: as they are.
      ends: device `[L]` that has the tensor, and device `[L]` of the reader, int32.
      request_s: `[L]`.
      move_s: `[L]` duration of the transfer.
      opens: `[L]` or `[]` bool, whether the tensor is another one than in the call before.
      real: `[L]` or `[]` bool; where not, nothing is sent.

    Returns:
      Arrivals `[L]`, and the links as they are then.
    """
    (source, destination), (devices, lanes) = ends, links.sent_s.shape
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
        free_s=tables.write(links.free_s, link, jnp.where(carried, new_s, free_s)),
        sent_s=jnp.where(column(devices, there) == there[None], arrival_s[None], sent_s),
    )


def _carry_inputs(
    tables: _Tables, rows: int, *, serial: bool
) -> tuple[chex.Array, SerialLinks | None]:
    """Moves graph inputs from their homes, at time 0 and in the order of their ids.

    Returns when each task's are there `[L, N + 1]`, N + 1 being `rows`, and the links then.
    """
    padded, lanes, devices = tables.padded, len(tables.base), tables.padded.num_devices
    none, links = jnp.zeros(lanes, tables.placement.dtype), None
    if serial:
        links = SerialLinks(
            free_s=jnp.zeros(lanes * devices**2, none.dtype),
            sent_s=jnp.full((devices, lanes), -1.0, none.dtype),
        )

    def one(
        i: chex.Array, carry: tuple[chex.Array, SerialLinks | None]
    ) -> tuple[chex.Array, SerialLinks | None]:
        ready_s, links = carry
        read = tables.base + padded.home_reader[i]
        destination = at(tables.placement, read).astype(jnp.int32)
        source = tables.home(i)
        arrival_s = tables.move_s(source, destination, padded.home_bytes[i])
        arrival_s = tables.noisy(arrival_s, 1, padded.home_input, i, destination)
        if links is not None:
            opens, real = (
                jnp.broadcast_to(a, (lanes,))
                for a in (padded.home_opens[i], padded.home_reader[i] < rows - 1)
            )
            ends = source, destination
            arrival_s, links = _send(tables, links, ends, none, arrival_s, opens, real)
        latest_s = larger(at(ready_s, read), arrival_s)
        return tables.write(ready_s, read, latest_s), links

    ready_s = jnp.zeros(lanes * rows, none.dtype)
    if count := len(padded.home_reader):
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

    def of_one(placement: chex.Array) -> chex.Array:
        rows, edges = len(placement), len(padded.edge_reader)
        tasks = jnp.arange(rows, dtype=jnp.int32)
        maker = jnp.repeat(tasks, padded.num_edges, total_repeat_length=edges)
        read = padded.edge_reader, padded.edge_opens, padded.edge_bytes
        amounts = _received(placement, placement[maker], *read, padded.num_devices)
        total = jax.ops.segment_sum(amounts, maker, rows)
        total += jax.ops.segment_sum(amounts, padded.edge_reader, rows)
        if len(padded.home_reader):
            read = padded.home_reader, padded.home_opens, padded.home_bytes
            is_made = padded.home_maker < rows - 1
            home = jnp.where(is_made, placement[padded.home_maker], padded.home_device)
            amounts = _received(placement, home, *read, padded.num_devices)
            total += jax.ops.segment_sum(amounts, padded.home_reader, rows)
        count, num_bytes = total.T
        each_s, per_byte = (
            jnp.asarray(y)[placement] for y in (padded.handling_s, padded.handling_s_per_byte)
        )
        return count * each_s + num_bytes * per_byte

    return jax.lax.map(of_one, placements, batch_size=_AT_ONCE)


def _received(
    placement: chex.Array,
    source: chex.Array,
    reader: chex.Array,
    opens: chex.Array,
    num_bytes: chex.Array,
    num_devices: int,
) -> chex.Array:
    """Returns 1 and the bytes `[R, 2]` of reads that bring an item to a device, else zeros.

    Args:
      placement: `[N + 1]` int32.
      source: `[R]` device that has the item.
      reader: `[R]` int32. Reads of an item are neighbours, by reader.
      opens: `[R]` whether a read is the first one of its item.
      num_bytes: `[R]`.
      num_devices: D.
    """
    there, read = placement[reader], jnp.arange(len(reader), dtype=jnp.int32)
    devices = jnp.arange(num_devices, dtype=jnp.int32)
    reads = (there[:, None] == devices[None]).astype(jnp.int32)
    earlier = jnp.cumsum(reads, axis=0, dtype=jnp.int32) - reads
    opening = jax.lax.cummax(jnp.where(opens, read, 0))
    mine = jnp.take_along_axis(earlier - earlier[opening], there[:, None], axis=1)[:, 0]
    moved = (mine == 0) & (there != source) & (reader < len(placement) - 1)
    amounts = jnp.stack([jnp.ones(len(reader), num_bytes.dtype), num_bytes], axis=1)
    return jnp.where(moved[:, None], amounts, 0)
