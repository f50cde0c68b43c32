"""Stage 2: policy gradient in the simulator, beside imitation of the best seen."""

import dataclasses
from functools import partial

import chex
import jax

from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import Problem
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.simulator.simulate import simulate_instance
from doppler_jax.training.reinforce import learn
from doppler_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class SimConfig:
    """Settings of stage 2."""

    batch: int = 128  # episodes per update
    learning_rate: float = 2e-3
    entropy_weight: float = 1e-2  # at the start; halves every `entropy_halving` updates
    entropy_halving: int = 200
    num_elites: int = 8
    elite_weight: float = 0.1  # of their imitation beside the policy gradient


@partial(jax.jit, static_argnames=("policy", "config"))
def sim_update(
    state: TrainState, problem: Problem, policy: PolicyConfig, config: SimConfig
) -> tuple[TrainState, dict[str, chex.Array]]:
    """Does one update of stage 2; returns the new state and scalar metrics."""
    keys = jax.random.split(jax.random.fold_in(state.key, state.update), config.batch)
    tables = model.apply(state.params, policy, problem)
    episodes = jax.vmap(rollout.sample, in_axes=(0, None, None))(keys, problem, tables)
    makespan_s = simulate_instance(problem.instance, episodes.placement).makespan_s
    state, loss = learn(state, problem, episodes, makespan_s, policy, config)
    metrics = {
        "loss": loss,
        "makespan_mean_s": makespan_s.mean(),
        "makespan_min_s": makespan_s.min(),
        "best_makespan_s": state.best_makespan_s,
    }
    return state, metrics
