"""Iterated local search: batched descent, perturbation, restarts (Lourenço et al. 2003).

A member tries a batch of moves from its placement and takes the best if it is better.
After as many batches in vain as cover its single-task moves, the placement counts as a
local optimum: the better of it and the last one is kept, and changed at random for the
next descent. A member that many descents did not improve goes on from the best of all.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from doppler_jax.search.anytime import Best, fit_batch, keep_best
from doppler_jax.search.moves import mutate, single_moves
from doppler_jax.search.objective import Scores, SearchProblem
from doppler_jax.types import pytree


@pytree
class DescentState:
    """M members, each on its way down from a change of its last optimum."""

    best: Best
    current: chex.Array  # [M, N] int32
    energy: chex.Array  # [M]
    optimum: chex.Array  # [M, N] the local optimum that is changed next
    optimum_energy: chex.Array  # [M]
    next_move: chex.Array  # [M] int32 single-task move to try next, all in turn
    in_vain: chex.Array  # [M] int32 moves tried since the last improvement
    failures: chex.Array  # [M] int32 descents since the optimum improved


@dataclasses.dataclass(frozen=True)
class LocalSearch:
    """Settings of iterated local search."""

    searchers: int = 4
    proposals: int = 32  # per member and step: half single-task moves in turn, half random
    kicks: int = 4  # random moves that change an optimum
    patience: int = 20  # descents in vain after which a member goes on from the best

    @property
    def members(self) -> int:
        return self.searchers

    @property
    def batch(self) -> int:
        return self.searchers * self.proposals

    def fit(self, evaluations: int) -> "LocalSearch":
        searchers, proposals = fit_batch(self.searchers, self.proposals, evaluations)
        return dataclasses.replace(self, searchers=searchers, proposals=proposals)

    def init(self, placements: chex.Array) -> DescentState:
        unknown_s = jnp.full(self.searchers, jnp.inf)
        zeros = jnp.zeros(self.searchers, jnp.int32)
        return DescentState(
            best=Best(placement=placements, value_s=unknown_s),
            current=placements,
            energy=unknown_s,
            optimum=placements,
            optimum_energy=unknown_s,
            next_move=zeros,
            in_vain=zeros,
            failures=zeros,
        )

    def ask(self, key: chex.PRNGKey, problem: SearchProblem, state: DescentState) -> chex.Array:
        tried = self._neighbours(key, problem, state)
        return tried.reshape(-1, tried.shape[2])

    def limit_s(self, state: DescentState) -> chex.Array:
        # A best placement may be longer than the current one, where that does not fit.
        return jnp.repeat(jnp.maximum(state.energy, state.best.value_s), self.proposals)

    def tell(
        self,
        key: chex.PRNGKey,
        problem: SearchProblem,
        state: DescentState,
        asked: chex.Array,
        scores: Scores,
        progress: chex.Array,
    ) -> DescentState:
        del progress
        shape = (self.searchers, self.proposals)
        tried = asked.reshape(*shape, asked.shape[1])
        energy = scores.energy.reshape(shape)
        best = keep_best(state.best, tried, scores.value_s.reshape(shape))
        first = energy.argmin(1)
        member = jnp.arange(self.searchers, dtype=jnp.int32)
        is_better = energy[member, first] < state.energy
        moves = jnp.maximum(_num_moves(problem), 1)
        state = dataclasses.replace(
            state,
            best=best,
            current=jnp.where(is_better[:, None], tried[member, first], state.current),
            energy=jnp.where(is_better, energy[member, first], state.energy),
            next_move=(state.next_move + self.proposals // 2) % moves,
            in_vain=jnp.where(is_better, 0, state.in_vain + self.proposals // 2),
        )
        return self._perturb(key, problem, state, state.in_vain >= moves)

    def _neighbours(
        self, key: chex.PRNGKey, problem: SearchProblem, state: DescentState
    ) -> chex.Array:
        """Returns `[M, P, N]`: the next single-task moves, then random moves.

        The first gives way to the placement itself where that has not been simulated.
        """
        in_turn = self.proposals // 2
        copies = jnp.repeat(state.current, in_turn, axis=0)
        number = state.next_move[:, None] + jnp.arange(in_turn, dtype=jnp.int32)[None]
        number = number % jnp.maximum(_num_moves(problem), 1)
        singles = single_moves(problem.padded, copies, number.reshape(-1))
        random = mutate(
            key,
            problem.padded,
            jnp.repeat(state.current, self.proposals - in_turn, axis=0),
        )
        size = state.current.shape[1]
        parts = [a.reshape(self.searchers, -1, size) for a in (singles, random)]
        tried = jnp.concatenate(parts, axis=1)
        is_new = jnp.isinf(state.energy)[:, None]
        return tried.at[:, 0].set(jnp.where(is_new, state.current, tried[:, 0]))

    def _perturb(
        self,
        key: chex.PRNGKey,
        problem: SearchProblem,
        state: DescentState,
        is_done: chex.Array,
    ) -> DescentState:
        """Where a descent `[M]` is done, keeps the better optimum and begins the next one."""
        is_gain = is_done & (state.energy < state.optimum_energy)
        optimum = jnp.where(is_gain[:, None], state.current, state.optimum)
        optimum_energy = jnp.where(is_gain, state.energy, state.optimum_energy)
        failures = jnp.where(is_gain, 0, state.failures + is_done.astype(jnp.int32))
        leader = optimum_energy.argmin()
        is_lost = failures >= self.patience
        optimum = jnp.where(is_lost[:, None], optimum[leader][None], optimum)
        optimum_energy = jnp.where(is_lost, optimum_energy[leader], optimum_energy)
        kicked = jax.lax.fori_loop(
            0,
            self.kicks,
            lambda k, p: mutate(jax.random.fold_in(key, k), problem.padded, p),
            optimum,
        )
        return dataclasses.replace(
            state,
            current=jnp.where(is_done[:, None], kicked, state.current),
            energy=jnp.where(is_done, jnp.inf, state.energy),
            optimum=optimum,
            optimum_energy=optimum_energy,
            in_vain=jnp.where(is_done, 0, state.in_vain),
            failures=jnp.where(is_lost, 0, failures),
        )


def _num_moves(problem: SearchProblem) -> chex.Array:
    return problem.padded.num_tasks * (problem.padded.num_devices - 1)
