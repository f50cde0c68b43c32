"""Stage 1: imitate critical-path list scheduling."""

import dataclasses
from functools import partial

import chex
import jax

from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import Problem
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.losses import imitation_loss
from doppler_jax.training.state import TrainState, descend, make_optimizer


@dataclasses.dataclass(frozen=True)
class ImitationConfig:
    """Settings of stage 1."""

    batch: int = 32  # episodes of the teacher per update
    learning_rate: float = 3e-3


@partial(jax.jit, static_argnames=("policy", "config"))
def imitation_update(
    state: TrainState, problem: Problem, policy: PolicyConfig, config: ImitationConfig
) -> tuple[TrainState, dict[str, chex.Array]]:
    """Does one update of stage 1; returns the new state and scalar metrics."""
    keys = jax.random.split(jax.random.fold_in(state.key, state.update), config.batch)
    episodes = jax.vmap(rollout.teach, in_axes=(0, None))(keys, problem)

    def loss_of(params: chex.ArrayTree) -> chex.Array:
        return imitation_loss(problem, model.apply(params, policy, problem), episodes)

    loss, gradient = jax.value_and_grad(loss_of)(state.params)
    params, opt_state = descend(state, gradient, make_optimizer(config.learning_rate))
    state = dataclasses.replace(
        state,
        params=params,
        opt_state=opt_state,
        update=state.update + 1,
        episodes=state.episodes + config.batch,
    )
    return state, {"loss": loss}
