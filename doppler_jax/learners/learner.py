"""What a learned method is, and the trainer that all of them share."""

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.policies.features import PolicyInputs
from doppler_jax.training.elites import update_elites
from doppler_jax.training.reinforce import count_batch
from doppler_jax.training.state import (
    TrainState,
    descend,
    init_state,
    keep_best,
    make_optimizer,
)
from doppler_jax.types import pytree

NUM_BEST = 8
"""Placements that training hands back."""


@pytree
class Explored:
    """B episodes of a method and what they brought."""

    lesson: chex.ArrayTree  # [B, ...] all that `Learner.loss` reads of the episodes
    placement: chex.Array  # [B, N] int32, the best placement that each episode met
    makespan_s: chex.Array  # [B] its simulated makespan


class Learner(Protocol):
    """A learned method and its settings: a frozen dataclass, static under `jit`.

    Its parameters have shapes that do not depend on the numbers of tasks and devices.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def batch(self) -> int:
        """Episodes per update."""

    @property
    def epochs(self) -> int:
        """Passes over the episodes of an update."""

    @property
    def minibatches(self) -> int:
        """Steps of the optimiser per pass, a divisor of `batch`."""

    @property
    def learning_rate(self) -> float:
        """Of Adam."""

    def evaluations(self, num_tasks: int) -> int:
        """Returns how many placements of N (padded) tasks an update simulates."""

    def proposal_evaluations(self, num_tasks: int) -> int:
        """Returns how many placements one proposal simulates, the proposed one not counted."""

    def init(self, key: chex.PRNGKey, problem: PolicyInputs) -> chex.ArrayTree:
        """Returns fresh parameters; the key is consumed."""

    def explore(
        self,
        params: chex.ArrayTree,
        problem: PolicyInputs,
        key: chex.PRNGKey,
        update: chex.Array,
        links: str,
    ) -> Explored:
        """Returns `batch` episodes, simulated under `links`; the key is consumed.

        Pure; `update` `[]` counts the updates before.
        """

    def loss(
        self,
        params: chex.ArrayTree,
        problem: PolicyInputs,
        lesson: chex.ArrayTree,
        update: chex.Array,
    ) -> chex.Array:
        """Returns the mean loss `[]` of a part of an update's lesson."""

    def propose(
        self,
        params: chex.ArrayTree,
        problem: PolicyInputs,
        key: chex.PRNGKey,
        count: int,
        links: str,
    ) -> chex.Array:
        """Returns placements `[count, N]`, the first of likeliest choices; consumes the key."""


@dataclasses.dataclass(frozen=True)
class TrainedLearner:
    """What training left."""

    params: chex.ArrayTree  # on the host
    placements: np.ndarray  # [K, N] int64, the best found, the very best first
    evaluations: int  # placements simulated
    updates: int
    interrupted: bool  # by Ctrl-C


def init_learner(
    key: chex.PRNGKey,
    problem: PolicyInputs,
    learner: Learner,
    params: chex.ArrayTree | None = None,
) -> TrainState:
    """Returns the state before the first update, with fresh parameters unless some are given.

    The key is consumed.

    Raises:
      ValueError: `minibatches` is no divisor of `batch`.
    """
    if learner.batch % learner.minibatches:
        raise ValueError(
            f"minibatches is {learner.minibatches}; expected a divisor of batch, "
            f"{learner.batch}"
        )
    params_key, key = jax.random.split(key)
    if params is None:
        params = _init_params(params_key, problem, learner)
    return init_state(key, params, make_optimizer(learner.learning_rate), problem, NUM_BEST)


@partial(jax.jit, static_argnames="learner")
def _init_params(key: chex.PRNGKey, problem: PolicyInputs, learner: Learner) -> chex.ArrayTree:
    return learner.init(key, problem)


@partial(jax.jit, static_argnames=("learner", "links"))
def learner_update(
    state: TrainState, problem: PolicyInputs, learner: Learner, links: str
) -> tuple[TrainState, dict[str, chex.Array]]:
    """Explores once and learns from it; returns the new state and scalar metrics."""
    explore_key, order_key = jax.random.split(jax.random.fold_in(state.key, state.update))
    explored = learner.explore(state.params, problem, explore_key, state.update, links)
    state = dataclasses.replace(
        keep_best(state, explored.placement, explored.makespan_s),
        elites=update_elites(state.elites, explored.placement, explored.makespan_s),
    )
    state, loss = _learn(state, problem, learner, explored.lesson, order_key)
    spent = learner.evaluations(problem.padded.padded_tasks)
    state = count_batch(state, episodes=learner.batch, evaluations=spent)
    metrics = {
        "loss": loss,
        "makespan_mean_s": explored.makespan_s.mean(),
        "makespan_min_s": explored.makespan_s.min(),
        "best_makespan_s": state.best_makespan_s,
    }
    return state, metrics


