"""Task graphs from and to NetworkX."""

import math
from collections.abc import Hashable
from typing import Any

import networkx as nx
import numpy as np

from doppler_jax.graphs.build import make_graph
from doppler_jax.types import TaskGraph


def from_networkx(
    nx_graph: nx.DiGraph, *, flops: str = "flops", bytes: str = "bytes"
) -> TaskGraph:
    """Returns the task graph of a directed NetworkX graph; ids follow its node order.

    Every node has its flops as an attribute. Tensors are given in one of three ways:
    a size on every node (a tensor per task, read along all its out-edges), a size on
    every edge (a tensor per edge), or as `to_networkx` writes them.

    Args:
      nx_graph: `DiGraph` or `MultiDiGraph`; nodes are any hashable objects.
      flops: name of the node attribute.
      bytes: name of the node or edge attribute.

    Raises:
      ValueError: the graph is undirected, an attribute is missing, no size or given
        for nodes and edges alike, or the tasks form a cycle. The message names the node
        or edge.
    """
    if not nx_graph.is_directed():
        raise ValueError("the NetworkX graph is undirected; expected a DiGraph")
    ids = {node: i for i, node in enumerate(nx_graph)}
    tensors = _tensor_fields(nx_graph, ids, bytes)
    inputs = nx_graph.graph.get("inputs", [])
    input_edges = nx_graph.graph.get("input_edges", [])
    return make_graph(
        flops=[_number(f"node {v!r}", nx_graph.nodes[v], flops) for v in nx_graph],
        **tensors,
        input_bytes=[_number(f"input {i}", data, "bytes") for i, data in enumerate(inputs)],
        input_home=[_integer(f"input {i}", data, "home") for i, data in enumerate(inputs)],
        input_edge_input=[i for i, _ in input_edges],
        input_edge_reader=[_task(ids, node) for _, node in input_edges],
    )


def to_networkx(graph: TaskGraph) -> nx.MultiDiGraph:
    """Returns a NetworkX graph that `from_networkx` reads back exactly.

    Nodes are the task ids, with `flops` and `tensors`, a dict from the id of each tensor
    that the task makes to its bytes. Edges have the `tensor` that is read and their
    `position` among the edges. The graph's own attributes hold the graph inputs:
    `inputs`, a list of dicts of `bytes` and `home`, and `input_edges`, a list of
    (input, reader).
    """
    input_edges = zip(
        graph.input_edge_input.tolist(), graph.input_edge_reader.tolist(), strict=True
    )
    inputs = zip(graph.input_bytes.tolist(), graph.input_home.tolist(), strict=True)
    nx_graph = nx.MultiDiGraph(
        inputs=[{"bytes": size, "home": home} for size, home in inputs],
        input_edges=list(input_edges),
    )
    for task, amount in enumerate(graph.flops.tolist()):
        nx_graph.add_node(task, flops=amount, tensors={})
    producers = graph.tensor_producer.tolist()
    for tensor, size in enumerate(graph.tensor_bytes.tolist()):
        nx_graph.nodes[producers[tensor]]["tensors"][tensor] = size
    edges = zip(graph.edge_tensor.tolist(), graph.edge_reader.tolist(), strict=True)
    for position, (tensor, reader) in enumerate(edges):
        nx_graph.add_edge(producers[tensor], reader, tensor=tensor, position=position)
    return nx_graph


def _tensor_fields(nx_graph: nx.DiGraph, ids: dict[Hashable, int], size: str) -> dict[str, Any]:
    """Returns the tensor and edge arguments of `make_graph`."""
    edges = list(nx_graph.edges(data=True))
    if any("tensors" in data for _, data in nx_graph.nodes(data=True)):
        return _named_tensors(nx_graph, ids)
    if any(size in data for _, _, data in edges):
        for node, data in nx_graph.nodes(data=True):
            if size in data:
                raise ValueError(
                    f"node {node!r} has {size!r}, and so do edges; give it to one kind only"
                )
        return {
            "tensor_producer": [ids[u] for u, _, _ in edges],
            "tensor_bytes": [
                _number(f"edge {u!r} -> {v!r}", data, size) for u, v, data in edges
            ],
            "edge_tensor": np.arange(len(edges)),
            "edge_reader": [ids[v] for _, v, _ in edges],
        }
    return {
        "tensor_producer": np.arange(len(ids)),
        "tensor_bytes": [_number(f"node {v!r}", nx_graph.nodes[v], size) for v in nx_graph],
        "edge_tensor": [ids[u] for u, _, _ in edges],
        "edge_reader": [ids[v] for _, v, _ in edges],
    }


def _named_tensors(nx_graph: nx.DiGraph, ids: dict[Hashable, int]) -> dict[str, Any]:
    """Reads the form that `to_networkx` writes."""
    made: dict[int, tuple[Hashable, float]] = {}
    for node, data in nx_graph.nodes(data=True):
        for tensor in data.get("tensors", {}):
            if tensor in made:
                raise ValueError(f"node {node!r} makes tensor {tensor}, as does another node")
            made[tensor] = (node, _number(f"node {node!r}", data["tensors"], tensor))
    missing = sorted(set(range(len(made))) - set(made))
    if missing:
        raise ValueError(f"tensor {missing[0]} is made by no node; expected 0..{len(made) - 1}")
    edges = []
    for u, v, data in nx_graph.edges(data=True):
        where = f"edge {u!r} -> {v!r}"
        tensor = _integer(where, data, "tensor")
        if tensor not in made or made[tensor][0] != u:
            raise ValueError(f"{where} reads tensor {tensor}, which node {u!r} does not make")
        edges.append((_integer(where, data, "position"), tensor, ids[v]))
    edges.sort()
    return {
        "tensor_producer": [ids[made[x][0]] for x in range(len(made))],
        "tensor_bytes": [made[x][1] for x in range(len(made))],
        "edge_tensor": [tensor for _, tensor, _ in edges],
        "edge_reader": [reader for _, _, reader in edges],
    }


def _number(where: str, data: dict[Any, Any], name: Hashable) -> float:
    value = _attribute(where, data, name)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{where}: {name!r} is {value!r}; expected a finite number >= 0")
    return number


def _integer(where: str, data: dict[Any, Any], name: Hashable) -> int:
    value = _attribute(where, data, name)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{where}: {name!r} is {value!r}; expected an integer")
    return int(value)


def _attribute(where: str, data: dict[Any, Any], name: Hashable) -> Any:
    if name not in data:
        raise ValueError(f"{where} has no attribute {name!r}")
    return data[name]


def _task(ids: dict[Hashable, int], node: Hashable) -> int:
    if node not in ids:
        raise ValueError(f"a graph input is read by {node!r}, which is no node")
    return ids[node]
