"""A search that ruins plans and recreates them, and walks: that of the default method.

References: large neighbourhoods, Shaw 1998; ruin and recreate, accepted as in simulated
annealing, Schrimpf et al. 2000.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from doppler_jax.search.problem import SearchProblem
from doppler_jax.search.walks import OnePlan, make_walker

if TYPE_CHECKING:
    from doppler_jax.search.kernels import Walker
    from doppler_jax.search.lns_kernels import Room, Ruins

LEAST_RUINED = 20_000
"""Steps that ruin, of a member: where evaluations are bounded, each of them does more."""


@dataclasses.dataclass
class Member:
    """A plan that is ruined and recreated, or walks."""

    ruins: "Ruins"
    walker: "Walker | None"  # None where nothing can be walked
    walks: bool = False  # now
    serves: bool = False  # under `fifo`, now
    best_s: float = np.inf  # of the ruins, whose order is known
    best_rank: np.ndarray | None = None

    @property
    def state(self) -> "Ruins | Walker":
        """What is changed now."""
        return self.walker if self.walker is not None and self.walks else self.ruins


@dataclasses.dataclass(frozen=True)
class LNS(OnePlan):
    """Large neighbourhood search, in turns with annealing from where it ended.

    Ranks are searched, too, if the queue looks at them. Under `in_order` plans are ruined and
    recreated as under `priority`, where every order is legal, and a plan is as long as its
    replay in order. Where memory is limited devices wait until there is room, and the order of
    starts becomes the plan's.

    Where nothing can be walked, plans are first ruined under `fifo`, which looks at no order,
    and go on from the order of its starts.

    A list schedule of the whole plan takes several times as long as a change of it that is
    evaluated from the changed position. So where that can be done most of the budget is for
    such steps: few of the former already come near to what they can reach.
    """

    queue: ClassVar[str | None] = None
    ruins: float = 0.7  # share of steps that free tasks; the others move some
    most: int = 32  # tasks that are freed together
    share_ruined: float = 0.3  # of the budget, where the rest can be walked
    share_served: float = 0.7  # of the budget, first, where nothing can be walked
    rounds: int = 3  # of both

    def fit(self, evaluations: int) -> Self:
        few = super().fit(evaluations)
        least = LEAST_RUINED * few.members / max(evaluations, 1)
        return dataclasses.replace(few, share_ruined=max(self.share_ruined, min(least, 1.0)))

    def begin(
        self, problem: SearchProblem, placement: np.ndarray, rank: np.ndarray, seed: int
    ) -> Member:
        if self._serves(problem):
            ruins = make_ruins(problem.first_come, placement, rank, seed, self.most)
            return Member(ruins, None, serves=True)
        ruins = make_ruins(_listed(problem), placement, rank, seed, self.most)
        if not can_walk(problem) or self.share_ruined == 1.0:
            return Member(ruins, None)
        return Member(ruins, make_walker(problem, placement, problem.rank, seed))

    def run(
        self, problem: SearchProblem, member: Member, steps: int, begin: float, end: float
    ) -> int:
        from doppler_jax.search.kernels import walk
        from doppler_jax.search.lns_kernels import recreate

        first, last = 0.0, 1.0  # of the budget, for steps of one kind
        if member.walker is not None:
            first = min(int(begin * self.rounds), self.rounds - 1) / self.rounds
            turn = first + self.share_ruined / self.rounds
            first, last = (first, turn) if begin < turn else (turn, first + 1.0 / self.rounds)
            self._turn(problem, member, begin >= turn)
        elif self._serves(problem) and begin < self.share_served:
            last = self.share_served
        elif self._serves(problem):
            first = self.share_served
            self._rank(problem, member)
        at = ((share - first) / (last - first) for share in (begin, min(end, last)))
        heat = self.temperatures(*at)
        if member.walker is not None and member.walks:
            return walk(problem.aim, member.walker, steps, *heat, problem.enough_s)
        aim = (problem.first_come if member.serves else _listed(problem)).aim
        return recreate(aim, member.ruins, steps, *heat, self.ruins, problem.enough_s)

    def best(
        self, problem: SearchProblem, member: Member
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = super().best(problem, member.state)
        if problem.queue != "in_order" or member.walks:
            return found
        # The plan's ranks are not its order.
        return found[0][:1], found[1][:1], self._order(problem, member)[None]

    def learn(
        self, member: Member, placement: np.ndarray, rank: np.ndarray, energy: float
    ) -> None:
        super().learn(member.state, placement, rank, energy)

    def share(self, members: Sequence[Member]) -> None:
        super().share([member.state for member in members])

    def _turn(self, problem: SearchProblem, member: Member, walks: bool) -> None:
        """Lets a member walk, or ruin, from the best that it has found by the other.

        Where none of that fits into memory, it goes on from where it is.
        """
        from doppler_jax.search.kernels import BEST

        walker, ruins = member.walker, member.ruins
        if walker is None or walks == member.walks:
            return
        fits = np.isfinite(member.state.worth[BEST])
        if walks and fits:
            walker.placement[:] = ruins.best_placement
            walker.rank[:] = self._order(problem, member)
        elif walks:
            walker.placement[:] = ruins.placement
            walker.rank[:] = problem.order_of(ruins.placement, ruins.rank)
        elif fits:
            ruins.placement[:], ruins.rank[:] = walker.best_placement, walker.best_rank
        else:
            ruins.placement[:], ruins.rank[:] = walker.placement, walker.rank
        member.walks, member.best_rank = walks, None
        member.state.worth[:] = np.inf

    def _serves(self, problem: SearchProblem) -> bool:
        """Returns whether plans are ruined under `fifo` before their order is searched.

        Under noise they are not: what they are worth there is not what they are in order.
        """
        is_exact = not problem.is_limited and problem.factors is None
        is_ordered = problem.queue == "in_order" and not can_walk(problem)
        return is_ordered and is_exact and self.share_served > 0

    def _rank(self, problem: SearchProblem, member: Member) -> None:
        """Lets a member that has served so far go on with ranks, from its best."""
        if member.serves:
            best, rank = member.ruins, self._order(problem, member)
            seed = int(best.random[0])
            member.ruins = make_ruins(
                _listed(problem), best.best_placement, rank, seed, self.most
            )
            member.serves, member.best_rank = False, None

    def _order(self, problem: SearchProblem, member: Member) -> np.ndarray:
        """Returns the order `[N]` of the best of the ruins, as ranks."""
        from doppler_jax.search.kernels import BEST

        best, serves = member.ruins, member.serves
        if not serves and (problem.is_limited or _listed(problem).aim.is_listed):
            return best.best_rank.copy()  # it is that of starts
        if member.best_rank is None or best.worth[BEST] < member.best_s:
            member.best_s = best.worth[BEST]
            ranks = None if serves else best.best_rank
            member.best_rank = problem.order_of(best.best_placement, ranks)
        return member.best_rank


def can_walk(problem: SearchProblem) -> bool:
    """Returns whether changing a plan in order is cheaper, or may find another that fits."""
    return problem.queue == "in_order" and (problem.is_limited or bool(problem.aim.is_plain))


def _listed(problem: SearchProblem) -> SearchProblem:
    """Returns the problem whose list schedules are executions."""
    return problem if problem.is_limited else problem.work_conserving


def make_ruins(
    problem: SearchProblem, placement: np.ndarray, rank: np.ndarray, seed: int, most: int
) -> "Ruins":
    """Returns a plan to begin with, devices and ranks `[N]`.

    At most `most` of its tasks are freed together.
    """
    from doppler_jax.search.kernels import GROUP
    from doppler_jax.search.lns_kernels import Ruins

    compute_s = problem.aim.problem.compute_s
    n, devices = compute_s.shape
    placement = placement.astype(np.uint32)
    rank = rank.astype(np.float64)
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
