"""Methods that search: from list schedules, from a policy's samples, at random."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from doppler_jax.baselines.exact import STARTS
from doppler_jax.baselines.fitting import fit_some
from doppler_jax.baselines.simple import random_placements
from doppler_jax.methods.beside import Beside, is_solvable
from doppler_jax.methods.child import Child, can_be_sent
from doppler_jax.methods.direct import FEW_STARTS, listed_starts
from doppler_jax.methods.request import (
    SAMPLES,
    Candidates,
    Method,
    Request,
    key_words,
)
from doppler_jax.native import wait_until_compiled
from doppler_jax.search.anytime import Search, run_search
from doppler_jax.search.drawing import RandomSearch
from doppler_jax.search.problem import can_overflow
from doppler_jax.types import Costs, Plans, Policy, TaskGraph

if TYPE_CHECKING:
    import chex

SEARCH_S = 10.0
"""Seconds that searches take if nothing bounds them."""

REFINE_S = 5.0
"""Seconds that `doppler+search` takes if nothing bounds it."""

SAMPLING_S, SAMPLING_TASK_S = 4.0, 1.5e-3
"""Seconds that a process takes to load JAX and a policy and to sample, and more for each task:
where fewer are left, it would but take a core from the search."""


def load_default_policy() -> Policy | None:
    """Returns the policy that ships; None without one."""
    from doppler_jax.policy_files import load_base_policy

    return load_base_policy()


def searched(search: Search) -> Method:
    """Returns a search as a method: from list schedules on, and never worse than they."""

    def method(request: Request) -> Candidates:
        starts = listed_starts(request, FEW_STARTS)
        if (optimum := request.optimum(starts)) is not None:
            return optimum
        return _search_from(request.within(SEARCH_S), search, starts, starts)

    return method


@dataclasses.dataclass(frozen=True)
class PolicySearch:
    """A search from list schedules and a policy's samples, never worse than the former.

    Without a policy it starts from list schedules alone. Where seconds are bounded, a process
    beside the search draws the samples, which join the search as they come in. The default
    policy is left out where the seconds do not suffice for that. Where only evaluations are
    bounded, all samples are drawn first.

    Small graphs are for the exact solver: in place of samples of the default policy it works
    beside the search (`beside.is_solvable`). It is not asked where evaluations alone are
    bounded, so that the key decides the result, nor where a policy is given.

    Attributes:
      search: what begins at the best of them.
      samples: drawn at most.
      default_policy: makes the policy if none is given; None: there is none.
      takes: whose policies it can use.
    """

    search: Search
    samples: int = 256
    default_policy: Callable[[], Policy | None] = dataclasses.field(
        default=load_default_policy, repr=False
    )
    takes: str = "doppler"

    def __call__(self, request: Request) -> Candidates:
        """Returns what the search finds, and the list schedules."""
        rivals = listed_starts(request, STARTS)
        if (optimum := request.optimum(rivals)) is not None:
            return optimum
        request = request.within(REFINE_S)
        if request.policy is None and is_solvable(request):
            with Beside(request) as solver:
                found = _search_from(
                    request, self.search, rivals, rivals, target_s=solver.target_s
                )
            return solver.join(found)
        bound = request.budget.evaluations
        count = self.samples if bound is None else max(min(self.samples, bound // 4), 1)
        source = request.policy or self.default_policy
        if request.budget.seconds is None or not can_be_sent(source):
            given = request.graph, request.costs, source, request.key, count
            starts = _joined([*(_plans(request, *drawn) for drawn in _draw(*given)), rivals])
            return _search_from(request, self.search, starts, rivals)
        sampling_s = SAMPLING_S + SAMPLING_TASK_S * request.graph.num_tasks
        if request.policy is None and request.seconds_left(REFINE_S) < sampling_s:
            return _search_from(request, self.search, rivals, rivals)
        given = (request.graph, request.costs, source, key_words(request.random), count)
        with Child(_send_samples, *given, keep_compiled=request.keep_compiled) as child:
            late_starts = _incoming(request, child)
            return _search_from(request, self.search, rivals, rivals, late_starts=late_starts)


def _joined(parts: Sequence[Plans]) -> Plans:
    return Plans(*map(np.concatenate, zip(*parts, strict=True)))


def _plans(request: Request, placements: np.ndarray, ranks: np.ndarray) -> Plans:
    """Returns plans of devices and orders; placements without orders get those of starts."""
    if request.orders and not len(ranks):
        ranks = request.problem_for("in_order").ordered(placements).ranks
    return Plans(placements, ranks if request.orders else ranks[:0])


def _incoming(request: Request, child: Child) -> Callable[[], Plans | None]:
    """Returns what looks for samples that have come in."""

    def look() -> Plans | None:
        try:
            drawn = child.receive()
        except (EOFError, RuntimeError):  # it has said why on standard error
            return None
        return None if drawn is None else _plans(request, *drawn)

    return look


def _send_samples(
    send: Callable[[Any], None],
    graph: TaskGraph,
    costs: Costs,
    source: Policy | Callable[[], Policy | None],
    key_data: np.ndarray,
    count: int,
) -> None:
    """Sends samples of a policy, placements and orders; what a child does."""
    import jax
    import jax.numpy as jnp

    key = jax.random.wrap_key_data(jnp.asarray(key_data))
    for drawn in _draw(graph, costs, source, key, count):
        send(tuple(drawn))


def _draw(
    graph: TaskGraph,
    costs: Costs,
    source: Policy | Callable[[], Policy | None],
    key: chex.PRNGKey,
    count: int,
) -> Iterator[Plans]:
    """Yields samples of a policy, with SEL's orders.

    If need be a quarter of them is also made to fit; these come without orders.
    """
    from doppler_jax.learners.doppler import draw_plans
    from doppler_jax.policies.features import make_policy_inputs

    policy = source() if callable(source) else source
    if policy is None:
        return
    is_limited = can_overflow(graph, costs)
    for plans in draw_plans(make_policy_inputs(graph, costs), policy, key, count):
        yield plans
        some = plans.placements[: -(-len(plans.placements) // 4)]
        if is_limited and len(fitted := fit_some(graph, costs, some)):
            yield Plans(fitted, plans.ranks[:0])


def random(request: Request) -> Candidates:
    """Returns the best of placements drawn uniformly among the devices that can run a task."""
    if not request.budget.is_bounded:
        budget = dataclasses.replace(request.budget, evaluations=SAMPLES)
        request = dataclasses.replace(request, budget=budget)
    drawn = random_placements(request.costs, np.random.default_rng(request.seed), 1)
    none = Plans(drawn[:0], drawn[:0])
    found = _search_from(request, RandomSearch(), _plans(request, drawn, drawn[:0]), none)
    if len(found.placements):
        return found
    return dataclasses.replace(found, placements=drawn, evaluations=1)


def _search_from(
    request: Request,
    search: Search,
    starts: Plans,
    always: Plans,
    *,
    late_starts: Callable[[], Plans | None] | None = None,
    target_s: Callable[[], float] | None = None,
) -> Candidates:
    """Searches from `starts`, and from random placements while members are left.

    The plans `always` are proposed whatever the search finds, so that its result is never
    worse.
    """
    budget = request.budget
    until_s = None if budget.seconds is None else budget.began + budget.seconds
    if not wait_until_compiled(until_s):
        plans = always if len(always.placements) else starts
        return Candidates(plans.placements, 1, priority=plans.ranks)
    missing = max(search.members - len(starts.placements), 0)
    drawn = random_placements(request.costs, np.random.default_rng(request.seed), missing)
    found = run_search(
        search,
        request.problem_for(search.queue),
        _joined([starts, _plans(request, drawn, drawn[:0])]),
        request.seed,
        request.budget,
        request.curve,
        late_starts=late_starts,
        target_s=target_s,
    )
    return Candidates(
        placements=np.concatenate([found.placements, always.placements]),
        priority=np.concatenate([request.orders_of(found), always.ranks]),
        evaluations=max(found.evaluations, 1),
        interrupted=found.interrupted,
    )
