"""The registry of placement methods, all with one interface."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from doppler_jax.baselines.cpop import cpop
from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.baselines.enumerative import enumerative
from doppler_jax.baselines.etf import etf
from doppler_jax.baselines.exact import exact
from doppler_jax.baselines.fitting import fit_some
from doppler_jax.baselines.heft import heft
from doppler_jax.baselines.m_etf import m_etf
from doppler_jax.baselines.m_sct import m_sct
from doppler_jax.baselines.peft import peft
from doppler_jax.baselines.simple import random_placements, round_robin, single
from doppler_jax.budget import Budget
from doppler_jax.costs.handling import as_transfers
from doppler_jax.graphs.build import topological_order
from doppler_jax.learned import LEARNERS, Learned, doppler
from doppler_jax.learners.doppler import policy_candidates
from doppler_jax.learners.placeto import Placeto
from doppler_jax.learners.stepwise import PerStep
from doppler_jax.objective import Objective
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policy_files import load_base_policy
from doppler_jax.request import SAMPLES, Candidates, Method, Request
from doppler_jax.search.annealing import Annealing
from doppler_jax.search.anytime import Exact, Search, run_search
from doppler_jax.search.evolution import Evolution
from doppler_jax.search.local_search import LocalSearch
from doppler_jax.search.memetic import Memetic
from doppler_jax.search.objective import make_search_problem
from doppler_jax.search.random_search import RandomSearch
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.training.checkpoint import Policy
from doppler_jax.types import Costs, TaskGraph

ListRule = Callable[[TaskGraph, Costs], np.ndarray]
"""A list scheduler: returns a placement `[N]`."""

EXACT_S = 60.0
"""Seconds that `exact` takes if nothing bounds it."""

SEARCH_S = 10.0
"""Seconds that searches take if nothing bounds them."""

LISTED_STARTS = (critical_path, heft)
"""List schedulers whose placements searches start from, beside random ones."""

POLICY_STARTS = 256
"""Samples of a policy that `doppler+search` chooses its starting points from."""

DRAWING_SHARE = 0.25
"""Of the seconds that are left when the first is drawn; after it only a block is finished."""

RIVAL_STARTS = (*LISTED_STARTS, cpop, peft, etf)
"""Those that compete with the samples: where a policy is far from home they are better."""

REFINE_S = 5.0
"""Seconds that `doppler+search` searches from a policy's samples if nothing bounds it."""

REFINE = Memetic()
"""The search of `doppler+search`, which as `memetic` begins at list schedules."""


def list_methods() -> list[str]:
    """Returns the names that `place` knows."""
    return sorted(METHODS)


def policy_of(method: str) -> str | None:
    """Returns which method's policies a method can use, None if it takes none."""
    found = METHODS[method]
    if found is _doppler_search:
        return "doppler"
    return found.name if isinstance(found, Learned) else None


def default_policy(method: str) -> Policy | None:
    """Returns the policy that a method uses if none is given, None if it does without."""
    return load_base_policy() if method == "doppler+search" else None


def listed_starts(
    graph: TaskGraph, costs: Costs, rules: Sequence[ListRule], is_tight: bool
) -> np.ndarray:
    """Returns the placements `[S, N]` of list schedulers for a search to start from.

    Where memory `is_tight`, those come first that mind it or are made to fit.
    """
    costs = as_transfers(costs)
    placements = np.stack([rule(graph, costs) for rule in rules]).astype(np.int64)
    if is_tight:
        placements = np.concatenate([fit_some(graph, costs, placements), placements])
        # Where m-ETF gives up a search may still find a placement that fits.
        with contextlib.suppress(ValueError):
            placements = np.concatenate([m_etf(graph, costs)[None], placements])
    return placements


def _listed(rule: ListRule) -> Method:
    def method(request: Request) -> Candidates:
        return Candidates(np.asarray(rule(request.graph, as_transfers(request.costs)))[None], 1)

    return method


def _searching(search: Search) -> Method:
    def method(request: Request) -> Candidates:
        is_tight = request.problem.memory is not None
        listed = listed_starts(request.graph, request.costs, LISTED_STARTS, is_tight)
        return _search_from(request, search, listed, listed, exact=_exact_problem(request))

    return method


