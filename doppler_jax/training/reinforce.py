"""The update that stages 2 and 3 share: policy gradient beside imitation of the elites."""

import dataclasses
from typing import Protocol

import chex
import jax
import jax.numpy as jnp

from doppler_jax.policies import model
from doppler_jax.policies.features import Problem
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policies.rollout import Episode, PolicyTables, replay
from doppler_jax.training.elites import update_elites
from doppler_jax.training.losses import (
    imitation_loss,
    normalised_advantage,
    policy_gradient_loss,
)
from doppler_jax.training.state import Elites, TrainState, descend, keep_best, make_optimizer


class ReinforceSettings(Protocol):
    """Settings that stages 2 and 3 share."""

    @property
    def learning_rate(self) -> float:
        """Of Adam."""

    @property
    def entropy_weight(self) -> float:
        """Of the entropy bonus at the start."""

    @property
    def entropy_halving(self) -> int:
        """Updates after which the weight has halved."""

    @property
    def elite_weight(self) -> float:
        """Of the elites' imitation."""


def reinforce_loss(
    problem: Problem,
    tables: PolicyTables,
    episodes: Episode,
    makespan_s: chex.Array,
    elites: Elites,
    update: chex.Array,
    settings: ReinforceSettings,
) -> chex.Array:
    """Returns the loss of stages 2 and 3: policy gradient beside imitation of the elites."""
    models = jax.vmap(replay, in_axes=(None, 0))(problem, elites.actions)
    is_elite = jnp.isfinite(elites.makespan_s).astype(jnp.float32)
    age = update.astype(jnp.float32) / settings.entropy_halving
    loss = policy_gradient_loss(
        problem,
        tables,
        episodes,
        normalised_advantage(makespan_s),
        settings.entropy_weight * 0.5**age,
    )
    return loss + settings.elite_weight * imitation_loss(problem, tables, models, is_elite)


def learn(
    state: TrainState,
    problem: Problem,
    episodes: Episode,
    makespan_s: chex.Array,
    policy: PolicyConfig,
    settings: ReinforceSettings,
) -> tuple[TrainState, chex.Array]:
    """Returns the state after an update by B episodes and their makespans `[B]`, and the loss.

    The makespans may be simulated or measured; elites and the best placement go by them.
    """
    elites = update_elites(state.elites, problem, episodes.placement, makespan_s)

    def loss_of(params: chex.ArrayTree) -> chex.Array:
        tables = model.apply(params, policy, problem)
        return reinforce_loss(
            problem, tables, episodes, makespan_s, elites, state.update, settings
        )

    loss, gradient = jax.value_and_grad(loss_of)(state.params)
    params, opt_state = descend(state, gradient, make_optimizer(settings.learning_rate))
    state = dataclasses.replace(
        keep_best(state, episodes.placement, makespan_s),
        params=params,
        opt_state=opt_state,
        update=state.update + 1,
        episodes=state.episodes + makespan_s.shape[0],
        elites=elites,
    )
    return state, loss
