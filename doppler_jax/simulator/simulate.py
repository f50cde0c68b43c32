"""The vectorised simulator: many placements of one graph at once, jit-compiled.

A step starts one task: the one of smallest (start time, queue key, id) among the
first unstarted tasks of the chains (`graphs/chains.py`) whose producers have all been
started. Under `parallel` links that order of starts is the event simulator's
(DESIGN, rule 8): a task not yet considered has an unstarted ancestor, and
cannot start before it. The batch lies on the trailing axis, so that a step is a few
vector operations; it is cut into chunks that stay in cache.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.costs.build import check_costs
from doppler_jax.graphs.instance import Instance, make_instance
from doppler_jax.types import Costs, TaskGraph, pytree

QUEUES = ("fifo", "priority")
CHUNK = 128
"""Placements simulated together: enough for vector operations, few enough for the cache."""


@pytree
class SimulationResult:
    """Outcome of B placements of N tasks, in seconds; no schedule unless asked for."""

    makespan_s: chex.Array  # [B]
    start_s: chex.Array | None  # [B, N]
    finish_s: chex.Array | None  # [B, N]


def simulate(
    graph: TaskGraph,
    costs: Costs,
    placements: ArrayLike,
    *,
    queue: str = "fifo",
    priority: ArrayLike | None = None,
    schedule: bool = True,
) -> SimulationResult:
    """Simulates the work-conserving execution of placements under `parallel` links.

    Args:
      graph: the task graph, N tasks; N = 0 is legal.
      costs: its costs on D devices, seconds.
      placements: `[B, N]` int, device of each task; `[N]` is taken as one placement.
      queue: `fifo`, or `priority`, where a device starts the ready task of least rank.
      priority: `[N]` or `[B, N]` rank of each task, for `priority` only.
      schedule: whether start and finish of every task are wanted, or makespans only.

    Returns:
      Makespans, and with `schedule` the start and finish of every task, as NumPy arrays.
      Computed in float64, as by the oracle: in float32 rounding can order two events that
      are close, and move a makespan by percents.

    Raises:
      ValueError: a shape is wrong, or a placement names a device that does not exist.
    """
    check_costs(graph, costs)
    placements = check_placements(graph, costs, placements)
    ranks = _check_priority(graph, placements, queue, priority)
    with jax.enable_x64(True):
        instance = make_instance(graph, costs, np.float64)
        padding = ((0, 0), (0, instance.padded_tasks - graph.num_tasks))
        result = simulate_instance(
            instance,
            np.pad(placements, padding),
            None if ranks is None else np.pad(ranks, padding),
            schedule=schedule,
        )
        result = jax.tree.map(np.asarray, result)
    if not schedule:
        return result
    n = graph.num_tasks
    return SimulationResult(
        makespan_s=result.makespan_s,
        start_s=result.start_s[:, :n],
        finish_s=result.finish_s[:, :n],
    )


def check_placements(graph: TaskGraph, costs: Costs, placements: ArrayLike) -> np.ndarray:
    """Returns the placements as int32 `[B, N]`, or raises a `ValueError` that says why not."""
    array = np.atleast_2d(np.asarray(placements))
    if array.ndim != 2 or array.shape[1] != graph.num_tasks:
        raise ValueError(
            f"placements have shape {np.shape(placements)}, expected [B, {graph.num_tasks}]"
        )
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"placements must hold integers, hold {array.dtype}")
    bad = np.argwhere((array < 0) | (array >= costs.num_devices))
    if len(bad):
        b, v = bad[0]
        raise ValueError(
            f"placement {b} puts task {v} on device {array[b, v]}; "
            f"devices are 0 to {costs.num_devices - 1}"
        )
    return array.astype(np.int32)


def _check_priority(
    graph: TaskGraph, placements: np.ndarray, queue: str, priority: ArrayLike | None
) -> np.ndarray | None:
    if queue not in QUEUES:
        raise ValueError(f"unknown queue {queue!r}; known: {', '.join(QUEUES)}")
    if (queue == "priority") != (priority is not None):
        raise ValueError("give a priority with queue 'priority', and only with it")
    if priority is None:
        return None
    ranks = np.atleast_2d(np.asarray(priority, np.float64))
    if ranks.shape[-1] != graph.num_tasks or ranks.shape[0] not in (1, len(placements)):
        raise ValueError(f"priority has shape {np.shape(priority)}, expected [N] or [B, N]")
    return np.broadcast_to(ranks, placements.shape)


@partial(jax.jit, static_argnames="schedule")
def simulate_instance(
    instance: Instance,
    placements: chex.Array,
    priority: chex.Array | None = None,
    *,
    schedule: bool = False,
) -> SimulationResult:
    """Simulates padded placements `[B, N]`; pure, unchecked, for use inside other jits.

    Works in the precision of the instance: training uses float32.
    With `priority` `[B, N]` the queue is `priority`, without it `fifo`.
    """
    batch = placements.shape[0]
    chunk = min(CHUNK, max(batch, 1))
    count = -(-batch // chunk)

    def lanes(array: chex.Array) -> chex.Array:  # [B, N] to [chunks, N + 1, chunk]
        array = jnp.pad(array, ((0, count * chunk - batch), (0, 1)))
        return jnp.swapaxes(array.reshape(count, chunk, -1), 1, 2)

    columns = (lanes(placements), None if priority is None else lanes(priority))
    out = jax.lax.map(lambda c: _simulate_chunk(instance, *c, schedule=schedule), columns)
    makespan_s, *tasks = (_unchunk(array)[:batch] for array in out)
    start_s, finish_s = (array[:, :-1] for array in tasks) if schedule else (None, None)
    return SimulationResult(makespan_s=makespan_s, start_s=start_s, finish_s=finish_s)


def _unchunk(array: chex.Array) -> chex.Array:
    """`[chunks, ..., chunk]` to `[chunks * chunk, ...]`."""
    array = jnp.moveaxis(array, -1, 1)
    return array.reshape(-1, *array.shape[2:])


@pytree
class _State:
    """C executions in progress, over W chains; times in seconds."""

    head: chex.Array  # [W, C] int32, first unstarted task of the chain
    device: chex.Array  # [W, C] int32, where it will run
    ready_s: chex.Array  # [W, C] latest arrival from its started producers
    missing: chex.Array  # [W, C] int32, its producers that have not started
    rank: chex.Array  # [W, C] its priority; None under `fifo`
    free_s: chex.Array  # [D, C] when the device has finished what it started
    start_s: chex.Array  # [N + 1, C]; None if no schedule is wanted
    finish_s: chex.Array  # [N + 1, C] inf until started
    makespan_s: chex.Array  # [C]


def _simulate_chunk(
    instance: Instance, placement: chex.Array, rank: chex.Array | None, *, schedule: bool
) -> tuple[chex.Array, ...]:
    """Runs C placements `[N + 1, C]`; returns makespans, then starts and finishes if asked."""
    rows, lanes = placement.shape

    def step(_: int, state: _State) -> _State:
        chosen, start_s = _choose(state, rows - 1)
        return _start(instance, placement, rank, state, chosen, start_s)

    dtype = jnp.result_type(instance.compute_s)
    nothing = jnp.full((rows, lanes), jnp.inf, dtype)
    head = jnp.broadcast_to(instance.chain_head[:, None], (len(instance.chain_head), lanes))
    device, ready_s, missing = _enter(instance, placement, nothing, head)
    state = _State(
        head=head,
        device=device,
        ready_s=ready_s,
        missing=missing,
        rank=None if rank is None else jnp.take_along_axis(rank, head, 0),
        free_s=jnp.zeros((instance.num_devices, lanes), dtype),
        start_s=nothing if schedule else None,
        finish_s=nothing,
        makespan_s=jnp.zeros(lanes, dtype),
    )
    state = jax.lax.fori_loop(0, instance.num_tasks, step, state)
    if not schedule:
        return (state.makespan_s,)
    return state.makespan_s, state.start_s, state.finish_s


def _choose(state: _State, nobody: int) -> tuple[chex.Array, chex.Array]:
    """Returns the task `[C]` that starts next and when `[C]`."""
    free_s = _select(state.free_s, state.device)
    start_s = jnp.where(state.missing > 0, jnp.inf, jnp.maximum(state.ready_s, free_s))
    start_s = jnp.where(state.head == nobody, jnp.inf, start_s)
    first_s = start_s.min(0, keepdims=True)
    tied = (start_s == first_s) & (state.head != nobody)
    key = state.ready_s if state.rank is None else state.rank
    least = jnp.where(tied, key, jnp.inf).min(0, keepdims=True)
    chosen = jnp.where(tied & (key == least), state.head, nobody)
    return chosen.min(0), first_s[0]


def _select(table: chex.Array, index: chex.Array) -> chex.Array:
    """Returns `table[index[w, c], c]`, by comparisons: devices are few, gathers are slow."""
    chosen = jnp.zeros(index.shape, table.dtype)
    for d in range(table.shape[0]):
        chosen = jnp.where(index == d, table[d][None], chosen)
    return chosen


def _start(
    instance: Instance,
    placement: chex.Array,
    rank: chex.Array | None,
    state: _State,
    task: chex.Array,
    start_s: chex.Array,
) -> _State:
    """Starts `task` `[C]` at `start_s` `[C]` and moves its chain on."""
    lane = jnp.arange(task.shape[0], dtype=jnp.int32)
    here = placement[task, lane]
    finish_s = start_s + instance.compute_s[task, here]
    devices = jnp.arange(instance.num_devices, dtype=jnp.int32)[:, None]
    finishes = state.finish_s.at[task, lane].set(finish_s)

    readers = instance.succ_task[task].T  # [S, C]
    arrival_s = finish_s[None] + _move_s(
        instance, instance.succ_bytes[task].T, here[None], placement[readers, lane[None]]
    )
    reads = state.head[:, None] == readers[None]  # [W, S, C]
    ready_s = jnp.where(reads, arrival_s[None], 0.0).max(1)
    missing = state.missing - reads.sum(1, dtype=jnp.int32)

    follower = instance.chain_next[task]
    device, follower_ready_s, follower_missing = _enter(instance, placement, finishes, follower)
    moved = state.head == task[None]
    return _State(
        head=jnp.where(moved, follower[None], state.head),
        device=jnp.where(moved, device[None], state.device),
        ready_s=jnp.where(moved, follower_ready_s[None], jnp.maximum(state.ready_s, ready_s)),
        missing=jnp.where(moved, follower_missing[None], missing),
        rank=None if rank is None else jnp.where(moved, rank[follower, lane][None], state.rank),
        free_s=jnp.where(devices == here[None], finish_s[None], state.free_s),
        start_s=None if state.start_s is None else state.start_s.at[task, lane].set(start_s),
        finish_s=finishes,
        makespan_s=jnp.maximum(state.makespan_s, finish_s),
    )


def _enter(
    instance: Instance, placement: chex.Array, finish_s: chex.Array, task: chex.Array
) -> tuple[chex.Array, chex.Array, chex.Array]:
    """Returns device, ready time so far and missing producers of tasks `[..., C]`."""
    lane = jnp.broadcast_to(jnp.arange(task.shape[-1], dtype=jnp.int32), task.shape)
    device = placement[task, lane]
    producers = jnp.moveaxis(instance.pred_task[task], -1, 0)  # [P, ..., C]
    num_bytes = jnp.moveaxis(instance.pred_bytes[task], -1, 0)
    done_s = finish_s[producers, lane[None]]
    started = done_s < jnp.inf
    arrival_s = done_s + _move_s(
        instance, num_bytes, placement[producers, lane[None]], device[None]
    )
    ready_s = jnp.where(started, arrival_s, 0.0).max(0)
    ready_s = jnp.maximum(ready_s, instance.input_ready_s[task, device])
    real = producers != instance.padded_tasks
    return device, ready_s, (real & ~started).sum(0, dtype=jnp.int32)


def _move_s(
    instance: Instance, num_bytes: chex.Array, source: chex.Array, destination: chex.Array
) -> chex.Array:
    """Returns the transfer time; 0 on one device, for the diagonals are 0."""
    latency_s = instance.latency_s[source, destination]
    return latency_s + num_bytes * instance.seconds_per_byte[source, destination]
