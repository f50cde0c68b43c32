"""Rules of primitives that combine elements: products, reductions, windows, scans.

A dimension that is summed over may be cut, and partial results are then combined. One along
which a window slides, or elements are ordered, is not.
"""

import math

from doppler_jax.programs.program import Equation
from doppler_jax.programs.rules.labels import (
    Labelling,
    LabelMaker,
    Rule,
    along,
    by_dimension,
    in_order,
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
        return labels.finish(operands, results, float(math.prod(shape)), aggregate=aggregate)

    return rule


def _fft(equation: Equation) -> Labelling:
    lengths = equation.params["fft_lengths"]
    shape = result_shapes(equation)[0]
    touched = set(range(len(shape) - len(lengths), len(shape)))
    points = math.prod(shape[: len(shape) - len(lengths)]) * math.prod(lengths)
    return by_dimension(equation, touched, 5.0 * points * _log2(math.prod(lengths)))


def _log2(size: int) -> float:
    return math.log2(max(size, 2))


def _conv(equation: Equation) -> Labelling:
    """Labels a convolution: batch, output features and contracted input features are cut.

    With feature groups only the batch is, and with batch groups nothing.
    """
    params = equation.params
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    lhs_shape, rhs_shape = operand_shapes(equation)
    (out_shape,) = result_shapes(equation)
    grouped = params["feature_group_count"] > 1 or params["batch_group_count"] > 1
    labels = LabelMaker()
    make = labels.fix if grouped else labels.free
    lhs = {dim: labels.fix(lhs_shape[dim]) for dim in lhs_spec[2:]}
    rhs = {dim: labels.fix(rhs_shape[dim]) for dim in rhs_spec[2:]}
    out = {dim: labels.fix(out_shape[dim]) for dim in out_spec[2:]}
    if params["batch_group_count"] > 1:
        lhs[lhs_spec[0]] = labels.fix(lhs_shape[lhs_spec[0]])
        out[out_spec[0]] = labels.fix(out_shape[out_spec[0]])
    else:
        lhs[lhs_spec[0]] = out[out_spec[0]] = labels.free(out_shape[out_spec[0]])
    rhs[rhs_spec[0]] = out[out_spec[1]] = make(rhs_shape[rhs_spec[0]])
    rhs[rhs_spec[1]] = make(rhs_shape[rhs_spec[1]])
    lhs[lhs_spec[1]] = labels.fix(lhs_shape[lhs_spec[1]]) if grouped else rhs[rhs_spec[1]]
    window = math.prod(rhs_shape) // max(1, rhs_shape[rhs_spec[0]])
    return labels.finish(
        [in_order(lhs), in_order(rhs)],
        [in_order(out)],
        total_flops=2.0 * math.prod(out_shape) * window,
        aggregate=None if grouped else "sum",
    )


def _window(equation: Equation) -> Labelling:
    """Labels a reduction over windows, or its transpose, whose parameters are alike."""
    params = equation.params
    sizes = params["window_dimensions"]
    dilation = params.get("base_dilation", (1,) * len(sizes))
    numbers = zip(sizes, params["window_strides"], dilation, strict=True)
    touched = {dim for dim, of in enumerate(numbers) if of != (1, 1, 1)}
    touched |= {dim for dim, pads in enumerate(params["padding"]) if any(pads)}
    elements = max(map(math.prod, (*operand_shapes(equation), *result_shapes(equation))))
    return by_dimension(equation, touched, float(elements * math.prod(sizes)))


_CUMULATIVE = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")

_WINDOWS = """
    reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
    select_and_scatter_add
"""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_CUMULATIVE, along("axis", lambda size: 1.0)),
    **{f"reduce_{how}": _reduction(how) for how in ("and", "max", "min", "or", "xor")},
    **dict.fromkeys(_WINDOWS.split(), _window),
    "argmax": _reduction(None),
    "argmin": _reduction(None),
    "conv_general_dilated": _conv,
    "dot_general": _dot_general,
    "fft": _fft,
    "reduce": _reduction(None, "dimensions"),
    "reduce_prod": _reduction("prod"),
    "reduce_sum": _reduction("sum"),
    "sort": along("dimension", _log2),
    "top_k": along("axis", _log2),
}
