"""ETF and m-ETF: of all ready tasks and devices, the pair of earliest start.

m-ETF passes by devices whose memory is full; m-SCT (`m_sct.py`) adds favourites.
"""

import dataclasses
from heapq import heappop, heappush

import numpy as np

from doppler_jax.baselines.fitting import Holdings
from doppler_jax.baselines.listing import ListSchedule, list_readers
from doppler_jax.graphs.levels import b_level
from doppler_jax.simulator.memory import check_capacity
from doppler_jax.types import Costs, Schedule, TaskGraph


def etf(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` of ETF; see `etf_schedule`."""
    return etf_schedule(graph, costs).placement


def etf_schedule(graph: TaskGraph, costs: Costs) -> Schedule:
    """Returns the schedule that ETF plans; executed by `fifo` queues it may differ.

    Of equal starts the task of larger static level (the b-level without transfers) is
    taken, then the smaller task id, then the smaller device.

    Reference: Hwang, Chow, Anger and Lee, "Scheduling precedence graphs in systems with
    interprocessor communication times", 1989, for equal devices. On unequal ones we keep
    to the letter: a slow device that is free sooner is preferred. Transfers as in `heft`.
    """
    zeros = np.zeros_like(costs.latency_s)
    free = dataclasses.replace(costs, latency_s=zeros, seconds_per_byte=zeros)
    order = np.argsort(-b_level(graph, free), kind="stable")
    return schedule_earliest(graph, costs, order)


def m_etf(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` of m-ETF; see `m_etf_schedule`."""
    return m_etf_schedule(graph, costs).placement


def m_etf_schedule(graph: TaskGraph, costs: Costs) -> Schedule:
    """Returns the schedule that m-ETF plans; executed by `fifo` queues it may differ.

    A device may take a task if what it holds (`Holdings`: outputs, received copies and
    graph inputs of all tasks placed there, nothing freed) and what the task adds fit into
    its capacity. So a placement that is returned never exceeds it in any execution.

    Reference: Jeon et al., "Baechi: fast device placement of machine learning graphs",
    2020. Theirs lets a memory hold a task's outputs until its readers have run; ours is
    stricter, because the executed order may differ from the planned one. Ties go to the
    smaller task id, then to the smaller device (theirs: topological order). Transfers as
    in `heft`; their variant with one transfer at a time per device is left out.

    Raises:
      ValueError: a task fits on no device that can run it. As in the paper nothing is
        undone; a placement that fits may exist.
    """
    check_capacity(graph, costs)
    return schedule_earliest(graph, costs, np.arange(graph.num_tasks), limited=True)


def schedule_earliest(
    graph: TaskGraph,
    costs: Costs,
    order: np.ndarray,
    *,
    favourite: np.ndarray | None = None,
    limited: bool = False,
) -> Schedule:
    """Returns the schedule in which the task that can start earliest is always next.

    Of all tasks whose producers are placed, and all devices, the pair of earliest start
    is taken; tasks are appended to a device, gaps stay. With favourites, a device that
    ran u and can start u's favourite child no later than any other device is awake once
    the child's producers have finished: it waits for the child, and starts nothing else
    but urgent tasks, whose inputs could have reached every device by then.

    Each device keeps two heaps of the ready tasks, those that wait for inputs (by their
    arrival) and those that have them (by rank), so that a step costs O(D log N).

    Args:
      graph: the task graph, N tasks.
      costs: its costs on D devices.
      order: `[N]` tasks; of equal starts the first in this order is taken, then the
        smaller device.
      favourite: `[N]` favourite child of each task, -1 without one.
      limited: refuse devices whose memory a task would exceed, nothing being freed.

    Raises:
      ValueError: a task fits on no device.
    """
    run = _Earliest(graph, costs, order, favourite, Holdings(graph, costs) if limited else None)
    for _ in range(graph.num_tasks):
        run.place_next()
    return run.plan.schedule()


class _Earliest:
    """The state of one call: a task is known by its rank in the order."""

    def __init__(
        self,
        graph: TaskGraph,
        costs: Costs,
        order: np.ndarray,
        favourite: np.ndarray | None,
        holdings: Holdings | None,
    ) -> None:
        n, d = graph.num_tasks, costs.num_devices
        self.plan = ListSchedule(graph, costs)
        self.order = order.tolist()
        self.rank = np.argsort(order).tolist()
        self.favourite: list[int] = [-1] * n if favourite is None else favourite.tolist()
        self.holdings = holdings
        self.readers = list_readers(graph)
        self.missing = np.bincount(graph.edge_reader, minlength=n).tolist()
        self.placed = [False] * n
        self.can_run: list[list[bool]] = np.isfinite(self.plan.compute_s).tolist()
        self.has_favourites = favourite is not None
        self.arrival_s: list[list[float]] = [[]] * n  # per device; empty until ready
        self.free_s = [0.0] * d
        self.last = [-1] * d  # task that the device ran last
        self.now_s = 0.0  # latest start; no task starts before it any more
        self.ready = [_Queue() for _ in range(d)]
        self.urgent = [_Queue() for _ in range(d)]
        for v in range(n):
            if self.missing[v] == 0:
                self._make_ready(v)

    def place_next(self) -> None:
        """Places the pair of earliest start, then of smallest rank, then device."""
        proposals = [
            (*proposal, d)
            for d in range(len(self.free_s))
            if (proposal := self._proposal(d)) is not None
        ]
        start_s, rank, d = min(proposals)
        v = self.order[rank]
        self.plan.put(v, d, start_s)
        self.placed[v] = True
        self.free_s[d], self.last[d] = float(self.plan.finish_s[v]), v
        self.now_s = start_s
        if self.holdings is not None:
            self.holdings.put(v, d)
        for reader in self.readers[v]:
            self.missing[reader] -= 1
            if self.missing[reader] == 0:
                self._make_ready(reader)

    def _make_ready(self, v: int) -> None:
        self.arrival_s[v] = arrival_s = self.plan.arrival_s(v).tolist()
        able = [d for d, can_run in enumerate(self.can_run[v]) if can_run]
        everywhere_s = max(arrival_s[d] for d in able)
        for d in able:
            self.ready[d].add(arrival_s[d], self.rank[v])
            if self.has_favourites:
                self.urgent[d].add(everywhere_s, self.rank[v])

    def _proposal(self, d: int) -> tuple[float, int] | None:
        """Returns start and rank of the task that device `d` would take next."""
        free_s = max(self.free_s[d], self.now_s)
        best = self._first(self.ready[d], d, free_s)
        child = self.favourite[self.last[d]] if self.last[d] >= 0 else -1
        if best is None or child < 0 or not self._is_awake(d, child, best[0]):
            return best
        urgent = self._first(self.urgent[d], d, free_s)
        child_start_s = max(self.arrival_s[child][d], free_s)
        if urgent is not None and urgent[0] <= child_start_s:
            return urgent
        return child_start_s, self.rank[child]

    def _is_awake(self, d: int, child: int, now_s: float) -> bool:
        """Says whether device `d`, free at `now_s`, waits for the favourite child."""
        arrival_s = self.arrival_s[child]
        if self.placed[child] or not arrival_s or not self._may_take(child, d):
            return False
        if self.plan.released_s(child) > now_s:
            return False
        start_s = max(arrival_s[d], now_s)
        others = (e for e in range(len(arrival_s)) if e != d and self._may_take(child, e))
        return all(start_s <= max(arrival_s[e], self.free_s[e], now_s) for e in others)

    def _first(self, queue: "_Queue", d: int, free_s: float) -> tuple[float, int] | None:
        """Returns the first start and rank of a queue, rid of what `d` cannot take."""
        while (first := queue.first(free_s)) is not None:
            v = self.order[first[1]]
            if not self.placed[v] and self._may_take(v, d):
                return first
            queue.drop_first()
        return None

    def _may_take(self, v: int, d: int) -> bool:
        if not self.can_run[v][d]:
            return False
        if self.holdings is None or self.holdings.fits(v, d):
            return True
        self.can_run[v][d] = False
        if not any(self.can_run[v]):
            raise ValueError(
                f"task {v} fits on no device that can run it: device {d} has "
                f"{self.holdings.capacity[d]:.6g} bytes, {self.holdings.used[d]:.6g} are taken "
                f"and the task adds {self.holdings.needed(v, d):.6g}. Memory counts as never "
                "freed here, so that other placements may fit"
            )
        return False


class _Queue:
    """Ready tasks by the start that one device, whose free time only grows, can give them."""

    def __init__(self) -> None:
        self._coming: list[tuple[float, int]] = []  # (arrival, rank)
        self._there: list[int] = []  # ranks

    def add(self, arrival_s: float, rank: int) -> None:
        heappush(self._coming, (arrival_s, rank))

    def first(self, free_s: float) -> tuple[float, int] | None:
        """Returns start and rank of the first task, None without one."""
        while self._coming and self._coming[0][0] <= free_s:
            heappush(self._there, heappop(self._coming)[1])
        if self._there:
            return free_s, self._there[0]
        return self._coming[0] if self._coming else None

    def drop_first(self) -> None:
        """Removes what `first` returned."""
        if self._there:
            heappop(self._there)
        else:
            heappop(self._coming)
