"""Rules of element-wise primitives: a result's index is the operands' own."""

import math
from collections.abc import Iterable

from doppler_jax.programs.program import Equation
from doppler_jax.programs.rules.labels import (
    Labelling,
    LabelMaker,
    Labels,
    Rule,
    Shape,
    operand_shapes,
    result_shapes,
)


def align(shape: Shape, dims: Iterable[int], labels: LabelMaker) -> Labels:
    """Labels an operand whose dimensions lie along `dims` of the result, labels 0, 1, ...

    A dimension of size 1 that is repeated along the result's gets a new label: size 1 is
    never cut.
    """
    return tuple(
        dim if size == labels.sizes[dim] else labels.free(size)
        for size, dim in zip(shape, dims, strict=True)
    )


def elementwise(equation: Equation) -> Labelling | None:
    """Labels an element-wise equation, operands of size 1 and scalars broadcast."""
    shape = result_shapes(equation)[0]
    labels = LabelMaker()
    result = tuple(map(labels.free, shape))
    # A scalar has no dimension to align: every block reads it whole.
    operands = [align(of, range(len(of)), labels) for of in operand_shapes(equation)]
    return labels.finish(operands, [result], math.prod(shape))


def _bitcast(equation: Equation) -> Labelling | None:
    # Between types of different width the last dimension comes or goes.
    same = operand_shapes(equation) == result_shapes(equation)
    return elementwise(equation) if same else None


_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt
    ceil clamp clz complex conj convert_element_type cos cosh digamma div eq eq_to erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
    is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi ne neg nextafter
    not or polygamma population_count pow real reduce_precision regularized_incomplete_beta
    rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square sub tan tanh xor zeta
"""

ELEMENTWISE = frozenset(_NAMES.split())
"""Primitives whose result at an index depends on the operands at that index alone."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    "bitcast_convert_type": _bitcast,
}
