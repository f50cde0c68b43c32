"""Attention within segments of a long sequence, and to the segment before."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

SEGMENT = 128
"""Tasks in a segment, at most."""


class SegmentAttention(nn.Module):
    """A layer of a Transformer over segments, whose cost is linear in their number.

    An element attends to all real elements of its own segment and of the one before, whose
    hidden states are a cache: no gradient flows into them. A stack of L layers reaches L
    segments back. What a layer caches is the output of the layer below, so that no segment
    has to wait for another one: all go through a layer at once.

    Reference: Dai et al., "Transformer-XL", 2019, the recurrence; without its relative
    positions and its causal mask, as in GDP.
    """

    width: int
    heads: int

    @nn.compact
    def __call__(self, hidden: chex.Array, real: chex.Array) -> chex.Array:
        """Returns the next hidden states.

        Args:
          hidden: `[K, S, width]` of K segments of S elements.
          real: `[K, S]` bool, which are no padding.
        """
        segments, length, _ = hidden.shape
        cached = jax.lax.stop_gradient(_before(hidden))
        seen = nn.LayerNorm()(jnp.concatenate([cached, hidden], axis=1))
        mask = jnp.concatenate([_before(real), real], axis=1)[:, None, None, :]

        def heads(values: chex.Array) -> chex.Array:
            values = nn.Dense(self.width, use_bias=False)(values)
            return values.reshape(segments, -1, self.heads, self.width // self.heads)

        attended = jax.nn.dot_product_attention(
            heads(seen[:, length:]),
            heads(seen),
            heads(seen),
            mask=jnp.broadcast_to(mask, (segments, 1, length, 2 * length)),
        )
        hidden = hidden + nn.Dense(self.width)(attended.reshape(hidden.shape))
        inner = nn.relu(nn.Dense(2 * self.width)(nn.LayerNorm()(hidden)))
        return hidden + nn.Dense(self.width)(inner)


def cut_segments(values: chex.Array) -> chex.Array:
    """Returns `values` `[M, ...]` as segments `[K, S, ...]`, padded by zeros at the end."""
    length = min(SEGMENT, values.shape[0])
    spare = -values.shape[0] % length
    values = jnp.pad(values, ((0, spare), *((0, 0),) * (values.ndim - 1)))
    return values.reshape(-1, length, *values.shape[1:])


def _before(values: chex.Array) -> chex.Array:
    """Returns for each segment the one before; zeros for the first."""
    return jnp.concatenate([jnp.zeros_like(values[:1]), values[:-1]])
