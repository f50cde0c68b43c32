"""GraphSAGE: task embeddings of what the neighbours send, the largest of each component."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp


class GraphSage(nn.Module):
    """Embeds tasks by layers of max-pool aggregation.

    A layer computes `g_v = max over neighbours u of ReLU(W h_u + b)` and
    `h_v <- ReLU(U [h_v, g_v] + c)`; a task without neighbours has `g_v = 0`.

    Reference: Hamilton, Ying and Leskovec, "Inductive representation learning on large
    graphs", 2017, the pooling aggregator. Theirs samples neighbours and scales embeddings to
    length 1; here all neighbours count, those at both ends of a task's edges.
    """

    width: int
    layers: int

    @nn.compact
    def __call__(
        self, features: chex.Array, senders: chex.Array, receivers: chex.Array
    ) -> chex.Array:
        """Returns embeddings `[N + 1, width]` from `features` `[N + 1, F]` and edges `[E]`."""
        here = jnp.concatenate([receivers, senders])
        there = jnp.concatenate([senders, receivers])
        hidden = nn.relu(nn.Dense(self.width)(features))
        for _ in range(self.layers):
            sent = nn.relu(nn.Dense(self.width)(hidden))[there]
            pooled = jax.ops.segment_max(sent, here, num_segments=features.shape[0])
            # What is sent is not negative; the maximum of nothing would be -inf.
            pooled = jnp.where(jnp.isfinite(pooled), pooled, 0.0)
            hidden = nn.relu(nn.Dense(self.width)(jnp.concatenate([hidden, pooled], axis=-1)))
        return hidden
