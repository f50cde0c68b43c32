"""One readable line per group: how its result is cut, and why."""

from collections.abc import Mapping, Sequence

import numpy as np

from doppler_jax.programs.grids import Counts, Grid, grid_of
from doppler_jax.programs.planner_costs import Rates, Unit, edge_cost, group_cost
from doppler_jax.programs.planner_network import Link, find_links, make_units
from doppler_jax.programs.program import Group


def explain_plan(
    groups: Sequence[Group],
    plan: Sequence[Counts],
    uniform: Sequence[Counts],
    keys: Mapping[int, str],
    rates: Rates,
) -> tuple[str, ...]:
    """Returns a line per group, such as `2x2: follows dot_general_3; saves 12.6 MB`.

    Args:
      groups: the groups.
      plan: their counts.
      uniform: the counts of the uniform strategy, to compare with.
      keys: by group, the name or pattern under which the user gave its counts.
      rates: the cluster that the plan is for.
    """
    links = find_links(groups)
    units = make_units(groups, links)
    around: list[list[Link]] = [[] for _ in groups]
    for link in links:
        around[link.producer].append(link)
        around[link.reader].append(link)
    lines = []
    for number, group in enumerate(groups):
        parts = _shape_reasons(number, units[number], plan, keys)
        if not group.labelling.whole:
            parts += _operand_reasons(number, groups, units[number], around[number], plan)
            swapped = list(plan)
            swapped[number] = uniform[number]
            saved = _moved_bytes(number, units, around[number], swapped, rates)
            saved -= _moved_bytes(number, units, around[number], plan, rates)
            if saved > 0:
                parts.append(f"saves {saved / 1e6:.3g} MB")
        lines.append(f"{_format_grids(group, plan[number])}: {'; '.join(parts)}")
    return tuple(lines)


def explain_uniform(groups: Sequence[Group], plan: Sequence[Counts]) -> tuple[str, ...]:
    """Returns a line per group of a uniform plan, such as `2x2: uniform`."""
    return tuple(
        f"{_format_grids(group, counts)}: uniform"
        for group, counts in zip(groups, plan, strict=True)
    )


def _format_grids(group: Group, counts: Counts) -> str:
    grids = [format_grid(grid_of(labels, counts)) for labels in group.labelling.results]
    return ", ".join(dict.fromkeys(grids)) or "no result"


def format_grid(grid: Grid) -> str:
    """Returns a grid as `2x1x4`; that of a scalar is `1`."""
    return "x".join(map(str, grid)) or "1"


def _shape_reasons(
    number: int, unit: Unit, plan: Sequence[Counts], keys: Mapping[int, str]
) -> list[str]:
    """Says where the counts came from, if it was not from costs."""
    if number in keys:
        return [f"given as {keys[number]!r}"]
    if max(unit.max_counts, default=1) == 1:
        return ["cannot be cut"]
    if max(plan[number].values()) == 1:
        return ["too little work to share out"]
    return [] if any(unit.produced) else ["reads arguments only"]


def _operand_reasons(
    number: int,
    groups: Sequence[Group],
    unit: Unit,
    links: Sequence[Link],
    plan: Sequence[Counts],
) -> list[str]:
    """Says what becomes of the operand that tasks run beside, and of contracted labels."""
    parts = []
    for link in links:
        if link.reader == number and link.operand == unit.followed:
            maker = groups[link.producer]
            stored = grid_of(maker.labelling.results[link.result], plan[link.producer])
            needed = grid_of(unit.operands[link.operand], plan[number])
            recut = f"{maker.name} is cut again, {format_grid(stored)} to {format_grid(needed)}"
            parts.append(f"follows {maker.name}" if stored == needed else recut)
    if unit.inner:
        cut = int(np.prod([plan[number][label] for label in unit.inner]))
        what = "contracted" if groups[number].num_root_operands > 1 else "reduced"
        parts.append(f"{what} dimensions in {cut}" if cut > 1 else f"{what} dimensions whole")
    return parts


def _moved_bytes(
    number: int,
    units: Sequence[Unit],
    links: Sequence[Link],
    plan: Sequence[Counts],
    rates: Rates,
) -> float:
    """Returns the bytes expected to move to, in and from a group."""

    def rows(group: int) -> np.ndarray:
        return np.array([[plan[group][i] for i in range(len(units[group].max_counts))]])

    total = float(group_cost(units[number], rows(number), rates).moved_bytes[0])
    for link in links:
        labels = list(units[link.producer].results[link.result])
        stored = rows(link.producer)[:, labels]
        reader = units[link.reader]
        cost = edge_cost(reader, link.operand, rows(link.reader), stored, rates)
        total += float(cost.moved_bytes[0, 0])
    return total
