"""Turns a JAX function into a tensor program, from its jaxpr at given shapes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxprLiteral

from doppler_jax.programs.blocks import leaf_aval
from doppler_jax.programs.program import Atom, Equation, Literal, Program, Value
from doppler_jax.programs.rules import ELEMENTWISE, get_labelling

_INLINED = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
}
"""Primitives that only call a function, and the parameter that holds it."""

_IDENTITIES = frozenset({"copy", "name", "stop_gradient"})
"""Primitives that return their operand; they matter to differentiation and memory only."""


def trace(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """Returns the tensor program of `fn` at the shapes and dtypes of the arguments.

    Args:
      fn: any function of pytrees of arrays that `jax.jit` accepts, free of side effects.
      *args: pytrees of arrays or of `jax.ShapeDtypeStruct`s; only shapes and dtypes
        are looked at.
      **kwargs: likewise.

    Raises:
      ValueError: an argument is not an array, a primitive is not supported or has a side
        effect; the message names the argument, or the primitive and the source line.
    """
    leaves, in_tree = jax.tree.flatten_with_path((args, kwargs))
    avals = [leaf_aval(path, leaf) for path, leaf in leaves]
    shape_args, shape_kwargs = jax.tree.unflatten(in_tree, avals)
    closed, out_shapes = jax.make_jaxpr(fn, return_shape=True)(*shape_args, **shape_kwargs)

    flattener = _Flattener()
    arg_values = [Value(aval) for aval in avals]
    outputs = flattener.inline(closed.jaxpr, closed.consts, arg_values, "an unknown line")
    output_values = tuple(flattener.as_value(atom) for atom in outputs)
    equations = _live(flattener.equations, output_values)
    for equation in equations:
        get_labelling(equation)
    consts = flattener.used_consts(equations, output_values)
    return Program(
        equations=equations,
        args=tuple(arg_values),
        consts=tuple(value for value, _ in consts),
        const_arrays=tuple(array for _, array in consts),
        outputs=output_values,
        in_tree=in_tree,
        out_tree=jax.tree.structure(out_shapes),
    )


class _Flattener:
    """Collects the equations and constants of a jaxpr and of the functions it calls."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.consts: list[tuple[Value, Any]] = []
        self._const_values: dict[int, Value] = {}

    def inline(
        self, jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Atom], source: str
    ) -> list[Atom]:
        """Appends the equations of `jaxpr` applied to `operands`; returns its outputs.

        `source` is the user's line that calls the function.
        """
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        for var, array in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self._const(array, _shape_struct(var.aval))

        def read(atom: Any) -> Atom:
            return self._literal(atom) if isinstance(atom, JaxprLiteral) else env[atom]

        for eqn in jaxpr.eqns:
            results = self._apply(eqn, [read(atom) for atom in eqn.invars], source)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def as_value(self, atom: Atom) -> Value:
        """Returns an output of the program; a literal becomes a constant."""
        if isinstance(atom, Value):
            return atom
        return self._const(np.broadcast_to(atom.value, atom.aval.shape), atom.aval)

    def used_consts(
        self, equations: tuple[Equation, ...], outputs: tuple[Value, ...]
    ) -> list[tuple[Value, jax.Array]]:
        """Returns the constants that equations read or that are outputs, as device arrays."""
        used: set[Atom] = {operand for eqn in equations for operand in eqn.operands}
        used.update(outputs)
        # A host array is copied, because its owner may write to it later.
        return [
            (
                value,
                array if isinstance(array, jax.Array) else jnp.array(array, value.aval.dtype),
            )
            for value, array in self.consts
            if value in used
        ]

    def _apply(self, eqn: JaxprEqn, operands: list[Atom], caller: str) -> list[Atom]:
        name = eqn.primitive.name
        # Inside a library function an equation has no line of the user's own.
        source = source_info_util.summarize(eqn.source_info) or caller
        if name in _INLINED:
            inner = eqn.params[_INLINED[name]]
            if isinstance(inner, ClosedJaxpr):
                return self.inline(inner.jaxpr, inner.consts, operands, source)
            return self.inline(inner, [], operands, source)
        if _is_identity(eqn):
            return operands
        if eqn.effects:
            raise ValueError(f"{name} at {source} has a side effect; expected a pure function")
        if (folded := _fold(eqn, operands)) is not None:
            return [folded]
        results = tuple(Value(_shape_struct(var.aval)) for var in eqn.outvars)
        self.equations.append(
            Equation(eqn.primitive, dict(eqn.params), tuple(operands), results, source)
        )
        return list(results)

    def _literal(self, literal: JaxprLiteral) -> Atom:
        aval = _shape_struct(literal.aval)
        if aval.shape:
            return self._const(literal.val, aval)
        return Literal(np.asarray(literal.val, dtype=aval.dtype), aval)

    def _const(self, array: Any, aval: jax.ShapeDtypeStruct) -> Value:
        # An array that the function names twice is one constant; `consts` keeps ids alive.
        if id(array) not in self._const_values:
            value = Value(aval)
            self._const_values[id(array)] = value
            self.consts.append((value, array))
        return self._const_values[id(array)]


def _is_identity(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name == "convert_element_type":
        return _shape_struct(eqn.invars[0].aval).dtype == eqn.params["new_dtype"]
    return eqn.primitive.name in _IDENTITIES


def _fold(eqn: JaxprEqn, operands: list[Atom]) -> Literal | None:
    """Returns the literal that an equation makes of literals, such as `jnp.zeros`' result."""
    literals = [operand for operand in operands if isinstance(operand, Literal)]
    if not literals or len(literals) < len(operands):
        return None
    aval = _shape_struct(eqn.outvars[0].aval)
    if eqn.primitive.name in ELEMENTWISE:
        value = eqn.primitive.bind(*(literal.value for literal in literals), **eqn.params)
        return Literal(np.asarray(value), aval)
    if eqn.primitive.name in ("broadcast_in_dim", "reshape", "squeeze", "transpose"):
        return Literal(literals[0].value, aval)
    return None


def _live(equations: list[Equation], outputs: tuple[Value, ...]) -> tuple[Equation, ...]:
    """Returns the equations that some output depends on, in order."""
    needed: set[Atom] = set(outputs)
    kept = []
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.results):
            needed.update(equation.operands)
            kept.append(equation)
    return tuple(reversed(kept))


def _shape_struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
