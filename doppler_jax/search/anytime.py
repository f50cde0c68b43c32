"""Runs a search within a budget, in chunks, so that it can be stopped at any time.

A search has members, each of which goes its own way. Threads, one a core, take a chunk of steps
of a member each; between chunks the members may learn from each other. With a bound on
evaluations alone chunks are parts of it. So what is found does not depend on the machine.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np

from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.search.problem import SearchProblem
from doppler_jax.simulator.native import num_cores
from doppler_jax.types import Plans

CHUNK_S = 0.1
"""Seconds of a chunk: how often members are looked at."""

FIRST_STEPS = 8
"""Steps of the first chunk where only seconds are bounded: a step may take long."""

CHUNK_TASKS = 1 << 20
"""Tasks that a chunk of a member executes at most where only evaluations are bounded."""

PARTS = 32
"""Of a budget, after each of which members may learn from each other."""

ROOMY = 0.5
"""Share of a memory, up to which a start may use it for limits to be left out of sight, which
makes steps several times as fast. The best plan after every chunk is looked at; once it exceeds
a memory, the search begins anew and minds it."""

LOOKED_AT = 3
"""Starts whose use of memory is looked at."""

NUM_FOUND = 12
"""Placements that a search hands on, to be judged."""

Member = Any
"""State of a part of a search that goes its own way: arrays that it changes."""


class Search(Protocol):
    """A search as a frozen dataclass of settings."""

    queue: ClassVar[str | None]
    """Of the problem in which it searches; None: the one that is asked for."""

    @property
    def members(self) -> int:
        """How many parts go their own way."""

    def fit(self, evaluations: int) -> "Search":
        """Returns the search, with fewer members if the budget is small."""

    def begin(
        self, problem: SearchProblem, placement: np.ndarray, rank: np.ndarray, seed: int
    ) -> Member:
        """Returns a member that starts at a plan: devices and ranks `[N]`."""

    def run(
        self, problem: SearchProblem, member: Member, steps: int, begin: float, end: float
    ) -> int:
        """Makes so many steps, each an evaluation, without the interpreter's lock.

        Fewer if the target of the problem is met; returns how many. `begin` and `end` are
        shares of the budget that are spent before and after.
        """

    def best(
        self, problem: SearchProblem, member: Member
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns placements `[K, N]` that it has, their values `[K]`, seconds, and ranks.

        They are the caller's: the member does not change them later.
        """

    def learn(
        self, member: Member, placement: np.ndarray, rank: np.ndarray, energy: float
    ) -> None:
        """Takes a plan of that energy if it is better than what is there."""

    def share(self, members: Sequence[Member]) -> None:
        """Lets members learn from each other."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came up with."""

    placements: np.ndarray  # [B, N] the best ones, best first; none if nothing fits
    ranks: np.ndarray  # [B, N] theirs; [0, N] where the problem's queue looks at none
    queue: str  # that the ranks are for
    evaluations: int  # executions simulated
    interrupted: bool  # by Ctrl-C


def run_search(
    search: Search,
    problem: SearchProblem,
    starts: Plans,
    seed: int,
    budget: Budget,
    curve: CurveRecorder,
    *,
    late_starts: Callable[[], Plans | None] | None = None,
    on_chunk: Callable[[int], None] | None = None,
    target_s: Callable[[], float] | None = None,
) -> Found:
    """Runs a search until its budget is spent, its target met, or Ctrl-C.

    Args:
      search: its settings; made smaller if the bound on evaluations is small.
      problem: what is searched.
      starts: S >= 1 plans to start from, for the problem's queue; without ranks they get its
        own. If they are more than the members take, all are scored first and the best are
        taken.
      seed: of the draws.
      budget: when to stop.
      curve: takes a row at every chunk that improved.
      late_starts: asked after every chunk for plans to start from that have come in; None if
        there are none yet.
      on_chunk: called after every chunk with the evaluations so far.
      target_s: asked before every chunk for seconds that are good enough, which may rise.

    Returns:
      The best placements found. The starts need not be among them.

    Raises:
      ValueError: the budget bounds neither evaluations nor seconds.
    """
    if budget.evaluations is None and budget.seconds is None:
        raise ValueError("a search needs a bound: evaluations or seconds")
    enough_s = -math.inf if budget.target_s is None else budget.target_s
    problem = dataclasses.replace(problem, enough_s=np.array([enough_s]))
    limit = math.inf if budget.evaluations is None else budget.evaluations
    if limit < problem.objective.simulations or not problem.graph.num_tasks:
        none = starts.placements[:0]
        return Found(none, none, problem.queue, 0, interrupted=False)
    run = _Run(search, problem, budget, curve, late_starts, target_s)
    interrupted = False
    try:
        run.start(problem.ranked(starts), seed)
        while run.advance():
            if on_chunk is not None:
                on_chunk(run.evaluations)
    except KeyboardInterrupt:
        interrupted = True
    return Found(*run.found(), run.problem.queue, run.evaluations, interrupted)


