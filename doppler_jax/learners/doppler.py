"""DOPPLER as a learned method: imitation, then policy gradient beside a local search."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from chex import Array, ArrayTree, PRNGKey

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.learners.learner import Learner
from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.imitation import ImitationConfig, imitation_phase
from doppler_jax.training.loop import Phase
from doppler_jax.training.sim_rl import SimConfig, sim_phase
from doppler_jax.training.state import TrainState
from doppler_jax.types import Costs, Plans, Policy, TaskGraph

LEAST_EVALUATIONS = 3
"""Simulations of the smallest update: an episode, a chain and its move."""

LEAST_UPDATES = 400
"""Updates of whole batches that come before local search beside them where evaluations count.

Episodes teach more than as many moves of the chains, which are cheap in seconds only.
"""

DRAWN_STEPS = 1 << 17
"""Steps of the episodes of a policy that are drawn at once."""

LEAST_DRAWN = 8
"""Episodes that are drawn at once on graphs so large that this is more."""


@dataclasses.dataclass(frozen=True)
class Doppler(Learner):
    """The method DOPPLER and its settings: `PolicyConfig` says which choices are learned."""

    name: ClassVar[str] = "doppler"
    num_proposals: ClassVar[int] = 0  # its episodes are as good, and simulated already

    policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
    imitate: ImitationConfig = dataclasses.field(default_factory=ImitationConfig)
    warm_up: int = 100  # updates of stage 1 before stage 2; 0 for none
    # Its links are what training is told.
    simulate: SimConfig = dataclasses.field(default_factory=SimConfig)

    @property
    def settings(self) -> PolicyConfig:
        """What a checkpoint must hold to use the parameters."""
        return self.policy

    def with_settings(self, settings: PolicyConfig) -> Self:
        """Returns the method of a policy with such settings."""
        return dataclasses.replace(self, policy=settings)

    def init(self, key: PRNGKey, problem: PolicyInputs) -> ArrayTree:
        """Returns fresh parameters; the key is consumed."""
        return model.init_params(key, self.policy, problem)

    def phases(
        self, key: PRNGKey, problem: PolicyInputs, links: str
    ) -> tuple[PRNGKey, Sequence[Phase[TrainState]]]:
        """Returns the key of fresh parameters and stages 1 and 2; the key is consumed."""
        params_key, first_key, second_key = jax.random.split(key, 3)
        # An elite says where tasks go, which is not always learned.
        weight = self.simulate.elite_weight if self.policy.place == "learned" else 0.0
        changes: dict[str, Any] = {"links": links, "elite_weight": weight}
        simulate = dataclasses.replace(self.simulate, **changes)
        first = imitation_phase(first_key, problem, self.policy, self.imitate, self.warm_up)
        second = sim_phase(second_key, problem, self.policy, simulate)
        return params_key, [first, second] if self.warm_up else [second]

    def within(self, num_tasks: int, evaluations: int) -> Self:
        """Returns the learner with what suits a bound on evaluations.

        Local search beside the policy gets what `LEAST_UPDATES` updates leave of it, and an
        update is smaller where a single one would exceed it.

        Raises:
          ValueError: the bound is below `LEAST_EVALUATIONS`.
        """
        simulate = self.simulate
        if simulate.search_evaluations:
            rest = evaluations // LEAST_UPDATES - simulate.batch
            rounds = min(rest // simulate.num_chains - 1, simulate.search_rounds)
            simulate = (
                dataclasses.replace(simulate, num_chains=0)
                if rounds < 1
                else dataclasses.replace(simulate, search_rounds=rounds)
            )
        return dataclasses.replace(self, simulate=fit_updates(simulate, evaluations))

    def least_evaluations(self, num_tasks: int) -> int:
        """Returns how many placements the smallest update simulates."""
        return LEAST_EVALUATIONS

    def propose(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, count: int, links: str
    ) -> Plans:
        """Returns plans; see `policy_plans`."""
        return policy_plans(problem, Policy(params, self.policy), key, count)

    def teacher(self, graph: TaskGraph, costs: Costs) -> np.ndarray:
        """Returns the placement `[1, n]` of the list scheduler that stage 1 imitates."""
        return critical_path(graph, costs)[None]


def fit_updates(config: SimConfig, evaluations: int) -> SimConfig:
    """Returns the settings, with smaller updates if a single one would exceed the bound.

    Raises:
      ValueError: the bound is below `LEAST_EVALUATIONS`.
    """
    if config.evaluations <= evaluations:
        return config
    if evaluations < LEAST_EVALUATIONS:
        raise ValueError(
            f"max_evaluations is {evaluations}; training needs {LEAST_EVALUATIONS}"
        )
    batch = min(config.batch, evaluations // 3)
    chains = min(config.num_chains, batch)
    rounds = (evaluations - batch) // max(chains, 1) - 1
    return dataclasses.replace(
        config,
        batch=batch,
        minibatches=math.gcd(config.minibatches, batch),
        num_elites=min(config.num_elites, batch),
        num_chains=chains,
        search_rounds=min(config.search_rounds, rounds),
    )


def policy_candidates(
    problem: PolicyInputs, policy: Policy, key: PRNGKey, count: int
) -> np.ndarray:
    """Returns placements of a policy, `[count, N]`: those of `policy_plans`."""
    return policy_plans(problem, policy, key, count).placements


def policy_plans(problem: PolicyInputs, policy: Policy, key: PRNGKey, count: int) -> Plans:
    """Returns plans of a policy, by PLC in SEL's order: two greedy ones, then samples."""
    drawn = draw_plans(problem, policy, key, count)
    return Plans(*map(np.concatenate, zip(*drawn, strict=True)))


