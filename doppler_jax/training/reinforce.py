"""The update that stages 2 and 3 share: policy gradient beside imitation of the elites."""

import dataclasses
from typing import Protocol

import chex
import jax
import jax.numpy as jnp

from doppler_jax.policies import model
from doppler_jax.policies.features import Problem
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policies.rollout import Episode, PolicyTables, follow
from doppler_jax.training.elites import elite_placements, update_elites
from doppler_jax.training.losses import Lesson, loss_and_gradient, normalised_advantage
from doppler_jax.training.state import Elites, TrainState, descend, keep_best, make_optimizer

ELITE_SPREAD = 5e-4
"""Relative excess of the makespan that makes an elite e times less worth imitating."""


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


def make_lesson(
    problem: Problem,
    tables: PolicyTables,
    episodes: Episode,
    advantage: chex.Array,
    elites: Elites,
    update: chex.Array,
    settings: ReinforceSettings,
) -> Lesson:
    """Returns B episodes, weighed by their advantages `[B]`, and K elites to learn from.

    Elites are followed in the policy's own order. The entropy bonus is of the episodes alone.
    """
    models = jax.vmap(follow, in_axes=(None, None, 0))(
        problem, tables, elite_placements(problem, elites)
    )
    share = elite_shares(elites.makespan_s)
    batch = advantage.shape[0]
    bonus = settings.entropy_weight * 0.5 ** (
        update.astype(jnp.float32) / settings.entropy_halving
    )
    return Lesson(
        episodes=jax.tree.map(lambda a, b: jnp.concatenate([a, b]), episodes, models),
        weight=jnp.concatenate(
            [
                advantage / batch,
                settings.elite_weight * share,
            ]
        ),
        entropy_weight=jnp.concatenate([jnp.full(batch, bonus / batch), jnp.zeros_like(share)]),
    )


def elite_shares(makespan_s: chex.Array) -> chex.Array:
    """Returns how much of their imitation each elite gets, `[K]`; all 0 if there is none.

    A share falls by e for every `ELITE_SPREAD` that the makespan exceeds the best.
    """
    best_s = makespan_s.min()
    excess = (makespan_s - best_s) / jnp.maximum(best_s, jnp.finfo(jnp.float32).tiny)
    known = jnp.isfinite(makespan_s)
    weight = jnp.where(known, jnp.exp(-jnp.where(known, excess, 0.0) / ELITE_SPREAD), 0.0)
    return weight / jnp.maximum(weight.sum(), 1.0)


def learn(
    state: TrainState,
    problem: Problem,
    episodes: Episode,
    makespan_s: chex.Array,
    policy: PolicyConfig,
    settings: ReinforceSettings,
    elites: Elites | None = None,
    minibatches: int = 1,
) -> tuple[TrainState, chex.Array]:
    """Returns the state after an update by B episodes and their makespans `[B]`, and the loss.

    The makespans may be simulated or measured; elites and the best placement go by them.
    `elites` are the archive that these episodes have entered already, if they have. Each of
    `minibatches` parts of the episodes, B of which must be a multiple, is a step of the
    optimiser, beside all elites.
    """
    if elites is None:
        elites = update_elites(state.elites, problem, episodes.placement, makespan_s)
    shape = (minibatches, makespan_s.shape[0] // minibatches)
    parts = jax.tree.map(
        lambda array: array.reshape(shape + array.shape[1:]),
        (episodes, normalised_advantage(makespan_s)),
    )

    def step(
        state: TrainState, part: tuple[Episode, chex.Array]
    ) -> tuple[TrainState, chex.Array]:
        tables = model.apply(state.params, policy, problem)
        lesson = make_lesson(problem, tables, *part, elites, state.update, settings)
        return descend_lesson(state, problem, lesson, policy, settings.learning_rate)

    state, loss = jax.lax.scan(step, state, parts)
    state = dataclasses.replace(
        keep_best(state, episodes.placement, makespan_s),
        update=state.update + 1,
        episodes=state.episodes + makespan_s.shape[0],
        evaluations=state.evaluations + makespan_s.shape[0],
        elites=elites,
    )
    return state, loss.mean()


def descend_lesson(
    state: TrainState,
    problem: Problem,
    lesson: Lesson,
    policy: PolicyConfig,
    learning_rate: float,
) -> tuple[TrainState, chex.Array]:
    """Returns the state after one step down the lesson's gradient, and the loss."""

    def tables_of(params: chex.ArrayTree) -> chex.ArrayTree:
        return model.apply(params, policy, problem)

    tables, pull_back = jax.vjp(tables_of, state.params)
    loss, gradient = loss_and_gradient(problem, tables, lesson)
    params, opt_state = descend(state, pull_back(gradient)[0], make_optimizer(learning_rate))
    return dataclasses.replace(state, params=params, opt_state=opt_state), loss
