"""GDP: all tasks placed at once by attention over GraphSAGE embeddings, trained by PPO.

Read the method first (`Gdp`), then its network and the two layers it is made of.
"""

import dataclasses
from typing import ClassVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from chex import Array, ArrayTree, PRNGKey

from doppler_jax.learners.learner import EpisodeLearner, Explored
from doppler_jax.policies.features import OCTAVES, PolicyInputs, sinusoids
from doppler_jax.simulator.batches import simulate_padded
from doppler_jax.training.reinforce import normalised_advantage
from doppler_jax.types import pytree

SEGMENT = 128
"""Tasks in a segment, at most."""


@pytree
class GdpLesson:
    """What the loss reads of B episodes."""

    placement: Array  # [B, N] int32
    log_p: Array  # [B, N] of each task's device when it was drawn
    advantage: Array  # [B]


@dataclasses.dataclass(frozen=True)
class Gdp(EpisodeLearner):
    """The method GDP and its settings.

    A network (`GdpNetwork`) gives every task a distribution over devices, in one pass; an
    episode draws all devices independently. The reward is minus the square root of the
    makespan, and PPO raises the clipped surrogate of each task's choice with an entropy bonus.

    Reference: Zhou et al., "GDP: Generalized Device Placement for Dataflow Graphs", arXiv
    1910.01578, 2019. As published: GraphSAGE with max-pooling, segment-recurrent attention
    without positions, superposition, no autoregression, PPO, the reward. Where we differ, or
    chose what we could not find out:
    - Their output layer has a unit per device. Here its column is computed from the device's
      number (sines and cosines of it) and the task's time there, so that one set of
      parameters serves any number of devices. Like theirs, it depends on how equal devices
      are numbered.
    - Their tasks carry operation, shapes and the ids of their neighbours. Ours carry the
      features that all learned methods here share, and their position in topological order.
    - Embeddings are standardised over the graph's tasks before the placer. Without that, all
      tasks moved to one device together, and nothing was learned.
    - The ratio is clipped for each task by itself.
    - The mean reward that is subtracted is that of the batch, not of all trials before, and
      the difference is divided by the batch's deviation.
    - Memory is not part of the reward: `dj.place` looks after it.
    - Sizes, rates and counts are ours, small enough for a CPU.
    """

    name: ClassVar[str] = "gdp"

    batch: int = 256
    epochs: int = 4
    minibatches: int = 2
    width: int = 64  # of embeddings and hidden layers
    rounds: int = 3  # layers of GraphSAGE
    layers: int = 2  # of attention
    heads: int = 4
    clip: float = 0.2  # of the ratio of probabilities, around 1
    entropy_weight: float = 3e-2  # at the start
    entropy_halving: int = 200  # updates after which it has halved

    def init(self, key: PRNGKey, problem: PolicyInputs) -> ArrayTree:
        """Returns fresh parameters, all devices equally likely; the key is consumed."""
        return GdpNetwork(self).init(key, problem)["params"]

    def logits(self, params: ArrayTree, problem: PolicyInputs) -> Array:
        """Returns the logits `[N, D]`, -inf where a device cannot run the task."""
        logits = GdpNetwork(self).apply({"params": params}, problem)
        chex.assert_shape(logits, problem.padded.compute_s[:-1].shape)
        return logits

    def explore(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, update: Array, links: str
    ) -> Explored:
        """Draws and simulates `batch` placements; the key is consumed."""
        logits = self.logits(params, problem)
        placement = _draw(key, logits, self.batch)
        makespan_s = simulate_padded(problem.padded, placement, links=links).makespan_s
        lesson = GdpLesson(
            placement=placement,
            log_p=chosen_log_prob(logits, placement),
            advantage=normalised_advantage(jnp.sqrt(makespan_s)),
        )
        return Explored(lesson=lesson, placement=placement, makespan_s=makespan_s)

    def loss(
        self, params: ArrayTree, problem: PolicyInputs, lesson: GdpLesson, update: Array
    ) -> Array:
        """Returns minus surrogate and entropy bonus, means over tasks and episodes."""
        logits = self.logits(params, problem)
        ratio = jnp.exp(chosen_log_prob(logits, lesson.placement) - lesson.log_p)
        gain = clipped_gain(ratio, lesson.advantage[:, None], self.clip)
        real = _real_tasks(problem)
        count = jnp.maximum(real.sum(dtype=gain.dtype), 1.0)
        bonus = self.entropy_weight * 0.5 ** (update.astype(jnp.float32) / self.entropy_halving)
        value = jnp.where(real, gain.mean(0) + bonus * _entropy(logits), 0.0)
        return -value.sum() / count

    def draw(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, count: int, links: str
    ) -> Array:
        """Returns each task's likeliest device and `count - 1` draws; the key is consumed."""
        logits = self.logits(params, problem)
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jnp.concatenate([greedy[None], _draw(key, logits, count - 1)])


