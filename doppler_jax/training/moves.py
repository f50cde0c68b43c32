"""Small changes of placements, many at once, for local search of every kind.

All are pure functions of padded placements `[B, N]` (N = `padded.padded_tasks`), for
use inside other jits. They move tasks only to devices that can run them.
"""

import chex
import jax
import jax.numpy as jnp

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.types import pytree

GROUP = 8
"""Tasks that move together at most."""

_NEAR, _GROUP, _SWAP, _CRITICAL = 0.6, 0.25, 0.15, 0.5
"""How often: to a neighbour's device, several tasks, a swap, from the critical chain."""


@pytree
class WaitingChain:
    """Per placement, the tasks that determined its makespan, the last one first."""

    task: chex.Array  # [B, N] int32; padded_tasks after the end
    length: chex.Array  # [B] int32


def mutate(
    keys: chex.PRNGKey, padded: PaddedProblem, placements: chex.Array, chain: WaitingChain
) -> chex.Array:
    """Returns placements `[B, N]`, each one random move away from the one given.

    A move takes a task, half of the time one of the critical chain, to another device at random
    or to the device of a neighbour (a producer, a reader, another producer of a reader, another
    reader of a producer), at times with a path of its producers or readers or several of them;
    or it swaps the devices of two tasks. A move that no device permits changes nothing.

    Args:
      keys: `[B]` of the draws; consumed.
      padded: the problem.
      placements: `[B, N]` int32 devices.
      chain: from `waiting_chain`, for these placements or for recent ancestors.
    """
    count = 10 + GROUP + padded.num_devices
    # One call, for it costs little to compile.
    draw = jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32))(keys).T
    draw, walk, score = jnp.split(draw, (10, 10 + GROUP))
    task = _uniform_index(draw[0], padded.num_tasks)
    lane = jnp.arange(len(task), dtype=jnp.int32)
    position = _uniform_index(draw[1], chain.length)
    task = jnp.where(draw[2] < _CRITICAL, chain.task[lane, position], task)
    neighbour = _neighbour(padded, task, draw[3], draw[4:6])
    device = _other_device(score.T, padded, placements, task)
    theirs, mine = _device(placements, neighbour), _device(placements, task)
    is_near = (draw[6] < _NEAR) & (neighbour != padded.padded_tasks) & (theirs != mine)
    device = jnp.where(is_near, theirs, device)
    group = _group(walk, padded, task, draw[7])
    tasks = jnp.where((draw[8] < _GROUP)[:, None], group, group.at[:, 1:].set(task[:, None]))
    devices = jnp.broadcast_to(device[:, None], tasks.shape)
    other = _uniform_index(draw[9] / _SWAP, padded.num_tasks)
    swapped_tasks = jnp.where(jnp.arange(GROUP)[None] % 2 == 0, task[:, None], other[:, None])
    swapped = jnp.where(
        jnp.arange(GROUP)[None] % 2 == 0, _device(placements, other)[:, None], mine[:, None]
    )
    is_swap = (draw[9] < _SWAP)[:, None]
    return _assign(
        padded,
        placements,
        jnp.where(is_swap, swapped_tasks, tasks),
        jnp.where(is_swap, swapped, devices),
        together=is_swap,
    )


def waiting_chain(
    padded: PaddedProblem, placements: chex.Array, start_s: chex.Array, finish_s: chex.Array
) -> WaitingChain:
    """Returns the chain of tasks that each waited for the next, from the last to finish.

    A task waited for the later of its device and its last input; what its input waited for
    on a link is left out, so under links with contention this is a guess.

    Args:
      padded: the problem.
      placements: `[B, N]` devices.
      start_s: `[B, N]` starts under these placements, seconds.
      finish_s: `[B, N]` finishes.
    """
    nobody = padded.padded_tasks
    real = jnp.arange(nobody)[None] < padded.num_tasks
    waited_for = _waited_for(padded, placements, start_s, jnp.where(real, finish_s, -jnp.inf))
    last = jnp.argmax(jnp.where(real, finish_s, -jnp.inf), axis=1).astype(jnp.int32)
    lane = jnp.arange(len(last), dtype=jnp.int32)

    def back(task: chex.Array, _: None) -> tuple[chex.Array, chex.Array]:
        return waited_for[lane, task], task

    _, tasks = jax.lax.scan(back, last, length=nobody)
    return WaitingChain(task=tasks.T, length=(tasks != nobody).sum(0, dtype=jnp.int32))


