"""Plain-Python event simulator in float64: the judge of the native and the lock-step one.

Follows the rules of `docs/simulator.md` literally, with one heap of events and one ready heap
per device, and shares no code with what it judges.
"""

import dataclasses
import heapq
import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import task_edges
from doppler_jax.objective import LINKS
from doppler_jax.simulator.disciplines import ReadySet, check_ranks, find_discipline
from doppler_jax.simulator.durations import (
    check_placement,
    input_seconds,
    task_seconds,
    transfer_seconds,
)
from doppler_jax.types import RESIDENT, Costs, Schedule, TaskGraph


def simulate_oracle(
    graph: TaskGraph,
    costs: Costs,
    placement: ArrayLike,
    *,
    links: str = "parallel",
    queue: str = "fifo",
    priority: ArrayLike | None = None,
    compute_factor: ArrayLike | None = None,
    transfer_factor: ArrayLike | None = None,
) -> Schedule:
    """Returns the schedule of one placement, transfers included.

    At one instant, completions and arrivals are handled and transfers started, until
    there are none left; then the single best task over all idle devices starts; and again.

    A graph input with a home is requested at time 0 by each other device that reads it. On
    a `serial` link the inputs go first, in the order of their ids; `duplex` takes an input
    before a tensor that was requested at time 0 too. Noise does not touch them.

    Args:
      graph: the task graph, N tasks and T tensors.
      costs: its costs on D devices, seconds.
      placement: `[N]` device of each task.
      links: `parallel` (every transfer starts at once), `serial` (an ordered pair of
        devices carries one at a time, in the order in which the source finished the
        producers, then by tensor id) or `duplex` (a device sends one at a time and
        receives one at a time; of the waiting transfers that find both ports idle, that
        of smallest (request time, tensor id, destination) starts).
      queue: `fifo` (earliest ready first), `priority` (of the ready tasks the one of smallest
        rank first), `in_order` (a device takes its tasks by rank, and waits for the next
        one's inputs) or `random` (`priority` with a permutation as ranks, see
        `random_ranks`); ties go to the smaller task id.
      priority: `[N]` rank of each task; none under `fifo`.
      compute_factor: `[N]` multiplies the seconds of each task: one draw of `Factors`.
      transfer_factor: `[T, D]` multiplies those of each tensor's transfer to each device.

    Returns:
      The schedule. A task that waits for one which cannot run on its device
      (`compute_s` inf) starts and finishes at inf.

    Raises:
      ValueError: a name or a shape is wrong, a device does not exist, a factor is no
        positive number, the ranks of `random` are no permutation, or those of `in_order`
        have a reader before its producer.
    """
    device = check_placement(graph, costs.num_devices, placement)
    ranks = check_ranks(graph, queue, priority)
    keys, discipline = None if ranks is None else ranks.tolist(), find_discipline(queue)
    run = _Run(
        device,
        task_seconds(graph, costs, device, compute_factor),
        task_transfers(graph, costs, device, transfer_factor),
        [
            ReadySet(discipline, keys, np.flatnonzero(device == d).tolist())
            for d in range(costs.num_devices)
        ],
        Links(links),
    )
    run.expect_tensors(graph)
    for transfer in input_transfers(graph, costs, device):
        run.expect_input(transfer)
    run.play()
    return make_schedule(device, run.start_s, run.finish_s, run.carried)


def makespan_s(schedule: Schedule) -> float:
    """Returns the latest finish, seconds; 0 for a schedule without tasks."""
    return float(np.max(schedule.finish_s, initial=0.0))


@dataclasses.dataclass(slots=True)
class Transfer:
    """One tensor, or graph input, on its way from one device to another."""

    item: int  # tensor, or ~i for graph input i, as in `Schedule.transfer_tensor`
    source: int
    destination: int
    duration_s: float
    readers: list[int]  # tasks that wait for it
    request_s: float = 0.0
    start_s: float = math.inf  # when its link began to carry it


