"""CPOP: the tasks of one critical path share a device, the others finish earliest."""

import numpy as np

from doppler_jax.baselines.listing import ListSchedule
from doppler_jax.graphs.build import topological_order
from doppler_jax.graphs.levels import b_level, b_path, t_level
from doppler_jax.types import Costs, Schedule, TaskGraph


def cpop(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` of CPOP; see `cpop_schedule`."""
    return cpop_schedule(graph, costs).placement


def cpop_schedule(graph: TaskGraph, costs: Costs) -> Schedule:
    """Returns the schedule that CPOP plans; it may idle, and executed it may differ.

    Of the frontier, the task of largest b-level + t-level comes next. Tasks of the
    critical path go to the device that runs them all fastest, each other task to the one
    where it finishes earliest; both in the first gap that holds them.

    Reference: Topcuoglu, Hariri and Wu, "Performance-effective and low-complexity task
    scheduling for heterogeneous computing", 2002. We find the critical path by following
    longest tails from the entry of largest b-level, not by comparing sums of floats. If no
    device runs the whole path, we take the one that runs most of its tasks, then the
    fastest; the rest of the path is placed as other tasks are. Transfers and means as in
    `heft`; ties go to the smaller task id, then to the smaller device.
    """
    plan = ListSchedule(graph, costs)
    levels_s = b_level(graph, costs)
    path = _critical_path(levels_s, b_path(graph, costs))
    path_device = _path_device(plan.compute_s[path])
    is_critical = np.zeros(graph.num_tasks, bool)
    is_critical[path] = True
    for v in topological_order(graph, -(levels_s + t_level(graph, costs))).tolist():
        start_s = plan.earliest_start_s(v)
        if is_critical[v] and np.isfinite(start_s[path_device]):
            device = path_device
        else:
            device = int(np.argmin(start_s + plan.compute_s[v]))
        plan.put(v, device, float(start_s[device]))
    return plan.schedule()


def _critical_path(levels_s: np.ndarray, following: np.ndarray) -> list[int]:
    """Returns the tasks of a longest path; no task has a larger b-level than its first."""
    if levels_s.size == 0:
        return []
    path = [int(np.argmax(levels_s))]
    while following[path[-1]] >= 0:
        path.append(int(following[path[-1]]))
    return path


def _path_device(compute_s: np.ndarray) -> int:
    """Returns the device that runs most of the tasks `[P, D]`, among those the fastest."""
    can_run = np.isfinite(compute_s)
    total_s = np.where(can_run, compute_s, 0.0).sum(axis=0)
    return int(np.lexsort((total_s, -can_run.sum(axis=0)))[0])
