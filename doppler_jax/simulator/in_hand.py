"""What each lane of a lock-step execution is at: the task it started last, edge by edge.

A step starts a task in every lane that has followed all out-edges of its last, and then
follows one edge in every lane that has one left. In whatever order a lane starts its tasks,
that takes the same number of steps, so all lanes end together. Were every lane to wait until
all had followed theirs, most would be idle on graphs where few tasks have many edges.
"""

import dataclasses

import chex
import jax.numpy as jnp

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.simulator.lanes import at
from doppler_jax.types import pytree


@pytree
class InHand:
    """The task that each lane started last, and those of its out-edges that are left."""

    edge: chex.Array  # [L] int32, the next one
    end: chex.Array  # [L] int32, behind the last one
    device: chex.Array  # [L] int32, where the task runs
    finish_s: chex.Array  # [L]

    @property
    def done(self) -> chex.Array:
        """Whether no edge is left `[L]`."""
        return self.edge == self.end


def num_steps(padded: PaddedProblem) -> chex.Array:
    """Returns the steps in which every lane starts all tasks and follows all edges."""
    steps = jnp.maximum(padded.num_edges, 1)  # a task without edges takes one, too
    return steps.sum(dtype=jnp.int32) - (len(steps) - padded.num_tasks)


def nothing_in_hand(lanes: int, dtype: jnp.dtype) -> InHand:
    """Returns what lanes have before they start their first task."""
    none = jnp.zeros(lanes, jnp.int32)
    return InHand(edge=none, end=none, device=none, finish_s=jnp.zeros(lanes, dtype))


def take_in_hand(
    hand: InHand,
    padded: PaddedProblem,
    *,
    starts: chex.Array,
    task: chex.Array,
    device: chex.Array,
    finish_s: chex.Array,
) -> InHand:
    """Returns what lanes have in hand after they started a task, where `starts` `[L]` says so.

    Args:
      hand: what they had.
      padded: the problem.
      starts: `[L]` bool.
      task: `[L]` int32.
      device: `[L]` int32, where the task runs.
      finish_s: `[L]`, when it ends.
    """
    first = at(padded.first_edge, task)
    return InHand(
        edge=jnp.where(starts, first, hand.edge),
        end=jnp.where(starts, first + at(padded.num_edges, task), hand.end),
        device=jnp.where(starts, device, hand.device),
        finish_s=jnp.where(starts, finish_s, hand.finish_s),
    )


def next_edge(hand: InHand, padded: PaddedProblem) -> tuple[chex.Array, InHand]:
    """Returns the edge that each lane follows next `[L]`, and what it has in hand then.

    Lanes that are done get the last edge, to the task that never runs.
    """
    nobody = padded.edge_reader.shape[0] - 1
    edge = jnp.where(hand.done, nobody, hand.edge)
    later = jnp.where(hand.done, hand.edge, hand.edge + 1)
    return edge, dataclasses.replace(hand, edge=later)
