"""The data that every part shares: graphs, clusters, costs, programs, schedules.

Imports no sibling, and no JAX: a command line that needs none starts in half the time.
Arrays are NumPy on the host (float64, so that the oracle sees what the user gave) and become
float32 when they enter jitted code.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, dataclass_transform

import numpy as np

if TYPE_CHECKING:
    import chex
    import jax

RESIDENT = -1
"""`TaskGraph.input_home` of an input that lies on every device that reads it."""

_NUMBERS = (np.ndarray, np.number, float, int, list, tuple)

_T = TypeVar("_T")


_unregistered: list[type] = []


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: type[_T]) -> type[_T]:
    """Makes a frozen dataclass of `cls`, a pytree as Chex has it once JAX is there."""
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    made.replace = dataclasses.replace  # type: ignore[attr-defined]
    _unregistered.append(made)
    if "jax" in sys.modules:
        register_pytrees()
    return made


def register_pytrees() -> None:
    """Tells JAX of the pytrees that were made before it was loaded."""
    from chex import register_dataclass_type_with_jax_tree_util as register

    while _unregistered:
        register(_unregistered.pop())


@pytree
class TaskGraph:
    """A DAG of N tasks that make T tensors, read along E edges, with I graph inputs.

    Ids are positions; they need not be in topological order. Build one with
    `doppler_jax.make_graph`, which validates, or by `load_graph`, `from_networkx` or
    `partition`. Names and kernels travel beside it, in `ShardedProgram`.

    Attributes:
      flops: `[N]` floating-point operations of one call of each task.
      tensor_producer: `[T]` int, the task that makes each tensor.
      tensor_bytes: `[T]` size of each tensor.
      edge_tensor: `[E]` int, the tensor that is read along each edge.
      edge_reader: `[E]` int, the task that reads it; each (tensor, reader) is there once.
      input_bytes: `[I]` size of each graph input.
      input_home: `[I]` int, the device that it lies on at time 0, or `RESIDENT` (-1): on
        every device that reads it.
      input_maker: `[I]` int, the task whose result of the last call it is, or -1. Its home is
        then the device of that task, and `input_home` is `RESIDENT`.
      input_edge_input: `[F]` int, the graph input that is read.
      input_edge_reader: `[F]` int, the task that reads it.
      has_bytes: False where sizes are communication numbers, as in DOPPLER's text files:
        what has no bytes has no memory to limit.
    """

    flops: chex.Array
    tensor_producer: chex.Array
    tensor_bytes: chex.Array
    edge_tensor: chex.Array
    edge_reader: chex.Array
    input_bytes: chex.Array
    input_home: chex.Array
    input_maker: chex.Array
    input_edge_input: chex.Array
    input_edge_reader: chex.Array
    has_bytes: bool = True

    @property
    def is_resident(self) -> np.ndarray:
        """Whether each graph input lies on every device that reads it `[I]`."""
        return (np.asarray(self.input_home) == RESIDENT) & (np.asarray(self.input_maker) < 0)

    def homes(self, placement: np.ndarray) -> np.ndarray:
        """Returns where each graph input lies at time 0 `[I]`, for tasks on devices `[N]`."""
        homes = np.array(self.input_home)
        made = np.flatnonzero(np.asarray(self.input_maker) >= 0)
        homes[made] = placement[self.input_maker[made]]
        return homes

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

    def __repr__(self) -> str:
        sizes = "" if self.has_bytes else ", without bytes"
        return (
            f"TaskGraph({self.num_tasks} tasks, {self.num_tensors} tensors, {self.num_edges} "
            f"edges, {self.num_inputs} graph inputs{sizes})"
        )


@pytree
class Cluster:
    """D devices and the links between every ordered pair (source, destination).

    Presets are made by `doppler_jax.make_cluster`. Fields may be lists; what is a number is
    the same for every device, or for every link between two of them. Rates and capacities may
    be inf: what they limit then costs nothing.

        Cluster(flops_per_s=[9e12, 1e12], memory_bytes=[16e9, 64e9], link_bytes_per_s=12e9)

    Attributes:
      flops_per_s: `[D]` arithmetic operations a second, above 0; says how many devices.
      memory_bytes_per_s: `[D]` bytes a second that a task reads and writes, above 0.
      memory_bytes: `[D]` capacity, above 0.
      launch_s: `[D]` seconds that it takes to start one task.
      latency_s: `[D, D]` seconds that a transfer takes before its bytes; 0 on the diagonal.
      link_bytes_per_s: `[D, D]` bytes a second of a transfer, above 0; inf on the diagonal.

    Raises:
      ValueError: shapes disagree or a number is out of range; the message names the entry.
    """

    flops_per_s: chex.Array
    memory_bytes_per_s: chex.Array = np.inf
    memory_bytes: chex.Array = np.inf
    launch_s: chex.Array = 0.0
    latency_s: chex.Array = 0.0
    link_bytes_per_s: chex.Array = np.inf

    @property
    def num_devices(self) -> int:
        return self.flops_per_s.shape[0]

    def __post_init__(self) -> None:
        # As a pytree a cluster may hold what is no number, which nobody is to check.
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not all(isinstance(x, _NUMBERS) for x in fields.values()):
            return
        flops_per_s = np.asarray(self.flops_per_s, np.float64)
        if flops_per_s.ndim != 1 or not flops_per_s.size:
            raise ValueError(
                f"flops_per_s has shape {flops_per_s.shape}; expected [D] with D >= 1"
            )
        d = flops_per_s.size
        for name, given in fields.items():
            # A transfer to where it comes from takes no time: what a link's number is there.
            here = {"latency_s": 0.0, "link_bytes_per_s": np.inf}.get(name)
            shape = (d,) if here is None else (d, d)
            values = np.asarray(given, np.float64)
            if not values.ndim:
                values = np.full(shape, values)
                if here is not None:
                    np.fill_diagonal(values, here)
            _check_cluster_field(name, values, shape, here)
            object.__setattr__(self, name, values)

    def __repr__(self) -> str:
        return _show(self, f"{self.num_devices} devices")


def _check_cluster_field(
    name: str, values: np.ndarray, shape: tuple[int, ...], here: float | None
) -> None:
    if values.shape != shape:
        raise ValueError(f"{name} has shape {values.shape}; expected {shape}")
    is_overhead = name in ("launch_s", "latency_s")
    bad = ~(np.isfinite(values) & (values >= 0)) if is_overhead else ~(values > 0)
    for where in np.argwhere(bad)[:1].tolist():
        expected = "a finite number >= 0" if is_overhead else "a positive number"
        raise ValueError(f"{name}{where} is {values[tuple(where)]}; expected {expected}")
    for s in np.flatnonzero(np.diagonal(values) != here)[:1] if here is not None else ():
        raise ValueError(f"{name}[{s}, {s}] is {values[s, s]}; expected {here} on the diagonal")


@pytree
class Costs:
    """Seconds of every task on every device, and what moves tensors between devices.

    Moving tensor x from s to d takes
    `latency_s[s, d] + tensor_bytes[x] * seconds_per_byte[s, d]`. Where devices copy with what
    they compute on, each end spends `handling_s + tensor_bytes[x] * handling_s_per_byte` too:
    the task that makes x is longer by that for every other device that reads it, and so is, on
    each of those, the reader of x of smallest id.

    Build them with `doppler_jax.make_costs`, `reference_costs` or `from_edge_delays`.

    Attributes:
      compute_s: `[N, D]` seconds, launch included; inf where the device cannot run the task.
      tensor_bytes: `[T]` size of each tensor.
      input_bytes: `[I]` size of each graph input.
      latency_s: `[D, D]` seconds, 0 on the diagonal.
      seconds_per_byte: `[D, D]`, 0 on the diagonal.
      capacity_bytes: `[D]` memory of each device, inf where unlimited.
      handling_s: `[D]` seconds a transfer; None where devices spend no time on transfers.
      handling_s_per_byte: `[D]`; None where `handling_s` is.
    """

    compute_s: chex.Array
    tensor_bytes: chex.Array
    input_bytes: chex.Array
    latency_s: chex.Array
    seconds_per_byte: chex.Array
    capacity_bytes: chex.Array
    handling_s: chex.Array | None = None
    handling_s_per_byte: chex.Array | None = None

    @property
    def num_devices(self) -> int:
        return self.compute_s.shape[1]

    def __repr__(self) -> str:
        return _show(self, f"{self.compute_s.shape[0]} tasks on {self.num_devices} devices")


@pytree
class Schedule:
    """When and where each task, and each transfer, of one execution ran.

    A schedule simulated under `parallel` links may leave the transfers out (length 0):
    they follow from the finish times. Those of graph inputs may be left out of any
    schedule that was measured.

    Attributes:
      placement: `[N]` int, device of each task.
      start_s: `[N]` seconds.
      finish_s: `[N]` seconds.
      transfer_tensor: `[X]` int, tensor; graph input i is written ~i (below 0).
      transfer_source: `[X]` int, device.
      transfer_destination: `[X]` int, device.
      transfer_start_s: `[X]` seconds, when its link began to carry it.
      transfer_finish_s: `[X]` seconds.
    """

    placement: chex.Array
    start_s: chex.Array
    finish_s: chex.Array
    transfer_tensor: chex.Array
    transfer_source: chex.Array
    transfer_destination: chex.Array
    transfer_start_s: chex.Array
    transfer_finish_s: chex.Array

    def __repr__(self) -> str:
        return _show(
            self, f"{len(self.placement)} tasks, {len(self.transfer_tensor)} transfers"
        )


def _show(record: Any, title: str) -> str:
    """Returns a line a field, for `repr`: what an array holds, not all of it."""
    rows = [
        f"  {field.name}: {_brief(value)}"
        for field in dataclasses.fields(record)
        if (value := getattr(record, field.name)) is not None
    ]
    return "\n".join([f"{type(record).__name__}({title}):", *rows])


def _brief(values: Any) -> str:
    """Returns the shape of an array and its numbers, or their range if they are many."""
    if not isinstance(values, np.ndarray) or not values.size:
        return f"{getattr(values, 'shape', values)}"
    # Diagonals of links say nothing.
    is_square = values.ndim == 2 and values.shape[0] == values.shape[1] > 1
    shown = values[~np.eye(len(values), dtype=bool)] if is_square else values.ravel()
    low, high = np.min(shown), np.max(shown)
    numbers = f"{low:.4g} to {high:.4g}"
    if low == high:
        numbers = f"{low:.4g}"
    elif values.ndim == 1 and values.size <= 8:
        numbers = " ".join(f"{value:.4g}" for value in shown)
    return f"{list(values.shape)} {numbers}"


class Plans(NamedTuple):
    """Many placements, and the orders that they come with."""

    placements: np.ndarray  # [B, N]
    ranks: np.ndarray  # [B, N] least first; [0, N] where they come with none


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Where tasks run, and when. Plans are equal if they make devices do the same.

    Attributes:
      placement: `[N]` int, device of each task.
      priority: `[N]` ranks, least first; None: tasks have none.
      queue: the discipline that they are meant for: "fifo", which heeds no ranks, "priority"
        or "in_order".
    """

    placement: Any
    priority: Any = None
    queue: str = "fifo"

    def _content(self) -> tuple[str, bytes, bytes]:
        ranks = () if self.queue == "fifo" else self.priority
        return (
            self.queue,
            np.asarray(self.placement, np.int64).tobytes(),
            np.asarray(() if ranks is None else ranks, np.float64).tobytes(),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())


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
    `graph.tensor_producer[x] == v`, in increasing x. Made by `doppler_jax.partition`.

    Attributes:
      graph: the task graph, N tasks, I graph inputs.
      names: `[N]` readable, unique.
      kernels: `[N]` what each task calls.
      operands: `[N]` what it calls it on: tensors and graph inputs.
      inputs: `[I]` the block of an argument or a constant that each graph input is.
      outputs: per flat output of the function, the blocks that it is put together from.
      arg_avals: per flat argument, its shape and dtype.
      consts: constants of the function, in the order of `InputBlock.source`.
      in_tree: treedef of (args, kwargs), as `jax.tree.structure` gives it.
      out_tree: treedef of what the function returns.
      origins: `[N]` where each task comes from.
      tensors: per result of every unit of partitioning, how it is cut and why.
      parameters: names of the function's parameters by position, which keywords may take;
        `in_tree` has them in their positions.
      ties: pairs of flat arguments that were the same array, and so are one graph input.
      untied: the same tasks where they are two; None without ties.
      carried: flat arguments that are what the last call returned, and which flat outputs.
    """

    graph: TaskGraph
    names: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    operands: tuple[tuple[Ref, ...], ...]
    inputs: tuple[InputBlock, ...]
    outputs: tuple[OutputBlocks, ...]
    arg_avals: tuple[jax.ShapeDtypeStruct, ...]
    consts: tuple[chex.Array, ...]
    in_tree: Any
    out_tree: Any
    origins: tuple[TaskOrigin, ...] = ()
    tensors: tuple[TensorOrigin, ...] = ()
    parameters: tuple[str, ...] = ()
    ties: tuple[tuple[int, int], ...] = ()
    untied: ShardedProgram | None = None
    carried: tuple[tuple[int, int], ...] = ()

    def __repr__(self) -> str:
        return (
            f"ShardedProgram({self.graph!r}, {len(set(self.kernels))} distinct kernels, "
            f"{len(self.arg_avals)} arguments, {len(self.outputs)} outputs)"
        )


@dataclasses.dataclass(frozen=True)
class Policy:
    """A trained policy: parameters as a plain tree, and what it takes to use them."""

    params: chex.ArrayTree
    config: Any  # `PolicyConfig`, or the settings of another learned method
    method: str = "doppler"  # of `place`, whose policy it is
