"""Runs a search within a budget, in jitted chunks, so that it can be stopped at any time.

Searches simulate in float32. Where rounding has swapped two events that are close, a
placement may look shorter than it is. A search whose best is longer than it looks by more
than the search has gained of late goes on in float64, where simulating takes longer.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.objective import Objective
from doppler_jax.search.objective import Scores, SearchProblem, score, score_padded
from doppler_jax.types import pytree

CHUNK_S = 0.2
"""Seconds of a chunk: how late a bound on time, or Ctrl-C, may take effect."""

CHUNK_STEPS = 1024
"""Steps of a chunk, at most."""

NUM_FOUND = 12
"""Placements that a search hands on, to be judged in float64."""

CHECKS = 8
"""Equal parts of a budget, after each of which but the last float32's best is looked at."""

CHECKS_SHARE = 0.02
"""Of the seconds, where they are bounded: once checks took more, the next ones are left out."""

FLOAT64_S = 20.0
"""Seconds that must be left to begin in float64, where bounded: compiling may take half."""

MISJUDGED = 1e-4
"""Relative error of a makespan by which events are in another order, not rounded alone."""

ROUNDING = 1e-6
"""Relative, above the error of a makespan in float32 whose events are in the right order."""

State = Any
"""Pytree of a search in progress; `best` is a `Best`, the rest is the search's own."""


@pytree
class Best:
    """The best placement that each of K members of a search has seen."""

    placement: chex.Array  # [K, N] int32
    value_s: chex.Array  # [K] inf if none that fits was seen


class Search(Protocol):
    """A search as a frozen dataclass of settings: static, pure methods, jittable."""

    @property
    def members(self) -> int:
        """Placements that it starts from."""

    @property
    def batch(self) -> int:
        """Placements that a step simulates."""

    def fit(self, evaluations: int) -> "Search":
        """Returns the search, with a smaller batch if the budget is small."""

    def init(self, placements: chex.Array) -> State:
        """Returns the state that starts at placements `[members, N]`, scored by its steps."""

    def ask(self, key: chex.PRNGKey, problem: SearchProblem, state: State) -> chex.Array:
        """Returns the placements `[batch, N]` to simulate next."""

    def limit_s(self, state: State) -> chex.Array:
        """Returns the makespans `[batch]` from which on `tell` keeps nothing of what is asked.

        Whether such a placement fits into memory is not looked at then.
        """

    def tell(
        self,
        key: chex.PRNGKey,
        problem: SearchProblem,
        state: State,
        asked: chex.Array,
        scores: Scores,
        progress: chex.Array,
    ) -> State:
        """Moves on, with what `ask` returned for this state and what that is worth.

        `progress` is the share spent of its budget.
        """


