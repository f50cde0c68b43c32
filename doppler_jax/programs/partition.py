"""Cuts a tensor program into tasks on blocks, by the tensor relational algebra.

A contraction joins blocks on equal block index and aggregates over the contracted one; an
element-wise operation joins on equal indices; a reduction aggregates; where a reader needs
other blocks than the producer stored, formation tasks slice and concatenate. `rules` says
which dimensions go together, `grids` into how many blocks each is cut.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np

from doppler_jax.graphs.build import make_graph
from doppler_jax.programs.grids import (
    Grid,
    Index,
    Shape,
    block_shape,
    choose_counts,
    indices,
)
from doppler_jax.programs.kernels import KernelCache
from doppler_jax.programs.program import Atom, Equation, Literal, Program, Value
from doppler_jax.programs.rules import Labelling, Labels, get_labelling
from doppler_jax.types import (
    InputBlock,
    InputRef,
    Kernel,
    OutputBlocks,
    Ref,
    ShardedProgram,
    TaskGraph,
    TensorRef,
)


def partition(program: Program, num_shards: int = 4) -> ShardedProgram:
    """Returns the program cut into tasks, its tensors into up to `num_shards` blocks.

    Arguments and constants are resident graph inputs: each reader gets the block that it
    needs, without a task.

    Args:
      program: what `trace` made.
      num_shards: blocks per tensor, a power of two; a tensor whose dimensions cannot be
        halved that often gets fewer.

    Raises:
      ValueError: `num_shards` is not a power of two, or a primitive has no rule.
    """
    whole = isinstance(num_shards, int | np.integer) and not isinstance(num_shards, bool)
    if not whole or num_shards < 1 or num_shards & (num_shards - 1):
        raise ValueError(f"num_shards is {num_shards!r}; expected a power of two: 1, 2, 4, ...")
    partitioner = _Partitioner(program, int(num_shards))
    for number, equation in enumerate(program.equations):
        partitioner.add_equation(f"{equation.primitive.name}_{number}", equation)
    outputs = tuple(partitioner.output(value) for value in program.outputs)
    tasks = partitioner.tasks
    return ShardedProgram(
        graph=_make_task_graph(tasks, partitioner.input_avals),
        names=tuple(task.name for task in tasks),
        kernels=tuple(task.kernel for task in tasks),
        operands=tuple(task.operands for task in tasks),
        inputs=tuple(partitioner.inputs),
        outputs=outputs,
        arg_avals=program.arg_avals,
        consts=program.const_arrays,
        in_tree=program.in_tree,
        out_tree=program.out_tree,
    )


@dataclasses.dataclass(frozen=True)
class _Task:
    """A task; each makes one tensor, so that task v makes tensor v."""

    name: str
    kernel: Kernel
    operands: tuple[Ref, ...]
    flops: float


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where the blocks of a produced tensor are."""

    name: str
    grid: Grid
    blocks: tuple[Ref, ...]  # row-major


