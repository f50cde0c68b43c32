"""Readers and writers of task graphs: DOPPLER text, our JSON, Standard Task Graph, NetworkX."""

import math
from collections.abc import Hashable
from typing import Any

import networkx as nx
import numpy as np

from doppler_jax.files import PathLike, read_fields, read_numbers, read_text, write_fields
from doppler_jax.graphs.build import check_graph, make_graph
from doppler_jax.types import TaskGraph

FORMAT = "doppler_jax.task_graph"
_FLOAT_FIELDS = ("flops", "tensor_bytes", "input_bytes")
_INT_FIELDS = (
    "tensor_producer",
    "edge_tensor",
    "edge_reader",
    "input_home",
    "input_edge_input",
    "input_edge_reader",
)
_HEADER_LINES = 4


def load_graph(path: PathLike) -> TaskGraph:
    """Returns the task graph in a file: JSON if it starts with a brace, else DOPPLER text.

    In DOPPLER text a task has one tensor; its compute number is stored as flops and its
    communication number as that tensor's bytes, to go with `reference_costs`. Such a graph
    `has_bytes` False: no cluster's memory limits it. Graph inputs are left out, since the
    file says neither their size nor who reads them.

    Raises:
      ValueError: the file cannot be read, or holds no valid task graph of at least one
        task. The message starts with the path and names the line or the field.
    """
    text = read_text(path)
    graph = _parse_json(path, text) if text.lstrip()[0] == "{" else _parse_text(path, text)
    if graph.num_tasks == 0:
        raise ValueError(f"{path}: the graph has no tasks")
    return graph


def save_graph(path: PathLike, graph: TaskGraph) -> None:
    """Writes a task graph as JSON that `load_graph` reads back exactly.

    An existing file is replaced in one step or left as it was.

    Raises:
      ValueError: the graph is not valid, or the file cannot be written.
    """
    check_graph(graph)
    fields = {name: getattr(graph, name).tolist() for name in _FLOAT_FIELDS + _INT_FIELDS}
    if not graph.has_bytes:
        fields["has_bytes"] = False
    write_fields(path, FORMAT, **fields)


def load_stg(path: PathLike) -> tuple[list[float], list[tuple[int, int, float]]]:
    """Returns the weights and edges of a Standard Task Graph file, for `from_edge_delays`.

    The two dummy tasks (first and last, of no length) are kept, so ids are the file's.
    Tasks do not communicate: every delay is 0.

    Raises:
      ValueError: the file cannot be read or is no such graph. The message starts with the
        path and names the line.
    """
    rows = [
        (number, _integers(path, number, line))
        for number, line in enumerate(read_text(path).split("\n"), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not rows or len(rows[0][1]) != 1:
        raise ValueError(f"{path}: the first line must hold the number of tasks alone")
    (first, (announced,)), tasks = rows[0], rows[1:]
    if len(tasks) != announced + 2:
        raise ValueError(
            f"{path}: line {first} announces {announced} tasks beside 2 dummies, but "
            f"{len(tasks)} task lines follow"
        )
    weights, edges = [], []
    for v, (number, row) in enumerate(tasks):
        _check_stg_row(path, number, row, v, len(tasks))
        weights.append(float(row[1]))
        edges += [(u, v, 0.0) for u in row[3:]]
    return weights, edges


def _check_stg_row(path: PathLike, number: int, row: list[int], v: int, count: int) -> None:
    where = f"{path}: line {number}"
    if len(row) < 3 or len(row) != 3 + row[2]:
        raise ValueError(
            f"{where}: expected id, time, number of predecessors and as many ids, found {row}"
        )
    if row[0] != v:
        raise ValueError(f"{where}: expected task {v}, found task {row[0]}")
    if row[1] < 0:
        raise ValueError(f"{where}: time is {row[1]}; expected a number >= 0")
    for u in row[3:]:
        _check_task(path, number, u, count)


def _parse_json(path: PathLike, text: str) -> TaskGraph:
    names = (*_FLOAT_FIELDS, *_INT_FIELDS)
    data = read_fields(path, FORMAT, names, optional=["has_bytes"], text=text)
    has_bytes = data.get("has_bytes", True)
    if not isinstance(has_bytes, bool):
        raise ValueError(f"{path}: has_bytes is {has_bytes!r}; expected true or false")
    floats = {name: read_numbers(path, data, name) for name in _FLOAT_FIELDS}
    ints = {name: read_numbers(path, data, name, integers=True) for name in _INT_FIELDS}
    try:
        return make_graph(**floats, **ints, has_bytes=has_bytes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse_text(path: PathLike, text: str) -> TaskGraph:
    lines = text.rstrip().split("\n")
    if len(lines) < _HEADER_LINES:
        raise ValueError(
            f"{path}: {len(lines)} lines; expected {_HEADER_LINES} (nodes, graph inputs, edge "
            "sources, edge destinations) and one per task"
        )
    nodes, inputs, senders, receivers = (
        _integers(path, number, line)
        for number, line in enumerate(lines[:_HEADER_LINES], start=1)
    )
    if len(nodes) != 1:
        raise ValueError(f"{path}: line 1: expected the number of nodes, found {lines[0]!r}")
    num_tasks = nodes[0] - len(inputs)
    task_lines = lines[_HEADER_LINES:]
    if len(task_lines) != num_tasks:
        raise ValueError(
            f"{path}: {nodes[0]} nodes (line 1) less {len(inputs)} graph inputs (line 2) are "
            f"{num_tasks} tasks, but {len(task_lines)} task lines follow"
        )
    if len(senders) != len(receivers):
        raise ValueError(
            f"{path}: {len(senders)} edge sources (line 3) but {len(receivers)} edge "
            "destinations (line 4)"
        )
    for number, ids in ((3, senders), (4, receivers)):
        for task in ids:
            _check_task(path, number, task, num_tasks)
    costs = [
        _task_costs(path, number, line)
        for number, line in enumerate(task_lines, start=_HEADER_LINES + 1)
    ]
    try:
        return make_graph(
            flops=[compute for compute, _ in costs],
            tensor_producer=np.arange(num_tasks),
            tensor_bytes=[communication for _, communication in costs],
            edge_tensor=senders,
            edge_reader=receivers,
            has_bytes=False,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _task_costs(path: PathLike, number: int, line: str) -> tuple[float, float]:
    """Returns the two numbers of a task's line `compute, communication[, op type]`."""
    columns = line.split(",")
    if len(columns) not in (2, 3):
        raise ValueError(
            f"{path}: line {number}: expected `compute, communication[, op type]`, "
            f"found {line!r}"
        )
    costs = []
    for name, column in zip(("compute", "communication"), columns, strict=False):
        try:
            cost = float(column)
        except ValueError:
            cost = math.nan
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(
                f"{path}: line {number}: {name} is {column.strip()!r}; expected a finite "
                "number >= 0"
            )
        costs.append(cost)
    return costs[0], costs[1]


def _integers(path: PathLike, number: int, line: str) -> list[int]:
    """Returns the integers of a line, whatever blanks and commas lie between them."""
    integers = []
    for word in line.replace(",", " ").split():
        try:
            integers.append(int(word))
        except ValueError as error:
            raise ValueError(
                f"{path}: line {number}: expected integers, found {word[:40]!r}"
            ) from error
    return integers


def _check_task(path: PathLike, number: int, task: int, num_tasks: int) -> None:
    if not 0 <= task < num_tasks:
        raise ValueError(
            f"{path}: line {number}: an edge names task {task}, but there are {num_tasks} tasks"
        )


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
