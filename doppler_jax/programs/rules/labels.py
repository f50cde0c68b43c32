"""Labels: what a rule says about one equation, and the pieces that rules are made of.

In the tensor relational algebra a tensor is a relation from block index to block. A
labelling gives every dimension of an equation's operands and results a label. Dimensions
of equal label are cut into equally many blocks and joined on equal block index; a label
that the results lack is aggregated over.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from doppler_jax.programs.program import Equation

Labels = tuple[int, ...]
Shape = tuple[int, ...]

BlockParams = Callable[[tuple[Shape, ...], tuple[Shape, ...]], dict[str, Any]]
"""Maps the shapes of the operands' and results' blocks to the parameters that differ."""


@dataclasses.dataclass(frozen=True)
class Labelling:
    """What one equation (or group of equations) does to blocks; labels are 0..L-1.

    A label's size is what its number of blocks has to divide. It is the size of the
    dimensions that bear the label; where an equation merges or splits dimensions, a
    dimension's size may be a multiple of it, and a block's size is always the
    dimension's size over the number of blocks.
    """

    sizes: tuple[int, ...]  # [L]
    operands: tuple[Labels, ...]  # per operand, a label per dimension
    results: tuple[Labels, ...]  # per result, likewise
    flops: float  # per point of the space that all labels span
    aggregate: str | None = None  # "sum", "max", ...: how partial results combine
    whole: bool = False  # True: no label may be cut, the equation is one task
    fixed: frozenset[int] = frozenset()
    """Labels that may not be cut: a task needs all of them, as a sort its dimension."""
    block_params: BlockParams | None = None

    @property
    def aggregated(self) -> Labels:
        """Labels of the operands over which partial results are combined, increasing."""
        if self.aggregate is None:
            return ()
        found = {label for labels in self.operands for label in labels}
        kept = {label for labels in self.results for label in labels}
        return tuple(sorted(found - kept - self.fixed))

    def max_count(self, label: int) -> int:
        """Returns the largest power of two into which the label may be cut."""
        size = self.sizes[label]
        if self.whole or label in self.fixed or size == 0:
            return 1
        return size & -size

    def task_flops(self, counts: Mapping[int, int]) -> float:
        """Returns the operations of one task, with `counts[label]` blocks per label."""
        return self.flops * math.prod(self.sizes) / math.prod(counts.values())


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
        **others: Any,
    ) -> Labelling:
        """Returns the labelling, given the flops of the whole equation and `others` of it."""
        return Labelling(
            sizes=tuple(self.sizes),
            operands=tuple(operands),
            results=tuple(results),
            flops=total_flops / max(1, math.prod(self.sizes)),
            fixed=frozenset(self.fixed),
            **others,
        )


def operand_shapes(equation: Equation) -> tuple[Shape, ...]:
    """Returns the operands' shapes."""
    return tuple(operand.aval.shape for operand in equation.operands)


def result_shapes(equation: Equation) -> tuple[Shape, ...]:
    """Returns the results' shapes."""
    return tuple(result.aval.shape for result in equation.results)


def in_order(labels: Mapping[int, int]) -> Labels:
    """Returns the labels of a tensor from those by dimension."""
    return tuple(labels[dim] for dim in sorted(labels))


def make_whole(equation: Equation, total_flops: float) -> Labelling:
    """Labels an equation that runs as one task."""
    labels = LabelMaker()
    operands = [tuple(map(labels.fix, shape)) for shape in operand_shapes(equation)]
    results = [tuple(map(labels.fix, shape)) for shape in result_shapes(equation)]
    return labels.finish(operands, results, total_flops, whole=True)


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
            shared[d] if d in shared else labels.fix(size) for d, size in enumerate(of)
        )

    operands = [label(of) for of in operand_shapes(equation)]
    results = [label(of) for of in result_shapes(equation)]
    return labels.finish(operands, results, total_flops, block_params=block_params)


def shaped_as(parameter: str) -> BlockParams:
    """Returns the block parameters of a primitive that has its result's shape among its own."""
    return lambda _, results: {parameter: results[0]}


def along(parameter: str, flops: Callable[[int], float] = lambda size: 0.0) -> Rule:
    """Returns the rule of what works along one dimension and needs all of it.

    Args:
      parameter: names the dimension.
      flops: of the dimension's size, operations per element.
    """

    def rule(equation: Equation) -> Labelling:
        axis = equation.params[parameter]
        shape = operand_shapes(equation)[0]
        return by_dimension(equation, {axis}, math.prod(shape) * flops(shape[axis]))

    return rule


def by_batch(equation: Equation, num_batch: int, total_flops: float) -> Labelling:
    """Labels an equation that treats its leading dimensions index by index, the rest whole.

    Args:
      equation: all its operands and results begin with the same dimensions.
      num_batch: how many.
      total_flops: of the whole equation.
    """
    rank = len(result_shapes(equation)[0])
    return by_dimension(equation, range(num_batch, rank), total_flops)
