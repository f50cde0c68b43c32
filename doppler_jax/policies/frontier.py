"""SEL's choices at every step of an episode, recomputed from its actions.

A task is in the frontier from the step after its last producer's to its own: an interval of
steps. The sums over all intervals that hold a step come from a segment tree, of whose nodes an
interval takes O(log T): T steps cost O(T log T), however wide the frontiers are. Recorded,
those of 256 episodes of 20,480 steps and 512 chains are 13 GB. Differences of running sums
would be cheaper, but exponentials of scores differ by e^40, and float32 would lose the small.
"""

import jax
import jax.numpy as jnp
from chex import Array

from doppler_jax.policies.features import PolicyInputs

NOTHING = -1e30
"""The score of no task: far below all others, and finite, so that no gradient is undefined."""


def ready_steps(problem: PolicyInputs, task: Array) -> Array:
    """Returns the step from which on each step's task was in the frontier.

    Args:
      problem: the problem.
      task: `[T]` int, the task of every step; N pads the tail.

    Returns:
      `[T]` int32, at most the step itself; equal to it in the tail.
    """
    nobody = problem.padded.padded_tasks
    steps = jnp.arange(len(task), dtype=jnp.int32)
    placed = jnp.zeros(nobody + 1, jnp.int32).at[task].set(steps)
    producers = problem.padded.pred_task[task]
    ready = jnp.where(producers == nobody, 0, placed[producers] + 1).max(-1, initial=0)
    return jnp.where(task == nobody, steps, ready)


def frontier_softmax(ready: Array, score: Array) -> tuple[Array, Array]:
    """Returns log-probability and entropy of every step's choice among the frontier's tasks.

    Differentiable in the scores.

    Args:
      ready: `[T]` int, the first step at which each step's task was in the frontier.
      score: `[T]` SEL's score of the task.

    Returns:
      `[T]` each.
    """
    slot, partner, opens = _lay_out(ready)
    size = len(partner)
    own = jnp.full(size, NOTHING, score.dtype).at[slot[0]].set(score).at[slot[1]].set(score)
    # What each slot's own task adds, then what all do that wait throughout a node it is in.
    parts = [jnp.stack([own, jnp.ones_like(own), jnp.zeros_like(own)])]
    index = jnp.arange(size)
    for level in range(size.bit_length() - 1):
        # An interval takes the siblings, towards its other end, of the nodes that its ends
        # are in, up to where these have one parent.
        inward = ((index >> level) & 1) == jnp.where(opens, 0, 1)
        apart = (index >> (level + 1)) != (partner >> (level + 1))
        sums = _shifted_sums(jnp.where(inward & apart, own, NOTHING).reshape(-1, 1 << level))
        siblings = sums.reshape(3, -1, 2)[:, :, ::-1].reshape(3, -1, 1)
        parts.append(jnp.broadcast_to(siblings, (3, size >> level, 1 << level)).reshape(3, -1))
    largest, total, moment = jnp.stack(parts, axis=1)
    shift = jax.lax.stop_gradient(largest.max(0))
    below = largest - shift[None]
    weight = jnp.exp(below)
    moment = (weight * (moment + below * total)).sum(0)
    total = (weight * total).sum(0)
    log_total = jnp.log(total)
    log_p, entropy = own - shift - log_total, log_total - moment / total
    return log_p[slot[1]], entropy[slot[1]]


def _lay_out(ready: Array) -> tuple[Array, Array, Array]:
    """Gives both ends of every interval a slot of their own, in the order of time.

    Returns:
      Slots `[2, T]` of the ends of each step's task; of every slot the other end's, and
      whether it is the one that opens, `[S]`, S the least power of two from 2 T on.
    """
    count = jnp.arange(len(ready), dtype=jnp.int32)
    order = jnp.argsort(ready)
    sorted_ready = ready[order]
    begin = jnp.zeros_like(count).at[order].set(sorted_ready + count)
    # What becomes ready in a step comes before what is placed in it.
    end = count + jnp.searchsorted(sorted_ready, count, side="right").astype(jnp.int32)
    index = jnp.arange(1 << max(2 * len(ready) - 1, 1).bit_length(), dtype=jnp.int32)
    partner = index.at[begin].set(end).at[end].set(begin)
    return jnp.stack([begin, end]), partner, partner > index


def _shifted_sums(values: Array) -> Array:
    """Returns of every row the largest m, and the sums of exp(x - m) and (x - m) exp(x - m).

    Of `[R, K]` it makes `[3, R]`.
    """
    largest = jax.lax.stop_gradient(values.max(-1))
    below = values - largest[:, None]
    weight = jnp.exp(below)
    return jnp.stack([largest, weight.sum(-1), (weight * below).sum(-1)])
