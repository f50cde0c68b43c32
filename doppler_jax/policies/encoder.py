"""Task embeddings: message passing over the edges, in both directions, once per update."""

import flax.linen as nn
import jax.numpy as jnp
import jraph
from chex import Array

from doppler_jax.policies.features import PolicyInputs


class Encoder(nn.Module):
    """Embeds every task of a problem by rounds of a Jraph graph network.

    An edge's message reads both its ends, and a task reads the messages of the edges
    that leave it and of those that enter it, so information flows both ways.
    """

    width: int
    rounds: int

    @nn.compact
    def __call__(self, problem: PolicyInputs) -> Array:
        """Returns the embeddings `[N + 1, width]`."""
        graph = jraph.GraphsTuple(
            nodes=nn.Dense(self.width)(problem.task_features),
            edges=problem.edge_features,
            senders=problem.edge_sender,
            receivers=problem.edge_receiver,
            globals=None,
            n_node=jnp.array([problem.task_features.shape[0]]),
            n_edge=jnp.array([problem.edge_sender.shape[0]]),
        )
        for _ in range(self.rounds):
            network = jraph.GraphNetwork(
                update_edge_fn=self._messages, update_node_fn=self._update
            )
            passed = network(graph)
            graph = graph._replace(nodes=graph.nodes + passed.nodes)
        return nn.LayerNorm()(graph.nodes)

    def _messages(self, edge: Array, sent: Array, received: Array, _: None) -> Array:
        ends = jnp.concatenate([edge, sent, received], axis=-1)
        return nn.leaky_relu(nn.Dense(self.width)(ends))

    def _update(self, node: Array, sent: Array, received: Array, _: None) -> Array:
        seen = jnp.concatenate([node, sent, received], axis=-1)
        return nn.leaky_relu(nn.Dense(self.width)(seen))
