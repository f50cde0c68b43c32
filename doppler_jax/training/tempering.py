"""Local search beside the policy: Metropolis chains at many temperatures that change places.

Parallel tempering (Geyer 1991; Hukushima and Nemoto 1996) needs no cooling schedule, so no
budget known beforehand. The policy's episodes enter as proposals, one for each chain.
"""

import jax
import jax.numpy as jnp
from chex import Array, PRNGKey

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.simulator.batches import simulate_padded
from doppler_jax.training.moves import WaitingChain, mutate, waiting_chain
from doppler_jax.training.state import Placements

HOTTEST, COLDEST = 2e-2, 3e-4
"""Temperatures, in shares of the best makespan."""

RUNGS = 32
"""Chains of a ladder of temperatures; more chains make more, independent ladders."""


def temper(
    key: PRNGKey,
    padded: PaddedProblem,
    number: Array,
    chains: Placements,
    proposals: Placements,
    best_s: Array,
    rounds: int,
    links: str = "parallel",
) -> tuple[Placements, Placements]:
    """Returns the chains after proposals and `rounds` of moves, and the best each has met.

    Args:
      key: of the draws; it is consumed.
      padded: the problem.
      number: `[C]` of each chain among all, if these are some whole ladders of many; what a
        chain draws goes by it.
      chains: of each ladder the first is the hottest; one of infinite makespan takes any
        proposal.
      proposals: a placement for each chain, of known makespan; every second ladder takes
        none, except to begin with.
      best_s: `[]` the best makespan known, which scales the temperatures.
      rounds: a move of every chain each.
      links: of what is simulated.
    """
    temperature_s = _ladder(chains.makespan_s.shape[0]) * best_s
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, number)
    first_keys, keys = _split(keys, 2)
    accepted = _accepts(first_keys, temperature_s, chains.makespan_s, proposals.makespan_s)
    # A policy that has settled would draw every ladder to where it is.
    listens = (number // RUNGS) % 2 == 0
    accepted &= listens | jnp.isinf(chains.makespan_s)
    chains = _where(accepted, proposals, chains)
    times = simulate_padded(padded, chains.placement, links=links, schedule=True)
    # Moves of this call keep to the critical chains of its start.
    critical = waiting_chain(padded, chains.placement, times.start_s, times.finish_s)

    def round_of_moves(
        turn: Array, carry: tuple[Placements, WaitingChain, Placements]
    ) -> tuple[Placements, WaitingChain, Placements]:
        chains, critical, best = carry
        turn_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, turn)
        once_keys, again_keys, twice_keys, accept_keys, exchange_keys = _split(turn_keys, 5)
        placement = mutate(once_keys, padded, chains.placement, critical)
        again = _uniform(again_keys) < 1 / 3
        twice = mutate(twice_keys, padded, placement, critical)
        placement = jnp.where(again[:, None], twice, placement)
        makespan_s = simulate_padded(padded, placement, links=links).makespan_s
        moved = Placements(placement=placement, makespan_s=makespan_s)
        accepted = _accepts(accept_keys, temperature_s, chains.makespan_s, makespan_s)
        best = _where(makespan_s < best.makespan_s, moved, best)
        chains = _where(accepted, moved, chains)
        places = _exchange(exchange_keys, temperature_s, chains.makespan_s, turn % 2)
        chains, critical = jax.tree.map(lambda array: array[places], (chains, critical))
        return chains, critical, best

    chains, _, best = jax.lax.fori_loop(0, rounds, round_of_moves, (chains, critical, chains))
    return chains, best


def _ladder(count: int) -> Array:
    """Returns the temperatures `[C]` of ladders of `RUNGS`, hottest first, falling evenly."""
    rung = jnp.arange(count) % RUNGS
    share = rung.astype(jnp.float32) / max(min(count, RUNGS) - 1, 1)
    return HOTTEST * (COLDEST / HOTTEST) ** share


def _split(keys: PRNGKey, count: int) -> tuple[PRNGKey, ...]:
    """Returns `count` keys from each of many `[C]`."""
    split = jax.vmap(lambda key: jax.random.split(key, count))(keys)
    return tuple(split[:, i] for i in range(count))


def _uniform(keys: PRNGKey) -> Array:
    """Returns a draw of [0, 1) by each key, `[C]`."""
    return jax.vmap(jax.random.uniform)(keys)


def _accepts(keys: PRNGKey, temperature_s: Array, old_s: Array, new_s: Array) -> Array:
    """Metropolis's rule, `[C]`; whatever is finite beats what is infinite."""
    worse_s = jnp.where(jnp.isfinite(old_s), new_s - old_s, -jnp.inf)
    return (worse_s <= 0) | (_uniform(keys) < jnp.exp(-worse_s / temperature_s))


def _exchange(keys: PRNGKey, temperature_s: Array, makespan_s: Array, parity: Array) -> Array:
    """Returns whose state each chain takes, `[C]`: its own, or that of a neighbouring rung.

    Pairs begin at rungs of one parity; each exchanges with Metropolis's probability.
    """
    count = makespan_s.shape[0]
    place = jnp.arange(count, dtype=jnp.int32)
    rung = place % RUNGS
    is_lower = rung % 2 == parity
    other_rung = rung + jnp.where(is_lower, 1, -1)
    other = place + jnp.where(is_lower, 1, -1)
    paired = (other_rung >= 0) & (other_rung < RUNGS) & (other < count)
    other = jnp.where(paired, other, place)
    gain = (makespan_s - makespan_s[other]) * (1 / temperature_s - 1 / temperature_s[other])
    # Both of a pair must decide by one draw.
    draw = _uniform(keys)[jnp.minimum(place, other)]
    exchanged = draw < jnp.exp(jnp.minimum(gain, 0.0))
    return jnp.where(exchanged, other, place)


def _where(mask: Array, chosen: Placements, otherwise: Placements) -> Placements:
    return Placements(
        placement=jnp.where(mask[:, None], chosen.placement, otherwise.placement),
        makespan_s=jnp.where(mask, chosen.makespan_s, otherwise.makespan_s),
    )
