"""Stages 1 and 2 for one problem, in memory and within bounds."""

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.model import PolicyConfig, init_params
from doppler_jax.training.checkpoint import Policy
from doppler_jax.training.imitation import ImitationConfig, imitation_update
from doppler_jax.training.sim_rl import SimConfig, init_sim_state, sim_update
from doppler_jax.training.state import TrainState, init_state, make_optimizer

WARM_UP = 100
"""Updates of stage 1 before stage 2."""

LEAST_EVALUATIONS = 3
"""Simulations of the smallest update: an episode, a chain and its move."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training left."""

    state: TrainState
    policy: PolicyConfig
    interrupted: bool  # by Ctrl-C


def train_policy(
    problem: PolicyInputs,
    key: chex.PRNGKey,
    *,
    budget_s: float | None = None,
    max_evaluations: int | None = None,
    max_episodes: int | None = None,
    target_s: float | None = None,
    initial: Policy | None = None,
    policy: PolicyConfig | None = None,
    imitate: ImitationConfig | None = None,
    simulate: SimConfig | None = None,
    record: Callable[[int, float], None] | None = None,
) -> Trained:
    """Trains a policy by stages 1 and 2 until a bound is met; Ctrl-C ends it early.

    Args:
      problem: what to place.
      key: of everything random; it is consumed.
      budget_s: seconds, compilation included, after which no update starts.
      max_evaluations: placements that may be simulated, local search included; an update
        is made smaller where a single one would exceed it.
      max_episodes: of stage 2; those of stage 1 come on top.
      target_s: makespan, by the float32 simulator, that ends training.
      initial: a trained policy to go on from; without `imitate` there is no stage 1 then.
      policy: sizes of the networks, by default the usual ones; those of `initial` if given.
      imitate: settings of stage 1.
      simulate: settings of stage 2.
      record: told after each update of stage 2 of the evaluations spent and the best makespan.

    Returns:
      The state after at least one update of stage 2, whatever the bounds.

    Raises:
      ValueError: there is no bound.
    """
    if {budget_s, max_evaluations, max_episodes, target_s} == {None}:
        raise ValueError(
            "training has no bound; give budget_s, max_evaluations, max_episodes or target_s"
        )
    began = time.monotonic()
    policy = initial.config if initial is not None else policy or PolicyConfig()
    simulate = fit_updates(simulate or SimConfig(), max_evaluations)
    params_key, first_key, second_key = jax.random.split(key, 3)

    def in_time() -> bool:
        return budget_s is None or time.monotonic() - began < budget_s

    if initial is not None:
        params = jax.tree.map(jnp.asarray, initial.params)
    else:
        params = _init_params(params_key, policy, problem)
        imitate = imitate or ImitationConfig()
    if imitate is not None:
        params = _imitate(first_key, params, problem, policy, imitate, in_time)
    state = init_sim_state(second_key, params, problem, simulate)
    most = np.inf if max_evaluations is None else max_evaluations
    most_episodes = np.inf if max_episodes is None else max_episodes
    try:
        while int(state.update) == 0 or (
            in_time()
            and int(state.evaluations) + simulate.evaluations <= most
            and int(state.episodes) + simulate.batch <= most_episodes
            and (target_s is None or float(state.best_makespan_s) > target_s)
        ):
            state, _ = sim_update(state, problem, policy, simulate)
            if record is not None:
                record(int(state.evaluations), float(state.best_makespan_s))
    except KeyboardInterrupt:
        if int(state.update) == 0:
            raise
        return Trained(state=state, policy=policy, interrupted=True)
    return Trained(state=state, policy=policy, interrupted=False)


def _imitate(
    key: chex.PRNGKey,
    params: chex.ArrayTree,
    problem: PolicyInputs,
    policy: PolicyConfig,
    config: ImitationConfig,
    in_time: Callable[[], bool],
) -> chex.ArrayTree:
    """Returns the parameters after stage 1, or after what there is time for."""
    optimizer = make_optimizer(config.learning_rate)
    state = init_state(key, params, optimizer, problem, 1)
    while int(state.update) < WARM_UP and in_time():
        state, _ = imitation_update(state, problem, policy, config)
    return state.params


def fit_updates(config: SimConfig, max_evaluations: int | None) -> SimConfig:
    """Returns the settings, with smaller updates if a single one would exceed the bound.

    Raises:
      ValueError: the bound is below `LEAST_EVALUATIONS`.
    """
    if max_evaluations is None or config.evaluations <= max_evaluations:
        return config
    if max_evaluations < LEAST_EVALUATIONS:
        raise ValueError(
            f"max_evaluations is {max_evaluations}; training needs {LEAST_EVALUATIONS}"
        )
    batch = min(config.batch, max_evaluations // 3)
    chains = min(config.num_chains, batch)
    rounds = (max_evaluations - batch) // max(chains, 1) - 1
    return dataclasses.replace(
        config,
        batch=batch,
        minibatches=math.gcd(config.minibatches, batch),
        num_elites=min(config.num_elites, batch),
        num_chains=chains,
        search_rounds=min(config.search_rounds, rounds),
    )


@partial(jax.jit, static_argnames="policy")
def _init_params(
    key: chex.PRNGKey, policy: PolicyConfig, problem: PolicyInputs
) -> chex.ArrayTree:
    return init_params(key, policy, problem)
