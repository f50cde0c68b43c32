"""List schedules of which every device can hold what lies there at any time.

For list schedulers whose own plans exceed a memory, and for searches to start from.
"""

from bisect import bisect_left, bisect_right
from heapq import heapify, heappop, heappush

import numpy as np

from doppler_jax.baselines.listing import ListSchedule, list_readers
from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.simulator.memory import stay_to_the_end
from doppler_jax.types import RESIDENT, Costs, Plan, TaskGraph

MOST_TASKS = 20_000
"""Tasks of all the plans that `plans_within_memory` tries: a few seconds of plain Python."""

LOOKS = 64
"""Tasks of the frontier that a plan looks at for one that has room somewhere."""


def plans_within_memory(
    graph: TaskGraph, costs: Costs, placements: np.ndarray, rank: np.ndarray
) -> list[Plan]:
    """Returns plans that are to fit into memory, from placements and an order that do not.

    They come in that order, or depth first; tasks go where a placement has them while there
    is room, or each where it finishes earliest. Those that get stuck are left out, so
    there may be none. Under `parallel` links each fits under `in_order`, without noise,
    handling and carried inputs, whose homes are not known while a plan grows.

    Args:
      graph: the task graph.
      costs: its costs, with capacities.
      placements: `[S, N]` devices.
      rank: `[N]` ranks, least first.
    """
    plans = []
    orders = rank, depth_first_rank(graph, costs, rank)
    ways = [(order, meant) for order in orders for meant in (*placements, None)]
    for order, meant in ways[: max(MOST_TASKS // max(graph.num_tasks, 1), 1)]:
        plan = plan_within_memory(graph, costs, order, meant)
        if plan is not None:
            plans.append(plan)
    return plans


def plan_within_memory(
    graph: TaskGraph, costs: Costs, rank: np.ndarray, placement: np.ndarray | None = None
) -> Plan | None:
    """Returns a plan whose tasks are put behind each other where there is room for them.

    Of the frontier comes the task of least rank that has room somewhere. It goes where
    `placement` `[N]` has it, if there is room; else, and without one, where it finishes
    earliest. What is meant for the same device then follows it there, so that what belongs
    together stays together. None if nothing in the frontier has room.
    """
    run = _Run(graph, costs, placement)
    readers = list_readers(graph)
    missing = np.bincount(graph.edge_reader, minlength=graph.num_tasks).tolist()
    frontier = [(rank[v], v) for v in range(graph.num_tasks) if missing[v] == 0]
    heapify(frontier)
    order = []
    while frontier:
        waiting: list[tuple[float, int]] = []
        while frontier and len(waiting) < LOOKS and not run.put(frontier[0][1]):
            waiting.append(heappop(frontier))
        if not frontier or len(waiting) == LOOKS:
            return None
        _, v = heappop(frontier)
        order.append(v)
        for reader in readers[v]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heappush(frontier, (rank[reader], reader))
        for entry in waiting:
            heappush(frontier, entry)
    return Plan(run.plan.placement.astype(np.int64), np.argsort(order), "in_order")


def depth_first_rank(graph: TaskGraph, costs: Costs, rank: np.ndarray) -> np.ndarray:
    """Returns ranks `[N]` by which what is begun is finished first.

    A task comes right behind its producers. Of these, and of the results, comes first what
    needs most memory beyond what it leaves (after Liu 1987, for trees; what several tasks
    read counts for each), then the one of least rank.
    """
    n = graph.num_tasks
    left = np.bincount(graph.tensor_producer, costs.tensor_bytes, n)
    senders, readers = task_edges(graph)
    producers: list[list[int]] = [[] for _ in range(n)]
    for u, v in sorted(set(zip(senders.tolist(), readers.tolist(), strict=True))):
        producers[v].append(u)
    need = left.copy()
    for v in topological_order(graph).tolist():
        producers[v].sort(key=lambda u: (left[u] - need[u], rank[u]))
        held = 0.0
        for u in producers[v]:
            need[v] = max(need[v], held + need[u])
            held += left[u]
        need[v] = max(need[v], held + left[v])
    results = np.setdiff1d(np.arange(n), senders).tolist()
    results.sort(key=lambda v: (left[v] - need[v], rank[v]))
    place, stack = dict[int, int](), results[::-1]
    while stack:
        rest = [u for u in producers[stack[-1]] if u not in place]
        if rest:
            stack += rest[::-1]
        else:
            place.setdefault(stack.pop(), len(place))
    return np.array([place[v] for v in range(n)], np.int64)


class _Run:
    """A list schedule that grows, and what lies on each device when.

    By the rule of `simulator/memory.py`, where links are `parallel`: a tensor lies on its
    maker's device from that task's start, a copy elsewhere from its maker's finish, both until
    their last readers there, and transfers from there, end. What may still be read is taken to
    stay for ever. What is carried stays where it is read and where its maker runs.
    """

    def __init__(self, graph: TaskGraph, costs: Costs, placement: np.ndarray | None) -> None:
        t, n, d = graph.num_tensors, graph.num_tasks, costs.num_devices
        self.plan = ListSchedule(graph, costs)
        self.costs = costs
        self.meant = None if placement is None else placement.tolist()
        self.instead = list(range(d))  # of each device, the one that takes its tasks now
        self.free_s = [0.0] * d
        # Item x below T is tensor x, item T + i is graph input i.
        self.bytes: list[float] = [*costs.tensor_bytes.tolist(), *costs.input_bytes.tolist()]
        self.maker: list[int] = [*graph.tensor_producer.tolist(), *[-1] * graph.num_inputs]
        made = np.flatnonzero(graph.input_maker >= 0)
        ends = graph.is_resident | (graph.input_maker >= 0)
        self.stays = [*stay_to_the_end(graph, costs).tolist(), *ends.tolist()]
        self.makes: list[list[int]] = [[] for _ in range(n)]
        self.reads: list[list[int]] = [[] for _ in range(n)]
        for x, v in enumerate(graph.tensor_producer.tolist()):
            self.makes[v].append(x)
        item = np.concatenate([graph.edge_tensor, t + graph.input_edge_input, t + made])
        reader = np.concatenate(
            [graph.edge_reader, graph.input_edge_reader, graph.input_maker[made]]
        )
        item, reader = np.unique([item, reader], axis=1)
        for x, v in zip(item.tolist(), reader.tolist(), strict=True):
            self.reads[v].append(x)
        self.left = np.bincount(item, minlength=len(self.bytes)).tolist()  # readers to come
        # Of each item the devices on which it lies, its home first, and its last use there.
        self.last_s: list[dict[int, float]] = [{} for _ in self.bytes]
        self.held = [_Held(float(bytes_)) for bytes_ in costs.capacity_bytes]
        for i in np.unique(graph.input_edge_input).tolist():
            if (home := int(graph.input_home[i])) != RESIDENT:
                self.last_s[t + i][home] = 0.0
                self.held[home].change(0.0, self.bytes[t + i])

    def put(self, v: int) -> bool:
        """Puts a task behind others on a device that has room; returns whether one has."""
        start_s = [
            max(times) for times in zip(self.free_s, self.plan.arrival_s(v), strict=True)
        ]
        finish_s = (start_s + self.plan.compute_s[v]).tolist()
        devices = sorted(range(len(start_s)), key=finish_s.__getitem__)
        if self.meant is not None:
            devices.insert(0, self.instead[self.meant[v]])
        for d in devices:
            if finish_s[d] < np.inf and self._fits(v, d, float(start_s[d])):
                self._put(v, d, float(start_s[d]))
                return True
        return False

    def _fits(self, v: int, d: int, start_s: float) -> bool:
        coming = [(start_s, sum(self.bytes[x] for x in self.makes[v]))]
        coming += [
            (self._sent_s(x), self.bytes[x]) for x in self.reads[v] if d not in self.last_s[x]
        ]
        return self.held[d].has_room(sorted(coming))

    def _sent_s(self, x: int) -> float:
        """Returns when an item leaves its home."""
        return float(self.plan.finish_s[self.maker[x]]) if self.maker[x] >= 0 else 0.0

    def _put(self, v: int, d: int, start_s: float) -> None:
        self.plan.put(v, d, start_s)
        self.free_s[d] = finish_s = float(self.plan.finish_s[v])
        if self.meant is not None:
            self.instead[self.meant[v]] = d
        for x in self.makes[v]:
            self.last_s[x][d] = start_s
            self.held[d].change(start_s, self.bytes[x])
        for x in self.reads[v]:
            last_s = self.last_s[x]
            if d not in last_s:
                sent_s = self._sent_s(x)
                self.held[d].change(sent_s, self.bytes[x])
                for home in list(last_s)[:1]:
                    move_s = self.bytes[x] * self.costs.seconds_per_byte[home, d]
                    there_s = sent_s + float(self.costs.latency_s[home, d] + move_s)
                    last_s[home] = max(last_s[home], there_s)
            last_s[d] = max(last_s.get(d, 0.0), finish_s)
            self.left[x] -= 1
            if self.left[x] == 0 and not self.stays[x]:
                for device, until_s in last_s.items():
                    self.held[device].change(until_s, -self.bytes[x])


class _Held:
    """How many bytes lie on one device when: a step function."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._from_s = [0.0]
        self._bytes = [0.0]  # from that time to the next

    def change(self, from_s: float, num_bytes: float) -> None:
        """Lets as many bytes more lie there from some time on."""
        k = bisect_left(self._from_s, from_s)
        if k == len(self._from_s) or self._from_s[k] != from_s:
            self._from_s.insert(k, from_s)
            self._bytes.insert(k, self._bytes[k - 1])
        self._bytes[k:] = [held + num_bytes for held in self._bytes[k:]]

    def has_room(self, coming: list[tuple[float, float]]) -> bool:
        """Says whether there is room for what comes (from when, bytes), in order, and stays."""
        more = 0.0
        for k, (from_s, num_bytes) in enumerate(coming):
            more += num_bytes
            first = bisect_right(self._from_s, from_s) - 1
            end = len(self._from_s)
            if k + 1 < len(coming):
                end = max(bisect_left(self._from_s, coming[k + 1][0]), first + 1)
            if max(self._bytes[first:end]) + more > self._capacity:
                return False
        return True
