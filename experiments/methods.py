"""Cells of problems x methods x budgets x seeds: what methods find, ours and a user's own."""

import contextlib
import dataclasses
import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

import doppler_jax as dj
from experiments.catalogue import Problem, file_digest
from experiments.grid import Cell, Context, Record, Settings, check_names

Method = Callable[[dj.graphs.TaskGraph, dj.Costs, dj.search.Budget, jax.Array], Any]
"""A study's own, without a door of `place`: returns the device of each task, `[N]`."""


@dataclasses.dataclass(frozen=True)
class MethodSettings(Settings):
    """Options of a study of methods."""

    problems: tuple[str, ...] = ()
    """Names as in experiments/catalogue.py."""
    method: tuple[str, ...] = ()
    """Of `dj.list_methods()`; or a function of yours, `mypkg.mymodule:fn`
    (docs/tutorials/own_method.md)."""
    links: tuple[str, ...] = ("parallel",)
    queue: str = "fifo"
    """That plans are for; this one is the paper's runtime."""
    evaluations: tuple[int, ...] = ()
    """Budgets in simulated executions."""
    seconds: tuple[float, ...] = ()
    """Budgets in seconds of a cold call: what it compiles counts."""
    seeds: int = 5

    def spends(self) -> "list[Spend]":
        """Returns the budgets asked for, one without bounds where none is."""
        found = [Spend(evaluations=n) for n in sorted(self.evaluations)]
        return found + [Spend(seconds=s) for s in sorted(self.seconds)] or [Spend()]


@dataclasses.dataclass(frozen=True)
class Spend:
    """What a run may spend; in keys of records, so without a clock (as a `Budget` has)."""

    evaluations: int | None = None  # simulated executions
    seconds: float | None = None

    def __str__(self) -> str:
        if self.evaluations is not None:
            return f"{self.evaluations:,} evaluations"
        return f"{self.seconds:g} s" if self.seconds else ""

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
    queue: str = "fifo",
    policy: dj.policies.Policy | None = None,
    own: Mapping[str, Method] = MappingProxyType({}),
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
      queue: that plans are for.
      policy: that all are given; what it holds belongs into `more`.
      own: functions that are run in place of the methods of these names; their `repr` says
        what they are.
      **more: joins the key of every record.

    Raises:
      ValueError: a method is unknown, or a function cannot be imported.
    """
    sources = {m: repr(own[m]) if m in own else _own_source(m) for m in methods}

    def cell(problem: str, link: str, spend: Spend, seed: int, method: str) -> Cell:
        key: Record = {"problem": problem, "links": link, "queue": queue, "method": method}
        key |= {**spend.key, "seed": seed}
        digests = {"source": sources[method], "file": file_digest(problem)}
        key |= {name: digest for name, digest in digests.items() if digest}

        def make() -> Record:
            args = context.problem(problem), method, spend, seed, link, queue, policy
            return place_cell(*args, own=own.get(method))

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
    queue: str = "fifo",
    policy: dj.policies.Policy | None = None,
    own: Method | None = None,
) -> Record:
    """Returns what a method finds for a problem, by the float64 oracle.

    Seconds are cold: nothing is compiled when they begin. `own` is run in place of the method
    of that name.

    Raises:
      KeyboardInterrupt: the search was stopped; what it found is not what its budget gives.
    """
    graph, costs, key, found = problem.graph, problem.costs, jax.random.key(seed), None
    objective, known = dj.Objective(links), {"budget": str(spend)}
    try:
        with cold() if spend.seconds else contextlib.nullcontext():
            budget = dj.search.Budget(evaluations=spend.evaluations, seconds=spend.seconds)
            if own is not None:
                found = own(graph, costs, budget, key)
            else:
                found = dj.place(
                    graph, costs, method=method, policy=policy, key=key, objective=objective,
                    queue=queue, budget_s=spend.seconds, max_evaluations=spend.evaluations,
                )  # fmt: skip
            seconds = budget.seconds_spent()
    except ValueError as error:
        return known | {"refused": str(error)}
    if getattr(found, "interrupted", False):
        raise KeyboardInterrupt
    placement = np.asarray(found if own else found.placement)
    result = known | {"tasks": graph.num_tasks, "placement": placement.tolist()}
    result |= {"seconds_spent": seconds, "lower_bound_s": dj.lower_bound_s(graph, costs)}
    if own is not None:
        schedule = dj.simulator.simulate_oracle(graph, costs, placement, links=links)
        return result | {"makespan_s": dj.simulator.makespan_s(schedule)}
    curve = found.curve
    return result | {
        "makespan_s": found.makespan_s,
        "evaluations_spent": found.evaluations,
        "curve": np.stack([curve.evaluations, curve.seconds, curve.makespan_s]).tolist(),
        "priority": found.priority.tolist(),
    }


def _own_source(method: str) -> str | None:
    """Returns a digest of the module of a user's method: another version is another cell."""
    if ":" not in method:
        check_names("--method", [method], dj.list_methods())
        return None
    module = inspect.getmodule(dj.methods.find_method(method))
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
