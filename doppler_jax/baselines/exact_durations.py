"""What takes time in the model of `exact`, in seconds and in whole ticks."""

import dataclasses
import math

import numpy as np

from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.padded import input_ready_s
from doppler_jax.types import Costs, TaskGraph

MAX_TICKS = 1 << 26
"""Ticks in the first makespan: fine enough for rounding, few enough for the solver."""


@dataclasses.dataclass(frozen=True)
class Durations:
    """What takes time, in seconds (float64) or in ticks (int64); Q pairs of tasks."""

    compute: np.ndarray  # [N, D]; 0 where the device cannot run the task
    able: np.ndarray  # [N, D] whether the device can run the task
    ready: np.ndarray  # [N, D] when the task's graph inputs are there
    sender: np.ndarray  # [Q] int
    reader: np.ndarray  # [Q] int, each (sender, reader) once
    delay: np.ndarray  # [Q, D, D] from the sender's finish to the arrival of all it sends


def durations_s(graph: TaskGraph, costs: Costs) -> Durations:
    """Returns the durations in seconds; of tensors between two tasks the slowest counts."""
    senders, readers = task_edges(graph)
    moves = np.asarray(costs.tensor_bytes)[graph.edge_tensor, None, None]
    moves = costs.latency_s + moves * costs.seconds_per_byte
    pairs, which = np.unique(np.stack([senders, readers], 1), axis=0, return_inverse=True)
    delay = np.zeros((len(pairs), costs.num_devices, costs.num_devices))
    np.maximum.at(delay, which.reshape(-1), moves)
    able = np.isfinite(costs.compute_s)
    return Durations(
        compute=np.where(able, costs.compute_s, 0.0),
        able=able,
        ready=input_ready_s(graph, costs),
        sender=pairs[:, 0],
        reader=pairs[:, 1],
        delay=delay,
    )


def tick_of(durations: Durations, horizon_s: float) -> float:
    """Returns the seconds of a tick: an exact divisor of all durations if it is not too small.

    Otherwise a power of two, between 1/2 and 1 of which `MAX_TICKS` fill the horizon.
    """
    parts = (durations.compute, durations.ready, durations.delay)
    values = np.unique(np.concatenate([part.ravel() for part in parts]))
    ratios = [value.as_integer_ratio() for value in values.tolist() if value > 0]
    if not ratios:
        return 1.0
    denominator = max(below for _, below in ratios)  # powers of two all
    divisor = math.gcd(*(above * (denominator // below) for above, below in ratios))
    if horizon_s * denominator <= MAX_TICKS * divisor:
        return divisor / denominator
    return 2.0 ** math.ceil(math.log2(horizon_s / MAX_TICKS))


def in_ticks(durations: Durations, tick_s: float) -> Durations:
    """Returns the durations rounded down to whole ticks."""
    parts = {
        name: np.floor(getattr(durations, name) / tick_s).astype(np.int64)
        for name in ("compute", "ready", "delay")
    }
    return dataclasses.replace(durations, **parts)


def replay(durations: Durations, placement: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns the earliest starts `[N]` if every device keeps to `order` `[N]`.

    `order` lists the producers of a task before it.
    """
    tasks = np.arange(len(order))
    start = durations.ready[tasks, placement]
    finish = np.zeros_like(start)
    free = np.zeros(durations.compute.shape[1], start.dtype)
    incoming: list[list[int]] = [[] for _ in tasks]
    for q, v in enumerate(durations.reader.tolist()):
        incoming[v].append(q)
    for v in order.tolist():
        here = placement[v]
        start[v] = max(start[v], free[here])
        for q in incoming[v]:
            u = durations.sender[q]
            start[v] = max(start[v], finish[u] + durations.delay[q, placement[u], here])
        finish[v] = free[here] = start[v] + durations.compute[v, here]
    return start


def own(durations: Durations, placement: np.ndarray) -> np.ndarray:
    """Returns how long each task `[N]` takes where it is placed."""
    return durations.compute[np.arange(len(placement)), placement]
