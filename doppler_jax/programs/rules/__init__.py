"""How each JAX primitive acts on blocks: one small rule per primitive.

A rule labels the dimensions of an equation; read `labels` first, for what a labelling means
and the pieces that rules are made of. Then the families:

* `elementwise`: a result's index is the operands' own.
* `movement`: what moves elements and computes nothing, reshapes and slices among it.
* `indexing`: gather and scatter.
* `contractions`: products, convolutions, reductions, windows, scans along a dimension.
* `algebra`: factorisations and solves of matrices.

To add a primitive, add a rule to the table `RULES` of the family where it belongs; a test
fails until the rule has a case. What has no rule runs whole, as one task.
"""

import itertools
import math
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from doppler_jax.programs.program import Equation, Value
from doppler_jax.programs.rules import algebra, contractions, elementwise, indexing, movement
from doppler_jax.programs.rules.elementwise import ELEMENTWISE
from doppler_jax.programs.rules.labels import Labelling, Rule, make_whole, result_shapes
from doppler_jax.programs.rules.movement import VIEWS

__all__ = ["ELEMENTWISE", "RULES", "VIEWS", "get_labelling", "sub_jaxprs", "work"]

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **movement.RULES,
    **contractions.RULES,
    **indexing.RULES,
    **algebra.RULES,
}
"""The rule of every primitive that can be cut, by the primitive's name."""


def get_labelling(equation: Equation) -> Labelling:
    """Returns the labels of an equation's operands and results; whole if no rule covers it."""
    rule = RULES.get(equation.primitive.name)
    labelling = None if rule is None or equation.has_effect else rule(equation)
    return labelling or make_whole(equation, _whole_flops(equation))


def _whole_flops(equation: Equation) -> float:
    """Returns the operations of an equation without a rule.

    A scan runs its body once per iteration; a while loop, whose length nobody knows, is
    counted as one iteration; a conditional costs its dearest branch; what calls no
    function costs one operation per element of its results.
    """
    bodies = [sum(map(work, jaxpr.eqns)) for jaxpr in sub_jaxprs(equation.params)]
    if not bodies:
        return float(sum(map(math.prod, result_shapes(equation))))
    if equation.primitive.name == "cond":
        return max(bodies)
    return sum(bodies) * equation.params.get("length", 1)


def work(eqn: JaxprEqn | Equation) -> float:
    """Returns the operations of an equation."""
    equation = eqn if isinstance(eqn, Equation) else _as_equation(eqn)
    return get_labelling(equation).task_flops({})


def sub_jaxprs(params: dict[str, Any]) -> list[Jaxpr]:
    """Returns the functions among an equation's parameters."""
    values = (v if isinstance(v, tuple | list) else (v,) for v in params.values())
    items = [
        item.jaxpr if isinstance(item, ClosedJaxpr) else item
        for item in itertools.chain.from_iterable(values)
    ]
    return [item for item in items if isinstance(item, Jaxpr)]


def _as_equation(eqn: JaxprEqn) -> Equation:
    def value(var: Any) -> Value:
        # A reference or a token has no dtype; its size does not matter here.
        dtype = getattr(var.aval, "dtype", jax.numpy.dtype("float32"))
        return Value(jax.ShapeDtypeStruct(getattr(var.aval, "shape", ()), dtype))

    operands, results = (tuple(map(value, v)) for v in (eqn.invars, eqn.outvars))
    return Equation(eqn.primitive, dict(eqn.params), operands, results, "", eqn.ctx)
