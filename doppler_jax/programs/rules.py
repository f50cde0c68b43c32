"""How each JAX primitive acts on blocks: one small rule per primitive.

In the tensor relational algebra a tensor is a relation from block index to block. A
rule gives every dimension of an equation's operands and result a label. Dimensions of
equal label are split alike and joined on equal block index; a label that the result
lacks is aggregated over.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from doppler_jax.programs.program import Equation

Labels = tuple[int, ...]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Labelling:
    """What one equation does to blocks; labels are 0..L-1.

    A dimension of size 1 that stands alone (broadcast along, inserted or dropped) has a
    label of its own: size 1 is never split, so it needs no aggregation either.
    """

    sizes: tuple[int, ...]  # [L] size of the dimensions that bear the label
    operands: tuple[Labels, ...]  # per operand, a label per dimension
    result: Labels
    flops: float  # per point of the space that all labels span
    aggregate: str | None = None  # "sum", "max", ...: how partial results combine
    block_params: Callable[[Shape], dict[str, Any]] | None = None
    """Maps the result block's shape to the parameters that depend on it."""

    @property
    def aggregated(self) -> Labels:
        """Labels of the operands that the result lacks, in increasing order."""
        found = {label for labels in self.operands for label in labels}
        return tuple(sorted(found - set(self.result)))

    @property
    def is_contraction(self) -> bool:
        """True if several operands are joined on labels that are then aggregated."""
        return self.aggregate is not None and len(self.operands) > 1


Rule = Callable[[Equation], Labelling]


def get_labelling(equation: Equation) -> Labelling:
    """Returns the labels of an equation's operands and result.

    Raises:
      ValueError: no rule covers the primitive, or not with these parameters; the message
        names it, the user's source line and what is supported.
    """
    rule = RULES.get(equation.primitive.name)
    if rule is None:
        raise ValueError(
            f"unsupported primitive {equation}; supported are: {', '.join(sorted(RULES))}"
        )
    return rule(equation)


def _align(shape: Shape, dims: Iterable[int], sizes: list[int]) -> Labels:
    """Labels an operand whose dimensions lie along `dims` of the result, labels 0, 1, ...

    A dimension of size 1 that is repeated along the result's gets a new label, whose size
    is appended to `sizes`.
    """
    labels = []
    for size, label in zip(shape, dims, strict=True):
        if size != sizes[label]:
            label = len(sizes)
            sizes.append(size)
        labels.append(label)
    return tuple(labels)


def _elementwise(equation: Equation) -> Labelling:
    shape = equation.results[0].aval.shape
    sizes = list(shape)
    # A scalar has no dimension to align: every block reads it whole.
    operands = tuple(
        _align(operand.aval.shape, range(len(operand.aval.shape)), sizes)
        for operand in equation.operands
    )
    return Labelling(
        sizes=tuple(sizes),
        operands=operands,
        result=tuple(range(len(shape))),
        flops=1.0,
    )


def _dot_general(equation: Equation) -> Labelling:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = equation.params["dimension_numbers"]
    lhs_shape, rhs_shape = (operand.aval.shape for operand in equation.operands)
    lhs = tuple(range(len(lhs_shape)))
    shared = dict(zip((*rhs_batch, *rhs_contract), (*lhs_batch, *lhs_contract), strict=True))
    sizes = list(lhs_shape)
    rhs = []
    for dim, size in enumerate(rhs_shape):
        if dim not in shared:
            shared[dim] = len(sizes)
            sizes.append(size)
        rhs.append(shared[dim])
    lhs_free = (dim for dim in lhs if dim not in (*lhs_batch, *lhs_contract))
    rhs_free = (label for label in rhs if label >= len(lhs))
    return Labelling(
        sizes=tuple(sizes),
        operands=(lhs, tuple(rhs)),
        result=(*lhs_batch, *lhs_free, *rhs_free),
        flops=2.0,
        aggregate="or" if equation.results[0].aval.dtype == bool else "sum",
    )


def _reduction(aggregate: str) -> Rule:
    def rule(equation: Equation) -> Labelling:
        (operand,) = equation.operands
        labels = tuple(range(len(operand.aval.shape)))
        return Labelling(
            sizes=operand.aval.shape,
            operands=(labels,),
            result=tuple(label for label in labels if label not in equation.params["axes"]),
            flops=1.0,
            aggregate=aggregate,
        )

    return rule


def _transpose(equation: Equation) -> Labelling:
    (operand,) = equation.operands
    return Labelling(
        sizes=operand.aval.shape,
        operands=(tuple(range(len(operand.aval.shape))),),
        result=tuple(equation.params["permutation"]),
        flops=0.0,
    )


def _broadcast_in_dim(equation: Equation) -> Labelling:
    operand, *dynamic = equation.operands
    if dynamic:
        raise ValueError(f"unsupported {equation}: its shape is not known when traced")
    shape = equation.results[0].aval.shape
    sizes = list(shape)
    labels = _align(operand.aval.shape, equation.params["broadcast_dimensions"], sizes)
    return Labelling(
        sizes=tuple(sizes),
        operands=(labels,),
        result=tuple(range(len(shape))),
        flops=0.0,
        block_params=lambda block: {"shape": block},
    )


def _squeeze(equation: Equation) -> Labelling:
    return _resize(equation, None)


def _reshape(equation: Equation) -> Labelling:
    if equation.params["dimensions"] is not None:
        raise ValueError(f"unsupported {equation}: it permutes dimensions")
    return _resize(equation, lambda block: {"new_sizes": block})


def _resize(
    equation: Equation, block_params: Callable[[Shape], dict[str, Any]] | None
) -> Labelling:
    """Labels an equation that only inserts and drops dimensions of size 1."""
    (operand,) = equation.operands
    before, after = operand.aval.shape, equation.results[0].aval.shape
    kept = [dim for dim, size in enumerate(before) if size != 1]
    if [before[dim] for dim in kept] != [size for size in after if size != 1]:
        raise ValueError(
            f"unsupported {equation}: from {list(before)} to {list(after)}; only "
            "dimensions of size 1 may come and go"
        )
    sizes = list(before)
    result = []
    for size in after:
        if size != 1:
            result.append(kept.pop(0))
        else:
            result.append(len(sizes))
            sizes.append(1)
    return Labelling(
        sizes=tuple(sizes),
        operands=(tuple(range(len(before))),),
        result=tuple(result),
        flops=0.0,
        block_params=block_params,
    )


_ELEMENTWISE_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt
    ceil clamp clz complex conj convert_element_type cos cosh digamma div eq eq_to erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
    is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not
    or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square sub tan tanh xor zeta
"""

ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
"""Primitives whose result at an index depends on the operands at that index alone."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "broadcast_in_dim": _broadcast_in_dim,
    "dot_general": _dot_general,
    "reduce_and": _reduction("and"),
    "reduce_max": _reduction("max"),
    "reduce_min": _reduction("min"),
    "reduce_or": _reduction("or"),
    "reduce_prod": _reduction("prod"),
    "reduce_sum": _reduction("sum"),
    "reduce_xor": _reduction("xor"),
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
"""The rule of every supported primitive, by the primitive's name."""
