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
import itertools
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
    states = [0] * len(costs)
    for v, others, best in reversed(_eliminate(factors, [c.size for c in costs], limit)):
        states[v] = int(best[tuple(states[u] for u in others)])
    return _descend(states, costs, pairs)


def _eliminate(
    factors: list[_Factor], sizes: list[int], limit: int
) -> list[tuple[int, tuple[int, ...], np.ndarray]]:
    """Removes variable by variable, fewest neighbours first.

    Returns:
      Each variable removed, others that its state depends on, and its best state by theirs.
    """
    touching: list[dict[int, _Factor]] = [{} for _ in sizes]  # of each variable, by number
    numbers = itertools.count()

    def add(factor: _Factor) -> None:
        number = next(numbers)
        for u in factor[0]:
            touching[u][number] = factor

    def neighbours(v: int) -> tuple[int, ...]:
        found = {u for variables, _ in touching[v].values() for u in variables}
        return tuple(sorted(found - {v}))

    for factor in factors:
        add(factor)
    left = {v: len(neighbours(v)) for v in range(len(sizes))}  # variables, their neighbours
    queue = [(degree, v) for v, degree in left.items()]
    heapq.heapify(queue)
    removed: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    while left:
        degree, v = queue[0]
        if left.get(v) != degree:
            heapq.heappop(queue)  # that has changed since, or it is gone
            continue
        others = neighbours(v)
        if math.prod(sizes[u] for u in (v, *others)) <= limit:
            table = _sum(list(touching[v].values()), (v, *others), sizes)
            removed.append((v, others, table.argmin(axis=0)))
            rest = [(others, table.min(axis=0))] if others else []
        else:
            v = max(left, key=lambda u: (left[u], -u))
            others = neighbours(v)
            state, rest = _fix(v, list(touching[v].values()))
            removed.append((v, (), np.array(state)))
        for number, (variables, _) in list(touching[v].items()):
            for u in variables:
                del touching[u][number]
        for factor in rest:
            add(factor)
        del left[v]
        for u in others:
            left[u] = len(neighbours(u))
            heapq.heappush(queue, (left[u], u))
    return removed


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
