"""Placeto's graph: relatives of a task, message passing along and against the edges."""

from collections.abc import Callable

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from doppler_jax.policies.features import PolicyInputs
from doppler_jax.types import pytree

WORD = 32
"""Tasks in a word of `Relatives`."""


@pytree
class Relatives:
    """Who is upstream and downstream of whom, a bit per pair: 10,000 tasks take 25 MB."""

    ancestors: chex.Array  # [N + 1, W] uint32, of each task, itself included
    descendants: chex.Array  # [N + 1, W] uint32, likewise


def find_relatives(problem: PolicyInputs, order: chex.Array) -> Relatives:
    """Returns the relatives of all tasks, given them in a topological order `[N]`."""
    padded = problem.padded
    return Relatives(
        ancestors=_closure(padded.pred_task, order),
        descendants=_closure(padded.succ_task, order[::-1]),
    )


def _closure(neighbours: chex.Array, order: chex.Array) -> chex.Array:
    """Joins, task after task, the words of `neighbours` `[N + 1, K]`, which come before it."""
    rows = neighbours.shape[0]
    neighbours = jnp.asarray(neighbours)

    def join(words: chex.Array, task: chex.Array) -> tuple[chex.Array, None]:
        joined = jnp.bitwise_or.reduce(words[neighbours[task]], axis=0)
        own = jnp.uint32(1) << (task % WORD).astype(jnp.uint32)
        return words.at[task].set(joined.at[task // WORD].add(own)), None

    return jax.lax.scan(join, jnp.zeros((rows, -(-rows // WORD)), jnp.uint32), order)[0]


def group_shares(problem: PolicyInputs, relatives: Relatives, task: chex.Array) -> chex.Array:
    """Returns the weights `[3, N + 1]` that average over a task's groups.

    They are its ancestors, its descendants and all other tasks, which may run beside it.
    """
    rows = problem.task_features.shape[0]
    tasks = jnp.arange(rows)

    def members(words: chex.Array) -> chex.Array:
        bits = (words[:, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None]) & 1
        return bits.reshape(-1)[:rows].astype(bool) & (tasks != task)

    above, below = members(relatives.ancestors[task]), members(relatives.descendants[task])
    beside = ~above & ~below & (tasks != task) & (tasks < problem.padded.num_tasks)
    groups = jnp.stack([above, below, beside]).astype(jnp.float32)
    return groups / jnp.maximum(groups.sum(-1, keepdims=True), 1.0)


class TwoWayEncoder(nn.Module):
    """Embeds tasks by what lies upstream of them and, apart from it, by what lies downstream.

    In each of `rounds` rounds a task adds h2(mean of h1 over its producers' embeddings) to
    its own, with h1 and h2 shared by the rounds, and likewise, with others, over its readers.
    """

    width: int
    rounds: int

    @nn.compact
    def __call__(self, problem: PolicyInputs, features: chex.Array) -> chex.Array:
        """Returns embeddings `[N + 1, ..., 2 width]` of features `[N + 1, ..., F]`."""
        start = nn.leaky_relu(nn.Dense(self.width)(features))
        start = nn.Dense(self.width)(start)
        sender, receiver = problem.edge_sender, problem.edge_receiver
        ways = [
            self._pass_messages(neighbour_mean(*ends, start), start)
            for ends in ((sender, receiver), (receiver, sender))
        ]
        return jnp.concatenate(ways, axis=-1)

    def _pass_messages(
        self, mean: Callable[[chex.Array], chex.Array], start: chex.Array
    ) -> chex.Array:
        message, update = nn.Dense(self.width), nn.Dense(self.width)
        embedding = start
        for _ in range(self.rounds):
            received = mean(nn.leaky_relu(message(embedding)))
            embedding = embedding + nn.leaky_relu(update(received))
        return embedding


def neighbour_mean(
    source: chex.Array, target: chex.Array, like: chex.Array
) -> Callable[[chex.Array], chex.Array]:
    """Returns the function that averages rows of `source` `[E]` for every `target` `[E]`.

    Args:
      source: the rows that are read.
      target: the rows that are written; those that nothing reaches become 0.
      like: `[N + 1, ...]` of the shape that is averaged.
    """
    rows = like.shape[0]
    count = jax.ops.segment_sum(jnp.ones(target.shape, jnp.float32), target, rows)
    share = (1.0 / jnp.maximum(count, 1.0)).reshape((rows,) + (1,) * (like.ndim - 1))
    return lambda values: jax.ops.segment_sum(values[source], target, rows) * share
