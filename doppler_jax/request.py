"""What `place` asks of a method, and what it gets."""

import dataclasses
from collections.abc import Callable

import chex
import numpy as np

from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.objective import Objective
from doppler_jax.search.objective import Judgement, SearchProblem, judge
from doppler_jax.training.checkpoint import Policy
from doppler_jax.types import Costs, TaskGraph

SAMPLES = 1000
"""Placements that `random`, and a policy that is given, draw if nothing bounds them."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What a method is asked for."""

    graph: TaskGraph
    costs: Costs
    objective: Objective
    problem: SearchProblem
    key: chex.PRNGKey
    policy: Policy | None
    budget: Budget
    lower_bound_s: float  # no placement has a smaller makespan, without noise
    curve: CurveRecorder  # takes what is found on the way
    _judged: dict[bytes, Judgement] = dataclasses.field(default_factory=dict)

    def seconds_left(self, default: float) -> float:
        """Returns the seconds until the bound, or until the default if there is none."""
        bound = self.budget.seconds or default
        return max(bound - self.budget.seconds_spent(), 1e-3)

    def judge(self, placement: np.ndarray, priority: np.ndarray | None = None) -> Judgement:
        """Returns the oracle's word on a placement `[N]`, which it is asked for once."""
        parts = (
            np.asarray(part, np.int64) for part in (placement, priority) if part is not None
        )
        name = b"".join(part.tobytes() for part in parts)
        if name not in self._judged:
            self._judged[name] = judge(
                self.graph,
                self.costs,
                placement,
                self.objective,
                self.problem.factors,
                priority,
            )
        return self._judged[name]

    def optimum(self, placements: np.ndarray) -> "Candidates | None":
        """Returns the first of placements `[B, N]` that meets the target; None if none does."""
        if self.budget.target_s is not None:
            for count, placement in enumerate(placements, start=1):
                if self.judge(placement).value_s <= self.budget.target_s:
                    return Candidates(placement[None], count)
        return None

    def record(self, evaluations: int, makespan_s: float) -> None:
        """Adds the best that training has found so far to the curve."""
        self.curve.add(evaluations, self.budget.seconds_spent(), makespan_s)


@dataclasses.dataclass(frozen=True)
class Candidates:
    """What a method proposes; the float64 oracle chooses among it."""

    placements: np.ndarray  # [B, N] int
    evaluations: int  # executions simulated
    compile_s: float = 0.0  # of the search's own jits
    interrupted: bool = False
    priority: np.ndarray | None = None  # [N] ranks to try in place of `fifo`
    lower_bound_s: float = 0.0  # proven for this problem


Method = Callable[[Request], Candidates]