def draw_plans(
    problem: PolicyInputs, policy: Policy, key: PRNGKey, count: int
) -> Iterator[Plans]:
    """Yields what `policy_plans` returns, some plans at a time.

    The first is greedy in SEL's order, the second in the order of b-levels, which serves some
    graphs better, where the policy has met few of their kind above all. Samples are drawn in
    chunks, of `DRAWN_STEPS` steps.
    """
    keys, tasks = jax.random.split(key, count), int(problem.padded.num_tasks)
    tables, likeliest = _greedy(policy.params, problem, policy.config)
    yield _unpadded(likeliest, count, tasks)
    width = min(max(DRAWN_STEPS // problem.padded.padded_tasks, LEAST_DRAWN), count)
    for first in range(len(likeliest[0]), count, width):
        chunk = keys[first : first + width]
        # One shape, one compile: the last chunk is filled up with keys that are used already.
        filled = jnp.concatenate([chunk, keys[: width - len(chunk)]])
        yield _unpadded(_sample(tables, problem, filled), len(chunk), tasks)


def _unpadded(drawn: tuple[Array, Array], count: int, tasks: int) -> Plans:
    """Returns the first plans of placements and orders, both `[B, N]` and padded."""
    placement, order = (np.asarray(part)[:count] for part in drawn)
    position = np.argsort(order, axis=1, kind="stable")  # of tasks by id, real ones first
    return Plans(placement[:, :tasks].astype(np.int64), position[:, :tasks])


@partial(jax.jit, static_argnames="config")
def _greedy(
    params: ArrayTree, problem: PolicyInputs, config: PolicyConfig
) -> tuple[rollout.PolicyTables, tuple[Array, Array]]:
    tables = model.apply(params, config, problem)
    return tables, rollout.greedy_plans(problem, tables)


@jax.jit
def _sample(
    tables: rollout.PolicyTables, problem: PolicyInputs, keys: PRNGKey
) -> tuple[Array, Array]:
    episodes = jax.vmap(rollout.sample, in_axes=(0, None, None))(keys, problem, tables)
    return rollout.plan_of(episodes)
