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
class Elites:
    """The archive of the K best placements found, kept to be imitated."""

    placement: Array  # [K, N] int32
    makespan_s: Array  # [K] ascending; inf where there is none yet


@pytree
class TrainState:
    """State of a stage between two updates."""

    params: ArrayTree
    opt_state: ArrayTree
    key: PRNGKey  # of the run; update u draws from fold_in(key, u)
    update: Array  # [] int32, updates done
    episodes: Array  # [] int32, episodes spent
    evaluations: Array  # [] int32, placements simulated or measured, all told
    elites: Elites
    chain_placement: Array  # [C, N] of the local search, see `tempering.py`
    chain_makespan_s: Array  # [C] inf before the first update
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
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        key=key,
        update=jnp.zeros((), jnp.int32),
        episodes=jnp.zeros((), jnp.int32),
        evaluations=jnp.zeros((), jnp.int32),
        elites=Elites(
            placement=jnp.zeros((num_elites, size), jnp.int32),
            makespan_s=jnp.full(num_elites, jnp.inf, jnp.float32),
        ),
        chain_placement=jnp.zeros((num_chains, size), jnp.int32),
        chain_makespan_s=jnp.full(num_chains, jnp.inf, jnp.float32),
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


def keep_best(state: TrainState, placements: Array, makespan_s: Array) -> TrainState:
    """Returns the state with the best of its own and B placements `[B, N]`, `[B]`."""
    best, best_s = best_of(state.best_placement, state.best_makespan_s, placements, makespan_s)
    return dataclasses.replace(state, best_placement=best, best_makespan_s=best_s)


def best_of(
    known: Array, known_s: Array, placements: Array, makespan_s: Array
) -> tuple[Array, Array]:
    """Returns the best of a known placement `[N]` and B others `[B, N]`, and its makespan."""
    first = jnp.argmin(makespan_s)
    better = makespan_s[first] < known_s
    return (
        jnp.where(better, placements[first], known),
        jnp.where(better, makespan_s[first], known_s),
    )


def update_elites(elites: Elites, placements: Array, makespan_s: Array) -> Elites:
    """Returns the K best of the archive and the B new placements `[B, N]`.

    Of placements with one makespan (nearly always relabellings of each other) one is kept.
    """
    makespan_s = _each_once(jnp.concatenate([elites.makespan_s, makespan_s]))
    best = jnp.argsort(makespan_s)[: elites.makespan_s.shape[0]]
    return Elites(
        placement=jnp.concatenate([elites.placement, placements])[best],
        makespan_s=makespan_s[best],
    )


def _each_once(makespan_s: Array) -> Array:
    """Returns makespans `[B]` with inf in place of all but the first of equal ones."""
    order = jnp.argsort(makespan_s)
    repeated = jnp.diff(makespan_s[order], prepend=-jnp.inf) == 0
    return makespan_s.at[order].set(jnp.where(repeated, jnp.inf, makespan_s[order]))
