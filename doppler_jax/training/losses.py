"""Losses of recorded episodes, pure functions of parameters."""

import chex
import jax
import jax.numpy as jnp

from doppler_jax.policies.features import Problem
from doppler_jax.policies.rollout import Episode, PolicyTables, log_prob


def step_means(
    problem: Problem, tables: PolicyTables, episodes: Episode
) -> tuple[chex.Array, chex.Array]:
    """Returns log-probability and entropy of B episodes, `[B]` each, mean over their steps."""
    log_p, entropy = jax.vmap(log_prob, in_axes=(None, None, 0))(problem, tables, episodes)
    steps = jnp.maximum(problem.instance.num_tasks, 1).astype(log_p.dtype)
    return log_p.sum(-1) / steps, entropy.sum(-1) / steps


def imitation_loss(
    problem: Problem,
    tables: PolicyTables,
    episodes: Episode,
    weight: chex.Array | None = None,
) -> chex.Array:
    """Returns the mean negative log-likelihood per step of episodes to imitate.

    `weight` `[B]` counts the episodes; all of weight 0 give 0.
    """
    log_p, _ = step_means(problem, tables, episodes)
    if weight is None:
        return -log_p.mean()
    return -(weight * log_p).sum() / jnp.maximum(weight.sum(), 1.0)


def policy_gradient_loss(
    problem: Problem,
    tables: PolicyTables,
    episodes: Episode,
    advantage: chex.Array,
    entropy_weight: chex.Array,
) -> chex.Array:
    """Returns REINFORCE's surrogate loss with an entropy bonus.

    Its gradient is minus the mean of `advantage` `[B]` times the score function, per step.
    Reference: Williams 1992.
    """
    log_p, entropy = step_means(problem, tables, episodes)
    return -(advantage * log_p).mean() - entropy_weight * entropy.mean()


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
