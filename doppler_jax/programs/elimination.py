"""Least sum of costs on pairs of choices: dynamic programming by variable elimination.

Each of n variables takes one of its states; a state costs something, and so does a pair
of states of two variables that are connected. On a chain or a tree of connections this is
Viterbi's algorithm. On other graphs, eliminating a variable connects its neighbours, so
that the tables grow with the width of the graph; where they would grow past a limit, the
variable of most neighbours is set to what looks best and the search goes on without it. In
the end every variable is tried in each of its states, the others as they are, until
nothing gets better.

Reference: Bertelè and Brioschi 1972, Nonserial Dynamic Programming. The limit and the
final sweeps are ours.
"""

import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np

LIMIT = 1 << 18
"""Entries of the largest table that elimination may make."""

_SWEEPS = 20  # more than ever seen to be needed; each costs little

Pairs = Mapping[tuple[int, int], np.ndarray]
"""Cost table `[K_a, K_b]` of each connected pair (a, b), a < b."""

_Factor = tuple[tuple[int, ...], np.ndarray]  # variables in increasing order, their table


def minimize(costs: Sequence[np.ndarray], pairs: Pairs, limit: int = LIMIT) -> list[int]:
    """Returns the state of every variable whose total cost is least.

    Exact if no table passes the limit, else a local optimum. Ties go to smaller states.

    Args:
      costs: per variable, cost `[K]` of each state, finite.
      pairs: cost of each pair of states of connected variables.
      limit: most entries of a table.
    """
    factors: list[_Factor] = [((v,), table) for v, table in enumerate(costs)]
    factors += [(pair, table) for pair, table in pairs.items()]
    chosen = _eliminate(factors, [table.size for table in costs], limit)
    return _descend(chosen, costs, pairs)


def _eliminate(factors: list[_Factor], sizes: list[int], limit: int) -> list[int]:
    """Removes variable by variable, fewest neighbours first, then reads the states back."""
    network = _Network(factors, len(sizes))
    removed: list[tuple[int, tuple[int, ...], np.ndarray]] = []  # variable, others, best state
    while network.left:
        v = network.fewest_neighbours()
        others = network.neighbours(v)
        if math.prod(sizes[u] for u in (v, *others)) <= limit:
            table = _sum(network.factors_of(v), (v, *others), sizes)
            removed.append((v, others, table.argmin(axis=0)))
            network.replace(v, [(others, table.min(axis=0))] if others else [])
        else:
            v = network.most_neighbours()
            state, rest = _fix(v, network.factors_of(v))
            removed.append((v, (), np.array(state)))
            network.replace(v, rest)
    states = [0] * len(sizes)
    for v, others, best in reversed(removed):
        states[v] = int(best[tuple(states[u] for u in others)])
    return states


class _Network:
    """Which variables are left, and the factors among them."""

    def __init__(self, factors: list[_Factor], num_variables: int) -> None:
        self.left = set(range(num_variables))
        self._touching: list[dict[int, _Factor]] = [{} for _ in range(num_variables)]
        self._num_factors = 0
        for factor in factors:
            self._add(factor)
        self._degree = [len(self.neighbours(v)) for v in range(num_variables)]
        self._queue = [(degree, v) for v, degree in enumerate(self._degree)]
        heapq.heapify(self._queue)

    def factors_of(self, v: int) -> list[_Factor]:
        return list(self._touching[v].values())

    def neighbours(self, v: int) -> tuple[int, ...]:
        found = {u for variables, _ in self._touching[v].values() for u in variables}
        return tuple(sorted(found - {v}))

    def fewest_neighbours(self) -> int:
        while True:
            degree, v = self._queue[0]
            if v in self.left and degree == self._degree[v]:
                return v
            heapq.heappop(self._queue)  # its degree has changed since, or it is gone

    def most_neighbours(self) -> int:
        return max(self.left, key=lambda v: (self._degree[v], -v))

    def replace(self, v: int, factors: list[_Factor]) -> None:
        """Removes a variable and all its factors, and adds others in their place."""
        others = self.neighbours(v)
        for number, (variables, _) in list(self._touching[v].items()):
            for u in variables:
                del self._touching[u][number]
        for factor in factors:
            self._add(factor)
        self.left.remove(v)
        for u in others:
            self._degree[u] = len(self.neighbours(u))
            heapq.heappush(self._queue, (self._degree[u], u))

    def _add(self, factor: _Factor) -> None:
        for v in factor[0]:
            self._touching[v][self._num_factors] = factor
        self._num_factors += 1


def _fix(v: int, factors: list[_Factor]) -> tuple[int, list[_Factor]]:
    """Returns the state that could cost least, and what the factors then say of the others."""
    bound: np.ndarray | float = 0.0
    for variables, table in factors:
        rest = tuple(axis for axis, u in enumerate(variables) if u != v)
        bound = bound + table.min(axis=rest)
    state = int(np.argmin(bound))
    return state, [
        (tuple(u for u in variables if u != v), table.take(state, axis=variables.index(v)))
        for variables, table in factors
        if len(variables) > 1
    ]


def _sum(
    factors: Sequence[_Factor], variables: tuple[int, ...], sizes: list[int]
) -> np.ndarray:
    """Returns the summed table over `variables`, whose first may be out of order."""
    total = np.zeros(tuple(sizes[u] for u in variables))
    for own, table in factors:
        order = [u for u in variables if u in own]
        table = table.transpose([own.index(u) for u in order])
        total += table.reshape([sizes[u] if u in own else 1 for u in variables])
    return total


def _descend(states: list[int], costs: Sequence[np.ndarray], pairs: Pairs) -> list[int]:
    """Improves one variable at a time until none can be."""
    around: list[list[tuple[int, np.ndarray]]] = [[] for _ in costs]
    for (a, b), table in pairs.items():
        around[a].append((b, table.T))
        around[b].append((a, table))
    for _ in range(_SWEEPS):
        before = list(states)
        for v, alone in enumerate(costs):
            total = alone + sum(table[states[u]] for u, table in around[v])
            best = int(np.argmin(total))
            if total[best] < total[states[v]]:
                states[v] = best
        if states == before:
            break
    return states
