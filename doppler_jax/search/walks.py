"""Searches that change one plan step by step: simulated annealing, iterated local search.

Both make a few walks beside each other. After equal shares of the budget the one that is
worst off goes on from where the best one is.

References: Kirkpatrick et al. 1983; Lourenço et al. 2003.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from doppler_jax.search.problem import SearchProblem

if TYPE_CHECKING:
    from doppler_jax.search.kernels import Walker

LEAST_STEPS = 256
"""Of a walk: budgets that allow less take fewer walks."""


@dataclasses.dataclass(frozen=True)
class OnePlan:
    """How many members a search has whose members change one plan each."""

    members: int = 4

    @property
    def starts(self) -> int:
        return 1

    def fit(self, evaluations: int) -> Self:
        members = max(min(self.members, evaluations // LEAST_STEPS), 1)
        return dataclasses.replace(self, members=members)


@dataclasses.dataclass(frozen=True)
class _Walks(OnePlan):
    """What the two share; a walker is a member."""

    def begin(self, problem: SearchProblem, starts: np.ndarray, seed: int) -> "Walker":
        return make_walker(problem, starts[0], seed)

    def best(self, member: "Walker") -> tuple[np.ndarray, np.ndarray]:
        from doppler_jax.search.kernels import BEST, BEST_PLACEMENT

        return member.plan[BEST_PLACEMENT][None], member.worth[BEST : BEST + 1]

    def learn(
        self, member: "Walker", placements: np.ndarray, value_s: np.ndarray, energy: np.ndarray
    ) -> None:
        from doppler_jax.search.kernels import ENERGY, PLACEMENT

        del value_s
        if energy[0] < member.worth[ENERGY]:
            member.plan[PLACEMENT] = placements[0]
            member.worth[ENERGY] = np.inf  # until it is looked at anew

    def share(self, members: Sequence["Walker"]) -> None:
        from doppler_jax.search.kernels import BEST_PLACEMENT, ENERGY

        energies = [member.worth[ENERGY] for member in members]
        best, worst = members[int(np.argmin(energies))], members[int(np.argmax(energies))]
        if best.worth[ENERGY] < worst.worth[ENERGY]:
            worst.plan[:BEST_PLACEMENT] = best.plan[:BEST_PLACEMENT]
            worst.worth[ENERGY] = np.inf  # until it is looked at anew


@dataclasses.dataclass(frozen=True)
class Annealing(_Walks):
    """Settings of simulated annealing.

    Temperatures are in shares of a task: the current makespan over the number of tasks. What
    a move changes is of that order, so that graphs of all sizes cool alike. Where plans are
    evaluated as a whole, most moves are of tasks on the critical chain, which helps small
    budgets most.
    """

    hot: float = 0.5  # temperature at the start
    cold: float = 5e-3  # and at the end of the budget, geometrically between

    def run(
        self, problem: SearchProblem, member: "Walker", steps: int, begin: float, end: float
    ) -> int:
        from doppler_jax.search.kernels import walk

        fall = self.cold / self.hot
        hot, cold = self.hot * fall**begin, self.hot * fall**end
        return walk(problem.aim, member, steps, hot, cold, 0, problem.target_s)


@dataclasses.dataclass(frozen=True)
class LocalSearch(_Walks):
    """Settings of iterated local search.

    Half of the moves of a descent are of single tasks, all in turn, half are random. After as
    many in vain as cover all single moves the placement counts as a local optimum: the better
    of it and the last one is kept, and changed at random for the next descent.
    """

    kicks: int = 4  # random moves that change an optimum

    def run(
        self, problem: SearchProblem, member: "Walker", steps: int, begin: float, end: float
    ) -> int:
        from doppler_jax.search.kernels import walk

        del begin, end
        return walk(problem.aim, member, steps, 0.0, 0.0, self.kicks, problem.target_s)


def make_walker(problem: SearchProblem, placement: np.ndarray, seed: int) -> "Walker":
    """Returns a walker at a placement `[N]`, its tasks in topological order."""
    from doppler_jax.search.kernels import GROUP, ORDER, PLACEMENT, STRIDE, Walker
    from doppler_jax.simulator.native_kernels import make_rows

    aim, devices = problem.aim, problem.costs.num_devices
    n = len(placement)
    order = np.argsort(aim.rank)
    kept = n if aim.is_plain else 0
    is_serial = problem.objective.links == "serial"
    plan = np.stack([placement, order, aim.rank, *[placement, order] * 2]).astype(np.uint32)
    factors = aim.compute_factor, aim.item_factor
    executed = plan[PLACEMENT, None], None, plan[ORDER, None], factors
    return Walker(
        random=np.array([seed], np.uint64),
        plan=plan,
        worth=np.full(3, np.inf),
        count=np.zeros(4, np.int64),
        moved=np.zeros((2, GROUP), np.uint32),
        done_s=np.zeros((2, kept)),
        arrival_s=np.zeros((2, len(aim.out_in) if kept and is_serial else 0)),
        mark_s=np.zeros((2, kept // STRIDE + 1, 1 + devices * (1 + devices))),
        state_s=np.zeros(1 + devices * (1 + devices)),
        trial=problem.make_trial(plan[PLACEMENT], plan[ORDER]),
        timed=make_rows(aim.problem, *executed, schedule=True, transfers=True),
        chain=np.zeros(n, np.uint32),
    )
