"""The enumerative optimiser: places the tasks of each operation where least has to be moved.

DOPPLER's paper (Yao et al., arXiv 2505.23131) compares with an optimiser of this name and
describes it in an appendix that could not be obtained; this is our reading of what is said of
it. It walks the sharded program in graph order, takes each operation's shards together with
the aggregation that follows, enumerates the ways to place the shards on the devices, and keeps
the one of least communication under balanced load.
"""

import dataclasses

import numpy as np

from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.types import RESIDENT, Costs, TaskGraph

MOST_WAYS = 10_000
"""Ways to place the tasks of an operation up to which every one is tried."""

LOOKS_AHEAD = 2
"""Hops along which the readers of two tasks must be alike for the two to be siblings."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """A sharded operation: tasks that are alike, and those that join what they make."""

    shards: np.ndarray  # [s] tasks, ascending
    aggregations: np.ndarray  # [a] tasks, in topological order


def group_operations(graph: TaskGraph, costs: Costs) -> list[Operation]:
    """Returns the operations in an order in which each comes after what it reads.

    Shards are tasks at the same number of hops from the entries that cost the same on every
    device, read and make tensors of the same sizes, and whose readers, `LOOKS_AHEAD` hops
    deep, do so too. A task joins an operation as an aggregation if it reads tensors of two
    shards or more, and whatever else it reads is made by the operation or before it.
    """
    order = topological_order(graph).tolist()
    ends = task_edges(graph)
    producers, readers = (
        [set(tasks.tolist()) for tasks in _lists(graph.num_tasks, *way)]
        for way in (ends[::-1], ends)
    )
    hops = np.zeros(graph.num_tasks, np.int64)
    for v in order:
        hops[v] = 1 + max((hops[u] for u in producers[v]), default=-1)
    classes: dict[int, list[int]] = {}
    for v, kind in enumerate(_kinds(graph, costs, hops, readers)):
        classes.setdefault(kind, []).append(v)

    position = np.argsort(order)
    is_taken = np.zeros(graph.num_tasks, bool)
    operations = []
    for tasks in sorted(classes.values(), key=lambda tasks: (hops[tasks[0]], tasks[0])):
        shards = [v for v in tasks if not is_taken[v]]
        if not shards:
            continue
        is_taken[shards] = True
        own, aggregations = set(shards), []
        followers = {v for u in shards for v in readers[u]}
        for v in sorted(followers, key=lambda v: position[v]):
            joins = len(own.intersection(producers[v])) > 1
            if joins and not is_taken[v] and is_taken[list(producers[v])].all():
                is_taken[v] = True
                aggregations.append(v)
        operations.append(Operation(np.array(shards), np.array(aggregations, np.int64)))
    return operations


def _kinds(
    graph: TaskGraph, costs: Costs, hops: np.ndarray, readers: list[set[int]]
) -> list[int]:
    """Returns a number per task that is equal for siblings."""
    sizes = np.asarray(costs.tensor_bytes)
    made = _lists(graph.num_tasks, graph.tensor_producer, sizes)
    read = _lists(graph.num_tasks, graph.edge_reader, sizes[graph.edge_tensor])
    compute_s = np.asarray(costs.compute_s).tolist()
    kinds = _number(
        [
            (hops[v], *compute_s[v], "reads", *read[v].tolist(), "makes", *made[v].tolist())
            for v in range(graph.num_tasks)
        ]
    )
    for _ in range(LOOKS_AHEAD):
        kinds = _number(
            [(kinds[v], *sorted({kinds[w] for w in ws})) for v, ws in enumerate(readers)]
        )
    return kinds


def _number(signatures: list[tuple]) -> list[int]:
    known: dict[tuple, int] = {}
    return [known.setdefault(signature, len(known)) for signature in signatures]


def enumerative(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` of the enumerative optimiser.

    An operation is what `group_operations` finds. Its s shards may lie on the devices in any
    way that balances them: no device computes longer than the best split needs, so that on
    equal devices counts differ by at most one, and a single task may go to any fastest device.
    If there are at most `MOST_WAYS` ways each is tried. Otherwise the shards are cut, in a few
    orders, into a block per device, and of the D! ways to give the blocks to devices the one
    that moves least is found as an assignment problem; likewise the way that would be cheapest
    if every shard paid for all that it reads. Aggregations then go where least has to be
    moved, their counts balanced. A way costs the seconds of the transfers that it needs, each
    tensor once per device; ties go to the less loaded devices, then to the first way.
    """
    placement = _Placement(graph, costs)
    for operation in group_operations(graph, costs):
        ways = _every_way(*placement.shares(operation.shards), len(operation.shards))
        if ways is None:
            ways = placement.block_ways(operation)
        placement.lay(operation, ways)
    return placement.device


