"""What ways to cut a program's groups cost, and the ways whose costs have the least sum.

The cost model: blocks are spread evenly over the devices, each device runs its share of a
group's tasks one after another, and a task runs where the largest operand that other tasks
make is, as far as the load stays even. Other operands, and all that joins several blocks,
come from anywhere, because placements are made later and not for locality alone. From that
follow computation with its imbalance, the delay of a transfer between one group and the
next, and the traffic that the devices share.

A group's choice costs something alone (`group_cost`) and beside the choice of each group
that it reads (`edge_cost`). `make_network` tabulates both; `Network.solve` finds the least
sum, by `elimination`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from doppler_jax.programs.blocks import num_bytes
from doppler_jax.programs.elimination import minimize
from doppler_jax.programs.fuse import Group
from doppler_jax.programs.grids import Counts, max_counts
from doppler_jax.programs.program import Atom, Literal
from doppler_jax.programs.rules.labels import Labels
from doppler_jax.types import Cluster

_LISTED = 256
"""Ways to cut a group that are compared with its neighbours' ways."""

_KEPT = 24
"""Ways to cut a group that the dynamic programming sees."""

Choice = tuple[int, ...]
"""A way to cut a group: the number of blocks along every label, `[L]`."""

Choices = tuple[Choice, ...]


@dataclasses.dataclass(frozen=True)
class Rates:
    """A cluster as the mean of its devices and of its links."""

    num_devices: int
    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    latency_s: float
    seconds_per_byte: float


@dataclasses.dataclass(frozen=True)
class Limits:
    """How many tasks a group is cut into."""

    least_tasks: int  # if its labels allow as many
    most_tasks: int  # at least `least_tasks`
    least_task_s: float  # roofline seconds; what makes shorter tasks may stay coarser


@dataclasses.dataclass(frozen=True)
class Unit:
    """What of a group its costs depend on; equal for the groups of repeated layers."""

    max_counts: tuple[int, ...]  # [L] most blocks per label; 1 where it must not be cut
    inner: Labels  # labels over which partial results are combined
    operands: tuple[Labels, ...]
    operand_bytes: tuple[float, ...]  # whole tensors; literals 0
    produced: tuple[bool, ...]  # per operand, whether another group makes it
    num_root_operands: int
    results: tuple[Labels, ...]
    result_bytes: tuple[float, ...]
    partial_bytes: float  # of the root's result
    flops: float  # of the root, all tasks together
    epilogue_flops: float  # of what is fused behind it
    result_size: float  # elements of the first result

    @property
    def followed(self) -> int | None:
        """The operand beside which tasks run: the largest that another group makes."""
        made = [i for i, is_made in enumerate(self.produced) if is_made]
        return max(made, key=lambda i: (self.operand_bytes[i], -i), default=None)


Cost = np.ndarray
"""Costs `[2, ...]` of some choices: seconds of computation, imbalance and delays of transfers,
and bytes that are expected to cross devices."""


def total_s(cost: Cost, traffic_weight: float, rates: Rates) -> np.ndarray:
    """Returns costs in seconds alone.

    Args:
      cost: of some choices.
      traffic_weight: what a second counts in which all devices receive at full rate.
      rates: the cluster.
    """
    seconds, moved_bytes = cost
    return seconds + traffic_weight * (moved_bytes * rates.seconds_per_byte / rates.num_devices)


def make_rates(cluster: Cluster) -> Rates:
    """Returns the means of a cluster; without links, transfers cost nothing."""
    d = cluster.num_devices
    links = ~np.eye(d, dtype=bool)
    return Rates(
        num_devices=d,
        flops_per_s=float(np.mean(cluster.flops_per_s)),
        memory_bytes_per_s=float(np.mean(cluster.memory_bytes_per_s)),
        launch_s=float(np.mean(cluster.launch_s)),
        latency_s=float(np.mean(cluster.latency_s[links])) if d > 1 else 0.0,
        seconds_per_byte=float(np.mean(1 / cluster.link_bytes_per_s[links])) if d > 1 else 0.0,
    )