class _Run:
    """A search in progress."""

    def __init__(
        self,
        search: Search,
        problem: SearchProblem,
        budget: Budget,
        curve: CurveRecorder,
        late_starts: Callable[[], Plans | None] | None,
        target_s: Callable[[], float] | None,
    ) -> None:
        self.search, self.problem, self.budget, self.curve = search, problem, budget, curve
        self.asked = problem  # which may be searched without its limits
        self.late_starts, self.target_s = late_starts, target_s
        self.members: list[Member] = []
        # Seconds, placement and rank of the best that were seen after some chunk.
        self.kept: list[tuple[float, np.ndarray, np.ndarray]] = []
        self.cost = problem.objective.simulations
        self.limit = math.inf  # evaluations of plans, each of `cost` simulations
        if budget.evaluations is not None:
            self.limit = budget.evaluations // self.cost
            self.search = search.fit(self.limit)
        self.plans = 0  # that were evaluated
        self.began = budget.progress(0)
        self.parts = 0  # of the budget, that are over
        self.steps = FIRST_STEPS
        self.starts, self.seed = Plans(*np.empty((2, 0, 0))), 0
        self.looked_at: np.ndarray | None = None  # the placement whose memory was, last

    @property
    def evaluations(self) -> int:
        """Executions simulated so far."""
        return self.plans * self.cost

    @property
    def progress(self) -> float:
        """Share spent of what was left when the search began."""
        spent = self.budget.progress(self.evaluations)
        return (spent - self.began) / max(1.0 - self.began, 1e-9)

    def start(self, starts: Plans, seed: int) -> None:
        """Begins at the starts, at the best if they are many."""
        self.starts, self.seed, count = starts, seed, self.search.members
        problem = self.asked
        some = list(zip(*starts, strict=True))[:LOOKED_AT]
        if problem.is_limited and any(problem.memory_share(*plan) <= ROOMY for plan in some):
            self.problem = dataclasses.replace(problem, minds_memory=False)
        if count < len(starts.placements) <= self.limit // 2:
            starts, _ = self._score(starts)
        self._begin(starts)

    def _begin(self, starts: Plans) -> None:
        """Makes the members."""
        self.members = []
        state, plans = np.random.SeedSequence(self.seed), list(zip(*starts, strict=True))
        for k, seed in enumerate(state.generate_state(self.search.members, np.uint64)):
            member = self.search.begin(self.problem, *plans[k % len(plans)], seed)
            self.members.append(member)

    def _exceeds_memory(self) -> bool:
        """Returns whether the best plan does not fit; it is looked at once."""
        if not self.kept or self.kept[0][1] is self.looked_at:
            return False
        _, self.looked_at, rank = self.kept[0]
        return self.problem.memory_share(self.looked_at, rank) > 1

    def _score(self, starts: Plans) -> tuple[Plans, np.ndarray]:
        """Returns plans and energies, best first; those that fit come first."""
        value_s, energy = self.problem.score(starts)
        self.plans += len(value_s)
        order = np.lexsort((energy, np.isinf(value_s)))
        plans, some = Plans(*(part[order] for part in starts)), slice(NUM_FOUND)
        self._keep([(plans.placements[some], value_s[order[some]], plans.ranks[some])])
        return plans, energy[order]

    def advance(self) -> bool:
        """Runs one chunk; returns whether there was budget for one."""
        steps = self._next_steps()
        if steps < 1 or self.budget.progress(self.evaluations) >= 1:
            return False
        targets_s = [self.budget.target_s, self.target_s() if self.target_s else None]
        if self.kept and any(t is not None and self.kept[0][0] <= t for t in targets_s):
            return False
        begin, now, before = self.progress, time.monotonic(), self.plans
        self.plans += steps * len(self.members)
        end = self.progress
        if self.budget.seconds is not None:
            left_s = self.budget.seconds - self.budget.seconds_spent()
            end = max(end, begin + (1.0 - begin) * min(CHUNK_S / max(left_s, CHUNK_S), 1.0))
        run = partial(self.search.run, self.problem, steps=steps, begin=begin, end=end)
        made: list[Future[int]] = []
        try:
            self._run_members(run, made)
        finally:
            self.plans = before + sum(steps.result() for steps in made)
        took_s = max(time.monotonic() - now, 1e-6)
        self.steps = max(1, min(4 * steps, round(steps * CHUNK_S / took_s)))
        self._keep(map(partial(self.search.best, self.problem), self.members))
        if int(self.progress * PARTS) > self.parts:
            self.parts = int(self.progress * PARTS)
            self.search.share(self.members)
        self._learn()
        return True

    def _run_members(self, run: Callable[[Member], int], made: list[Future[int]]) -> None:
        """Runs members in threads until the seconds are over; adds the steps of each."""
        seconds = self.budget.seconds
        left_s = None if seconds is None else max(seconds - self.budget.seconds_spent(), 0.0)
        # A pool a chunk: threads that wait would outlive a search that ends by Ctrl-C.
        with ThreadPoolExecutor(min(num_cores(), len(self.members))) as pool:
            try:
                made += [pool.submit(run, member) for member in self.members]
                wait(made, left_s)
            finally:
                if not all(steps.done() for steps in made):
                    self.problem.enough_s[0] = math.inf

    def _next_steps(self) -> int:
        """Returns the steps of the next chunk: where seconds do not count, not the clock's."""
        if not self.members:
            return 0
        left = (self.limit - self.plans) // len(self.members)
        if self.budget.seconds is not None:
            return int(min(self.steps, left))
        of_parts = max(self.limit // (PARTS * len(self.members)), 1)
        return int(min(left, of_parts, max(CHUNK_TASKS // self.problem.graph.num_tasks, 1)))

    def _learn(self) -> None:
        """Hands starts that have come in to the members, the best ones first."""
        late = self.late_starts() if self.late_starts is not None else None
        if late is None or self.plans + len(late.placements) > self.limit:
            return
        plans, energy = self._score(self.problem.ranked(late))
        for member, *plan in zip(self.members, *plans, energy, strict=False):
            self.search.learn(member, *plan)

    def _keep(self, seen: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        """Keeps the best of distinct placements, given some, their values and their ranks."""
        rows = self.kept + [
            row
            for columns in seen
            for row in zip(columns[1].tolist(), *columns[::2], strict=True)
        ]
        best: dict[bytes, tuple[float, np.ndarray, np.ndarray]] = {}
        for value_s, placement, rank in sorted(rows, key=lambda row: row[0]):
            if value_s == math.inf or len(best) == NUM_FOUND:
                break
            row = placement.astype(np.int64, copy=False), rank.astype(np.float64, copy=False)
            best.setdefault(row[0].tobytes(), (value_s, *row))
        self.kept = list(best.values())
        if not self.problem.minds_memory and self._exceeds_memory():
            self.problem, self.kept = self.asked, []
            self._begin(self.starts)
        if self.kept:
            self.curve.add(self.evaluations, self.budget.seconds_spent(), self.kept[0][0])

    def found(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the best distinct placements, best first, and their ranks."""
        # Of a chunk that Ctrl-C ended, too.
        self._keep(map(partial(self.search.best, self.problem), self.members))
        shape = len(self.kept), self.problem.graph.num_tasks
        placements = np.array([placement for _, placement, _ in self.kept], np.int64)
        ranks = np.array([rank for _, _, rank in self.kept]).reshape(shape)
        return placements.reshape(shape), ranks[: 0 if self.problem.queue == "fifo" else None]
