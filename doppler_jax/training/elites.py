"""The archive of the best placements found, kept to be imitated."""

import chex
import jax
import jax.numpy as jnp

from doppler_jax.policies.features import Problem
from doppler_jax.policies.rollout import Actions
from doppler_jax.simulator.simulate import simulate_instance
from doppler_jax.training.state import Elites


def update_elites(
    elites: Elites, problem: Problem, placements: chex.Array, makespan_s: chex.Array
) -> Elites:
    """Returns the K best of the archive and the B new placements `[B, N]`.

    Of placements with one makespan (nearly always relabellings of each other) one is kept.
    """
    num_new = min(elites.makespan_s.shape[0], placements.shape[0])
    makespan_s = _each_once(makespan_s)
    _, best = jax.lax.top_k(-makespan_s, num_new)
    new = simulated_order(problem, placements[best])
    actions = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), elites.actions, new)
    makespans = _each_once(jnp.concatenate([elites.makespan_s, makespan_s[best]]))
    keep = jnp.argsort(makespans)[: elites.makespan_s.shape[0]]
    return Elites(
        actions=jax.tree.map(lambda array: array[keep], actions), makespan_s=makespans[keep]
    )


def elite_placements(problem: Problem, elites: Elites) -> chex.Array:
    """Returns the placements `[K, N]` of the elites."""
    size = problem.instance.padded_tasks
    actions = elites.actions
    row = jnp.arange(actions.task.shape[0])[:, None]
    nothing = jnp.zeros((actions.task.shape[0], size), jnp.int32)
    # Task N of the tail is no column: it is dropped.
    return nothing.at[row, actions.task].set(actions.device, mode="drop")


def _each_once(makespan_s: chex.Array) -> chex.Array:
    """Returns makespans `[B]` with inf in place of all but the first of equal ones."""
    order = jnp.argsort(makespan_s)
    repeated = jnp.diff(makespan_s[order], prepend=-jnp.inf) == 0
    return makespan_s.at[order].set(jnp.where(repeated, jnp.inf, makespan_s[order]))


def simulated_order(problem: Problem, placements: chex.Array) -> Actions:
    """Returns placements `[B, N]` as actions, tasks in the order of their simulated starts.

    Ties go to the earlier finish (a task of length 0 may precede another's start), then to
    the topologically earlier task, so that the order can be replayed.
    """
    instance = problem.instance
    times = simulate_instance(instance, placements, schedule=True)
    rank = jnp.broadcast_to(problem.topological_rank[None, :-1], placements.shape)
    order = jnp.lexsort((rank, times.finish_s, times.start_s), axis=-1).astype(jnp.int32)
    real = jnp.arange(order.shape[1])[None] < instance.num_tasks
    return Actions(
        task=jnp.where(real, order, instance.padded_tasks),
        device=jnp.where(real, jnp.take_along_axis(placements, order, axis=1), 0),
    )