def _waited_for(
    padded: PaddedProblem, placements: chex.Array, start_s: chex.Array, finish_s: chex.Array
) -> chex.Array:
    """Returns the task `[B, N + 1]` that each waited for; N for one that waited for none.

    `finish_s` `[B, N]` is -inf at padding tasks.
    """
    nobody = padded.padded_tasks
    lane = jnp.arange(len(placements), dtype=jnp.int32)[:, None]
    real = jnp.arange(nobody)[None] < padded.num_tasks
    device = jnp.where(real, placements, padded.num_devices)
    order = jnp.lexsort((finish_s, start_s, device), axis=-1).astype(jnp.int32)
    sorted_device = device[lane, order]
    same = sorted_device[:, 1:] == sorted_device[:, :-1]
    previous = jnp.where(same, order[:, :-1], nobody)
    previous = jnp.pad(previous, ((0, 0), (1, 0)), constant_values=nobody)
    before = jnp.zeros_like(order).at[lane, order].set(previous)

    finish_s = jnp.pad(finish_s, ((0, 0), (0, 1)), constant_values=-jnp.inf)
    producers = padded.pred_task[:-1]  # [N, P]
    source = jnp.pad(placements, ((0, 0), (0, 1)))[:, producers]  # [B, N, P]
    here = placements[:, :, None]
    move_s = padded.latency_s[source, here] + (
        padded.pred_bytes[None, :-1] * padded.seconds_per_byte[source, here]
    )
    arrival_s = finish_s[:, producers] + move_s
    producer = jnp.take_along_axis(
        jnp.broadcast_to(producers[None], arrival_s.shape), arrival_s.argmax(2)[:, :, None], 2
    )[:, :, 0]
    last_s, free_s = arrival_s.max(2), finish_s[lane, before]
    waited_for = jnp.where(free_s >= last_s, before, producer)
    tasks = jnp.arange(nobody, dtype=jnp.int32)[None]
    is_first = jnp.maximum(free_s, last_s) < padded.input_ready_s[tasks, placements]
    waited_for = jnp.where(is_first, nobody, waited_for)
    return jnp.pad(waited_for, ((0, 0), (0, 1)), constant_values=nobody)


def _uniform_index(draw: chex.Array, count: chex.Array) -> chex.Array:
    """Returns an index below `count` (or 0) from a uniform draw of [0, 1)."""
    scaled = (draw * count.astype(jnp.float32)).astype(jnp.int32)
    return jnp.clip(scaled, 0, jnp.maximum(count - 1, 0))


def _device(placements: chex.Array, task: chex.Array) -> chex.Array:
    """Returns the device `[B]` of one task `[B]` of each placement; 0 of the padding row."""
    lane = jnp.arange(len(placements), dtype=jnp.int32)
    return placements.at[lane, task].get(mode="fill", fill_value=0)


def _other_device(
    score: chex.Array, padded: PaddedProblem, placements: chex.Array, task: chex.Array
) -> chex.Array:
    """Returns the able device `[B]` of largest score `[B, D]`; its own if there is no other."""
    devices = jnp.arange(padded.num_devices, dtype=jnp.int32)[None]
    score = jnp.where(devices == _device(placements, task)[:, None], -1.0, score)
    score = jnp.where(jnp.isfinite(padded.compute_s[task]), score, -2.0)
    return score.argmax(1).astype(jnp.int32)


def _adjacent(
    padded: PaddedProblem, reads: chex.Array, task: chex.Array, draw: chex.Array
) -> chex.Array:
    """Returns a random reader `[B]` of each task where `reads`, else a random producer.

    The padding row if there is none.
    """

    def pick(side: chex.Array) -> chex.Array:
        count = (side[task] != padded.padded_tasks).sum(1, dtype=jnp.int32)
        return side[task, _uniform_index(draw, count)]

    return jnp.where(reads, pick(padded.succ_task), pick(padded.pred_task))


def _neighbour(
    padded: PaddedProblem, task: chex.Array, kind: chex.Array, draws: chex.Array
) -> chex.Array:
    """Returns a random producer, reader, co-producer or co-reader `[B]` of each task."""
    reads = kind < 0.5
    near = _adjacent(padded, reads, task, draws[0])
    far = _adjacent(padded, ~reads, near, draws[1])
    return jnp.where(kind % 0.5 < 0.25, near, far)


def _group(
    draw: chex.Array, padded: PaddedProblem, task: chex.Array, kind: chex.Array
) -> chex.Array:
    """Returns `[B, GROUP]` tasks: each task, then a path from it or several next to it.

    Of four equal kinds: path or star, of readers or producers. The length is uniform from
    2; the rest repeats the task.
    """
    is_path = kind % 0.5 < 0.25
    length = 2 + _uniform_index(draw[0], jnp.int32(GROUP - 1))

    def extend(last: chex.Array, draw: chex.Array) -> tuple[chex.Array, chex.Array]:
        origin = jnp.where(is_path, last, task)
        following = _adjacent(padded, kind < 0.5, origin, draw)
        return following, following

    _, others = jax.lax.scan(extend, task, draw[1:])
    within = jnp.arange(1, GROUP, dtype=jnp.int32)[None] < length[:, None]
    others = jnp.where(within, others.T, task[:, None])
    return jnp.concatenate([task[:, None], others], axis=1)


def _assign(
    padded: PaddedProblem,
    placements: chex.Array,
    tasks: chex.Array,
    devices: chex.Array,
    together: chex.Array,
) -> chex.Array:
    """Returns placements with `tasks` `[B, G]` on `devices` `[B, G]` where those can run them.

    Where `together` `[B, 1]`, all move or none.
    """
    tasks = jnp.minimum(tasks, padded.padded_tasks)
    able = jnp.isfinite(padded.compute_s[tasks, devices]) & (tasks < padded.num_tasks)
    able = able & (able.all(axis=1, keepdims=True) | ~together)
    lane = jnp.arange(len(placements), dtype=jnp.int32)[:, None]
    # The padding row is no column of the placements: what goes there is dropped.
    target = jnp.where(able, tasks, padded.padded_tasks)
    return placements.at[lane, target].set(devices, mode="drop")
