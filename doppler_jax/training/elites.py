"""The archive of the best placements found, kept to be imitated."""

import chex
import jax.numpy as jnp

from doppler_jax.training.state import Elites


def update_elites(elites: Elites, placements: chex.Array, makespan_s: chex.Array) -> Elites:
    """Returns the K best of the archive and the B new placements `[B, N]`.

    Of placements with one makespan (nearly always relabellings of each other) one is kept.
    """
    makespan_s = _each_once(jnp.concatenate([elites.makespan_s, makespan_s]))
    best = jnp.argsort(makespan_s)[: elites.makespan_s.shape[0]]
    return Elites(
        placement=jnp.concatenate([elites.placement, placements])[best],
        makespan_s=makespan_s[best],
    )


def _each_once(makespan_s: chex.Array) -> chex.Array:
    """Returns makespans `[B]` with inf in place of all but the first of equal ones."""
    order = jnp.argsort(makespan_s)
    repeated = jnp.diff(makespan_s[order], prepend=-jnp.inf) == 0
    return makespan_s.at[order].set(jnp.where(repeated, jnp.inf, makespan_s[order]))
