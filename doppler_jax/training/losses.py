"""Losses of recorded episodes, pure functions of the policy's tables, and their gradients."""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.rollout import Episode, PolicyTables, log_prob
from doppler_jax.types import pytree

CHUNK = 8
"""Episodes differentiated together: few enough for the cache."""


@pytree
class Lesson:
    """B episodes and what each weighs: their log-probability is raised, their entropy too."""

    episodes: Episode  # [B, ...]
    weight: chex.Array  # [B] of the log-probability; negative to avoid an episode
    entropy_weight: chex.Array  # [B]


def lesson_loss(problem: PolicyInputs, tables: PolicyTables, lesson: Lesson) -> chex.Array:
    """Returns minus the weighted sum of log-probabilities and entropies, per step.

    With weights 1 / B it is the loss of imitation; with advantages / B, REINFORCE's
    surrogate, whose gradient is minus the mean of advantage times score function
    (Williams 1992).
    """
    log_p, entropy = jax.vmap(log_prob, in_axes=(None, None, 0))(
        problem, tables, lesson.episodes
    )
    steps = jnp.maximum(problem.padded.num_tasks, 1).astype(log_p.dtype)
    log_p, entropy = log_p.sum(-1) / steps, entropy.sum(-1) / steps
    return -(lesson.weight * log_p).sum() - (lesson.entropy_weight * entropy).sum()


def loss_and_gradient(
    problem: PolicyInputs, tables: PolicyTables, lesson: Lesson
) -> tuple[chex.Array, PolicyTables]:
    """Returns `lesson_loss` and its gradient, `CHUNK` episodes at a time."""
    batch = lesson.weight.shape[0]
    count = -(-batch // CHUNK)
    chunk = -(-batch // count)

    def chunked(array: chex.Array) -> chex.Array:
        # Padding repeats the last episode, with weights of 0 below.
        array = jnp.concatenate([array, jnp.repeat(array[-1:], count * chunk - batch, axis=0)])
        return array.reshape(count, chunk, *array.shape[1:])

    chunks = jax.tree.map(chunked, lesson)
    real = (jnp.arange(count * chunk) < batch).reshape(count, chunk)

    def add(
        total: tuple[chex.Array, PolicyTables], inputs: tuple[Lesson, chex.Array]
    ) -> tuple[tuple[chex.Array, PolicyTables], None]:
        part, real = inputs
        part = dataclasses.replace(
            part,
            weight=jnp.where(real, part.weight, 0.0),
            entropy_weight=jnp.where(real, part.entropy_weight, 0.0),
        )
        new = jax.value_and_grad(lesson_loss, argnums=1)(problem, tables, part)
        return jax.tree.map(jnp.add, total, new), None

    nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, tables))
    return jax.lax.scan(add, nothing, (chunks, real))[0]


def normalised_advantage(makespan_s: chex.Array) -> chex.Array:
    """Returns how much shorter than the mean each makespan `[B]` is, in deviations.

    A batch without spread has advantage 0; infinite makespans count as the worst finite.
    """
    finite = jnp.isfinite(makespan_s)
    worst = jnp.where(finite, makespan_s, -jnp.inf).max()
    makespan_s = jnp.where(finite, makespan_s, jnp.where(jnp.isfinite(worst), worst, 0.0))
    mean, spread = makespan_s.mean(), makespan_s.std()
    # Rounding alone gives equal makespans a spread of some 1e-7 of their mean.
    return (mean - makespan_s) / jnp.where(spread > 1e-6 * mean, spread, jnp.inf)
