"""The pieces that rules are made of."""

import math
from collections.abc import Callable, Collection, Iterable

from doppler_jax.programs.labelling import BlockParams, Labelling, Labels, Shape
from doppler_jax.programs.program import Equation

Rule = Callable[[Equation], Labelling | None]
"""Labels an equation; None if these parameters do not allow a cut."""


class LabelMaker:
    """Hands out labels 0, 1, ... and remembers their sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.fixed: set[int] = set()

    def free(self, size: int) -> int:
        """Returns a new label that may be cut."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def fix(self, size: int) -> int:
        """Returns a new label that may not be cut."""
        label = self.free(size)
        self.fixed.add(label)
        return label

    def finish(
        self,
        operands: Iterable[Labels],
        results: Iterable[Labels],
        total_flops: float = 0.0,
        aggregate: str | None = None,
        block_params: BlockParams | None = None,
    ) -> Labelling:
        """Returns the labelling; `total_flops` are those of the whole equation."""
        return Labelling(
            sizes=tuple(self.sizes),
            operands=tuple(operands),
            results=tuple(results),
            flops=total_flops / max(1, math.prod(self.sizes)),
            aggregate=aggregate,
            fixed=frozenset(self.fixed),
            block_params=block_params,
        )


def operand_shapes(equation: Equation) -> tuple[Shape, ...]:
    """Returns the operands' shapes."""
    return tuple(operand.aval.shape for operand in equation.operands)


def result_shapes(equation: Equation) -> tuple[Shape, ...]:
    """Returns the results' shapes."""
    return tuple(result.aval.shape for result in equation.results)


def num_elements(equation: Equation) -> int:
    """Returns the number of elements of all results."""
    return sum(math.prod(shape) for shape in result_shapes(equation))


def make_whole(equation: Equation, total_flops: float) -> Labelling:
    """Labels an equation that runs as one task."""
    labels = LabelMaker()
    operands = [tuple(map(labels.fix, shape)) for shape in operand_shapes(equation)]
    results = [tuple(map(labels.fix, shape)) for shape in result_shapes(equation)]
    return Labelling(
        sizes=tuple(labels.sizes),
        operands=tuple(operands),
        results=tuple(results),
        flops=total_flops / max(1, math.prod(labels.sizes)),
        whole=True,
    )


def by_dimension(
    equation: Equation,
    touched: Collection[int],
    total_flops: float = 0.0,
    block_params: BlockParams | None = None,
) -> Labelling:
    """Labels an equation that treats every dimension but the `touched` ones index by index.

    Dimension d of every operand and result is the same d; a task needs all of the touched
    ones. Operands without dimensions are read whole by every task.
    """
    labels = LabelMaker()
    shape = result_shapes(equation)[0]
    shared = {d: labels.free(size) for d, size in enumerate(shape) if d not in touched}

    def label(of: Shape) -> Labels:
        return tuple(
            shared[d] if d not in touched else labels.fix(size) for d, size in enumerate(of)
        )

    operands = [label(of) for of in operand_shapes(equation)]
    results = [label(of) for of in result_shapes(equation)]
    return labels.finish(operands, results, total_flops, block_params=block_params)


def by_batch(equation: Equation, num_batch: int, total_flops: float) -> Labelling:
    """Labels an equation that treats its leading dimensions index by index, the rest whole.

    Args:
      equation: all its operands and results begin with the same dimensions.
      num_batch: how many.
      total_flops: of the whole equation.
    """
    labels = LabelMaker()
    shared = tuple(map(labels.free, operand_shapes(equation)[0][:num_batch]))

    def label(of: Shape) -> Labels:
        return shared + tuple(map(labels.fix, of[num_batch:]))

    operands = [label(of) for of in operand_shapes(equation)]
    results = [label(of) for of in result_shapes(equation)]
    return labels.finish(operands, results, total_flops)