def _num_bytes(atom: Atom) -> float:
    return 0.0 if isinstance(atom, Literal) else float(num_bytes(atom.aval))


def num_blocks(choices: np.ndarray, labels: Sequence[int]) -> np.ndarray:
    """Returns the number of blocks `[K]` that each choice cuts some labels into."""
    return choices[:, list(labels)].prod(axis=1)


def list_choices(unit: Unit, limits: Limits, rates: Rates, pins: Counts) -> list[Choice]:
    """Returns the ways to cut a group that are worth considering.

    Args:
      unit: the group.
      limits: how many tasks it may have.
      rates: the cluster.
      pins: counts of labels that are given.
    """
    given = math.prod(pins.values())  # blocks that every choice will have
    most_tasks = max(limits.most_tasks, given)
    choices: list[tuple[Choice, int]] = [((), given)]
    for label, most in enumerate(unit.max_counts):
        powers = [1 << i for i in range(min(most, most_tasks).bit_length())]
        # Counts, and by how much each multiplies the tasks.
        ways = [(pins[label], 1)] if label in pins else [(count, count) for count in powers]
        choices = [
            ((*choice, count), tasks * more)
            for choice, tasks in choices
            for count, more in ways
            if tasks * more <= most_tasks
        ]
    work_s = max(
        (unit.flops + unit.epilogue_flops) / rates.flops_per_s,
        (sum(unit.operand_bytes) + sum(unit.result_bytes)) / rates.memory_bytes_per_s,
    )
    wanted = limits.least_tasks if work_s > limits.least_tasks * limits.least_task_s else 1
    wanted = min(wanted, max(tasks for _, tasks in choices))
    return [choice for choice, tasks in choices if tasks >= wanted]


def group_cost(unit: Unit, choices: np.ndarray, rates: Rates) -> Cost:
    """Returns what computing a group costs, the aggregation of partial results included.

    Args:
      unit: the group.
      choices: `[K, L]` counts per label.
      rates: the cluster.

    Returns:
      Costs `[2, K]`.
    """
    tasks = choices.prod(axis=1)
    inner = num_blocks(choices, unit.inner)
    outer = tasks // inner
    split = inner > 1
    blocks = [
        size / num_blocks(choices, labels)
        for labels, size in zip(unit.operands, unit.operand_bytes, strict=True)
    ]
    result = sum(
        size / num_blocks(choices, labels)
        for labels, size in zip(unit.results, unit.result_bytes, strict=True)
    )
    root_reads = sum(blocks[: unit.num_root_operands])
    late_reads = sum(blocks[unit.num_root_operands :])
    partial = unit.partial_bytes / outer
    late_flops = unit.epilogue_flops / outer
    task_s = _task_s(
        unit.flops / tasks + np.where(split, 0.0, late_flops),
        root_reads + np.where(split, partial, late_reads + result),
        rates,
    )
    join_s = _task_s(
        (inner - 1) * unit.result_size / outer + late_flops,
        inner * partial + late_reads + result,
        rates,
    )
    seconds = _rounds(tasks, rates) * task_s + split * _rounds(outer, rates) * join_s
    # A block's partial results start at once, on devices of their own.
    sharing = np.minimum(rates.num_devices, inner)
    moved = outer * inner * (1 - 1 / sharing) * partial
    seconds = seconds + (sharing > 1) * _move_s(partial, rates)
    return np.array([seconds, moved])


