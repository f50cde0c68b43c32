"""Rules of gather and scatter: what is taken whole or looked up row by row is cut."""

import math

from doppler_jax.programs.program import Equation
from doppler_jax.programs.rules.labels import (
    Labelling,
    LabelMaker,
    Labels,
    Rule,
    Shape,
    in_order,
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

    def slice_sizes(operands: tuple[Shape, ...], _: tuple[Shape, ...]) -> dict[str, Shape]:
        block = zip(sizes, operand_shape, operands[0], strict=True)
        return {
            "slice_sizes": tuple(part if size == whole else size for size, whole, part in block)
        }

    return labels.finish(
        [in_order(operand), (*rows, labels.fix(indices_shape[-1]))],
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
    spans = iter([updates_shape[dim] for dim in numbers.update_window_dims])
    sizes = tuple(1 if d in skipped else next(spans) for d in range(len(operand_shape)))
    operand, window = _label_window(operand_shape, sizes, skipped, labels)
    for dim, row in zip(numbers.operand_batching_dims, batching, strict=True):
        operand[dim] = rows[row]
    updates = _interleave(numbers.update_window_dims, window, rows, len(updates_shape))
    return labels.finish(
        [in_order(operand), (*rows, labels.fix(indices_shape[-1])), updates],
        [in_order(operand)],
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


# JAX spells them in either way, by version.
_SCATTERS = [
    f"scatter{dash}{how}" for dash in "-_" for how in ("add", "max", "min", "mul", "sub")
]

RULES: dict[str, Rule] = {"gather": _gather, **dict.fromkeys(("scatter", *_SCATTERS), _scatter)}
