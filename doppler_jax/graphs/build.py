"""Makes a `TaskGraph` on the host from plain sequences, and refuses what is not one."""

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.types import RESIDENT, TaskGraph


def make_graph(
    *,
    flops: ArrayLike,
    tensor_producer: ArrayLike = (),
    tensor_bytes: ArrayLike = (),
    edge_tensor: ArrayLike = (),
    edge_reader: ArrayLike = (),
    input_bytes: ArrayLike = (),
    input_home: ArrayLike | None = None,
    input_maker: ArrayLike | None = None,
    input_edge_input: ArrayLike = (),
    input_edge_reader: ArrayLike = (),
    has_bytes: bool = True,
) -> TaskGraph:
    """Returns the validated task graph; the fields are described on `TaskGraph`.

    Repeated reads of a tensor (or graph input) by one task collapse to one edge.
    Without `input_home` and `input_maker` every graph input is resident.

    Example:
      >>> made = {"tensor_producer": [0], "tensor_bytes": [8.0]}
      >>> read = {"edge_tensor": [0], "edge_reader": [1]}
      >>> dj.make_graph(flops=[2.0, 1.0], **made, **read).num_tasks
      2

    Raises:
      ValueError: lengths differ, an id does not exist, a size is negative or not
        finite, or the tasks form a cycle; the message names the first offender.
    """
    nowhere = np.full(np.size(np.asarray(input_bytes)), RESIDENT)
    edges = _unique_pairs("edge", edge_tensor, edge_reader)
    input_edges = _unique_pairs("input_edge", input_edge_input, input_edge_reader)
    graph = TaskGraph(
        flops=_floats("flops", flops),
        tensor_producer=_ints("tensor_producer", tensor_producer),
        tensor_bytes=_floats("tensor_bytes", tensor_bytes),
        edge_tensor=edges[:, 0],
        edge_reader=edges[:, 1],
        input_bytes=_floats("input_bytes", input_bytes),
        input_home=_ints("input_home", nowhere if input_home is None else input_home),
        input_maker=_ints("input_maker", nowhere if input_maker is None else input_maker),
        input_edge_input=input_edges[:, 0],
        input_edge_reader=input_edges[:, 1],
        has_bytes=has_bytes,
    )
    check_graph(graph)
    return graph


def check_graph(graph: TaskGraph) -> None:
    """Raises `ValueError` unless the arrays form a task graph (see `make_graph`)."""
    n, t, i = graph.num_tasks, graph.num_tensors, graph.num_inputs
    if graph.tensor_bytes.shape != (t,):
        raise ValueError(f"tensor_bytes has {graph.tensor_bytes.size} entries for {t} tensors")
    for name in ("input_home", "input_maker"):
        if (array := getattr(graph, name)).shape != (i,):
            raise ValueError(f"{name} has {array.size} entries for {i} inputs")
    _check_ids("tensor_producer", graph.tensor_producer, n, "tasks")
    _check_ids("edge_tensor", graph.edge_tensor, t, "tensors")
    _check_ids("edge_reader", graph.edge_reader, n, "tasks")
    _check_ids("input_edge_input", graph.input_edge_input, i, "graph inputs")
    _check_ids("input_edge_reader", graph.input_edge_reader, n, "tasks")
    if i and graph.input_home.min() < RESIDENT:
        raise ValueError(f"input_home holds {graph.input_home.min()}; -1 means resident")
    _check_ids("input_maker", graph.input_maker[graph.input_maker != -1], n, "tasks")
    for k in np.flatnonzero((graph.input_maker >= 0) & (graph.input_home != RESIDENT))[:1]:
        raise ValueError(
            f"graph input {k} has the home {graph.input_home[k]} and the maker "
            f"{graph.input_maker[k]}; expected one of them"
        )
    topological_order(graph)


def topological_order(graph: TaskGraph, rank: ArrayLike | None = None) -> np.ndarray:
    """Returns the tasks `[N]` in a topological order.

    Of the tasks whose predecessors are all listed, the one of smallest rank comes next, and
    of those the one of smallest id.

    Args:
      graph: the task graph, N tasks.
      rank: `[N]`; by default all are equal.

    Raises:
      ValueError: the tasks form a cycle; the message shows one.
    """
    ranks = [0] * graph.num_tasks if rank is None else np.asarray(rank).tolist()
    senders, receivers = task_edges(graph)
    successors: list[list[int]] = [[] for _ in range(graph.num_tasks)]
    missing = np.bincount(receivers, minlength=graph.num_tasks)
    for u, v in zip(senders.tolist(), receivers.tolist(), strict=True):
        successors[u].append(v)
    free = [(ranks[v], v) for v in np.flatnonzero(missing == 0).tolist()]
    heapify(free)
    order = []
    while free:
        _, u = heappop(free)
        order.append(u)
        for v in successors[u]:
            missing[v] -= 1
            if missing[v] == 0:
                heappush(free, (ranks[v], v))
    if len(order) < graph.num_tasks:
        raise ValueError(f"tasks form a cycle: {_find_cycle(graph)}")
    return np.array(order, dtype=np.int64)


def task_edges(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray]:
    """Returns the (producer, reader) task `[E]` of every edge, in edge order."""
    return graph.tensor_producer[graph.edge_tensor], graph.edge_reader


def _find_cycle(graph: TaskGraph) -> str:
    import networkx as nx

    edges = zip(*(ends.tolist() for ends in task_edges(graph)), strict=True)
    cycle = nx.find_cycle(nx.DiGraph(sorted(edges)))
    return " -> ".join(str(u) for u, _ in [*cycle, cycle[0]])


def _ints(name: str, values: ArrayLike) -> np.ndarray:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, has shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must hold integers, holds {array.dtype}")
    return array.astype(np.int64)


def _floats(name: str, values: ArrayLike) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, has shape {array.shape}")
    bad = np.flatnonzero(~np.isfinite(array) | (array < 0))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]}; expected a finite number >= 0")
    return array


def _unique_pairs(name: str, first: ArrayLike, second: ArrayLike) -> np.ndarray:
    a, b = _ints(f"{name} sources", first), _ints(f"{name} readers", second)
    if a.shape != b.shape:
        raise ValueError(f"{name} has {a.size} sources but {b.size} readers")
    pairs = np.stack([a, b], axis=1)
    _, keep = np.unique(pairs, axis=0, return_index=True)
    return pairs[np.sort(keep)]


def _check_ids(name: str, ids: np.ndarray, count: int, what: str) -> None:
    bad = np.flatnonzero((ids < 0) | (ids >= count))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] is {ids[bad[0]]}, but there are {count} {what}")
