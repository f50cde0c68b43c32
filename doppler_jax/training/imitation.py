"""Stage 1: imitate critical-path list scheduling."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from chex import Array, PRNGKey

from doppler_jax.policies import rollout
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.loop import Phase
from doppler_jax.training.reinforce import Lesson, descend_lesson
from doppler_jax.training.state import TrainState, init_state, make_optimizer


@dataclasses.dataclass(frozen=True)
class ImitationConfig:
    """Settings of stage 1."""

    batch: int = 32  # episodes of the teacher per update
    learning_rate: float = 3e-3


def imitation_phase(
    key: PRNGKey,
    problem: PolicyInputs,
    policy: PolicyConfig,
    config: ImitationConfig,
    num_updates: int,
) -> Phase[TrainState]:
    """Returns stage 1 of a problem; the key is consumed. Nothing of it counts but its time."""
    optimizer = make_optimizer(config.learning_rate)
    return Phase(
        begin=lambda params: init_state(key, params, optimizer, problem, num_elites=1),
        update=lambda state: imitation_update(state, problem, policy, config),
        num_updates=num_updates,
    )


@partial(jax.jit, static_argnames=("policy", "config"))
def imitation_update(
    state: TrainState, problem: PolicyInputs, policy: PolicyConfig, config: ImitationConfig
) -> tuple[TrainState, dict[str, Array]]:
    """Does one update of stage 1; returns the new state and scalar metrics."""
    keys = jax.random.split(jax.random.fold_in(state.key, state.update), config.batch)
    episodes = jax.vmap(rollout.teach, in_axes=(0, None))(keys, problem)

    share = jnp.full(config.batch, 1.0 / config.batch)
    lesson = Lesson(episodes=episodes, weight=share, entropy_weight=jnp.zeros_like(share))
    state, loss = descend_lesson(state, problem, lesson, policy, config.learning_rate)
    state = dataclasses.replace(
        state, update=state.update + 1, episodes=state.episodes + config.batch
    )
    return state, {"loss": loss}
