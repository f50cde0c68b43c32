"""A task graph with its costs, padded and indexed for jitted code."""

import dataclasses

import chex
import numpy as np
from numpy.typing import DTypeLike

from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.chains import chain_cover
from doppler_jax.types import RESIDENT, Costs, TaskGraph, pytree


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

    def holds(self, other: "Sizes") -> bool:
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
    home_reader: chex.Array  # [F] int32, reads of inputs with a home, in the order of inputs
    home_device: chex.Array  # [F] int32
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
    """Returns the padded problem, every size rounded up to its bucket (see `bucket_size`).

    Args:
      graph: the task graph.
      costs: its costs.
      dtype: of times and sizes in bytes.
      sizes: what to pad to instead, so that several problems share a compilation.

    Raises:
      ValueError: the problem does not fit into `sizes`.
    """
    if sizes is not None:
        return pad_further(pad_problem(graph, costs, dtype), sizes)
    n = graph.num_tasks
    size = bucket_size(n, smallest=8)
    senders, receivers = task_edges(graph)
    edge_bytes = np.asarray(costs.tensor_bytes, dtype)[graph.edge_tensor]
    pred_task, pred_bytes = _table(receivers, senders, edge_bytes, size)
    succ_task, succ_bytes = _table(senders, receivers, edge_bytes, size)
    return PaddedProblem(
        num_tasks=np.int32(n),
        compute_s=_pad_rows(np.asarray(costs.compute_s, dtype), size + 1),
        input_ready_s=_pad_rows(input_ready_s(graph, costs).astype(dtype), size + 1),
        latency_s=np.asarray(costs.latency_s, dtype),
        seconds_per_byte=np.asarray(costs.seconds_per_byte, dtype),
        pred_task=pred_task,
        pred_bytes=pred_bytes,
        succ_task=succ_task,
        succ_bytes=succ_bytes,
        num_producers=np.bincount(receivers, minlength=size + 1).astype(np.int32),
        **_edges(graph, edge_bytes, size),
        **_home_reads(graph, costs, size, dtype),
        **_chains(graph, size),
        **_handling(costs, dtype),
    )


def padded_sizes(padded: PaddedProblem) -> Sizes:
    """Returns the sizes that a padded problem's arrays have."""
    return Sizes(
        tasks=padded.padded_tasks,
        edges=padded.edge_reader.shape[0] - 1,
        producers=padded.pred_task.shape[1],
        readers=padded.succ_task.shape[1],
        chains=padded.chain_head.shape[0],
        devices=padded.num_devices,
        home_reads=padded.home_reader.shape[0],
    )


