"""One clock for all devices: offsets between machines, and the record of a call."""

import time
from collections.abc import Sequence

import numpy as np

from .plan import Plan
from .ray_call import ask_all
from .ray_processes import RayDevice, this_host
from .ray_shipping import DeviceResult
from .trace import Record, make_handling

_NUM_TRIPS = 8


def clock_offsets_s(devices: Sequence[RayDevice]) -> list[float]:
    """Returns how far each device's clock `[D]` is ahead of this process's.

    Processes of one machine share its monotonic clock. Another machine's is read in the
    middle of the shortest of some round trips.
    """
    here = this_host()
    return [0.0 if device.host == here else _offset_s(device) for device in devices]


def _offset_s(device: RayDevice) -> float:
    trips = []
    for _ in range(_NUM_TRIPS):
        sent_s = time.perf_counter()
        (there_s,) = ask_all([device], "now_s", [()])
        back_s = time.perf_counter()
        trips.append((back_s - sent_s, there_s - (sent_s + back_s) / 2))
    return min(trips)[1]


def make_record(
    plan: Plan, results: Sequence[DeviceResult], offsets_s: Sequence[float]
) -> Record:
    """Returns what the devices `[D]` did on one clock, from its first start.

    Offsets that were measured are inexact. Where they would let a tensor arrive before it
    was sent, the receiver's clock is moved on: whatever the clocks say, that did not happen.
    """
    record, num_tasks = Record(plan), len(plan.placement)
    start_s, finish_s = np.array(record.start_s), np.array(record.finish_s)
    for result in results:
        for v, *times_s in result.tasks:
            start_s[v], finish_s[v] = times_s
        for k, *times_s in result.received:
            start_s[num_tasks + k], finish_s[num_tasks + k] = times_s
    starts_on = np.array([*plan.placement, *(t.source for t in plan.transfers)], np.int64)
    ends_on = np.array([*plan.placement, *(t.destination for t in plan.transfers)], np.int64)
    offsets = _causal(start_s, finish_s, starts_on, ends_on, np.array(offsets_s))
    start_s, finish_s = start_s - offsets[starts_on], finish_s - offsets[ends_on]
    origin_s = start_s.min(initial=np.inf)
    record.start_s, record.finish_s = (
        (start_s - origin_s).tolist(),
        (finish_s - origin_s).tolist(),
    )
    since_s = offsets + origin_s
    record.handling = make_handling(
        (d, a - since_s[d], b - since_s[d])
        for d, result in enumerate(results)
        for a, b in result.handled
    )
    return record


def _causal(
    start_s: np.ndarray,
    finish_s: np.ndarray,
    starts_on: np.ndarray,
    ends_on: np.ndarray,
    offsets_s: np.ndarray,
) -> np.ndarray:
    """Returns the offsets `[D]`, lessened until no event ends before it starts."""
    offsets = offsets_s.copy()
    for _ in offsets:  # to lessen one may ask for another, each at most once
        gaps = (start_s - offsets[starts_on]) - (finish_s - offsets[ends_on])
        late = np.zeros_like(offsets)
        np.maximum.at(late, ends_on, gaps)
        offsets -= late
    return offsets
