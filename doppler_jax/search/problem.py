"""What a search minimises: the makespan, or a statistic of it under noise, within memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from doppler_jax.graphs.build import topological_order
from doppler_jax.graphs.levels import b_level
from doppler_jax.native import is_compiled
from doppler_jax.objective import LINKS, Objective
from doppler_jax.simulator.disciplines import find_discipline
from doppler_jax.simulator.finalists import start_order
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.native import in_threads, prepare, simulate_one
from doppler_jax.simulator.noise import Factors, draw_factors
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.types import Costs, Plans, Schedule, TaskGraph

if TYPE_CHECKING:
    import chex

    from doppler_jax.search.kernels import Aim, Trial
    from doppler_jax.simulator.native_kernels import NativeProblem


@dataclasses.dataclass(frozen=True)
class SearchProblem:
    """A problem and its objective, with the noise that all placements share."""

    graph: TaskGraph
    costs: Costs
    objective: Objective
    factors: Factors | None = None  # None without noise
    queue: str = "fifo"  # or `priority`, `in_order`
    # Seconds `[1]` of a plan that is good enough; inf stops whatever searches.
    enough_s: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1))
    minds_memory: bool = True  # else limits are not looked at

    @cached_property
    def is_limited(self) -> bool:
        """Whether some device could not keep every tensor and graph input at once."""
        return self.minds_memory and can_overflow(self.graph, self.costs)

    def memory_share(self, placement: np.ndarray, rank: np.ndarray) -> float:
        """Returns the peak of a plan's memory over the device's, at most; it may exceed 1."""
        ranks = {} if self.queue == "fifo" else {"priority": rank}
        options: dict[str, Any] = {"links": self.objective.links, "queue": self.queue, **ranks}
        schedule = simulate_one(self.graph, self.costs, placement, **options)
        peak = peak_memory_bytes(self.graph, self.costs, schedule)
        return float(np.max(peak / np.maximum(self.costs.capacity_bytes, 1.0), initial=0.0))

    @cached_property
    def rank(self) -> np.ndarray:
        """Ranks `[N]` of starts, 0 to N - 1: topological, by b-level where a queue looks."""
        rank = np.argsort(topological_order(self.graph))
        if self.queue != "fifo":
            rank = np.argsort(np.lexsort((rank, -b_level(self.graph, self.costs))))
        return rank.astype(np.float64)

    @cached_property
    def aim(self) -> Aim:
        """The same for compiled code."""
        from doppler_jax.search.kernels import Aim
        from doppler_jax.simulator.memory_kernels import prepare_memory
        from doppler_jax.simulator.native_kernels import Entry

        graph, costs, n = self.graph, self.costs, self.graph.num_tasks
        devices = costs.num_devices
        problem = prepare(graph, costs)
        readers = np.repeat(np.arange(n), np.diff(problem.in_first).astype(int))
        out_in = np.lexsort((readers, problem.in_tensor, problem.in_producer))
        reads = len(problem.home)
        compute = np.empty((0, n))
        items = np.empty((0, graph.num_inputs + graph.num_tensors, devices))
        if self.factors is not None:
            compute = self.factors.compute
            items = np.concatenate([self.factors.inputs, self.factors.transfer], axis=1)
        level, links = self.objective.quantile, self.objective.links
        discipline = find_discipline(self.queue)
        waits = discipline.waits
        is_serial, has_homes = links == "serial", reads > 0
        is_bare = not (
            (self.is_limited and not waits)
            or len(problem.handling_s)
            or self.factors is not None
            or (graph.input_maker >= 0).any()
        )
        # Limits, and links on which a move changes what is before it.
        is_held = self.is_limited or links == "duplex" or (is_serial and has_homes)
        return Aim(
            simulate=Entry(),
            problem=problem,
            links=LINKS.index(links),
            switches=discipline.switches,
            waits=waits,
            near_first=np.stack([problem.in_first, problem.first_move - np.uint32(reads)]),
            near=np.stack([problem.in_producer, problem.reader[reads:]]),
            input_s=_input_s(problem),
            out_in=out_in.astype(np.uint32),
            compute_factor=np.array(compute, np.float64),
            item_factor=np.array(items, np.float64),
            quantile=np.nan if level is None else level,
            memory=prepare_memory(graph, costs, problem, costs.capacity_bytes),
            capacity_bytes=np.array(costs.capacity_bytes[: devices * self.is_limited], float),
            is_plain=waits and is_bare and not is_held,
            is_listed=is_bare and links == "parallel",
        )

    def make_trial(
        self,
        placement: np.ndarray,
        order: np.ndarray,
        rank: np.ndarray | None = None,
        queue: str | None = None,
    ) -> Trial:
        """Returns what executes a plan, arrays `[N]` which may change; for one thread.

        It does so under another queue if one is given.
        """
        from doppler_jax.search.kernels import Trial
        from doppler_jax.simulator.memory_kernels import make_memory_work
        from doppler_jax.simulator.native_kernels import make_rows, make_work

        aim, limited = self.aim, self.is_limited
        factors = aim.compute_factor, aim.item_factor
        times = {"schedule": limited, "transfers": limited}
        discipline = find_discipline(queue or self.queue)
        # Under `in_order` ranks would take the place of the order.
        looks = discipline.ranked and not discipline.waits
        ranks = rank[None] if rank is not None and looks else None
        rows = make_rows(aim.problem, placement[None], ranks, order[None], factors, **times)
        room = make_work(aim.problem), make_memory_work(aim.memory)
        return Trial(rows, *room, np.empty(len(aim.compute_factor)), discipline.switches)

    @cached_property
    def work_conserving(self) -> SearchProblem:
        """The problem under `priority`, where every order is legal, if it is `in_order`."""
        if self.queue != "in_order":
            return self
        return dataclasses.replace(self, queue="priority")

    @cached_property
    def first_come(self) -> SearchProblem:
        """The problem under `fifo`, which looks at no order."""
        return dataclasses.replace(self, queue="fifo")

    def ordered(self, placements: np.ndarray) -> Plans:
        """Returns plans of placements `[B, N]`, with the problem's ranks.

        Under `in_order` with those of the starts that these ranks lead to.
        """
        ranks = np.tile(self.rank, (len(placements), 1))
        if self.queue == "in_order":
            for k, placement in enumerate(placements):
                ranks[k] = self.order_of(placement, self.rank)
        return Plans(np.asarray(placements, np.int64), ranks)

    def ranked(self, plans: Plans) -> Plans:
        """Returns plans, with the problem's ranks if they have none."""
        return plans if len(plans.ranks) else self.ordered(plans.placements)

    def order_of(self, placement: np.ndarray, rank: np.ndarray | None) -> np.ndarray:
        """Returns the order of starts `[N]`, as ranks, under `priority`, or `fifo` without."""
        options: dict[str, Any] = {"links": self.objective.links}
        if rank is not None:
            options |= {"queue": "priority", "priority": rank}
        schedule = simulate_one(self.graph, self.costs, placement, **options)
        return start_order(schedule, self.rank)

    def score(self, plans: Plans) -> tuple[np.ndarray, np.ndarray]:
        """Returns values and energies `[B]` of plans, in seconds.

        An energy is what a search makes small; a value is inf where memory is exceeded.
        """
        from doppler_jax.search.kernels import score_rows

        count, n = len(plans.placements), self.graph.num_tasks
        value_s, energy = np.full((2, count), np.inf)
        placements = np.ascontiguousarray(plans.placements, np.uint32)
        ranks = np.ascontiguousarray(plans.ranks, np.float64)
        orders = np.zeros((count, 0), np.uint32)  # to sort may take as long as to simulate
        if self.aim.waits:
            orders = np.argsort(ranks, axis=1, kind="stable").astype(np.uint32)

        def run(parts: Iterator[slice]) -> bool:
            empty = np.zeros(n, np.uint32)
            trial = self.make_trial(empty, empty.copy(), np.zeros(n))
            for part in parts:
                given = placements[part], ranks[part], orders[part]
                score_rows(self.aim, trial, *given, value_s[part], energy[part])
            return True

        if count and n:
            in_threads(run, count, n * self.objective.simulations)
        return value_s, energy


