"""What the user says about partitions by name: a mapping in place of a strategy's name."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from doppler_jax.programs.grids import Counts, Grid, max_counts
from doppler_jax.programs.program import Group

Strategy = str | Mapping[str, Sequence[int]]
"""`planner`, `uniform`, or counts per result dimension by group name or pattern."""

_SHOWN = 20  # names in a message


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
        is_count = isinstance(count, int) and not isinstance(count, bool) and count > 0
        if not is_count or count & (count - 1):
            raise ValueError(f"{what}: {count!r} is not a power of two")
        if count > most[label]:
            raise ValueError(
                f"{what}: a dimension of size {size} can be cut into "
                f"{most[label]} blocks at most, not {count}"
            )
    return dict(zip(labels, grid, strict=True))