def pad_further(padded: PaddedProblem, sizes: Sizes) -> PaddedProblem:
    """Returns the problem in NumPy arrays of given sizes; no makespan changes.

    Devices that are added can run nothing.

    Raises:
      ValueError: the problem does not fit.
    """
    if not sizes.holds(padded_sizes(padded)):
        raise ValueError(f"a problem of {padded_sizes(padded)} does not fit into {sizes}")
    old, new = padded.padded_tasks, sizes.tasks
    spare = sizes.devices - padded.num_devices

    def rows(array: np.ndarray) -> np.ndarray:
        return np.pad(array, axis_padding(array, new + 1), mode="edge")

    def ids(array: np.ndarray) -> np.ndarray:
        return np.where(array == old, np.int32(new), array)

    def links(array: np.ndarray) -> np.ndarray:
        return np.pad(array, ((0, spare), (0, spare)))

    def devices(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else np.pad(array, (0, spare))

    return PaddedProblem(
        num_tasks=padded.num_tasks,
        compute_s=fill_columns(rows(padded.compute_s), np.inf, sizes.devices),
        input_ready_s=fill_columns(rows(padded.input_ready_s), 0, sizes.devices),
        latency_s=links(padded.latency_s),
        seconds_per_byte=links(padded.seconds_per_byte),
        pred_task=fill_columns(ids(rows(padded.pred_task)), new, sizes.producers),
        pred_bytes=fill_columns(rows(padded.pred_bytes), 0, sizes.producers),
        succ_task=fill_columns(ids(rows(padded.succ_task)), new, sizes.readers),
        succ_bytes=fill_columns(rows(padded.succ_bytes), 0, sizes.readers),
        num_producers=rows(padded.num_producers),
        num_edges=rows(padded.num_edges),
        first_edge=rows(padded.first_edge),
        edge_reader=fill_rows(ids(padded.edge_reader), new, sizes.edges + 1),
        edge_tensor=fill_rows(padded.edge_tensor, 0, sizes.edges + 1),
        edge_bytes=fill_rows(padded.edge_bytes, 0, sizes.edges + 1),
        edge_opens=fill_rows(padded.edge_opens, False, sizes.edges + 1),
        home_reader=fill_rows(ids(padded.home_reader), new, sizes.home_reads),
        home_device=fill_rows(padded.home_device, 0, sizes.home_reads),
        home_bytes=fill_rows(padded.home_bytes, 0, sizes.home_reads),
        home_opens=fill_rows(padded.home_opens, False, sizes.home_reads),
        chain=rows(padded.chain),
        chain_head=fill_rows(ids(padded.chain_head), new, sizes.chains),
        chain_next=ids(rows(padded.chain_next)),
        handling_s=devices(padded.handling_s),
        handling_s_per_byte=devices(padded.handling_s_per_byte),
    )


def _edges(graph: TaskGraph, edge_bytes: np.ndarray, size: int) -> dict[str, np.ndarray]:
    senders, receivers = task_edges(graph)
    order = np.lexsort((receivers, graph.edge_tensor, senders))
    readers = receivers[order].astype(np.int32)
    tensor = graph.edge_tensor[order]
    degree = np.bincount(senders, minlength=size + 1)
    spare = bucket_size(len(order), smallest=16) + 1 - len(order)
    return {
        "num_edges": degree.astype(np.int32),
        "first_edge": (np.cumsum(degree) - degree).astype(np.int32),
        "edge_reader": np.pad(readers, (0, spare), constant_values=size),
        "edge_tensor": np.pad(tensor, (0, spare)).astype(np.int32),
        "edge_bytes": np.pad(edge_bytes[order], (0, spare)),
        "edge_opens": np.pad(np.diff(tensor, prepend=-1) != 0, (0, spare)),
    }


def _home_reads(
    graph: TaskGraph, costs: Costs, size: int, dtype: DTypeLike
) -> dict[str, np.ndarray]:
    reads = np.flatnonzero(graph.input_home[graph.input_edge_input] != RESIDENT)
    reads = reads[np.argsort(graph.input_edge_input[reads], kind="stable")]
    inputs = graph.input_edge_input[reads]
    spare = bucket_size(len(reads), smallest=2) - len(reads) if len(reads) else 0  # often none
    readers = np.pad(graph.input_edge_reader[reads], (0, spare), constant_values=size)
    return {
        "home_reader": readers.astype(np.int32),
        "home_device": np.pad(graph.input_home[inputs], (0, spare)).astype(np.int32),
        "home_bytes": np.pad(np.asarray(costs.input_bytes, dtype)[inputs], (0, spare)),
        "home_opens": np.pad(np.diff(inputs, prepend=-1) != 0, (0, spare)),
    }


def _handling(costs: Costs, dtype: DTypeLike) -> dict[str, np.ndarray | None]:
    names = ("handling_s", "handling_s_per_byte")
    found = {name: getattr(costs, name) for name in names}
    return {k: None if y is None else np.asarray(y, dtype) for k, y in found.items()}


def _chains(graph: TaskGraph, size: int) -> dict[str, np.ndarray]:
    chains = chain_cover(graph)
    chain_head = np.full(bucket_size(len(chains), smallest=8), size, np.int32)
    chain_head[: len(chains)] = [chain[0] for chain in chains]
    chain = np.zeros(size + 1, np.int32)
    chain_next = np.full(size + 1, size, np.int32)
    for c, tasks in enumerate(chains):
        chain[tasks] = c
        chain_next[tasks[:-1]] = tasks[1:]
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


def _pad_rows(array: np.ndarray, rows: int) -> np.ndarray:
    padded = np.zeros((rows, *array.shape[1:]), array.dtype)
    padded[: array.shape[0]] = array
    return padded


def _table(
    row: np.ndarray, task: np.ndarray, num_bytes: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lists, per row, the tasks at the other end of its edges and the bytes they carry."""
    count = np.bincount(row, minlength=size + 1)
    width = bucket_size(int(count.max()), smallest=4)
    order = np.argsort(row, kind="stable")
    column = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    tasks = np.full((size + 1, width), size, np.int32)
    sizes = np.zeros((size + 1, width), num_bytes.dtype)
    tasks[row[order], column] = task[order]
    sizes[row[order], column] = num_bytes[order]
    return tasks, sizes


def axis_padding(array: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Returns the padding that makes the first axis `size` long."""
    return [(0, size - array.shape[0])] + [(0, 0)] * (array.ndim - 1)


def fill_rows(array: np.ndarray, value: float, size: int) -> np.ndarray:
    """Returns the array with a first axis of `size`."""
    return np.pad(array, axis_padding(array, size), constant_values=value)


def fill_columns(array: np.ndarray, value: float, size: int) -> np.ndarray:
    """Returns the table with `size` columns."""
    return np.pad(array, ((0, 0), (0, size - array.shape[1])), constant_values=value)
