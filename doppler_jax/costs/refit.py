"""Costs of any origin, brought into line with measured executions."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import nnls

from doppler_jax.costs.digests import kernel_digests
from doppler_jax.costs.linear_fit import fit_line
from doppler_jax.costs.observed import Observations, delays_s, observe
from doppler_jax.types import Costs, Schedule, ShardedProgram

Refit = Callable[[Sequence[Schedule]], Costs]
"""Gives the costs that executions of some program show."""

_FEWEST_AMOUNTS = 4
"""Different numbers of a device's transfers from which on they tell what handling one takes."""

_LEAST_S = 1e-9
"""Shorter times are not told from 0."""


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
      traces: work-conserving executions of any placements; without one nothing changes.
    """
    if not traces:
        return costs
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
