"""A task graph with its costs, padded and indexed for jitted code."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.chains import chain_cover
from doppler_jax.types import RESIDENT, Costs, TaskGraph, pytree

if TYPE_CHECKING:
    import chex


def bucket_size(size: int, smallest: int = 1) -> int:
    """Returns the least of 1, 2, ..., 8, 10, 12, 14, 16, 20, ... not below both arguments.

    Four steps to each doubling, so at most a quarter is padding.
    """
    size = max(size, smallest)
    step = 1 << max((size - 1).bit_length() - 3, 0)
    return -(-size // step) * step


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a padded problem's arrays; see `PaddedProblem` for the letters."""

    tasks: int  # N
    edges: int  # E
    producers: int  # P
    readers: int  # S
    chains: int  # W
    devices: int  # D
    home_reads: int = 0  # F

    def holds(self, other: Sizes) -> bool:
        """Returns whether a problem of the other sizes can be padded to these."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return all(own >= theirs for own, theirs in pairs)


@pytree
class PaddedProblem:
    """One placement problem. Row N (after padding) is a task that never runs.

    Below N is the padded number of tasks, E of edges, F of reads of graph inputs that have a
    home, W of chains, P and S the padded largest numbers of edges into and out of a task;
    unused entries name task N. Edges are sorted by the tensor's producer, then by tensor.
    """

    num_tasks: chex.Array  # [] int32, without padding
    compute_s: chex.Array  # [N + 1, D]
    input_ready_s: chex.Array  # [N + 1, D] when the task's graph inputs are on the device
    latency_s: chex.Array  # [D, D]
    seconds_per_byte: chex.Array  # [D, D]
    pred_task: chex.Array  # [N + 1, P] int32
    pred_bytes: chex.Array  # [N + 1, P]
    succ_task: chex.Array  # [N + 1, S] int32
    succ_bytes: chex.Array  # [N + 1, S]
    num_producers: chex.Array  # [N + 1] int32, edges into the task
    num_edges: chex.Array  # [N + 1] int32, edges out of the task
    first_edge: chex.Array  # [N + 1] int32
    edge_reader: chex.Array  # [E + 1] int32
    edge_tensor: chex.Array  # [E + 1] int32
    edge_bytes: chex.Array  # [E + 1]
    edge_opens: chex.Array  # [E + 1] bool, the first edge of its tensor
    home_reader: chex.Array  # [F] int32, reads of inputs that may move, in the order of inputs
    home_device: chex.Array  # [F] int32
    home_maker: chex.Array  # [F] int32, task on whose device the home is instead, or N
    home_input: chex.Array  # [F] int32
    home_bytes: chex.Array  # [F]
    home_opens: chex.Array  # [F] bool, the first read of its input
    chain: chex.Array  # [N + 1] int32, the chain that the task is in
    chain_head: chex.Array  # [W] int32, first task of each chain
    chain_next: chex.Array  # [N + 1] int32, next task of the same chain
    handling_s: chex.Array | None  # [D]; None as in `Costs`
    handling_s_per_byte: chex.Array | None  # [D]

    @property
    def padded_tasks(self) -> int:
        return self.compute_s.shape[0] - 1

    @property
    def links(self) -> tuple[chex.Array, chex.Array]:
        """Latency and seconds per byte `[D, D]`, with what both ends spend on a transfer."""
        if self.handling_s is None or self.handling_s_per_byte is None:
            return self.latency_s, self.seconds_per_byte
        apart = (1.0 - np.eye(self.num_devices)).astype(self.latency_s.dtype)
        latency_s, seconds_per_byte = (
            link + (each[:, None] + each[None]) * apart
            for link, each in (
                (self.latency_s, self.handling_s),
                (self.seconds_per_byte, self.handling_s_per_byte),
            )
        )
        return latency_s, seconds_per_byte

    @property
    def num_devices(self) -> int:
        return self.compute_s.shape[1]


def pad_problem(
    graph: TaskGraph,
    costs: Costs,
    dtype: DTypeLike = np.float32,
    sizes: Sizes | None = None,
) -> PaddedProblem:
    """Returns the padded problem, by default every size rounded up to its bucket.

    Args:
      graph: the task graph.
      costs: its costs.
      dtype: of times and sizes in bytes.
      sizes: what to pad to instead (see `bucket_size`), so that several problems share a
        compilation. Devices that are added can run nothing; no makespan changes.

    Raises:
      ValueError: the problem does not fit into `sizes`.
    """
    chains = chain_cover(graph)
    needed = needed_sizes(graph, costs, chains)
    sizes = sizes or _buckets(needed)
    if not sizes.holds(needed):
        raise ValueError(f"a problem of {needed} does not fit into {sizes}")
    senders, receivers = task_edges(graph)
    edge_bytes = np.asarray(costs.tensor_bytes, dtype)[graph.edge_tensor]
    n, rows, d = sizes.tasks, sizes.tasks + 1, sizes.devices
    pred_task, pred_bytes = _table(receivers, senders, edge_bytes, n, sizes.producers)
    succ_task, succ_bytes = _table(senders, receivers, edge_bytes, n, sizes.readers)
    compute_s = pad_array(np.asarray(costs.compute_s, dtype), rows, d)
    compute_s[:, costs.num_devices :] = np.inf
    return PaddedProblem(
        num_tasks=np.int32(graph.num_tasks),
        compute_s=compute_s,
        input_ready_s=pad_array(input_ready_s(graph, costs).astype(dtype), rows, d),
        latency_s=pad_array(np.asarray(costs.latency_s, dtype), d, d),
        seconds_per_byte=pad_array(np.asarray(costs.seconds_per_byte, dtype), d, d),
        pred_task=pred_task,
        pred_bytes=pred_bytes,
        succ_task=succ_task,
        succ_bytes=succ_bytes,
        num_producers=np.bincount(receivers, minlength=rows).astype(np.int32),
        **_edges(graph, edge_bytes, sizes),
        **_home_reads(graph, costs, sizes, dtype),
        **_chains(chains, sizes),
        **{
            name: None if rates is None else pad_array(np.asarray(rates, dtype), d)
            for name in ("handling_s", "handling_s_per_byte")
            for rates in (getattr(costs, name),)
        },
    )


def needed_sizes(
    graph: TaskGraph, costs: Costs, chains: list[list[int]] | None = None
) -> Sizes:
    """Returns the least sizes that a problem, whose cover by chains is given, can have."""
    senders, receivers = task_edges(graph)
    return Sizes(
        tasks=graph.num_tasks,
        edges=graph.num_edges,
        producers=int(np.bincount(receivers, minlength=1).max()),
        readers=int(np.bincount(senders, minlength=1).max()),
        chains=len(chain_cover(graph) if chains is None else chains),
        devices=costs.num_devices,
        home_reads=int(np.sum(~graph.is_resident[graph.input_edge_input])),
    )


def _buckets(needed: Sizes) -> Sizes:
    smallest = {"tasks": 8, "edges": 16, "producers": 4, "readers": 4, "chains": 8}
    grown = {name: bucket_size(getattr(needed, name), low) for name, low in smallest.items()}
    home_reads = needed.home_reads and bucket_size(needed.home_reads, smallest=2)
    return dataclasses.replace(needed, home_reads=home_reads, **grown)


def _edges(graph: TaskGraph, edge_bytes: np.ndarray, sizes: Sizes) -> dict[str, np.ndarray]:
    senders, receivers = task_edges(graph)
    order = np.lexsort((receivers, graph.edge_tensor, senders))
    tensor = graph.edge_tensor[order]
    degree = np.bincount(senders, minlength=sizes.tasks + 1)
    count = sizes.edges + 1
    return {
        "num_edges": degree.astype(np.int32),
        "first_edge": (np.cumsum(degree) - degree).astype(np.int32),
        "edge_reader": pad_array(receivers[order].astype(np.int32), count, fill=sizes.tasks),
        "edge_tensor": pad_array(tensor.astype(np.int32), count),
        "edge_bytes": pad_array(edge_bytes[order], count),
        "edge_opens": pad_array(np.diff(tensor, prepend=-1) != 0, count),
    }


def _home_reads(
    graph: TaskGraph, costs: Costs, sizes: Sizes, dtype: DTypeLike
) -> dict[str, np.ndarray]:
    reads = np.flatnonzero(~graph.is_resident[graph.input_edge_input])
    reads = reads[np.lexsort((graph.input_edge_reader[reads], graph.input_edge_input[reads]))]
    inputs, readers = graph.input_edge_input[reads], graph.input_edge_reader[reads]
    count, makers = sizes.home_reads, graph.input_maker[inputs].astype(np.int32)
    makers[makers < 0] = sizes.tasks
    return {
        "home_maker": pad_array(makers, count, fill=sizes.tasks),
        "home_input": pad_array(inputs.astype(np.int32), count),
        "home_reader": pad_array(readers.astype(np.int32), count, fill=sizes.tasks),
        "home_device": pad_array(graph.input_home[inputs].astype(np.int32), count),
        "home_bytes": pad_array(np.asarray(costs.input_bytes, dtype)[inputs], count),
        "home_opens": pad_array(np.diff(inputs, prepend=-1) != 0, count),
    }


def _chains(chains: list[list[int]], sizes: Sizes) -> dict[str, np.ndarray]:
    nobody = sizes.tasks
    chain = np.zeros(nobody + 1, np.int32)
    chain_next = np.full(nobody + 1, nobody, np.int32)
    for c, tasks in enumerate(chains):
        chain[tasks] = c
        chain_next[tasks[:-1]] = tasks[1:]
    heads = np.array([tasks[0] for tasks in chains], np.int32)
    chain_head = pad_array(heads, sizes.chains, fill=nobody)
    return {"chain": chain, "chain_head": chain_head, "chain_next": chain_next}


def input_ready_s(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns when `[N, D]` each task's graph inputs can be on each device, seconds."""
    ready = np.zeros((graph.num_tasks, costs.num_devices))
    home = graph.input_home[graph.input_edge_input]
    moved = home != RESIDENT
    source, inputs = home[moved], graph.input_edge_input[moved]
    arrival = costs.latency_s[source] + (
        costs.input_bytes[inputs, None] * costs.seconds_per_byte[source]
    )
    np.maximum.at(ready, graph.input_edge_reader[moved], arrival)
    return ready


def pad_array(array: np.ndarray, *shape: int, fill: float = 0) -> np.ndarray:
    """Returns the array with what pads it at the end of every axis."""
    padded = np.full(shape, fill, array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded


def _table(
    row: np.ndarray, task: np.ndarray, num_bytes: np.ndarray, nobody: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lists, per row, the tasks at the other end of its edges and the bytes they carry."""
    count = np.bincount(row, minlength=nobody + 1)
    order = np.argsort(row, kind="stable")
    column = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    tasks = np.full((nobody + 1, width), nobody, np.int32)
    sizes = np.zeros((nobody + 1, width), num_bytes.dtype)
    tasks[row[order], column] = task[order]
    sizes[row[order], column] = num_bytes[order]
    return tasks, sizes
