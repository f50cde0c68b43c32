"""Placements at random: each task uniformly on a device that can run it."""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.search.anytime import NUM_FOUND, Best
from doppler_jax.search.objective import Scores, SearchProblem
from doppler_jax.types import pytree


@pytree
class Drawn:
    """The best that were drawn."""

    best: Best


@dataclasses.dataclass(frozen=True)
class RandomSearch:
    """Settings of random search; what it starts from is ignored."""

    draws: int = 128  # per step

    @property
    def members(self) -> int:
        return NUM_FOUND

    @property
    def batch(self) -> int:
        return self.draws

    def fit(self, evaluations: int) -> "RandomSearch":
        steps = -(-evaluations // self.draws)
        return RandomSearch(draws=evaluations // steps)  # spends nearly all of it

    def init(self, placements: chex.Array) -> Drawn:
        return Drawn(best=Best(placement=placements, value_s=jnp.full(NUM_FOUND, jnp.inf)))

    def ask(self, key: chex.PRNGKey, problem: SearchProblem, state: Drawn) -> chex.Array:
        del state
        return draw_placements(key, problem.padded, self.draws)

    def limit_s(self, state: Drawn) -> chex.Array:
        return jnp.full(self.draws, state.best.value_s.max())

    def tell(
        self,
        key: chex.PRNGKey,
        problem: SearchProblem,
        state: Drawn,
        asked: chex.Array,
        scores: Scores,
        progress: chex.Array,
    ) -> Drawn:
        del key, problem, progress
        value_s = jnp.concatenate([state.best.value_s, scores.value_s])
        placements = jnp.concatenate([state.best.placement, asked])
        kept = jnp.argsort(value_s, stable=True)[:NUM_FOUND]
        return Drawn(best=Best(placement=placements[kept], value_s=value_s[kept]))


def draw_placements(key: chex.PRNGKey, padded: PaddedProblem, count: int) -> chex.Array:
    """Returns `[count, N]` padded placements; padding tasks are on device 0.

    Args:
      key: of the draws; it is consumed.
      padded: the problem.
      count: how many.
    """
    n = padded.padded_tasks
    score = jax.random.uniform(key, (count, n, padded.num_devices))
    score = jnp.where(jnp.isfinite(padded.compute_s[None, :-1]), score, -1.0)
    real = jnp.arange(n)[None] < padded.num_tasks
    return jnp.where(real, score.argmax(2), 0).astype(jnp.int32)
