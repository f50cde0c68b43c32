"""Sines and cosines that name positions and devices (Vaswani et al. 2017)."""

import chex
import jax.numpy as jnp

OCTAVES = 10
"""Frequencies, each twice the one before."""


def sinusoids(turns: chex.Array) -> chex.Array:
    """Returns sines and cosines `[K, 2 * OCTAVES]` of turns `[K]`, each octave twice as fast.

    Numbers below `2**OCTAVES`, divided by it, are told apart by the fastest ones if they are
    neighbours, by the slow ones if they are not.
    """
    rates = 2 * jnp.pi * jnp.exp2(jnp.arange(OCTAVES, dtype=jnp.float32))
    angle = turns[:, None] * rates[None]
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