def edge_cost(
    unit: Unit, operand: int, choices: np.ndarray, stored: np.ndarray, rates: Rates
) -> Cost:
    """Returns what bringing an operand to a group's tasks costs.

    Where the reader's grid differs from the stored one, formation tasks cut and join; they
    read whole stored blocks.

    Args:
      unit: the reader.
      operand: which of its operands.
      choices: `[K, L]` the reader's counts per label.
      stored: `[J, dims]` grids in which the operand's producer can leave it.
      rates: the cluster.

    Returns:
      Costs `[2, J, K]`.
    """
    d = rates.num_devices
    needed = choices[:, list(unit.operands[operand])]
    have = stored.prod(axis=1)[:, None]  # [J, 1] stored blocks
    want = needed.prod(axis=1)[None, :]  # [1, K] blocks that are read
    size = unit.operand_bytes[operand]
    late = operand >= unit.num_root_operands
    readers = choices.prod(axis=1) // (num_blocks(choices, unit.inner) if late else 1)
    ratio = stored[:, None, :] / needed[None, :, :]
    joined = np.maximum(ratio, 1.0).prod(axis=2)  # stored blocks in one that is formed
    is_formed = (ratio != 1.0).any(axis=2)
    spread = np.minimum(joined, d)
    gathered = np.minimum(want * joined * (1 - 1 / spread), have * (d - 1)) * size / have
    form_s = _task_s(0.0, joined * size / have + size / want, rates)
    seconds = is_formed * _rounds(want, rates) * form_s
    seconds = seconds + (spread > 1) * _move_s(size / have, rates)
    # Which devices have the blocks, formed where necessary, and which need them.
    having = np.minimum(np.where(joined > 1, want, have), d)
    needing = np.minimum(readers, d)[None, :]
    if operand == unit.followed:
        pairs = np.maximum(needing, want)
        sent = pairs * (1 - np.minimum(having / needing, 1.0))
    else:
        sent = want * np.minimum(readers / want, d) * (1 - 1 / d)
    seconds = seconds + (sent > 0) * _move_s(size / want, rates)
    return np.array([seconds, gathered + sent * size / want])


def _task_s(flops: np.ndarray | float, touched: np.ndarray, rates: Rates) -> np.ndarray:
    """Returns the roofline seconds of one task."""
    arithmetic_s = flops / rates.flops_per_s
    return rates.launch_s + np.maximum(arithmetic_s, touched / rates.memory_bytes_per_s)


def _rounds(tasks: np.ndarray, rates: Rates) -> np.ndarray:
    """Returns how many tasks the busiest device runs."""
    return np.ceil(tasks / rates.num_devices)


def _move_s(num_bytes: np.ndarray, rates: Rates) -> np.ndarray:
    return rates.latency_s + num_bytes * rates.seconds_per_byte


@dataclasses.dataclass(frozen=True)
class Link:
    """A group reads what another one makes."""

    producer: int  # group
    result: int  # which of its results
    reader: int  # group
    operand: int  # which of its operands


@dataclasses.dataclass(frozen=True)
class Network:
    """Costs of a program's choices: a table per group, and one per pair of linked groups."""

    rates: Rates
    choices: tuple[Choices, ...]  # per group
    alone: tuple[Cost, ...]  # per group [2, K]
    pairs: Mapping[tuple[int, int], Cost]  # per (producer, reader) [2, J, K]

    def solve(self, traffic_weight: float) -> tuple[Counts, ...]:
        """Returns the counts per group of least total cost.

        Args:
          traffic_weight: what a second counts in which all devices receive at full rate.
        """
        weighed = functools.partial(total_s, traffic_weight=traffic_weight, rates=self.rates)
        pairs = {pair: weighed(cost) for pair, cost in self.pairs.items()}
        states = minimize(list(map(weighed, self.alone)), pairs)
        return tuple(
            dict(enumerate(choices[state]))
            for choices, state in zip(self.choices, states, strict=True)
        )


def find_links(groups: Sequence[Group]) -> list[Link]:
    """Returns who reads what whom, by reader, then operand."""
    makers: dict[Atom, tuple[int, int]] = {
        value: (number, which)
        for number, group in enumerate(groups)
        for which, value in enumerate(group.results)
    }
    return [
        Link(*makers[atom], reader, operand)
        for reader, group in enumerate(groups)
        for operand, atom in enumerate(group.operands)
        if atom in makers
    ]


