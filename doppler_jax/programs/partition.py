"""Cuts a tensor program into tasks on blocks, by the tensor relational algebra.

A contraction joins blocks on equal block index and aggregates over the contracted one; an
element-wise operation joins on equal indices; a reduction aggregates; where a reader needs
other blocks than the producer stored, formation tasks slice and concatenate. `rules` says
which dimensions go together, `fuse` which equations do, `planner` into how many blocks each
dimension is cut, `task_kernels` what a task computes; here the tasks are made.
"""

import dataclasses
import itertools
import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from doppler_jax.programs.blocks import block_aval, num_bytes, task_graph
from doppler_jax.programs.explain import hidden_work
from doppler_jax.programs.fuse import Group, fuse
from doppler_jax.programs.grids import (
    Counts,
    Grid,
    Index,
    Strategy,
    block_shape,
    grid_of,
    indices,
    is_power_of_two,
)
from doppler_jax.programs.planner import (
    WORTH_IT,
    PartitionPlan,
    default_cluster,
    plan_partition,
    simulated_s,
)
from doppler_jax.programs.program import Program, Value
from doppler_jax.programs.rules.labels import Shape
from doppler_jax.programs.task_kernels import GroupBlocks, KernelCache
from doppler_jax.types import (
    RESIDENT,
    Cluster,
    InputBlock,
    InputRef,
    Kernel,
    OutputBlocks,
    Ref,
    ShardedProgram,
    TaskGraph,
    TaskOrigin,
    TensorOrigin,
    TensorRef,
)

_told: weakref.WeakSet[Program] = weakref.WeakSet()
"""Programs of which it was said what their loops hide."""


def partition(
    program: Program,
    num_shards: int = 4,
    *,
    strategy: Strategy = "planner",
    cluster: Cluster | None = None,
) -> ShardedProgram:
    """Returns the program cut into tasks, its tensors into up to `num_shards` blocks.

    Blocks of arguments and constants are graph inputs: each reader gets the one that it
    needs, without a task. Those of arguments that are not resident are at home on device 0;
    the planner counts their transfers only where it compares whole graphs.

    A loop that `trace` was not told about is unrolled where the whole then finishes sooner, by
    simulation on the cluster. Otherwise it is one task; where that holds most of the work, a
    line on standard error says so (by `logging`).

    Example:
      >>> program = dj.trace(jnp.matmul, jnp.eye(4), jnp.eye(4))
      >>> dj.partition(program, num_shards=4).graph.num_tasks >= 4
      True

    Args:
      program: what `trace` made.
      num_shards: blocks per tensor, a power of two; a tensor whose dimensions cannot be
        halved that often gets fewer.
      strategy: how the blocks are chosen, see `planner.plan_partition`.
      cluster: what the planner assumes; by default `num_shards` equal devices.

    Raises:
      ValueError: `num_shards` is not a power of two, or the strategy is unknown.
    """
    if not is_power_of_two(num_shards):
        raise ValueError(f"num_shards is {num_shards!r}; expected a power of two: 1, 2, 4, ...")
    sharded = _cut(program, int(num_shards), strategy, cluster)
    on = default_cluster(num_shards) if cluster is None else cluster
    for candidate in program.unrolled:
        unrolled = _cut(candidate, int(num_shards), strategy, cluster)
        if simulated_s(unrolled.graph, on) < WORTH_IT * simulated_s(sharded.graph, on):
            sharded = unrolled
    if num_shards > 1 and program not in _told and (hidden := hidden_work(sharded)):
        _told.add(program)  # which may be cut again, more finely
        logging.getLogger(__name__).warning("%s", hidden)
    return sharded


def _cut(
    program: Program, num_shards: int, strategy: Strategy, cluster: Cluster | None
) -> ShardedProgram:
    groups = fuse(program)
    kernels = KernelCache()

    def build(counts: Sequence[Counts]) -> TaskGraph:
        return TaskMaker(program, groups, counts, kernels).task_graph()

    plan = plan_partition(groups, num_shards, strategy, cluster, build=build)
    return shard(program, groups, plan, kernels)


def shard(
    program: Program, groups: Sequence[Group], plan: PartitionPlan, kernels: KernelCache
) -> ShardedProgram:
    """Returns the program cut as planned; `kernels` keeps what was made for other plans."""
    made = TaskMaker(program, groups, plan.counts, kernels)
    ties = tuple((i, j) for i, j in enumerate(program.same_as) if i != j)
    apart = dataclasses.replace(program, same_as=tuple(range(len(program.args))))
    return ShardedProgram(
        graph=made.task_graph(),
        names=tuple(task.name for task in made.tasks),
        kernels=tuple(task.kernel for task in made.tasks),
        operands=tuple(task.operands for task in made.tasks),
        inputs=tuple(made.inputs),
        outputs=tuple(map(made.output, program.outputs, program.out_avals)),
        arg_avals=program.arg_avals,
        consts=program.const_arrays,
        in_tree=program.in_tree,
        out_tree=program.out_tree,
        origins=tuple(task.origin for task in made.tasks),
        tensors=tuple(
            TensorOrigin(name, value.aval, grid, group.root.source, plan.reasons[group.number])
            for value, (name, grid, group, _) in made.stored.items()
        ),
        parameters=program.parameters,
        ties=ties,
        carried=program.carried,
        untied=shard(apart, groups, plan, kernels) if ties else None,
    )


