"""Grids, and the uniform strategy: how many blocks every label of a group is cut into.

A grid holds the number of blocks along each dimension of a tensor. All counts are powers
of two that divide their dimension, so that blocks of one tensor are equal in shape.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from doppler_jax.programs.labelling import Labelling, Labels
from doppler_jax.programs.program import Atom, Group

Grid = tuple[int, ...]
Shape = tuple[int, ...]
Index = tuple[int, ...]
Counts = dict[int, int]
"""Number of blocks along every label of a group."""


def max_counts(labelling: Labelling) -> Counts:
    """Returns the most blocks into which every label may be cut, powers of two.

    Labels that no result bears and nothing aggregates over stay whole, and so does
    everything where there is nothing to share out.
    """
    cuttable = {label for labels in labelling.results for label in labels}
    cuttable.update(labelling.aggregated)
    if 0 in labelling.sizes:
        cuttable.clear()
    return {
        label: labelling.max_count(label) if label in cuttable else 1
        for label in range(len(labelling.sizes))
    }


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


def plan_uniform(
    groups: Sequence[Group], num_shards: int, pinned: Mapping[int, Mapping[int, int]]
) -> tuple[Counts, ...]:
    """Returns the uniform strategy's counts for every group, in order.

    Args:
      groups: the groups, in an order in which they can run.
      num_shards: number of blocks wanted per tensor, a power of two.
      pinned: by group index, counts of labels that are given.
    """
    stored: dict[Atom, Grid] = {}
    plan = []
    for number, group in enumerate(groups):
        grids = tuple(map(stored.get, group.operands))
        counts = choose_counts(group.labelling, group.num_root_operands, grids, num_shards)
        counts.update(pinned.get(number, {}))
        for value, labels in zip(group.results, group.labelling.results, strict=True):
            stored[value] = grid_of(labels, counts)
        plan.append(counts)
    return tuple(plan)


def choose_counts(
    labelling: Labelling,
    num_root_operands: int,
    stored: tuple[Grid | None, ...],
    num_shards: int,
) -> Counts:
    """Returns the number of blocks along every label of a group.

    Args:
      labelling: the group's labels.
      num_root_operands: how many operands, the first ones, its root reads.
      stored: per operand, the grid in which an earlier group left it; None for
        arguments and constants, which can be cut in any way.
      num_shards: number of blocks wanted per tensor, a power of two.
    """
    most = max_counts(labelling)
    if max(most.values(), default=1) == 1:
        return most
    if labelling.aggregate is not None and num_root_operands > 1:
        operands = labelling.operands[:num_root_operands]
        return _contraction_counts(labelling, operands, most, num_shards)
    return _following_counts(labelling, stored, most, num_shards)


def _contraction_counts(
    labelling: Labelling, operands: tuple[Labels, ...], most: Counts, num_shards: int
) -> Counts:
    """Cuts the result uniformly, and aggregated labels as the operands' own grids would.

    Batch labels, which all operands and the result share, are cut first.
    """
    result = labelling.results[0]
    batch = set(result).intersection(*operands)

    def cut(labels: Labels) -> Counts:
        free = [label for label in labels if most[label] > 1]
        first = tuple(label for label in free if label in batch)
        rest = tuple(label for label in free if label not in batch)
        sizes = {label: labelling.sizes[label] for label in labels}
        return dict(zip(labels, uniform_counts(sizes, (first, rest), num_shards), strict=True))

    counts = cut(result)
    own = [cut(labels) for labels in operands]
    for label in range(len(labelling.sizes)):
        if label not in counts:
            counts[label] = max(grid.get(label, 1) for grid in own)
    return counts


def _following_counts(
    labelling: Labelling, stored: tuple[Grid | None, ...], most: Counts, num_shards: int
) -> Counts:
    """Keeps the grid of the largest operand that has one; cuts other labels uniformly.

    A grid that cuts what must stay whole is not kept.
    """
    counts: Counts = {}
    largest = -1
    for labels, grid in zip(labelling.operands, stored, strict=True):
        size = math.prod(labelling.sizes[label] for label in labels)
        if grid is not None and size > largest:
            largest = size
            counts = dict(zip(labels, grid, strict=True))
    if any(count > most[label] for label, count in counts.items()):
        counts = {}
    rest = {label: size for label, size in enumerate(labelling.sizes) if label not in counts}
    budget = num_shards // math.prod(counts.values())
    free = tuple(label for label in rest if most[label] > 1)
    counts.update(zip(rest, uniform_counts(rest, (free,), budget), strict=True))
    return counts


def grid_of(labels: Labels, counts: Mapping[int, int]) -> Grid:
    """Returns the grid of a tensor whose dimensions bear `labels`."""
    return tuple(counts[label] for label in labels)


def indices(grid: Grid) -> Iterator[Index]:
    """Yields the block indices of a grid in row-major order."""
    return itertools.product(*map(range, grid))


def block_shape(shape: Shape, grid: Grid) -> Shape:
    """Returns the shape of every block of a tensor that is cut into `grid`."""
    return tuple(size // count for size, count in zip(shape, grid, strict=True))
