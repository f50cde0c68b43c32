"""Plain-Python event simulator in float64: the judge of the native and the lock-step one.

Follows the rules of `docs/how/simulator.md` literally, with one heap of events and one ready
heap per device, and shares no code with what it judges.
"""

import dataclasses
import heapq
import math
from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.objective import LINKS
from doppler_jax.simulator.disciplines import ReadySet, check_ranks, find_discipline
from doppler_jax.simulator.durations import (
    check_placement,
    list_reads,
    move_seconds,
    task_seconds,
)
from doppler_jax.types import Costs, Plan, Schedule, TaskGraph


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
    input_factor: ArrayLike | None = None,
) -> Schedule:
    """Returns the schedule of one placement, transfers included.

    At one instant, completions and arrivals are handled and transfers started, until
    there are none left; then the single best task over all idle devices starts; and again.

    A graph input with a home is requested at time 0 by each other device that reads it. On
    a `serial` link the inputs go first, in the order of their ids; `duplex` takes an input
    before a tensor that was requested at time 0 too.

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
      input_factor: `[I, D]` multiplies those of each graph input's.

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
    ready = [
        ReadySet(discipline, keys, np.flatnonzero(device == d).tolist())
        for d in range(costs.num_devices)
    ]
    seconds = task_seconds(graph, costs, device, compute_factor)
    transfers = list_transfers(graph, costs, device, transfer_factor, input_factor)
    run = _Run(graph, device, seconds, transfers, ready, Links(links))
    run.play()
    return make_schedule(device, run.start_s, run.finish_s, run.carried)


def simulate_plan(
    graph: TaskGraph, costs: Costs, plan: Plan, links: str = "parallel"
) -> Schedule:
    """Returns the schedule of a plan by its own queue."""
    order = {} if plan.queue == "fifo" else {"priority": plan.priority}
    return simulate_oracle(graph, costs, plan.placement, links=links, queue=plan.queue, **order)


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
        # Transfers that hold the same resources wait in one heap, in the order of service.
        self.waiting: dict[tuple[Hashable, ...], list[tuple[tuple[float, ...], Transfer]]] = {}

    def request(self, transfer: Transfer, now_s: float) -> None:
        """Lets a transfer wait for its link."""
        self.num_requests += 1
        order: tuple[float, ...] = (self.num_requests,)
        if self.links == "duplex":
            x = transfer.item
            order = (now_s, x >= 0, max(x, ~x), transfer.destination)
        queue = self.waiting.setdefault(self._needs(transfer), [])
        heapq.heappush(queue, (order, transfer))

    def start_next(self, now_s: float) -> Transfer | None:
        """Starts and returns the transfer that is next at this instant, if one can start."""
        heads = [
            (queue[0][0], needs)
            for needs, queue in self.waiting.items()
            if self.busy.isdisjoint(needs)
        ]
        if not heads:
            return None
        _, needs = min(heads)
        _, transfer = heapq.heappop(self.waiting[needs])
        if not self.waiting[needs]:
            del self.waiting[needs]
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


def list_transfers(
    graph: TaskGraph,
    costs: Costs,
    device: np.ndarray,
    transfer_factor: ArrayLike | None = None,
    input_factor: ArrayLike | None = None,
) -> list[list[Transfer]]:
    """Returns the transfers of each task's tensors `[N]`, and those of graph inputs at the end.

    Each list is by id and destination.

    Args:
      graph: the task graph, N tasks and T tensors.
      costs: its costs on D devices.
      device: `[N]` of each task.
      transfer_factor: `[T, D]`, see `simulate_oracle`.
      input_factor: `[I, D]`, likewise.
    """
    move_s = move_seconds(graph, costs, device, transfer_factor, input_factor)
    reads = list_reads(graph, device)
    readers: dict[tuple[int, int, int, int], list[int]] = {}
    for x, v, here, there in np.stack(reads, axis=1)[reads.moves].tolist():
        readers.setdefault((max(x, ~x), x, here, there), []).append(v)
    producer = np.append(graph.tensor_producer, np.full(graph.num_inputs, -1))
    transfers: list[list[Transfer]] = [[] for _ in range(graph.num_tasks + 1)]
    for (_, x, here, there), waiting in sorted(readers.items()):
        seconds = float(move_s[x, there])
        transfers[producer[x]].append(Transfer(x, here, there, seconds, waiting))
    return transfers


def make_schedule(
    device: np.ndarray, start_s: ArrayLike, finish_s: ArrayLike, carried: Iterable[Transfer]
) -> Schedule:
    """Returns the schedule of tasks `[N]` and of the transfers that were carried.

    Transfers are listed by (start, item, destination).
    """
    rows = sorted((t.start_s, t.item, t.destination, t.source, t.duration_s) for t in carried)
    sent_s, item, destination, source, seconds = np.array(rows, np.float64).reshape(-1, 5).T
    return Schedule(
        placement=device,
        start_s=np.array(start_s, dtype=np.float64),
        finish_s=np.array(finish_s, dtype=np.float64),
        transfer_tensor=item.astype(np.int64),
        transfer_source=source.astype(np.int64),
        transfer_destination=destination.astype(np.int64),
        transfer_start_s=sent_s,
        transfer_finish_s=sent_s + seconds,
    )


class _Run:
    """State of one simulated execution."""

    def __init__(
        self,
        graph: TaskGraph,
        device: np.ndarray,
        task_s: np.ndarray,
        transfers: list[list[Transfer]],
        ready: list[ReadySet],
        links: Links,
    ) -> None:
        n, reads = device.size, list_reads(graph, device)
        self.device: list[int] = device.tolist()
        self.task_s: list[float] = task_s.tolist()
        self.transfers = transfers  # of each task's tensors, and of graph inputs
        self.links = links
        self.local_readers: list[list[int]] = [[] for _ in range(n)]  # one per tensor read
        for e in np.flatnonzero(~reads.moves[: graph.num_edges]).tolist():
            producer = graph.tensor_producer[graph.edge_tensor[e]]
            self.local_readers[producer].append(int(graph.edge_reader[e]))
        waits = reads.reader[reads.moves | (reads.item >= 0)]
        self.missing: list[int] = np.bincount(waits, minlength=n).tolist()
        self.start_s = [math.inf] * n
        self.finish_s = [math.inf] * n
        self.ready = ready  # of each device
        self.idle = [True] * len(ready)
        # (time, number, the task or transfer that ends then)
        self.events: list[tuple[float, int, int | Transfer]] = []
        self.num_events = 0
        self.carried: list[Transfer] = []  # in the order of their starts

    def play(self) -> None:
        """Runs from time 0 until nothing happens any more."""
        now = 0.0
        self._request(self.transfers[-1], now)
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
                    self.idle[self.device[ended]] = True
                    self._arrive(self.local_readers[ended], now)
                    self._request(self.transfers[ended], now)
            transfer = self.links.start_next(now)
            if transfer is None:
                return
            self.carried.append(transfer)
            self._end_at(now + transfer.duration_s, transfer)

    def _request(self, transfers: list[Transfer], now: float) -> None:
        for transfer in transfers:
            self.links.request(transfer, now)

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