class _Partitioner:
    """The tasks made so far, and which blocks of which tensors exist."""

    def __init__(self, program: Program, num_shards: int) -> None:
        self.tasks: list[_Task] = []
        self.inputs: list[InputBlock] = []
        self.input_avals: list[jax.ShapeDtypeStruct] = []
        self._num_shards = num_shards
        self._kernels = KernelCache()
        self._source = {v: i for i, v in enumerate((*program.args, *program.consts))}
        self._stored: dict[Value, _Stored] = {}
        self._blocks: dict[tuple[Value, Shape, Shape], Ref] = {}

    def add_equation(self, name: str, equation: Equation) -> None:
        """Adds the tasks that compute one equation, all blocks of its result."""
        labelling = get_labelling(equation)
        counts = choose_counts(labelling, self._grids(equation.operands), self._num_shards)
        block = {label: size // counts[label] for label, size in enumerate(labelling.sizes)}
        kernel = self._block_kernel(equation, labelling, block)
        flops = labelling.flops * math.prod(block.values())
        grid = tuple(counts[label] for label in labelling.result)
        inner_labels = labelling.aggregated if labelling.aggregate else ()
        inner_grid = tuple(counts[label] for label in inner_labels)
        blocks = []
        for outer in indices(grid):
            partials = []
            for inner in indices(inner_grid):
                # A label of size 1 that stands alone has block 0.
                at = dict.fromkeys(block, 0)
                at.update(zip(labelling.result, outer, strict=True))
                at.update(zip(inner_labels, inner, strict=True))
                reads = self._read_blocks(equation, labelling, at, block)
                partials.append(
                    self._add(_indexed(name, (*outer, *inner)), kernel, reads, flops)
                )
            blocks.append(self._aggregate(name, outer, labelling.aggregate, partials))
        self._store(equation.results[0], _Stored(name, grid, tuple(blocks)))

    def output(self, value: Value) -> OutputBlocks:
        """Returns where the blocks of an output of the program are."""
        if value in self._stored:
            stored = self._stored[value]
            return OutputBlocks(value.aval, stored.grid, stored.blocks)
        shape = value.aval.shape
        whole = self._fetch(value, (0,) * len(shape), shape)
        return OutputBlocks(value.aval, (1,) * len(shape), (whole,))

    def _grids(self, operands: tuple[Atom, ...]) -> tuple[Grid | None, ...]:
        return tuple(
            self._stored[atom].grid
            if isinstance(atom, Value) and atom in self._stored
            else None
            for atom in operands
        )

    def _block_kernel(
        self, equation: Equation, labelling: Labelling, block: Mapping[int, int]
    ) -> Kernel:
        operands = [
            jax.ShapeDtypeStruct(_shape(labels, block), operand.aval.dtype)
            for operand, labels in zip(equation.operands, labelling.operands, strict=True)
        ]
        shape = _shape(labelling.result, block)
        result = jax.ShapeDtypeStruct(shape, equation.results[0].aval.dtype)
        params = labelling.block_params(shape) if labelling.block_params else {}
        return self._kernels.primitive(equation, operands, result, params)

    def _read_blocks(
        self,
        equation: Equation,
        labelling: Labelling,
        at: Mapping[int, int],
        block: Mapping[int, int],
    ) -> tuple[Ref, ...]:
        """Returns what the task at block index `at` reads; literals are in its kernel."""
        refs = []
        for operand, labels in zip(equation.operands, labelling.operands, strict=True):
            if not isinstance(operand, Literal):
                start = tuple(at[label] * block[label] for label in labels)
                limit = tuple((at[label] + 1) * block[label] for label in labels)
                refs.append(self._fetch(operand, start, limit))
        return tuple(refs)

    def _aggregate(self, name: str, outer: Index, how: str | None, partials: list[Ref]) -> Ref:
        if how is None or len(partials) == 1:
            return partials[0]
        partial = self.tasks[-1].kernel.results[0]
        kernel = self._kernels.aggregate(how, partial, len(partials))
        flops = (len(partials) - 1) * math.prod(partial.shape)
        return self._add(_indexed(f"{name}.{how}", outer), kernel, tuple(partials), flops)

    def _fetch(self, value: Value, start: Shape, limit: Shape) -> Ref:
        """Returns block `[start, limit)` of a tensor, formed if nobody has made it yet."""
        key = (value, start, limit)
        if key not in self._blocks:
            if value in self._source:
                self._blocks[key] = InputRef(len(self.inputs))
                self.inputs.append(InputBlock(self._source[value], start, limit))
                shape = tuple(b - a for a, b in zip(start, limit, strict=True))
                self.input_avals.append(jax.ShapeDtypeStruct(shape, value.aval.dtype))
            else:
                self._blocks[key] = self._form(value, start, limit)
        return self._blocks[key]

    def _form(self, value: Value, start: Shape, limit: Shape) -> Ref:
        stored = self._stored[value]
        block = block_shape(value.aval.shape, stored.grid)
        first = tuple(a // size for a, size in zip(start, block, strict=True))
        last = tuple(-(-b // size) for b, size in zip(limit, block, strict=True))
        grid = tuple(b - a for a, b in zip(first, last, strict=True))
        refs = []
        for offset in indices(grid):
            index = tuple(a + b for a, b in zip(first, offset, strict=True))
            refs.append(self._blocks[value, *_bounds(index, block)])
        within = tuple(a - f * size for a, f, size in zip(start, first, block, strict=True))
        needed = tuple(b - a for a, b in zip(start, limit, strict=True))
        dtype = value.aval.dtype
        kernel = self._kernels.form(
            jax.ShapeDtypeStruct(block, dtype),
            grid,
            within,
            jax.ShapeDtypeStruct(needed, dtype),
        )
        ranges = ",".join(f"{a}:{b}" for a, b in zip(start, limit, strict=True))
        return self._add(f"{stored.name}.form[{ranges}]", kernel, tuple(refs), 0.0)

    def _store(self, value: Value, stored: _Stored) -> None:
        self._stored[value] = stored
        block = block_shape(value.aval.shape, stored.grid)
        for index, ref in zip(indices(stored.grid), stored.blocks, strict=True):
            self._blocks[value, *_bounds(index, block)] = ref

    def _add(self, name: str, kernel: Kernel, operands: tuple[Ref, ...], flops: float) -> Ref:
        self.tasks.append(_Task(name, kernel, operands, flops))
        return TensorRef(len(self.tasks) - 1)


def _make_task_graph(tasks: list[_Task], input_avals: list[jax.ShapeDtypeStruct]) -> TaskGraph:
    reads = [(ref, v) for v, task in enumerate(tasks) for ref in task.operands]
    edges = [(ref.tensor, v) for ref, v in reads if isinstance(ref, TensorRef)]
    input_edges = [(ref.input, v) for ref, v in reads if isinstance(ref, InputRef)]
    return make_graph(
        flops=[task.flops for task in tasks],
        tensor_producer=range(len(tasks)),
        tensor_bytes=[_num_bytes(task.kernel.results[0]) for task in tasks],
        edge_tensor=[x for x, _ in edges],
        edge_reader=[v for _, v in edges],
        input_bytes=[_num_bytes(aval) for aval in input_avals],
        input_edge_input=[i for i, _ in input_edges],
        input_edge_reader=[v for _, v in input_edges],
    )


def _num_bytes(aval: jax.ShapeDtypeStruct) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def _shape(labels: Labels, block: Mapping[int, int]) -> Shape:
    return tuple(block[label] for label in labels)


def _bounds(index: Index, block: Shape) -> tuple[Shape, Shape]:
    """Returns start and limit of the block at `index` of a grid of equal blocks."""
    start = tuple(i * size for i, size in zip(index, block, strict=True))
    return start, tuple(a + size for a, size in zip(start, block, strict=True))


def _indexed(name: str, index: Index) -> str:
    return f"{name}[{','.join(map(str, index))}]" if index else name
