"""What training carries from update to update, the best placements found among it."""

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from chex import Array, ArrayTree, PRNGKey

from doppler_jax.policies.features import PolicyInputs
from doppler_jax.types import pytree


@pytree
class Placements:
    """B placements, padded, and what each is worth."""

    placement: Array  # [B, N] int32
    makespan_s: Array  # [B] inf where there is none yet


@pytree
class TrainState:
    """State of a stage between two updates."""

    params: ArrayTree
    opt_state: ArrayTree
    key: PRNGKey  # of the run; update u draws from fold_in(key, u)
    update: Array  # [] int32, updates done
    episodes: Array  # [] int32, episodes spent
    evaluations: Array  # [] int32, placements simulated or measured, all told
    elites: Placements  # the K best found, the best first, kept to be imitated
    chains: Placements  # C of the local search, see `tempering.py`
    best_placement: Array  # [N] padded
    best_makespan_s: Array  # [] of the best placement; inf at the start


StateT = TypeVar("StateT", bound=TrainState)
"""A training state of some kind."""


def make_optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Returns Adam behind a bound on the gradient's norm."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))


def init_state(
    key: PRNGKey,
    params: ArrayTree,
    optimizer: optax.GradientTransformation,
    problem: PolicyInputs,
    num_elites: int,
    num_chains: int = 1,
) -> TrainState:
    """Returns the state before the first update; the key is consumed."""
    size = problem.padded.padded_tasks

    def none(count: int) -> Placements:
        return Placements(
            placement=jnp.zeros((count, size), jnp.int32),
            makespan_s=jnp.full(count, jnp.inf, jnp.float32),
        )

    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        key=key,
        update=jnp.zeros((), jnp.int32),
        episodes=jnp.zeros((), jnp.int32),
        evaluations=jnp.zeros((), jnp.int32),
        elites=none(num_elites),
        chains=none(num_chains),
        best_placement=jnp.zeros(size, jnp.int32),
        best_makespan_s=jnp.float32(jnp.inf),
    )


def descend(
    state: TrainState, gradient: ArrayTree, optimizer: optax.GradientTransformation
) -> tuple[ArrayTree, ArrayTree]:
    """Returns parameters and optimiser state after one step down the gradient."""
    # Optax mixes its own integer and float scalars; callers may have forbidden that.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), opt_state


def keep_best(state: StateT, placements: Array, makespan_s: Array) -> StateT:
    """Returns the state with the best among its own and B placements `[B, N]`, `[B]`."""
    first = jnp.argmin(makespan_s)
    better = makespan_s[first] < state.best_makespan_s
    return dataclasses.replace(
        state,
        elites=update_elites(state.elites, placements, makespan_s),
        best_placement=jnp.where(better, placements[first], state.best_placement),
        best_makespan_s=jnp.where(better, makespan_s[first], state.best_makespan_s),
    )


def update_elites(elites: Placements, placements: Array, makespan_s: Array) -> Placements:
    """Returns the K best of the elites and B new placements `[B, N]`.

    Of placements with one makespan (nearly always relabellings of each other) one is kept.
    """
    makespan_s = _each_once(jnp.concatenate([elites.makespan_s, makespan_s]))
    best = jnp.argsort(makespan_s)[: elites.makespan_s.shape[0]]
    return Placements(
        placement=jnp.concatenate([elites.placement, placements])[best],
        makespan_s=makespan_s[best],
    )


def _each_once(makespan_s: Array) -> Array:
    """Returns makespans `[B]` with inf in place of all but the first of equal ones."""
    order = jnp.argsort(makespan_s)
    repeated = jnp.diff(makespan_s[order], prepend=-jnp.inf) == 0
    return makespan_s.at[order].set(jnp.where(repeated, jnp.inf, makespan_s[order]))
