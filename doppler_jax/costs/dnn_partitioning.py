"""The networks of msr-fiddle/dnn-partitioning: accelerators with little memory, and CPUs.

Reference: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph
Operators", NeurIPS 2020. The files call an accelerator "FPGA".
"""

import math
from typing import Any

import numpy as np

from doppler_jax.costs.build import check_costs
from doppler_jax.files import PathLike, parse_json_object, read_text
from doppler_jax.graphs.build import make_graph
from doppler_jax.types import Costs, TaskGraph

UNIT_S = 1e-3
"""Seconds in the files' unit of time, which look like milliseconds."""


def load_dnn_partitioning(
    path: PathLike, *, num_accelerators: int | None = None
) -> tuple[TaskGraph, Costs]:
    """Returns a network and its costs on the accelerators and CPU cores that its file names.

    Tasks are the nodes by increasing id. Devices are the accelerators, each with the
    file's memory limit, then the CPU cores, without limit; a node that no accelerator
    supports runs on the cores alone. What we take over from the paper's model, and how:

    - A node's `size` is all that it takes of an accelerator's memory, its result included.
      It becomes a resident graph input of that size, so that what a device holds is the
      sum over its tasks, as in the paper.
    - An edge's `cost` is the time between an accelerator and the host's memory, the same
      for all edges from a node. Results go through that memory: from one accelerator to
      another in twice the time (out, then in), between CPU cores, which share it, in none.
      A node has one tensor, whose "bytes" are that cost, on links of one byte per unit of
      time: next to the sizes they count for nothing in memory.
    - Nodes of one `colorClass` would have to share a device. In the four published
      inference graphs by layers no class has two; a file with such a class is refused.

    What differs from the paper's latency objective: there a device runs one contiguous
    part of the network, and neither computes while it communicates nor sends a result
    before its part is done. Here tasks run, and results move, on their own.

    Args:
      path: the JSON file.
      num_accelerators: in place of the file's number.

    Raises:
      ValueError: the file cannot be read or is no such network, or has no device. The
        message starts with the path.
    """
    data = parse_json_object(path, read_text(path))
    nodes = _records(path, data, "nodes")
    _check_nodes(path, nodes)
    columns = {
        field: np.array([_number(path, node, field) for node in nodes])
        for field in ("id", "fpgaLatency", "cpuLatency", "size", "supportedOnFpga")
    }
    order = np.argsort(columns["id"], kind="stable")
    columns = {field: column[order] for field, column in columns.items()}
    edges = _edges(path, data, {int(node): v for v, node in enumerate(columns["id"])})
    producers = sorted({u for u, _, _ in edges})
    tensor = {u: x for x, u in enumerate(producers)}
    transfer = {u: cost for u, _, cost in edges}
    if num_accelerators is None:
        num_accelerators = int(_number(path, data, "maxFPGAs"))
    try:
        graph = make_graph(
            flops=columns["fpgaLatency"],
            tensor_producer=producers,
            tensor_bytes=[transfer[u] for u in producers],
            edge_tensor=[tensor[u] for u, _, _ in edges],
            edge_reader=[v for _, v, _ in edges],
            input_bytes=columns["size"],
            input_edge_input=np.arange(len(nodes)),
            input_edge_reader=np.arange(len(nodes)),
        )
        num_devices = num_accelerators + int(_number(path, data, "maxCPUs"))
        is_cpu = np.arange(num_devices) >= num_accelerators
        hops = (~is_cpu[:, None]).astype(float) + ~is_cpu  # in and out of the host's memory
        np.fill_diagonal(hops, 0.0)
        on_cpu = columns["cpuLatency"][:, None]
        supported = columns["supportedOnFpga"][:, None] != 0
        elsewhere = np.where(supported, columns["fpgaLatency"][:, None], np.inf)
        costs = Costs(
            compute_s=UNIT_S * np.where(is_cpu, on_cpu, elsewhere),
            tensor_bytes=graph.tensor_bytes.copy(),
            input_bytes=graph.input_bytes.copy(),
            latency_s=np.zeros_like(hops),
            seconds_per_byte=UNIT_S * hops,
            capacity_bytes=np.where(is_cpu, np.inf, _number(path, data, "maxSizePerFPGA")),
        )
        check_costs(graph, costs)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return graph, costs


def load_split(path: PathLike, num_accelerators: int) -> np.ndarray:
    """Returns the placement `[N]` in a split file, with ids as `load_dnn_partitioning` has.

    The k-th list of `fpgas` is accelerator k, the k-th of `cpus` the k-th CPU core.

    Raises:
      ValueError: the file cannot be read or is no split, a node is in two lists, or there
        are nodes on more accelerators than `num_accelerators`.
    """
    data = parse_json_object(path, read_text(path))
    device: dict[int, int] = {}
    for kind, first in (("fpgas", 0), ("cpus", num_accelerators)):
        for k, part in enumerate(_records(path, data, kind)):
            nodes = part.get("nodes")
            if not isinstance(nodes, list) or not all(isinstance(node, int) for node in nodes):
                raise ValueError(f"{path}: {kind}[{k}]: nodes: expected a list of ids")
            if nodes and kind == "fpgas" and k >= num_accelerators:
                raise ValueError(
                    f"{path}: nodes on accelerator {k}, but there are {num_accelerators}"
                )
            for node in nodes:
                if node in device:
                    raise ValueError(f"{path}: {kind}[{k}]: node {node} is placed twice")
                device[node] = first + k
    return np.array([device[node] for node in sorted(device)], dtype=np.int64)


def _check_nodes(path: PathLike, nodes: list[dict[str, Any]]) -> None:
    for field, what in (("id", "one id"), ("colorClass", "one colorClass, to be colocated")):
        seen: dict[Any, int] = {}
        for i, node in enumerate(nodes):
            value = node.get(field)
            if value is not None and seen.setdefault(value, i) != i:
                raise ValueError(f"{path}: nodes[{seen[value]}] and nodes[{i}] have {what}")


def _edges(
    path: PathLike, data: dict[str, Any], task: dict[int, int]
) -> list[tuple[int, int, float]]:
    """Returns (producer, reader, cost) of the edges; `task` gives the task of a node's id."""
    edges, cost_of = [], dict[int, float]()
    for i, edge in enumerate(_records(path, data, "edges")):
        ends = [int(_number(path, edge, field)) for field in ("sourceId", "destId")]
        for node in ends:
            if node not in task:
                raise ValueError(f"{path}: edges[{i}] names node {node}, which does not exist")
        u, v = (task[node] for node in ends)
        cost = _number(path, edge, "cost")
        if cost_of.setdefault(u, cost) != cost:
            raise ValueError(
                f"{path}: edges[{i}]: cost {cost:g}, but {cost_of[u]:g} on another edge from "
                f"node {ends[0]}"
            )
        edges.append((u, v, cost))
    return edges


def _records(path: PathLike, data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    records = data.get(name)
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise ValueError(f"{path}: {name}: expected a list of objects")
    return records


def _number(path: PathLike, record: dict[str, Any], name: str) -> float:
    value = record.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{path}: {name} is {value!r}; expected a finite number >= 0")
    return float(value)
