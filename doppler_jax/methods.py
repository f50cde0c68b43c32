"""The registry of placement methods, all with one interface."""

import contextlib
import dataclasses
from collections.abc import Callable

import chex
import jax
import numpy as np

from doppler_jax.baselines.cpop import cpop
from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.baselines.etf import etf
from doppler_jax.baselines.exact import exact
from doppler_jax.baselines.heft import heft
from doppler_jax.baselines.m_etf import m_etf
from doppler_jax.baselines.m_sct import m_sct
from doppler_jax.baselines.peft import peft
from doppler_jax.baselines.simple import random_placements, round_robin, single
from doppler_jax.graphs.build import topological_order
from doppler_jax.learned import learn_placements, policy_candidates
from doppler_jax.policies.features import make_problem
from doppler_jax.search.annealing import Annealing
from doppler_jax.search.anytime import Search, run_search
from doppler_jax.search.budget import Budget, CurveRecorder
from doppler_jax.search.evolution import Evolution
from doppler_jax.search.local_search import LocalSearch
from doppler_jax.search.objective import Objective, SearchProblem
from doppler_jax.search.random_search import RandomSearch
from doppler_jax.training.checkpoint import Policy
from doppler_jax.training.train import LEAST_EVALUATIONS
from doppler_jax.types import Costs, TaskGraph

SAMPLES = 1000
"""Placements that `random` and `doppler` with a policy draw if nothing bounds them."""

SECONDS = {"doppler": 60.0, "exact": 60.0}
"""Seconds that a method takes if nothing bounds it and it does not end by itself."""

SEARCH_S = 10.0
"""The same for methods that are not listed."""

POLICY_STARTS = 256
"""Samples of a policy that `doppler+search` chooses its starting points from."""

REFINE = Annealing(hot=0.02)
"""The search of `doppler+search`: cooler at first, so that it stays near its starts."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What a method is asked for."""

    graph: TaskGraph
    costs: Costs
    objective: Objective
    problem: SearchProblem
    key: chex.PRNGKey
    policy: Policy | None
    budget: Budget
    curve: CurveRecorder  # takes what is found on the way

    def seconds_left(self, method: str) -> float:
        """Returns the seconds until the bound, or until the default if there is none."""
        bound = self.budget.seconds or SECONDS.get(method, SEARCH_S)
        return max(bound - self.budget.seconds_spent(), 1e-3)


@dataclasses.dataclass(frozen=True)
class Candidates:
    """What a method proposes; the float64 oracle chooses among it."""

    placements: np.ndarray  # [B, N] int
    evaluations: int  # executions simulated
    compile_s: float = 0.0  # of the search's own jits
    interrupted: bool = False
    priority: np.ndarray | None = None  # [N] ranks to try in place of `fifo`
    lower_bound_s: float = 0.0  # proven for this problem


Method = Callable[[Request], Candidates]


def list_methods() -> list[str]:
    """Returns the names that `place` knows."""
    return sorted(METHODS)


def takes_policy(method: str) -> bool:
    """Returns whether a method can use a trained policy."""
    return method in ("doppler", "doppler+search")


def listed_starts(graph: TaskGraph, costs: Costs, is_tight: bool) -> np.ndarray:
    """Returns the placements `[S, N]` of list schedulers that searches start from.

    Where memory `is_tight`, one that minds it comes first.
    """
    placements = [critical_path(graph, costs), heft(graph, costs)]
    if is_tight:
        # Where m-ETF gives up a search may still find a placement that fits.
        with contextlib.suppress(ValueError):
            placements.insert(0, m_etf(graph, costs))
    return np.stack(placements).astype(np.int64)


def _listed(rule: Callable[[TaskGraph, Costs], np.ndarray]) -> Method:
    def method(request: Request) -> Candidates:
        return Candidates(np.asarray(rule(request.graph, request.costs))[None], 1)

    return method


def _searching(search: Search) -> Method:
    def method(request: Request) -> Candidates:
        listed = listed_starts(request.graph, request.costs, request.problem.memory is not None)
        return _search_from(request, search, listed, listed)

    return method


def _search_from(
    request: Request,
    search: Search,
    starts: np.ndarray,
    always: np.ndarray,
    *,
    choose: bool = False,
    spent: int = 0,
) -> Candidates:
    """Searches from `starts` `[S, N]`, and from random placements while members are left.

    The candidates `always` `[A, N]` are proposed whatever the search finds, so that its result
    is never worse.
    """
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
        spent=spent,
    )
    return Candidates(
        placements=np.concatenate([always, found.placements]),
        evaluations=max(found.evaluations, 1),
        compile_s=found.compile_s,
        interrupted=found.interrupted,
    )


def _bounded(budget: Budget) -> Budget:
    if budget.evaluations is None and budget.seconds is None:
        return dataclasses.replace(budget, seconds=SEARCH_S)
    return budget


