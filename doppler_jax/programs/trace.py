"""Turns a JAX function into a tensor program, from its jaxpr at given shapes."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxprLiteral

from doppler_jax.programs.arguments import (
    Carry,
    Resident,
    Signature,
    leaf_names,
    name_arguments,
    name_outputs,
    resident_leaves,
    same_arrays,
)
from doppler_jax.programs.blocks import by_position, leaf_aval
from doppler_jax.programs.program import Atom, Equation, Literal, Program, Value
from doppler_jax.programs.provenance import (
    Place,
    check_effects,
    check_no_mesh,
    check_one_device,
    make_jaxpr,
    prints,
    uses_references,
)
from doppler_jax.programs.rules import ELEMENTWISE, work

_INLINED = {
    **dict.fromkeys(("checkpoint", "jit", "pjit", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call"), "call_jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "custom_vmap_call": "call",
}
"""Primitives that only call a function, and the parameter that is it."""

_NAMES = """
    copy copy_p device_put layout_constraint name optimization_barrier reshard
    sharding_constraint stop_gradient
"""

_IDENTITIES = frozenset(_NAMES.split())
"""Primitives that return their operands; they matter to compilers and memory only."""

MOST_UNROLLED = 2000
"""Equations that a loop may become by default, all times that it runs: a task or more each."""

LEAST_SHARE = 0.1
"""Of a program's operations, that a loop must hold, likewise, to be unrolled by default."""


def trace(
    fn: Callable[..., Any],
    *args: Any,
    unroll_scans: bool | None = None,
    resident: Resident = None,
    carry: Carry = None,
    **kwargs: Any,
) -> Program:
    """Returns the tensor program of `fn` at the shapes and dtypes of the arguments.

    Example:
      >>> program = dj.trace(lambda x: jnp.tanh(x @ x), jax.ShapeDtypeStruct((4, 4), float))

    Args:
      fn: any function of pytrees of arrays that `jax.jit` accepts. It may print with
        `jax.debug.print`; other side effects are refused, and so is what runs on the devices
        of a mesh. Bind arguments that are no arrays, such as flags, with `functools.partial`.
      *args: pytrees of arrays, numbers or `jax.ShapeDtypeStruct`s; only shapes and dtypes
        are looked at, and which of them are the same array: tied weights lie on a device
        once. A call with two arrays in their place is right, too, and counts both.
      unroll_scans: whether each iteration of a `lax.scan` (or of a `fori_loop` of known
        length) becomes equations of its own; otherwise the loop is one equation, as `while` and
        `cond` always are. None: `dj.partition` unrolls loops that hide much of the work, are
        not too long, and finish sooner that way, by simulation.
      resident: which arguments, such as weights, lie on the devices that read them before
        a call. The others arrive on the first device with each call and are moved from
        there, which costs time. An entry is a position (`0`), the name of a parameter or
        keyword argument (`"params"`), or a path within one as errors write it
        (`"args[0]['w']"`, which stands for all below it); several come as a sequence, of
        which none is `()`. None: all are resident that are not carried. Constants always are.
      carry: which arguments, such as a training state, are what the call before returned. They
        stay in blocks where they were made, and only what is read elsewhere is moved. Entries
        are as in `resident`. Each one's place is taken by the output of the same tree, shapes,
        dtypes and weak types: all that `fn` returns, or one of its parts. Where several are, a
        mapping says which, by position or path: `{"params": 0, "opt_state": "out[1]"}`.
      **kwargs: likewise arrays. `unroll_scans`, `resident` and `carry` are not handed to `fn`.

    Raises:
      ValueError: an argument is not an array, `resident` or `carry` names no argument or both
        name it, no output is like a carried one, a shape depends on values, there is a side
        effect, or something runs on the devices of a mesh; the message names the argument, or
        the user's source line.
    """
    check_no_mesh()
    by_place = _positional_parameters(fn)
    parameters = tuple("" if p.kind is p.POSITIONAL_ONLY else p.name for p in by_place)
    leaves, in_tree = jax.tree.flatten_with_path(by_position(args, kwargs, parameters))
    avals = [leaf_aval(path, leaf) for path, leaf in leaves]
    arguments = name_arguments(in_tree, [p.name for p in by_place])
    is_resident = resident_leaves(arguments, resident)
    shape_args, shape_kwargs = jax.tree.unflatten(in_tree, avals)
    closed, out_shapes = make_jaxpr(fn, *shape_args, **shape_kwargs)
    out_avals, out_tree = jax.tree.flatten(out_shapes)
    signature = Signature(arguments, avals, name_outputs(out_tree), out_avals)
    carried = signature.carried(carry)
    for i in (i for i, _ in carried if resident is not None and is_resident[i]):
        raise ValueError(f"{leaf_names(arguments)[i]} is resident and carried; expected one")
    stays = [*is_resident]
    kinds: list[Hashable] = [*is_resident]
    for i, _ in carried:
        stays[i] = True
        kinds[i] = "carried", i  # the same array now is not the same in the next call
    flatten = functools.partial(_flatten, closed, avals, Place.here())
    program = Program(
        **flatten(lambda *_: bool(unroll_scans)),
        is_resident=tuple(stays),
        out_avals=tuple(out_avals),
        in_tree=in_tree,
        out_tree=out_tree,
        parameters=parameters,
        same_as=same_arrays([leaf for _, leaf in leaves], kinds),
        carried=carried,
    )
    hides = _hides_much(program)
    if unroll_scans is not None or not any(map(hides, program.equations)):
        return program
    outer = dataclasses.replace(
        program, **flatten(lambda eqn, times: times == 1 and hides(eqn))
    )
    nested = dataclasses.replace(program, **flatten(hides))
    has_inner = len(nested.equations) > len(outer.equations)
    return dataclasses.replace(program, unrolled=(outer, nested) if has_inner else (outer,))


