"""What executions show of kernels and transfers, and costs brought into line with that."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from doppler_jax.costs.digests import kernel_digests
from doppler_jax.costs.handling import ends_s, task_handling_s
from doppler_jax.types import Costs, Schedule, ShardedProgram, TaskGraph

Refit = Callable[[Sequence[Schedule]], Costs]
"""Gives the costs that executions of some program show."""

_FEWEST_AMOUNTS = 4
"""Different numbers of a device's transfers from which on they tell what handling one takes."""

_LEAST_S = 1e-9
"""Shorter times are not told from 0."""

_ROUNDS = 20  # of least squares, until its weights have settled


@dataclasses.dataclass
class Observations:
    """Seconds, as often as they were seen.

    A task's are from the moment it could begin (its device idle, its inputs there) to its
    finish, a transfer's from its request to its arrival: what delays either belongs to it, but
    for what devices are known to spend on transfers themselves.
    """

    tasks: dict[tuple[str, int], list[float]]  # by kernel's digest and device
    overheads: dict[int, list[float]]  # by device, from when a task could begin to its start
    transfers: dict[tuple[int, int, int], list[float]]  # by source, destination and bytes


def observe(
    sharded: ShardedProgram, traces: Iterable[Schedule], costs: Costs | None = None
) -> Observations:
    """Returns what work-conserving executions of a program show.

    Transfers that met another one on their link are left out: how long they waited is the
    simulator's business.

    Args:
      sharded: the program.
      traces: of its executions.
      costs: whose `handling_s` is taken off, of each time half at most; None takes off nothing.
    """
    digests = kernel_digests(sharded.kernels)
    names = [digests[kernel] for kernel in sharded.kernels]
    seen = Observations(defaultdict(list), defaultdict(list), defaultdict(list))
    for trace in traces:
        delay_s = delays_s(sharded, trace)
        places = np.asarray(trace.placement).tolist()
        spent_s = trace.finish_s - trace.start_s + delay_s
        if costs is not None:
            handling_s = task_handling_s(sharded.graph, costs, np.asarray(trace.placement))
            spent_s = np.maximum(spent_s - handling_s, spent_s / 2)
        for v, device in enumerate(places):
            seen.tasks[names[v], device].append(float(spent_s[v]))
            seen.overheads[device].append(float(delay_s[v]))
        _add_transfers(sharded, trace, costs, seen)
    return seen


def delays_s(sharded: ShardedProgram, trace: Schedule) -> np.ndarray:
    """Returns the seconds `[N]` from when each task could begin to when it began."""
    return trace.start_s - np.maximum(_free_s(trace), ready_s(sharded.graph, trace))


def _free_s(trace: Schedule) -> np.ndarray:
    """Returns when the device of each task `[N]` was done with the one before; 0 at first."""
    free_s = np.zeros(len(trace.placement))
    for device in np.unique(trace.placement):
        tasks = np.flatnonzero(trace.placement == device)
        tasks = tasks[np.argsort(trace.start_s[tasks], kind="stable")]
        free_s[tasks[1:]] = trace.finish_s[tasks[:-1]]
    return free_s


def ready_s(graph: TaskGraph, trace: Schedule) -> np.ndarray:
    """Returns when the last input of each task `[N]` was on its device."""
    arrival_s = {
        (int(x), int(d)): float(t)
        for x, d, t in zip(
            trace.transfer_tensor,
            trace.transfer_destination,
            trace.transfer_finish_s,
            strict=True,
        )
    }
    reads = [
        *zip(graph.edge_tensor.tolist(), graph.edge_reader.tolist(), strict=True),
        *zip((~graph.input_edge_input).tolist(), graph.input_edge_reader.tolist(), strict=True),
    ]
    made_s, ready = _made_s(graph, trace), np.zeros(graph.num_tasks)
    for x, v in reads:
        ready[v] = max(ready[v], arrival_s.get((x, int(trace.placement[v])), made_s[x]))
    return ready


