"""Makes the tasks of a program whose groups are cut: joins, aggregations, formations."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax

from doppler_jax.graphs.build import make_graph
from doppler_jax.programs.blocks import block_bytes, num_bytes
from doppler_jax.programs.grids import Counts, Grid, Index, block_shape, grid_of, indices
from doppler_jax.programs.kernels import GroupBlocks, KernelCache
from doppler_jax.programs.labelling import Labels, Shape
from doppler_jax.programs.program import Group, Literal, Program, Step, Value
from doppler_jax.types import (
    RESIDENT,
    InputBlock,
    InputRef,
    Kernel,
    OutputBlocks,
    Ref,
    TaskGraph,
    TaskOrigin,
    TensorRef,
)


def make_tasks(
    program: Program,
    groups: Sequence[Group],
    counts: Sequence[Counts],
    kernels: KernelCache,
) -> "TaskMaker":
    """Returns the tasks of a program whose groups are cut into `counts`."""
    maker = TaskMaker(program, kernels)
    for number, (group, of) in enumerate(zip(groups, counts, strict=True)):
        maker.add_group(number, group, of)
    for value in program.outputs:  # arguments that are outputs become graph inputs too
        maker.output(value)
    return maker


@dataclasses.dataclass(frozen=True)
class Task:
    """A task; its kernel's results are tensors, numbered in the order of the tasks."""

    name: str
    kernel: Kernel
    operands: tuple[Ref, ...]
    flops: float
    origin: TaskOrigin


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where the blocks of a produced tensor are."""

    name: str
    grid: Grid
    blocks: tuple[Ref, ...]  # row-major
    source: str  # the user's line
    group: int


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A group, cut, and what its tasks have in common."""

    number: int
    group: Group
    counts: Counts
    blocks: GroupBlocks
    outer: Labels  # of all results
    named: Labels  # of the first result, which tasks are named after
    inner: Labels  # aggregated over
    root_reads: tuple[int, ...]  # slots that the tasks read
    epilogue_reads: tuple[int, ...]  # slots that the aggregating tasks read
    root_flops: float  # of one task
    epilogue_flops: float  # of one block

    @property
    def is_aggregated(self) -> bool:
        return any(self.counts[label] > 1 for label in self.inner)

    def origin(self, *primitives: str) -> TaskOrigin:
        return TaskOrigin(primitives, self.group.root.source, self.number)


def _cut(number: int, group: Group, counts: Counts, blocks: GroupBlocks) -> _Cut:
    labelling = group.labelling
    outer = tuple(dict.fromkeys(label for labels in labelling.results for label in labels))
    aggregated = any(counts[label] > 1 for label in labelling.aggregated)
    split = group.num_root_steps if aggregated else len(group.steps)
    last = blocks.steps[-1].results
    elements = math.prod(blocks.avals[last[0]].shape) if last else 0
    return _Cut(
        number=number,
        group=group,
        counts=counts,
        blocks=blocks,
        outer=outer,
        named=labelling.results[0] if labelling.results else (),
        inner=labelling.aggregated,
        root_reads=_slots_read(group, group.steps[:split]),
        epilogue_reads=_slots_read(group, group.steps[split:]),
        root_flops=labelling.task_flops(counts),
        epilogue_flops=group.epilogue_flops * elements,
    )


def _slots_read(group: Group, steps: tuple[Step, ...]) -> tuple[int, ...]:
    """Returns the operands that some steps read, literals left out, in increasing order."""
    read = {slot for step in steps for slot in step.reads if slot < len(group.operands)}
    return tuple(slot for slot in sorted(read) if not isinstance(group.operands[slot], Literal))


