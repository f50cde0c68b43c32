"""A (mu + lambda) evolution strategy with crossover (Bäck and Schwefel 1993).

Each child takes some tasks' devices from a second parent: each task with probability one
half, or a segment of the topological order; then it is changed by a few random moves. The
best mu of parents and children live on. Children of a makespan that is there already,
which are nearly always relabellings, do not.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from doppler_jax.search.anytime import Best
from doppler_jax.search.moves import mutate
from doppler_jax.search.objective import Scores, SearchProblem
from doppler_jax.types import pytree


@pytree
class Population:
    """The mu parents, best first."""

    best: Best  # the parents themselves, with what they are worth
    energy: chex.Array  # [mu]


@dataclasses.dataclass(frozen=True)
class Evolution:
    """Settings of the evolution strategy."""

    parents: int = 32
    children: int = 128
    mutations: int = 3  # at most, per child
    crossover: float = 0.5  # share of children with two parents

    @property
    def members(self) -> int:
        return self.parents

    @property
    def batch(self) -> int:
        return self.children

    def fit(self, evaluations: int) -> "Evolution":
        largest = 1 << max((evaluations // 8).bit_length() - 1, 0)
        return dataclasses.replace(
            self, parents=min(self.parents, largest), children=min(self.children, largest)
        )

    def init(self, placements: chex.Array) -> Population:
        unknown_s = jnp.full(self.parents, jnp.inf)
        best = Best(placement=placements, value_s=unknown_s)
        return Population(best=best, energy=unknown_s)

    def ask(self, key: chex.PRNGKey, problem: SearchProblem, state: Population) -> chex.Array:
        cross_key, move_key = jax.random.split(key)
        children = self._cross(cross_key, problem, state.best.placement)
        children = self._mutate(move_key, problem, children)
        # The first batch scores the parents themselves, as far as it goes.
        parents = jnp.resize(state.best.placement, children.shape)
        return jnp.where(jnp.isinf(state.energy).all(), parents, children)

    def limit_s(self, state: Population) -> chex.Array:
        # Until all parents fit and differ, a child that is worse than all may live on.
        is_full = (jnp.diff(state.energy) > 0).all() & jnp.isfinite(state.best.value_s).all()
        return jnp.full(self.children, jnp.where(is_full, state.energy.max(), jnp.inf))

    def tell(
        self,
        key: chex.PRNGKey,
        problem: SearchProblem,
        state: Population,
        asked: chex.Array,
        scores: Scores,
        progress: chex.Array,
    ) -> Population:
        del key, problem, progress
        placements = jnp.concatenate([state.best.placement, asked])
        energy = jnp.concatenate([state.energy, scores.energy])
        value_s = jnp.concatenate([state.best.value_s, scores.value_s])
        # One that fits is never driven out by one that does not.
        order = jnp.lexsort((energy, jnp.isinf(value_s)))
        repeated = jnp.diff(energy[order], prepend=-jnp.inf) == 0
        kept = order[jnp.argsort(repeated, stable=True)[: self.parents]]
        return Population(
            best=Best(placement=placements[kept], value_s=value_s[kept]), energy=energy[kept]
        )

    def _cross(
        self, key: chex.PRNGKey, problem: SearchProblem, parents: chex.Array
    ) -> chex.Array:
        """Returns children `[lambda, N]` of random pairs, or copies of one parent."""
        pair_key, draw_key, mask_key = jax.random.split(key, 3)
        pair = jax.random.randint(pair_key, (2, self.children), 0, self.parents)
        draw = jax.random.uniform(draw_key, (4, self.children, 1), jnp.float32)
        position = problem.topological_rank[None] / problem.padded.num_tasks
        low, high = jnp.minimum(draw[0], draw[1]), jnp.maximum(draw[0], draw[1])
        is_segment = (position >= low) & (position < high)
        is_half = jax.random.bernoulli(mask_key, shape=(self.children, parents.shape[1]))
        from_second = jnp.where(draw[2] < 0.5, is_segment, is_half)
        from_second &= draw[3] < self.crossover
        return jnp.where(from_second, parents[pair[1]], parents[pair[0]])

    def _mutate(
        self, key: chex.PRNGKey, problem: SearchProblem, children: chex.Array
    ) -> chex.Array:
        count_key, move_key = jax.random.split(key)
        count = jax.random.randint(count_key, (self.children, 1), 1, self.mutations + 1)

        def move(k: chex.Array, children: chex.Array) -> chex.Array:
            moved = mutate(jax.random.fold_in(move_key, k), problem.padded, children)
            return jnp.where(k < count, moved, children)

        return jax.lax.fori_loop(0, self.mutations, move, children)
