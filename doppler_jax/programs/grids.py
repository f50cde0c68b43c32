"""The uniform strategy: how many blocks every label of an equation is cut into.

A grid holds the number of blocks along each dimension of a tensor. All counts are powers
of two that divide their dimension, so that blocks of one tensor are equal in shape.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from doppler_jax.programs.rules import Labelling, Labels

Grid = tuple[int, ...]
Shape = tuple[int, ...]
Index = tuple[int, ...]


def uniform_counts(sizes: Mapping[int, int], order: Iterable[Labels], budget: int) -> Grid:
    """Returns the count of every label of `sizes`, in its order, at most `budget` blocks.

    Halves the label whose blocks are largest, the first of equals, until the budget is
    used up or no even size is left.

    Args:
      sizes: size per label, all positive.
      order: groups of labels; a group is split as far as it goes before the next.
      budget: number of blocks wanted, a power of two.
    """
    left = dict(sizes)
    for group in order:
        while budget > 1 and (even := [label for label in group if left[label] % 2 == 0]):
            label = max(even, key=left.__getitem__)
            left[label] //= 2
            budget //= 2
    return tuple(size // left[label] for label, size in sizes.items())


def choose_counts(
    labelling: Labelling, stored: tuple[Grid | None, ...], num_shards: int
) -> dict[int, int]:
    """Returns the number of blocks along every label of an equation.

    Args:
      labelling: the equation's labels.
      stored: per operand, the grid in which an earlier equation left it; None for
        arguments and constants, which can be cut in any way.
      num_shards: number of blocks wanted per tensor, a power of two.
    """
    if 0 in labelling.sizes:  # nothing to share out
        return dict.fromkeys(range(len(labelling.sizes)), 1)
    if labelling.is_contraction:
        return _contraction_counts(labelling, num_shards)
    return _following_counts(labelling, stored, num_shards)


def _contraction_counts(labelling: Labelling, num_shards: int) -> dict[int, int]:
    """Cuts the result uniformly, and aggregated labels as the operands' own grids would.

    Batch labels, which all operands and the result share, are cut first.
    """
    batch = set(labelling.result).intersection(*labelling.operands)

    def cut(labels: Labels) -> dict[int, int]:
        first = tuple(label for label in labels if label in batch)
        rest = tuple(label for label in labels if label not in batch)
        sizes = {label: labelling.sizes[label] for label in labels}
        return dict(zip(labels, uniform_counts(sizes, (first, rest), num_shards), strict=True))

    counts = cut(labelling.result)
    own = [cut(labels) for labels in labelling.operands]
    for label in range(len(labelling.sizes)):
        if label not in counts:
            counts[label] = max(grid.get(label, 1) for grid in own)
    return counts


def _following_counts(
    labelling: Labelling, stored: tuple[Grid | None, ...], num_shards: int
) -> dict[int, int]:
    """Keeps the grid of the largest operand that has one; cuts other labels uniformly."""
    counts: dict[int, int] = {}
    largest = -1
    for labels, grid in zip(labelling.operands, stored, strict=True):
        size = math.prod(labelling.sizes[label] for label in labels)
        if grid is not None and size > largest:
            largest = size
            counts = dict(zip(labels, grid, strict=True))
    rest = {label: size for label, size in enumerate(labelling.sizes) if label not in counts}
    budget = num_shards // math.prod(counts.values())
    counts.update(zip(rest, uniform_counts(rest, (tuple(rest),), budget), strict=True))
    return counts


def indices(grid: Grid) -> Iterator[Index]:
    """Yields the block indices of a grid in row-major order."""
    return itertools.product(*map(range, grid))


def block_shape(shape: Shape, grid: Grid) -> Shape:
    """Returns the shape of every block of a tensor that is cut into `grid`."""
    return tuple(size // count for size, count in zip(shape, grid, strict=True))
