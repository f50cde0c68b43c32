"""m-ETF: ETF that passes by devices whose memory is full."""

import numpy as np

from doppler_jax.baselines.earliest import schedule_earliest
from doppler_jax.simulator.memory import check_capacity
from doppler_jax.types import Costs, Schedule, TaskGraph


def m_etf(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` of m-ETF; see `m_etf_schedule`."""
    return m_etf_schedule(graph, costs).placement


def m_etf_schedule(graph: TaskGraph, costs: Costs) -> Schedule:
    """Returns the schedule that m-ETF plans; executed by `fifo` queues it may differ.

    A device may take a task if what it holds (`Holdings`: outputs, received copies and
    graph inputs of all tasks placed there, nothing freed) and what the task adds fit into
    its capacity. So a placement that is returned never exceeds it in any execution.

    Reference: Jeon et al., "Baechi: fast device placement of machine learning graphs",
    2020. Theirs lets a memory hold a task's outputs until its readers have run; ours is
    stricter, because the executed order may differ from the planned one. Ties go to the
    smaller task id, then to the smaller device (theirs: topological order). Transfers as
    in `heft`; their variant with one transfer at a time per device is left out.

    Raises:
      ValueError: a task fits on no device that can run it. As in the paper nothing is
        undone; a placement that fits may exist.
    """
    check_capacity(graph, costs)
    return schedule_earliest(graph, costs, np.arange(graph.num_tasks), limited=True)