def _learn(
    state: TrainState,
    problem: PolicyInputs,
    learner: Learner,
    lesson: chex.ArrayTree,
    key: chex.PRNGKey,
) -> tuple[TrainState, chex.Array]:
    """Takes the update's steps, each on a minibatch; returns the mean loss beside the state."""
    optimizer = make_optimizer(learner.learning_rate)
    share = learner.batch // learner.minibatches
    # With one minibatch the order of its episodes is of no matter.
    orders = jnp.tile(jnp.arange(learner.batch)[None], (learner.epochs, 1))
    if learner.minibatches > 1:
        orders = jax.random.permutation(key, orders, axis=1, independent=True)

    def step(state: TrainState, order: chex.Array) -> tuple[TrainState, chex.Array]:
        part = jax.tree.map(lambda leaf: leaf[order], lesson)
        loss, gradient = jax.value_and_grad(learner.loss)(
            state.params, problem, part, state.update
        )
        params, opt_state = descend(state, gradient, optimizer)
        return dataclasses.replace(state, params=params, opt_state=opt_state), loss

    state, loss = jax.lax.scan(step, state, orders.reshape(-1, share))
    return state, loss.mean()


def train_learner(
    learner: Learner,
    problem: PolicyInputs,
    key: chex.PRNGKey,
    *,
    budget_s: float | None = None,
    max_evaluations: int | None = None,
    links: str = "parallel",
    params: chex.ArrayTree | None = None,
    record: Callable[[int, float], None] | None = None,
) -> TrainedLearner:
    """Trains a learner for one problem until a bound is met; Ctrl-C ends it early.

    Args:
      learner: the method.
      problem: what to place.
      key: of everything random; it is consumed.
      budget_s: seconds, compilation included, after which no update starts.
      max_evaluations: placements that may be simulated; the batch is made smaller where a
        single update would exceed it.
      links: under which they are.
      params: to start from; fresh ones by default.
      record: told after each update of the evaluations spent and the best makespan.

    Returns:
      What is known after at least one update, whatever `budget_s`.

    Raises:
      ValueError: there is no bound, or `max_evaluations` is below the smallest update.
    """
    if budget_s is None and max_evaluations is None:
        raise ValueError("training has no bound; give budget_s or max_evaluations")
    began = time.monotonic()
    learner = fit_batch(learner, problem.padded.padded_tasks, max_evaluations)
    cost = learner.evaluations(problem.padded.padded_tasks)
    state, done, interrupted = init_learner(key, problem, learner, params), 0, False
    try:
        while done == 0 or (
            (budget_s is None or time.monotonic() - began < budget_s)
            and (max_evaluations is None or (done + 1) * cost <= max_evaluations)
        ):
            state, _ = jax.block_until_ready(learner_update(state, problem, learner, links))
            done += 1
            if record is not None:
                record(done * cost, float(state.best_makespan_s))
    except KeyboardInterrupt:
        if done == 0:
            raise
        interrupted = True
    return TrainedLearner(
        # On no device: what follows may run on others than training did.
        params=jax.device_get(state.params),
        placements=_best_placements(state, int(problem.padded.num_tasks)),
        evaluations=done * cost,
        updates=done,
        interrupted=interrupted,
    )


def propose_placements(
    learner: Learner,
    params: chex.ArrayTree,
    problem: PolicyInputs,
    key: chex.PRNGKey,
    count: int,
    links: str,
) -> np.ndarray:
    """Returns placements `[count, N]` of trained parameters; the key is consumed."""
    drawn = _propose(params, problem, key, learner, count, links)
    return np.asarray(drawn)[:, : int(problem.padded.num_tasks)].astype(np.int64)


@partial(jax.jit, static_argnames=("learner", "count", "links"))
def _propose(
    params: chex.ArrayTree,
    problem: PolicyInputs,
    key: chex.PRNGKey,
    learner: Learner,
    count: int,
    links: str,
) -> chex.Array:
    return learner.propose(params, problem, key, count, links)


def fit_batch(learner: Learner, num_tasks: int, max_evaluations: int | None) -> Learner:
    """Returns the learner with the largest batch whose update keeps to the bound.

    Raises:
      ValueError: an update of one episode would exceed it.
    """
    if max_evaluations is None:
        return learner
    for batch in range(learner.batch, 0, -1):
        minibatches = math.gcd(learner.minibatches, batch)
        smaller = dataclasses.replace(learner, batch=batch, minibatches=minibatches)
        if smaller.evaluations(num_tasks) <= max_evaluations:
            return smaller
    raise ValueError(
        f"max_evaluations is {max_evaluations}; an update of {type(learner).__name__} needs "
        f"{smaller.evaluations(num_tasks)}"
    )


def _best_placements(state: TrainState, num_tasks: int) -> np.ndarray:
    """Returns the elites `[K, N]`, which are never none after an update."""
    known = np.isfinite(np.asarray(state.elites.makespan_s))
    return np.asarray(state.elites.placement)[known][:, :num_tasks].astype(np.int64)
