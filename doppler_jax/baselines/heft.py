"""HEFT: the task of largest upward rank goes where it finishes earliest, gaps included."""

import numpy as np

from doppler_jax.baselines.listing import ListSchedule
from doppler_jax.graphs.build import topological_order
from doppler_jax.graphs.levels import b_level
from doppler_jax.types import Costs, Schedule, TaskGraph


def heft(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` of HEFT; see `heft_schedule`."""
    return heft_schedule(graph, costs).placement


def heft_schedule(graph: TaskGraph, costs: Costs) -> Schedule:
    """Returns the schedule that HEFT plans; it may idle, and executed it may differ.

    Tasks come in the order of upward rank (the b-level); each goes to the device where it
    finishes earliest, in the first gap that holds it.

    Reference: Topcuoglu, Hariri and Wu, "Performance-effective and low-complexity task
    scheduling for heterogeneous computing", 2002. Theirs has a transfer per edge; here a
    tensor travels once per destination, means leave out devices that cannot run the task,
    and a graph input with a home arrives after its transfer. They break ties of rank at
    random; here they go to the smaller task id, of equal finishes to the smaller device.
    """
    plan = ListSchedule(graph, costs)
    for v in topological_order(graph, -b_level(graph, costs)).tolist():
        start_s = plan.earliest_start_s(v)
        device = int(np.argmin(start_s + plan.compute_s[v]))
        plan.put(v, device, float(start_s[device]))
    return plan.schedule()
