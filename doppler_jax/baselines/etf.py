"""ETF: of all ready tasks and devices, the pair of earliest start."""

import dataclasses

import numpy as np

from doppler_jax.baselines.earliest import schedule_earliest
from doppler_jax.graphs.levels import b_level
from doppler_jax.types import Costs, Schedule, TaskGraph


def etf(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns the placement `[N]` of ETF; see `etf_schedule`."""
    return etf_schedule(graph, costs).placement


def etf_schedule(graph: TaskGraph, costs: Costs) -> Schedule:
    """Returns the schedule that ETF plans; executed by `fifo` queues it may differ.

    Of equal starts the task of larger static level (the b-level without transfers) is
    taken, then the smaller task id, then the smaller device.

    Reference: Hwang, Chow, Anger and Lee, "Scheduling precedence graphs in systems with
    interprocessor communication times", 1989, for equal devices. On unequal ones we keep
    to the letter: a slow device that is free sooner is preferred. Transfers as in `heft`.
    """
    zeros = np.zeros_like(costs.latency_s)
    free = dataclasses.replace(costs, latency_s=zeros, seconds_per_byte=zeros)
    order = np.argsort(-b_level(graph, free), kind="stable")
    return schedule_earliest(graph, costs, order)
