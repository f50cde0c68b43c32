"""Methods of a user's own: what they return, whatever its form, as candidates."""

from collections.abc import Callable
from typing import Any

import numpy as np

from doppler_jax.methods.request import BudgetSpent, Candidates, Method, Request
from doppler_jax.simulator.durations import check_placements
from doppler_jax.types import Plans

Proposer = Callable[[Request], Candidates]


def proposer(method: Method, name: str) -> Proposer:
    """Returns a method as one that returns candidates, and ends where its budget does."""

    def propose(request: Request) -> Candidates:
        interrupted, found = False, None
        try:
            found = method(request)
        except BudgetSpent:
            pass
        except KeyboardInterrupt:
            if not request.scored.best:
                raise
            interrupted = True
        if isinstance(found, Candidates):
            return found
        plans = [*request.scored.best, *([] if found is None else _plans(request, found, name))]
        if not plans:
            raise ValueError(
                f"method {name!r} returned nothing and scored nothing within its budget; "
                "expected a plan, or placements"
            )
        loose = [plan.placements for plan in plans if not len(plan.ranks)]
        ranked = [plan for plan in plans if len(plan.ranks)]
        return Candidates(
            np.concatenate([*loose, *(plan.placements for plan in ranked)]),
            max(request.scored.evaluations, 1),
            interrupted,
            np.concatenate([plan.ranks for plan in ranked]) if ranked else None,
        )

    return propose


def _plans(request: Request, found: Any, name: str) -> list[Plans]:
    """Returns a `Plan` or `Placed`, or placements `[N]` or `[B, N]`, as plans."""
    graph, costs = request.graph, request.costs
    try:
        placements = check_placements(graph, costs, getattr(found, "placement", found))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"method {name!r} returned {type(found).__name__}, which is no plan: {error}"
        ) from error
    seconds = costs.compute_s[np.arange(graph.num_tasks), placements]
    for b, v in np.argwhere(np.isinf(seconds))[:1]:
        raise ValueError(
            f"method {name!r} puts task {v} on device {placements[b, v]}, which cannot run it"
        )
    ranks = getattr(found, "priority", None)
    if ranks is None or not request.orders or found.queue == "fifo":
        return [Plans(placements, np.empty((0, graph.num_tasks)))]
    ranks = np.asarray(ranks, np.float64)[None]
    if found.queue != request.queue == "in_order":  # its order need not be topological
        ranks = request.start_orders(placements, ranks)
    return [Plans(placements, ranks)]
