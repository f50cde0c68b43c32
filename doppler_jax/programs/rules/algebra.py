"""Rules of linear algebra: a batch of matrices is cut along its batch dimensions."""

import math

from doppler_jax.programs.program import Equation
from doppler_jax.programs.rules.labels import Labelling, Rule, by_batch, operand_shapes


def _matrices(flops_per_cube: float) -> Rule:
    """Returns the rule of what works on `[..., m, n]` matrices in O(m n min(m, n))."""

    def rule(equation: Equation) -> Labelling | None:
        shapes = operand_shapes(equation)
        *batch, m, n = shapes[0]
        if any(list(shape[: len(batch)]) != batch for shape in shapes):
            return None
        total = flops_per_cube * math.prod(batch) * m * n * min(m, n)
        return by_batch(equation, len(batch), total)

    return rule


def _triangular_solve(equation: Equation) -> Labelling:
    left, right = operand_shapes(equation)
    return by_batch(equation, len(left) - 2, float(math.prod(right) * left[-1]))


def _rows(equation: Equation) -> Labelling:
    (shape,) = operand_shapes(equation)
    return by_batch(equation, len(shape) - 1, float(math.prod(shape)))


RULES: dict[str, Rule] = {
    "cholesky": _matrices(1 / 3),
    "eig": _matrices(25.0),
    "eigh": _matrices(9.0),
    "householder_product": _matrices(2.0),
    "lu": _matrices(2 / 3),
    "lu_pivots_to_permutation": _rows,
    "qr": _matrices(4.0),
    "svd": _matrices(20.0),
    "triangular_solve": _triangular_solve,
}
