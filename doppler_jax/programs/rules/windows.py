"""Rules of convolutions and of what slides a window: no dimension that slides is cut."""

import math

from doppler_jax.programs.labelling import Labelling
from doppler_jax.programs.program import Equation
from doppler_jax.programs.rules.build import (
    LabelMaker,
    Rule,
    by_dimension,
    operand_shapes,
    result_shapes,
)


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
        [
            tuple(map(lhs.__getitem__, range(len(lhs)))),
            tuple(map(rhs.__getitem__, range(len(rhs)))),
        ],
        [tuple(map(out.__getitem__, range(len(out))))],
        total_flops=2.0 * math.prod(out_shape) * window,
        aggregate=None if grouped else "sum",
    )


def _window(equation: Equation) -> Labelling:
    """Labels a reduction over windows, or its transpose, whose parameters are alike."""
    params = equation.params
    sizes = params["window_dimensions"]
    ones = (1,) * len(sizes)
    per_dimension = zip(
        sizes,
        params["window_strides"],
        params["padding"],
        params.get("base_dilation", ones),
        strict=True,
    )
    touched = {
        dim
        for dim, (size, stride, pads, dilation) in enumerate(per_dimension)
        if size != 1 or stride != 1 or any(pads) or dilation != 1
    }
    elements = max(map(math.prod, (*operand_shapes(equation), *result_shapes(equation))))
    return by_dimension(equation, touched, float(elements * math.prod(sizes)))


RULES: dict[str, Rule] = {
    "conv_general_dilated": _conv,
    "reduce_window": _window,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "reduce_window_sum": _window,
    "select_and_gather_add": _window,
    "select_and_scatter_add": _window,
}
