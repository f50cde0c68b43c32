"""The shortest schedule of a small graph, with a proof, by constraint programming.

What is minimised is the makespan over placements *and* start times: devices may idle and
take tasks in any order, so the optimum can be below what the best placement reaches under
a work-conserving queue (`brute_force`). The solver is OR-Tools CP-SAT (Perron and Didier),
the extra `exact`; the model is the textbook one of optional intervals that do not overlap
on a device.

Durations are kept in seconds and in whole ticks. Memory counts as if what lies on a device at
some time lay there always, in two versions. The loose one counts resident graph inputs only:
every schedule that respects the memory passes, so that a bound found with it is one. The
strict one counts each tensor, each input at home and each received copy as well: whatever
passes respects the memory, though not the other way round. So a schedule of the loose one is
returned if its own execution respects the memory, and else one of the strict one.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from doppler_jax.baselines.cpop import cpop_schedule
from doppler_jax.baselines.critical_path import critical_path_schedule
from doppler_jax.baselines.etf import etf_schedule
from doppler_jax.baselines.heft import heft_schedule
from doppler_jax.baselines.peft import peft_schedule
from doppler_jax.graphs.bounds import (
    MOST_TASKS,
    Durations,
    around,
    common_divisor,
    durations_s,
    lower_bound_s,
)
from doppler_jax.graphs.build import topological_order
from doppler_jax.simulator.finalists import start_order
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.types import RESIDENT, Costs, TaskGraph

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MAX_TICKS = 1 << 26
"""Ticks in the first makespan: fine enough for rounding, few enough for the solver."""

MOST_COUNTED = 1 << 14
"""Ticks of a horizon up to which devices that are alike are one pool: with finer ones it takes
the solver longer to see that tasks do not fill the devices evenly than where they have one."""

MOST_ORDERED = 64
"""Tasks that tell devices apart that are alike."""

BITS = 30
"""Bits to which the largest limited memory is resolved."""

STARTS = (
    critical_path_schedule, heft_schedule, cpop_schedule, peft_schedule, etf_schedule,
)  # fmt: skip
"""List schedulers: the solver begins at the best of their schedules, and searches at all."""


class Watch(Protocol):
    """Learns of a solver, to look at its bounds and to stop it."""

    def __call__(self, solver: "cp_model.CpSolver", *, tick_s: float) -> None:
        """Is called before it begins, in its thread."""


class NoneFitsError(ValueError):
    """The strict model of memory, which frees nothing, allows no placement; others may fit."""

    def __init__(self, bound_s: float) -> None:
        super().__init__("method 'exact' found no placement that surely fits into memory")
        self.bound_s = bound_s  # no schedule of any placement that fits is shorter


@dataclasses.dataclass(frozen=True)
class ExactResult:
    """A schedule, and seconds that none can be shorter than."""

    placement: np.ndarray  # [N] int64
    start_s: np.ndarray  # [N]
    makespan_s: float
    bound_s: float  # no schedule of any placement is shorter
    proven: bool  # whether the solver closed the gap; what is left of it is rounding


def exact(
    graph: TaskGraph, costs: Costs, *, budget_s: float, watch: "Watch | None" = None
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

    Where memory may not suffice, the bound is that of placements whose resident inputs fit. If
    the schedule that comes with it respects the memory rule of `simulator/memory.py` when it
    is executed in order, one search finds both, with half of the budget. Else a second one
    finds a schedule for which all tensors and copies fit at once, so that it does whatever
    their lifetimes; it is then proven only if it meets the bound.

    A finished search is deterministic; one that the budget cuts short depends on the machine.

    Args:
      graph: the task graph.
      costs: its costs, seconds.
      budget_s: seconds, above 0, after which the solver gives up; building its model counts.
      watch: told when the solver begins, and the seconds of a tick; 0 the second time, where
        its bounds are those of schedules that surely fit alone.

    Returns:
      The best schedule found; with memory enough at worst, but for rounding, the best of
      `STARTS` under `fifo`.

    Raises:
      ValueError: devices spend time on transfers (`handling_s`), a graph input has a maker,
        or no placement fits into memory.
      NoneFitsError: none was found that surely fits.
      ImportError: OR-Tools is not installed.
    """
    began = time.monotonic()
    if costs.handling_s is not None:
        raise ValueError("costs have handling_s, which method 'exact' does not know")
    for i in np.flatnonzero(graph.input_maker >= 0)[:1]:
        raise ValueError(f"graph input {i} has a maker, which method 'exact' does not know")
    if graph.num_tasks == 0:
        return ExactResult(np.zeros(0, np.int64), np.zeros(0), 0.0, 0.0, True)
    total_bytes = np.sum(costs.input_bytes) + np.sum(costs.tensor_bytes)
    least_s = lower_bound_s(graph, costs)
    if total_bytes > np.min(costs.capacity_bytes):
        found, tick_s = _search_limited(graph, costs, began, budget_s, watch)
    else:
        found, tick_s = _search(graph, costs, began, budget_s, least_s, watch)
    durations = durations_s(graph, costs)
    start_s = replay(durations, found.placement, found.order)
    longest_s = float((start_s + own(durations, found.placement)).max())
    bound_s = max(found.bound_ticks * tick_s, least_s)
    return ExactResult(
        placement=found.placement,
        start_s=start_s,
        makespan_s=longest_s,
        bound_s=min(bound_s, longest_s),
        proven=found.proven or bound_s >= longest_s,
    )


