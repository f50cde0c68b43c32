"""The groups of a program with their choices, costed alone and in pairs, and the least sum."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from doppler_jax.programs.elimination import minimize
from doppler_jax.programs.grids import Counts
from doppler_jax.programs.planner_costs import (
    Choice,
    Cost,
    Limits,
    Rates,
    Unit,
    edge_cost,
    group_cost,
    list_choices,
    make_unit,
)
from doppler_jax.programs.program import Atom, Group

_LISTED = 256
"""Ways to cut a group that are compared with its neighbours' ways."""

_KEPT = 24
"""Ways to cut a group that the dynamic programming sees."""


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
    choices: tuple[tuple[Choice, ...], ...]  # per group
    alone: tuple[Cost, ...]  # per group [K]
    pairs: Mapping[tuple[int, int], Cost]  # per (producer, reader) [J, K]

    def solve(self, traffic_weight: float) -> tuple[Counts, ...]:
        """Returns the counts per group of least total cost.

        Args:
          traffic_weight: what a second counts in which all devices receive at full rate.
        """
        states = minimize(
            [_total(cost, traffic_weight, self.rates) for cost in self.alone],
            {
                pair: _total(cost, traffic_weight, self.rates)
                for pair, cost in self.pairs.items()
            },
        )
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
    """Returns the cost signature of every group."""
    produced = {(link.reader, link.operand) for link in links}
    return [
        make_unit(group, [(number, i) in produced for i in range(len(group.operands))])
        for number, group in enumerate(groups)
    ]


def make_network(
    groups: Sequence[Group],
    limits: Limits,
    rates: Rates,
    pinned: Mapping[int, Counts],
) -> Network:
    """Returns the choices of every group that could be in a good plan, and their costs.

    Args:
      groups: the groups, in an order in which they can run.
      limits: how many tasks a group may have.
      rates: the cluster.
      pinned: by group, counts of labels that are given.
    """
    links = find_links(groups)
    units = make_units(groups, links)
    tables = _Tables(limits, rates)
    choices = [
        tables.choices(unit, pinned.get(number, {})) for number, unit in enumerate(units)
    ]
    alone = [tables.group(unit, own) for unit, own in zip(units, choices, strict=True)]
    costs = [
        tables.edge(
            units[link.reader],
            link.operand,
            choices[link.reader],
            _grids(units[link.producer].results[link.result], choices[link.producer]),
        )
        for link in links
    ]
    kept = _promising(alone, links, costs, rates)
    pairs: dict[tuple[int, int], Cost] = {}
    for link, cost in zip(links, costs, strict=True):
        pair = link.producer, link.reader
        part = _take(cost, np.ix_(kept[link.producer], kept[link.reader]))
        pairs[pair] = _add(pairs[pair], part) if pair in pairs else part
    return Network(
        rates=rates,
        choices=tuple(
            tuple(own[i] for i in keep) for own, keep in zip(choices, kept, strict=True)
        ),
        alone=tuple(_take(cost, keep) for cost, keep in zip(alone, kept, strict=True)),
        pairs=pairs,
    )


class _Tables:
    """Makes cost tables, and the same one again for the same question: layers repeat."""

    def __init__(self, limits: Limits, rates: Rates) -> None:
        self._limits = limits
        self._rates = rates
        self._lists: dict[tuple[object, ...], tuple[Choice, ...]] = {}
        self._groups: dict[tuple[object, ...], Cost] = {}
        self._edges: dict[tuple[object, ...], Cost] = {}

    def choices(self, unit: Unit, pins: Counts) -> tuple[Choice, ...]:
        key = unit, tuple(pins.items())
        if key not in self._lists:
            listed = list_choices(unit, self._limits, self._rates, pins)
            if len(listed) > _LISTED:
                cost = _total(group_cost(unit, np.array(listed), self._rates), 1.0, self._rates)
                keep = np.sort(np.argsort(cost, kind="stable")[:_LISTED])
                listed = [listed[i] for i in keep]
            self._lists[key] = tuple(listed)
        return self._lists[key]

    def group(self, unit: Unit, choices: tuple[Choice, ...]) -> Cost:
        key = unit, choices
        if key not in self._groups:
            self._groups[key] = group_cost(unit, _array(choices), self._rates)
        return self._groups[key]

    def edge(
        self, unit: Unit, operand: int, choices: tuple[Choice, ...], stored: tuple[Choice, ...]
    ) -> Cost:
        key = unit, operand, choices, stored
        if key not in self._edges:
            self._edges[key] = edge_cost(
                unit, operand, _array(choices), _array(stored), self._rates
            )
        return self._edges[key]


def _promising(
    alone: Sequence[Cost], links: Sequence[Link], costs: Sequence[Cost], rates: Rates
) -> list[np.ndarray]:
    """Returns, per group, the choices that would cost least if their neighbours gave way."""
    bounds = [_total(cost, 1.0, rates).copy() for cost in alone]
    for link, cost in zip(links, costs, strict=True):
        total = _total(cost, 1.0, rates)
        bounds[link.producer] += total.min(axis=1)
        bounds[link.reader] += total.min(axis=0)
    return [np.sort(np.argsort(bound, kind="stable")[:_KEPT]) for bound in bounds]


def _total(cost: Cost, traffic_weight: float, rates: Rates) -> np.ndarray:
    shared_s = cost.moved_bytes * rates.seconds_per_byte / rates.num_devices
    return cost.seconds + traffic_weight * shared_s


def _grids(labels: Sequence[int], choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    return tuple(tuple(choice[label] for label in labels) for choice in choices)


def _array(choices: tuple[Choice, ...]) -> np.ndarray:
    return np.array(choices, np.int64).reshape(len(choices), -1)


def _take(cost: Cost, where: np.ndarray | tuple[np.ndarray, ...]) -> Cost:
    return Cost(cost.seconds[where], cost.moved_bytes[where])


def _add(a: Cost, b: Cost) -> Cost:
    return Cost(a.seconds + b.seconds, a.moved_bytes + b.moved_bytes)
