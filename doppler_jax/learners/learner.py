"""What a learned method is, the trainer of them all, and what learns from its own episodes."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from chex import Array, ArrayTree, PRNGKey

from doppler_jax.budget import Budget
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.simulator.finalists import NUM_FINALISTS
from doppler_jax.training.loop import Phase, train
from doppler_jax.training.reinforce import count_batch, episode_metrics
from doppler_jax.training.state import (
    Placements,
    TrainState,
    descend,
    init_state,
    keep_best,
    make_optimizer,
)
from doppler_jax.types import Costs, Plans, Policy, TaskGraph, pytree

NUM_BEST = 8
"""Placements that training on episodes keeps."""


class Learner(abc.ABC):
    """A learned method and its settings: a frozen dataclass.

    Its parameters have shapes that do not depend on the numbers of tasks and devices.
    """

    name: ClassVar[str]
    """Of the method, which its policies carry."""

    num_proposals: ClassVar[int] = 32
    """Placements proposed after training, of a quarter of the budget at most; 0: what training
    met is all there is."""

    @property
    def settings(self) -> Any:
        """What a checkpoint must hold to use the parameters, a dataclass."""
        return self

    def with_settings(self, settings: Any) -> "Learner":
        """Returns the method of a policy with such settings."""
        return settings

    @abc.abstractmethod
    def init(self, key: PRNGKey, problem: PolicyInputs) -> ArrayTree:
        """Returns fresh parameters; the key is consumed."""

    @abc.abstractmethod
    def phases(
        self, key: PRNGKey, problem: PolicyInputs, links: str
    ) -> tuple[PRNGKey, Sequence[Phase[TrainState]]]:
        """Returns the key of fresh parameters and what training does; the key is consumed."""

    @abc.abstractmethod
    def within(self, num_tasks: int, evaluations: int) -> Self:
        """Returns the learner with updates that keep to a bound on N (padded) tasks.

        Raises:
          ValueError: the smallest would exceed it.
        """

    @abc.abstractmethod
    def least_evaluations(self, num_tasks: int) -> int:
        """Returns how many placements of N (padded) tasks the smallest update simulates."""

    def proposal_evaluations(self, num_tasks: int) -> int:
        """Returns how many placements one proposal simulates, the proposed one not counted."""
        return 0

    @abc.abstractmethod
    def propose(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, count: int, links: str
    ) -> Plans:
        """Returns so many plans, the first of likeliest choices; consumes the key.

        They have an order if the learner chooses one.
        """

    def teacher(self, graph: TaskGraph, costs: Costs) -> np.ndarray:
        """Returns placements `[A, n]` that compete with what is learned: those it imitates."""
        return np.zeros((0, graph.num_tasks), np.int64)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training left."""

    state: TrainState
    policy: Policy  # its parameters are on the host: what follows may run on other devices
    placements: np.ndarray  # [K, n] int64, the best met, the very best first
    interrupted: bool  # by Ctrl-C


def train_learner(
    learner: Learner,
    problem: PolicyInputs,
    key: PRNGKey,
    budget: Budget,
    *,
    links: str = "parallel",
    params: ArrayTree | None = None,
    report: Callable[[TrainState], None] | None = None,
) -> Trained:
    """Trains a learner for one problem until a bound is met; Ctrl-C ends it early.

    Args:
      learner: the method.
      problem: what to place.
      key: of everything random; it is consumed.
      budget: what training may spend; updates are made smaller where a single one would
        exceed its evaluations, and of a first phase that only imitates time alone counts.
      links: under which placements are simulated.
      params: to start from; fresh ones by default.
      report: told of the state after each update.

    Returns:
      What is known after at least one update of the last phase, whatever the seconds.

    Raises:
      ValueError: there is no bound, or the evaluations are below the smallest update.
    """
    if not budget.is_bounded:
        raise ValueError("training has no bound; give evaluations, episodes or seconds")
    fitted = learner
    if budget.evaluations is not None:
        fitted = learner.within(problem.padded.padded_tasks, budget.evaluations)
    params_key, phases = fitted.phases(key, problem, links)
    if params is None:
        # By the learner as it was: of whatever bound, it is compiled once.
        params = _init_params(params_key, problem, learner)
    params = jax.tree.map(jnp.asarray, params)
    for phase in phases:
        state, interrupted = train(
            phase,
            phase.begin(params),
            budget,
            report=None if report is None else lambda state, _: report(state),
        )
        if interrupted and phase is not phases[-1]:
            raise KeyboardInterrupt  # nothing was met that could be handed back
        params = state.params
    return Trained(
        state=state,
        policy=Policy(jax.device_get(state.params), learner.settings, learner.name),
        placements=best_placements(state, int(problem.padded.num_tasks)),
        interrupted=interrupted,
    )


@partial(jax.jit, static_argnames="learner")
def _init_params(key: PRNGKey, problem: PolicyInputs, learner: Learner) -> ArrayTree:
    return learner.init(key, problem)


def best_placements(state: TrainState, num_tasks: int) -> np.ndarray:
    """Returns the best placements that a training state has, `[B, n]`, to be judged.

    They are its best, its elites, and where its chains are: elites are often all alike, and
    worth less together where rounding to float32 hides which of two tasks is ready first. No
    more than the oracle ranks, a teacher's beside them.
    """
    best = Placements(
        placement=state.best_placement[None], makespan_s=state.best_makespan_s[None]
    )
    parts = best, state.elites, state.chains
    known = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    order = np.argsort(known.makespan_s, kind="stable")[: NUM_FINALISTS - 1]
    chosen = order[(order == 0) | np.isfinite(known.makespan_s[order])]
    return known.placement[chosen, :num_tasks].astype(np.int64)


