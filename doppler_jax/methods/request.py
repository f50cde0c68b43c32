"""What `place` asks of a method, and what it gets.

A method is any function of a `Request` that returns a plan, or `Candidates` (`own.py` takes
either), or an object that is called like one. Where it has an attribute `takes`, it can use
policies of that name, and one is in the request if it was given to `place`;
`default_policy()`, if it has that, makes one if not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.graphs.build import topological_order
from doppler_jax.native import is_compiled, wait_until_compiled
from doppler_jax.objective import Objective
from doppler_jax.search.anytime import Found
from doppler_jax.search.problem import Judgement, SearchProblem, judge
from doppler_jax.simulator.disciplines import check_ranks
from doppler_jax.simulator.durations import check_placements
from doppler_jax.simulator.finalists import start_order
from doppler_jax.types import Costs, Plans, Policy, TaskGraph

if TYPE_CHECKING:
    import chex

SAMPLES = 1000
"""Placements that `random`, and a policy that is given, draw if nothing bounds them."""


SCORING_S = 10.0
"""Seconds in which a method may score plans if nothing bounds them."""


class BudgetSpent(Exception):
    """Ends a method that scores plans: its budget is spent, or nothing better can be found."""


@dataclasses.dataclass
class Scored:
    """What a method has scored so far."""

    evaluations: int = 0
    best_s: float = math.inf
    best: tuple[Plans, ...] = ()  # one plan, or none yet


def key_words(random: chex.PRNGKey | int) -> np.ndarray:
    """Returns what a key, or the key of a seed, holds: uint32 `[2]` by JAX's own generator."""
    if isinstance(random, int):
        return np.array([0, random], np.uint32)
    import jax

    return np.asarray(jax.random.key_data(random), np.uint32)


