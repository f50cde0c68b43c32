"""The tensor program: what `trace` makes of a JAX function and `partition` cuts."""

import dataclasses
from typing import Any

import chex
import jax
import numpy as np
from jax.extend.core import Primitive


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the program: an argument, a constant or an equation's result."""

    aval: jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, eq=False)
class Literal:
    """A tensor known at trace time whose elements all equal `value`."""

    value: np.ndarray  # [] of the dtype of `aval`
    aval: jax.ShapeDtypeStruct


Atom = Value | Literal


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """One call of a JAX primitive."""

    primitive: Primitive
    params: dict[str, Any]
    operands: tuple[Atom, ...]
    results: tuple[Value, ...]
    source: str  # the user's line, "file.py:12:4 (fn)"
    context: Any  # JAX's settings where it was traced, a `JaxprEqnContext`
    scope: str = ""  # named scopes and functions around it, "attn/qk"
    has_effect: bool = False  # it prints; it runs even if nobody reads it


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A flat list of equations over tensors, free of nested functions and dead equations.

    `trace` makes one. Sources, as `InputBlock.source` counts them, are the arguments
    and then the constants.
    """

    equations: tuple[Equation, ...]  # in an order in which they can run
    args: tuple[Value, ...]  # per flat argument
    is_resident: tuple[bool, ...]  # per flat argument, whether it lies where it is read
    consts: tuple[Value, ...]
    const_arrays: tuple[chex.Array, ...]  # per constant
    outputs: tuple[Value, ...]  # per flat output; may be an argument or a constant
    out_avals: tuple[jax.ShapeDtypeStruct, ...]  # per flat output, its weak type too
    in_tree: Any  # treedef of (args, kwargs), in positions as far as can be
    out_tree: Any
    parameters: tuple[str, ...]  # of the function, by position; "" where keywords are not taken
    same_as: tuple[int, ...]  # per flat argument, the first one that is the same array
    carried: tuple[
        tuple[int, int], ...
    ] = ()  # flat arguments, and the outputs that they become
    # The same with loops unrolled where that may pay: outer ones, then those within them too.
    unrolled: tuple["Program", ...] = ()

    @property
    def arg_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(arg.aval for arg in self.args)