def _random(request: Request) -> Candidates:
    budget = request.budget
    if budget.evaluations is None and budget.seconds is None:
        budget = dataclasses.replace(budget, evaluations=SAMPLES)
    request = dataclasses.replace(request, budget=budget)
    nothing = np.zeros((0, request.graph.num_tasks), np.int64)
    return _search_from(request, RandomSearch(), nothing, nothing)


def _doppler(request: Request) -> Candidates:
    if request.policy is not None:
        count = (request.budget.evaluations or SAMPLES) // request.objective.simulations
        problem = make_problem(request.graph, request.costs)
        drawn = policy_candidates(problem, request.policy, request.key, max(count, 1))
        return Candidates(drawn, max(count, 1) * request.objective.simulations)
    # The teacher's placement competes: the result is never worse than what was imitated.
    taught = critical_path(request.graph, request.costs)[None]
    evaluations = request.budget.evaluations
    if evaluations is not None and evaluations < len(taught) + LEAST_EVALUATIONS:
        return Candidates(taught, 1)
    return _learn(request, taught, share=1.0)[0]


def _learn(request: Request, taught: np.ndarray, share: float) -> tuple[Candidates, Policy]:
    """Trains on a share of the budget; returns `taught` with what was found, and the policy."""
    evaluations, seconds = request.budget.evaluations, None
    if request.budget.seconds is not None or evaluations is None:
        seconds = share * request.seconds_left("doppler")
    if evaluations is not None:
        evaluations = int(share * evaluations) - len(taught)
    learned = learn_placements(
        make_problem(request.graph, request.costs),
        request.graph.num_tasks,
        request.key,
        budget_s=seconds,
        max_evaluations=evaluations,
        links=request.objective.guide_links,
    )
    candidates = Candidates(
        placements=np.concatenate([taught, learned.placements]),
        evaluations=learned.evaluations + len(taught),
        interrupted=learned.interrupted,
    )
    return candidates, learned.policy


def _doppler_search(request: Request) -> Candidates:
    learn_key, draw_key, search_key = jax.random.split(request.key, 3)
    listed = listed_starts(request.graph, request.costs, request.problem.memory is not None)
    policy, starts, spent = request.policy, listed, 0
    evaluations = request.budget.evaluations
    if policy is None and (evaluations is None or evaluations >= 4 * POLICY_STARTS):
        budget = _bounded(request.budget)
        asked = dataclasses.replace(request, budget=budget, key=learn_key)
        learned, policy = _learn(asked, listed[:1], share=0.5)
        starts, spent = np.concatenate([learned.placements, listed]), learned.evaluations
        if learned.interrupted:
            return dataclasses.replace(learned, placements=starts)
    if policy is not None:
        count = POLICY_STARTS if evaluations is None else min(POLICY_STARTS, evaluations // 4)
        problem = make_problem(request.graph, request.costs)
        drawn = policy_candidates(problem, policy, draw_key, max(count, 1))
        starts = np.concatenate([drawn, starts])
    found = _search_from(
        dataclasses.replace(request, key=search_key),
        REFINE,
        starts,
        np.concatenate([starts[:1], listed]),
        choose=True,
        spent=spent,
    )
    return dataclasses.replace(found, evaluations=found.evaluations + spent)


def _list_search(request: Request) -> Candidates:
    listed = listed_starts(request.graph, request.costs, request.problem.memory is not None)
    return _search_from(request, REFINE, listed, listed)


def _exact(request: Request) -> Candidates:
    if request.objective != Objective():
        raise ValueError("method 'exact' knows links 'parallel' without noise only")
    graph, costs = request.graph, request.costs
    if request.problem.memory is None:  # limits that nothing reaches are none
        costs = dataclasses.replace(costs, capacity_bytes=np.full(costs.num_devices, np.inf))
    result = exact(graph, costs, budget_s=request.seconds_left("exact"))
    order = topological_order(graph)
    rank = np.empty(graph.num_tasks, np.int64)
    rank[order[np.argsort(result.start_s[order], kind="stable")]] = np.arange(len(rank))
    return Candidates(result.placement[None], 1, priority=rank, lower_bound_s=result.bound_s)


METHODS: dict[str, Method] = {
    "annealing": _searching(Annealing()),
    "cpop": _listed(cpop),
    "critical_path": _listed(critical_path),
    "doppler": _doppler,
    "doppler+search": _doppler_search,
    "etf": _listed(etf),
    "evolution": _searching(Evolution()),
    "exact": _exact,
    "heft": _listed(heft),
    "list+search": _list_search,
    "local_search": _searching(LocalSearch()),
    "m_etf": _listed(m_etf),
    "m_sct": _listed(m_sct),
    "peft": _listed(peft),
    "random": _random,
    "round_robin": _listed(round_robin),
    "single": _listed(single),
}