def _search(
    graph: TaskGraph,
    costs: Costs,
    began: float,
    budget_s: float,
    least_s: float,
    watch: "Watch | None",
) -> tuple["Found", float]:
    """Returns what the solver finds from the best list schedule on, and the tick in seconds.

    Memory is not looked at.
    """
    durations = durations_s(graph, costs)
    topological = topological_order(graph)
    classes = device_classes(graph, costs)
    starts = [simulate_oracle(graph, costs, rule(graph, costs).placement) for rule in STARTS]
    first = min(starts, key=makespan_s)
    order = np.argsort(start_order(first, np.argsort(topological)))
    placement = first_use_order(first.placement, classes, topological)
    tick_s = tick_of(durations, makespan_s(first))
    ticks = in_ticks(durations, tick_s)
    start = replay(ticks, placement, order)
    horizon = int((start + own(ticks, placement)).max())
    found = solve(
        ticks,
        classes,
        topological,
        horizon,
        until_s=began + budget_s,
        least=min(int(least_s / tick_s), horizon),
        hint=(placement, start),
        watch=None if watch is None else partial(watch, tick_s=tick_s),
    )
    if not found.placement.size:
        found = dataclasses.replace(found, placement=placement, order=order)
    return found, tick_s


def _search_limited(
    graph: TaskGraph, costs: Costs, began: float, budget_s: float, watch: "Watch | None"
) -> tuple["Found", float]:
    """Returns the same where memory is limited: bound and schedule may come from two models."""
    durations = durations_s(graph, costs)
    slowest = (durations.compute.max(1), durations.ready.max(1), durations.delay.max((1, 2)))
    horizon_s = float(sum(part.sum() for part in slowest))
    tick_s = tick_of(durations, horizon_s)
    model = (
        in_ticks(durations, tick_s),
        device_classes(graph, costs),
        topological_order(graph),
        math.ceil(horizon_s / tick_s),
    )
    loose = make_memory(graph, costs, strict=False)
    strict = make_memory(graph, costs, strict=True)
    watched = [None if watch is None else partial(watch, tick_s=t) for t in (tick_s, 0.0)]
    half_s = began + budget_s / 2
    bound = found = solve(*model, until_s=half_s, memory=loose, watch=watched[0])
    if np.isinf(bound.bound_ticks):
        raise ValueError("method 'exact': no placement fits into the devices' memory")
    if not (found.placement.size and executes(graph, costs, found)):
        found = solve(*model, until_s=began + budget_s, memory=strict, watch=watched[1])
    if not found.placement.size:
        raise NoneFitsError(bound.bound_ticks * tick_s)
    proven = bound.proven and found is bound
    return dataclasses.replace(found, bound_ticks=bound.bound_ticks, proven=proven), tick_s


def tick_of(durations: Durations, horizon_s: float) -> float:
    """Returns the seconds of a tick: an exact divisor of all durations if it is not too small.

    Otherwise a power of two, between 1/2 and 1 of which `MAX_TICKS` fill the horizon.
    """
    parts = (durations.compute, durations.ready, durations.delay)
    divisor_s = common_divisor(np.concatenate([part.ravel() for part in parts]))
    if horizon_s <= MAX_TICKS * divisor_s:
        return divisor_s if np.isfinite(divisor_s) else 1.0
    return 2.0 ** math.ceil(math.log2(horizon_s / MAX_TICKS))