def _search_from(
    request: Request,
    search: Search,
    starts: np.ndarray,
    always: np.ndarray,
    *,
    choose: bool = False,
    exact: Exact | None = None,
) -> Candidates:
    """Searches from `starts` `[S, N]`, and from random placements while members are left.

    The candidates `always` `[A, N]` are proposed whatever the search finds, so that its result
    is never worse.
    """
    if (optimum := request.optimum(always)) is not None:
        return optimum
    start_key, key = jax.random.split(request.key)
    seed = jax.random.bits(start_key, (2,)).tolist()
    missing = max(search.members - len(starts), 0)
    random = random_placements(request.costs, np.random.default_rng(seed), missing)
    found = run_search(
        search,
        request.objective,
        request.problem,
        np.concatenate([starts, random]),
        key,
        _bounded(request.budget),
        request.curve,
        choose=choose,
        exact=exact,
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


def _bounded(budget: Budget) -> Budget:
    return budget if budget.is_bounded else dataclasses.replace(budget, seconds=SEARCH_S)


def _random(request: Request) -> Candidates:
    budget = request.budget
    if not budget.is_bounded:
        budget = dataclasses.replace(budget, evaluations=SAMPLES)
    request = dataclasses.replace(request, budget=budget)
    nothing = np.zeros((0, request.graph.num_tasks), np.int64)
    found = _search_from(request, RandomSearch(), nothing, nothing)
    if len(found.placements):
        return found
    # The seconds ended before the first block did.
    drawn = random_placements(request.costs, np.random.default_rng(0), 1)
    return dataclasses.replace(found, placements=drawn, evaluations=1)


def _doppler_search(request: Request) -> Candidates:
    draw_key, search_key = jax.random.split(request.key)
    is_tight = request.problem.memory is not None
    listed = listed_starts(request.graph, request.costs, RIVAL_STARTS, is_tight)
    if (optimum := request.optimum(listed)) is not None:
        return optimum
    evaluations = request.budget.evaluations
    starts = listed
    if request.policy is not None:
        count = POLICY_STARTS if evaluations is None else min(POLICY_STARTS, evaluations // 4)
        problem = make_policy_inputs(request.graph, request.costs)
        is_late = _drawing_ends(request.budget)
        drawn = policy_candidates(problem, request.policy, draw_key, max(count, 1), is_late)
        starts = np.concatenate([drawn, starts])
        if is_tight:
            some = drawn[: max(len(drawn) // 4, 1)]
            starts = np.concatenate([starts, fit_some(request.graph, request.costs, some)])
    return _search_from(
        dataclasses.replace(request, key=search_key, budget=_bounded_refinement(request)),
        REFINE,
        starts,
        np.concatenate([starts[:1], listed]),
        choose=True,
        exact=_exact_problem(request),
    )


def _drawing_ends(budget: Budget) -> Callable[[], bool] | None:
    """Returns what says that no more samples shall be drawn; None where seconds do not count.

    Where nothing is bounded, they take as long as the search after them at most.
    """
    if budget.is_bounded and budget.seconds is None:
        return None
    spent = budget.seconds_spent()
    share_s = REFINE_S
    if budget.seconds is not None:
        share_s = DRAWING_SHARE * max(budget.seconds - spent, 0.0)
    return lambda: budget.seconds_spent() > spent + share_s


def _bounded_refinement(request: Request) -> Budget:
    """Returns the budget, of `REFINE_S` from now if nothing bounds it."""
    if request.budget.is_bounded:
        return request.budget
    seconds = request.budget.seconds_spent() + REFINE_S
    return dataclasses.replace(request.budget, seconds=seconds)


def _exact(request: Request) -> Candidates:
    if request.objective != Objective():
        raise ValueError("method 'exact' knows links 'parallel' without noise only")
    graph, costs = request.graph, request.costs
    if request.problem.memory is None:  # limits that nothing reaches are none
        costs = dataclasses.replace(costs, capacity_bytes=np.full(costs.num_devices, np.inf))
    # Its schedule may idle on purpose, which no queue does: executed, it may be longer than
    # what a list scheduler finds.
    listed = listed_starts(graph, costs, RIVAL_STARTS, request.problem.memory is not None)
    if (optimum := request.optimum(listed)) is not None:
        return optimum
    result = exact(graph, costs, budget_s=request.seconds_left(EXACT_S))
    order = topological_order(graph)
    rank = np.empty(graph.num_tasks, np.int64)
    rank[order[np.argsort(result.start_s[order], kind="stable")]] = np.arange(len(rank))
    placements = np.concatenate([result.placement[None], listed])
    return Candidates(placements, 1, priority=rank, lower_bound_s=result.bound_s)


METHODS: dict[str, Method] = {
    "annealing": _searching(Annealing()),
    "cpop": _listed(cpop),
    "critical_path": _listed(critical_path),
    "doppler+search": _doppler_search,
    "doppler_plc": doppler(PolicyConfig(select="b_level")),
    "doppler_sel": doppler(PolicyConfig(place="earliest")),
    "enumerative": _listed(enumerative),
    "etf": _listed(etf),
    "evolution": _searching(Evolution()),
    "exact": _exact,
    "heft": _listed(heft),
    "local_search": _searching(LocalSearch()),
    "m_etf": _listed(m_etf),
    "m_sct": _listed(m_sct),
    "memetic": _searching(REFINE),
    "peft": _listed(peft),
    "random": _random,
    "round_robin": _listed(round_robin),
    "single": _listed(single),
    **{name: Learned(learner) for name, learner in LEARNERS.items()},
    "doppler_per_step": Learned(PerStep()),
    "placeto_once": Learned(Placeto(once=True)),
}
