"""Chain covers: the graph as few sequences of tasks that must follow each other.

Of a chain at most one task can be waiting to start, so loops over "the waiting task of each
chain" do the work of loops over all tasks.
"""

import numpy as np

from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.types import TaskGraph

MAX_CLOSURE_TASKS = 32768
"""Above this many tasks the ancestors of all (N^2 / 8 bytes) cost too much; see below."""


def chain_cover(graph: TaskGraph) -> list[list[int]]:
    """Returns chains of tasks, every task in exactly one, earlier tasks first.

    A chain's tasks are ancestors of each other, neighbours or not. Greedy: in topological
    order, a task goes on the chain whose last task is its latest ancestor, or begins one.
    The least number of chains is the width of the graph (Dilworth), at the cost of a
    matching on the transitive closure, which takes minutes where this takes milliseconds; on
    the published graphs both give the same. Above `MAX_CLOSURE_TASKS` only direct
    predecessors count as ancestors, and chains are more.
    """
    n = graph.num_tasks
    senders, receivers = task_edges(graph)
    predecessors: list[list[int]] = [[] for _ in range(n)]
    for u, v in zip(senders.tolist(), receivers.tolist(), strict=True):
        predecessors[v].append(u)
    order = topological_order(graph).tolist()
    position = np.empty(n, np.int64)
    position[order] = np.arange(n)
    ancestors = _Ancestors(n, predecessors)
    chains: list[list[int]] = []
    tails = np.zeros(n, np.int64)  # the last task of each chain, of those begun
    for v in order:
        begun = tails[: len(chains)]
        candidates = np.flatnonzero(ancestors.find(v, begun))
        if candidates.size:
            chain = int(candidates[position[begun[candidates]].argmax()])
            chains[chain].append(v)
        else:
            chain = len(chains)
            chains.append([v])
        tails[chain] = v
    return chains


class _Ancestors:
    """The ancestors of tasks that are asked for in topological order, as rows of bits."""

    def __init__(self, num_tasks: int, predecessors: list[list[int]]) -> None:
        self.predecessors = predecessors
        self.rows = None
        if num_tasks <= MAX_CLOSURE_TASKS:
            self.rows = np.zeros((num_tasks, -(-num_tasks // 8)), np.uint8)

    def find(self, v: int, tasks: np.ndarray) -> np.ndarray:
        """Returns which of `tasks` are ancestors of v."""
        if self.rows is None:
            return np.isin(tasks, self.predecessors[v])
        row = self.rows[v]
        for u in self.predecessors[v]:
            row |= self.rows[u]
            row[u >> 3] |= np.uint8(1 << (u & 7))
        return (row[tasks >> 3] >> (tasks & 7).astype(np.uint8)) & 1 == 1
