"""A search that ruins plans and recreates them: that of the default method.

References: large neighbourhoods, Shaw 1998; ruin and recreate, accepted as in simulated
annealing, Schrimpf et al. 2000.
"""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from doppler_jax.search.problem import SearchProblem
from doppler_jax.search.walks import OnePlan

if TYPE_CHECKING:
    from doppler_jax.search.lns_kernels import Ruins


@dataclasses.dataclass(frozen=True)
class LNS(OnePlan):
    """Large neighbourhood search.

    Ranks are searched, too, if the queue looks at them. Under `priority` every order is legal,
    and a plan is as long as its replay in order. Under `in_order` a plan is executed under
    `priority` first, and then in order if that exceeds a memory.
    """

    queue: ClassVar[str] = "priority"
    ruins: float = 0.7  # share of steps that free tasks; the others move some
    most: int = 32  # tasks that are freed together

    def begin(self, problem: SearchProblem, start: np.ndarray, seed: int) -> "Ruins":
        return make_ruins(problem, start, seed, self.most)

    def run(
        self, problem: SearchProblem, member: "Ruins", steps: int, begin: float, end: float
    ) -> int:
        from doppler_jax.search.lns_kernels import recreate

        heat = self.temperatures(begin, end)
        return recreate(problem.aim, member, steps, *heat, self.ruins, problem.target_s)


def make_ruins(problem: SearchProblem, placement: np.ndarray, seed: int, most: int) -> "Ruins":
    """Returns a plan of a placement `[N]` to begin with, and its ranks.

    At most `most` of its tasks are freed together.
    """
    from doppler_jax.search.kernels import GROUP
    from doppler_jax.search.lns_kernels import Ruins

    n, devices = problem.aim.problem.compute_s.shape
    placement = placement.astype(np.uint32)
    rank = problem.rank.copy()
    order = np.argsort(rank).astype(np.uint32)
    queue = "fifo" if problem.queue == "fifo" else "priority"
    return Ruins(
        random=np.array([seed], np.uint64),
        placement=placement,
        rank=rank,
        best_placement=placement.copy(),
        best_rank=rank.copy(),
        worth=np.full(3, np.inf),
        count=np.zeros(2, np.int64),
        free=np.zeros(n, bool),
        moved=np.zeros((2, max(most, GROUP)), np.uint32),
        start_s=np.zeros(n),
        finish_s=np.zeros(n),
        before=np.zeros(n, np.uint32),
        queued_s=np.zeros(devices),
        held_bytes=np.zeros(devices * problem.is_limited),
        holds=np.zeros((problem.graph.num_inputs * problem.is_limited, devices), np.uint32),
        chain=np.zeros(n, np.uint32),
        trial=problem.make_trial(placement, order, rank, queue),
        patient=problem.make_trial(placement, order),
    )
