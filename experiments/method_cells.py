"""Cells of the comparisons: a method of `dj.place` on a workload, run once and kept."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.costs.digests import problem_digest
from experiments.cells import Cells
from experiments.problems import Chosen, choose_workload

NUM_SHARDS = 4
"""Blocks per tensor of the uniform cut, as in the paper."""

WARM_UP_S = 0.5
"""Budget of a run before the clock starts: it compiles, and does one step of what there is.

A budget in simulated executions could make batches smaller, and what they compile another.
"""

WARM_UPS = 2
"""Such runs: in the first one DOPPLER may spend the budget before stage 1 is compiled."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a run may spend, of one kind."""

    seconds: float | None = None  # they begin when everything has been compiled
    evaluations: int | None = None  # simulated executions

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"{self.seconds:g} seconds"
        return f"{self.evaluations:,} simulated executions"


class MethodCells:
    """Runs methods; knows what has been compiled for the problem that it is at.

    Args:
      cells: where results are kept.
      links: of what is simulated.
    """

    def __init__(self, cells: Cells, links: str = "parallel") -> None:
        self._cells, self._links = cells, links
        self._problem = ""
        self._first_s: dict[str, float] = {}  # by method, of this problem

    def get(self, chosen: Chosen, method: str, seed: int, budget: Budget) -> dict[str, Any]:
        """Returns what a method finds for a problem within a budget.

        Of a budget in seconds `first_s` is what the runs before took, which compiled.
        """

        def make() -> dict[str, Any]:
            first_s = None
            if budget.seconds is not None:
                first_s = self._warm_up(chosen, method)
            placed = self._place(chosen, method, seed, budget)
            return placed_record(placed) | {"first_s": first_s, "tasks": chosen.graph.num_tasks}

        terms = {
            "problem": problem_digest(chosen.graph, chosen.costs),
            "budget": dataclasses.asdict(budget),
            "links": self._links,
        }
        amount = f"{budget.seconds:g}s" if budget.seconds is not None else budget.evaluations
        words = method.replace("+", "_")
        record = self._cells.get(f"{chosen.name}-{words}-{amount}-{seed}", terms, make)
        return record | {"method": method, "seed": seed, "budget": str(budget)}

    def _warm_up(self, chosen: Chosen, method: str) -> float:
        if chosen.name != self._problem:
            # What the last one compiled is of no use, and could make `place` drop everything
            # while seconds count.
            jax.clear_caches()
            self._problem, self._first_s = chosen.name, {}
        if method not in self._first_s:
            began = time.monotonic()
            for _ in range(WARM_UPS):
                finished(self._place(chosen, method, 0, Budget(WARM_UP_S)))
            self._first_s[method] = time.monotonic() - began
        return self._first_s[method]

    def _place(self, chosen: Chosen, method: str, seed: int, budget: Budget) -> dj.Placed:
        return dj.place(
            chosen.graph,
            chosen.costs,
            method=method,
            key=jax.random.key(seed),
            budget_s=budget.seconds,
            max_evaluations=budget.evaluations,
            objective=dj.Objective(self._links),
        )


def paper_problem(workload: str, preset: str, cluster: str = "p100x4") -> Chosen:
    """Returns a workload in the uniform cut on a preset cluster."""
    return choose_workload(
        workload, preset, dj.make_cluster(cluster), cluster, "uniform", NUM_SHARDS
    )


def check_names(option: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    """Raises `ValueError` where an option's names are none, or one is unknown."""
    if not chosen:
        raise ValueError(f"{option}: expected at least one of {', '.join(known)}")
    for name in chosen:
        if name not in known:
            raise ValueError(f"{option}: unknown {name!r}; known: {', '.join(known)}")


def finished(placed: dj.Placed) -> dj.Placed:
    """Returns a placement as it is, so that Ctrl-C ends a command and not just its search.

    Raises:
      KeyboardInterrupt: the search was stopped; what it found is not what its budget gives.
    """
    if placed.interrupted:
        raise KeyboardInterrupt
    return placed


def placed_record(placed: dj.Placed) -> dict[str, Any]:
    """Returns what is kept of a placement and of how it was found.

    Raises:
      KeyboardInterrupt: the search was stopped, see `finished`.
    """
    placed = finished(placed)
    return {
        "makespan_s": placed.makespan_s,
        "lower_bound_s": placed.lower_bound_s,
        "evaluations": placed.evaluations,
        "seconds": placed.seconds,
        "curve": np.stack(
            [placed.curve.evaluations, placed.curve.seconds, placed.curve.makespan_s]
        ).tolist(),
        "placement": placed.placement.tolist(),
    }
