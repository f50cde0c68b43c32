"""Candidates for measuring, found by a cheap search on the costs believed at present."""

import dataclasses
from collections.abc import Container, Sequence
from itertools import takewhile

import chex
import numpy as np

from doppler_jax.search.anytime import run_search
from doppler_jax.search.budget import Budget, CurveRecorder
from doppler_jax.search.evolution import Evolution
from doppler_jax.search.objective import Objective, make_search_problem
from doppler_jax.types import Costs, Schedule, TaskGraph


def propose(
    graph: TaskGraph,
    costs: Costs,
    traces: Sequence[Schedule],
    starts: np.ndarray,
    known: Container[bytes],
    key: chex.PRNGKey,
    *,
    count: int,
    evaluations: int,
    links: str,
) -> list[np.ndarray]:
    """Returns placements `[N]`, best first, that simulate better than the first start.

    The search is an evolution from all that was measured: its crossover joins what different
    placements have right. While no measured run has moved a tensor, moving is taken to be free:
    the search then proposes placements that do, and their runs tell what it costs.

    Args:
      graph: the task graph.
      costs: as re-fitted to `traces`.
      traces: what was measured so far.
      starts: `[S, N]` placements to start from, the incumbent first; if scoring them all took
        more than an eighth of the evaluations, the last ones are left out.
      known: placements, as int64 bytes, that are not to be proposed.
      key: of the search; it is consumed.
      count: placements to return, at most.
      evaluations: placements to simulate.
      links: how the simulator treats them.
    """
    if not any(len(trace.transfer_tensor) for trace in traces):
        free = np.zeros_like(np.asarray(costs.latency_s, np.float64))
        costs = dataclasses.replace(costs, latency_s=free, seconds_per_byte=free)
    objective = Objective(links=links)
    starts = np.asarray(starts, np.int64)[: max(1, evaluations // 8)]
    found = run_search(
        Evolution(),
        objective,
        make_search_problem(graph, costs, objective, key),
        starts,
        key,
        Budget(evaluations=evaluations),
        CurveRecorder(),
        choose=True,
    )
    better = takewhile(lambda p: not np.array_equal(p, starts[0]), found.placements)
    return [p for p in better if p.tobytes() not in known][:count]
