"""Seconds that devices spend on transfers themselves, for many placements at once.

Where a device copies with what it computes on, sending and receiving take its time
(`Costs.handling_s`). This is LogGP's overhead (Alexandrov et al., 1995), spent with the task
that makes what is sent, and with the first by id of those that read it there.
"""

import chex
import jax
import jax.numpy as jnp

from doppler_jax.graphs.padded import PaddedProblem

_AT_ONCE = 256
"""Placements of one chunk: its tables are of edges times devices."""


def handling_seconds(padded: PaddedProblem, placements: chex.Array) -> chex.Array | None:
    """Returns what tasks are longer by `[B, N + 1]` for what they send and receive, or None.

    Args:
      padded: the problem; None is returned if its devices spend no time.
      placements: `[B, N + 1]` int32.
    """
    if padded.handling_s is None or padded.handling_s_per_byte is None:
        return None
    return jax.lax.map(lambda one: _of_one(padded, one), placements, batch_size=_AT_ONCE)


def _of_one(padded: PaddedProblem, placement: chex.Array) -> chex.Array:
    """Returns the seconds `[N + 1]` of one placement `[N + 1]`."""
    rows, edges = len(placement), len(padded.edge_reader)
    tasks, edge = jnp.arange(rows, dtype=jnp.int32), jnp.arange(edges, dtype=jnp.int32)
    maker = jnp.repeat(tasks, padded.num_edges, total_repeat_length=edges)
    reader = padded.edge_reader
    there = placement[reader]
    # Edges of a tensor are neighbours, readers in the order of their ids.
    devices = jnp.arange(padded.num_devices, dtype=jnp.int32)
    reads = (there[:, None] == devices[None]).astype(jnp.int32)
    earlier = jnp.cumsum(reads, axis=0, dtype=jnp.int32) - reads
    opening = jax.lax.cummax(jnp.where(padded.edge_opens, edge, 0))
    mine = jnp.take_along_axis(earlier - earlier[opening], there[:, None], axis=1)[:, 0]
    moved = (mine == 0) & (there != placement[maker]) & (reader < rows - 1)

    dtype = padded.compute_s.dtype
    amounts = jnp.stack([jnp.ones(edges, dtype), padded.edge_bytes], axis=1)
    amounts = jnp.where(moved[:, None], amounts, 0)
    count, num_bytes = (
        jax.ops.segment_sum(amounts, maker, rows) + jax.ops.segment_sum(amounts, reader, rows)
    ).T
    each_s, per_byte = (
        jnp.asarray(y)[placement] for y in (padded.handling_s, padded.handling_s_per_byte)
    )
    return count * each_s + num_bytes * per_byte
