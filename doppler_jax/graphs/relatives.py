"""Which tasks belong together: those between which much travels, directly or by a few steps."""

from typing import TYPE_CHECKING

import numpy as np

from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.levels import mean_transfer_s
from doppler_jax.types import Costs, TaskGraph

if TYPE_CHECKING:
    from scipy.sparse import csr_array

NUM_RELATIVES = 32
"""Tasks that a task is related to, at most."""

HOPS, DAMPING = 4, 0.9
"""Steps over which bonds reach, and what each step leaves of them."""


def nearest_relatives(graph: TaskGraph, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tasks `[N, NUM_RELATIVES]` each is bound to most, -1: none, and how much.

    The bond of u and v is the sum over walks between them, whichever way edges point, of the
    product of its edges' weights and of `DAMPING` for each; an edge's weight is its mean
    transfer time over the geometric mean of what its two ends exchange with all others
    (Katz 1953, on a normalised graph). Kept are the largest after every step, and those of a
    task add up to 1. Of equal ones the smaller ids are kept.
    """
    from scipy.sparse import csr_array, diags_array, eye_array

    n = graph.num_tasks
    task, weight = np.full((n, NUM_RELATIVES), -1), np.zeros((n, NUM_RELATIVES))
    exchange = _exchange(graph, costs)
    one = csr_array(eye_array(n))
    bonds = one
    for _ in range(HOPS):
        bonds = _largest(csr_array(one + DAMPING * (exchange @ bonds)), NUM_RELATIVES + 1)
    bonds = _largest(csr_array(bonds - diags_array(bonds.diagonal())), NUM_RELATIVES)
    row = np.repeat(np.arange(n), np.diff(bonds.indptr))
    column = np.arange(len(row)) - bonds.indptr[row]
    task[row, column], weight[row, column] = bonds.indices, bonds.data
    total = weight.sum(1, keepdims=True)
    return task, weight / np.where(total > 0, total, 1.0)


def _exchange(graph: TaskGraph, costs: Costs) -> "csr_array":
    """Returns the symmetric weights `[N, N]` of the edges."""
    from scipy.sparse import csr_array, diags_array

    n = graph.num_tasks
    senders, receivers = task_edges(graph)
    transfer_s = mean_transfer_s(costs)
    # What is small beside all else is still a bond.
    least_s = 1e-3 * transfer_s.mean() if len(transfer_s) else 0.0
    seconds = transfer_s[graph.edge_tensor] + least_s
    one_way = csr_array((seconds, (senders, receivers)), shape=(n, n))
    both = csr_array(one_way + one_way.T)
    total_s = both.sum(axis=1)
    scaling = diags_array(1 / np.sqrt(np.where(total_s > 0, total_s, 1.0)))
    return csr_array(scaling @ both @ scaling)


def _largest(bonds: "csr_array", count: int) -> "csr_array":
    """Returns the matrix with the largest positive entries of every row alone, sorted."""
    from scipy.sparse import csr_array

    bonds.sum_duplicates()
    row = np.repeat(np.arange(bonds.shape[0]), np.diff(bonds.indptr))
    # Rounded, so that the order of sums does not decide between equal ones.
    order = np.lexsort((bonds.indices, -np.round(bonds.data, 9), row))
    place = np.arange(len(row)) - bonds.indptr[row]
    kept = order[(place < count) & (bonds.data[order] > 1e-9)]
    degree = np.bincount(row[kept], minlength=bonds.shape[0])
    indptr = np.concatenate([[0], np.cumsum(degree)])
    return csr_array((bonds.data[kept], bonds.indices[kept], indptr), shape=bonds.shape)
