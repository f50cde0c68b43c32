"""The constraint model of `exact`: durations in whole ticks, intervals on devices."""

import dataclasses
import itertools
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from doppler_jax.baselines.exact_durations import Durations, own
from doppler_jax.baselines.exact_memory import Memory

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


@dataclasses.dataclass(frozen=True)
class Found:
    """What the solver knows when it stops."""

    placement: np.ndarray  # [N] int64; empty if it has no schedule
    order: np.ndarray  # [N] tasks by start, producers and device predecessors first
    bound_ticks: float  # inf if there is no schedule
    proven: bool


@dataclasses.dataclass(frozen=True)
class Search:
    """How the solver runs."""

    workers: int
    seed: int


def solve(
    ticks: Durations,
    classes: list[list[int]],
    topological: np.ndarray,
    horizon: int,
    search: Search,
    *,
    budget_s: float,
    hint: tuple[np.ndarray, np.ndarray] | None = None,
    memory: Memory | None = None,
) -> Found:
    """Minimises the makespan.

    Args:
      ticks: durations in ticks.
      classes: interchangeable devices; of equivalent placements the model keeps the one
        that uses each class in ascending order along `topological`.
      topological: `[N]` tasks, producers first.
      horizon: ticks that some optimal schedule does not exceed.
      search: how the solver runs.
      budget_s: seconds.
      hint: a placement that the model allows and its starts in ticks.
      memory: what must fit, if anything.

    Returns:
      The best schedule found.
    """
    cp_model = _import_cp_model()
    model = _Model(ticks, horizon)
    model.add_devices()
    model.add_arrivals()
    model.break_symmetry(classes, topological)
    if memory is not None:
        model.add_memory(memory)
    if hint is not None:
        model.add_hint(*hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = budget_s
    solver.parameters.num_workers = search.workers
    solver.parameters.random_seed = search.seed
    # CP-SAT would take Ctrl-C from Python, and leave the process without a handler.
    solver.parameters.catch_sigint_signal = False
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        bound = np.inf if status == cp_model.INFEASIBLE else solver.best_objective_bound
        return Found(np.zeros(0, np.int64), topological, max(bound, 0.0), False)
    placement = np.array(
        [next(d for d, var in row.items() if solver.value(var)) for row in model.runs]
    )
    start = np.array([solver.value(var) for var in model.start])
    rank = np.empty_like(topological)
    rank[topological] = np.arange(len(rank))
    order = np.lexsort((rank, start + own(ticks, placement), start))
    return Found(placement, order, solver.best_objective_bound, status == cp_model.OPTIMAL)


def _import_cp_model() -> ModuleType:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ImportError(
            "method 'exact' needs OR-Tools: install doppler-jax with the extra 'exact', "
            "pip install 'doppler-jax[exact]'"
        ) from error
    return cp_model


class _Model:
    """Start, finish and device of every task as variables of CP-SAT."""

    def __init__(self, ticks: Durations, horizon: int) -> None:
        self.ticks = ticks
        self.model = model = _import_cp_model().CpModel()
        tasks = range(len(ticks.compute))
        self.makespan = model.new_int_var(0, horizon, "makespan")
        self.start = [model.new_int_var(0, horizon, f"start{v}") for v in tasks]
        self.length = [
            model.new_int_var(int(c[able].min()), int(c[able].max()), f"length{v}")
            for v, (c, able) in enumerate(zip(ticks.compute, ticks.able, strict=True))
        ]
        self.finish = [model.new_int_var(0, horizon, f"finish{v}") for v in tasks]
        self.runs: list[dict[int, cp_model.IntVar]] = [
            {d: model.new_bool_var(f"runs{v},{d}") for d in np.flatnonzero(able).tolist()}
            for v, able in enumerate(ticks.able)
        ]
        model.minimize(self.makespan)

    def add_devices(self) -> None:
        """Every task once, on a device that takes one at a time."""
        model, compute = self.model, self.ticks.compute
        for v, runs in enumerate(self.runs):
            start, length = self.start[v], self.length[v]
            model.add_exactly_one(runs.values())
            model.add(length == sum(int(compute[v, d]) * x for d, x in runs.items()))
            model.add(self.finish[v] == start + length)
            model.add(self.finish[v] <= self.makespan)
            ready = self.ticks.ready[v]
            model.add(start >= sum(int(ready[d]) * x for d, x in runs.items()))
        for d in range(compute.shape[1]):
            here = [v for v, runs in enumerate(self.runs) if d in runs]
            model.add_no_overlap(
                model.new_optional_interval_var(
                    self.start[v], int(compute[v, d]), self.finish[v], self.runs[v][d], ""
                )
                for v in here
            )
            # Implied; what the solver's linear relaxation sees of a device.
            load = sum(int(compute[v, d]) * self.runs[v][d] for v in here)
            model.add(load <= self.makespan)
        # Implied as well: the solver reasons about all devices at once.
        spans = [
            model.new_interval_var(self.start[v], self.length[v], self.finish[v], "")
            for v in range(len(compute))
        ]
        model.add_cumulative(spans, [1] * len(spans), compute.shape[1])

    def add_arrivals(self) -> None:
        """A task starts when everything that it reads has arrived."""
        pairs = zip(self.ticks.sender.tolist(), self.ticks.reader.tolist(), strict=True)
        for q, (u, v) in enumerate(pairs):
            self._add_arrival(u, v, self.ticks.delay[q])

    def _add_arrival(self, u: int, v: int, delay: np.ndarray) -> None:
        model, start, finish = self.model, self.start[v], self.finish[u]
        model.add(start >= finish)
        legs = [(s, d) for s in self.runs[u] for d in self.runs[v] if s != d and delay[s, d]]
        if not legs:
            return
        apart = [(s, d) for s in self.runs[u] for d in self.runs[v] if s != d]
        least = min(int(delay[leg]) for leg in apart)
        if least:
            moves = model.new_bool_var(f"moves{u},{v}")
            for s, x in self.runs[u].items():
                model.add(moves >= x - self.runs[v].get(s, 0))
            model.add(start >= finish + least * moves)
        for s, d in legs:
            if delay[s, d] > least:
                model.add(start >= finish + int(delay[s, d])).only_enforce_if(
                    self.runs[u][s], self.runs[v][d]
                )

    def break_symmetry(self, classes: list[list[int]], topological: np.ndarray) -> None:
        """A device of a class runs something only after a task on the one before it."""
        for members in classes:
            for before, after in itertools.pairwise(members):
                earlier: list[cp_model.IntVar] = []
                for v in topological.tolist():
                    if after in self.runs[v]:
                        self.model.add(self.runs[v][after] <= sum(earlier))
                    if before in self.runs[v]:
                        earlier.append(self.runs[v][before])

    def add_memory(self, memory: Memory) -> None:
        """What lies on a device at some time must fit there as if it were there always."""
        for d, capacity in enumerate(memory.capacity):
            if capacity is None:
                continue
            held = []
            for size, tasks in memory.items:
                here = [self.runs[v][d] for v in tasks if d in self.runs[v]]
                if len(here) > 1:
                    is_there = self.model.new_bool_var("")
                    for x in here:
                        self.model.add_implication(x, is_there)
                    here = [is_there]
                held += [size * x for x in here]
            self.model.add(sum(held) <= capacity)

    def add_hint(self, placement: np.ndarray, start: np.ndarray) -> None:
        """Where to begin the search."""
        finish = start + own(self.ticks, placement)
        self.model.add_hint(self.makespan, int(finish.max()))
        for v, runs in enumerate(self.runs):
            self.model.add_hint(self.start[v], int(start[v]))
            self.model.add_hint(self.length[v], int(finish[v] - start[v]))
            self.model.add_hint(self.finish[v], int(finish[v]))
            for d, x in runs.items():
                self.model.add_hint(x, int(d == placement[v]))
