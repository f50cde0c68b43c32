"""Plain-Python event simulator in float64: the judge of the vectorised one.

Follows DESIGN's rules for work-conserving execution literally, with one heap of
events and one ready heap per device, and shares no code with `simulate.py`.
Makespans that are reported to a user come from here.
"""

import heapq
import math

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.types import RESIDENT, Costs, Schedule, TaskGraph


def simulate_oracle(
    graph: TaskGraph,
    costs: Costs,
    placement: ArrayLike,
    *,
    queue: str = "fifo",
    priority: ArrayLike | None = None,
) -> Schedule:
    """Returns the schedule of one placement under `parallel` links, transfers included.

    Args:
      graph: the task graph.
      costs: its costs, seconds.
      placement: `[N]` device of each task.
      queue: `fifo` (earliest ready first) or `priority` (smallest rank first); ties go
        to the smaller task id.
      priority: `[N]` rank of each task, for `priority` only.

    Returns:
      The schedule. A task that waits for one which cannot run on its device
      (`compute_s` inf) starts and finishes at inf.
    """
    run = _Run(graph, costs, np.asarray(placement), _ranks(graph, queue, priority))
    while run.events:
        now = run.events[0][0]
        if math.isinf(now):
            break
        run.drain(now)
        while run.start_best(now):
            run.drain(now)
    return run.schedule()


def _ranks(graph: TaskGraph, queue: str, priority: ArrayLike | None) -> list[float] | None:
    if queue == "fifo":
        return None
    if queue != "priority":
        raise ValueError(f"unknown queue {queue!r}; known: fifo, priority")
    if priority is None:
        raise ValueError("queue 'priority' needs a priority for every task")
    ranks = np.asarray(priority, dtype=np.float64)
    if ranks.shape != (graph.num_tasks,):
        raise ValueError(f"priority has shape {ranks.shape}, expected ({graph.num_tasks},)")
    return ranks.tolist()


class _Run:
    """State of one simulated execution."""

    def __init__(
        self, graph: TaskGraph, costs: Costs, placement: np.ndarray, ranks: list[float] | None
    ) -> None:
        n, d = graph.num_tasks, costs.num_devices
        self.costs = costs
        self.device: list[int] = placement.tolist()
        self.ranks = ranks
        self.start_s = [math.inf] * n
        self.finish_s = [math.inf] * n
        self.missing = [0] * n  # inputs that have not arrived
        self.made: list[list[int]] = [[] for _ in range(n)]  # tensors of each task
        self.readers: list[list[int]] = [[] for _ in range(graph.num_tensors)]
        self.idle = [True] * d
        self.ready: list[list[tuple[float, int]]] = [[] for _ in range(d)]
        self.events: list[tuple[float, int, tuple[int, ...]]] = []  # (time, sequence, readers)
        self.finishing: dict[int, int] = {}  # event sequence -> task that finishes
        self.sequence = 0
        self.transfers: list[tuple[int, int, int, float, float]] = []
        for x, v in enumerate(graph.tensor_producer.tolist()):
            self.made[v].append(x)
        for x, v in zip(graph.edge_tensor.tolist(), graph.edge_reader.tolist(), strict=True):
            self.readers[x].append(v)
            self.missing[v] += 1
        self._request_inputs(graph)
        self._push(0.0, ())
        for v in range(n):
            if self.missing[v] == 0:
                self._make_ready(v, 0.0)

    def _request_inputs(self, graph: TaskGraph) -> None:
        pairs = zip(
            graph.input_edge_input.tolist(), graph.input_edge_reader.tolist(), strict=True
        )
        for i, v in pairs:
            home, here = int(graph.input_home[i]), self.device[v]
            if home not in (RESIDENT, here):
                self.missing[v] += 1
                self._push(self._move_s(float(self.costs.input_bytes[i]), home, here), (v,))

    def _move_s(self, num_bytes: float, source: int, destination: int) -> float:
        return float(self.costs.latency_s[source, destination]) + num_bytes * float(
            self.costs.seconds_per_byte[source, destination]
        )

    def _push(self, time_s: float, readers: tuple[int, ...]) -> int:
        self.sequence += 1
        heapq.heappush(self.events, (time_s, self.sequence, readers))
        return self.sequence

    def _make_ready(self, v: int, now: float) -> None:
        key = now if self.ranks is None else self.ranks[v]
        heapq.heappush(self.ready[self.device[v]], (key, v))

    def drain(self, now: float) -> None:
        """Handles every completion and arrival of this instant."""
        while self.events and self.events[0][0] == now:
            _, sequence, readers = heapq.heappop(self.events)
            if sequence in self.finishing:
                self._finish(self.finishing.pop(sequence), now)
            for v in readers:
                self.missing[v] -= 1
                if self.missing[v] == 0:
                    self._make_ready(v, now)

    def _finish(self, u: int, now: float) -> None:
        here = self.device[u]
        self.idle[here] = True
        for x in self.made[u]:
            groups: dict[int, list[int]] = {}
            for v in self.readers[x]:
                groups.setdefault(self.device[v], []).append(v)
            for there in sorted(groups):
                arrival = now
                if there != here:
                    arrival += self._move_s(float(self.costs.tensor_bytes[x]), here, there)
                    self.transfers.append((x, here, there, now, arrival))
                self._push(arrival, tuple(groups[there]))

    def start_best(self, now: float) -> bool:
        """Starts the single best ready task over all idle devices, if there is one."""
        best = min(
            (queue[0] for d, queue in enumerate(self.ready) if self.idle[d] and queue),
            default=None,
        )
        if best is None:
            return False
        v = best[1]
        d = self.device[v]
        heapq.heappop(self.ready[d])
        self.idle[d] = False
        self.start_s[v] = now
        self.finish_s[v] = now + float(self.costs.compute_s[v, d])
        self.finishing[self._push(self.finish_s[v], ())] = v
        return True

    def schedule(self) -> Schedule:
        """Returns what happened."""
        columns = np.array(self.transfers, dtype=np.float64).reshape(-1, 5).T
        return Schedule(
            placement=np.array(self.device, dtype=np.int64),
            start_s=np.array(self.start_s, dtype=np.float64),
            finish_s=np.array(self.finish_s, dtype=np.float64),
            transfer_tensor=columns[0].astype(np.int64),
            transfer_source=columns[1].astype(np.int64),
            transfer_destination=columns[2].astype(np.int64),
            transfer_start_s=columns[3],
            transfer_finish_s=columns[4],
        )


def makespan_s(schedule: Schedule) -> float:
    """Returns the latest finish, seconds; 0 for a schedule without tasks."""
    return float(np.max(schedule.finish_s, initial=0.0))
