"""Cells of problems x methods x budgets x seeds: what methods find, ours and a user's own."""

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

import doppler_jax as dj
from experiments.catalogue import Problem, file_digest
from experiments.grid import Cell, Context, Record, Settings, check_names

WARM_UP_S = 0.5
"""Budget of a run that only compiles; one in evaluations could make batches smaller."""

WARM_UPS = 2
"""Such runs: in the first one DOPPLER may spend the budget before stage 1 is compiled."""

Method = Callable[[dj.TaskGraph, dj.Costs, dj.Budget, jax.Array], Any]
"""A method of one's own: returns the device of each task, `[N]`, or a `dj.Placed`."""


@dataclasses.dataclass(frozen=True)
class MethodSettings(Settings):
    """Options of a study of methods."""

    problems: tuple[str, ...] = ()
    """Names as in experiments/catalogue.py."""
    method: tuple[str, ...] = ()
    """Of `dj.list_methods()`; or a function of yours, `mypkg.mymodule:fn`, that takes graph,
    costs, a `dj.Budget` and a key, and returns device per task (or a `dj.Placed`)."""
    links: tuple[str, ...] = ("parallel",)
    evaluations: tuple[int, ...] = ()
    """Budgets in simulated executions."""
    seconds: tuple[float, ...] = ()
    """Budgets in seconds of a cold call: what it compiles counts."""
    warm_seconds: tuple[float, ...] = ()
    """Budgets in seconds that begin when everything has been compiled."""
    seeds: int = 5

    def spends(self) -> "list[Spend]":
        """Returns the budgets asked for, one without bounds where none is."""
        return [
            *(Spend(evaluations=n) for n in sorted(self.evaluations)),
            *(Spend(seconds=s) for s in sorted(self.seconds)),
            *(Spend(seconds=s, warm=True) for s in sorted(self.warm_seconds)),
        ] or [Spend()]


@dataclasses.dataclass(frozen=True)
class Spend:
    """What a run may spend; in keys of records, so without a clock (as `dj.Budget` has)."""

    evaluations: int | None = None  # simulated executions
    seconds: float | None = None
    warm: bool = False  # seconds begin when everything has been compiled

    def __str__(self) -> str:
        if self.evaluations is not None:
            return f"{self.evaluations:,} evaluations"
        if self.seconds is None:
            return ""
        return f"{self.seconds:g} s{', warm' if self.warm else ''}"

    @property
    def key(self) -> Record:
        """What of it is set."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v}


def method_cells(
    context: Context[Any],
    problems: Sequence[str],
    methods: Sequence[str],
    spends: Sequence[Spend],
    seeds: int = 1,
    links: Sequence[str] = ("parallel",),
    policy: dj.Policy | None = None,
    **more: Any,
) -> list[Cell]:
    """Returns the cells of methods on problems.

    Args:
      context: of the study.
      problems: names.
      methods: names, or `module:function`.
      spends: budgets.
      seeds: keys are `jax.random.key(0)` to `key(seeds - 1)`.
      links: kinds of links.
      policy: that all are given; what it holds belongs into `more`.
      **more: joins the key of every record.

    Raises:
      ValueError: a method is unknown, or a function cannot be imported.
    """
    sources = {method: _own_source(method) for method in methods}

    def cell(problem: str, link: str, spend: Spend, seed: int, method: str) -> Cell:
        key = {"problem": problem, "links": link, "method": method, **spend.key, "seed": seed}
        digests = {"source": sources[method], "file": file_digest(problem)}
        key |= {name: digest for name, digest in digests.items() if digest}

        def make() -> Record:
            return place_cell(context.problem(problem), method, spend, seed, link, policy)

        return Cell(key | more, make)

    # Seeds are outside of methods: a machine's drift hits all alike.
    grid = itertools.product(problems, links, spends, range(seeds), methods)
    return [cell(*which) for which in grid]


def place_cell(
    problem: Problem,
    method: str,
    spend: Spend,
    seed: int,
    links: str = "parallel",
    policy: dj.Policy | None = None,
    own: Method | None = None,
) -> Record:
    """Returns what a method finds for a problem, by the float64 oracle.

    Seconds are cold unless the budget is a warm one: nothing is compiled when they begin.
    `own` is run in place of the method of that name.

    Raises:
      KeyboardInterrupt: the search was stopped; what it found is not what its budget gives.
    """
    if ":" in method:
        own = own_method(method)

    def run(spend: Spend) -> Record:
        key, objective = jax.random.key(seed), dj.Objective(links)
        if own is not None:
            return _place_by_own(own, problem, spend, key, objective)
        return _place(
            problem, spend, method=method, policy=policy, key=key, objective=objective
        )

    found: Record = {"budget": str(spend)}
    try:
        if spend.warm:
            began = time.monotonic()
            for _ in range(WARM_UPS):
                run(Spend(seconds=WARM_UP_S))
            return found | {"first_s": time.monotonic() - began} | run(spend)
        with cold() if spend.seconds else contextlib.nullcontext():
            return found | run(spend)
    except ValueError as error:
        return found | {"refused": str(error)}


def _place(problem: Problem, spend: Spend, **options: Any) -> Record:
    """Returns what `dj.place` finds."""
    bounds: dict[str, Any] = {"budget_s": spend.seconds, "max_evaluations": spend.evaluations}
    placed = dj.place(problem.graph, problem.costs, **bounds, **options)
    if placed.interrupted:
        raise KeyboardInterrupt
    curve = placed.curve
    return {
        "makespan_s": placed.makespan_s,
        "lower_bound_s": placed.lower_bound_s,
        "tasks": problem.graph.num_tasks,
        "evaluations_spent": placed.evaluations,
        "seconds_spent": placed.seconds,
        "curve": np.stack([curve.evaluations, curve.seconds, curve.makespan_s]).tolist(),
        "placement": placed.placement.tolist(),
        "priority": placed.priority.tolist(),
    }


def _place_by_own(
    method: Method, problem: Problem, spend: Spend, key: jax.Array, objective: dj.Objective
) -> Record:
    """Returns what a user's method finds."""
    graph, costs = problem.graph, problem.costs
    budget = dj.Budget(evaluations=spend.evaluations, seconds=spend.seconds)
    found = method(graph, costs, budget, key)
    seconds = budget.seconds_spent()
    placement = np.asarray(getattr(found, "placement", found))
    schedule = dj.simulate_oracle(graph, costs, placement, links=objective.links)
    return {
        "makespan_s": dj.makespan_s(schedule),
        "lower_bound_s": dj.lower_bound_s(graph, costs),
        "tasks": graph.num_tasks,
        "seconds_spent": seconds,
        "placement": placement.tolist(),
    }


def own_method(name: str) -> Method:
    """Returns a user's function by `module:function`.

    Raises:
      ValueError: it cannot be imported.
    """
    module, _, function = name.partition(":")
    sys.path[:0] = [] if "" in sys.path else [""]  # the folder that the command runs in
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"method {name!r} cannot be imported: {error}") from error


def _own_source(method: str) -> str | None:
    """Returns a digest of the module of a user's method: another version is another cell."""
    if ":" not in method:
        check_names("--method", [method], dj.list_methods())
        return None
    module = inspect.getmodule(own_method(method))
    return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:16] if module else ""


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Within it nothing is compiled beforehand, in this process or in a cache on disk."""
    on_disk = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.clear_caches()
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", on_disk)
        compilation_cache.reset_cache()