def make_search_problem(
    graph: TaskGraph,
    costs: Costs,
    objective: Objective,
    key: chex.PRNGKey | None = None,
    queue: str = "fifo",
) -> SearchProblem:
    """Returns a problem; the key, which is consumed, is of the noise if there is any."""
    factors = None
    if objective.num_noise:
        assert key is not None
        sigma = objective.noise_sigma
        factors = draw_factors(key, graph, costs.num_devices, objective.num_noise, sigma, sigma)
    return SearchProblem(graph, costs, objective, factors, queue)


def can_overflow(graph: TaskGraph, costs: Costs) -> bool:
    """Returns whether some device could not hold every tensor and graph input at once."""
    total = np.sum(costs.tensor_bytes, dtype=float) + np.sum(costs.input_bytes, dtype=float)
    return bool(graph.num_tasks) and bool(total > np.min(costs.capacity_bytes))


def _input_s(problem: NativeProblem) -> np.ndarray:
    """Returns when each task has its graph inputs on each device `[N, D]`, without waiting.

    Those with a maker are left out: where they are depends on the placement.
    """
    from doppler_jax.simulator.native_kernels import NOBODY

    there_s = np.zeros(problem.compute_s.shape)
    read = np.flatnonzero(problem.maker == NOBODY)
    home = problem.home[read]
    move_s = problem.latency_s[home] + (
        problem.num_bytes[read, None] * problem.seconds_per_byte[home]
    )
    np.maximum.at(there_s, problem.reader[read], move_s)
    return there_s


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The float64 oracle's word on a placement."""

    value_s: float  # the objective; inf where a device has not the memory
    makespan_s: float  # without noise
    schedule: Schedule  # without noise
    overflow: str  # "device 1 needs 3 of 2 bytes", or empty


def judge(
    graph: TaskGraph,
    costs: Costs,
    placement: np.ndarray,
    objective: Objective,
    factors: Factors | None = None,
    priority: np.ndarray | None = None,
    queue: str = "priority",
) -> Judgement:
    """Returns what a placement `[N]` is worth by the oracle, or its equal.

    Args:
      graph: the task graph.
      costs: its costs.
      placement: `[N]` devices.
      objective: what counts.
      factors: the noise, if the objective has any.
      priority: `[N]` ranks of another queue in place of `fifo`.
      queue: which one.
    """
    options: dict[str, Any] = {"links": objective.links}
    if priority is not None:
        options |= {"queue": queue, "priority": priority}
    # Equal in every bit; until compiled code is there, plain Python is.
    run = partial(simulate_one if is_compiled() else simulate_oracle, graph, costs, placement)
    schedule = run(**options)
    makespan = value = makespan_s(schedule)
    if factors is not None:
        draws_s = [makespan_s(run(**options, **draw)) for draw in factors.draws()]
        value = float(objective.statistic(np.array(draws_s)))
    overflow = ""
    if can_overflow(graph, costs):
        peak, capacity = peak_memory_bytes(graph, costs, schedule), costs.capacity_bytes
        for d in np.flatnonzero(peak > capacity)[:1]:
            overflow = (
                f"device {d} needs {peak[d]:.6g} bytes of memory and has {capacity[d]:.6g}"
            )
            value = np.inf
    return Judgement(value, makespan, schedule, overflow)
