"""Executions in lock step under `duplex` links: one send and one receive engine per device.

Which waiting transfer an engine takes next depends on all that was requested until then, so
an arrival is not known when its producer starts, as it is under the links of
`chain_slots.py`. Here transfers are started like tasks: a step starts, in every lane (one
execution), the one thing that can start first, a transfer whose tensor's producer was
started, or a task whose inputs are all on their way. At one instant transfers go before
tasks, by (request time, item, destination); tasks by (queue key, id).

These are the event simulator's starts (DESIGN, rule 8). Let t be the least time at which
anything can start. What a step releases later can start no sooner than what released it
ends, hence not before t; and all that ends by t was started by an earlier step, which
has accounted for its end. So what can start at t is what waits in the event simulator once
it has drained t. A transfer of a later request, or with a busy engine, can start later only.

A released task has only started ancestors, so a slot per chain holds the tasks, as in
`chain_slots.py`. Transfers have a slot per read of a tensor; readers on one device fill
theirs with the same transfer, and it leaves them together.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.simulator.duplex_tables import EngineTables, count_inputs, make_tables
from doppler_jax.simulator.lanes import at, column, larger, largest, least, pick, write
from doppler_jax.types import pytree


@pytree
class _State:
    """L executions in progress over W slots for tasks and R for transfers."""

    slot_start_s: chex.Array  # [W, L] when the waiting task could start; inf: none waits
    slot_key: chex.Array  # [W, L] its ready time, or its rank
    slot_code: chex.Array  # [W, L] int32, its `EngineTables.task_code`
    request_s: chex.Array  # [R, L] when the waiting transfer was requested; inf: none waits
    engines_s: chex.Array  # [R, L] when both its engines have ended what they have started
    free_s: chex.Array  # [D, L] when the device has finished what it started
    inputs: chex.Array  # [L * (N + 1) * 2] pairs: latest arrival, inputs not on their way
    remaining: chex.Array  # [L] int32, tasks to start; 0 where nothing can start any more
    makespan_s: chex.Array  # [L]
    times_s: chex.Array | None  # [L * (N + 1) * 2] pairs: start, finish


@pytree
class _Started:
    """What each lane has just started, and the reads of what it brings."""

    device: chex.Array  # [L] int32, where it ends
    finish_s: chex.Array  # [L]
    first: chex.Array  # [L] int32
    count: chex.Array  # [L] int32


def run_duplex_links(
    shared: tuple[PaddedProblem, chex.Array | None],
    placement: chex.Array,
    rank: chex.Array | None,
    handling_s: chex.Array | None = None,
    *,
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
      schedule: whether the times of tasks are wanted.
      native: whether this is compiled as one CPU kernel (`lockstep.run_batch`).

    Returns:
      Makespans `[L]`; with `schedule` also starts and finishes `[L, N + 1]`, inf for
      tasks that never start.
    """
    padded, transfer_factor = shared
    tables = make_tables(padded, placement, rank, handling_s, transfer_factor)

    def step(state: _State) -> _State:
        state, started = _start_next(tables, state, native)
        return _tell_readers(tables, state, started, native)

    state = _begin(tables, placement, rank, schedule)
    state = jax.lax.while_loop(lambda state: largest(state.remaining) > 0, step, state)
    if state.times_s is None:
        return (state.makespan_s,)
    start_s, finish_s = jnp.moveaxis(state.times_s.reshape(*placement.shape, 2), -1, 0)
    return state.makespan_s, start_s, finish_s


def _begin(
    tables: EngineTables, placement: chex.Array, rank: chex.Array | None, schedule: bool
) -> _State:
    padded, dtype = tables.padded, tables.one.dtype
    lanes, rows = placement.shape
    head = padded.chain_head
    missing = count_inputs(tables)
    waits = (missing[head] == 0) & (head[:, None] < rows - 1)
    keys = jnp.zeros_like(placement) if rank is None else rank
    is_input = column(len(tables.reader), tables.reader) < tables.num_homes
    arrival_s = jnp.zeros((lanes, rows), dtype)
    return _State(
        slot_start_s=jnp.where(waits, 0, jnp.inf).astype(dtype),
        slot_key=keys.T[head].astype(dtype),
        slot_code=tables.task_code(head[:, None], placement.T[head]),
        request_s=jnp.where(is_input & (tables.transfer >= 0), 0, jnp.inf).astype(dtype),
        engines_s=jnp.zeros(tables.transfer.shape, dtype),
        free_s=jnp.zeros((padded.num_devices, lanes), dtype),
        inputs=jnp.stack([arrival_s, missing.T.astype(dtype)], axis=-1).reshape(-1),
        remaining=jnp.broadcast_to(padded.num_tasks, lanes).astype(jnp.int32),
        makespan_s=jnp.zeros(lanes, dtype),
        times_s=jnp.full(lanes * rows * 2, jnp.inf, dtype) if schedule else None,
    )


def _start_next(tables: EngineTables, state: _State, native: bool) -> tuple[_State, _Started]:
    """Starts what can start first in each lane."""
    could_s = larger(state.request_s, state.engines_s)
    transfer_s, transfer = _first(tables, could_s, state.request_s, tables.transfer)
    task_s, code = _first(tables, state.slot_start_s, state.slot_key, state.slot_code)
    carries = (transfer_s <= task_s) & (transfer_s < jnp.inf)
    runs = ~carries & (task_s < jnp.inf)

    transfer = jnp.where(carries, transfer, -1)
    code = jnp.where(runs, code, tables.task_code(tables.padded.padded_tasks, 0))
    state, task = _start_task(tables, state, runs, task_s, code, native)
    state, tensor = _start_transfer(tables, state, transfer_s, transfer)
    started = jax.tree.map(lambda a, b: jnp.where(carries, a, b), tensor, task)
    row = column(len(tables.reader), tables.reader)
    made = (row >= task.first[None]) & (row < (task.first + task.count)[None])
    requested = made & runs[None] & (tables.transfer >= 0)
    state = dataclasses.replace(
        state,
        request_s=jnp.where(requested, task.finish_s[None], state.request_s),
        remaining=jnp.where(carries | runs, state.remaining, 0),
    )
    return state, started