class GdpNetwork(nn.Module):
    """GraphSAGE, then a placer of segment-recurrent attention with superposition."""

    config: Gdp

    @nn.compact
    def __call__(self, problem: PolicyInputs) -> Array:
        """Returns the logits `[N, D]`, -inf where a device cannot run the task."""
        width = self.config.width
        real = _real_tasks(problem)
        rank = jnp.asarray(problem.topological_rank)
        num_tasks = jnp.maximum(real.sum(dtype=jnp.float32), 1.0)
        position = sinusoids(rank.astype(jnp.float32) / num_tasks)
        seen = jnp.concatenate([problem.task_features, position], axis=-1)
        embedding = GraphSage(width, self.config.rounds)(
            seen, problem.edge_sender, problem.edge_receiver
        )[:-1]
        weight = real.astype(jnp.float32)[:, None] / num_tasks
        pooled = (weight * embedding).sum(0)
        spread = jnp.sqrt((weight * (embedding - pooled[None]) ** 2).sum(0) + 1e-6)
        # Tasks of a graph embed alike; their differences are what the placer needs.
        embedding = (embedding - pooled[None]) / spread[None]
        # Superposition: every layer's input is scaled by what kind of graph it is.
        scale = nn.Dense(width, bias_init=nn.initializers.ones)(pooled)[None, None]

        order = jnp.argsort(rank[:-1])
        hidden, there = cut_segments(embedding[order]), cut_segments(real[order])
        for _ in range(self.config.layers):
            hidden = SegmentAttention(width, self.config.heads)(scale * hidden, there)
        hidden = nn.LayerNorm()(scale * hidden).reshape(-1, width)[jnp.argsort(order)]
        return self._device_logits(hidden, problem)

    def _device_logits(self, hidden: Array, problem: PolicyInputs) -> Array:
        """Products of what a task asks for with each device's code and its time there."""
        width = self.config.width
        compute_s = problem.padded.compute_s[:-1]
        devices = compute_s.shape[1]
        allowed = jnp.isfinite(compute_s)
        time = jnp.log1p(jnp.where(allowed, compute_s, 0.0) / problem.unit_s)
        code = sinusoids(jnp.arange(devices, dtype=jnp.float32) / 2**OCTAVES)
        column = nn.Dense(width)(code)  # [D, width]
        # Zeros: all devices are equally likely at the start.
        query = nn.Dense(width + 1, kernel_init=nn.initializers.zeros)(hidden)
        logits = query[:, :-1] @ column.T / width**0.5 + query[:, -1:] * time
        return jnp.where(allowed, logits, -jnp.inf)


def clipped_gain(ratio: Array, advantage: Array, clip: float) -> Array:
    """Returns PPO's surrogate: `min(r A, clip(r, 1 - clip, 1 + clip) A)`, element by element.

    Its gradient is 0 where a choice has already been made likelier (if A is positive, less
    likely if negative) by more than `clip`.

    Reference: Schulman et al., "Proximal policy optimization algorithms", 2017.
    """
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    return jnp.minimum(ratio * advantage, clipped * advantage)


def chosen_log_prob(logits: Array, placement: Array) -> Array:
    """Returns the log-probability `[B, N]` of every device of placements `[B, N]`."""
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits)[None], placement[..., None], -1)
    return log_p[..., 0]


def _entropy(logits: Array) -> Array:
    """Returns the entropy `[N]` of every task's distribution."""
    log_p = jax.nn.log_softmax(logits)
    log_p = jnp.where(jnp.isfinite(logits), log_p, 0.0)
    return -(jax.nn.softmax(logits) * log_p).sum(-1)


def _draw(key: PRNGKey, logits: Array, count: int) -> Array:
    """Returns `count` placements `[count, N]`, each task's device drawn by itself."""
    shape = (count, logits.shape[0])
    return jax.random.categorical(key, logits, shape=shape).astype(jnp.int32)


def _real_tasks(problem: PolicyInputs) -> Array:
    return jnp.arange(problem.padded.padded_tasks) < problem.padded.num_tasks


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
    def __call__(self, features: Array, senders: Array, receivers: Array) -> Array:
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
    def __call__(self, hidden: Array, real: Array) -> Array:
        """Returns the next hidden states.

        Args:
          hidden: `[K, S, width]` of K segments of S elements.
          real: `[K, S]` bool, which are no padding.
        """
        segments, length, _ = hidden.shape
        cached = jax.lax.stop_gradient(_before(hidden))
        seen = nn.LayerNorm()(jnp.concatenate([cached, hidden], axis=1))
        mask = jnp.concatenate([_before(real), real], axis=1)[:, None, None, :]

        def heads(values: Array) -> Array:
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


def cut_segments(values: Array) -> Array:
    """Returns `values` `[M, ...]` as segments `[K, S, ...]`, padded by zeros at the end."""
    length = min(SEGMENT, values.shape[0])
    spare = -values.shape[0] % length
    values = jnp.pad(values, ((0, spare), *((0, 0),) * (values.ndim - 1)))
    return values.reshape(-1, length, *values.shape[1:])


def _before(values: Array) -> Array:
    """Returns for each segment the one before; zeros for the first."""
    return jnp.concatenate([jnp.zeros_like(values[:1]), values[:-1]])