@dataclasses.dataclass(frozen=True)
class Request:
    """What a method is asked for.

    Attributes:
      graph: the task graph.
      costs: its costs, seconds.
      objective: what is to be minimised.
      problem: the same, as searches take it.
      random: a key, or a seed of one; it is consumed.
      policy: one that the method takes, or None.
      budget: when to stop.
      lower_bound_s: seconds that no makespan is below, without noise.
      curve: takes what is found on the way.
      keep_compiled: whether what JAX compiles may be kept on disk.
      queue: that the plan is for: `fifo`, or one under which its order counts.
      scored: what `score` has counted.
    """

    graph: TaskGraph
    costs: Costs
    objective: Objective
    problem: SearchProblem
    random: chex.PRNGKey | int
    policy: Policy | None
    budget: Budget
    lower_bound_s: float
    curve: CurveRecorder
    keep_compiled: bool = True
    queue: str = "fifo"
    scored: Scored = dataclasses.field(default_factory=Scored)
    _judged: dict[bytes, Judgement] = dataclasses.field(default_factory=dict)

    def within(self, seconds: float) -> Request:
        """Returns the request; if nothing bounds it, with so many seconds from now."""
        if self.budget.is_bounded:
            return self
        seconds += self.budget.seconds_spent()
        return dataclasses.replace(
            self, budget=dataclasses.replace(self.budget, seconds=seconds)
        )

    @cached_property
    def key(self) -> chex.PRNGKey:
        """Of what JAX draws: made when it is asked for, since JAX takes a while to start."""
        import jax

        return jax.random.key(self.random) if isinstance(self.random, int) else self.random

    @property
    def orders(self) -> bool:
        """Whether a plan's order counts."""
        return self.queue != "fifo"

    def problem_for(self, queue: str | None) -> SearchProblem:
        """Returns the problem under a queue, or that of the request, where orders count."""
        if not self.orders:
            return self.problem
        return dataclasses.replace(self.problem, queue=queue or self.queue)

    @property
    def seed(self) -> int:
        """What the key holds, as a number: for draws that are not JAX's."""
        return int.from_bytes(key_words(self.random).tobytes(), "little")

    def seconds_left(self, default: float) -> float:
        """Returns the seconds until the bound, or until the default if there is none."""
        bound = self.budget.seconds or default
        return max(bound - self.budget.seconds_spent(), 1e-3)

    def score(self, placements: ArrayLike, priority: ArrayLike | None = None) -> np.ndarray:
        """Returns what plans are worth: seconds `[B]` of the objective, inf if they do not fit.

        They are counted, and the best is remembered, for the curve and for the result.

        Args:
          placements: `[B, N]` or `[N]`, devices.
          priority: `[B, N]` or `[N]` ranks, which `request.queue` goes by; without them a
            device takes what is ready first.

        Raises:
          ValueError: a placement or an order is not legal.
          BudgetSpent: there is nothing left to spend, or the best can be no better. It is not
            to be caught: `place` does, and returns the best.
        """
        given = check_placements(self.graph, self.costs, placements)
        none = np.empty((0, self.graph.num_tasks))
        ranks = none if priority is None or not self.orders else self._checked(priority)
        budget, count, draws = self.budget, len(given), self.objective.simulations
        if not budget.is_bounded:
            budget = dataclasses.replace(budget, seconds=SCORING_S)
        if budget.evaluations is not None:
            count = min(count, (budget.evaluations - self.scored.evaluations) // draws)
        if count < 1 <= len(given) or budget.reached():
            raise BudgetSpent
        plans = Plans(given[:count].astype(np.int64), ranks[:count])
        value_s = self._values(plans)
        self.scored.evaluations += count * draws
        best = int(np.argmin(value_s))
        if value_s[best] < self.scored.best_s:
            self.scored.best_s = float(value_s[best])
            self.scored.best = (Plans(*(part[best : best + 1] for part in plans)),)
            self.record(self.scored.evaluations, self.scored.best_s)
        if count < len(given) or self.scored.best_s <= (budget.target_s or -math.inf):
            raise BudgetSpent
        return value_s

    def _checked(self, priority: ArrayLike) -> np.ndarray:
        """Returns ranks `[B, N]` that are legal under the queue."""
        ranks = np.atleast_2d(np.asarray(priority, np.float64))
        for row in ranks:
            check_ranks(self.graph, self.queue, row)
        return ranks

    def _values(self, plans: Plans) -> np.ndarray:
        """Returns the objective of plans `[B]`: compiled code's, until that is there ours."""
        if not (is_compiled() or wait_until_compiled(0.0)):
            judged = [self.judge_plan(plans, k) for k in range(len(plans.placements))]
            return np.array([judgement.value_s for judgement in judged])
        if len(plans.ranks):
            return self.problem_for(None).score(plans)[0]
        return self.problem.score(self.problem.ordered(plans.placements))[0]

    def judge(
        self,
        placement: np.ndarray,
        priority: np.ndarray | None = None,
        queue: str = "priority",
    ) -> Judgement:
        """Returns the oracle's word on a placement `[N]`, which it is asked for once.

        It is executed under `fifo`, or if there are ranks `[N]` under the queue.
        """
        name = np.asarray(placement, np.int64).tobytes()
        if priority is not None:
            name += queue.encode() + np.asarray(priority, np.float64).tobytes()
        if name not in self._judged:
            self._judged[name] = judge(
                self.graph,
                self.costs,
                placement,
                self.objective,
                self.problem.factors,
                priority,
                queue,
            )
        return self._judged[name]

    def judge_plan(self, plans: Plans, index: int = 0) -> Judgement:
        """Returns the oracle's word on one of plans, under the queue that it is for."""
        rank = plans.ranks[index] if len(plans.ranks) else None
        return self.judge(plans.placements[index], rank, self.queue)

    def start_orders(
        self, placements: np.ndarray, ranks: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns ranks `[B, N]` that keep to the orders of starts of executions.

        They are those of placements `[B, N]` under `fifo`, or with ranks under `priority`.
        """
        rank = np.argsort(topological_order(self.graph))
        plans = zip(placements, *(() if ranks is None else (ranks,)), strict=True)
        orders = [start_order(self.judge(*plan).schedule, rank) for plan in plans]
        return np.reshape(orders, (len(orders), len(rank))).astype(np.int64)

    def orders_of(self, found: Found) -> np.ndarray:
        """Returns ranks `[B, N]` of the plans that a search found, orders all; or none."""
        if found.queue == "priority":
            return self.start_orders(found.placements, found.ranks)
        return found.ranks

    def optimum(self, plans: Plans) -> Candidates | None:
        """Returns the first plan that meets the target; None if none does."""
        if self.budget.target_s is not None:
            for k in range(len(plans.placements)):
                if self.judge_plan(plans, k).value_s <= self.budget.target_s:
                    first = Plans(*(part[k : k + 1] for part in plans))
                    return Candidates(first.placements, k + 1, priority=first.ranks)
        return None

    def record(self, evaluations: int, makespan_s: float) -> None:
        """Adds the best that training has found so far to the curve."""
        self.curve.add(evaluations, self.budget.seconds_spent(), makespan_s)


@dataclasses.dataclass(frozen=True)
class Candidates:
    """What a method proposes; the float64 oracle chooses among it.

    Attributes:
      placements: `[B, N]` int, devices; B at least 1.
      evaluations: executions simulated.
      interrupted: by Ctrl-C.
      priority: `[R, N]` ranks of the last R placements, for the queue that the plan is for;
        where that is `fifo` they are tried under `priority`, too.
      lower_bound_s: seconds that the method has proven no makespan to be below.
    """

    placements: np.ndarray
    evaluations: int
    interrupted: bool = False
    priority: np.ndarray | None = None
    lower_bound_s: float = 0.0


Method = Callable[[Request], Any]
"""Returns candidates; or a `Plan`, placements `[N]` or `[B, N]`, None for the best scored."""
