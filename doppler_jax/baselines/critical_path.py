"""Critical-path list scheduling, the teacher of stage 1, as a deterministic baseline.

The task of largest b-level in the frontier goes to the device where it can start
earliest, after the tasks already there. Ties go to the smaller task and device id; the
teacher (`policies.rollout.teach`) breaks them at random.
"""

import numpy as np

from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.graphs.levels import b_level
from doppler_jax.graphs.padded import input_ready_s
from doppler_jax.types import Costs, TaskGraph


def critical_path(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` of critical-path list scheduling.

    Reference: Kohler 1975 for the b-level rule; earliest start as in DOPPLER's teacher.
    """
    n, d = graph.num_tasks, costs.num_devices
    senders, receivers = task_edges(graph)
    incoming: list[list[int]] = [[] for _ in range(n)]
    for edge, v in enumerate(receivers.tolist()):
        incoming[v].append(edge)
    arrival_s = input_ready_s(graph, costs)
    placement, free_s, finish_s = np.zeros(n, np.int64), np.zeros(d), np.zeros(n)
    for v in topological_order(graph, -b_level(graph, costs)).tolist():
        for edge in incoming[v]:
            source = placement[senders[edge]]
            num_bytes = costs.tensor_bytes[graph.edge_tensor[edge]]
            move_s = costs.latency_s[source] + num_bytes * costs.seconds_per_byte[source]
            arrival_s[v] = np.maximum(arrival_s[v], finish_s[senders[edge]] + move_s)
        est_s = np.maximum(free_s, arrival_s[v])
        est_s[np.isinf(costs.compute_s[v])] = np.inf
        placement[v] = here = int(np.argmin(est_s))
        free_s[here] = finish_s[v] = est_s[here] + costs.compute_s[v, here]
    return placement
