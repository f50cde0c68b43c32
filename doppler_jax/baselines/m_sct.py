"""m-SCT: m-ETF in which a device waits for the favourite child of what it has just run."""

import numpy as np

from doppler_jax.baselines.etf import schedule_earliest
from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.levels import b_level, mean_compute_s, mean_transfer_s, t_level
from doppler_jax.simulator.memory import check_capacity
from doppler_jax.types import Costs, Schedule, TaskGraph

THRESHOLD = 0.5 - 1e-6
"""A child is the favourite if x is below; two cannot be, their sum being 1 or more."""

HIDING_WEIGHT = 1e-3
"""Weight of the transfers' share that is not hidden, beside the relaxed makespan."""

LARGEST_PROGRAM = 16384
"""Variables (tasks and pairs) up to which the linear program is solved: a few seconds."""


def m_sct(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` of m-SCT; see `m_sct_schedule`."""
    return m_sct_schedule(graph, costs).placement


def m_sct_schedule(graph: TaskGraph, costs: Costs) -> Schedule:
    """Returns the schedule that m-SCT plans; executed by `fifo` queues it may differ.

    Memory, ties and errors as in `m_etf_schedule`; favourites by `favourite_children`;
    the rules of awake devices and urgent tasks are `schedule_earliest`'s. They follow the
    released code: urgent tasks go before the favourite child where both can start.

    Reference: Jeon et al., "Baechi: fast device placement of machine learning graphs",
    2020; after Hanen and Munier, "An approximation algorithm for scheduling dependent
    tasks on m processors with small communication delays", 1995.

    Raises:
      ValueError: a task fits on no device that can run it.
    """
    check_capacity(graph, costs)
    return schedule_earliest(
        graph,
        costs,
        np.arange(graph.num_tasks),
        favourite=favourite_children(graph, costs),
        limited=True,
    )


def favourite_children(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the favourite child `[N]` of each task, -1 without one.

    No task is the favourite of two.

    The linear program of Hanen and Munier, with mean task costs p and mean transfers c
    (the largest, of several tensors from i to j):

        minimise w
        s_i + p_i + c_ij x_ij <= s_j,  s_i + p_i <= w,  0 <= x_ij <= 1, 0 <= s_i,
        sum over j of x_ij >= (children of i) - 1,  sum over i of x_ij >= (parents of j) - 1

    j is i's favourite where x_ij < 1/2 and c_ij > 0. Off the critical path the program
    leaves x open and the answer to the solver's moods, so we add to w, measured in the
    largest p or c, `HIDING_WEIGHT * sum(c x) / sum(c)`: of nearly best solutions the one
    that hides most transfer. Above `LARGEST_PROGRAM` variables a greedy rule takes its place.
    """
    parent, child, move_s = _task_pairs(graph, costs)
    if graph.num_tasks + parent.size > LARGEST_PROGRAM:
        chosen = _greedy(graph, costs, parent, child, move_s)
    else:
        chosen = _relaxed(parent, child, move_s, mean_compute_s(costs)) < THRESHOLD
        chosen &= move_s > 0
    favourite = np.full(graph.num_tasks, -1)
    favourite[parent[chosen]] = child[chosen]
    return favourite


def _task_pairs(graph: TaskGraph, costs: Costs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns parent, child and transfer seconds `[P]` of the pairs that share a tensor."""
    senders, readers = task_edges(graph)
    pairs, pair = np.unique(senders * graph.num_tasks + readers, return_inverse=True)
    move_s = np.zeros(pairs.size)
    np.maximum.at(move_s, pair, mean_transfer_s(costs)[graph.edge_tensor])
    parent, child = np.divmod(pairs, max(graph.num_tasks, 1))
    return parent, child, move_s


def _relaxed(
    parent: np.ndarray, child: np.ndarray, move_s: np.ndarray, compute_s: np.ndarray
) -> np.ndarray:
    """Returns x `[P]` of the linear program; its variables are x, s and w."""
    from scipy import sparse
    from scipy.optimize import linprog

    p, n = parent.size, compute_s.size
    total_s = float(move_s.sum())
    if total_s == 0.0:
        return np.ones(p)
    pair, start, end = np.arange(p), p + np.arange(n), p + n
    # The solver's tolerances are absolute.
    unit_s = max(float(compute_s.max()), float(move_s.max()))
    rows = [  # (rows, columns, coefficients, upper bounds)
        (
            np.tile(pair, 3),
            np.concatenate([pair, start[parent], start[child]]),
            np.concatenate([move_s / unit_s, np.ones(p), -np.ones(p)]),
            -compute_s[parent] / unit_s,
        ),
        (parent, pair, -np.ones(p), 1.0 - np.bincount(parent, minlength=n)),
        (child, pair, -np.ones(p), 1.0 - np.bincount(child, minlength=n)),
        (
            np.tile(np.arange(n), 2),
            np.concatenate([start, np.full(n, end)]),
            np.repeat([1.0, -1.0], n),
            -compute_s / unit_s,
        ),
    ]
    objective = np.concatenate([HIDING_WEIGHT * move_s / total_s, np.zeros(n), [1.0]])
    solved = linprog(
        objective,
        A_ub=sparse.vstack(
            [
                sparse.csr_array((values, (row, column)), shape=(bound.size, end + 1))
                for row, column, values, bound in rows
            ]
        ),
        b_ub=np.concatenate([bound for *_, bound in rows]),
        bounds=[(0.0, 1.0)] * p + [(0.0, None)] * (n + 1),
        method="highs-ipm",
    )
    if not solved.success:
        raise RuntimeError(f"m_sct: the linear program was not solved: {solved.message}")
    return solved.x[:p]


def _greedy(
    graph: TaskGraph, costs: Costs, parent: np.ndarray, child: np.ndarray, move_s: np.ndarray
) -> np.ndarray:
    """Returns which pairs `[P]` are favourites: those on the longest paths first."""
    length_s = t_level(graph, costs)[parent] + mean_compute_s(costs)[parent]
    length_s += move_s + b_level(graph, costs)[child]
    chosen = np.zeros(parent.size, bool)
    has_child, has_parent = np.zeros((2, graph.num_tasks), bool)
    for pair in np.argsort(-length_s, kind="stable").tolist():
        u, v = parent[pair], child[pair]
        if move_s[pair] > 0 and not has_child[u] and not has_parent[v]:
            chosen[pair] = has_child[u] = has_parent[v] = True
    return chosen
