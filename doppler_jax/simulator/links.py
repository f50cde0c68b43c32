"""What carries tensors between devices, for the plain-Python simulators."""

import dataclasses
import heapq
import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.objective import LINKS
from doppler_jax.simulator.durations import input_seconds, transfer_seconds
from doppler_jax.types import RESIDENT, Costs, Schedule, TaskGraph


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
    one at a time and receives one at a time; of the waiting transfers whose two engines are
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
    """Returns the schedule of tasks `[N]` and of the transfers that were carried."""
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
