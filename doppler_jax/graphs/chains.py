"""Chain covers: the graph as few sequences of tasks that must follow each other.

Of a chain at most one task can be waiting to start, so loops over the "first
unstarted task of each chain" do the work of loops over all tasks.
"""

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.types import TaskGraph

MAX_EXACT_TASKS = 2048
"""Above this many tasks the transitive closure costs too much; chains follow edges only."""


def chain_cover(graph: TaskGraph) -> list[list[int]]:
    """Returns chains of tasks, every task in exactly one, earlier tasks first.

    With at most `MAX_EXACT_TASKS` tasks the number of chains is the width of the graph
    (Dilworth): the least possible, found by matching on the transitive closure (Fulkerson
    1956). Larger graphs are covered by paths along edges, which may be more.
    """
    n = graph.num_tasks
    if n == 0:
        return []
    order = topological_order(graph)
    senders, receivers = task_edges(graph)
    if n <= MAX_EXACT_TASKS:
        senders, receivers = np.nonzero(_reachable(n, order, senders, receivers))
    pairs = csr_array((np.ones(len(senders), np.int8), (senders, receivers)), shape=(n, n))
    follower = maximum_bipartite_matching(pairs, perm_type="column")
    has_leader = np.zeros(n, dtype=bool)
    has_leader[follower[follower >= 0]] = True
    chains = []
    for head in order[~has_leader[order]].tolist():
        chain = [head]
        while follower[chain[-1]] >= 0:
            chain.append(int(follower[chain[-1]]))
        chains.append(chain)
    return chains


def _reachable(
    n: int, order: np.ndarray, senders: np.ndarray, receivers: np.ndarray
) -> np.ndarray:
    """Returns `[N, N]` booleans: is there a path from row to column?"""
    successors: list[list[int]] = [[] for _ in range(n)]
    for u, v in zip(senders.tolist(), receivers.tolist(), strict=True):
        successors[u].append(v)
    reach = np.zeros((n, n), dtype=bool)
    for u in order[::-1].tolist():
        for v in successors[u]:
            reach[u] |= reach[v]
            reach[u, v] = True
    return reach
