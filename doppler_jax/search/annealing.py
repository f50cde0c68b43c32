"""Simulated annealing (Kirkpatrick et al. 1983) that spends whole batches on each chain.

Classical annealing tries one move at a time, and what counts is how many it has tried in
sequence; a lock-step simulator is fast only on many placements at once. So each step
tries a batch of moves from one placement, and then all those that Metropolis' rule accepts
one by one are made together, up to a number that doubles when the outcome is acceptable
and falls to a quarter when it is not. With the number at 1 this is annealing in which
rejected moves are tried ahead in parallel.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from doppler_jax.search.anytime import Best, fit_batch, keep_best
from doppler_jax.search.moves import mutate
from doppler_jax.search.objective import Scores, SearchProblem
from doppler_jax.types import pytree


@pytree
class AnnealingState:
    """C chains, each with the P moves that it tried from where it is."""

    best: Best
    current: chex.Array  # [C, N] int32
    energy: chex.Array  # [C]
    candidate: chex.Array  # [C, N] the current placement with some accepted moves made
    tried: chex.Array  # [C, P, N] the current placement with one move made
    accepted: chex.Array  # [C, P] bool
    together: chex.Array  # [C] int32, accepted moves to make at once


@dataclasses.dataclass(frozen=True)
class Annealing:
    """Settings of annealing.

    Temperatures are in shares of a task: the current makespan over the number of tasks. What
    a move changes is of that order, so that graphs of all sizes cool alike.
    """

    chains: int = 4
    proposals: int = 32  # per chain and step
    hot: float = 0.5  # temperature at the start
    cold: float = 5e-3  # and at the end of the budget, geometrically between
    exchange: int = 50  # mean steps after which the worst chain restarts where the best is

    @property
    def members(self) -> int:
        return self.chains

    @property
    def batch(self) -> int:
        return self.chains * self.proposals

    def fit(self, evaluations: int) -> "Annealing":
        chains, proposals = fit_batch(self.chains, self.proposals, evaluations)
        return dataclasses.replace(self, chains=chains, proposals=proposals)

    def init(self, placements: chex.Array) -> AnnealingState:
        shape = (self.chains, self.proposals)
        unknown_s = jnp.full(self.chains, jnp.inf)
        return AnnealingState(
            best=Best(placement=placements, value_s=unknown_s),
            current=placements,
            energy=unknown_s,
            candidate=placements,
            tried=jnp.broadcast_to(placements[:, None], (*shape, placements.shape[1])),
            accepted=jnp.zeros(shape, dtype=bool),
            together=jnp.ones(self.chains, jnp.int32),
        )

    def ask(
        self, key: chex.PRNGKey, problem: SearchProblem, state: AnnealingState
    ) -> chex.Array:
        lanes = jnp.repeat(state.candidate, self.proposals, axis=0)
        # The first lane of each chain is the candidate, the others are moves from it.
        return mutate(key, problem.padded, lanes).at[:: self.proposals].set(state.candidate)

    def limit_s(self, state: AnnealingState) -> chex.Array:
        del state
        return jnp.full(self.batch, jnp.inf)  # any rise may be accepted

    def tell(
        self,
        key: chex.PRNGKey,
        problem: SearchProblem,
        state: AnnealingState,
        asked: chex.Array,
        scores: Scores,
        progress: chex.Array,
    ) -> AnnealingState:
        accept_key, choose_key, exchange_key = jax.random.split(key, 3)
        dtype = scores.energy.dtype
        temperature = self.hot * (self.cold / self.hot) ** progress.astype(dtype)
        temperature /= jnp.maximum(problem.padded.num_tasks, 1).astype(dtype)
        tried = asked.reshape(state.tried.shape)
        energy, value_s = (
            a.reshape(state.accepted.shape) for a in (scores.energy, scores.value_s)
        )
        origin = energy[:, 0]
        draw = jax.random.uniform(accept_key, energy.shape, dtype)
        accepted = _is_accepted(energy, origin[:, None], temperature, draw).at[:, 0].set(False)
        draw = jax.random.uniform(choose_key, energy.shape, dtype)
        kept = (state.together == 1) | _is_accepted(
            origin, state.energy, temperature, draw[:, 0]
        )
        together = jnp.where(kept, state.together * 2, state.together // 4)
        best = keep_best(state.best, tried, value_s)
        state = dataclasses.replace(
            state,
            current=jnp.where(kept[:, None], state.candidate, state.current),
            energy=jnp.where(kept, origin, state.energy),
            tried=jnp.where(kept[:, None, None], tried, state.tried),
            accepted=jnp.where(kept[:, None], accepted, state.accepted),
            together=jnp.clip(together, 1, self.proposals),
        )
        is_restart = jax.random.uniform(exchange_key) < 1 / self.exchange
        chain = jnp.arange(self.chains, dtype=jnp.int32)
        worst, best_of_all = state.energy.argmax(), state.energy.argmin()
        is_worst = (chain == worst.astype(jnp.int32)) & is_restart
        source = jnp.where(is_worst, best_of_all.astype(jnp.int32), chain)
        state = jax.tree.map(lambda array: array[source], state)
        return dataclasses.replace(state, best=best, candidate=_combine(state, draw))


def _is_accepted(
    energy: chex.Array, origin: chex.Array, temperature: chex.Array, draw: chex.Array
) -> chex.Array:
    """Metropolis' rule, with the rise relative to where the move starts."""
    rise = (energy - origin) / jnp.maximum(origin, jnp.finfo(energy.dtype).tiny)
    return draw < jnp.exp(-jnp.maximum(rise, 0.0) / temperature)


def _combine(state: AnnealingState, draw: chex.Array) -> chex.Array:
    """Returns the current placements `[C, N]` after `together` random accepted moves."""
    order = jnp.where(state.accepted, draw, -1.0)
    rank = (order[:, None, :] > order[:, :, None]).sum(2, dtype=jnp.int32)
    chosen = state.accepted & (rank < state.together[:, None])
    changes = chosen[:, :, None] & (state.tried != state.current[:, None])
    last = jnp.where(changes, order[:, :, None], -1.0).argmax(1)
    moved = jnp.take_along_axis(state.tried, last[:, None], axis=1)[:, 0]
    return jnp.where(changes.any(1), moved, state.current)
