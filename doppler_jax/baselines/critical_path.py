"""Critical-path list scheduling, the teacher of stage 1, as a deterministic baseline.

The task of largest b-level in the frontier goes to the device where it can start
earliest, after the tasks already there. Ties go to the smaller task and device id; the
teacher (`policies.rollout.teach`) breaks them at random.
"""

import numpy as np

from doppler_jax.baselines.listing import ListSchedule
from doppler_jax.graphs.build import topological_order
from doppler_jax.graphs.levels import b_level
from doppler_jax.types import Costs, Schedule, TaskGraph


def critical_path(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` of `critical_path_schedule`."""
    return critical_path_schedule(graph, costs).placement


def critical_path_schedule(graph: TaskGraph, costs: Costs) -> Schedule:
    """Returns the schedule that critical-path list scheduling plans.

    Reference: Kohler 1975 for the b-level rule; earliest start as in DOPPLER's teacher.
    """
    plan = ListSchedule(graph, costs)
    free_s = np.zeros(costs.num_devices)
    for v in topological_order(graph, -b_level(graph, costs)).tolist():
        start_s = np.maximum(free_s, plan.arrival_s(v))
        start_s[np.isinf(plan.compute_s[v])] = np.inf
        here = int(np.argmin(start_s))
        plan.put(v, here, float(start_s[here]))
        free_s[here] = plan.finish_s[v]
    return plan.schedule()
