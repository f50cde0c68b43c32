"""The best placements known of many problems, by search: what a policy is held against."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.stacking import stack_problems
from doppler_jax.simulator.simulate import simulate_padded
from doppler_jax.training.state import best_of
from doppler_jax.training.stream import Drawn
from doppler_jax.training.tempering import RUNGS, Chains, temper
from doppler_jax.types import pytree

ROUNDS = 20
"""Moves of every chain in one call of `search`."""


@pytree
class Pool:
    """K problems of a bucket with what is known of them."""

    problem: PolicyInputs  # [K, ...]
    best_placement: chex.Array  # [K, N] int32
    best_s: chex.Array  # [K]
    chain_placement: chex.Array  # [K, C, N] int32, of a ladder of temperatures
    chain_s: chex.Array  # [K, C]


def make_pool(drawn: list[Drawn], starts: list[np.ndarray], links: str) -> Pool:
    """Returns the pool of problems of one bucket.

    Args:
      drawn: K problems.
      starts: per problem, placements `[S, n]` to begin with, S >= 1.
      links: of what is simulated.
    """
    problem = stack_problems([one.problem for one in drawn])
    size = problem.padded.compute_s.shape[1] - 1
    chains = np.zeros((len(drawn), RUNGS, size), np.int32)
    for chain, start in zip(chains, starts, strict=True):
        chain[:, : start.shape[1]] = np.resize(start, (RUNGS, start.shape[1]))
    chain_s = np.asarray(_simulate(problem, chains, links))
    best = chain_s.argmin(1)
    return Pool(
        problem=problem,
        best_placement=chains[np.arange(len(drawn)), best],
        best_s=chain_s.min(1),
        chain_placement=chains,
        chain_s=chain_s,
    )


@partial(jax.jit, static_argnames="links")
def _simulate(problem: PolicyInputs, placements: chex.Array, links: str) -> chex.Array:
    def one(entry: tuple[PolicyInputs, chex.Array]) -> chex.Array:
        return simulate_padded(entry[0].padded, entry[1], links=links).makespan_s

    return jax.lax.map(one, (problem, placements))


@partial(jax.jit, static_argnames="links")
def search(key: chex.PRNGKey, pool: Pool, links: str) -> Pool:
    """Returns the entries after `ROUNDS` of tempering each; the key is consumed.

    What is best so far is proposed to the coldest chains.
    """
    number = jnp.arange(RUNGS, dtype=jnp.int32)

    def one(inputs: tuple[chex.PRNGKey, Pool]) -> Pool:
        key, entry = inputs
        size = entry.best_placement.shape[0]
        known = Chains(
            placement=jnp.broadcast_to(entry.best_placement[None], (RUNGS, size)),
            makespan_s=jnp.broadcast_to(entry.best_s[None], (RUNGS,)),
        )
        # To the coldest rungs alone: the others are to find something else.
        cold = number >= RUNGS - RUNGS // 4
        known = Chains(
            placement=known.placement, makespan_s=jnp.where(cold, known.makespan_s, jnp.inf)
        )
        chains = Chains(placement=entry.chain_placement, makespan_s=entry.chain_s)
        chains, met = temper(
            key, entry.problem.padded, number, chains, known, entry.best_s, ROUNDS, links
        )
        best, best_s = best_of(
            entry.best_placement, entry.best_s, met.placement, met.makespan_s
        )
        return dataclasses.replace(
            entry,
            best_placement=best,
            best_s=best_s,
            chain_placement=chains.placement,
            chain_s=chains.makespan_s,
        )

    count = pool.best_s.shape[0]
    return jax.lax.map(one, (jax.random.split(key, count), pool))
