"""What the tasks compute: groups of equations on blocks, aggregation and formation.

Tasks that compute the same share one `Kernel`, so that the engine compiles it once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from doppler_jax.programs.blocks import join_blocks
from doppler_jax.programs.fuse import Group
from doppler_jax.programs.program import Equation, Literal
from doppler_jax.programs.rules.labels import Labels, Shape
from doppler_jax.types import Kernel

_COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "and": lax.bitwise_and,
    "max": lax.max,
    "min": lax.min,
    "or": lax.bitwise_or,
    "prod": lax.mul,
    "sum": lax.add,
    "xor": lax.bitwise_xor,
}


@dataclasses.dataclass(frozen=True, eq=False)
class BlockStep:
    """A step on blocks."""

    equation: Equation
    params: dict[str, Any]
    reads: tuple[int, ...]  # slots
    results: tuple[int, ...]  # slots
    counts_along: tuple[int, int] | None
    """Of an iota, label and block size of the dimension that it counts along: there, the
    result depends on where the block begins."""
    key: Hashable  # equal for steps that compute the same

    def run(self, values: Mapping[int, jax.Array], start: int) -> tuple[jax.Array, ...]:
        """Returns the results; `start` is where the block begins that an iota counts."""
        primitive = self.equation.primitive
        if self.counts_along:
            dimension, shape = self.params["dimension"], self.params["shape"]
            counted = lax.broadcasted_iota(jnp.int32, shape, dimension) + jnp.int32(start)
            return (counted.astype(self.params["dtype"]),)
        operands = [values[slot] for slot in self.reads]
        with self.equation.context.manager:
            results = primitive.bind(*operands, **primitive.get_bind_params(self.params))
        return tuple(results) if primitive.multiple_results else (results,)


@dataclasses.dataclass(frozen=True, eq=False)
class GroupBlocks:
    """A group whose labels are cut: the blocks that each of its tasks handles."""

    group: Group
    avals: tuple[jax.ShapeDtypeStruct, ...]  # block of every slot
    steps: tuple[BlockStep, ...]

    def starts(self, at: Mapping[int, int]) -> tuple[int, ...]:
        """Returns per step where the block at index `at` begins that it counts, or 0."""
        alongs = (step.counts_along for step in self.steps)
        return tuple(at[along[0]] * along[1] if along else 0 for along in alongs)


def _cut_group(group: Group, counts: Mapping[int, int]) -> GroupBlocks:
    avals = [
        _block(operand.aval, labels, counts)
        for operand, labels in zip(group.operands, group.labelling.operands, strict=True)
    ]
    steps = []
    for step in group.steps:
        equation = step.equation
        results = [
            _block(value.aval, labels, counts)
            for value, labels in zip(equation.results, step.results, strict=True)
        ]
        params = equation.params
        if step.block_params:
            reads = tuple(avals[slot].shape for slot in step.reads)
            params = params | step.block_params(reads, tuple(r.shape for r in results))
        along = None
        if equation.primitive.name == "iota":
            dimension = params["dimension"]
            along = (step.results[0][dimension], results[0].shape[dimension])
        slots = tuple(range(len(avals), len(avals) + len(results)))
        key = (equation.primitive.name, step.reads, equation.context, _freeze(params))
        steps.append(BlockStep(equation, params, step.reads, slots, along, key))
        avals += results
    return GroupBlocks(group, tuple(avals), tuple(steps))


def _block(
    aval: jax.ShapeDtypeStruct, labels: Labels, counts: Mapping[int, int]
) -> jax.ShapeDtypeStruct:
    sizes = zip(aval.shape, labels, strict=True)
    shape = tuple(size // counts[label] for size, label in sizes)
    return jax.ShapeDtypeStruct(shape, aval.dtype)


class KernelCache:
    """Makes kernels, and returns the same object for the same computation."""

    def __init__(self) -> None:
        self._kernels: dict[Hashable, Kernel] = {}
        self._cut: dict[tuple[Group, tuple[tuple[int, int], ...]], GroupBlocks] = {}
        self._known: dict[Hashable, Kernel] = {}

    def cut(self, group: Group, counts: Mapping[int, int]) -> GroupBlocks:
        """Returns the blocks of a group that is cut into `counts[label]` blocks per label."""
        key = (group, tuple(counts.items()))
        if key not in self._cut:
            self._cut[key] = _cut_group(group, counts)
        return self._cut[key]

    def run(
        self,
        blocks: GroupBlocks,
        at: Mapping[int, int],
        num_steps: int | None,
        reads: tuple[int, ...],
    ) -> Kernel:
        """Returns the kernel that runs a group's first steps on blocks.

        Args:
          blocks: the group, cut.
          at: block index per label; matters to iota only.
          num_steps: how many; None for all.
          reads: the slots that the kernel takes, in order; literals are part of it.
        """
        starts = blocks.starts(at)[:num_steps]
        known = (blocks, num_steps, starts)
        if known in self._known:
            return self._known[known]
        chosen = blocks.steps[:num_steps]
        fn, key = _chain(blocks, chosen, starts)
        kernel = Kernel(
            name="+".join(step.equation.primitive.name for step in chosen),
            fn=lambda *arrays: fn(dict(zip(reads, arrays, strict=True))),
            operands=tuple(blocks.avals[slot] for slot in reads),
            results=tuple(blocks.avals[slot] for slot in chosen[-1].results),
        )
        return self._keep(known, (key, reads), kernel)

    def aggregate(
        self, blocks: GroupBlocks, at: Mapping[int, int], count: int, reads: tuple[int, ...]
    ) -> Kernel:
        """Returns the kernel that combines partial results of one block, and goes on.

        Args:
          blocks: the group, cut.
          at: block index per label; matters to iota only.
          count: number of partial results, the kernel's first operands.
          reads: the slots that the group's epilogue takes, the kernel's other operands.
        """
        first = blocks.group.num_root_steps
        starts = blocks.starts(at)[first:]
        known = (blocks, "aggregate", starts)
        if known in self._known:
            return self._known[known]
        how = blocks.group.labelling.aggregate
        assert how is not None  # the group has aggregated labels
        (slot,) = blocks.steps[first - 1].results
        partial = blocks.avals[slot]
        combine, rest = _combiner(how, partial.dtype), blocks.steps[first:]
        fn, key = _chain(blocks, rest, starts)

        def aggregate(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            whole = combine(arrays[:count])
            if not rest:
                return (whole,)
            return fn({slot: whole, **dict(zip(reads, arrays[count:], strict=True))})

        last = (rest or blocks.steps[first - 1 : first])[-1]
        kernel = Kernel(
            name="+".join((how, *(step.equation.primitive.name for step in rest))),
            fn=aggregate,
            operands=(partial,) * count + tuple(blocks.avals[slot] for slot in reads),
            results=(blocks.avals[last.results[0]],),
        )
        return self._keep(known, (how, count, slot, key, reads), kernel)

    def form(
        self,
        stored: jax.ShapeDtypeStruct,
        grid: Shape,
        start: Shape,
        result: jax.ShapeDtypeStruct,
    ) -> Kernel:
        """Returns the kernel that cuts a block out of neighbouring stored blocks.

        Args:
          stored: one stored block.
          grid: how many stored blocks lie along each dimension; the operands in row-major
            order.
          start: where the result begins within the joined blocks.
          result: the block that a reader needs.
        """
        count = math.prod(grid)
        limit = tuple(a + size for a, size in zip(start, result.shape, strict=True))

        def fn(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return (lax.slice(join_blocks(arrays, grid), start, limit),)

        kernel = Kernel("form", fn, (stored,) * count, (result,))
        key = ("form", grid, start, result.shape)
        return self._keep((key, _aval_key(stored)), key, kernel)

    def _keep(self, known: Hashable, key: Hashable, kernel: Kernel) -> Kernel:
        """Returns the kernel, or an earlier one of equal key and operands; remembers it."""
        key = (key, tuple(map(_aval_key, kernel.operands)))
        self._known[known] = self._kernels.setdefault(key, kernel)
        return self._known[known]


def _chain(
    blocks: GroupBlocks, steps: tuple[BlockStep, ...], starts: tuple[int, ...]
) -> tuple[Callable[[dict[int, jax.Array]], tuple[jax.Array, ...]], Hashable]:
    """Returns the function from operands by slot to the last step's results, and its key."""
    literals = {
        slot: operand
        for slot, operand in enumerate(blocks.group.operands)
        if isinstance(operand, Literal) and any(slot in step.reads for step in steps)
    }

    def fn(values: dict[int, jax.Array]) -> tuple[jax.Array, ...]:
        for slot, literal in literals.items():
            values[slot] = lax.full(blocks.avals[slot].shape, literal.value)
        for step, start in zip(steps, starts, strict=True):
            values.update(zip(step.results, step.run(values, start), strict=True))
        return tuple(values[slot] for slot in steps[-1].results)

    key = (
        tuple(step.key for step in steps),
        starts,
        tuple(
            (slot, _aval_key(blocks.avals[slot]), literal.value.tobytes())
            for slot, literal in literals.items()
        ),
    )
    return fn, key


def _combiner(how: str, dtype: Any) -> Callable[[Sequence[jax.Array]], jax.Array]:
    # Short floats are summed in float32: adding them one by one rounds each time.
    short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4

    def combine(arrays: Sequence[jax.Array]) -> jax.Array:
        wide = [a.astype(jnp.float32) for a in arrays] if short else arrays
        return functools.reduce(_COMBINE[how], wide).astype(dtype)

    return combine


def _aval_key(aval: jax.ShapeDtypeStruct) -> Hashable:
    return aval.shape, str(aval.dtype)


def _freeze(value: Any) -> Hashable:
    """Returns a key that is equal for parameters that mean the same computation.

    Functions count by identity; the equation keeps them alive as long as the key matters.
    """
    if isinstance(value, dict):
        return tuple((name, _freeze(value[name])) for name in sorted(value))
    if isinstance(value, tuple | list):
        return tuple(map(_freeze, value))
    if isinstance(value, float):
        return value.hex()
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