@dataclasses.dataclass(frozen=True)
class Task:
    """A task; its kernel's results are tensors, numbered in the order of the tasks."""

    name: str
    kernel: Kernel
    operands: tuple[Ref, ...]
    flops: float
    origin: TaskOrigin


class Stored(NamedTuple):
    """Where the blocks of a produced tensor are."""

    name: str
    grid: Grid
    group: Group  # that made it
    blocks: tuple[Ref, ...]  # row-major


class TaskMaker:
    """The tasks of a program whose groups are cut, and which blocks of which tensors exist."""

    def __init__(
        self,
        program: Program,
        groups: Sequence[Group],
        counts: Sequence[Counts],
        kernels: KernelCache,
    ) -> None:
        self.tasks: list[Task] = []
        self.inputs: list[InputBlock] = []
        self._producers: list[int] = []  # by tensor
        self._kernels = kernels
        self._arrays = (*program.args, *program.consts)
        # The same array under two names is one source.
        same_as = (*program.same_as, *range(len(program.args), len(self._arrays)))
        self._source = dict(zip(self._arrays, same_as, strict=True))
        self._is_resident = program.is_resident + (True,) * len(program.consts)
        self.stored: dict[Value, Stored] = {}  # by tensor, in the order of the groups
        cut_as = {
            value: (value, grid_of(labels, of), group)
            for group, of in zip(groups, counts, strict=True)
            for value, labels in zip(group.results, group.labelling.results, strict=True)
        }
        # Arguments that tasks of the last call made: the output, the grid of both, and by whom.
        self._carried = {
            program.args[i]: cut_as[program.outputs[o]]
            for i, o in program.carried
            if program.outputs[o] in cut_as
        }
        self._blocks: dict[tuple[Value, Shape, Shape], Ref] = {}
        for group, of in zip(groups, counts, strict=True):
            self._add_group(group, of)
        # Arguments that are outputs become graph inputs too.
        for value, aval in zip(program.outputs, program.out_avals, strict=True):
            self.output(value, aval)

    def _add_group(self, group: Group, counts: Counts) -> None:
        """Adds the tasks that compute one group, all blocks of its results."""
        cut = self._kernels.cut(group, counts)
        blocks: list[dict[Index, Ref]] = [{} for _ in group.results]
        for outer in indices(grid_of(cut.outer, counts)):
            at = dict.fromkeys(counts, 0) | dict(zip(cut.outer, outer, strict=True))
            refs = self._add_block(cut, at)
            for found, labels, ref in zip(blocks, group.labelling.results, refs, strict=True):
                found[grid_of(labels, at)] = ref
        results = zip(group.results, group.labelling.results, blocks, strict=True)
        for position, (value, labels, of) in enumerate(results):
            name = group.name if len(blocks) == 1 else f"{group.name}.{position}"
            grid = grid_of(labels, counts)
            self.stored[value] = Stored(name, grid, group, tuple(of[i] for i in indices(grid)))
            block = block_shape(value.aval.shape, grid)
            for index, ref in of.items():
                self._blocks[value, *_bounds(index, block)] = ref

    def _add_block(self, cut: GroupBlocks, at: Mapping[int, int]) -> tuple[Ref, ...]:
        """Adds the tasks that compute one block of the results; returns the blocks.

        One task, or some that compute partial results and one that combines them.
        """
        group, labelling = cut.group, cut.group.labelling
        root, *epilogue = (equation.primitive.name for equation in group.equations)
        index = grid_of(labelling.results[0], at) if labelling.results else ()
        reads, late_reads = cut.reads
        flops = labelling.task_flops(cut.counts)
        if not cut.is_aggregated:
            task = Task(
                _indexed(group.name, index),
                self._kernels.run(cut, at, (0, len(cut.steps)), reads),
                self._read(cut, reads, at),
                flops + cut.epilogue_flops,
                _origin(group, root, *epilogue),
            )
            return self._add(task)
        partials: list[Ref] = []
        split = group.num_root_steps
        for inner in indices(grid_of(labelling.aggregated, cut.counts)):
            within = {**at, **dict(zip(labelling.aggregated, inner, strict=True))}
            task = Task(
                _indexed(group.name, (*index, *inner)),
                self._kernels.run(cut, within, (0, split), reads),
                self._read(cut, reads, within),
                flops,
                _origin(group, root),
            )
            partials += self._add(task)
        rest = (split, len(cut.steps))
        kernel = self._kernels.run(cut, at, rest, late_reads, len(partials))
        combining = (len(partials) - 1) * math.prod(kernel.operands[0].shape)
        how = str(labelling.aggregate)
        task = Task(
            _indexed(f"{group.name}.{how}", index),
            kernel,
            (*partials, *self._read(cut, late_reads, at)),
            combining + cut.epilogue_flops,
            _origin(group, how, *epilogue),
        )
        return self._add(task)

    def output(self, value: Value, aval: jax.ShapeDtypeStruct) -> OutputBlocks:
        """Returns where the blocks of an output of the program are."""
        if (stored := self.stored.get(value)) is not None:
            return OutputBlocks(aval, stored.grid, stored.blocks)
        grid = self._carried[value][1] if value in self._carried else (1,) * len(aval.shape)
        block = block_shape(aval.shape, grid)
        blocks = (self._fetch(value, *_bounds(index, block)) for index in indices(grid))
        return OutputBlocks(aval, grid, tuple(blocks))

    def task_graph(self) -> TaskGraph:
        """Returns the tasks' graph."""
        arrays, homes = self._arrays, [RESIDENT if r else 0 for r in self._is_resident]
        return task_graph(
            [task.kernel for task in self.tasks],
            [task.operands for task in self.tasks],
            [task.flops for task in self.tasks],
            [num_bytes(block_aval(b, arrays[b.source].aval)) for b in self.inputs],
            [homes[b.source] for b in self.inputs],
            list(map(self._maker, self.inputs)),
        )

    def _maker(self, block: InputBlock) -> int:
        """Returns the task that made a graph input in the last call, or -1."""
        argument = self._arrays[block.source]
        if argument not in self._carried:
            return -1
        ref = self._blocks[self._carried[argument][0], block.start, block.limit]
        assert isinstance(ref, TensorRef)
        return self._producers[ref.tensor]

    def _read(
        self, cut: GroupBlocks, slots: tuple[int, ...], at: Mapping[int, int]
    ) -> tuple[Ref, ...]:
        """Returns the blocks in `slots` of the task at block index `at`."""
        refs = []
        for slot in slots:
            value, labels = cut.group.operands[slot], cut.group.labelling.operands[slot]
            assert isinstance(value, Value)  # literals are in no task's reads
            bounds = _bounds(grid_of(labels, at), cut.avals[slot].shape)
            refs.append(self._fetch(value, *bounds))
        return tuple(refs)

    def _fetch(self, value: Value, start: Shape, limit: Shape) -> Ref:
        """Returns block `[start, limit)` of a tensor, formed if nobody has made it yet."""
        if value in self._source:
            value = self._arrays[self._source[value]]
        key = (value, start, limit)
        if key not in self._blocks:
            if value in self._source and self._is_whole(value, start, limit):
                self._blocks[key] = InputRef(len(self.inputs))
                self.inputs.append(InputBlock(self._source[value], start, limit))
            else:
                self._blocks[key] = self._form(value, start, limit)
        return self._blocks[key]

    def _is_whole(self, argument: Value, start: Shape, limit: Shape) -> bool:
        """Returns whether a block of an argument needs no task that forms it."""
        if argument not in self._carried:
            return True
        block = block_shape(argument.aval.shape, self._carried[argument][1])
        index = (a // max(size, 1) for a, size in zip(start, block, strict=True))
        return (start, limit) == _bounds(tuple(index), block)

    def _form(self, value: Value, start: Shape, limit: Shape) -> Ref:
        if value in self.stored:
            name, stored_as, group, _ = self.stored[value]
        else:
            _, stored_as, group = self._carried[value]
            name = f"{group.name}.carried{self._source[value]}"
        block = block_shape(value.aval.shape, stored_as)
        # A dimension of size 0 is in one block.
        first = tuple(a // max(size, 1) for a, size in zip(start, block, strict=True))
        last = tuple(-(-b // size) if size else 1 for b, size in zip(limit, block, strict=True))
        grid = tuple(b - a for a, b in zip(first, last, strict=True))
        refs = tuple(
            self._fetch(value, *_bounds(index, block))
            for index in itertools.product(*map(range, first, last))
        )
        within = tuple(a - f * size for a, f, size in zip(start, first, block, strict=True))
        needed = tuple(b - a for a, b in zip(start, limit, strict=True))
        kernel = self._kernels.form(value.aval.dtype, block, grid, within, needed)
        ranges = ",".join(f"{a}:{b}" for a, b in zip(start, limit, strict=True))
        task = Task(f"{name}.form[{ranges}]", kernel, refs, 0.0, _origin(group, "form"))
        (ref,) = self._add(task)
        return ref

    def _add(self, task: Task) -> tuple[Ref, ...]:
        first = len(self._producers)
        self._producers += [len(self.tasks)] * len(task.kernel.results)
        self.tasks.append(task)
        return tuple(map(TensorRef, range(first, len(self._producers))))


def _bounds(index: Index, block: Shape) -> tuple[Shape, Shape]:
    """Returns start and limit of the block at `index` of a grid of equal blocks."""
    start = tuple(i * size for i, size in zip(index, block, strict=True))
    return start, tuple(a + size for a, size in zip(start, block, strict=True))


def _origin(group: Group, *primitives: str) -> TaskOrigin:
    return TaskOrigin(primitives, group.root.source, group.number)


def _indexed(name: str, index: Index) -> str:
    return f"{name}[{','.join(map(str, index))}]" if index else name
