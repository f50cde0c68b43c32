"""Rules of primitives that reduce: contractions, reductions, scans along a dimension."""

import math
from collections.abc import Callable

from doppler_jax.programs.labelling import Labelling
from doppler_jax.programs.program import Equation
from doppler_jax.programs.rules.build import (
    LabelMaker,
    Rule,
    by_dimension,
    operand_shapes,
    result_shapes,
)


def _dot_general(equation: Equation) -> Labelling:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = equation.params["dimension_numbers"]
    lhs_shape, rhs_shape = operand_shapes(equation)
    labels = LabelMaker()
    lhs = tuple(map(labels.free, lhs_shape))
    shared = dict(zip((*rhs_batch, *rhs_contract), (*lhs_batch, *lhs_contract), strict=True))
    rhs = tuple(
        shared[dim] if dim in shared else labels.free(size)
        for dim, size in enumerate(rhs_shape)
    )
    lhs_free = (dim for dim in lhs if dim not in (*lhs_batch, *lhs_contract))
    rhs_free = (label for label in rhs if label >= len(lhs))
    return labels.finish(
        [lhs, rhs],
        [(*lhs_batch, *lhs_free, *rhs_free)],
        total_flops=2.0 * math.prod(labels.sizes),
        aggregate="or" if equation.results[0].aval.dtype == bool else "sum",
    )


def _reduction(aggregate: str | None, parameter: str = "axes") -> Rule:
    """Returns the rule of a reduction; without `aggregate` what is reduced is never cut."""

    def rule(equation: Equation) -> Labelling:
        axes = equation.params[parameter]
        labels = LabelMaker()
        shape = operand_shapes(equation)[0]
        operand = tuple(
            labels.fix(size) if aggregate is None and dim in axes else labels.free(size)
            for dim, size in enumerate(shape)
        )
        result = tuple(label for dim, label in enumerate(operand) if dim not in axes)
        # The initial values of a general reduction are scalars.
        operands = [operand if of == shape else () for of in operand_shapes(equation)]
        results = [result] * len(equation.results)
        return labels.finish(operands, results, float(math.prod(shape)), aggregate)

    return rule


def _along(parameter: str, flops: Callable[[int], float]) -> Rule:
    """Returns the rule of what works along one dimension and needs all of it.

    Args:
      parameter: names the dimension.
      flops: of the dimension's size, operations per element.
    """

    def rule(equation: Equation) -> Labelling:
        axis = equation.params[parameter]
        shape = operand_shapes(equation)[0]
        total = math.prod(shape) * flops(shape[axis])
        return by_dimension(equation, {axis}, total)

    return rule


def _fft(equation: Equation) -> Labelling:
    lengths = equation.params["fft_lengths"]
    shape = result_shapes(equation)[0]
    touched = set(range(len(shape) - len(lengths), len(shape)))
    points = math.prod(shape[: len(shape) - len(lengths)]) * math.prod(lengths)
    return by_dimension(equation, touched, 5.0 * points * _log2(math.prod(lengths)))


def _log2(size: int) -> float:
    return math.log2(max(size, 2))


_CUMULATIVE = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")

RULES: dict[str, Rule] = {
    **dict.fromkeys(_CUMULATIVE, _along("axis", lambda size: 1.0)),
    **{f"reduce_{how}": _reduction(how) for how in ("and", "max", "min", "or", "xor")},
    "argmax": _reduction(None),
    "argmin": _reduction(None),
    "dot_general": _dot_general,
    "fft": _fft,
    "reduce": _reduction(None, "dimensions"),
    "reduce_prod": _reduction("prod"),
    "reduce_sum": _reduction("sum"),
    "sort": _along("dimension", _log2),
    "top_k": _along("axis", _log2),
}
