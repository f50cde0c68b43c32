"""A search that ruins plans and recreates them: that of the default method.

References: large neighbourhoods, Shaw 1998; ruin and recreate, accepted as in simulated
annealing, Schrimpf et al. 2000.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from doppler_jax.search.problem import SearchProblem
from doppler_jax.search.walks import OnePlan

if TYPE_CHECKING:
    from doppler_jax.search.lns_kernels import Ruins


@dataclasses.dataclass(frozen=True)
class LNS(OnePlan):
    """Settings of large neighbourhood search.

    Members go their own way; after equal shares of the budget the one that is worst off goes
    on from where the best one is. Temperatures are as in `walks.Annealing`. Under `priority`
    queues ranks are searched, too.
    """

    hot: float = 0.5  # temperature at the start
    cold: float = 5e-3  # and at the end of the budget, geometrically between
    ruins: float = 0.7  # share of steps that free tasks; the others move some
    most: int = 32  # tasks that are freed together

    def begin(self, problem: SearchProblem, starts: np.ndarray, seed: int) -> "Ruins":
        return make_ruins(problem, starts[0], seed, self.most)

    def run(
        self, problem: SearchProblem, member: "Ruins", steps: int, begin: float, end: float
    ) -> int:
        from doppler_jax.search.lns_kernels import recreate

        fall = self.cold / self.hot
        hot, cold = self.hot * fall**begin, self.hot * fall**end
        return recreate(problem.aim, member, steps, hot, cold, self.ruins, problem.target_s)

    def best(self, member: "Ruins") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        from doppler_jax.search.lns_kernels import BEST

        value_s = member.worth[BEST : BEST + 1]
        return member.best_placement[None], value_s, member.best_rank[None]

    def learn(
        self, member: "Ruins", placements: np.ndarray, value_s: np.ndarray, energy: np.ndarray
    ) -> None:
        from doppler_jax.search.lns_kernels import ENERGY

        del value_s
        if energy[0] < member.worth[ENERGY]:
            member.placement[:] = placements[0]
            member.worth[ENERGY] = np.inf  # until it is looked at anew

    def share(self, members: Sequence["Ruins"]) -> None:
        from doppler_jax.search.lns_kernels import ENERGY

        energies = [member.worth[ENERGY] for member in members]
        best, worst = members[int(np.argmin(energies))], members[int(np.argmax(energies))]
        if best.worth[ENERGY] < worst.worth[ENERGY]:
            worst.placement[:], worst.rank[:] = best.placement, best.rank
            worst.worth[ENERGY] = np.inf


def make_ruins(problem: SearchProblem, placement: np.ndarray, seed: int, most: int) -> "Ruins":
    """Returns a plan of a placement `[N]` to begin with, ranked by b-level.

    At most `most` of its tasks are freed together.
    """
    from doppler_jax.search.kernels import GROUP
    from doppler_jax.search.lns_kernels import Ruins

    n, devices = problem.aim.problem.compute_s.shape
    placement = placement.astype(np.uint32)
    rank = problem.level_rank.copy()
    order = np.argsort(problem.aim.rank).astype(np.uint32)
    return Ruins(
        random=np.array([seed], np.uint64),
        placement=placement,
        rank=rank,
        best_placement=placement.copy(),
        best_rank=rank.copy(),
        worth=np.full(2, np.inf),
        count=np.zeros(2, np.int64),
        free=np.zeros(n, bool),
        moved=np.zeros((2, max(most, GROUP)), np.uint32),
        start_s=np.zeros(n),
        finish_s=np.zeros(n),
        before=np.zeros(n, np.uint32),
        queued_s=np.zeros(devices),
        chain=np.zeros(n, np.uint32),
        trial=problem.make_trial(placement, order, rank),
    )