def _flatten(
    closed: ClosedJaxpr,
    avals: Sequence[jax.ShapeDtypeStruct],
    here: Place,
    unrolls: Callable[[JaxprEqn, int], bool],
) -> dict[str, Any]:
    """Returns the fields of a program that depend on which loops are unrolled."""
    flattener = _Flattener(unrolls)
    arg_values = [Value(aval) for aval in avals]
    outputs = flattener.inline(closed.jaxpr, closed.consts, arg_values, here)
    output_values = tuple(flattener.as_value(atom) for atom in outputs)
    equations = _live(flattener.equations, output_values)
    with jax.transfer_guard("allow"):  # as `jit` may move them, too
        consts = flattener.used_consts(equations, output_values)
    return {
        "equations": equations,
        "args": tuple(arg_values),
        "consts": tuple(value for value, _ in consts),
        "const_arrays": tuple(array for _, array in consts),
        "outputs": output_values,
    }


def _hides_much(program: Program) -> Callable[..., bool]:
    """Returns what says of a loop that runs so many times whether it may pay to unroll it."""
    scans = [equation for equation in program.equations if equation.primitive.name == "scan"]
    total = sum(map(work, program.equations)) if scans else 0.0

    def hides(eqn: Equation | JaxprEqn, times: int = 1) -> bool:
        if eqn.primitive.name != "scan":
            return False
        length = eqn.params["length"]  # 1 is for one task on purpose
        most = MOST_UNROLLED // max(_num_equations(eqn.params["jaxpr"].jaxpr), 1)
        prints = eqn.has_effect if isinstance(eqn, Equation) else bool(eqn.effects)
        is_short = length > 1 and length * times <= most
        return is_short and not prints and times * work(eqn) >= LEAST_SHARE * total

    return hides


def _num_equations(jaxpr: Jaxpr) -> int:
    """Returns how many equations a function is, those of functions that it calls included."""
    return sum(
        _num_equations(_called(eqn)[0]) if eqn.primitive.name in _INLINED else 1
        for eqn in jaxpr.eqns
    )


