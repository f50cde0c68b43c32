"""What an execution of a placement has to do, worked out once before any call."""

import dataclasses
from collections import Counter, defaultdict
from heapq import heapify, heappop, heappush

import numpy as np

from doppler_jax.graphs.build import task_edges
from doppler_jax.types import InputRef, Ref, ShardedProgram, TaskGraph


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One tensor on its way to one other device that hosts readers of it."""

    tensor: int
    producer: int
    source: int
    destination: int
    slot: int  # of the copy
    readers: tuple[int, ...]  # tasks on `destination`


@dataclasses.dataclass(frozen=True)
class Plan:
    """N tasks on D devices, their X transfers, and S slots of values.

    A slot is a tensor or graph input on one device: where its array is during a call.
    Slot x below T is tensor x on its producer's device; the copies follow, then the inputs.
    """

    placement: tuple[int, ...]  # [N]
    rank: tuple[float, ...] | None  # [N] order among ready tasks; None: first come
    order: tuple[int, ...]  # [N] topological, by rank and id among available tasks
    operands: tuple[tuple[int, ...], ...]  # [N] slots, as the kernel takes them
    results: tuple[tuple[int, ...], ...]  # [N] slots, as the kernel gives them
    num_inputs: tuple[int, ...]  # [N] tensors to wait for
    local_readers: tuple[tuple[int, ...], ...]  # [N] once per tensor that is read
    transfers: tuple[Transfer, ...]  # [X] by tensor, then destination
    task_transfers: tuple[tuple[int, ...], ...]  # [N] transfers of its tensors
    num_reads: tuple[int, ...]  # [S] tasks, transfers and outputs that read the slot
    inputs: tuple[tuple[int, int, int], ...]  # (graph input, device, slot)
    outputs: tuple[tuple[int, ...], ...]  # slots of the blocks, per flat output


def make_plan(
    sharded: ShardedProgram, placement: np.ndarray, priority: np.ndarray | None
) -> Plan:
    """Returns the plan of a placement `[N]`; `priority` `[N]` orders tasks, smallest first."""
    graph, places = sharded.graph, placement.tolist()
    results: list[list[int]] = [[] for _ in places]
    for x, v in enumerate(graph.tensor_producer.tolist()):
        results[v].append(x)
    local_readers, transfers = _split_readers(graph, places)
    task_transfers: list[list[int]] = [[] for _ in places]
    for k, transfer in enumerate(transfers):
        task_transfers[transfer.producer].append(k)
    copies = {(t.tensor, t.destination): t.slot for t in transfers}
    first_input = graph.num_tensors + len(transfers)
    inputs: dict[tuple[int, int], int] = {}

    def slot(ref: Ref, device: int) -> int:
        if isinstance(ref, InputRef):
            return inputs.setdefault((ref.input, device), first_input + len(inputs))
        return copies.get((ref.tensor, device), ref.tensor)

    operands = [
        tuple(slot(ref, device) for ref in refs)
        for refs, device in zip(sharded.operands, places, strict=True)
    ]
    outputs = [tuple(slot(ref, 0) for ref in output.blocks) for output in sharded.outputs]
    reads = Counter(s for slots in operands for s in set(slots))
    reads.update(t.tensor for t in transfers)
    reads.update(s for slots in outputs for s in slots)
    rank = None if priority is None else tuple(priority.tolist())
    return Plan(
        placement=tuple(places),
        rank=rank,
        order=_order(graph, rank),
        operands=tuple(operands),
        results=tuple(map(tuple, results)),
        num_inputs=tuple(np.bincount(graph.edge_reader, minlength=len(places)).tolist()),
        local_readers=tuple(map(tuple, local_readers)),
        transfers=tuple(transfers),
        task_transfers=tuple(map(tuple, task_transfers)),
        num_reads=tuple(reads[s] for s in range(first_input + len(inputs))),
        inputs=tuple((i, device, s) for (i, device), s in inputs.items()),
        outputs=tuple(outputs),
    )


def _split_readers(
    graph: TaskGraph, places: list[int]
) -> tuple[list[list[int]], list[Transfer]]:
    """Returns each task's readers on its own device, and the transfers to all others."""
    local: list[list[int]] = [[] for _ in places]
    remote = defaultdict(list)
    edges = zip(*map(np.ndarray.tolist, (graph.edge_tensor, *task_edges(graph))), strict=True)
    for x, u, v in edges:
        if places[u] == places[v]:
            local[u].append(v)
        else:
            remote[x, places[v], u].append(v)
    return local, [
        Transfer(x, u, places[u], there, graph.num_tensors + k, tuple(remote[x, there, u]))
        for k, (x, there, u) in enumerate(sorted(remote))
    ]


def _order(graph: TaskGraph, rank: tuple[float, ...] | None) -> tuple[int, ...]:
    """Returns a topological order `[N]`: always the least (rank, id) of the available tasks."""
    ranks = rank or (0.0,) * graph.num_tasks
    senders, readers = task_edges(graph)
    successors: list[list[int]] = [[] for _ in ranks]
    for u, v in zip(senders.tolist(), readers.tolist(), strict=True):
        successors[u].append(v)
    missing = np.bincount(readers, minlength=len(ranks)).tolist()
    available = [(ranks[v], v) for v, count in enumerate(missing) if count == 0]
    heapify(available)
    order = []
    while available:
        _, u = heappop(available)
        order.append(u)
        for v in successors[u]:
            missing[v] -= 1
            if missing[v] == 0:
                heappush(available, (ranks[v], v))
    return tuple(order)
