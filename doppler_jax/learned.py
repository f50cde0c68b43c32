"""Placements of a policy, given or trained for the problem: what `place` needs of training."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.request import Candidates
from doppler_jax.simulator.finalists import NUM_FINALISTS
from doppler_jax.training.checkpoint import Policy
from doppler_jax.training.sim_rl import SimConfig
from doppler_jax.training.state import TrainState
from doppler_jax.training.train import train_policy

LEAST_UPDATES = 400
"""Updates of whole batches that come before local search beside them where evaluations count.

Episodes teach more than as many moves of the chains, which are cheap in seconds only.
"""

DRAWN_STEPS = 1 << 17
"""Steps of the episodes of a policy that are drawn at once."""

LEAST_DRAWN = 8
"""Episodes that are drawn at once on graphs so large that this is more."""


def learn_placements(
    problem: PolicyInputs,
    num_tasks: int,
    key: chex.PRNGKey,
    *,
    config: PolicyConfig,
    budget_s: float | None,
    max_evaluations: int | None,
    links: Literal["parallel", "serial"],
    record: Callable[[int, float], None] | None = None,
) -> Candidates:
    """Trains a policy for one problem by stages 1 and 2, from scratch; see `train_policy`.

    Returns the best placement met, the elites and the chains.

    Args:
      problem: what to place.
      num_tasks: its tasks, without padding.
      key: of everything random; it is consumed.
      config: sizes and rules of the networks.
      budget_s: seconds after which no update starts.
      max_evaluations: placements that may be simulated.
      links: `parallel` or `serial`, under which they are.
      record: told after each update of the evaluations spent and the best makespan.
    """
    simulate = training_config(links, max_evaluations)
    if config.place == "earliest":
        # An elite says where tasks go, which this policy does not learn.
        simulate = dataclasses.replace(simulate, elite_weight=0.0)
    trained = train_policy(
        problem,
        key,
        budget_s=budget_s,
        max_evaluations=max_evaluations,
        policy=config,
        simulate=simulate,
        record=record,
    )
    return Candidates(
        placements=state_candidates(trained.state, num_tasks),
        evaluations=int(trained.state.evaluations),
        interrupted=trained.interrupted,
    )


def training_config(
    links: Literal["parallel", "serial"], max_evaluations: int | None
) -> SimConfig:
    """Returns the settings of stage 2 that suit a bound on evaluations, if there is one.

    Local search beside the policy gets what `LEAST_UPDATES` updates leave of it.
    """
    config = SimConfig(links=links)
    if max_evaluations is None:
        return config
    rest = max_evaluations // LEAST_UPDATES - config.batch
    rounds = rest // config.num_chains - 1
    if rounds < 1:
        return dataclasses.replace(config, num_chains=0)
    return dataclasses.replace(config, search_rounds=min(config.search_rounds, rounds))


def state_candidates(state: TrainState, num_tasks: int) -> np.ndarray:
    """Returns the best placements that a training state holds, `[B, N]`, to be judged.

    They are its best, its elites, and where its chains are: elites are often all alike, and
    worth less together where rounding to float32 hides which of two tasks is ready first. No
    more than the oracle ranks, a teacher's beside them.
    """
    held = (
        (state.best_placement[None], state.best_makespan_s[None]),
        (state.elites.placement, state.elites.makespan_s),
        (state.chain_placement, state.chain_makespan_s),
    )
    placements, makespan_s = (np.concatenate(part) for part in zip(*held, strict=True))
    order = np.argsort(makespan_s, kind="stable")[: NUM_FINALISTS - 1]
    chosen = order[(order == 0) | np.isfinite(makespan_s[order])]
    return placements[chosen, :num_tasks].astype(np.int64)


def policy_candidates(
    problem: PolicyInputs,
    policy: Policy,
    key: chex.PRNGKey,
    count: int,
    is_late: Callable[[], bool] | None = None,
) -> np.ndarray:
    """Returns placements of a policy, `[count, N]`: two greedy ones, then samples.

    The first is greedy in SEL's order, the second in the order of b-levels, which serves some
    graphs better, where the policy has met few of their kind above all. Samples are drawn in
    blocks, of `DRAWN_STEPS` steps; there are no more of them than `count`, and after the first
    none once `is_late` says so.
    """
    keys = jax.random.split(key, count)
    tables, likeliest = _greedy(policy.params, problem, policy.config)
    drawn = [likeliest[:count]]
    width = min(max(DRAWN_STEPS // problem.padded.padded_tasks, LEAST_DRAWN), count)
    for first in range(len(likeliest), count, width):
        if len(drawn) > 1 and is_late is not None and is_late():
            break
        block = keys[first : first + width]
        # One shape, one compile: the last block is filled up with keys that are used already.
        filled = jnp.concatenate([block, keys[: width - len(block)]])
        drawn.append(np.asarray(_sample(tables, problem, filled))[: len(block)])
    return np.concatenate(drawn)[:, : int(problem.padded.num_tasks)]


@partial(jax.jit, static_argnames="config")
def _greedy(
    params: chex.ArrayTree, problem: PolicyInputs, config: PolicyConfig
) -> tuple[rollout.PolicyTables, chex.Array]:
    tables = model.apply(params, config, problem)
    return tables, rollout.greedy_placements(problem, tables)


@jax.jit
def _sample(
    tables: rollout.PolicyTables, problem: PolicyInputs, keys: chex.PRNGKey
) -> chex.Array:
    return jax.vmap(rollout.sample, in_axes=(0, None, None))(keys, problem, tables).placement
