"""Placements changed until they fit into memory: starts for searches where it is short."""

import numpy as np

from doppler_jax.baselines.holdings import Holdings
from doppler_jax.graphs.build import topological_order
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import simulate_oracle
from doppler_jax.types import Costs, TaskGraph

MOST_TASKS = 20_000
"""Tasks of all the placements that `fit_some` looks at: a second or two of plain Python."""


def fit_some(graph: TaskGraph, costs: Costs, placements: np.ndarray) -> np.ndarray:
    """Returns what those of the placements `[S, N]` become that exceed a memory, each once.

    It looks at the first ones alone if all together have more than `MOST_TASKS` tasks.
    """
    fitted = []
    for placement in placements[: max(MOST_TASKS // graph.num_tasks, 1)]:
        peak = peak_memory_bytes(graph, costs, simulate_oracle(graph, costs, placement))
        if (peak > costs.capacity_bytes).any():
            fitted.append(fit_into_memory(graph, costs, placement))
    return np.unique(np.reshape(fitted, (-1, graph.num_tasks)), axis=0).astype(np.int64)


def fit_into_memory(graph: TaskGraph, costs: Costs, placement: np.ndarray) -> np.ndarray:
    """Returns a placement `[N]` with tasks moved off devices that cannot hold them.

    Tasks are gone through in a topological order. Once one does not fit on its device, beside
    what the tasks before it have put there (`Holdings`: nothing is freed), it and those of
    the device that follow spill over to another one, and from that to the next: so what
    belongs together stays together. The other device is one that has room for the task, of
    these one that runs it fastest, of these the one with most room; ties go to the smaller.
    A task for which there is no room stays, so the result may exceed a memory; if there
    always is, no execution of it does. The rule is ours.

    Args:
      graph: the task graph.
      costs: its costs, with capacities.
      placement: `[N]` devices.
    """
    holdings = Holdings(graph, costs)
    compute_s = np.asarray(costs.compute_s)
    devices = range(costs.num_devices)
    instead = list(devices)  # of each device, the one that takes its tasks now
    fitted = np.array(placement, np.int64)
    for v in topological_order(graph).tolist():
        meant = int(fitted[v])
        now = instead[meant]
        if not (np.isfinite(compute_s[v, now]) and holdings.fits(v, now)):
            room = [d for d in devices if np.isfinite(compute_s[v, d]) and holdings.fits(v, d)]
            if room:
                taken = holdings.used
                now = min(
                    room, key=lambda d: (compute_s[v, d], taken[d] - holdings.capacity[d])
                )
                instead[meant] = now
            else:
                now = meant
        holdings.put(v, now)
        fitted[v] = now
    return fitted