class _Placement:
    """The placement as it grows, and where each item is: the T tensors, then graph inputs."""

    def __init__(self, graph: TaskGraph, costs: Costs) -> None:
        n, t, d = graph.num_tasks, graph.num_tensors, costs.num_devices
        self.compute_s = np.asarray(costs.compute_s, np.float64)
        self.latency_s = np.asarray(costs.latency_s, np.float64)
        self.seconds_per_byte = np.asarray(costs.seconds_per_byte, np.float64)
        self.item_bytes = np.concatenate([costs.tensor_bytes, costs.input_bytes]).astype(float)
        self.device = np.full(n, -1)
        self.load_s = np.zeros(d)
        self.source = np.concatenate([np.zeros(t, np.int64), graph.input_home])
        self.is_there = np.zeros((len(self.source), d), bool)
        self.is_there[t:] = graph.input_home[:, None] == np.arange(d)
        moves = graph.input_home[graph.input_edge_input] != RESIDENT
        item = np.append(graph.edge_tensor, t + graph.input_edge_input[moves])
        reader = np.append(graph.edge_reader, graph.input_edge_reader[moves])
        self.reads = _lists(n, reader, item)
        self.makes = _lists(n, graph.tensor_producer, np.arange(t))

    def shares(self, shards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the least and the most shards `[D]` of each device in a balanced way."""
        each_s = self.compute_s[shards[0]]
        if each_s.min() <= 0:
            each_s = np.where(np.isfinite(each_s), 1.0, np.inf)
        count = np.zeros(len(each_s))
        for _ in shards:
            count[np.argmin((count + 1) * each_s)] += 1
        longest_s = np.max(count[count > 0] * each_s[count > 0])
        most = np.floor(longest_s * (1 + 1e-9) / each_s).astype(np.int64)
        return np.maximum(most - 1, 0), most

    def block_ways(self, operation: Operation) -> np.ndarray:
        """Returns ways `[L, s]`: nearest to what is read, and in blocks of a few orders."""
        shards = operation.shards
        least, most = self.shares(shards)
        size = least.copy()
        for _ in range(len(shards) - size.sum()):
            able = np.flatnonzero(size < most)
            size[able[np.argmin(self.load_s[able])]] += 1
        blocks = np.arange(len(size))
        cut = np.repeat(blocks, size)
        dealt = np.concatenate([blocks[size > row] for row in range(size.max())])
        fetch_s = np.stack([self._fetch_s(self.reads[v]) for v in shards])
        ways = [_nearest(fetch_s, least, most)]
        for order in self._orders(operation):
            for block in (cut, dealt):
                of_shard = np.empty(len(shards), np.int64)
                of_shard[order] = block
                ways.append(self._give(shards, of_shard, size, least, most))
        return np.stack(ways)

    def _orders(self, operation: Operation) -> list[np.ndarray]:
        """Returns orders `[s]` of the shards: by id, by what they read, by who joins them."""
        shards = operation.shards.tolist()
        joins = dict.fromkeys(shards, -1)
        made_by = {x: v for v in shards for x in self.makes[v].tolist()}
        for v in operation.aggregations.tolist():
            for x in self.reads[v].tolist():
                if x in made_by:
                    joins[made_by[x]] = v
        index = range(len(shards))
        return [
            np.arange(len(shards)),
            np.array(sorted(index, key=lambda i: self.reads[shards[i]].tolist())),
            np.array(sorted(index, key=lambda i: joins[shards[i]])),
        ]

    def _give(
        self,
        shards: np.ndarray,
        block: np.ndarray,
        size: np.ndarray,
        least: np.ndarray,
        most: np.ndarray,
    ) -> np.ndarray:
        """Returns the devices `[s]` that get the blocks `[s]`, so that least is moved."""
        moved_s = np.stack(
            [
                self._fetch_s(np.unique(np.concatenate([self.reads[v] for v in tasks])))
                if len(tasks := shards[block == b])
                else np.zeros(len(size))
                for b in range(len(size))
            ]
        )
        fits = (least <= size[:, None]) & (size[:, None] <= most)
        return _assign(moved_s, fits)[block]

    def _fetch_s(self, items: np.ndarray) -> np.ndarray:
        """Returns the seconds `[D]` that items which lie somewhere take to each device."""
        source = self.source[items]
        move_s = self.latency_s[source] + (
            self.item_bytes[items, None] * self.seconds_per_byte[source]
        )
        return np.where(self.is_there[items], 0.0, move_s).sum(0)

    def lay(self, operation: Operation, ways: np.ndarray) -> None:
        """Places the tasks of the operation in the cheapest of the ways `[L, s]`."""
        tried = _Trial(self, operation, ways)
        cheapest = tried.moved_s <= tried.moved_s.min() * (1 + 1e-9)
        spread = np.where(cheapest, (tried.load_s**2).sum(1), np.inf)
        best = int(np.argmin(spread))
        for v, device in zip(tried.tasks.tolist(), tried.device[best].tolist(), strict=True):
            self.device[v] = device
            self.load_s[device] += self.compute_s[v, device]
            self.is_there[self.reads[v], device] = True
            self.is_there[self.makes[v], device] = True
            self.source[self.makes[v]] = device


class _Trial:
    """L ways to place the tasks of an operation, aggregations included, and what they take."""

    def __init__(self, base: _Placement, operation: Operation, ways: np.ndarray) -> None:
        self.base = base
        self.tasks = np.append(operation.shards, operation.aggregations)
        items = [*(base.reads[v] for v in self.tasks), *(base.makes[v] for v in self.tasks)]
        self.items = np.unique(np.concatenate(items))
        self.ways = np.arange(len(ways))
        self.source = np.tile(base.source[self.items], (len(ways), 1))
        self.is_there = np.tile(base.is_there[self.items], (len(ways), 1, 1))
        self.moved_s = np.zeros(len(ways))  # [L]
        self.load_s = np.tile(base.load_s, (len(ways), 1))  # [L, D]
        self.device = np.zeros((len(ways), len(self.tasks)), np.int64)
        for i, v in enumerate(operation.shards.tolist()):
            self._put(i, v, ways[:, i], self._moves_s(v))
        count = np.zeros(self.load_s.shape, np.int64)  # of aggregations
        for i, v in enumerate(operation.aggregations.tolist(), len(operation.shards)):
            able = np.isfinite(base.compute_s[v])
            is_open = able & (count < -(-len(operation.aggregations) // able.sum()))
            # Aggregations may run on other devices each, and then none of those may be open.
            is_open = np.where(is_open.any(1, keepdims=True), is_open, able)
            moves_s = np.where(is_open, self._moves_s(v), np.inf)
            cheapest = moves_s <= moves_s.min(1, keepdims=True) * (1 + 1e-9)
            device = np.argmin(np.where(cheapest, self.load_s, np.inf), axis=1)
            count[self.ways, device] += 1
            self._put(i, v, device, moves_s)

    def _moves_s(self, v: int) -> np.ndarray:
        """Returns the seconds `[L, D]` of moving a task's missing inputs to each device."""
        at = np.searchsorted(self.items, self.base.reads[v])
        source = self.source[:, at]
        move_s = self.base.latency_s[source] + (
            self.base.item_bytes[self.items[at], None] * self.base.seconds_per_byte[source]
        )
        return np.where(self.is_there[:, at], 0.0, move_s).sum(1)

    def _put(self, i: int, v: int, device: np.ndarray, moves_s: np.ndarray) -> None:
        """Puts task v, the i-th, on `device` `[L]`."""
        self.device[:, i] = device
        self.moved_s += moves_s[self.ways, device]
        self.load_s[self.ways, device] += self.base.compute_s[v, device]
        made = np.searchsorted(self.items, self.base.makes[v])
        self.source[:, made] = device[:, None]
        held = np.append(np.searchsorted(self.items, self.base.reads[v]), made)
        self.is_there[self.ways[:, None], held, device[:, None]] = True


def _every_way(least: np.ndarray, most: np.ndarray, num_shards: int) -> np.ndarray | None:
    """Returns every balanced way `[L, s]` in lexical order, None if there are too many."""
    ways = np.zeros((1, 0), np.int64)
    count = np.zeros((1, len(least)), np.int64)
    for left in reversed(range(num_shards)):
        row, device = np.nonzero(count < most)
        more = count[row]
        more[np.arange(len(row)), device] += 1
        keep = np.maximum(least - more, 0).sum(1) <= left
        ways = np.column_stack([ways[row], device])[keep]
        count = more[keep]
        if len(ways) > MOST_WAYS:
            return None
    return ways


def _nearest(fetch_s: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Returns the balanced way `[s]` of least `fetch_s` `[s, D]`, shards counted one by one."""
    from scipy.optimize import linear_sum_assignment

    device = np.repeat(np.arange(len(most)), most)
    must = np.concatenate([np.arange(count) for count in most]) < least[device]
    # More than all transfers together, so that places that must be filled are.
    bonus_s = np.where(must, 1.0 + fetch_s.sum(), 0.0)
    return device[linear_sum_assignment(fetch_s[:, device] - bonus_s)[1]]


def _assign(seconds: np.ndarray, fits: np.ndarray) -> np.ndarray:
    """Returns the device `[D]` of each block, one each, of least `seconds` `[D, D]` in all."""
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(np.where(fits, seconds, 1.0 + seconds.sum()))[1]


def _lists(count: int, key: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
    """Returns the values of every key below `count`, ascending."""
    order = np.lexsort((value, key))
    return np.split(value[order], np.searchsorted(key[order], np.arange(1, count)))[:count]
