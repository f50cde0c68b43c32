"""Seconds that no plan's makespan can be below, without noise: how good can any plan be?

They hold for every queue, every kind of links, and with handling and memory limits, which only
make a makespan longer. Four arguments are joined:

- *Paths*, device by device. A task starts on a device when each of its producers has ended
  there, or ended elsewhere and sent what it made. Producers that stay run one after the other:
  so of the producers whose results would arrive last, sorted by that, either some are sent for,
  or all before them run on the same device. Backwards likewise.
- *Work* that must lie between two times: of tasks with late heads and long tails, and, of a
  task that may lie partly outside, the part that cannot (Fernandez and Bussell 1973). All
  ancestors of a task end before it starts.
- *Load* of unequal devices. Weights of devices that add up to 1 make the busiest device's time
  at least their mean, and each task's part of that at least its least weighted time: the dual
  of the linear program that splits tasks among devices. The weights are improved by steps, and
  any of them give a bound.
- *Ticks*. Where all durations are multiples of one number, every makespan is.

The first, and the ancestors, are left out in graphs of more than `MOST_TASKS` tasks, and the
second looks at few times in large ones, so that the cost stays small.
"""

import dataclasses

import numpy as np

from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.graphs.levels import check_sizes, longest_paths
from doppler_jax.graphs.padded import input_ready_s
from doppler_jax.types import Costs, TaskGraph

MOST_TASKS = 500
"""Of graphs whose paths are followed device by device."""

MOST_KEPT = 12
"""Producers of a task that are thought of as staying together on its device."""

LOOKS = 100_000
"""Tasks that are looked at in all intervals together."""

WEIGHINGS = 2_000_000
"""Times that are weighed in search of the devices' weights."""

ROUNDING = 1e-12
"""Relative, by which sums in another order may differ."""


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


def common_divisor(values: np.ndarray) -> float:
    """Returns the largest number of which all values `[K]` >= 0 are multiples.

    0 where there is none that sums of them in float64 keep to, inf where all are 0.
    """
    values = values[values > 0]
    if not values.size:
        return np.inf
    shift = 52 - int(np.frexp(values.max())[1])
    whole = np.ldexp(values, shift)
    if (whole != np.floor(whole)).any():
        return 0.0
    return float(np.ldexp(float(np.gcd.reduce(whole.astype(np.int64))), -shift))


def lower_bound_s(graph: TaskGraph, costs: Costs) -> float:
    """Returns seconds that no plan's makespan can be below, without noise; see the module.

    Example:
      >>> graph, costs = dj.from_edge_delays([2.0, 1.0], [(0, 1, 1.0)], num_devices=2)
      >>> dj.lower_bound_s(graph, costs)
      3.0

    Raises:
      ValueError: the costs are of another graph.
    """
    check_sizes(graph, costs)
    if graph.num_tasks == 0:
        return 0.0
    compute_s = np.asarray(costs.compute_s, dtype=np.float64)
    least_s, no_delay = compute_s.min(1), np.zeros(graph.num_edges)
    weighted_s = weighted_load(compute_s)
    head_s, _ = longest_paths(graph, no_delay, least_s)
    bound_s = max(float((head_s + least_s).max()), float(least_s.sum() / costs.num_devices))
    is_small = graph.num_tasks <= MOST_TASKS
    if is_small:
        head, tail = around(durations_s(graph, costs), topological_order(graph))
        path_s = float((head + compute_s + tail).min(1).max())
        bound_s = max(bound_s, path_s * (1 - ROUNDING))
        head_s, tail_s = head.min(1), tail.min(1)
    else:
        tail_s, _ = longest_paths(graph, no_delay, least_s, backwards=True)
    work_s = _interval_bound(head_s, least_s, tail_s, weighted_s, costs.num_devices)
    bound_s = max(bound_s, work_s * (1 - ROUNDING))
    if is_small and costs.handling_s is None:
        tick_s = common_divisor(_all_durations(graph, costs))
        if 0 < bound_s < 2.0**40 * tick_s:
            ticks = np.ceil(bound_s / tick_s * (1 - 10 * ROUNDING))
            bound_s = max(bound_s, float(ticks) * tick_s)
    return bound_s


