"""Stage 2: policy gradient in the simulator, beside imitation of the best seen."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp

from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import Problem
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.simulator.simulate import simulate_instance
from doppler_jax.training.elites import update_elites
from doppler_jax.training.reinforce import learn
from doppler_jax.training.state import TrainState, init_state, keep_best, make_optimizer
from doppler_jax.training.tempering import Chains, temper


@dataclasses.dataclass(frozen=True)
class SimConfig:
    """Settings of stage 2."""

    batch: int = 256  # episodes per update
    minibatches: int = 8  # steps of the optimiser per update; a divisor of `batch`
    learning_rate: float = 2e-3
    entropy_weight: float = 1e-2  # at the start; halves every `entropy_halving` updates
    entropy_halving: int = 200
    num_elites: int = 4
    elite_weight: float = 4.0  # of their imitation beside the policy gradient
    num_chains: int = 128  # of local search beside the policy; at most `batch`
    search_rounds: int = 16  # moves of every chain per update

    @property
    def evaluations(self) -> int:
        """Placements that an update simulates."""
        return self.batch + self.search_evaluations

    @property
    def search_evaluations(self) -> int:
        """Those that are no episodes: chains at every round and once for their critical
        chains, and new elites for their order.
        """
        return (self.search_rounds + 1) * self.num_chains + self.num_elites


def init_sim_state(
    key: chex.PRNGKey, params: chex.ArrayTree, problem: Problem, config: SimConfig
) -> TrainState:
    """Returns the state before the first update of stage 2; the key is consumed.

    Raises:
      ValueError: there are more chains than episodes to start them.
    """
    if config.num_chains > config.batch:
        raise ValueError(
            f"num_chains is {config.num_chains}; expected at most batch, {config.batch}"
        )
    optimizer = make_optimizer(config.learning_rate)
    return init_state(key, params, optimizer, problem, config.num_elites, config.num_chains)


@partial(jax.jit, static_argnames=("policy", "config"))
def sim_update(
    state: TrainState, problem: Problem, policy: PolicyConfig, config: SimConfig
) -> tuple[TrainState, dict[str, chex.Array]]:
    """Does one update of stage 2; returns the new state and scalar metrics."""
    sample_key, search_key = jax.random.split(jax.random.fold_in(state.key, state.update))
    keys = jax.random.split(sample_key, config.batch)
    tables = model.apply(state.params, policy, problem)
    episodes = jax.vmap(rollout.sample, in_axes=(0, None, None))(keys, problem, tables)
    makespan_s = simulate_instance(problem.instance, episodes.placement).makespan_s
    episode_s = Chains(placement=episodes.placement, makespan_s=makespan_s)
    chains, found = temper(
        search_key,
        problem.instance,
        Chains(placement=state.chain_placement, makespan_s=state.chain_makespan_s),
        jax.tree.map(lambda array: array[: config.num_chains], episode_s),
        jnp.minimum(state.best_makespan_s, makespan_s.min()),
        config.search_rounds,
    )
    met = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), episode_s, found)
    elites = update_elites(state.elites, problem, met.placement, met.makespan_s)
    state, loss = learn(
        state,
        problem,
        episodes,
        makespan_s,
        policy,
        config,
        elites,
        minibatches=config.minibatches,
    )
    state = dataclasses.replace(
        keep_best(state, met.placement, met.makespan_s),
        chain_placement=chains.placement,
        chain_makespan_s=chains.makespan_s,
        evaluations=state.evaluations + config.search_evaluations,
    )
    metrics = {
        "loss": loss,
        "makespan_mean_s": makespan_s.mean(),
        "makespan_min_s": makespan_s.min(),
        "best_makespan_s": state.best_makespan_s,
    }
    return state, metrics
