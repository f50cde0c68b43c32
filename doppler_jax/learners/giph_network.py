"""GiPH's network: scores every move of one task to one device, given a whole placement."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.types import pytree


@pytree
class SearchState:
    """A placement, its simulated schedule, and the task that was moved last."""

    placement: chex.Array  # [N] int32
    start_s: chex.Array  # [N]
    finish_s: chex.Array  # [N]
    makespan_s: chex.Array  # []
    last: chex.Array  # [] int32, N if none


@pytree
class _Edges:
    """The E edges under a placement, padded ones from and to row N; times in seconds."""

    sender: chex.Array  # [E] int32
    reader: chex.Array  # [E] int32
    in_s: chex.Array  # [E, D] transfer if the reader were on device d
    out_s: chex.Array  # [E, D] transfer if the sender were on device d
    now_s: chex.Array  # [E]


class GiphNetwork(nn.Module):
    """Message passing along and against the edges, and a score for every (task, device).

    Tasks and edges carry the schedule of the placement, so that what is embedded is the
    placed graph; a device is known by the tasks on it. Every step costs O(E D).
    """

    width: int
    rounds: int

    @nn.compact
    def __call__(self, problem: PolicyInputs, state: SearchState) -> chex.Array:
        """Returns the logits `[N, D]` of moves, -inf where not legal."""
        padded = problem.padded
        rows, d = padded.compute_s.shape
        device = jnp.pad(state.placement, (0, 1))
        start_s, finish_s = jnp.pad(state.start_s, (0, 1)), jnp.pad(state.finish_s, (0, 1))
        edges = _edges(padded, device)
        arrival_s = jax.ops.segment_max(
            finish_s[edges.sender][:, None] + edges.in_s, edges.reader, rows
        )
        arrival_s = jnp.maximum(arrival_s, padded.input_ready_s)
        in_s = jax.ops.segment_sum(edges.in_s, edges.reader, rows)
        out_s = jax.ops.segment_sum(edges.out_s, edges.sender, rows)
        compute_s = jnp.where(jnp.isfinite(padded.compute_s), padded.compute_s, 0.0)
        load_s = jax.ops.segment_sum(_at(compute_s, device), device, d)

        def units(*times_s: chex.Array) -> chex.Array:
            scaled = jnp.stack(times_s, axis=-1) / problem.unit_s
            return jnp.sign(scaled) * jnp.log1p(jnp.abs(scaled))

        def more(times_s: chex.Array) -> chex.Array:
            return times_s - _at(times_s, device)[:, None]

        makespan_s = jnp.maximum(state.makespan_s, jnp.finfo(jnp.float32).tiny)
        wait_s = start_s - _at(arrival_s, device)
        node = jnp.concatenate(
            [
                problem.task_features,
                units(_at(compute_s, device), wait_s, _at(in_s, device), _at(out_s, device)),
                jnp.stack([start_s, finish_s, load_s[device]], axis=-1) / makespan_s,
            ],
            axis=-1,
        )
        edge_wait_s = start_s[edges.reader] - finish_s[edges.sender] - edges.now_s
        embedding = self._embed(node, units(edges.now_s, edge_wait_s), edges)

        tasks = jnp.arange(rows)
        real = (tasks < padded.num_tasks)[:, None]
        here = (device[:, None] == jnp.arange(d)[None]) & real
        load = jnp.broadcast_to(load_s[None], (rows, d)) / makespan_s
        move = jnp.concatenate(
            [
                units(compute_s, arrival_s - start_s[:, None], more(in_s), more(out_s)),
                jnp.stack([load - load_s[device][:, None] / makespan_s, load], axis=-1),
            ],
            axis=-1,
        )
        scores = self._score(embedding, here, move)
        legal = jnp.isfinite(padded.compute_s) & ~here & real
        legal &= (tasks != state.last)[:, None]
        return jnp.where(legal, scores, -jnp.inf)[:-1]

    def _embed(self, node: chex.Array, edge: chex.Array, edges: _Edges) -> chex.Array:
        """Returns the embeddings `[N + 1, h]`; every direction has its own weights."""
        rows = node.shape[0]
        hidden = nn.Dense(self.width)(node)
        real = (edges.reader != rows - 1).astype(hidden.dtype)[:, None]
        for _ in range(self.rounds):
            heard = [hidden]
            for source, target in (
                (edges.sender, edges.reader),
                (edges.reader, edges.sender),
            ):
                sent = nn.Dense(self.width, use_bias=False)(hidden)[source]
                message = nn.leaky_relu(sent + nn.Dense(self.width)(edge)) * real
                heard.append(jax.ops.segment_sum(message, target, rows))
            new = nn.Dense(self.width)(jnp.concatenate(heard, axis=-1))
            hidden = hidden + nn.leaky_relu(new)
        return nn.LayerNorm()(hidden)

    def _score(self, embedding: chex.Array, here: chex.Array, move: chex.Array) -> chex.Array:
        """Returns scores `[N + 1, D]` from embeddings, device masks and move features."""
        on = here.astype(embedding.dtype)
        members = (on.T @ embedding) / jnp.maximum(on.sum(0), 1.0)[:, None]
        hidden = (
            nn.Dense(self.width)(embedding)[:, None]
            + nn.Dense(self.width, use_bias=False)(members)[None]
            + nn.Dense(self.width, use_bias=False)(move)
        )
        out = nn.Dense(1, kernel_init=nn.initializers.zeros)
        return out(nn.leaky_relu(hidden))[..., 0]


def _edges(padded: PaddedProblem, device: chex.Array) -> _Edges:
    """Returns the edges under the placement `[N + 1]`.

    A tensor counts once per reader, although it travels once per device.
    """
    rows = padded.compute_s.shape[0]
    reader = jnp.asarray(padded.edge_reader)
    sender = jnp.repeat(jnp.arange(rows), padded.num_edges, total_repeat_length=reader.shape[0])
    real = (reader != rows - 1)[:, None]
    num_bytes = jnp.asarray(padded.edge_bytes)[:, None]
    latency_s, per_byte_s = map(jnp.asarray, (padded.latency_s, padded.seconds_per_byte))
    from_s, to_s = device[sender], device[reader]
    in_s = jnp.where(real, latency_s[from_s] + num_bytes * per_byte_s[from_s], 0.0)
    out_s = jnp.where(real, latency_s.T[to_s] + num_bytes * per_byte_s.T[to_s], 0.0)
    return _Edges(sender=sender, reader=reader, in_s=in_s, out_s=out_s, now_s=_at(in_s, to_s))


def _at(values: chex.Array, device: chex.Array) -> chex.Array:
    """Returns the entry of each row of `[..., D]` at its own device."""
    return jnp.take_along_axis(values, device[:, None], axis=1)[:, 0]