@pytree
class Explored:
    """B episodes of a method and what they brought."""

    lesson: ArrayTree  # [B, ...] all that `EpisodeLearner.loss` reads of the episodes
    placement: Array  # [B, N] int32, the best placement that each episode met
    makespan_s: Array  # [B] its simulated makespan


@dataclasses.dataclass(frozen=True)
class EpisodeLearner(Learner):
    """A method that learns by steps of Adam from what its own episodes met.

    Hashable and static under `jit`; the methods below are pure.
    """

    batch: int = 16  # episodes per update
    epochs: int = 1  # passes over the episodes of an update
    minibatches: int = 1  # steps of the optimiser per pass, a divisor of `batch`
    learning_rate: float = 1e-3  # of Adam

    def evaluations(self, num_tasks: int) -> int:
        """Returns how many placements of N (padded) tasks an update simulates."""
        return self.batch

    @abc.abstractmethod
    def explore(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, update: Array, links: str
    ) -> Explored:
        """Returns `batch` episodes, simulated under `links`; the key is consumed.

        `update` `[]` counts the updates before.
        """

    @abc.abstractmethod
    def loss(
        self, params: ArrayTree, problem: PolicyInputs, lesson: Any, update: Array
    ) -> Array:
        """Returns the mean loss `[]` of a part of an update's lesson."""

    @abc.abstractmethod
    def draw(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, count: int, links: str
    ) -> Array:
        """Returns placements `[count, N]`, the first of likeliest choices; consumes the key."""

    def propose(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, count: int, links: str
    ) -> Plans:
        """Returns what `draw` does, without padding."""
        drawn = _draw(params, problem, key, self, count, links)
        placements = np.asarray(drawn)[:, : int(problem.padded.num_tasks)].astype(np.int64)
        return Plans(placements, placements[:0])

    def phases(
        self, key: PRNGKey, problem: PolicyInputs, links: str
    ) -> tuple[PRNGKey, Sequence[Phase[TrainState]]]:
        """Returns the key of fresh parameters and the one phase; the key is consumed.

        Raises:
          ValueError: `minibatches` is no divisor of `batch`.
        """
        if self.batch % self.minibatches:
            raise ValueError(
                f"minibatches is {self.minibatches}; expected a divisor of batch, {self.batch}"
            )
        params_key, key = jax.random.split(key)
        optimizer = make_optimizer(self.learning_rate)
        phase = Phase(
            begin=lambda params: init_state(key, params, optimizer, problem, NUM_BEST),
            update=lambda state: episode_update(state, problem, self, links),
            evaluations=self.evaluations(problem.padded.padded_tasks),
            episodes=self.batch,
        )
        return params_key, [phase]

    def within(self, num_tasks: int, evaluations: int) -> Self:
        """Returns the learner with the largest batch whose update keeps to the bound.

        Raises:
          ValueError: an update of one episode would exceed it.
        """
        for batch in range(self.batch, 0, -1):
            smaller = self._with_batch(batch)
            if smaller.evaluations(num_tasks) <= evaluations:
                return smaller
        raise ValueError(
            f"max_evaluations is {evaluations}; an update of {type(self).__name__} needs "
            f"{self.least_evaluations(num_tasks)}"
        )

    def least_evaluations(self, num_tasks: int) -> int:
        """Returns how many placements an update of one episode simulates."""
        return self._with_batch(1).evaluations(num_tasks)

    def _with_batch(self, batch: int) -> Self:
        minibatches = math.gcd(self.minibatches, batch)
        return dataclasses.replace(self, batch=batch, minibatches=minibatches)


@partial(jax.jit, static_argnames=("learner", "links"))
def episode_update(
    state: TrainState, problem: PolicyInputs, learner: EpisodeLearner, links: str
) -> tuple[TrainState, dict[str, Array]]:
    """Explores once and learns from it; returns the new state and scalar metrics."""
    explore_key, order_key = jax.random.split(jax.random.fold_in(state.key, state.update))
    explored = learner.explore(state.params, problem, explore_key, state.update, links)
    state = keep_best(state, explored.placement, explored.makespan_s)
    share = learner.batch // learner.minibatches
    # With one minibatch the order of its episodes is of no matter.
    orders = jnp.tile(jnp.arange(learner.batch)[None], (learner.epochs, 1))
    if learner.minibatches > 1:
        orders = jax.random.permutation(order_key, orders, axis=1, independent=True)

    def step(state: TrainState, order: Array) -> tuple[TrainState, Array]:
        part = jax.tree.map(lambda leaf: leaf[order], explored.lesson)
        loss, gradient = jax.value_and_grad(learner.loss)(
            state.params, problem, part, state.update
        )
        params, opt_state = descend(state, gradient, make_optimizer(learner.learning_rate))
        return dataclasses.replace(state, params=params, opt_state=opt_state), loss

    state, loss = jax.lax.scan(step, state, orders.reshape(-1, share))
    spent = learner.evaluations(problem.padded.padded_tasks)
    state = count_batch(state, episodes=learner.batch, evaluations=spent)
    return state, episode_metrics(state, loss.mean(), explored.makespan_s)


@partial(jax.jit, static_argnames=("learner", "count", "links"))
def _draw(
    params: ArrayTree,
    problem: PolicyInputs,
    key: PRNGKey,
    learner: EpisodeLearner,
    count: int,
    links: str,
) -> Array:
    return learner.draw(params, problem, key, count, links)
