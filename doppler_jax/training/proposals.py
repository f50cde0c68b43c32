"""Candidates for measuring, found by a cheap search on the costs believed at present."""

import dataclasses
from collections.abc import Container, Sequence

import chex
import numpy as np

from doppler_jax.search.annealing import Annealing
from doppler_jax.search.anytime import run_search
from doppler_jax.search.budget import Budget, CurveRecorder
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
    """Returns placements `[N]`, best first, that simulate well and were not measured yet.

    While no measured run has moved a tensor, moving is taken to be free: the search then
    proposes placements that do, and their runs tell what it costs.

    Args:
      graph: the task graph.
      costs: as re-fitted to `traces`.
      traces: what was measured so far.
      starts: `[S, N]` placements to start from.
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
    found = run_search(
        Annealing(chains=count, hot=0.02),
        objective,
        make_search_problem(graph, costs, objective, key),
        np.asarray(starts, np.int64),
        key,
        Budget(evaluations=evaluations),
        CurveRecorder(),
        choose=True,
    )
    return [p for p in found.placements if p.tobytes() not in known][:count]