class TaskMaker:
    """The tasks made so far, and which blocks of which tensors exist."""

    def __init__(self, program: Program, kernels: KernelCache) -> None:
        self.tasks: list[Task] = []
        self.inputs: list[InputBlock] = []
        self._num_tensors = 0
        self._kernels = kernels
        self._arrays = (*program.args, *program.consts)
        self._source = {value: i for i, value in enumerate(self._arrays)}
        self._is_resident = program.is_resident + (True,) * len(program.consts)
        self._stored: dict[Value, _Stored] = {}
        self._blocks: dict[tuple[Value, Shape, Shape], Ref] = {}

    def add_group(self, number: int, group: Group, counts: Counts) -> None:
        """Adds the tasks that compute one group, all blocks of its results."""
        cut = _cut(number, group, counts, self._kernels.cut(group, counts))
        blocks: list[dict[Index, Ref]] = [{} for _ in group.results]
        for outer in indices(grid_of(cut.outer, counts)):
            at = dict.fromkeys(counts, 0) | dict(zip(cut.outer, outer, strict=True))
            add = self._add_aggregated if cut.is_aggregated else self._add_block
            refs = add(cut, at)
            for found, labels, ref in zip(blocks, group.labelling.results, refs, strict=True):
                found[_index(labels, at)] = ref
        for position, value in enumerate(group.results):
            grid = grid_of(group.labelling.results[position], counts)
            refs = tuple(blocks[position][index] for index in indices(grid))
            name = result_name(group, position)
            self._store(value, _Stored(name, grid, refs, group.root.source, number))

    def _add_block(self, cut: _Cut, at: Mapping[int, int]) -> tuple[Ref, ...]:
        """Adds the task that computes one block of the results; returns the blocks."""
        group = cut.group
        return self._add(
            _indexed(group.name, _index(cut.named, at)),
            self._kernels.run(cut.blocks, at, None, cut.root_reads),
            self._read(cut, cut.root_reads, at),
            cut.root_flops + cut.epilogue_flops,
            cut.origin(*(equation.primitive.name for equation in group.equations)),
        )

    def _add_aggregated(self, cut: _Cut, at: Mapping[int, int]) -> tuple[Ref, ...]:
        """Adds the tasks that compute partial results, and the one that combines them."""
        group = cut.group
        root, *epilogue = (equation.primitive.name for equation in group.equations)
        how = str(group.labelling.aggregate)
        partials: list[Ref] = []
        for inner in indices(grid_of(cut.inner, cut.counts)):
            within = {**at, **dict(zip(cut.inner, inner, strict=True))}
            partials += self._add(
                _indexed(group.name, (*_index(cut.named, at), *inner)),
                self._kernels.run(cut.blocks, within, group.num_root_steps, cut.root_reads),
                self._read(cut, cut.root_reads, within),
                cut.root_flops,
                cut.origin(root),
            )
        kernel = self._kernels.aggregate(cut.blocks, at, len(partials), cut.epilogue_reads)
        combining = (len(partials) - 1) * math.prod(kernel.operands[0].shape)
        return self._add(
            _indexed(f"{group.name}.{how}", _index(cut.named, at)),
            kernel,
            (*partials, *self._read(cut, cut.epilogue_reads, at)),
            combining + cut.epilogue_flops,
            cut.origin(how, *epilogue),
        )

    def output(self, value: Value) -> OutputBlocks:
        """Returns where the blocks of an output of the program are."""
        if value in self._stored:
            stored = self._stored[value]
            return OutputBlocks(value.aval, stored.grid, stored.blocks)
        shape = value.aval.shape
        whole = self._fetch(value, (0,) * len(shape), shape)
        return OutputBlocks(value.aval, (1,) * len(shape), (whole,))

    def task_graph(self) -> TaskGraph:
        """Returns the tasks' graph."""
        reads = [(ref, v) for v, task in enumerate(self.tasks) for ref in task.operands]
        edges = [(ref.tensor, v) for ref, v in reads if isinstance(ref, TensorRef)]
        input_edges = [(ref.input, v) for ref, v in reads if isinstance(ref, InputRef)]
        return make_graph(
            flops=[task.flops for task in self.tasks],
            tensor_producer=[
                v for v, task in enumerate(self.tasks) for _ in task.kernel.results
            ],
            tensor_bytes=[
                num_bytes(aval) for task in self.tasks for aval in task.kernel.results
            ],
            edge_tensor=[x for x, _ in edges],
            edge_reader=[v for _, v in edges],
            input_bytes=[block_bytes(b, self._arrays[b.source].aval) for b in self.inputs],
            input_home=[RESIDENT if self._is_resident[b.source] else 0 for b in self.inputs],
            input_edge_input=[i for i, _ in input_edges],
            input_edge_reader=[v for _, v in input_edges],
        )

    def _read(
        self, cut: _Cut, slots: tuple[int, ...], at: Mapping[int, int]
    ) -> tuple[Ref, ...]:
        """Returns the blocks in `slots` of the task at block index `at`."""
        refs = []
        for slot in slots:
            value, labels = cut.group.operands[slot], cut.group.labelling.operands[slot]
            assert isinstance(value, Value)  # literals are in no task's reads
            shape = cut.blocks.avals[slot].shape
            start = tuple(at[label] * n for label, n in zip(labels, shape, strict=True))
            limit = tuple(a + n for a, n in zip(start, shape, strict=True))
            refs.append(self._fetch(value, start, limit))
        return tuple(refs)

    def _fetch(self, value: Value, start: Shape, limit: Shape) -> Ref:
        """Returns block `[start, limit)` of a tensor, formed if nobody has made it yet."""
        key = (value, start, limit)
        if key not in self._blocks:
            if value in self._source:
                self._blocks[key] = InputRef(len(self.inputs))
                self.inputs.append(InputBlock(self._source[value], start, limit))
            else:
                self._blocks[key] = self._form(value, start, limit)
        return self._blocks[key]

    def _form(self, value: Value, start: Shape, limit: Shape) -> Ref:
        stored = self._stored[value]
        block = block_shape(value.aval.shape, stored.grid)
        # A dimension of size 0 is in one block.
        first = tuple(a // max(size, 1) for a, size in zip(start, block, strict=True))
        last = tuple(-(-b // size) if size else 1 for b, size in zip(limit, block, strict=True))
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
        origin = TaskOrigin(("form",), stored.source, stored.group)
        (ref,) = self._add(f"{stored.name}.form[{ranges}]", kernel, tuple(refs), 0.0, origin)
        return ref

    def _store(self, value: Value, stored: _Stored) -> None:
        self._stored[value] = stored
        block = block_shape(value.aval.shape, stored.grid)
        for index, ref in zip(indices(stored.grid), stored.blocks, strict=True):
            self._blocks[value, *_bounds(index, block)] = ref

    def _add(
        self,
        name: str,
        kernel: Kernel,
        operands: tuple[Ref, ...],
        flops: float,
        origin: TaskOrigin,
    ) -> tuple[Ref, ...]:
        self.tasks.append(Task(name, kernel, operands, flops, origin))
        first = self._num_tensors
        self._num_tensors += len(kernel.results)
        return tuple(map(TensorRef, range(first, self._num_tensors)))


def _bounds(index: Index, block: Shape) -> tuple[Shape, Shape]:
    """Returns start and limit of the block at `index` of a grid of equal blocks."""
    start = tuple(i * size for i, size in zip(index, block, strict=True))
    return start, tuple(a + size for a, size in zip(start, block, strict=True))


def _index(labels: Labels, at: Mapping[int, int]) -> Index:
    return tuple(at[label] for label in labels)


def _indexed(name: str, index: Index) -> str:
    return f"{name}[{','.join(map(str, index))}]" if index else name


def result_name(group: Group, position: int) -> str:
    """Returns the readable name of one of a group's results."""
    return group.name if len(group.results) == 1 else f"{group.name}.{position}"
