"""What the tasks compute: primitives on blocks, aggregation and formation.

Tasks that compute the same share one `Kernel`, so that an engine compiles it once.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from doppler_jax.programs.blocks import join_blocks
from doppler_jax.programs.grids import Grid, Shape
from doppler_jax.programs.program import Equation, Literal
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


class KernelCache:
    """Makes kernels, and returns the same object for the same computation."""

    def __init__(self) -> None:
        self._kernels: dict[Hashable, Kernel] = {}

    def primitive(
        self,
        equation: Equation,
        operands: Sequence[jax.ShapeDtypeStruct],
        result: jax.ShapeDtypeStruct,
        block_params: dict[str, object],
    ) -> Kernel:
        """Returns the kernel that applies an equation's primitive to blocks.

        Args:
          equation: its literals become part of the kernel.
          operands: block of every operand, literals included.
          result: block of the result.
          block_params: the parameters that differ from the equation's.
        """
        params = {**equation.params, **block_params}
        literals = tuple(
            operand if isinstance(operand, Literal) else None for operand in equation.operands
        )
        key = (
            equation.primitive.name,
            tuple(sorted(params.items())),
            tuple(map(_aval_key, operands)),
            tuple(literal and literal.value.tobytes() for literal in literals),
        )

        def fn(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            rest = iter(arrays)
            values = [
                lax.full(aval.shape, literal.value) if literal else next(rest)
                for literal, aval in zip(literals, operands, strict=True)
            ]
            return (equation.primitive.bind(*values, **params),)

        reads = tuple(
            aval for aval, literal in zip(operands, literals, strict=True) if literal is None
        )
        return self._get(key, Kernel(equation.primitive.name, fn, reads, (result,)))

    def aggregate(self, how: str, partial: jax.ShapeDtypeStruct, count: int) -> Kernel:
        """Returns the kernel that combines `count` partial results of one block."""
        combine = _COMBINE[how]
        # Short floats are summed in float32: adding them one by one rounds each time.
        short = jnp.issubdtype(partial.dtype, jnp.floating) and partial.dtype.itemsize < 4

        def fn(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            values = [a.astype(jnp.float32) for a in arrays] if short else arrays
            return (functools.reduce(combine, values).astype(partial.dtype),)

        kernel = Kernel(how, fn, (partial,) * count, (partial,))
        return self._get((how, _aval_key(partial), count), kernel)

    def form(
        self,
        stored: jax.ShapeDtypeStruct,
        grid: Grid,
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
        return self._get(("form", _aval_key(stored), grid, start, result.shape), kernel)

    def _get(self, key: Hashable, kernel: Kernel) -> Kernel:
        return self._kernels.setdefault(key, kernel)


def _aval_key(aval: jax.ShapeDtypeStruct) -> Hashable:
    return aval.shape, str(aval.dtype)
