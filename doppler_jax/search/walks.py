"""Searches that change one plan step by step: what they share, and simulated annealing.

References: Kirkpatrick et al. 1983; moves on the critical chain, van Laarhoven et al. 1992,
where a task passes one neighbour on its device, and here at times several.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from doppler_jax.search.problem import SearchProblem

if TYPE_CHECKING:
    from doppler_jax.search.kernels import Walker

LEAST_STEPS = 256
"""Of a member: budgets that allow less take fewer members."""


@dataclasses.dataclass(frozen=True)
class OnePlan:
    """What searches share whose members change one plan each, and accept as in annealing.

    Temperatures are in shares of a task: the current makespan over the number of tasks. What
    a change does is of that order, so that graphs of all sizes cool alike. After equal shares
    of the budget the member that is worst off goes on from where the best one is.
    """

    members: int = 4
    hot: float = 0.5  # temperature at the start
    cold: float = 5e-3  # and at the end of the budget, geometrically between

    def fit(self, evaluations: int) -> Self:
        members = max(min(self.members, evaluations // LEAST_STEPS), 1)
        return dataclasses.replace(self, members=members)

    def temperatures(self, begin: float, end: float) -> tuple[float, float]:
        """Returns those at two shares of the budget."""
        fall = self.cold / self.hot
        return self.hot * fall**begin, self.hot * fall**end

    def best(
        self, problem: SearchProblem, member: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        from doppler_jax.search.kernels import BEST, VALUE

        placements = np.stack([member.best_placement, member.placement])
        ranks = np.stack([member.best_rank, member.rank])
        return placements, member.worth[[BEST, VALUE]], ranks

    def learn(
        self, member: Any, placement: np.ndarray, rank: np.ndarray, energy: float
    ) -> None:
        from doppler_jax.search.kernels import BEST, ENERGY

        if energy < member.worth[ENERGY]:
            member.worth[:BEST] = np.inf  # until it is looked at anew
            member.placement[:], member.rank[:] = placement, rank

    def share(self, members: Sequence[Any]) -> None:
        from doppler_jax.search.kernels import BEST, ENERGY

        energies = [member.worth[ENERGY] for member in members]
        best, worst = members[int(np.argmin(energies))], members[int(np.argmax(energies))]
        if best.worth[ENERGY] < worst.worth[ENERGY]:
            worst.worth[:BEST] = np.inf
            worst.placement[:], worst.rank[:] = best.placement, best.rank


@dataclasses.dataclass(frozen=True)
class Annealing(OnePlan):
    """Simulated annealing: tasks move between devices, and under `in_order` in the order."""

    queue: ClassVar[str | None] = "in_order"

    def begin(
        self, problem: SearchProblem, placement: np.ndarray, rank: np.ndarray, seed: int
    ) -> "Walker":
        return make_walker(problem, placement, rank, seed)

    def run(
        self, problem: SearchProblem, member: "Walker", steps: int, begin: float, end: float
    ) -> int:
        from doppler_jax.search.kernels import walk

        return walk(
            problem.aim, member, steps, *self.temperatures(begin, end), problem.enough_s
        )


def make_walker(
    problem: SearchProblem, placement: np.ndarray, rank: np.ndarray, seed: int
) -> "Walker":
    """Returns a walker at a placement `[N]`, its tasks by ranks `[N]`, 0 to N - 1."""
    from doppler_jax.search.kernels import GROUP, NOBODY, STRIDE, TAKEN, Walker

    aim, devices = problem.aim, problem.costs.num_devices
    n = len(placement)
    placement, rank = placement.astype(np.uint32), rank.astype(np.uint32)
    order = np.argsort(rank).astype(np.uint32)
    kept = n if aim.is_plain else 0
    is_serial = problem.objective.links == "serial"
    state = 1 + devices * (1 + devices * is_serial)
    return Walker(
        random=np.array([seed], np.uint64),
        placement=placement,
        rank=rank,
        order=order,
        best_placement=placement.copy(),
        best_rank=rank.copy(),
        worth=np.full(3, np.inf),
        moved=np.zeros((2, GROUP), np.uint32),
        done_s=np.zeros((2, n)),
        arrival_s=np.zeros((2, len(aim.out_in) if kept and is_serial else 0)),
        mark_s=np.zeros((2, kept // STRIDE + 1, state)),
        state_s=np.zeros(state),
        taken=np.ones(1),
        tail_s=np.zeros(kept),
        next_one=np.full((kept // STRIDE + 2, devices), NOBODY),
        chain=np.zeros(n, np.uint32),
        before=np.zeros(n, np.uint32),
        count=np.array([0, TAKEN]),
        trial=problem.make_trial(placement, order),
    )
