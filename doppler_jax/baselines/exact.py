"""The shortest schedule of a small graph, with a proof, by constraint programming.

What is minimised is the makespan over placements *and* start times: devices may idle and
take tasks in any order, so the optimum can be below what the best placement reaches under
a work-conserving queue (`brute_force`). The solver is OR-Tools CP-SAT (Perron and Didier),
the extra `exact`; the model is the textbook one of optional intervals that do not overlap
on a device.
"""

import dataclasses
import math

import numpy as np

from doppler_jax.baselines.cpop import cpop
from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.baselines.etf import etf
from doppler_jax.baselines.exact_model import (
    Found,
    Search,
    device_classes,
    durations_s,
    first_use_order,
    fits,
    in_ticks,
    is_limited,
    make_memory,
    own,
    replay,
    solve,
    tick_of,
)
from doppler_jax.baselines.heft import heft
from doppler_jax.baselines.peft import peft
from doppler_jax.costs.build import check_costs
from doppler_jax.graphs.build import check_graph, topological_order
from doppler_jax.graphs.levels import lower_bound_s
from doppler_jax.simulator.finalists import start_order
from doppler_jax.simulator.memory import check_capacity
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.types import Costs, TaskGraph

STARTS = (critical_path, heft, cpop, peft, etf)
"""List schedulers: the solver begins at the best of their schedules, and searches at all."""


class NoneFitsError(ValueError):
    """The models of memory, which free nothing, allow no placement; others may fit."""


@dataclasses.dataclass(frozen=True)
class ExactResult:
    """A schedule, and seconds that none can be shorter than."""

    placement: np.ndarray  # [N] int64
    start_s: np.ndarray  # [N]
    makespan_s: float
    bound_s: float  # no schedule of any placement is shorter
    proven: bool  # whether the solver closed the gap; what is left of it is rounding


def exact(
    graph: TaskGraph,
    costs: Costs,
    *,
    budget_s: float,
    links: str = "parallel",
    workers: int = 1,
    seed: int = 0,
) -> ExactResult:
    """Searches for the shortest schedule and proves how far from it the best found is.

    For graphs of up to about 30 tasks; larger ones return what the budget allows. The
    solver counts whole ticks. Where all durations are multiples of one that is not too
    small (of a second, say), that is the tick, and a proven makespan equals its bound.
    Otherwise the tick is at most 2^-25 of the shortest makespan of the list schedules
    `STARTS` (where memory is limited: of the sum of all durations at their longest), and
    durations are rounded down: the solver's bound stays a bound, the schedule found is
    replayed with the true durations, and a proven makespan is above the bound by at
    most 2 N ticks (a task and a transfer for each step of the longest chain).

    Where memory may not suffice, the bound is that of placements whose resident inputs fit,
    and the schedule is one for which all tensors and copies fit at once, so that it respects
    the memory rule of `simulator/memory.py` whatever their lifetimes. Mostly one search finds
    both, with half of the budget; if not, a second one finds the schedule, which is then
    proven only if it meets the bound.

    With one worker a finished search is deterministic; one that the budget cuts short
    depends on the machine.

    Args:
      graph: the task graph.
      costs: its costs, seconds.
      budget_s: seconds for the solver.
      links: `parallel` only.
      workers: threads of the solver.
      seed: of the solver.

    Returns:
      The best schedule found; with memory enough at worst, but for rounding, the best of
      `STARTS` under `fifo`.

    Raises:
      ValueError: the graph or its costs are invalid, the links are not `parallel`, devices
        spend time on transfers (`handling_s`), a number is out of range, or no placement fits
        into memory.
      NoneFitsError: none was found that surely fits.
      ImportError: OR-Tools is not installed.
    """
    if links != "parallel":
        raise ValueError(f"links are {links!r}; method 'exact' knows 'parallel' only")
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}; expected more than 0")
    if workers < 1:
        raise ValueError(f"workers is {workers}; expected at least 1")
    check_graph(graph)
    check_costs(graph, costs)
    if costs.handling_s is not None:
        raise ValueError("costs have handling_s, which method 'exact' does not know")
    if graph.num_tasks == 0:
        return ExactResult(np.zeros(0, np.int64), np.zeros(0), 0.0, 0.0, True)
    search = Search(workers, seed)
    if is_limited(costs):
        found, tick_s = _search_limited(graph, costs, search, budget_s)
    else:
        found, tick_s = _search(graph, costs, search, budget_s)
    durations = durations_s(graph, costs)
    start_s = replay(durations, found.placement, found.order)
    longest_s = float((start_s + own(durations, found.placement)).max())
    bound_s = max(found.bound_ticks * tick_s, lower_bound_s(graph, costs))
    return ExactResult(
        placement=found.placement,
        start_s=start_s,
        makespan_s=longest_s,
        bound_s=min(bound_s, longest_s),
        proven=found.proven or bound_s >= longest_s,
    )


def _search(
    graph: TaskGraph, costs: Costs, search: Search, budget_s: float
) -> tuple[Found, float]:
    """Returns what the solver finds from the best list schedule on, and the tick in seconds.

    Memory is not looked at.
    """
    durations = durations_s(graph, costs)
    topological = topological_order(graph)
    classes = device_classes(graph, costs)
    starts = [simulate_oracle(graph, costs, rule(graph, costs)) for rule in STARTS]
    first = min(starts, key=makespan_s)
    order = np.argsort(start_order(first, np.argsort(topological)))
    placement = first_use_order(first.placement, classes, topological)
    tick_s = tick_of(durations, makespan_s(first))
    ticks = in_ticks(durations, tick_s)
    start = replay(ticks, placement, order)
    found = solve(
        ticks,
        classes,
        topological,
        int((start + own(ticks, placement)).max()),
        search,
        budget_s=budget_s,
        hint=(placement, start),
    )
    if not found.placement.size:
        found = dataclasses.replace(found, placement=placement, order=order)
    return found, tick_s


def _search_limited(
    graph: TaskGraph, costs: Costs, search: Search, budget_s: float
) -> tuple[Found, float]:
    """Returns the same where memory is limited: bound and schedule may come from two models."""
    check_capacity(graph, costs)
    durations = durations_s(graph, costs)
    slowest = (durations.compute.max(1), durations.ready.max(1), durations.delay.max((1, 2)))
    horizon_s = float(sum(part.sum() for part in slowest))
    tick_s = tick_of(durations, horizon_s)
    model = (
        in_ticks(durations, tick_s),
        device_classes(graph, costs),
        topological_order(graph),
        math.ceil(horizon_s / tick_s),
        search,
    )
    loose = make_memory(graph, costs, strict=False)
    strict = make_memory(graph, costs, strict=True)
    bound = found = solve(*model, budget_s=budget_s / 2, memory=loose)
    if np.isinf(bound.bound_ticks):
        raise ValueError("method 'exact': no placement fits into the devices' memory")
    if not (found.placement.size and fits(strict, found.placement)):
        found = solve(*model, budget_s=budget_s / 2, memory=strict)
    if not found.placement.size:
        raise NoneFitsError("method 'exact' found no placement that surely fits into memory")
    proven = bound.proven and found is bound
    return dataclasses.replace(found, bound_ticks=bound.bound_ticks, proven=proven), tick_s