def make_units(groups: Sequence[Group], links: Sequence[Link]) -> list[Unit]:
    """Returns what the costs of each group depend on."""
    produced = {(link.reader, link.operand) for link in links}
    units = []
    for number, group in enumerate(groups):
        labelling = group.labelling
        first = group.results[0].aval.shape if group.results else ()  # one that prints has none
        units.append(
            Unit(
                max_counts=tuple(max_counts(labelling).values()),
                inner=labelling.aggregated,
                operands=labelling.operands,
                operand_bytes=tuple(map(_num_bytes, group.operands)),
                produced=tuple((number, i) in produced for i in range(len(group.operands))),
                num_root_operands=group.num_root_operands,
                results=labelling.results,
                result_bytes=tuple(map(_num_bytes, group.results)),
                partial_bytes=sum(map(_num_bytes, group.root.results)),
                flops=labelling.flops * math.prod(labelling.sizes),
                epilogue_flops=group.epilogue_flops * math.prod(first),
                result_size=float(math.prod(first)),
            )
        )
    return units


def make_network(
    groups: Sequence[Group], limits: Limits, rates: Rates, pinned: Mapping[int, Counts]
) -> Network:
    """Returns the choices of every group that could be in a good plan, and their costs.

    Args:
      groups: the groups, in an order in which they can run.
      limits: how many tasks a group may have.
      rates: the cluster.
      pinned: by group, counts of labels that are given.
    """
    links = find_links(groups)
    # Layers repeat: the same question gets the same table again.
    listed = functools.cache(_list_cheapest)
    computed = functools.cache(lambda unit, own: group_cost(unit, _array(own), rates))
    brought = functools.cache(
        lambda unit, operand, own, stored: edge_cost(
            unit, operand, _array(own), _array(stored), rates
        )
    )
    units = make_units(groups, links)
    choices = [
        listed(unit, limits, rates, tuple(pinned.get(number, {}).items()))
        for number, unit in enumerate(units)
    ]
    alone = [computed(unit, own) for unit, own in zip(units, choices, strict=True)]
    costs = []
    for link in links:
        labels = units[link.producer].results[link.result]
        stored = tuple(tuple(c[label] for label in labels) for c in choices[link.producer])
        reader = units[link.reader]
        costs.append(brought(reader, link.operand, choices[link.reader], stored))
    kept = _promising(alone, links, costs, rates)
    pairs: dict[tuple[int, int], Cost] = {}
    for link, cost in zip(links, costs, strict=True):
        pair = link.producer, link.reader
        part = cost[:, kept[link.producer]][:, :, kept[link.reader]]
        pairs[pair] = pairs[pair] + part if pair in pairs else part
    return Network(
        rates=rates,
        choices=tuple(
            tuple(own[i] for i in keep) for own, keep in zip(choices, kept, strict=True)
        ),
        alone=tuple(cost[:, keep] for cost, keep in zip(alone, kept, strict=True)),
        pairs=pairs,
    )


def _list_cheapest(
    unit: Unit, limits: Limits, rates: Rates, pins: tuple[tuple[int, int], ...]
) -> Choices:
    """Returns the choices of a group, where there are too many the cheapest by themselves."""
    listed = list_choices(unit, limits, rates, dict(pins))
    if len(listed) > _LISTED:
        cost = total_s(group_cost(unit, np.array(listed), rates), 1.0, rates)
        keep = np.sort(np.argsort(cost, kind="stable")[:_LISTED])
        listed = [listed[i] for i in keep]
    return tuple(listed)


def _promising(
    alone: Sequence[Cost], links: Sequence[Link], costs: Sequence[Cost], rates: Rates
) -> list[np.ndarray]:
    """Returns, per group, the choices that would cost least if their neighbours gave way."""
    bounds = [total_s(cost, 1.0, rates) for cost in alone]
    for link, cost in zip(links, costs, strict=True):
        total = total_s(cost, 1.0, rates)
        bounds[link.producer] += total.min(axis=1)
        bounds[link.reader] += total.min(axis=0)
    return [np.sort(np.argsort(bound, kind="stable")[:_KEPT]) for bound in bounds]


def _array(choices: Choices) -> np.ndarray:
    return np.array(choices, np.int64).reshape(len(choices), -1)