def in_ticks(durations: Durations, tick_s: float) -> Durations:
    """Returns the durations rounded down to whole ticks."""
    parts = {
        name: np.floor(getattr(durations, name) / tick_s).astype(np.int64)
        for name in ("compute", "ready", "delay")
    }
    return dataclasses.replace(durations, **parts)


def replay(durations: Durations, placement: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns the earliest starts `[N]` if every device keeps to `order` `[N]`.

    `order` lists the producers of a task before it.
    """
    tasks = np.arange(len(order))
    start = durations.ready[tasks, placement]
    finish = np.zeros_like(start)
    free = np.zeros(durations.compute.shape[1], start.dtype)
    incoming: list[list[int]] = [[] for _ in tasks]
    for q, v in enumerate(durations.reader.tolist()):
        incoming[v].append(q)
    for v in order.tolist():
        here = placement[v]
        start[v] = max(start[v], free[here])
        for q in incoming[v]:
            u = durations.sender[q]
            start[v] = max(start[v], finish[u] + durations.delay[q, placement[u], here])
        finish[v] = free[here] = start[v] + durations.compute[v, here]
    return start


def own(durations: Durations, placement: np.ndarray) -> np.ndarray:
    """Returns how long each task `[N]` takes where it is placed."""
    return durations.compute[np.arange(len(placement)), placement]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Sizes in a unit that makes them whole numbers."""

    capacity: list[int | None]  # [D] less what is at home there; None is unlimited
    items: list[tuple[int, list[int]]]  # size, and tasks that each bring it to their device


def make_memory(graph: TaskGraph, costs: Costs, *, strict: bool) -> Memory:
    """Returns what must fit on each device, in one of the two versions."""
    capacity = np.asarray(costs.capacity_bytes, np.float64)
    unit = 2.0 ** (np.ceil(np.log2(max(capacity[np.isfinite(capacity)].max(), 1.0))) - BITS)
    whole = np.ceil if strict else np.floor
    readers: list[list[int]] = [[] for _ in range(graph.num_inputs)]
    for i, v in zip(graph.input_edge_input, graph.input_edge_reader, strict=True):
        readers[i].append(int(v))
    room = capacity.copy()
    items = []
    for i, tasks in enumerate(readers):
        size = float(costs.input_bytes[i])
        is_resident = graph.input_home[i] == RESIDENT
        if strict and tasks and not is_resident:  # a reader at home counts it once more
            room[graph.input_home[i]] -= size
        if tasks and (is_resident or strict):
            items.append((int(whole(size / unit)), tasks))
    if strict:
        touching = [[int(u)] for u in graph.tensor_producer]
        for x, v in zip(graph.edge_tensor, graph.edge_reader, strict=True):
            touching[x].append(int(v))
        sizes = whole(np.asarray(costs.tensor_bytes) / unit).astype(int).tolist()
        items += list(zip(sizes, touching, strict=True))
    limits = [int(np.floor(r / unit)) if np.isfinite(r) else None for r in room]
    return Memory(limits, [item for item in items if item[0]])


def executes(graph: TaskGraph, costs: Costs, found: "Found") -> bool:
    """Returns whether the execution of what was found respects the memory."""
    rank = np.argsort(found.order)
    schedule = simulate_oracle(graph, costs, found.placement, queue="in_order", priority=rank)
    return bool((peak_memory_bytes(graph, costs, schedule) <= costs.capacity_bytes).all())


def device_classes(graph: TaskGraph, costs: Costs) -> list[list[int]]:
    """Returns the classes of interchangeable devices, members ascending, by first member.

    Two devices are interchangeable if every task and every transfer costs the same after
    exchanging them, and neither is the home of a graph input that is read.
    """
    homes = set(np.asarray(graph.input_home)[graph.input_edge_input].tolist()) - {RESIDENT}
    classes: list[list[int]] = []
    for d in range(costs.num_devices):
        for members in classes:
            if not {d, members[0]} & homes and _exchangeable(costs, members[0], d):
                members.append(d)
                break
        else:
            classes.append([d])
    return classes


def first_use_order(
    placement: np.ndarray, classes: list[list[int]], order: np.ndarray
) -> np.ndarray:
    """Returns a placement `[N]` of equal worth whose classes are used in ascending order.

    Within a class, the device that the first task of `order` `[N]` runs on gets the
    smallest id, and so on.
    """
    renamed = np.arange(max(max(members) for members in classes) + 1)
    used = placement[order].tolist()
    for members in classes:
        seen = dict.fromkeys(d for d in used if d in members)
        renamed[[*seen, *(d for d in members if d not in seen)]] = members
    return renamed[placement]


def _exchangeable(costs: Costs, a: int, b: int) -> bool:
    exchanged = np.arange(costs.num_devices)
    exchanged[[a, b]] = b, a
    compute_s = np.asarray(costs.compute_s)
    if not np.array_equal(compute_s[:, a], compute_s[:, b]):
        return False
    if costs.capacity_bytes[a] != costs.capacity_bytes[b]:
        return False
    return all(
        np.array_equal(np.asarray(link)[np.ix_(exchanged, exchanged)], link)
        for link in (costs.latency_s, costs.seconds_per_byte)
    )


@dataclasses.dataclass(frozen=True)
class Found:
    """What the solver knows when it stops."""

    placement: np.ndarray  # [N] int64; empty if it has no schedule
    order: np.ndarray  # [N] tasks by start, producers and device predecessors first
    bound_ticks: float  # inf if there is no schedule
    proven: bool


def solve(
    ticks: Durations,
    classes: list[list[int]],
    topological: np.ndarray,
    horizon: int,
    *,
    until_s: float,
    least: int = 0,
    hint: tuple[np.ndarray, np.ndarray] | None = None,
    memory: Memory | None = None,
    watch: Callable[["cp_model.CpSolver"], None] | None = None,
) -> Found:
    """Minimises the makespan.

    Args:
      ticks: durations in ticks.
      classes: interchangeable devices; of equivalent placements the model keeps the one
        that uses each class in ascending order along `topological`.
      topological: `[N]` tasks, producers first.
      horizon: ticks that some optimal schedule does not exceed.
      until_s: of `time.monotonic()`, when the solver is to give up.
      least: ticks that no schedule is below.
      hint: a placement that the model allows and its starts in ticks.
      memory: what must fit, if anything.
      watch: called with the solver just before it begins.

    Returns:
      The best schedule found.

    Raises:
      ImportError: OR-Tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ImportError(
            "method 'exact' needs OR-Tools: install doppler-jax with the extra 'exact', "
            "pip install 'doppler-jax[exact]'"
        ) from error
    is_one_pool = memory is None and is_pool(ticks, classes, horizon)
    levels = np.zeros((2, *ticks.compute.shape))
    if len(topological) <= MOST_TASKS:  # in larger ones it takes long
        levels = np.ceil(np.stack(around(ticks, topological)) - 1e-6)
    model = _Model(cp_model.CpModel(), ticks, levels, least, horizon, is_one_pool)
    model.add_tasks()
    model.add_arrivals()
    if not is_one_pool:
        model.add_devices()
        model.break_symmetry(classes, topological)
    if memory is not None:
        model.add_memory(memory)
    if hint is not None:
        model.add_hint(*hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(until_s - time.monotonic(), 0.0)
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    # CP-SAT would take Ctrl-C from Python, and leave the process without a handler.
    solver.parameters.catch_sigint_signal = False
    if watch is not None:
        watch(solver)
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        bound = np.inf if status == cp_model.INFEASIBLE else solver.best_objective_bound
        return Found(np.zeros(0, np.int64), topological, max(bound, 0.0), False)
    start = np.array([solver.value(var) for var in model.start])
    length = np.array([solver.value(var) for var in model.length])
    order = np.lexsort((np.argsort(topological), start + length, start))
    if is_one_pool:
        placement = _in_turn(start, length, order, ticks.compute.shape[1])
    else:
        placement = np.array(
            [next(d for d, var in row.items() if solver.value(var)) for row in model.runs]
        )
    return Found(placement, order, solver.best_objective_bound, status == cp_model.OPTIMAL)


def is_pool(ticks: Durations, classes: list[list[int]], horizon: int) -> bool:
    """Returns whether devices are one pool, and ticks so few that the solver counts them."""
    return len(classes) == 1 and horizon <= MOST_COUNTED and not ticks.delay.any()


def _in_turn(
    start: np.ndarray, length: np.ndarray, order: np.ndarray, devices: int
) -> np.ndarray:
    """Returns devices `[N]`, for each task of `order` one that is free when it starts."""
    placement, free = np.zeros(len(order), np.int64), np.zeros(devices, np.int64)
    for v in order:
        placement[v] = free.argmin()
        free[placement[v]] = start[v] + length[v]
    return placement


class _Model:
    """Start, finish and device of every task as variables of CP-SAT.

    Where devices are alike and nothing takes time to move, they are one pool: it matters how
    many tasks run at once, not where.
    """

    def __init__(
        self,
        model: "cp_model.CpModel",
        ticks: Durations,
        levels: np.ndarray,
        least: int,
        horizon: int,
        is_one_pool: bool,
    ) -> None:
        self.ticks, self.model, self.is_one_pool = ticks, model, is_one_pool
        self.head, self.tail = levels
        tasks = range(len(ticks.compute))
        self.makespan = model.new_int_var(least, horizon, "makespan")
        self.start = [model.new_int_var(0, horizon, f"start{v}") for v in tasks]
        self.length = [
            model.new_int_var(int(c[able].min()), int(c[able].max()), f"length{v}")
            for v, (c, able) in enumerate(zip(ticks.compute, ticks.able, strict=True))
        ]
        self.finish = [model.new_int_var(0, horizon, f"finish{v}") for v in tasks]
        self.runs: list[dict[int, cp_model.IntVar]] = [
            {d: model.new_bool_var(f"runs{v},{d}") for d in np.flatnonzero(able).tolist()}
            for v, able in enumerate(ticks.able & (not is_one_pool))
        ]
        model.minimize(self.makespan)

    def add_tasks(self) -> None:
        """Every task once, no more at a time than there are devices."""
        model, (n, devices) = self.model, self.ticks.compute.shape
        for v in range(n):
            model.add(self.finish[v] == self.start[v] + self.length[v])
            model.add(self.start[v] >= int(self.head[v].min()))
            model.add(self.finish[v] + int(self.tail[v].min()) <= self.makespan)
        spans = [
            model.new_interval_var(self.start[v], self.length[v], self.finish[v], "")
            for v in range(n)
        ]
        model.add_cumulative(spans, [1] * n, devices)

    def add_devices(self) -> None:
        """Every task on a device that takes one at a time."""
        model, compute = self.model, self.ticks.compute
        for v, runs in enumerate(self.runs):
            model.add_exactly_one(runs.values())
            model.add(self.length[v] == sum(int(compute[v, d]) * x for d, x in runs.items()))
            # At each device no sooner, and no later, than what is around it allows.
            head = sum(int(self.head[v, d]) * x for d, x in runs.items())
            tail = sum(int(self.tail[v, d]) * x for d, x in runs.items())
            model.add(self.start[v] >= head)
            model.add(self.finish[v] + tail <= self.makespan)
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

    def add_arrivals(self) -> None:
        """A task starts when everything that it reads has arrived."""
        model = self.model
        if self.is_one_pool:  # a task of no length at once: where its last producer ends
            for v in np.flatnonzero(self.ticks.compute[:, 0] == 0).tolist():
                producers = self.ticks.sender[self.ticks.reader == v].tolist()
                model.add_max_equality(self.start[v], [0, *(self.finish[u] for u in producers)])
        pairs = zip(self.ticks.sender.tolist(), self.ticks.reader.tolist(), strict=True)
        for (u, v), delay in zip(pairs, self.ticks.delay, strict=True):
            start, finish = self.start[v], self.finish[u]
            model.add(start >= finish)
            apart = [(s, d) for s in self.runs[u] for d in self.runs[v] if s != d]
            least = min((int(delay[leg]) for leg in apart), default=0)
            if least:
                moves = model.new_bool_var(f"moves{u},{v}")
                for s, x in self.runs[u].items():
                    model.add(moves >= x - self.runs[v].get(s, 0))
                model.add(start >= finish + least * moves)
            for s, d in apart:
                if delay[s, d] > least:
                    model.add(start >= finish + int(delay[s, d])).only_enforce_if(
                        self.runs[u][s], self.runs[v][d]
                    )

    def break_symmetry(self, classes: list[list[int]], topological: np.ndarray) -> None:
        """A device of a class runs something only after a task on the one before it.

        Asked of the first tasks alone: sums grow with each.
        """
        for members in classes:
            for before, after in itertools.pairwise(members):
                earlier: list[cp_model.IntVar] = []
                for v in topological[:MOST_ORDERED].tolist():
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
