"""Grids: how many blocks every label of a group is cut into, evenly or as the user says.

A grid is the number of blocks along each dimension of a tensor. All counts are powers
of two that divide their dimension, so that blocks of one tensor are equal in shape. The
uniform strategy and the counts that a user gives by name are here; `planner` weighs costs.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from doppler_jax.programs.fuse import Group
from doppler_jax.programs.program import Atom
from doppler_jax.programs.rules.labels import Labelling, Labels, Shape

Grid = tuple[int, ...]
Index = tuple[int, ...]
Counts = dict[int, int]
"""Number of blocks along every label of a group."""

Strategy = str | Mapping[str, Sequence[int]]
"""`planner`, `uniform`, or counts per result dimension by group name or pattern."""

_SHOWN = 20  # names in a message


def grid_of(labels: Labels, counts: Mapping[int, int]) -> Grid:
    """Returns the grid of a tensor whose dimensions bear `labels`."""
    return tuple(counts[label] for label in labels)


def indices(grid: Grid) -> Iterator[Index]:
    """Yields the block indices of a grid in row-major order."""
    return itertools.product(*map(range, grid))


def block_shape(shape: Shape, grid: Grid) -> Shape:
    """Returns the shape of every block of a tensor that is cut into `grid`."""
    return tuple(size // count for size, count in zip(shape, grid, strict=True))


def format_grid(grid: Grid) -> str:
    """Returns a grid as `2x1x4`; that of a scalar is `1`."""
    return "x".join(map(str, grid)) or "1"


def is_power_of_two(count: object) -> bool:
    """True for the integers 1, 2, 4, ..., NumPy's included; no boolean is one."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        return False
    return bool(count > 0 and not count & (count - 1))


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


def pin_counts(groups: Sequence[Group], strategy: Strategy) -> dict[int, tuple[str, Counts]]:
    """Returns the counts that a mapping gives, by index of group, with the matching key.

    A group takes what stands under its own name, else under the first pattern (as in
    `fnmatch`) that fits.

    Raises:
      ValueError: the strategy is unknown, a name or pattern fits no group, or a count does
        not suit the group's first result; the message names it.
    """
    if isinstance(strategy, str):
        if strategy not in ("planner", "uniform"):
            raise ValueError(
                f"unknown strategy {strategy!r}; known: planner, uniform, "
                "or a mapping from names to counts"
            )
        return {}
    names = [group.name for group in groups]
    for key in strategy:
        if not any(_fits(name, key) for name in names):
            some = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            raise ValueError(f"strategy names {key!r}, which fits none of: {some}")
    pinned = {}
    for number, group in enumerate(groups):
        keys = [key for key in strategy if _fits(group.name, key)]
        if keys:
            key = group.name if group.name in keys else keys[0]
            pinned[number] = key, _check_counts(key, group, tuple(strategy[key]))
    return pinned


def _fits(name: str, key: str) -> bool:
    return name == key or fnmatchcase(name, key)


def _check_counts(key: str, group: Group, grid: Grid) -> Counts:
    """Returns the count per label of a group's first result."""
    what = f"strategy[{key!r}] = {grid} for {group.name}"
    if not group.results:
        raise ValueError(f"{what}: it has no result to cut")
    shape, labels = group.results[0].aval.shape, group.labelling.results[0]
    if len(grid) != len(shape):
        raise ValueError(f"{what}: its result {list(shape)} has {len(shape)} dimensions")
    most = max_counts(group.labelling)
    for count, size, label in zip(grid, shape, labels, strict=True):
        if not is_power_of_two(count):
            raise ValueError(f"{what}: {count!r} is not a power of two")
        if count > most[label]:
            raise ValueError(
                f"{what}: a dimension of size {size} can be cut into "
                f"{most[label]} blocks at most, not {count}"
            )
    return dict(zip(labels, grid, strict=True))
