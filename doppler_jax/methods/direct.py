"""Methods that need no search of ours: list schedulers, and the exact solver."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from doppler_jax.baselines.etf import m_etf
from doppler_jax.baselines.exact import STARTS, ExactResult, NoneFitsError, Watch, exact
from doppler_jax.baselines.fitting import fit_some
from doppler_jax.costs.handling import as_transfers
from doppler_jax.graphs.build import topological_order
from doppler_jax.methods.mending import mended
from doppler_jax.methods.request import Candidates, Method, Request
from doppler_jax.objective import Objective
from doppler_jax.simulator.finalists import start_order
from doppler_jax.types import Costs, Schedule, TaskGraph

ListRule = Callable[[TaskGraph, Costs], np.ndarray]
"""A list scheduler: returns a placement `[N]`."""

EXACT_S = 60.0
"""Seconds that `exact` takes if nothing bounds it."""

FEW_STARTS = STARTS[:2]
"""List schedulers whose placements searches start from, beside random ones.

All of `STARTS` compete with a policy's samples: where it is far from home they are better.
"""


def listed(
    rule: Callable[[TaskGraph, Costs], np.ndarray | Schedule], *, mends: bool = True
) -> Method:
    """Returns a list scheduler, of placements `[N]` or of schedules, as a method.

    Where a plan's order counts, that of a schedule is kept. A plan that exceeds a memory is
    mended (`mending.py`), unless the method is not to.
    """

    def method(request: Request) -> Candidates:
        plan = _plan_by(rule, request)
        order = None
        if isinstance(plan, Schedule) and request.queue == "in_order":
            order = start_order(plan, np.argsort(topological_order(request.graph)))
        placement = plan.placement if isinstance(plan, Schedule) else np.asarray(plan)
        if mends and request.problem.is_limited:
            judged = request.judge(placement, *(() if order is None else (order, "in_order")))
            if judged.overflow:
                return mended(request, placement, judged.schedule)
        priority = None if order is None else order[None]
        return Candidates(placement[None], 1, priority=priority, waits=True)

    return method


def _plan_by(
    rule: Callable[[TaskGraph, Costs], np.ndarray | Schedule], request: Request
) -> np.ndarray | Schedule:
    """Returns a list scheduler's plan; if it finds no room for a task, that without limits."""
    costs = as_transfers(request.costs)
    try:
        return rule(request.graph, costs)
    except ValueError:
        if not request.problem.is_limited:
            raise
    unlimited = np.full(costs.num_devices, np.inf)
    return rule(request.graph, dataclasses.replace(costs, capacity_bytes=unlimited))


def listed_starts(request: Request, rules: Sequence[ListRule]) -> np.ndarray:
    """Returns the placements `[S, N]` of list schedulers for a search to start from.

    Where memory may not suffice, those come first that mind it or are made to fit.
    """
    graph, costs = request.graph, as_transfers(request.costs)
    placements = np.stack([rule(graph, costs) for rule in rules]).astype(np.int64)
    if request.problem.is_limited:
        placements = np.concatenate([fit_some(graph, costs, placements), placements])
        # Where m-ETF gives up a search may still find a placement that fits.
        with contextlib.suppress(ValueError):
            placements = np.concatenate([m_etf(graph, costs)[None], placements])
    return placements


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
    # Its schedule may idle on purpose, which no queue does: executed, it may be longer than
    # what a list scheduler finds.
    listed = listed_starts(request, STARTS)
    if (optimum := request.optimum(listed)) is not None:
        return optimum
    try:
        result = solved(request)
    except NoneFitsError:
        return Candidates(listed, 1)
    return Candidates(
        placements=np.concatenate([listed, result.placement[None]]),
        evaluations=1,
        priority=solver_ranks(request, result)[None],
        waits=True,
        lower_bound_s=result.bound_s,
    )
