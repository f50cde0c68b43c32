"""Candidates for measuring, found by a cheap search on the costs believed at present."""

import dataclasses
from collections.abc import Container, Sequence
from itertools import takewhile

import chex
import numpy as np

from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.costs.observed import shows_handling
from doppler_jax.objective import Objective
from doppler_jax.search.anytime import run_search
from doppler_jax.search.evolution import Evolution
from doppler_jax.search.objective import make_search_problem
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
    placements have right. What no measured run tells of moving tensors is taken to be free: the
    search then proposes placements that move some, and their runs tell what it costs.

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
    costs = _with_unknowns_free(costs, traces)
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


def _with_unknowns_free(costs: Costs, traces: Sequence[Schedule]) -> Costs:
    """Returns the costs without what runs that move more would tell.

    That is the links' while nothing was moved, and what a device spends on transfers itself
    while its numbers of them were too much alike.
    """
    if not any(len(trace.transfer_tensor) for trace in traces):
        free = np.zeros_like(np.asarray(costs.latency_s, np.float64))
        costs = dataclasses.replace(costs, latency_s=free, seconds_per_byte=free)
    if costs.handling_s is None or costs.handling_s_per_byte is None:
        return costs
    known = np.array([shows_handling(traces, d) for d in range(costs.num_devices)])
    return dataclasses.replace(
        costs,
        handling_s=np.where(known, costs.handling_s, 0.0),
        handling_s_per_byte=np.where(known, costs.handling_s_per_byte, 0.0),
    )