def _made_s(graph: TaskGraph, trace: Schedule) -> np.ndarray:
    """Returns when each tensor was made, then 0 for each graph input, `[T + I]`."""
    return np.concatenate([trace.finish_s[graph.tensor_producer], np.zeros(graph.num_inputs)])


def _add_transfers(
    sharded: ShardedProgram, trace: Schedule, costs: Costs | None, seen: Observations
) -> None:
    graph, tensor = sharded.graph, np.asarray(trace.transfer_tensor, np.int64)
    sizes = np.concatenate([graph.tensor_bytes, graph.input_bytes[::-1]])
    num_bytes = sizes[tensor]  # ~i counts from the end
    requested_s, arrived_s = _made_s(graph, trace)[tensor], np.asarray(trace.transfer_finish_s)
    source, destination = trace.transfer_source, trace.transfer_destination
    for pair in set(zip(source.tolist(), destination.tolist(), strict=True)):
        on_link = np.flatnonzero((source == pair[0]) & (destination == pair[1]))
        begin, end = requested_s[on_link], arrived_s[on_link]
        met = (begin[:, None] < end[None, :]) & (end[:, None] > begin[None, :])
        for k in on_link[met.sum(1) == 1]:  # itself alone
            seconds = float(arrived_s[k] - requested_s[k])
            if costs is not None:
                ends = ends_s(costs, *pair, num_bytes[k])
                seconds = max(seconds - ends, seconds / 2)
            seen.transfers[*pair, int(num_bytes[k])].append(seconds)


