"""Readers and writers of task graphs: DOPPLER text, our JSON, Standard Task Graph, NetworkX."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from doppler_jax.files import PathLike, read_fields, read_numbers, read_text, write_fields
from doppler_jax.graphs.build import check_graph, make_graph
from doppler_jax.types import TaskGraph

if TYPE_CHECKING:  # who has a graph of NetworkX has imported it
    import networkx as nx

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

    Example:
      >>> dj.graphs.save_graph("two.json", dj.make_graph(flops=[2.0, 1.0]))
      >>> dj.load_graph("two.json").num_tasks
      2

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
    if (graph.input_maker >= 0).any():
        fields["input_maker"] = graph.input_maker.tolist()
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
        where = f"{path}: line {number}"
        if len(row) < 3 or len(row) != 3 + row[2]:
            raise ValueError(
                f"{where}: expected id, time, number of predecessors and as many ids, "
                f"found {row}"
            )
        if row[0] != v:
            raise ValueError(f"{where}: expected task {v}, found task {row[0]}")
        if row[1] < 0:
            raise ValueError(f"{where}: time is {row[1]}; expected a number >= 0")
        for u in row[3:]:
            _check_task(path, number, u, len(tasks))
        weights.append(float(row[1]))
        edges += [(u, v, 0.0) for u in row[3:]]
    return weights, edges


def _parse_json(path: PathLike, text: str) -> TaskGraph:
    names = (*_FLOAT_FIELDS, *_INT_FIELDS)
    data = read_fields(path, FORMAT, names, optional=["has_bytes", "input_maker"], text=text)
    has_bytes = data.get("has_bytes", True)
    if not isinstance(has_bytes, bool):
        raise ValueError(f"{path}: has_bytes is {has_bytes!r}; expected true or false")
    floats = {name: read_numbers(path, data, name) for name in _FLOAT_FIELDS}
    ints = {
        name: read_numbers(path, data, name, integers=True)
        for name in (*_INT_FIELDS, "input_maker")
        if name in data
    }
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
    compute, communication = (
        _number(f"{path}: line {number}: {name}", column.strip())
        for name, column in zip(("compute", "communication"), columns, strict=False)
    )
    return compute, communication


def _number(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{what} is {value!r}; expected a finite number >= 0")
    return number


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
    nx_graph: "nx.DiGraph", *, flops: str = "flops", bytes: str = "bytes"
) -> TaskGraph:
    """Returns the task graph of a directed NetworkX graph; ids follow its node order.

    Every node has its flops as an attribute. A size is on every node (a tensor per task, read
    along all its out-edges) or on every edge (a tensor per edge).

    Example:
      >>> drawn = nx.DiGraph()
      >>> drawn.add_node("a", flops=2.0, bytes=8.0)
      >>> drawn.add_node("b", flops=1.0, bytes=0.0)
      >>> drawn.add_edge("a", "b")
      >>> dj.from_networkx(drawn).num_tasks
      2

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
    nodes, edges = nx_graph.nodes(data=True), list(nx_graph.edges(data=True))
    ids = {node: i for i, node in enumerate(nx_graph)}
    is_per_edge = any(bytes in data for _, _, data in edges)
    made = [(node, f"node {node!r}", data) for node, data in nodes]
    if is_per_edge:
        for _, where, data in made:
            if bytes in data:
                raise ValueError(
                    f"{where} has {bytes!r}, and so do edges; give it to one kind only"
                )
        made = [(u, f"edge {u!r} -> {v!r}", data) for u, v, data in edges]
    return make_graph(
        flops=[_attribute(f"node {node!r}", data, flops) for node, data in nodes],
        tensor_producer=[ids[u] for u, _, _ in made],
        tensor_bytes=[_attribute(where, data, bytes) for _, where, data in made],
        edge_tensor=np.arange(len(edges)) if is_per_edge else [ids[u] for u, _, _ in edges],
        edge_reader=[ids[v] for _, v, _ in edges],
    )


def _attribute(where: str, data: dict[str, Any], name: str) -> float:
    if name not in data:
        raise ValueError(f"{where} has no attribute {name!r}")
    return _number(f"{where}: {name!r}", data[name])
