"""Chooses how every tensor is cut: dynamic programming over the program, then a check.

Every group of equations has some ways to be cut into power-of-two blocks. One costs
something by itself and beside the grid in which another group leaves an operand, and the
choice of least sum is found (`cut_costs`). That sum knows nothing of what overlaps in
time. So it is minimised for few and for many tasks and under several weights of traffic,
and of these plans and the uniform one that is taken whose task graph has the least
simulated makespan, give or take 1.5 % for the sake of few tasks. Each group gets a line
that says how it is cut, and why.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.costs.build import make_costs
from doppler_jax.costs.clusters import make_cluster
from doppler_jax.programs.cut_costs import (
    Limits,
    Rates,
    Unit,
    find_links,
    make_network,
    make_rates,
    make_units,
)
from doppler_jax.programs.fuse import Group
from doppler_jax.programs.grids import (
    Counts,
    Strategy,
    format_grid,
    grid_of,
    pin_counts,
    plan_uniform,
)
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.types import Cluster, TaskGraph

Build = Callable[[tuple[Counts, ...]], TaskGraph]
"""Returns the task graph of a program whose groups are cut so."""

_GRAINS = ((1, 2), (1, 4), (2, 4))
"""Least and most tasks of a group, in multiples of the shards asked for."""

_TRAFFIC_WEIGHTS = (1.0, 0.0, 4.0)

WORTH_IT = 0.985
"""What a later plan's makespan must be below, in those of earlier ones with fewer tasks."""

_SIMULATED_TASKS = 20_000
"""When the plans compared have as many tasks together, no further one is looked at."""

_ALWAYS_SIMULATED = 2  # the plan of least cost and the uniform one


@dataclasses.dataclass(frozen=True)
class PartitionPlan:
    """How many blocks each label of each group is cut into, and why."""

    counts: tuple[Counts, ...]  # per group
    reasons: tuple[str, ...]  # per group, one readable line


def plan_partition(
    groups: Sequence[Group],
    num_shards: int,
    strategy: Strategy = "planner",
    cluster: Cluster | None = None,
    *,
    build: Build,
) -> PartitionPlan:
    """Returns the partition of every group.

    Args:
      groups: the groups, in an order in which they can run.
      num_shards: tasks that a group is cut into at least, a power of two, as far as its
        labels allow; on a given cluster, groups stay coarser whose tasks would be shorter
        than their launches.
      strategy: `planner`; `uniform`, which cuts every tensor alike and considers no costs;
        or a mapping from group names (or patterns, as in `fnmatch`) to the counts along
        the dimensions of their first results, the rest planned around them.
      cluster: what to plan for; by default `num_shards` devices like those of `p100x4`.
      build: makes the task graph of a choice, to compare a few.

    Raises:
      ValueError: the strategy is unknown, or names a group or a count that cannot be.
    """
    given = pin_counts(groups, strategy)
    pinned = {number: counts for number, (_, counts) in given.items()}
    uniform = plan_uniform(groups, num_shards, pinned)
    if strategy == "uniform":
        pairs = zip(groups, uniform, strict=True)
        return PartitionPlan(
            uniform, tuple(f"{_format_grids(*pair)}: uniform" for pair in pairs)
        )
    least_task_s = 0.0 if cluster is None else float(np.mean(cluster.launch_s))
    cluster = default_cluster(num_shards) if cluster is None else cluster
    rates = make_rates(cluster)
    planned = _plan(groups, num_shards, least_task_s, rates, pinned)
    candidates = itertools.chain(itertools.islice(planned, 1), [uniform], planned)
    best, best_s, num_tasks = uniform, math.inf, 0
    for number, counts in enumerate(candidates):
        if number >= _ALWAYS_SIMULATED and num_tasks > _SIMULATED_TASKS:
            break
        graph = build(counts)
        num_tasks += graph.num_tasks
        if (makespan := simulated_s(graph, cluster)) < WORTH_IT * best_s:
            best, best_s = counts, makespan
    keys = {number: key for number, (key, _) in given.items()}
    return PartitionPlan(best, _explain(groups, best, keys))


def default_cluster(num_devices: int) -> Cluster:
    """Returns as many devices as asked for, with the rates and links of `p100x4`."""
    like = make_cluster("p100x4")
    return Cluster(
        flops_per_s=[like.flops_per_s[0]] * num_devices,
        memory_bytes_per_s=like.memory_bytes_per_s[0],
        memory_bytes=like.memory_bytes[0],
        launch_s=like.launch_s[0],
        latency_s=like.latency_s[0, 1],
        link_bytes_per_s=like.link_bytes_per_s[0, 1],
    )


def simulated_s(graph: TaskGraph, cluster: Cluster) -> float:
    """Returns the makespan of critical-path list scheduling, by the oracle, in seconds."""
    costs = make_costs(graph, cluster)
    return makespan_s(simulate_oracle(graph, costs, critical_path(graph, costs)))


def _plan(
    groups: Sequence[Group],
    num_shards: int,
    least_task_s: float,
    rates: Rates,
    pinned: Mapping[int, Counts],
) -> Iterator[tuple[Counts, ...]]:
    """Yields different plans of least cost, under different notions of it."""
    seen: list[tuple[Counts, ...]] = []
    for least, most in _GRAINS if num_shards > 1 else ((1, 1),):
        limits = Limits(least * num_shards, most * num_shards, least_task_s)
        network = make_network(groups, limits, rates, pinned)
        for weight in _TRAFFIC_WEIGHTS:
            plan = network.solve(weight)
            if plan not in seen:
                seen.append(plan)
                yield plan


def _explain(
    groups: Sequence[Group], plan: Sequence[Counts], keys: Mapping[int, str]
) -> tuple[str, ...]:
    """Returns a line per group, such as `2x2: follows tanh_3; contracted dimensions whole`.

    Args:
      groups: the groups.
      plan: their counts.
      keys: by group, the name or pattern under which the user gave its counts.
    """
    links = find_links(groups)
    made = {(link.reader, link.operand): link for link in links}
    lines = []
    for group, unit in zip(groups, make_units(groups, links), strict=True):
        counts = plan[group.number]
        parts = _shape_reasons(unit, counts, keys.get(group.number))
        link = None if unit.followed is None else made[group.number, unit.followed]
        if link is not None and not group.labelling.whole:
            maker = groups[link.producer]
            stored = grid_of(maker.labelling.results[link.result], plan[link.producer])
            needed = grid_of(unit.operands[link.operand], counts)
            recut = f"{maker.name} is cut again, {format_grid(stored)} to {format_grid(needed)}"
            parts.append(f"follows {maker.name}" if stored == needed else recut)
        if unit.inner and not group.labelling.whole:
            cut = math.prod(counts[label] for label in unit.inner)
            what = "contracted" if group.num_root_operands > 1 else "reduced"
            parts.append(f"{what} dimensions {f'in {cut}' if cut > 1 else 'whole'}")
        lines.append(f"{_format_grids(group, counts)}: {'; '.join(parts)}")
    return tuple(lines)


def _format_grids(group: Group, counts: Counts) -> str:
    grids = [format_grid(grid_of(labels, counts)) for labels in group.labelling.results]
    return ", ".join(dict.fromkeys(grids)) or "no result"


def _shape_reasons(unit: Unit, counts: Counts, key: str | None) -> list[str]:
    """Says where the counts came from, if it was not from costs."""
    if key is not None:
        return [f"given as {key!r}"]
    if max(unit.max_counts, default=1) == 1:
        return ["cannot be cut"]
    if max(counts.values()) == 1:
        return ["too little work to share out"]
    return [] if any(unit.produced) else ["reads arguments only"]
