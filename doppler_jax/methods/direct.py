"""Methods that need no search of ours: list schedulers, and the exact solver."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from doppler_jax.baselines.etf import m_etf_schedule
from doppler_jax.baselines.exact import STARTS, ExactResult, NoneFitsError, Watch, exact
from doppler_jax.baselines.fitting import fit_some
from doppler_jax.baselines.memory_plans import plans_within_memory
from doppler_jax.costs.handling import as_transfers
from doppler_jax.graphs.build import topological_order
from doppler_jax.graphs.levels import b_level
from doppler_jax.methods.mending import mended
from doppler_jax.methods.request import Candidates, Method, Request
from doppler_jax.objective import Objective
from doppler_jax.simulator.finalists import start_order
from doppler_jax.types import Costs, Plans, Schedule, TaskGraph

ListRule = Callable[[TaskGraph, Costs], np.ndarray | Schedule]
"""A list scheduler: returns a schedule, or a placement `[N]` alone."""

EXACT_S = 60.0
"""Seconds that `exact` takes if nothing bounds it."""

FEW_STARTS = STARTS[:2]
"""List schedulers whose placements searches start from, beside random ones.

All of `STARTS` compete with a policy's samples: where it is far from home they are better.
"""


def listed(rule: ListRule, *, mends: bool = True) -> Method:
    """Returns a list scheduler as a method; where orders count, a schedule's is kept.

    A plan that exceeds a memory is mended (`mending.py`), unless the method is not to.
    """

    def method(request: Request) -> Candidates:
        plan = _plan(request, _planned(rule, request))
        if mends and request.problem.is_limited:
            judged = request.judge_plan(plan)
            if judged.overflow:
                return mended(request, plan.placements[0], judged.schedule)
        return Candidates(plan.placements, 1, priority=plan.ranks)

    return method


def _planned(rule: ListRule, request: Request) -> np.ndarray | Schedule:
    """Returns a list scheduler's plan; if it finds no room for a task, that without limits."""
    costs = as_transfers(request.costs)
    try:
        return rule(request.graph, costs)
    except ValueError:
        if not request.problem.is_limited:
            raise
    unlimited = np.full(costs.num_devices, np.inf)
    return rule(request.graph, dataclasses.replace(costs, capacity_bytes=unlimited))


def listed_starts(request: Request, rules: Sequence[ListRule]) -> Plans:
    """Returns the plans of list schedulers for a search to start from.

    Where memory may not suffice, those come first that mind it or are made to fit.
    """
    graph, costs = request.graph, as_transfers(request.costs)
    plans = [_plan(request, rule(graph, costs)) for rule in rules]
    if request.problem.is_limited:
        placements = np.concatenate([plan.placements for plan in plans])
        fitted = fit_some(graph, costs, placements)
        plans = [*(_plan(request, placement) for placement in fitted), *plans]
        rank = np.argsort(topological_order(graph, -b_level(graph, costs)))
        for made in plans_within_memory(graph, costs, placements, rank):
            ranks = made.priority[None][: 1 if request.orders else 0]
            plans.insert(0, Plans(made.placement[None], ranks))
        # Where m-ETF gives up a search may still find a placement that fits.
        with contextlib.suppress(ValueError):
            plans = [_plan(request, m_etf_schedule(graph, costs)), *plans]
    return Plans(*map(np.concatenate, zip(*plans, strict=True)))


def _plan(request: Request, planned: np.ndarray | Schedule) -> Plans:
    """Returns one plan; a placement without an order gets that of its starts."""
    rank, placement = None, planned
    if isinstance(planned, Schedule):
        rank = start_order(planned, np.argsort(topological_order(request.graph)))
        placement = planned.placement
    placement = np.asarray(placement, np.int64)
    if not request.orders:
        return Plans(placement[None], np.zeros((0, len(placement)), np.int64))
    ranks = request.start_orders(placement[None]) if rank is None else rank[None]
    return Plans(placement[None], ranks)


def solved(request: Request, watch: Watch | None = None) -> ExactResult:
    """Returns what the exact solver finds until the bound; it tells `watch` that it begins."""
    costs = request.costs
    if not request.problem.is_limited:  # limits that nothing reaches do not matter
        costs = dataclasses.replace(costs, capacity_bytes=np.full(costs.num_devices, np.inf))
    return exact(request.graph, costs, budget_s=request.seconds_left(EXACT_S), watch=watch)


def solver_ranks(request: Request, result: ExactResult) -> np.ndarray:
    """Returns ranks `[N]` by which `in_order` execution is the solver's schedule."""
    order = topological_order(request.graph)
    return np.argsort(order[np.argsort(result.start_s[order], kind="stable")])


def by_solver(request: Request) -> Candidates:
    """Returns the placement of a proven schedule, and those of list schedulers beside it."""
    if request.objective != Objective():
        raise ValueError("method 'exact' knows links 'parallel' without noise only")
    # Under `fifo` and `priority` its schedule, which may idle on purpose, may become longer
    # than what a list scheduler finds.
    listed = listed_starts(request, STARTS)
    if (optimum := request.optimum(listed)) is not None:
        return optimum
    try:
        result = solved(request)
    except NoneFitsError as error:
        bound_s = error.bound_s
        return Candidates(listed.placements, 1, priority=listed.ranks, lower_bound_s=bound_s)
    rank = solver_ranks(request, result)
    return Candidates(
        placements=np.concatenate([listed.placements, result.placement[None]]),
        evaluations=1,
        priority=np.concatenate([listed.ranks, rank[None]]),
        lower_bound_s=result.bound_s,
    )