def _first(
    tables: EngineTables, start_s: chex.Array, key: chex.Array, code: chex.Array
) -> tuple[chex.Array, chex.Array]:
    """Returns when the first of what waits can start `[L]`, and its code `[L]`."""
    first_s = tables.hold(least(start_s))
    tied = start_s == first_s[None]
    first_key = tables.hold(least(jnp.where(tied, key, jnp.inf)))
    tied &= key == first_key[None]
    return first_s, tables.hold(least(jnp.where(tied, code, jnp.iinfo(code.dtype).max)))


def _start_task(
    tables: EngineTables,
    state: _State,
    here: chex.Array,
    start_s: chex.Array,
    code: chex.Array,
    native: bool,
) -> tuple[_State, _Started]:
    """Starts tasks in the lanes `here` `[L]`; in others the code is of the last task."""
    padded = tables.padded
    task, device = tables.task_of(code)
    seconds = at(padded.compute_s.reshape(-1), task * padded.num_devices + device)
    if tables.handling_s is not None:
        seconds += at(tables.handling_s, tables.base + task)
    finish_s = tables.hold(start_s + seconds)
    there = jnp.where(here, device, -1)[None]
    waits_s = jnp.where(
        tables.task_of(state.slot_code)[1] == there,
        larger(state.slot_start_s, finish_s[None]),
        state.slot_start_s,
    )
    devices = column(padded.num_devices, there)
    times_s = state.times_s
    if times_s is not None:
        pair = jnp.stack([start_s, finish_s], axis=-1)
        times_s = write(times_s, 2 * (tables.base + task), pair, native)
    state = dataclasses.replace(
        state,
        slot_start_s=jnp.where(state.slot_code == code[None], jnp.inf, waits_s),
        free_s=jnp.where(devices == there, finish_s[None], state.free_s),
        remaining=state.remaining - here.astype(state.remaining.dtype),
        makespan_s=jnp.where(here, larger(state.makespan_s, finish_s), state.makespan_s),
        times_s=times_s,
    )
    first = tables.num_homes + at(padded.first_edge, task)
    count = at(padded.num_edges, task)
    return state, _Started(device=device, finish_s=finish_s, first=first, count=count)


def _start_transfer(
    tables: EngineTables, state: _State, start_s: chex.Array, transfer: chex.Array
) -> tuple[_State, _Started]:
    """Starts the transfers `[L]`; -1 is none."""
    nothing = len(tables.reader) - 1
    leaves = (tables.transfer == transfer[None]) & (transfer >= 0)[None]
    row = least(jnp.where(leaves, column(nothing + 1, transfer), nothing))
    first = at(tables.first, row)
    source, destination = tables.ends_of(jnp.where(transfer >= 0, transfer, 0))
    finish_s = tables.hold(start_s + tables.move_s(first, source, destination))
    # -1 is no device, and what has no transfer never waits.
    source_, there = (jnp.where(transfer >= 0, d, -1)[None] for d in (source, destination))
    slot_source, slot_destination = tables.ends_of(tables.transfer)
    held = (slot_source == source_) | (slot_destination == there)
    state = dataclasses.replace(
        state,
        request_s=jnp.where(leaves, jnp.inf, state.request_s),
        engines_s=jnp.where(held, larger(state.engines_s, finish_s[None]), state.engines_s),
    )
    count = at(tables.count, first)
    return state, _Started(device=destination, finish_s=finish_s, first=first, count=count)


def _tell_readers(
    tables: EngineTables, state: _State, started: _Started, native: bool
) -> _State:
    """Tells the readers on its device when what was started ends there."""

    def tell(carry: tuple[chex.Array, _State]) -> tuple[chex.Array, _State]:
        k, state = carry
        return k + 1, _tell_reader(tables, state, started, k, native)

    most = largest(started.count)
    _, state = jax.lax.while_loop(lambda carry: carry[0] < most, tell, (jnp.int32(0), state))
    return state


def _tell_reader(
    tables: EngineTables, state: _State, started: _Started, k: chex.Array, native: bool
) -> _State:
    """Handles the k-th read of each started thing, where it has one."""
    hold, nothing = tables.hold, len(tables.reader) - 1
    reader = at(tables.reader, jnp.where(k < started.count, started.first + k, nothing))
    where = tables.base + reader
    there = at(tables.placement, where)
    arrives = there == started.device
    pair = 2 * where
    ready_s = hold(larger(at(state.inputs, pair), jnp.where(arrives, started.finish_s, 0)))
    missing = hold(at(state.inputs, pair + 1) - arrives.astype(ready_s.dtype))
    inputs = write(state.inputs, pair, jnp.stack([ready_s, missing], axis=-1), native)

    size = len(state.slot_start_s)
    chain = jnp.where(arrives & (missing == 0), at(tables.padded.chain, reader), size)[None]
    entered = column(size, chain) == chain
    start_s = hold(larger(ready_s, pick(state.free_s, there)))
    key = ready_s if tables.rank is None else hold(at(tables.rank, where))
    code = tables.task_code(reader, there)
    return dataclasses.replace(
        state,
        slot_start_s=jnp.where(entered, start_s[None], state.slot_start_s),
        slot_key=jnp.where(entered, key[None], state.slot_key),
        slot_code=jnp.where(entered, code[None], state.slot_code),
        inputs=inputs,
    )
