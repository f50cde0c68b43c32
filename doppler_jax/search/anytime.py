"""Runs a search within a budget, in chunks, so that it can be stopped at any time.

A search has members, each of which goes its own way. Threads, one a core, take a chunk of steps
of a member each; between chunks the members may learn from each other. With a bound on
evaluations alone chunks are parts of it. So what is found does not depend on the machine.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import numpy as np

from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.search.problem import SearchProblem
from doppler_jax.simulator.native import num_cores

CHUNK_S = 0.1
"""Seconds of a chunk: how late a bound on time, or Ctrl-C, may take effect."""

FIRST_STEPS = 8
"""Steps of the first chunk where only seconds are bounded: a step may take long."""

CHUNK_TASKS = 1 << 20
"""Tasks that a chunk of a member executes at most where only evaluations are bounded."""

PARTS = 32
"""Of a budget, after each of which members may learn from each other."""

NUM_FOUND = 12
"""Placements that a search hands on, to be judged."""

Member = Any
"""State of a part of a search that goes its own way: arrays that it changes."""


class Search(Protocol):
    """A search as a frozen dataclass of settings."""

    @property
    def members(self) -> int:
        """How many parts go their own way."""

    @property
    def starts(self) -> int:
        """Placements that a member starts from."""

    def fit(self, evaluations: int) -> "Search":
        """Returns the search, with fewer members or smaller ones if the budget is small."""

    def begin(self, problem: SearchProblem, starts: np.ndarray, seed: int) -> Member:
        """Returns a member that starts at placements `[starts, N]`."""

    def run(
        self, problem: SearchProblem, member: Member, steps: int, begin: float, end: float
    ) -> int:
        """Makes so many steps, each an evaluation, without the interpreter's lock.

        Fewer if the target of the problem is met; returns how many. `begin` and `end` are
        shares of the budget that are spent before and after.
        """

    def best(self, member: Member) -> tuple[np.ndarray, ...]:
        """Returns placements `[K, N]` that it knows, and their values `[K]`, seconds.

        A search that can search under `priority` queues returns their ranks `[K, N]`, too.
        """

    def learn(
        self, member: Member, placements: np.ndarray, value_s: np.ndarray, energy: np.ndarray
    ) -> None:
        """Takes placements `[K, N]`, K >= 1, best first, that are better than what is there."""

    def share(self, members: Sequence[Member]) -> None:
        """Lets members learn from each other."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came up with."""

    placements: np.ndarray  # [B, N] the best ones, best first; none if nothing fits
    ranks: np.ndarray  # [B, N] theirs, where the problem's queue is `priority`
    evaluations: int  # executions simulated
    interrupted: bool  # by Ctrl-C


def run_search(
    search: Search,
    problem: SearchProblem,
    starts: np.ndarray,
    seed: int,
    budget: Budget,
    curve: CurveRecorder,
    *,
    late_starts: Callable[[], np.ndarray | None] | None = None,
    on_chunk: Callable[[int], None] | None = None,
) -> Found:
    """Runs a search until its budget is spent, its target met, or Ctrl-C.

    Args:
      search: its settings; made smaller if the bound on evaluations is small.
      problem: what is searched.
      starts: `[S, N]` placements to start from, S >= 1. If they are more than the members take,
        all are scored first and the best are taken.
      seed: of the draws.
      budget: when to stop.
      curve: takes a row at every chunk that improved.
      late_starts: asked after every chunk for placements `[S, N]` to start from that have come
        in; None if there are none yet.
      on_chunk: called after every chunk with the evaluations so far.

    Returns:
      The best placements found. The starts need not be among them.

    Raises:
      ValueError: the budget bounds neither evaluations nor seconds.
    """
    if budget.evaluations is None and budget.seconds is None:
        raise ValueError("a search needs a bound: evaluations or seconds")
    if budget.target_s is not None:
        problem = dataclasses.replace(problem, target_s=budget.target_s)
    limit = math.inf if budget.evaluations is None else budget.evaluations
    if limit < problem.objective.simulations or not problem.graph.num_tasks:
        none = np.asarray(starts)[:0]
        return Found(none, none, 0, interrupted=False)
    run = _Run(search, problem, budget, curve, late_starts)
    interrupted = False
    try:
        run.start(np.asarray(starts), seed)
        while run.advance():
            if on_chunk is not None:
                on_chunk(run.evaluations)
    except KeyboardInterrupt:
        interrupted = True
    return Found(*run.found(), run.evaluations, interrupted)