@dataclasses.dataclass(frozen=True)
class Exact:
    """What a search turns to where float32 misjudges placements."""

    makespan_s: Callable[[np.ndarray], float]  # the oracle's word on a placement [N]
    problem: Callable[[], SearchProblem]  # the same problem in float64


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came up with."""

    placements: np.ndarray  # [B, N] the best ones, best first; none if nothing fits
    evaluations: int  # executions simulated
    compile_s: float
    interrupted: bool  # by Ctrl-C


def run_search(
    search: Search,
    objective: Objective,
    problem: SearchProblem,
    starts: np.ndarray,
    key: chex.PRNGKey,
    budget: Budget,
    curve: CurveRecorder,
    *,
    choose: bool = False,
    exact: Exact | None = None,
    on_chunk: Callable[[int], None] | None = None,
) -> Found:
    """Runs a search until its budget is spent, or Ctrl-C.

    With a bound on evaluations alone the outcome is a function of the arguments; with one on
    seconds it depends on the machine. Once a placement is as short as the budget's target, by
    the oracle's word where `exact` gives one, the search is over.

    Args:
      search: its settings; made smaller if the bound on evaluations is small.
      objective: what to minimise.
      problem: its arrays.
      starts: `[S, N]` placements to start from, S >= 1; the first ones if there are more
        than members, all of them in turn if there are fewer.
      choose: whether to score all starts first and begin at the best of them.
      key: of the draws; it is consumed.
      budget: when to stop.
      curve: takes a row at every chunk that improved.
      exact: the same problem in float64, to go on with where float32 proves wrong.
      on_chunk: called after every chunk with the evaluations so far.

    Returns:
      The best placements found. The starts need not be among them.
    """
    cost = objective.simulations
    limit = math.inf if budget.evaluations is None else budget.evaluations
    if budget.evaluations is None and budget.seconds is None:
        raise ValueError("a search needs a bound: evaluations or seconds")
    if limit < cost:
        return Found(starts[:0], 0, 0.0, interrupted=False)
    if limit < math.inf:
        search = search.fit(int(limit) // cost)
    padded = np.pad(starts, ((0, 0), (0, problem.padded.padded_tasks - starts.shape[1])))
    run = _Run(search, objective, problem, key, limit, budget, curve, exact)
    interrupted = False
    try:
        run.start(padded.astype(np.int32), choose)
        while run.advance():
            if on_chunk is not None:
                on_chunk(run.evaluations)
        found = run.found()
    except KeyboardInterrupt:
        interrupted = True
        found = run.found()
    found = found[:, : starts.shape[1]]
    return Found(found.astype(np.int64), run.evaluations, run.compile_s, interrupted)


class _Run:
    """A search in progress."""

    def __init__(
        self,
        search: Search,
        objective: Objective,
        problem: SearchProblem,
        key: chex.PRNGKey,
        limit: float,
        budget: Budget,
        curve: CurveRecorder,
        exact: Exact | None,
    ) -> None:
        self.search, self.objective, self.problem = search, objective, problem
        self.key = key
        self.limit, self.budget, self.curve = limit, budget, curve
        self.exact = exact  # None once it is in use
        self.checks = 0  # that were due
        self.checks_s = 0.0  # what they took
        self.judged_s = math.inf  # the oracle's word at the last one
        self.judge = None if exact is None else exact.makespan_s
        self.precision: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.share_before = budget.progress(0)
        self.evaluations = 0
        self.compile_s = 0.0
        self.done = 0  # steps
        self.steps = 1  # of the next chunk
        self.pause_s = -math.inf  # a chunk ends once the best looks as short as this
        if budget.target_s is not None:
            self.pause_s = budget.target_s * (1 + ROUNDING)
        self.is_over = False  # the target is met
        self.state: State | None = None
        self.misjudged = np.empty((0, problem.padded.padded_tasks), np.int32)  # by float32
        self.confirmed, self.confirmed_s = (
            self.misjudged,
            math.inf,
        )  # the shortest that was judged

    def start(self, starts: np.ndarray, choose: bool) -> None:
        """Compiles, and begins at the starts."""
        if choose and len(starts) > self.search.members:
            value_s, energy = self._score(starts)
            # One that fits is never left out for one that does not.
            starts = starts[np.lexsort((energy, np.isinf(value_s)))]
        self._begin(starts)

    def _begin(self, starts: np.ndarray) -> None:
        """Compiles, and makes the state that begins at the first of the starts, or at all."""
        shape = (self.search.members, starts.shape[1])
        with self.precision():
            state = self.search.init(jnp.asarray(np.resize(starts, shape)))
        began = time.monotonic()
        self.state, _ = jax.block_until_ready(self._chunk(state, 0))
        self.compile_s += time.monotonic() - began

    def _score(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns values and energies `[S]` of starts, inf where the budget does not reach."""
        width, cost = self.search.batch, self.objective.simulations
        value_s, energy = np.full((2, len(starts)), np.inf)
        for first in range(0, len(starts), width):
            is_late = self.budget.progress(self.evaluations) >= 1
            if self.evaluations + width * cost > self.limit or (first and is_late):
                break
            began = time.monotonic()
            scores = score_padded(
                self.objective, self.problem, starts[first : first + width], width
            )
            if first == 0:
                self.compile_s += time.monotonic() - began
            self.evaluations += width * cost
            value_s[first : first + width] = scores.value_s
            energy[first : first + width] = scores.energy
            self._note(scores.value_s.min())
        return value_s, energy

    def advance(self) -> bool:
        """Runs one chunk; returns whether there was budget for one."""
        per_step = self.search.batch * self.objective.simulations
        steps = self.steps
        if self.limit < math.inf:
            steps = min(steps, int(self.limit - self.evaluations) // per_step)
            until_check = (self.checks + 1) / CHECKS * self.limit - self.evaluations
            steps = min(steps, max(math.ceil(until_check / per_step), 1))
        if steps == 0 or self.is_over or self.budget.progress(self.evaluations) >= 1:
            return False
        began = time.monotonic()
        self.state, steps = self._chunk(self.state, steps)
        with self.precision():
            value_s = float(self.state.best.value_s.min())
        self.evaluations += steps * per_step
        self.done += steps
        took_s = max(time.monotonic() - began, 1e-6)
        self.steps = max(1, min(2 * self.steps, round(steps * CHUNK_S / took_s), CHUNK_STEPS))
        self._note(value_s)
        if value_s <= self.pause_s:
            self._finish_at_target(value_s)
        checks = int(self.budget.progress(self.evaluations) * CHECKS)
        if self.checks < checks < CHECKS:
            self.checks = checks
            spent_s = self.budget.seconds_spent()
            is_dear = self.budget.seconds is not None and self.checks_s > CHECKS_SHARE * spent_s
            if self.exact is not None and not is_dear:
                self._check(self.exact)
        return True

    def _finish_at_target(self, value_s: float) -> None:
        """Ends the search if the best meets the target, else pauses at what looks better."""
        assert self.budget.target_s is not None
        if self.judge is None or self._judge(self._best()[0][0]) <= self.budget.target_s:
            self.is_over = True
        self.pause_s = value_s * (1 - ROUNDING)

    def _check(self, exact: Exact) -> None:
        """Goes on in float64 if float32 errs about the best by more than has been gained."""
        best, believed_s = self._best()
        if not len(best):
            return
        began = time.monotonic()
        makespan_s = self._judge(best[0])
        self.checks_s += time.monotonic() - began
        if makespan_s < self.confirmed_s:
            self.confirmed, self.confirmed_s = best[:1], makespan_s
        gained_s, self.judged_s = self.judged_s - makespan_s, makespan_s
        if makespan_s - believed_s[0] <= max(gained_s, MISJUDGED * makespan_s):
            return
        seconds = self.budget.seconds
        if seconds is not None and seconds - self.budget.seconds_spent() < FLOAT64_S:
            return
        self.curve.correct(self.evaluations, self.budget.seconds_spent(), makespan_s)
        self.misjudged = best
        self.precision = partial(jax.enable_x64, True)
        self.problem, self.exact = exact.problem(), None
        self._begin(best)

    def _judge(self, placement: np.ndarray) -> float:
        """Returns the oracle's makespan of a padded placement."""
        assert self.judge is not None
        return self.judge(placement[: int(self.problem.padded.num_tasks)])

    def found(self) -> np.ndarray:
        """Returns the best distinct placements, best first.

        If the first is not what float32 took it for, what was known to be shorter comes last.
        """
        best, _ = self._best()
        best = (best if len(best) else self.misjudged)[:NUM_FOUND]
        if len(self.confirmed) and len(best) and self._judge(best[0]) > self.confirmed_s:
            best = np.concatenate([best, self.confirmed])
        return best

    def _best(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the best distinct placements `[K, N]`, best first, and their values."""
        if self.state is None:
            return self.misjudged, np.empty(0)
        with self.precision():
            best = jax.device_get(self.state.best)
        order = np.argsort(best.value_s, kind="stable")
        order = order[np.isfinite(best.value_s[order])]
        _, first = np.unique(best.placement[order], axis=0, return_index=True)
        chosen = order[np.sort(first)]
        return best.placement[chosen], best.value_s[chosen]

    def _chunk(self, state: State, steps: int) -> tuple[State, int]:
        """Returns the state after so many steps, or fewer, and how many they were."""
        with self.precision():
            state, done = _advance(
                self.search, self.objective, self.problem, state, self.key, self.done, steps,
                self._schedule(steps), self.pause_s,
            )  # fmt: skip
            return state, int(done)

    def _schedule(self, steps: int) -> np.ndarray:
        """Returns (a, b) such that the share spent of this search's part is a + b k at step k.

        Without a bound on seconds it is one line for the whole search, so that the outcome
        does not depend on how the steps fall into chunks.
        """
        if self.budget.seconds is None:
            per_step = self.search.batch * self.objective.simulations
            return np.array([0.0, per_step / self.limit], np.float32)
        now = self.budget.progress(self.evaluations)
        rest = max(1 - self.share_before, 1e-6)
        rise = min(CHUNK_S / self.budget.seconds, 1 - now) / max(steps, 1)
        first = now - self.share_before - rise * self.done
        return np.array([first / rest, rise / rest], np.float32)

    def _note(self, value_s: float) -> None:
        self.curve.add(self.evaluations, self.budget.seconds_spent(), float(value_s))


@partial(jax.jit, static_argnames=("search", "objective"))
def _advance(
    search: Search,
    objective: Objective,
    problem: SearchProblem,
    state: State,
    key: chex.PRNGKey,
    first: int,
    steps: int,
    schedule: chex.Array,
    pause_s: chex.Array,
) -> tuple[State, chex.Array]:
    """Does `steps` steps from step `first` on, and none once the best is down to `pause_s`.

    Returns how many were done, too. Here, and not between chunks, whose lengths depend on the
    machine, so that what is simulated is a function of the arguments.
    """

    def step(state: State, done: chex.Array) -> tuple[State, chex.Array]:
        k = first + done
        progress = jnp.clip(schedule[0] + schedule[1] * k.astype(jnp.float32), 0.0, 1.0)
        ask_key, tell_key = jax.random.split(jax.random.fold_in(key, k))
        asked = search.ask(ask_key, problem, state)
        scores = score(objective, problem, asked, search.limit_s(state))
        return search.tell(tell_key, problem, state, asked, scores, progress), done + 1

    # The loop is of known length because XLA's CPU compiler (jaxlib 0.10.2) aborts on the
    # simulator's kernel within one that is not.
    return jax.lax.fori_loop(
        0,
        CHUNK_STEPS,
        lambda k, carry: jax.lax.cond(
            (k < steps) & (carry[0].best.value_s.min() > pause_s),
            step,
            lambda *carry: carry,
            *carry,
        ),
        (state, jnp.int32(0)),
    )


def keep_best(best: Best, placements: chex.Array, value_s: chex.Array) -> Best:
    """Returns the best of each of K members' own and their new placements `[K, P, N]`."""
    member = jnp.arange(len(best.value_s), dtype=jnp.int32)
    first = value_s.argmin(1)
    is_better = value_s[member, first] < best.value_s
    return Best(
        placement=jnp.where(is_better[:, None], placements[member, first], best.placement),
        value_s=jnp.minimum(best.value_s, value_s[member, first]),
    )


def fit_batch(members: int, proposals: int, evaluations: int) -> tuple[int, int]:
    """Returns members, and proposals of each, so that a budget allows several steps."""
    most = evaluations // 8
    members = min(members, max(most // 8, 1))
    while members * proposals > most and proposals > 2:
        proposals //= 2
    return members, proposals
