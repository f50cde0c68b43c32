"""PEFT: HEFT that looks ahead through a table of optimistic costs."""

import numpy as np

from doppler_jax.baselines.listing import ListSchedule
from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.graphs.levels import mean_transfer_s
from doppler_jax.types import Costs, Schedule, TaskGraph


def peft(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` of PEFT; see `peft_schedule`."""
    return peft_schedule(graph, costs).placement


def peft_schedule(graph: TaskGraph, costs: Costs) -> Schedule:
    """Returns the schedule that PEFT plans; it may idle, and executed it may differ.

    Of the frontier, the task of largest mean optimistic cost comes next; it goes where its
    earliest finish (in the first gap that holds it) plus its optimistic cost is smallest.

    Reference: Arabnejad and Barbosa, "List scheduling algorithm for heterogeneous systems
    by an optimistic cost table", 2014. A task's mean is over the devices that can run it.
    Transfers as in `heft`; ties go to the smaller task id, then to the smaller device.
    """
    plan = ListSchedule(graph, costs)
    table_s = optimistic_costs(graph, costs)
    can_run = np.isfinite(plan.compute_s)
    rank_s = np.where(can_run, table_s, 0.0).sum(axis=1) / np.maximum(can_run.sum(axis=1), 1)
    for v in topological_order(graph, -rank_s).tolist():
        start_s = plan.earliest_start_s(v)
        device = int(np.argmin(start_s + plan.compute_s[v] + table_s[v]))
        plan.put(v, device, float(start_s[device]))
    return plan.schedule()


def optimistic_costs(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns what must still follow each task on each device at best, `[N, D]` seconds.

    With c the mean transfer of the tensor that s reads from t, 0 for q = p:

        OCT(t, p) = max over readers s of min over devices q of OCT(s, q) + w(s, q) + c
    """
    senders, readers = (ends.tolist() for ends in task_edges(graph))
    move_s = mean_transfer_s(costs)[graph.edge_tensor].tolist()
    leaving: list[list[int]] = [[] for _ in range(graph.num_tasks)]
    for edge, u in enumerate(senders):
        leaving[u].append(edge)
    compute_s = np.asarray(costs.compute_s, np.float64)
    table_s = np.zeros(compute_s.shape)
    rest_s = np.zeros(compute_s.shape)  # the task itself and what follows it
    for u in topological_order(graph)[::-1].tolist():
        for edge in leaving[u]:
            there_s = rest_s[readers[edge]]
            # Staying costs no transfer; the best device elsewhere may be this one, at no gain.
            best_s = np.minimum(there_s, there_s.min() + move_s[edge])
            table_s[u] = np.maximum(table_s[u], best_s)
        rest_s[u] = table_s[u] + compute_s[u]
    return table_s
