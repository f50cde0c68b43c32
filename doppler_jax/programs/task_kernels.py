"""What the tasks compute: groups of equations on blocks, aggregation and formation.

Tasks that compute the same share one `Kernel`, so that the engine compiles it once.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from doppler_jax.programs.blocks import join_blocks
from doppler_jax.programs.fuse import Group
from doppler_jax.programs.grids import block_shape, grid_of
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
    counts: Mapping[int, int]  # blocks per label
    avals: tuple[jax.ShapeDtypeStruct, ...]  # block of every slot
    steps: tuple[BlockStep, ...]

    @functools.cached_property
    def outer(self) -> Labels:
        """Labels of all results."""
        return tuple(dict.fromkeys(itertools.chain(*self.group.labelling.results)))

    @functools.cached_property
    def is_aggregated(self) -> bool:
        """True if the tasks make partial results, which other tasks combine."""
        return any(self.counts[label] > 1 for label in self.group.labelling.aggregated)

    @functools.cached_property
    def reads(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Slots that the tasks read, and those that the aggregating tasks read.

        They are operands in increasing order, literals left out.
        """
        group, steps = self.group, self.group.steps
        split = group.num_root_steps if self.is_aggregated else len(steps)
        values = [i for i, atom in enumerate(group.operands) if not isinstance(atom, Literal)]
        first, late = (
            {i for s in part for i in s.reads} for part in (steps[:split], steps[split:])
        )
        return tuple(i for i in values if i in first), tuple(i for i in values if i in late)

    @functools.cached_property
    def epilogue_flops(self) -> float:
        """Operations of the fused equations on one block."""
        last = self.steps[-1].results
        elements = math.prod(self.avals[last[0]].shape) if last else 0
        return self.group.epilogue_flops * elements

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
    return GroupBlocks(group, counts, tuple(avals), tuple(steps))


def _block(
    aval: jax.ShapeDtypeStruct, labels: Labels, counts: Mapping[int, int]
) -> jax.ShapeDtypeStruct:
    shape = block_shape(aval.shape, grid_of(labels, counts))
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
        steps: tuple[int, int],
        reads: tuple[int, ...],
        num_partials: int = 0,
    ) -> Kernel:
        """Returns the kernel that runs some of a group's steps on blocks.

        Args:
          blocks: the group, cut.
          at: block index per label; matters to iota only.
          steps: the first, and the one behind the last.
          reads: the slots that the kernel takes, in order; literals are part of it.
          num_partials: how many partial results of the step before these it combines at its
            beginning; they are its first operands.
        """
        starts = blocks.starts(at)[slice(*steps)]
        known = (blocks, steps, num_partials, starts)
        if known in self._known:
            return self._known[known]
        chosen = blocks.steps[slice(*steps)]
        names = [step.equation.primitive.name for step in chosen]
        how = str(blocks.group.labelling.aggregate)
        # The slot of what is combined, if anything is.
        whole = blocks.steps[steps[0] - 1].results if num_partials else ()
        results = chosen[-1].results if chosen else whole
        fn, key = _chain(blocks, chosen, starts, results)

        def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            values = dict(zip(reads, arrays[num_partials:], strict=True))
            for slot in whole:
                values[slot] = _combine(how, arrays[:num_partials])
            return fn(values)

        kernel = Kernel(
            name="+".join([how] * bool(whole) + names),
            fn=run,
            operands=tuple(blocks.avals[slot] for slot in (*num_partials * whole, *reads)),
            results=tuple(blocks.avals[slot] for slot in results),
        )
        return self._keep(known, (kernel.name, num_partials, whole, key, reads), kernel)

    def form(
        self, dtype: Any, block: Shape, grid: Shape, start: Shape, needed: Shape
    ) -> Kernel:
        """Returns the kernel that cuts a block out of neighbouring stored blocks.

        Args:
          dtype: of all blocks.
          block: shape of a stored one.
          grid: how many stored blocks lie along each dimension; the operands in row-major
            order.
          start: where the result begins within the joined blocks.
          needed: shape of the block that a reader needs.
        """
        limit = tuple(a + size for a, size in zip(start, needed, strict=True))

        def fn(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return (lax.slice(join_blocks(arrays, grid), start, limit),)

        stored, result = (jax.ShapeDtypeStruct(shape, dtype) for shape in (block, needed))
        kernel = Kernel("form", fn, (stored,) * math.prod(grid), (result,))
        key = ("form", grid, start, needed)
        return self._keep((key, _aval_key(stored)), key, kernel)

    def _keep(self, known: Hashable, key: Hashable, kernel: Kernel) -> Kernel:
        """Returns the kernel, or an earlier one of equal key and operands; remembers it."""
        key = (key, tuple(map(_aval_key, kernel.operands)))
        self._known[known] = self._kernels.setdefault(key, kernel)
        return self._known[known]


def _chain(
    blocks: GroupBlocks,
    steps: tuple[BlockStep, ...],
    starts: tuple[int, ...],
    results: tuple[int, ...],
) -> tuple[Callable[[dict[int, jax.Array]], tuple[jax.Array, ...]], Hashable]:
    """Returns the function from operands by slot to the results, and its key."""
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
        return tuple(values[slot] for slot in results)

    key = (
        tuple(step.key for step in steps),
        starts,
        tuple(
            (slot, _aval_key(blocks.avals[slot]), literal.value.tobytes())
            for slot, literal in literals.items()
        ),
    )
    return fn, key


def _combine(how: str, arrays: Sequence[jax.Array]) -> jax.Array:
    dtype = arrays[0].dtype
    # Short floats are summed in float32: adding them one by one rounds each time.
    short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    wide = [a.astype(jnp.float32) for a in arrays] if short else arrays
    return functools.reduce(_COMBINE[how], wide).astype(dtype)


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
