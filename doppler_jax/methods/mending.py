"""Plans that fit into memory in place of one that does not: a bounded search for one."""

import numpy as np

from doppler_jax.baselines.fitting import fit_into_memory
from doppler_jax.baselines.memory_plans import plans_within_memory
from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.costs.handling import as_transfers
from doppler_jax.graphs.build import topological_order
from doppler_jax.methods.request import Candidates, Request
from doppler_jax.search.anytime import run_search
from doppler_jax.search.lns import LNS
from doppler_jax.simulator.finalists import start_order
from doppler_jax.types import Plans, Schedule

MOST_STEPS, MOST_TASKS = 20_000, 10_000_000
"""Plans that the search may simulate, and tasks of all of them: a few seconds."""


def mended(request: Request, placement: np.ndarray, executed: Schedule) -> Candidates:
    """Returns plans that fit into memory, if any are found, in place of one that does not.

    First come list schedules that mind memory; if none of them fits, ruin and recreate from
    them on, until the first plan that does.

    Args:
      request: what is asked for.
      placement: `[N]` of the plan.
      executed: its execution.
    """
    graph, costs = request.graph, as_transfers(request.costs)
    rank = start_order(executed, np.argsort(topological_order(graph)))
    plans = plans_within_memory(graph, costs, placement[None], rank)
    placements = np.stack([*(plan.placement for plan in plans), placement])
    ranks = np.stack([*(plan.priority for plan in plans), rank])
    if not request.orders:
        placements = np.stack([*placements, fit_into_memory(graph, costs, placement)])
        ranks = np.empty((0, graph.num_tasks))
    tried = Plans(placements, ranks)
    if all(request.judge_plan(tried, k).overflow for k in range(len(placements))):
        return _searched(request, tried)
    return Candidates(placements, 1, priority=ranks)


def _searched(request: Request, tried: Plans) -> Candidates:
    """Returns what a search finds from plans on that do not fit, and those."""
    steps = min(MOST_STEPS, MOST_TASKS // request.graph.num_tasks)
    steps = min(steps, request.budget.evaluations or steps)
    budget = Budget(evaluations=steps, target_s=np.finfo(float).max)
    problem = request.problem_for(LNS.queue)
    found = run_search(LNS(), problem, tried, 0, budget, CurveRecorder())
    if not len(found.placements):
        return Candidates(tried.placements, 1, priority=tried.ranks)
    return Candidates(
        found.placements,
        max(found.evaluations, 1),
        interrupted=found.interrupted,
        priority=request.orders_of(found),
    )