def fit_line(num_bytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Returns (latency in s, seconds per byte), both >= 0, that fit best.

    Minimises the sum of absolute relative errors, so that small and large transfers count
    alike and a few odd ones little, by least squares reweighted some rounds.

    Args:
      num_bytes: `[K]` sizes, K >= 1.
      seconds: `[K]`, positive.
    """
    from scipy.optimize import nnls

    rows = np.stack([1.0 / seconds, num_bytes / seconds], axis=1)
    scale = np.maximum(rows.max(axis=0), np.finfo(np.float64).tiny)  # bytes are millions
    weights = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        found, _ = nnls(rows / scale * weights[:, None], weights)
        # Least squares of these weights is least absolute error once they settle.
        weights = np.maximum(np.abs(rows / scale @ found - 1.0), 1e-6) ** -0.5
    latency_s, seconds_per_byte = (found / scale).tolist()
    return latency_s, seconds_per_byte


def refit_costs(sharded: ShardedProgram, costs: Costs, traces: Sequence[Schedule]) -> Costs:
    """Returns the costs of a program with what its executions show in place of them.

    A task takes the median of its kernel on that device, a link is fitted to the medians of
    its transfers by size. What was never seen changes in the proportion in which the rest did:
    tasks as others on their device (or all, if it ran none), links as other links. What devices
    spend on transfers, if it is believed to be something, follows from how much longer tasks
    were delayed where there were more of them; executions too few or too alike leave it.

    Args:
      sharded: the program, N tasks.
      costs: what was believed before.
      traces: work-conserving executions of any placements, with its segments if they were
        fused; without one nothing changes.

    Raises:
      ValueError: a trace is of another number of tasks or devices.
    """
    if not traces:
        return costs
    n, d = np.shape(costs.compute_s)
    for trace in traces:
        places = np.asarray(trace.placement)
        if places.shape != (n,) or places.max(initial=0) >= d:
            raise ValueError(
                f"a trace places {len(places)} tasks on devices up to {places.max(initial=0)}; "
                f"expected {n} tasks on {d} devices"
            )
    costs = _refit_handling(sharded, costs, traces)
    seen = observe(sharded, traces, costs)
    latency_s, seconds_per_byte = _refit_links(costs, seen)
    return dataclasses.replace(
        costs,
        compute_s=_refit_tasks(sharded, costs, seen),
        latency_s=latency_s,
        seconds_per_byte=seconds_per_byte,
    )


def shows_handling(traces: Sequence[Schedule], device: int) -> bool:
    """Returns whether executions tell what a device spends on a transfer.

    They do if it had enough different numbers of them.
    """
    return len({len(_handled(trace, device)) for trace in traces}) >= _FEWEST_AMOUNTS


def _handled(trace: Schedule, device: int) -> np.ndarray:
    """Returns the tensor of each transfer that a device sent or received."""
    tensor = np.asarray(trace.transfer_tensor)
    ends = (trace.transfer_source == device) | (trace.transfer_destination == device)
    return tensor[ends & (tensor >= 0)]


def _refit_handling(sharded: ShardedProgram, costs: Costs, traces: Sequence[Schedule]) -> Costs:
    """Returns the costs with `handling_s` as it shows between the tasks of each device."""
    from scipy.optimize import nnls

    if costs.handling_s is None or costs.handling_s_per_byte is None:
        return costs
    handling = np.array([costs.handling_s, costs.handling_s_per_byte], np.float64)
    for d in range(costs.num_devices):
        if not shows_handling(traces, d):
            continue
        rows, delay_s = [], []
        for trace in traces:
            here = np.asarray(trace.placement) == d
            moved = _handled(trace, d)
            rows.append([here.sum(), len(moved), sharded.graph.tensor_bytes[moved].sum()])
            delay_s.append(delays_s(sharded, trace)[here].sum())
        amounts = np.array(rows, np.float64)
        scale = np.maximum(amounts.max(axis=0), 1.0)
        found, _ = nnls(amounts / scale, np.maximum(delay_s, 0.0))
        handling[:, d] = (found / scale)[1:]
    return dataclasses.replace(costs, handling_s=handling[0], handling_s_per_byte=handling[1])


def _refit_tasks(sharded: ShardedProgram, costs: Costs, seen: Observations) -> np.ndarray:
    """Returns the seconds `[N, D]` of every task."""
    before = np.asarray(costs.compute_s, np.float64)
    medians = {key: max(float(np.median(y)), _LEAST_S) for key, y in seen.tasks.items()}
    digests = kernel_digests(sharded.kernels)
    found = np.array(
        [
            [medians.get((digests[kernel], d), np.nan) for d in range(costs.num_devices)]
            for kernel in sharded.kernels
        ]
    ).reshape(before.shape)
    is_seen = ~np.isnan(found) & np.isfinite(before)
    ratio = np.where(is_seen, found, 1.0) / np.maximum(before, _LEAST_S)
    common = float(np.median(ratio[is_seen])) if is_seen.any() else 1.0
    scale = [
        float(np.median(ratio[is_seen[:, d], d])) if is_seen[:, d].any() else common
        for d in range(costs.num_devices)
    ]
    return np.where(is_seen, found, before * np.array(scale))


def _refit_links(costs: Costs, seen: Observations) -> tuple[np.ndarray, np.ndarray]:
    """Returns latency and seconds per byte `[D, D]`."""
    latency_s = np.array(costs.latency_s, np.float64)
    per_byte = np.array(costs.seconds_per_byte, np.float64)
    points: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for (s, d, num_bytes), seconds in seen.transfers.items():
        points[s, d].append((num_bytes, max(float(np.median(seconds)), _LEAST_S)))
    ratios = []
    for (s, d), found in points.items():
        sizes, found_s = np.transpose(found)
        believed_s = latency_s[s, d] + sizes * per_byte[s, d]
        ratio = float(np.median(found_s / np.maximum(believed_s, _LEAST_S)))
        ratios.append(ratio)
        if len(found) > 1 or not believed_s.any():
            latency_s[s, d], per_byte[s, d] = fit_line(sizes, found_s)
        else:  # one size does not tell the two apart: they keep their proportion
            latency_s[s, d] *= ratio
            per_byte[s, d] *= ratio
    if ratios:
        is_unseen = ~np.eye(costs.num_devices, dtype=bool)
        is_unseen[tuple(np.transpose(list(points)))] = False
        latency_s[is_unseen] *= np.median(ratios)
        per_byte[is_unseen] *= np.median(ratios)
    return latency_s, per_byte
