"""Rules of primitives that move elements and compute nothing."""

import math
from collections.abc import Iterator

from doppler_jax.programs.program import Equation
from doppler_jax.programs.rules.elementwise import align
from doppler_jax.programs.rules.labels import (
    BlockParams,
    Labelling,
    LabelMaker,
    Labels,
    Rule,
    Shape,
    along,
    by_dimension,
    operand_shapes,
    result_shapes,
    shaped_as,
)

VIEWS = frozenset({"broadcast_in_dim", "iota", "reshape", "squeeze", "transpose"})
"""Primitives that only relabel, so that readers can apply them to their own blocks."""


def _transpose(equation: Equation) -> Labelling:
    labels = LabelMaker()
    (shape,) = operand_shapes(equation)
    operand = tuple(map(labels.free, shape))
    result = tuple(operand[dim] for dim in equation.params["permutation"])
    return labels.finish([operand], [result])


def _broadcast_in_dim(equation: Equation) -> Labelling | None:
    if len(equation.operands) != 1:  # a size that only a running program knows
        return None
    labels = LabelMaker()
    result = tuple(map(labels.free, result_shapes(equation)[0]))
    (shape,) = operand_shapes(equation)
    operand = align(shape, equation.params["broadcast_dimensions"], labels)
    return labels.finish([operand], [result], block_params=shaped_as("shape"))


def _iota(equation: Equation) -> Labelling:
    labels = LabelMaker()
    result = tuple(map(labels.free, equation.results[0].aval.shape))
    return labels.finish([], [result], block_params=shaped_as("shape"))


def _reshape(equation: Equation) -> Labelling | None:
    if equation.params.get("dimensions") is not None or len(equation.operands) != 1:
        return None
    return _resize(equation, shaped_as("new_sizes"))


def _resize(equation: Equation, block_params: BlockParams | None = None) -> Labelling | None:
    """Labels an equation that keeps the elements in row-major order.

    The shapes fall into segments of equal product. In a segment the first dimension of
    either side can be cut into as many blocks as divide both: rows of one side then are
    rows of the other.
    """
    (before,), (after,) = operand_shapes(equation), result_shapes(equation)
    if 0 in before:
        return None
    labels = LabelMaker()
    operand, result = {}, {}
    for left, right in _segments(before, after):
        first = labels.free(math.gcd(before[left[0]], after[right[0]]))
        operand[left[0]] = result[right[0]] = first
        operand.update({dim: labels.fix(before[dim]) for dim in left[1:]})
        result.update({dim: labels.fix(after[dim]) for dim in right[1:]})
    return labels.finish(
        [_fill(operand, before, labels)],
        [_fill(result, after, labels)],
        block_params=block_params,
    )


def _fill(found: dict[int, int], shape: Shape, labels: LabelMaker) -> Labels:
    """Returns a label per dimension; those not `found` have size 1."""
    return tuple(
        found[dim] if dim in found else labels.free(size) for dim, size in enumerate(shape)
    )


def _segments(before: Shape, after: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the dimensions of either side, shortest runs of equal product, without 1s."""
    lefts, rights = ([dim for dim, size in enumerate(s) if size != 1] for s in (before, after))
    lefts.reverse()
    rights.reverse()
    while lefts:
        left, right = [lefts.pop()], [rights.pop()]
        while (p := _product(before, left)) != (q := _product(after, right)):
            if p < q:
                left.append(lefts.pop())
            else:
                right.append(rights.pop())
        yield left, right


def _product(shape: Shape, dims: list[int]) -> int:
    return math.prod(shape[dim] for dim in dims)


def _rev(equation: Equation) -> Labelling:
    return by_dimension(equation, set(equation.params["dimensions"]))


def _pad(equation: Equation) -> Labelling:
    config = equation.params["padding_config"]
    return by_dimension(equation, {dim for dim, pads in enumerate(config) if any(pads)})


def _changed(before: Shape, after: Shape) -> set[int]:
    sizes = enumerate(zip(before, after, strict=True))
    return {dim for dim, (a, b) in sizes if a != b}


def _slice(equation: Equation) -> Labelling:
    (before,), (after,) = operand_shapes(equation), result_shapes(equation)
    touched = _changed(before, after)
    start, limit = equation.params["start_indices"], equation.params["limit_indices"]

    def limits(_: tuple[Shape, ...], results: tuple[Shape, ...]) -> dict[str, Shape]:
        sizes = enumerate(results[0])
        return {
            "start_indices": tuple(start),
            "limit_indices": tuple(
                limit[dim] if dim in touched else size for dim, size in sizes
            ),
        }

    return by_dimension(equation, touched, block_params=limits)


def _dynamic_slice(equation: Equation) -> Labelling:
    # Along a dimension that is taken whole the start can only be 0, in every block.
    touched = _changed(operand_shapes(equation)[0], result_shapes(equation)[0])
    return by_dimension(equation, touched, block_params=shaped_as("slice_sizes"))


def _dynamic_update_slice(equation: Equation) -> Labelling:
    operand, update, *_ = operand_shapes(equation)
    return by_dimension(equation, _changed(operand, update))


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": along("dimension"),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "split": along("axis"),
    "squeeze": _resize,
    "transpose": _transpose,
}
