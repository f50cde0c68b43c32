"""Operations of equations that run whole: from the functions they call."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from doppler_jax.programs.program import Equation, Value
from doppler_jax.programs.rules.build import num_elements

CountFlops = Callable[[Equation], float]


def whole_flops(equation: Equation, count: CountFlops) -> float:
    """Returns the operations of an equation without a rule.

    A scan runs its body once per iteration; a while loop, whose length nobody knows, is
    counted as one iteration; a conditional costs its dearest branch; what calls no
    function costs one operation per element of its results.

    Args:
      equation: what to count.
      count: returns the operations of an equation of the functions that it calls.
    """
    bodies = [_jaxpr_flops(jaxpr, count) for jaxpr in sub_jaxprs(equation.params)]
    if not bodies:
        return float(num_elements(equation))
    if equation.primitive.name == "cond":
        return max(bodies)
    return sum(bodies) * equation.params.get("length", 1)


def sub_jaxprs(params: dict[str, Any]) -> list[Jaxpr]:
    """Returns the functions among an equation's parameters."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def _jaxpr_flops(jaxpr: Jaxpr, count: CountFlops) -> float:
    return sum(count(_as_equation(eqn)) for eqn in jaxpr.eqns)


def _as_equation(eqn: JaxprEqn) -> Equation:
    def value(var: Any) -> Value:
        return Value(jax.ShapeDtypeStruct(getattr(var.aval, "shape", ()), _dtype(var.aval)))

    operands, results = (tuple(map(value, v)) for v in (eqn.invars, eqn.outvars))
    return Equation(eqn.primitive, dict(eqn.params), operands, results, "", eqn.ctx)


def _dtype(aval: Any) -> Any:
    # A reference or a token has no dtype; its size does not matter here.
    return getattr(aval, "dtype", jax.numpy.dtype("float32"))
