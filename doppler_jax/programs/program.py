"""The tensor program: what `trace` makes of a JAX function and `partition` cuts."""

import dataclasses
from typing import Any

import chex
import jax
import numpy as np
from jax.extend.core import Primitive

from doppler_jax.programs.labelling import BlockParams, Labelling, Labels


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

    def __str__(self) -> str:
        return f"{self.primitive.name} at {self.source}"


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
    in_tree: Any  # treedef of (args, kwargs)
    out_tree: Any

    @property
    def arg_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(arg.aval for arg in self.args)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One equation inside a group.

    Slots number the values within a group: its operands, then each step's results.
    """

    equation: Equation
    reads: tuple[int, ...]  # slot of every operand
    results: tuple[Labels, ...]  # in the group's labels
    flops: float  # per element of the first result
    block_params: BlockParams | None


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """A unit of partitioning: a root equation and the element-wise ones fused behind it.

    The first `num_root_operands` operands are read by the root's tasks. The others, which
    only the fused equations read, are read by the same tasks, or by the aggregating tasks
    if the root's partial results have to be combined first: the epilogue runs there.

    Views only relabel dimensions (a broadcast, a transpose) or count (iota). A group
    computes those that it reads inside its tasks, so that `operands` are the tensors
    behind the views.
    """

    name: str  # readable and unique, "attn.qk.dot_general"
    equations: tuple[Equation, ...]  # without views; root first, then as they can run
    operands: tuple[Atom, ...]  # literals included; each atom once per way to label it
    num_root_operands: int
    results: tuple[Value, ...]
    labelling: Labelling  # of `operands` and `results`; flops are the root's
    steps: tuple[Step, ...]  # views included, as they run
    num_root_steps: int  # the first steps, up to the root

    @property
    def root(self) -> Equation:
        return self.equations[0]

    @property
    def epilogue_flops(self) -> float:
        """Operations of the fused equations, per element of the result."""
        return sum(step.flops for step in self.steps[self.num_root_steps :])