class Links:
    """Decides which waiting transfer starts next; knows no time but that of requests.

    `parallel`: every transfer starts when it is requested. `serial`: an ordered pair of
    devices carries one at a time, in the order of requests. `duplex`: a device sends
    one at a time and receives one at a time; of the waiting transfers whose two ports are
    idle the one of smallest (request time, graph inputs before tensors, id, destination)
    starts.
    """

    def __init__(self, links: str) -> None:
        if links not in LINKS:
            raise ValueError(f"unknown links {links!r}; known: {', '.join(LINKS)}")
        self.links = links
        self.busy: set[Hashable] = set()
        self.num_requests = 0
        self.num_waiting = 0
        # Transfers that hold the same resources wait in one heap, in the order of service.
        self.waiting: dict[tuple[Hashable, ...], list[tuple[tuple[float, ...], Transfer]]] = {}

    def request(self, transfer: Transfer) -> None:
        """Lets a transfer wait for its link."""
        self.num_requests += 1
        self.num_waiting += 1
        order: tuple[float, ...] = (self.num_requests,)
        if self.links == "duplex":
            x = transfer.item
            order = (transfer.request_s, x >= 0, x if x >= 0 else ~x, transfer.destination)
        queue = self.waiting.setdefault(self._needs(transfer), [])
        heapq.heappush(queue, (order, transfer))

    def start_next(self, now_s: float) -> Transfer | None:
        """Starts and returns the transfer that is next at this instant, if one can start."""
        if not self.num_waiting:
            return None
        heads = [
            (queue[0][0], needs)
            for needs, queue in self.waiting.items()
            if queue and self.busy.isdisjoint(needs)
        ]
        if not heads:
            return None
        _, needs = min(heads)
        _, transfer = heapq.heappop(self.waiting[needs])
        self.num_waiting -= 1
        self.busy.update(needs)
        transfer.start_s = now_s
        return transfer

    def end(self, transfer: Transfer) -> None:
        """Frees what the transfer held."""
        self.busy.difference_update(self._needs(transfer))

    def _needs(self, transfer: Transfer) -> tuple[Hashable, ...]:
        source, destination = transfer.source, transfer.destination
        if self.links == "parallel":
            return ()
        if self.links == "serial":
            return ((source, destination),)
        return (("send", source), ("receive", destination))


def task_transfers(
    graph: TaskGraph, costs: Costs, device: np.ndarray, factor: ArrayLike | None
) -> list[list[Transfer]]:
    """Returns the transfers of each task's tensors, by tensor id and destination.

    Args:
      graph: the task graph, N tasks and T tensors.
      costs: its costs on D devices.
      device: `[N]` of each task.
      factor: `[T, D]` multiplies the seconds of each tensor's transfer to each device.
    """
    move_s = transfer_seconds(graph, costs, device, factor)
    transfers: list[list[Transfer]] = [[] for _ in range(graph.num_tasks)]
    for (x, there), readers in _readers(graph.edge_tensor, graph.edge_reader, device):
        producer = int(graph.tensor_producer[x])
        here = int(device[producer])
        if there != here:
            seconds = float(move_s[x, there])
            transfers[producer].append(Transfer(x, here, there, seconds, readers))
    return transfers


def input_transfers(graph: TaskGraph, costs: Costs, device: np.ndarray) -> list[Transfer]:
    """Returns the transfers of graph inputs, by id and destination, for devices `[N]`."""
    move_s = input_seconds(graph, costs)
    transfers = []
    groups = _readers(graph.input_edge_input, graph.input_edge_reader, device)
    for (i, there), readers in groups:
        home = int(graph.input_home[i])
        if home not in (RESIDENT, there):
            transfers.append(Transfer(~i, home, there, float(move_s[i, there]), readers))
    return transfers


def make_schedule(
    device: np.ndarray, start_s: ArrayLike, finish_s: ArrayLike, carried: Sequence[Transfer]
) -> Schedule:
    """Returns the schedule of tasks `[N]` and of the transfers that were carried.

    Transfers are listed by (start, item, destination).
    """
    carried = sorted(carried, key=lambda t: (t.start_s, t.item, t.destination))
    transfer_start_s = np.array([t.start_s for t in carried], dtype=np.float64)
    return Schedule(
        placement=device,
        start_s=np.array(start_s, dtype=np.float64),
        finish_s=np.array(finish_s, dtype=np.float64),
        transfer_tensor=np.array([t.item for t in carried], dtype=np.int64),
        transfer_source=np.array([t.source for t in carried], dtype=np.int64),
        transfer_destination=np.array([t.destination for t in carried], dtype=np.int64),
        transfer_start_s=transfer_start_s,
        transfer_finish_s=transfer_start_s + [t.duration_s for t in carried],
    )


