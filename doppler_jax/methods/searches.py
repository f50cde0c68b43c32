"""Methods that search: from list schedules, from a policy's samples, at random."""

import dataclasses
from collections.abc import Callable

import chex
import jax
import numpy as np

from doppler_jax.baselines.exact import STARTS
from doppler_jax.baselines.fitting import fit_some
from doppler_jax.baselines.simple import random_placements
from doppler_jax.learners.doppler import policy_candidates
from doppler_jax.methods.lists import FEW_STARTS, listed_starts
from doppler_jax.methods.request import SAMPLES, Candidates, Method, Request
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policy_files import load_base_policy
from doppler_jax.search.anytime import Exact, Search, run_search
from doppler_jax.search.memetic import Memetic
from doppler_jax.search.objective import make_search_problem
from doppler_jax.search.random_search import RandomSearch
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.training.checkpoint import Policy

SEARCH_S = 10.0
"""Seconds that searches take if nothing bounds them."""

DRAWING_SHARE = 0.25
"""Share of the remaining seconds that sampling may take; the batch being drawn is finished."""

REFINE_S = 5.0
"""Seconds that `doppler+search` searches from a policy's samples if nothing bounds it."""

REFINE = Memetic()
"""The search of `doppler+search`."""


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
    """A search from a policy's samples and list schedules, never worse than the latter.

    Without a policy it starts from list schedules alone.

    Attributes:
      search: what begins at the best of them.
      samples: drawn at most.
      default_policy: makes the policy if none is given; None: there is none.
      takes: whose policies it can use.
    """

    search: Search
    samples: int = 256
    default_policy: Callable[[], Policy | None] = dataclasses.field(
        default=load_base_policy, repr=False
    )
    takes: str = "doppler"

    def __call__(self, request: Request) -> Candidates:
        """Returns what the search finds, the list schedules and the likeliest sample."""
        draw_key, search_key = jax.random.split(request.key)
        rivals = listed_starts(request, STARTS)
        if (optimum := request.optimum(rivals)) is not None:
            return optimum
        starts = rivals
        if request.policy is not None:
            drawn = _draw(request, request.policy, draw_key, self.samples)
            starts = np.concatenate([drawn, rivals])
            if request.problem.memory is not None:
                some = drawn[: max(len(drawn) // 4, 1)]
                starts = np.concatenate([starts, fit_some(request.graph, request.costs, some)])
        return _search_from(
            dataclasses.replace(request.within(REFINE_S), key=search_key),
            self.search,
            starts,
            np.concatenate([starts[:1], rivals]),
            choose=True,
        )


def random(request: Request) -> Candidates:
    """Returns the best of placements drawn uniformly among the devices that can run a task."""
    if not request.budget.is_bounded:
        budget = dataclasses.replace(request.budget, evaluations=SAMPLES)
        request = dataclasses.replace(request, budget=budget)
    nothing = np.zeros((0, request.graph.num_tasks), np.int64)
    found = _search_from(request, RandomSearch(), nothing, nothing)
    if len(found.placements):
        return found
    # The seconds ended before the first chunk did.
    drawn = random_placements(request.costs, np.random.default_rng(0), 1)
    return dataclasses.replace(found, placements=drawn, evaluations=1)


def _draw(request: Request, policy: Policy, key: chex.PRNGKey, count: int) -> np.ndarray:
    """Returns samples of a policy, `count` of them or a share of the budget."""
    budget = request.budget
    if budget.evaluations is not None:
        count = max(min(count, budget.evaluations // 4), 1)
    is_late = None
    if budget.seconds is not None or not budget.is_bounded:
        # Where nothing is bounded, they take as long as the search after them at most.
        spent, share_s = budget.seconds_spent(), REFINE_S
        if budget.seconds is not None:
            share_s = DRAWING_SHARE * max(budget.seconds - spent, 0.0)
        is_late = lambda: budget.seconds_spent() > spent + share_s  # noqa: E731
    problem = make_policy_inputs(request.graph, request.costs)
    return policy_candidates(problem, policy, key, count, is_late)


def _search_from(
    request: Request,
    search: Search,
    starts: np.ndarray,
    always: np.ndarray,
    *,
    choose: bool = False,
) -> Candidates:
    """Searches from `starts` `[S, N]`, and from random placements while members are left.

    The candidates `always` `[A, N]` are proposed whatever the search finds, so that its result
    is never worse.
    """
    start_key, key = jax.random.split(request.key)
    seed = jax.random.bits(start_key, (2,)).tolist()
    missing = max(search.members - len(starts), 0)
    drawn = random_placements(request.costs, np.random.default_rng(seed), missing)
    found = run_search(
        search,
        request.objective,
        request.problem,
        np.concatenate([starts, drawn]),
        key,
        request.budget,
        request.curve,
        choose=choose,
        exact=_exact_problem(request) if len(always) else None,
    )
    return Candidates(
        placements=np.concatenate([always, found.placements]),
        evaluations=max(found.evaluations, 1),
        compile_s=found.compile_s,
        interrupted=found.interrupted,
    )


def _exact_problem(request: Request) -> Exact | None:
    """Returns the problem as the oracle sees it; None under noise, where rounding averages."""
    graph, costs, objective = request.graph, request.costs, request.objective
    if objective.num_noise:
        return None
    return Exact(
        makespan_s=lambda placement: makespan_s(
            simulate_oracle(graph, costs, placement, links=objective.guide_links)
        ),
        problem=lambda: make_search_problem(graph, costs, objective, request.key, np.float64),
    )
