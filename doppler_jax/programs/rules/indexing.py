"""Rules of gather and scatter: what is taken whole or looked up row by row is cut."""

import math

from doppler_jax.programs.labelling import Labelling, Labels, Shape
from doppler_jax.programs.program import Equation
from doppler_jax.programs.rules.build import (
    LabelMaker,
    Rule,
    operand_shapes,
    result_shapes,
)


def _gather(equation: Equation) -> Labelling:
    """Labels a gather: its rows, batches and the dimensions that slices span are cut."""
    numbers = equation.params["dimension_numbers"]
    sizes = equation.params["slice_sizes"]
    operand_shape, indices_shape = operand_shapes(equation)
    labels = LabelMaker()
    rows = tuple(map(labels.free, indices_shape[:-1]))
    operand, window = _label_window(
        operand_shape,
        sizes,
        (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims),
        labels,
    )
    for dim, row in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        operand[dim] = rows[row]
    rank = len(result_shapes(equation)[0])
    result = _interleave(numbers.offset_dims, window, rows, rank)
    operand_labels = tuple(operand[dim] for dim in range(len(operand_shape)))

    def slice_sizes(operands: tuple[Shape, ...], _: tuple[Shape, ...]) -> dict[str, Shape]:
        block = zip(sizes, operand_shape, operands[0], strict=True)
        return {
            "slice_sizes": tuple(part if size == whole else size for size, whole, part in block)
        }

    return labels.finish(
        [operand_labels, (*rows, labels.fix(indices_shape[-1]))],
        [result],
        block_params=slice_sizes,
    )


def _scatter(equation: Equation) -> Labelling:
    """Labels a scatter: batches and the dimensions that updates span are cut.

    Rows are not: two of them may meet at one place.
    """
    numbers = equation.params["dimension_numbers"]
    operand_shape, indices_shape, updates_shape = operand_shapes(equation)
    batching = numbers.scatter_indices_batching_dims
    labels = LabelMaker()
    rows = tuple(
        labels.free(size) if dim in batching else labels.fix(size)
        for dim, size in enumerate(indices_shape[:-1])
    )
    skipped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window_dims = [dim for dim in range(len(operand_shape)) if dim not in skipped]
    sizes = dict.fromkeys(range(len(operand_shape)), 1)
    sizes.update(
        zip(window_dims, (updates_shape[d] for d in numbers.update_window_dims), strict=True)
    )
    operand, window = _label_window(operand_shape, tuple(sizes.values()), skipped, labels)
    for dim, row in zip(numbers.operand_batching_dims, batching, strict=True):
        operand[dim] = rows[row]
    updates = _interleave(numbers.update_window_dims, window, rows, len(updates_shape))
    operand_labels = tuple(operand[dim] for dim in range(len(operand_shape)))
    return labels.finish(
        [operand_labels, (*rows, labels.fix(indices_shape[-1])), updates],
        [operand_labels],
        total_flops=float(math.prod(updates_shape)),
    )


def _label_window(
    shape: Shape, sizes: Shape, skipped: tuple[int, ...], labels: LabelMaker
) -> tuple[dict[int, int], list[int]]:
    """Labels the operand, and the dimensions of a slice of it that are not `skipped`.

    A dimension that the slice spans has one label; of any other all is needed.
    """
    operand, window = {}, []
    for dim, (whole, size) in enumerate(zip(shape, sizes, strict=True)):
        if dim in skipped:
            operand[dim] = labels.fix(whole)
        elif size == whole:
            operand[dim] = labels.free(whole)
            window.append(operand[dim])
        else:
            operand[dim] = labels.fix(whole)
            window.append(labels.fix(size))
    return operand, window


def _interleave(dims: tuple[int, ...], window: list[int], rows: Labels, rank: int) -> Labels:
    """Returns labels with those of the window at `dims` and the rows' elsewhere."""
    at = dict(zip(dims, window, strict=True))
    rest = iter(rows)
    return tuple(at[dim] if dim in at else next(rest) for dim in range(rank))


_SCATTERS = (
    "scatter",
    "scatter-add",
    "scatter-max",
    "scatter-min",
    "scatter-mul",
    "scatter-sub",
    "scatter_add",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_sub",
)

RULES: dict[str, Rule] = {"gather": _gather, **dict.fromkeys(_SCATTERS, _scatter)}