def _readers(
    item: np.ndarray, reader: np.ndarray, device: np.ndarray
) -> list[tuple[tuple[int, int], list[int]]]:
    """Returns ((item, device), its readers there), sorted, for all that is read."""
    groups: dict[tuple[int, int], list[int]] = {}
    for x, v, d in zip(item.tolist(), reader.tolist(), device[reader].tolist(), strict=True):
        groups.setdefault((x, d), []).append(v)
    return sorted(groups.items())


class _Run:
    """State of one simulated execution."""

    def __init__(
        self,
        device: np.ndarray,
        task_s: np.ndarray,
        transfers: list[list[Transfer]],
        ready: list[ReadySet],
        links: Links,
    ) -> None:
        n = device.size
        self.device: list[int] = device.tolist()
        self.task_s: list[float] = task_s.tolist()
        self.transfers = transfers  # of each task's tensors
        self.links = links
        self.local_readers: list[list[int]] = [[] for _ in range(n)]  # one per tensor read
        self.missing = [0] * n  # inputs that have not arrived
        self.start_s = [math.inf] * n
        self.finish_s = [math.inf] * n
        self.ready = ready  # of each device
        self.idle = [True] * len(ready)
        # (time, number, the task or transfer that ends then)
        self.events: list[tuple[float, int, int | Transfer]] = []
        self.num_events = 0
        self.carried: list[Transfer] = []  # in the order of their starts

    def expect_tensors(self, graph: TaskGraph) -> None:
        """Notes for how many tensors each task waits."""
        senders, readers = task_edges(graph)
        for u, v in zip(senders.tolist(), readers.tolist(), strict=True):
            self.missing[v] += 1
            if self.device[u] == self.device[v]:
                self.local_readers[u].append(v)

    def expect_input(self, transfer: Transfer) -> None:
        """Requests a graph input at time 0, for tasks that wait for it."""
        self.links.request(transfer)
        for v in transfer.readers:
            self.missing[v] += 1

    def play(self) -> None:
        """Runs from time 0 until nothing happens any more."""
        now = 0.0
        for v, missing in enumerate(self.missing):
            if missing == 0:
                self.ready[self.device[v]].add(v, now)
        while math.isfinite(now):
            self._drain(now)
            while self._start_best(now):
                self._drain(now)
            now = self.events[0][0] if self.events else math.inf

    def _drain(self, now: float) -> None:
        """Handles every completion and arrival of this instant, and starts transfers."""
        while True:
            while self.events and self.events[0][0] == now:
                _, _, ended = heapq.heappop(self.events)
                if isinstance(ended, Transfer):
                    self.links.end(ended)
                    self._arrive(ended.readers, now)
                else:
                    self._finish(ended, now)
            transfer = self.links.start_next(now)
            if transfer is None:
                return
            self.carried.append(transfer)
            self._end_at(now + transfer.duration_s, transfer)

    def _finish(self, u: int, now: float) -> None:
        self.idle[self.device[u]] = True
        self._arrive(self.local_readers[u], now)
        for transfer in self.transfers[u]:
            transfer.request_s = now
            self.links.request(transfer)

    def _arrive(self, readers: list[int], now: float) -> None:
        for v in readers:
            self.missing[v] -= 1
            if self.missing[v] == 0:
                self.ready[self.device[v]].add(v, now)

    def _end_at(self, time_s: float, what: int | Transfer) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time_s, self.num_events, what))

    def _start_best(self, now: float) -> bool:
        """Starts the single best ready task over all idle devices, if there is one."""
        firsts = (ready.first() for d, ready in enumerate(self.ready) if self.idle[d])
        best = min((first for first in firsts if first is not None), default=None)
        if best is None:
            return False
        v = best[1]
        d = self.device[v]
        self.ready[d].take()
        self.idle[d] = False
        self.start_s[v] = now
        self.finish_s[v] = now + self.task_s[v]
        self._end_at(self.finish_s[v], v)
        return True
