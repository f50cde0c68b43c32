"""Chain covers: the graph as few sequences of tasks that must follow each other.

Of a chain at most one task can be waiting to start, so loops over "the waiting task of each
chain" do the work of loops over all tasks.
"""

import numpy as np

from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.types import TaskGraph

MAX_JOINED_TASKS = 32768
"""Above this many tasks their ancestors (N^2 / 8 bytes) cost too much: paths stay apart."""


def chain_cover(graph: TaskGraph) -> list[list[int]]:
    """Returns chains of tasks, every task in exactly one, earlier tasks first.

    The graph is covered by as few paths along edges as can be (matching; Fulkerson 1956), and
    paths are joined greedily: in topological order of their heads, each goes on the chain
    whose last task is its head's latest ancestor. The least number of chains is the width
    of the graph (Dilworth), which a matching on the transitive closure finds; that has up to
    N^2 edges, so it is not taken.
    """
    n = graph.num_tasks
    if n == 0:
        return []
    order = topological_order(graph)
    senders, receivers = task_edges(graph)
    paths = _paths(order, senders, receivers)
    if n > MAX_JOINED_TASKS:
        return paths
    ancestors = _ancestors(order, senders, receivers)
    position = np.empty(n, np.int64)
    position[order] = np.arange(n)
    chains: list[list[int]] = []
    tails = np.zeros(len(paths), np.int64)  # the last task of each chain begun
    for path in paths:
        begun = tails[: len(chains)]
        is_ancestor = (ancestors[path[0]][begun >> 3] >> (begun & 7).astype(np.uint8)) & 1
        candidates = np.flatnonzero(is_ancestor)
        if candidates.size:
            chain = int(candidates[position[begun[candidates]].argmax()])
            chains[chain] += path
        else:
            chain = len(chains)
            chains.append(path)
        tails[chain] = path[-1]
    return chains


def _paths(order: np.ndarray, senders: np.ndarray, receivers: np.ndarray) -> list[list[int]]:
    """Returns as few paths along edges as cover all tasks, in topological order of heads."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    n = len(order)
    edges = csr_array((np.ones(len(senders), np.int8), (senders, receivers)), shape=(n, n))
    follower = maximum_bipartite_matching(edges, perm_type="column")
    has_leader = np.zeros(n, dtype=bool)
    has_leader[follower[follower >= 0]] = True
    paths = []
    for head in order[~has_leader[order]].tolist():
        path = [head]
        while follower[path[-1]] >= 0:
            path.append(int(follower[path[-1]]))
        paths.append(path)
    return paths


def _ancestors(order: np.ndarray, senders: np.ndarray, receivers: np.ndarray) -> np.ndarray:
    """Returns the ancestors of every task as rows of bits, `[N, N / 8]` uint8."""
    n = len(order)
    predecessors: list[list[int]] = [[] for _ in range(n)]
    for u, v in zip(senders.tolist(), receivers.tolist(), strict=True):
        predecessors[v].append(u)
    rows = np.zeros((n, -(-n // 8)), np.uint8)
    for v in order.tolist():
        for u in predecessors[v]:
            rows[v] |= rows[u]
            rows[v, u >> 3] |= np.uint8(1 << (u & 7))
    return rows