def _called(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns the function that an equation calls, and its constants."""
    inner = eqn.params[_INLINED[eqn.primitive.name]]
    return (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, [])


class _Flattener:
    """Collects the equations and constants of a jaxpr and of the functions it calls."""

    def __init__(self, unrolls: Callable[[JaxprEqn, int], bool]) -> None:
        self.equations: list[Equation] = []
        self._consts: dict[int, tuple[Value, Any]] = {}  # arrays by id, which they keep alive
        self._unrolls = unrolls
        self._times = 1  # that what is being inlined is so, by the loops around it

    def inline(
        self, jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Atom], caller: Place
    ) -> list[Atom]:
        """Appends the equations of `jaxpr` applied to `operands`; returns its outputs."""
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        for var, array in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self._const(array, _shape_struct(var.aval))

        def read(atom: Any) -> Atom:
            return self._literal(atom) if isinstance(atom, JaxprLiteral) else env[atom]

        for eqn in jaxpr.eqns:
            results = self._apply(eqn, [read(atom) for atom in eqn.invars], caller)
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
        used = {operand for eqn in equations for operand in eqn.operands}.union(outputs)
        # A host array is copied, because its owner may write to it later.
        return [
            (
                value,
                array if isinstance(array, jax.Array) else jnp.array(array, value.aval.dtype),
            )
            for value, array in self._consts.values()
            if value in used
        ]

    def _apply(self, eqn: JaxprEqn, operands: list[Atom], caller: Place) -> list[Atom]:
        name = eqn.primitive.name
        place = caller.of(eqn)
        if name in _INLINED:
            jaxpr, consts = _called(eqn)
            if not uses_references(jaxpr):
                inside = place.inside(eqn.params.get("name", ""))
                return self.inline(jaxpr, consts, operands, inside)
        if name == "custom_linear_solve":
            return self._solve(eqn, operands, place)
        if name == "scan" and eqn.params["length"] > 0 and self._unrolls(eqn, self._times):
            return self._unroll(eqn, operands, place)
        if _is_identity(eqn):
            return operands
        check_effects(eqn, place)
        check_one_device(eqn, place)
        if (folded := _fold(eqn, operands)) is not None:
            return [folded]
        results = tuple(Value(_shape_struct(var.aval)) for var in eqn.outvars)
        self.equations.append(
            Equation(
                primitive=eqn.primitive,
                params=dict(eqn.params),
                operands=tuple(operands),
                results=results,
                source=place.source,
                context=eqn.ctx,
                scope=place.scope,
                has_effect=prints(eqn),
            )
        )
        return list(results)

    def _solve(self, eqn: JaxprEqn, operands: list[Atom], place: Place) -> list[Atom]:
        """Inlines the solver of a linear solve, whose other functions are for gradients."""
        lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
        first = lengths.matvec + lengths.vecmat
        consts = operands[first : first + lengths.solve]
        rest = operands[sum(lengths) :]
        return self.inline(jaxprs.solve.jaxpr, jaxprs.solve.consts, [*consts, *rest], place)

    def _unroll(self, eqn: JaxprEqn, operands: list[Atom], place: Place) -> list[Atom]:
        """Inlines every iteration of a scan."""
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        consts, carry, xs = _scan_operands(eqn.params, operands)
        rows: dict[int, list[Atom]] = {}
        self._times *= length
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            row = [self._call(lambda x, i=i: x[i], [x], place) for x in xs]
            inside = place.inside(f"scan.{i}")
            outputs = self.inline(body.jaxpr, body.consts, [*consts, *carry, *row], inside)
            carry, rows[i] = outputs[: len(carry)], outputs[len(carry) :]
        self._times //= length
        columns = zip(*(rows[i] for i in range(length)), strict=True)
        return [*carry, *(self._call(_stack, list(column), place) for column in columns)]

    def _call(self, fn: Callable[..., Any], operands: list[Atom], place: Place) -> Atom:
        """Appends the equations of `fn` applied to `operands`; returns its only result."""
        closed = jax.make_jaxpr(fn)(*(operand.aval for operand in operands))
        (result,) = self.inline(
            closed.jaxpr, closed.consts, operands, dataclasses.replace(place, is_final=True)
        )
        return result

    def _literal(self, literal: JaxprLiteral) -> Atom:
        aval = _shape_struct(literal.aval)
        if aval.shape:
            return self._const(literal.val, aval)
        return Literal(np.asarray(literal.val, dtype=aval.dtype), aval)

    def _const(self, array: Any, aval: jax.ShapeDtypeStruct) -> Value:
        # An array that the function names twice is one constant.
        return self._consts.setdefault(id(array), (Value(aval), array))[0]


def _stack(*rows: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(row, (0,)) for row in rows], 0)


def _scan_operands(params: dict[str, Any], operands: list[Atom]) -> list[list[Atom]]:
    """Returns a scan's constants, what it carries and what it runs over."""
    if "ft_in" in params:  # JAX 0.11
        return list(map(list, params["ft_in"].update(operands).unpack()))
    first = params["num_consts"]
    last = first + params["num_carry"]
    return [operands[:first], operands[first:last], operands[last:]]


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
    """Returns the equations that some output depends on or that have an effect, in order."""
    needed: set[Atom] = set(outputs)
    kept = []
    for equation in reversed(equations):
        if equation.has_effect or not needed.isdisjoint(equation.results):
            needed.update(equation.operands)
            kept.append(equation)
    return tuple(reversed(kept))


def _shape_struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _positional_parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters that take positional arguments, in their order."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some callables, such as builtins, have none
        return []
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
