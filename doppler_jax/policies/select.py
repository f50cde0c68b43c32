"""SEL: which frontier task is placed next."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from chex import Array

from doppler_jax.policies.features import PolicyInputs

MAX_SCORE = 20.0
"""Scores are squashed to plus or minus this, so that no choice becomes impossible."""


STEEPNESS = 64.0
"""Of the b-level rule: a rank below the largest is e to this less likely."""


class Select(nn.Module):
    """Scores every task once; the policy is the softmax of the scores over the frontier."""

    width: int

    @nn.compact
    def __call__(self, problem: PolicyInputs, embedding: Array) -> Array:
        """Returns the scores `[N + 1]` from embeddings `[N + 1, h]`."""
        known = jnp.concatenate(
            [
                embedding,
                path_sum(embedding, problem.next_on_b_path),
                path_sum(embedding, problem.next_on_t_path),
                nn.leaky_relu(nn.Dense(self.width)(problem.task_features)),
            ],
            axis=-1,
        )
        hidden = nn.leaky_relu(nn.Dense(self.width)(known))
        score = nn.Dense(1, kernel_init=nn.initializers.zeros)(hidden)[:, 0]
        return MAX_SCORE * jnp.tanh(score / MAX_SCORE)


def b_level_scores(problem: PolicyInputs) -> Array:
    """Returns scores `[N + 1]` that all but surely choose the largest b-level."""
    return STEEPNESS * problem.b_rank.astype(jnp.float32)


def path_sum(values: Array, following: Array) -> Array:
    """Sums `values` `[N + 1, h]` along each task's path, itself included, over the longest.

    `following` `[N + 1]` points to the next task of the path; N, pointing to itself, ends
    it. Dividing by the hops of the longest path keeps the sums comparable between graphs.
    Pointer doubling: each round joins two path halves, log2(N) rounds join all.
    """
    end = following.shape[0] - 1
    inside = (jnp.arange(end + 1) < end).astype(values.dtype)
    total = jnp.concatenate([values, jnp.ones_like(values[:, :1])], axis=1) * inside[:, None]

    pointer = jnp.asarray(following)
    for _ in range(max(end - 1, 1).bit_length()):
        total, pointer = total + total[pointer], pointer[pointer]
    hops = jax.lax.stop_gradient(jnp.maximum(total[:, -1].max(), 1.0))
    return total[:, :-1] / hops
