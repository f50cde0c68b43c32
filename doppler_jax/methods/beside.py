"""The exact solver in a thread beside a search: small graphs are solved, or bounded better.

OR-Tools lets other threads run while it works. The search ends once the solver has a proof, or
what was found is as short as the solver's bound; the solver ends with the search.
"""

import contextlib
import dataclasses
import importlib.util
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np

from doppler_jax.baselines.exact import ExactResult, device_classes
from doppler_jax.graphs.bounds import durations_s
from doppler_jax.methods.direct import solved, solver_ranks
from doppler_jax.methods.request import Candidates, Request
from doppler_jax.objective import Objective
from doppler_jax.placed import PROVEN

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MOST_TASKS = 30
"""Of graphs that the solver is asked about: larger ones it seldom solves within seconds."""

MOST_POOLED = 100
"""The same where devices are equal and nothing takes time to move."""

IMPORT_S = 1.0
"""Seconds that OR-Tools may take to load: with fewer left it is not loaded."""

LOOK_S = 0.01
"""Seconds between two looks whether the solver has stopped."""


def is_solvable(request: Request) -> bool:
    """Returns whether the solver's schedule is what is asked for, and may be found in time."""
    graph, costs = request.graph, request.costs
    if (
        request.budget.seconds is None  # the result is to be the key's alone
        or request.queue != "in_order"
        or request.objective != Objective()
        or costs.handling_s is not None
        or (graph.input_maker >= 0).any()
        or not 0 < graph.num_tasks <= MOST_POOLED
    ):
        return False
    if graph.num_tasks > MOST_TASKS:
        is_pool = len(device_classes(graph, costs)) == 1
        if not is_pool or durations_s(graph, costs).delay.any():
            return False
    if "ortools.sat.python.cp_model" in sys.modules:
        return True
    is_there = importlib.util.find_spec("ortools") is not None
    return is_there and request.seconds_left(0.0) > IMPORT_S


class Beside(contextlib.AbstractContextManager["Beside"]):
    """A solver that runs while the context is entered.

    Args:
      request: what is asked for, bounded in seconds.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._result: ExactResult | None = None
        self._bound_s = request.lower_bound_s
        self._solver: cp_model.CpSolver | None = None
        self._thread = threading.Thread(target=self._solve, name="exact")

    def __enter__(self) -> "Beside":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        while self._thread.is_alive():  # it may not have begun, so it is told again
            if self._solver is not None:
                self._solver.stop_search()
            self._thread.join(LOOK_S)

    def target_s(self) -> float:
        """Returns seconds at which a search may stop: inf once the solver needs no better."""
        result, enough_s = self._result, self._bound_s * (1 + PROVEN)
        is_done = result is not None and (result.proven or result.makespan_s <= enough_s)
        return np.inf if is_done else enough_s

    def join(self, found: Candidates) -> Candidates:
        """Returns what a search found, and the solver's plan and bound."""
        found = dataclasses.replace(found, lower_bound_s=self._bound_s)
        if (result := self._result) is None or found.priority is None:
            return found
        ranks = solver_ranks(self._request, result)[None]
        return dataclasses.replace(
            found,
            placements=np.concatenate([found.placements, result.placement[None]]),
            priority=np.concatenate([found.priority, ranks]),
        )

    def _solve(self) -> None:
        with contextlib.suppress(ValueError):  # nothing that surely fits into memory
            result = solved(self._request, self._watch)
            self._bound_s = max(self._bound_s, result.bound_s)
            self._result = result

    def _watch(self, solver: "cp_model.CpSolver", *, tick_s: float) -> None:
        def see(bound: float) -> None:
            self._bound_s = max(self._bound_s, bound * tick_s)

        solver.best_bound_callback = see
        self._solver = solver
