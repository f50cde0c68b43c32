"""The data that every part shares: graphs, clusters, costs, programs, schedules.

Imports no sibling. Arrays are NumPy on the host (float64, so that the oracle
sees what the user gave) and become float32 when they enter jitted code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import chex
import jax

RESIDENT = -1
"""`TaskGraph.input_home` of an input that lies on every device that reads it."""

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: type[_T]) -> type[_T]:
    """Makes a frozen Chex dataclass of `cls` that type checkers understand."""
    return chex.dataclass(cls, frozen=True)


@pytree
class TaskGraph:
    """A DAG of N tasks that make T tensors, read along E edges, with I graph inputs.

    Ids are positions; they need not be in topological order. Build one with
    `doppler_jax.graphs.build.make_graph`, which validates. Names and kernels
    travel beside it, in `ShardedProgram`.
    """

    flops: chex.Array  # [N] floating-point operations of one call
    tensor_producer: chex.Array  # [T] int, task that makes the tensor
    tensor_bytes: chex.Array  # [T] size
    edge_tensor: chex.Array  # [E] int, tensor that is read
    edge_reader: chex.Array  # [E] int, task that reads it; each (tensor, reader) once
    input_bytes: chex.Array  # [I] size of each graph input
    input_home: chex.Array  # [I] int, device it lies on at time 0, or RESIDENT
    input_edge_input: chex.Array  # [F] int, graph input that is read
    input_edge_reader: chex.Array  # [F] int, task that reads it
    has_bytes: bool = True  # False: sizes are communication numbers, so no memory is limited

    @property
    def num_tasks(self) -> int:
        return self.flops.shape[0]

    @property
    def num_tensors(self) -> int:
        return self.tensor_producer.shape[0]

    @property
    def num_edges(self) -> int:
        return self.edge_tensor.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.input_bytes.shape[0]


@pytree
class Cluster:
    """D devices and the links between every ordered pair (source, destination)."""

    flops_per_s: chex.Array  # [D] peak arithmetic rate
    memory_bytes_per_s: chex.Array  # [D] rate at which a task reads and writes memory
    memory_bytes: chex.Array  # [D] capacity
    launch_s: chex.Array  # [D] overhead of starting one task
    latency_s: chex.Array  # [D, D] of a transfer, diagonal 0
    link_bytes_per_s: chex.Array  # [D, D] of a transfer, diagonal inf

    @property
    def num_devices(self) -> int:
        return self.flops_per_s.shape[0]


@pytree
class Costs:
    """Seconds of every task on every device, and what moves tensors between devices.

    Moving tensor x from s to d takes
    `latency_s[s, d] + tensor_bytes[x] * seconds_per_byte[s, d]`. Where devices copy with what
    they compute on, each end spends `handling_s + tensor_bytes[x] * handling_s_per_byte` too:
    the task that makes x is longer by that for every other device that reads it, and so is, on
    each of those, the reader of x of smallest id.
    """

    compute_s: chex.Array  # [N, D] launch included; inf where the device cannot run it
    tensor_bytes: chex.Array  # [T]
    input_bytes: chex.Array  # [I]
    latency_s: chex.Array  # [D, D] diagonal 0
    seconds_per_byte: chex.Array  # [D, D] diagonal 0
    capacity_bytes: chex.Array  # [D] memory of each device, inf where unlimited
    handling_s: chex.Array | None = None  # [D] None: devices spend no time on transfers
    handling_s_per_byte: chex.Array | None = None  # [D] None where `handling_s` is

    @property
    def num_devices(self) -> int:
        return self.compute_s.shape[1]


@pytree
class Schedule:
    """When and where each task, and each transfer, of one execution ran.

    A schedule simulated under `parallel` links may leave the transfers out (length 0):
    they follow from the finish times. Those of graph inputs may be left out of any
    schedule that was measured.
    """

    placement: chex.Array  # [N] int device
    start_s: chex.Array  # [N]
    finish_s: chex.Array  # [N]
    transfer_tensor: chex.Array  # [X] int tensor; graph input i is written ~i (below 0)
    transfer_source: chex.Array  # [X] int device
    transfer_destination: chex.Array  # [X] int device
    transfer_start_s: chex.Array  # [X] when its link began to carry it
    transfer_finish_s: chex.Array  # [X]


@dataclasses.dataclass(frozen=True)
class TensorRef:
    """An operand that is tensor `tensor` of the task graph."""

    tensor: int


@dataclasses.dataclass(frozen=True)
class InputRef:
    """An operand that is graph input `input` (a block of an argument)."""

    input: int


Ref = TensorRef | InputRef


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """What one task computes. Tasks that compute the same share one `Kernel` object."""

    name: str
    fn: Callable[..., tuple[jax.Array, ...]]  # pure and jittable: operands to results
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass(frozen=True)
class InputBlock:
    """Graph input: block `[start, limit)` of flat value `source`.

    `source` counts the function's flattened arguments first, then its constants.
    """

    source: int
    start: tuple[int, ...]
    limit: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class OutputBlocks:
    """One flat output of the function, as a row-major grid of blocks."""

    aval: jax.ShapeDtypeStruct
    grid: tuple[int, ...]  # blocks along each dimension
    blocks: tuple[Ref, ...]  # row-major, prod(grid) long


@dataclasses.dataclass(frozen=True)
class TaskOrigin:
    """Where a task comes from."""

    primitives: tuple[str, ...]  # fused in it, the root first; "sum", "form" for those
    source: str  # the user's line of the root, "file.py:12:4 (fn)"
    group: int  # index of the unit of partitioning


@dataclasses.dataclass(frozen=True)
class TensorOrigin:
    """A tensor of the program that tasks make, and how it is cut."""

    name: str  # readable, "attn.qk.dot_general"
    aval: jax.ShapeDtypeStruct  # the whole tensor
    grid: tuple[int, ...]  # blocks along each dimension
    source: str  # the user's line, "file.py:12:4 (fn)"
    reason: str  # why it is cut so


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedProgram:
    """A program cut into tasks: what is simulated, placed and executed.

    Task v calls `kernels[v].fn` on `operands[v]` (a tensor may occur twice there
    and is one edge of the graph) and makes the tensors x with
    `graph.tensor_producer[x] == v`, in increasing x.
    """

    graph: TaskGraph
    names: tuple[str, ...]  # [N] readable, unique
    kernels: tuple[Kernel, ...]  # [N]
    operands: tuple[tuple[Ref, ...], ...]  # [N]
    inputs: tuple[InputBlock, ...]  # [I]
    outputs: tuple[OutputBlocks, ...]  # per flat output
    arg_avals: tuple[jax.ShapeDtypeStruct, ...]  # per flat argument
    consts: tuple[chex.Array, ...]
    in_tree: Any  # treedef of (args, kwargs) as jax.tree.structure gives it
    out_tree: Any
    origins: tuple[TaskOrigin, ...] = ()  # [N]
    tensors: tuple[TensorOrigin, ...] = ()  # per result of every unit of partitioning