class _Run:
    """A search in progress."""

    def __init__(
        self,
        search: Search,
        problem: SearchProblem,
        budget: Budget,
        curve: CurveRecorder,
        late_starts: Callable[[], np.ndarray | None] | None,
    ) -> None:
        self.search, self.problem, self.budget, self.curve = search, problem, budget, curve
        self.late_starts = late_starts
        self.members: list[Member] = []
        self.scored, self.scored_s = np.empty((0, problem.graph.num_tasks)), np.empty(0)
        self.cost = problem.objective.simulations
        self.limit = math.inf  # evaluations of plans, each of `cost` simulations
        if budget.evaluations is not None:
            self.limit = budget.evaluations // self.cost
            self.search = search.fit(self.limit)
        self.plans = 0  # that were evaluated
        self.began = budget.progress(0)
        self.parts = 0  # of the budget, that are over
        self.steps = FIRST_STEPS

    @property
    def evaluations(self) -> int:
        """Executions simulated so far."""
        return self.plans * self.cost

    @property
    def progress(self) -> float:
        """Share spent of what was left when the search began."""
        spent = self.budget.progress(self.evaluations)
        return (spent - self.began) / max(1.0 - self.began, 1e-9)

    def start(self, starts: np.ndarray, seed: int) -> None:
        """Begins at the starts, at the best if they are many."""
        search = self.search
        wanted = search.members * search.starts
        if len(starts) > wanted and len(starts) <= self.limit // 2:
            starts = self._score(starts)[0]
        seeds = np.random.SeedSequence(seed).generate_state(search.members, np.uint64)
        # One by one, so that every member has some of the best.
        dealt = np.resize(starts, (wanted, starts.shape[1]))
        for k, member_seed in enumerate(seeds):
            member = search.begin(self.problem, dealt[k :: search.members], member_seed)
            self.members.append(member)

    def _score(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns placements, best first, values and energies; those that fit come first."""
        value_s, energy = self.problem.score(starts)
        self.plans += len(starts)
        order = np.lexsort((energy, np.isinf(value_s)))
        self.scored = np.concatenate([self.scored, starts[order[:NUM_FOUND]]])
        self.scored_s = np.append(self.scored_s, value_s[order[:NUM_FOUND]])
        self._note()
        return starts[order], value_s[order], energy[order]

    def advance(self) -> bool:
        """Runs one chunk; returns whether there was budget for one."""
        target_s = self.budget.target_s
        steps = self._next_steps()
        if steps < 1 or self.budget.progress(self.evaluations) >= 1:
            return False
        if target_s is not None and self._known()[1].min(initial=math.inf) <= target_s:
            return False
        begin, now, before = self.progress, time.monotonic(), self.plans
        self.plans += steps * len(self.members)
        end = self.progress
        if self.budget.seconds is not None:
            left_s = self.budget.seconds - self.budget.seconds_spent()
            end = max(end, begin + (1.0 - begin) * min(CHUNK_S / max(left_s, CHUNK_S), 1.0))
        # A pool a chunk: threads that wait would outlive a search that ends by Ctrl-C.
        with ThreadPoolExecutor(min(num_cores(), len(self.members))) as pool:
            run = partial(self.search.run, self.problem, steps=steps, begin=begin, end=end)
            self.plans = before + sum(pool.map(run, self.members))
        took_s = max(time.monotonic() - now, 1e-6)
        self.steps = max(1, min(4 * steps, round(steps * CHUNK_S / took_s)))
        if int(self.progress * PARTS) > self.parts:
            self.parts = int(self.progress * PARTS)
            self.search.share(self.members)
        self._learn()
        self._note()
        return True

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
        if late is None or not len(late) or self.plans + len(late) > self.limit:
            return
        placements, value_s, energy = self._score(late)
        for k, member in enumerate(self.members[: len(late)]):
            dealt = slice(k, None, len(self.members))
            self.search.learn(member, placements[dealt], value_s[dealt], energy[dealt])

    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns placements `[K, N]` and their values."""
        known = [(self.scored, self.scored_s), *map(self.search.best, self.members)]
        placements, values, *_ = zip(*(each[:2] for each in known), strict=True)
        return np.concatenate(placements), np.concatenate(values)

    def found(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the best distinct placements, best first, and their ranks."""
        placements, value_s = self._known()
        order = np.argsort(value_s, kind="stable")
        order = order[np.isfinite(value_s[order])]
        _, first = np.unique(placements[order], axis=0, return_index=True)
        chosen = order[np.sort(first)[:NUM_FOUND]]
        found, ranks = placements[chosen].astype(np.int64), np.empty((0, placements.shape[1]))
        if self.problem.queue == "priority":
            of_members = [rank for *_, rank in map(self.search.best, self.members)]
            of_starts = np.tile(self.problem.level_rank, (len(self.scored), 1))
            ranks = np.concatenate([of_starts, *of_members])[chosen]
        return found, ranks

    def _note(self) -> None:
        value_s = self._known()[1].min(initial=math.inf)
        self.curve.add(self.evaluations, self.budget.seconds_spent(), float(value_s))