def around(durations: Durations, topological: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the least time `[N, D]` before a task on a device starts, and after it ends.

    It is in the unit of the durations, and inf where the device cannot run the task.
    """
    back = dataclasses.replace(
        durations,
        sender=durations.reader,
        reader=durations.sender,
        delay=durations.delay.transpose(0, 2, 1),
        ready=np.zeros_like(durations.ready),
    )
    compute = np.where(durations.able, durations.compute, np.inf)
    weighted = weighted_load(compute)
    head = _earliest_starts(durations, compute, weighted, topological)
    return head, _earliest_starts(back, compute, weighted, topological[::-1])


def _all_durations(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns every duration that a makespan may be a sum of `[K]`."""
    compute_s = np.asarray(costs.compute_s, np.float64)
    moved = np.concatenate([costs.tensor_bytes, costs.input_bytes[~graph.is_resident]])
    moves_s = costs.latency_s + np.unique(moved)[:, None, None] * costs.seconds_per_byte
    return np.concatenate([compute_s[np.isfinite(compute_s)], moves_s.ravel()])


def weighted_load(compute_s: np.ndarray) -> np.ndarray:
    """Returns the weighted seconds `[N]` of the tasks, which add up to a bound."""
    n, devices = compute_s.shape
    if (compute_s == compute_s[:, :1]).all():
        return compute_s[:, 0] / devices
    able_s = np.where(np.isfinite(compute_s), compute_s, 0.0)
    tasks, weight = np.arange(n), 1.0 / np.maximum(able_s.sum(0), np.finfo(float).tiny)
    best_s = compute_s.min(1) / devices
    for step in range(int(np.clip(WEIGHINGS / compute_s.size, 4, 200))):
        weight = np.maximum(weight / weight.max(), 1e-12)
        weighted_s = weight / weight.sum() * compute_s
        where, least_s = weighted_s.argmin(1), weighted_s.min(1)
        if least_s.sum() > best_s.sum():
            best_s = least_s
        load_s = np.bincount(where, able_s[tasks, where], devices)
        longest_s = max(load_s.max(), np.finfo(float).tiny)
        weight = weight * np.exp(0.5 / (1 + step) * load_s / longest_s)
    return best_s


def _earliest_starts(
    durations: Durations, compute_s: np.ndarray, weighted_s: np.ndarray, order: np.ndarray
) -> np.ndarray:
    """Returns seconds `[N, D]` before which no plan starts a task on a device.

    `order` `[N]` are the tasks, producers first; what the devices cannot run takes inf.
    """
    n, devices = compute_s.shape
    start_s = durations.ready.astype(np.float64)
    head_s = np.zeros(n)
    before = np.zeros((n, n), bool)
    by_reader = np.argsort(durations.reader, kind="stable")
    sender = durations.sender[by_reader]
    delay = durations.delay[by_reader] + np.where(np.eye(devices), np.inf, 0.0)
    first = np.searchsorted(durations.reader[by_reader], np.arange(n + 1))
    for v in order.tolist():
        there = slice(first[v], first[v + 1])
        producers = sender[there]
        if producers.size:
            own, took = start_s[producers], compute_s[producers]
            sent_s = (own[:, :, None] + took[:, :, None] + delay[there]).min(1)
            start_s[v] = np.maximum(start_s[v], _arrivals(own, took, sent_s))
            before[v] = before[producers].any(0)
            before[v, producers] = True
            all_before = np.flatnonzero(before[v])
            late = all_before[np.argsort(-head_s[all_before])]
            done_s = (head_s[late] + weighted_s[late].cumsum()).max()
            start_s[v] = np.maximum(start_s[v], done_s)
        start_s[v, ~durations.able[v]] = np.inf
        head_s[v] = start_s[v].min()
    return start_s


def _arrivals(start_s: np.ndarray, took_s: np.ndarray, sent_s: np.ndarray) -> np.ndarray:
    """Returns when, at the earliest, all results of M producers are on each device `[D]`.

    Args:
      start_s: `[M, D]` earliest starts of the producers.
      took_s: `[M, D]` their seconds.
      sent_s: `[M, D]` when their results are there if they run elsewhere.
    """
    if len(sent_s) == 1:
        return np.minimum(sent_s, start_s + took_s)[0]
    by_arrival = np.argsort(-sent_s, axis=0)[:MOST_KEPT]
    own_s, took_s, sent_s = (
        np.take_along_axis(a, by_arrival, 0) for a in (start_s, took_s, sent_s)
    )
    # [i, k]: the first k + 1 that stay, one after the other, from the start of the i-th on.
    behind = np.where(own_s >= own_s[:, None], took_s, 0.0).cumsum(1)
    stays = np.tri(len(own_s), dtype=bool).T[:, :, None]
    kept_s = np.where(stays, own_s[:, None] + behind, 0.0).max(0)
    kept_s[:-1] = np.maximum(kept_s[:-1], sent_s[1:])  # the last: as many again may stay
    return np.minimum(sent_s[0], kept_s.min(0))


def _interval_bound(
    head_s: np.ndarray,
    least_s: np.ndarray,
    tail_s: np.ndarray,
    weighted_s: np.ndarray,
    devices: int,
) -> float:
    """Returns the bound of the work in intervals; all arguments are seconds `[N]`."""
    end_s = float((head_s + least_s + tail_s).max())
    bound_s = end_s
    times = np.unique(np.concatenate([head_s, head_s + least_s]))
    count = int(np.clip(LOOKS // len(head_s), 2, len(times)))
    by_tail = np.argsort(-tail_s)
    for begin_s in times[np.linspace(0, len(times) - 1, count).astype(int)].tolist():
        inside = by_tail[head_s[by_tail] >= begin_s]
        if inside.size:
            done_s = begin_s + weighted_s[inside].cumsum() + tail_s[inside]
            bound_s = max(bound_s, float(done_s.max()))
        # What of a task lies behind `begin_s`, even if it starts at its head.
        part_s = np.clip(head_s + least_s - begin_s, 0.0, least_s)
        late = np.flatnonzero(part_s)
        if not late.size:
            continue
        part_s, from_s = part_s[late], np.maximum(end_s - tail_s - least_s, begin_s)[late]
        at_s = np.concatenate([from_s, from_s + part_s])
        order = np.argsort(at_s)
        busy = np.repeat([1, -1], late.size)[order].cumsum()
        at_s = at_s[order]
        work_s = (busy[:-1] * np.diff(at_s)).cumsum()
        bound_s = max(bound_s, float((end_s + work_s / devices - (at_s[1:] - begin_s)).max()))
    return bound_s
