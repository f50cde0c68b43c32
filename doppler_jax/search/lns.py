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
    from doppler_jax.search.lns_kernels import Room, Ruins


@dataclasses.dataclass(frozen=True)
class LNS(OnePlan):
    """Large neighbourhood search.

    Ranks are searched, too, if the queue looks at them. Under `priority` every order is legal,
    and a plan is as long as its replay in order. Under `in_order` devices wait until
    there is room in their memory, and the order of starts becomes the plan's.
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

    def best(self, member: "Ruins") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = super().best(member)
        if len(member.room.held):  # the plan's ranks are not its order, as the best one's are
            return found[0][:1], found[1][:1], found[2][:1]
        return found


def make_ruins(problem: SearchProblem, placement: np.ndarray, seed: int, most: int) -> "Ruins":
    """Returns a plan of a placement `[N]` to begin with, and its ranks.

    At most `most` of its tasks are freed together.
    """
    from doppler_jax.search.kernels import GROUP
    from doppler_jax.search.lns_kernels import Ruins

    compute_s = problem.aim.problem.compute_s
    n, devices = compute_s.shape
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
        count=np.array([0, 0, 1]),
        pinned=np.isfinite(compute_s).sum(axis=1) == 1,
        free=np.zeros(n, bool),
        moved=np.zeros((2, max(most, GROUP)), np.uint32),
        start_s=np.zeros(n),
        finish_s=np.zeros(n),
        before=np.zeros(n, np.uint32),
        queued_s=np.zeros(devices),
        held_bytes=np.zeros(devices * problem.is_limited),
        holds=np.zeros((problem.graph.num_inputs * problem.is_limited, devices), np.uint32),
        passed=np.zeros(n, np.uint32),
        chain=np.zeros(n, np.uint32),
        room=_make_room(problem),
        trial=problem.make_trial(placement, order, rank, queue),
        patient=problem.make_trial(placement, order),
    )


def _make_room(problem: SearchProblem) -> "Room":
    from doppler_jax.search.lns_kernels import Room

    graph, aim = problem.graph, problem.aim
    moves = len(aim.problem.reader) * aim.waits
    stays, devices = len(aim.memory.item_bytes) + moves, problem.costs.num_devices * aim.waits
    made_bytes = np.zeros(graph.num_tasks)
    np.add.at(made_bytes, graph.tensor_producer, problem.costs.tensor_bytes)
    move = aim.problem.first_move[0] + np.argsort(aim.out_in)
    return Room(
        made_bytes=made_bytes,
        move=move.astype(np.uint32),
        held=np.zeros(devices),
        left=np.zeros(stays, np.uint32),
        until_s=np.zeros(stays),
        device=np.zeros(stays, np.uint32),
        stay=np.zeros(moves, np.uint32),
        ending=np.zeros(stays, np.uint32),
        count=np.zeros(1, np.uint32),
        last=np.zeros(devices, np.int64),
        recent=np.zeros(devices, np.uint32),
    )
