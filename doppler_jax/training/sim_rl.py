"""Stage 2: policy gradient in the simulator, beside imitation of the best seen."""

import dataclasses
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
from chex import Array, ArrayTree, PRNGKey

from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policies.rollout import Episode, PolicyTables
from doppler_jax.simulator.batches import simulate_padded
from doppler_jax.training.devices import (
    CUT,
    CUT_SECOND,
    WHOLE,
    cut_over,
    everywhere,
    most_shards,
)
from doppler_jax.training.loop import Phase
from doppler_jax.training.reinforce import (
    Descent,
    count_batch,
    descend_batch,
    episode_metrics,
)
from doppler_jax.training.state import (
    Placements,
    TrainState,
    init_state,
    keep_best,
    make_optimizer,
)
from doppler_jax.training.tempering import RUNGS, temper


@dataclasses.dataclass(frozen=True)
class SimConfig(Descent):
    """Settings of stage 2."""

    batch: int = 256  # episodes per update
    minibatches: int = 8  # steps of the optimiser per update; a divisor of `batch`
    learning_rate: float = 2e-3
    entropy_halving: int = 200
    num_elites: int = 4  # 0 for none
    elite_weight: float = 4.0
    num_chains: int = 128  # of local search beside the policy; at most `batch`, 0 for none
    search_rounds: int = 16  # moves of every chain per update
    links: Literal["parallel", "serial", "duplex"] = "parallel"  # of what is simulated

    @property
    def search_evaluations(self) -> int:
        """Placements that an update's local search simulates.

        Chains are simulated at every round, and once for their critical chains.
        """
        return (self.search_rounds + 1) * self.num_chains if self.search_rounds else 0

    @property
    def evaluations(self) -> int:
        """Placements that an update simulates."""
        return self.batch + self.search_evaluations

    @property
    def shards(self) -> int:
        """Local devices that an update is cut over: those that get equal shares of it.

        Each gets as many episodes of every minibatch, and whole ladders of chains.
        """
        share = self.batch // self.minibatches
        if self.search_evaluations:
            whole = self.num_chains % RUNGS == 0
            share = math.gcd(share, self.num_chains // RUNGS if whole else 1)
        return most_shards(share)


def check_sim_config(config: SimConfig) -> None:
    """Raises `ValueError` if the counts of stage 2 do not fit together."""
    if config.num_chains > config.batch:
        raise ValueError(
            f"num_chains is {config.num_chains}; expected at most batch, {config.batch}"
        )
    if config.batch % config.minibatches:
        raise ValueError(
            f"minibatches is {config.minibatches}; expected a divisor of batch, {config.batch}"
        )


def sim_phase(
    key: PRNGKey,
    problem: PolicyInputs,
    policy: PolicyConfig,
    config: SimConfig,
    num_updates: float = math.inf,
) -> Phase[TrainState]:
    """Returns stage 2 of a problem; the key is consumed.

    Raises:
      ValueError: see `check_sim_config`.
    """
    check_sim_config(config)
    optimizer = make_optimizer(config.learning_rate)
    counts = config.num_elites, config.num_chains
    return Phase(
        begin=lambda params: init_state(key, params, optimizer, problem, *counts),
        update=lambda state: sim_update(state, problem, policy, config),
        num_updates=num_updates,
        evaluations=config.evaluations,
        episodes=config.batch,
    )


def sim_update(
    state: TrainState, problem: PolicyInputs, policy: PolicyConfig, config: SimConfig
) -> tuple[TrainState, dict[str, Array]]:
    """Does one update of stage 2; returns the new state and scalar metrics.

    It is cut over `config.shards` local devices, and its numbers do not depend on how many
    they are, up to the order of sums.
    """
    shards = config.shards
    if shards > 1:
        # Updates after the first find their state there; what is elsewhere compiles afresh.
        state, problem = jax.device_put((state, problem), everywhere(shards))
    return _compiled(shards)(state, problem, policy, config, shards)


@cache
def _compiled(shards: int) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    static = (2, 3, 4)
    if shards == 1:
        return jax.jit(update_on, static_argnums=static)
    return jax.jit(update_on, static_argnums=static, out_shardings=everywhere(shards))


def update_on(
    state: TrainState,
    problem: PolicyInputs,
    policy: PolicyConfig,
    config: SimConfig,
    shards: int,
) -> tuple[TrainState, dict[str, Array]]:
    """Does `sim_update`'s work on so many devices; to be jitted."""
    sample_key, search_key = jax.random.split(jax.random.fold_in(state.key, state.update))
    episodes, episode_s = _draw(state.params, problem, sample_key, policy, config, shards)
    met = Placements(
        placement=episodes.placement.reshape(config.batch, -1),
        makespan_s=episode_s.reshape(-1),
    )
    if config.search_evaluations:
        # The first episodes are proposed to the chains.
        run = partial(temper, rounds=config.search_rounds, links=config.links)
        run_cut = cut_over(shards, run, (WHOLE, WHOLE, CUT, CUT, CUT, WHOLE), CUT)
        chains, found = run_cut(
            search_key,
            problem.padded,
            jnp.arange(config.num_chains, dtype=jnp.int32),
            state.chains,
            jax.tree.map(lambda array: array[: config.num_chains], met),
            jnp.minimum(state.best_makespan_s, met.makespan_s.min()),
        )
        met = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), met, found)
        state = dataclasses.replace(state, chains=chains)
    state = keep_best(state, met.placement, met.makespan_s)
    state, loss = descend_batch(state, problem, episodes, episode_s, policy, config, shards)
    state = count_batch(state, episodes=config.batch, evaluations=config.evaluations)
    return state, episode_metrics(state, loss, episode_s)


def _draw(
    params: ArrayTree,
    problem: PolicyInputs,
    key: PRNGKey,
    policy: PolicyConfig,
    config: SimConfig,
    shards: int,
) -> tuple[Episode, Array]:
    """Samples and simulates episodes, those of every minibatch cut over the devices.

    Returns:
      M x B episodes, and their makespans `[M, B]`.
    """

    def run(
        problem: PolicyInputs, tables: PolicyTables, keys: PRNGKey
    ) -> tuple[Episode, Array]:
        drawn = jax.vmap(rollout.sample, in_axes=(0, None, None))(
            keys.reshape(-1), problem, tables
        )
        makespan_s = simulate_padded(
            problem.padded, drawn.placement, links=config.links
        ).makespan_s
        return jax.tree.map(
            lambda array: array.reshape(keys.shape + array.shape[1:]), (drawn, makespan_s)
        )

    keys = jax.random.split(key, (config.minibatches, config.batch // config.minibatches))
    tables = model.apply(params, policy, problem)
    run_cut = cut_over(shards, run, (WHOLE, WHOLE, CUT_SECOND), CUT_SECOND)
    return run_cut(problem, tables, keys)
