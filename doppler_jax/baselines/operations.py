"""Finds the sharded operations of a task graph by its structure alone."""

import dataclasses

import numpy as np

from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.types import Costs, TaskGraph

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
    producers, readers = _neighbours(graph)
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


def _neighbours(graph: TaskGraph) -> tuple[list[set[int]], list[set[int]]]:
    producers: list[set[int]] = [set() for _ in range(graph.num_tasks)]
    readers: list[set[int]] = [set() for _ in range(graph.num_tasks)]
    for u, v in zip(*(ends.tolist() for ends in task_edges(graph)), strict=True):
        producers[v].add(u)
        readers[u].add(v)
    return producers, readers


def _kinds(
    graph: TaskGraph, costs: Costs, hops: np.ndarray, readers: list[set[int]]
) -> list[int]:
    """Returns a number per task that is equal for siblings."""
    sizes = np.asarray(costs.tensor_bytes)
    made: list[list[float]] = [[] for _ in range(graph.num_tasks)]
    read: list[list[float]] = [[] for _ in range(graph.num_tasks)]
    for x, v in enumerate(graph.tensor_producer.tolist()):
        made[v].append(float(sizes[x]))
    for x, v in zip(graph.edge_tensor.tolist(), graph.edge_reader.tolist(), strict=True):
        read[v].append(float(sizes[x]))
    compute_s = np.asarray(costs.compute_s).tolist()
    kinds = _number(
        [
            (hops[v], *compute_s[v], "reads", *sorted(read[v]), "makes", *sorted(made[v]))
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
