"""A memetic search (Moscato 1989): evolution until it stalls, then iterated local search.

Evolution gains most while simulations are few for the size of the graph; once its
population has no news, descents from its best find what is left. The local search is not
applied to every child, as it is in most memetic algorithms: a descent takes thousands of
simulations here.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from doppler_jax.search.anytime import Best, Search
from doppler_jax.search.evolution import Evolution, Population
from doppler_jax.search.local_search import DescentState, LocalSearch
from doppler_jax.search.objective import Scores, SearchProblem
from doppler_jax.types import pytree


@pytree
class MemeticState:
    """The population, and once it has stalled the descents that began at its best."""

    population: Population
    descent: DescentState
    stalled: chex.Array  # [] int32, batches in a row that did not improve on the best

    @property
    def best(self) -> Best:
        parts = (self.population.best, self.descent.best)
        return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


@dataclasses.dataclass(frozen=True)
class Memetic:
    """Settings of the two searches, whose batches must be of one size."""

    evolution: Evolution = dataclasses.field(default_factory=Evolution)
    descent: LocalSearch = dataclasses.field(default_factory=LocalSearch)
    patience: int = 64  # batches in vain after which evolution ends

    @property
    def members(self) -> int:
        return self.evolution.members

    @property
    def batch(self) -> int:
        return self.evolution.batch

    def fit(self, evaluations: int) -> Search:
        if evaluations <= self.patience * self.batch:  # it cannot stall
            return self.evolution.fit(evaluations)
        return self

    def init(self, placements: chex.Array) -> MemeticState:
        return MemeticState(
            population=self.evolution.init(placements),
            descent=self.descent.init(placements[: self.descent.members]),
            stalled=jnp.int32(0),
        )

    def ask(self, key: chex.PRNGKey, problem: SearchProblem, state: MemeticState) -> chex.Array:
        return jax.lax.cond(
            self._evolves(state),
            lambda: self.evolution.ask(key, problem, state.population),
            lambda: self.descent.ask(key, problem, state.descent),
        )

    def limit_s(self, state: MemeticState) -> chex.Array:
        return jnp.where(
            self._evolves(state),
            self.evolution.limit_s(state.population),
            self.descent.limit_s(state.descent),
        )

    def tell(
        self,
        key: chex.PRNGKey,
        problem: SearchProblem,
        state: MemeticState,
        asked: chex.Array,
        scores: Scores,
        progress: chex.Array,
    ) -> MemeticState:
        def evolve() -> MemeticState:
            before = state.population
            after = self.evolution.tell(key, problem, before, asked, scores, progress)
            is_gain = after.energy.min() < before.energy.min()
            return MemeticState(
                population=after,
                descent=self.descent.init(after.best.placement[: self.descent.members]),
                stalled=jnp.where(is_gain, 0, state.stalled + 1),
            )

        def descend() -> MemeticState:
            descent = self.descent.tell(key, problem, state.descent, asked, scores, progress)
            return dataclasses.replace(state, descent=descent)

        return jax.lax.cond(self._evolves(state), evolve, descend)

    def _evolves(self, state: MemeticState) -> chex.Array:
        return state.stalled < self.patience
