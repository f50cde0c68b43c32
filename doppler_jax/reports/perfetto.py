"""Chrome trace JSON of a schedule, for https://ui.perfetto.dev or chrome://tracing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from doppler_jax.files import PathLike, write_json_atomic
from doppler_jax.types import Plan, Schedule

Row = tuple[int, int, int]
"""Device, source of the link (-1 for its own tasks), lane: links may carry several at once."""


def write_chrome_trace(
    path: PathLike,
    schedule: Schedule,
    names: Sequence[str],
    *,
    device_names: Sequence[str] | None = None,
    inferred_starts: bool = False,
    handling: Sequence[tuple[int, float, float]] = (),
    chores: Sequence[tuple[str, int, float, float]] = (),
    plan: Plan | None = None,
) -> None:
    """Writes a schedule as Chrome trace events, times in microseconds.

    Each device is a process, with a row of tasks and a row for each link that leads to it
    (more where one carries several tensors at once). The file is replaced whole or left alone.

    Args:
      path: JSON file to write.
      schedule: N tasks and their transfers.
      names: `[N]` of the tasks.
      device_names: `[D]`; numbers if not given.
      inferred_starts: marks every event as one whose start was not measured.
      handling: device, start and finish of what devices themselves spent on transfers, drawn
        among their tasks.
      chores: name, device (-1: the caller), start and finish of what the call did besides,
        drawn among the tasks of the device. Where they begin before 0, that is when the
        events begin to count.
      plan: what was executed, if its queue and ranks are to be written, too.

    Raises:
      ValueError: there is not one name, or rank, per task, a device has none, a time is not
        finite, or the path cannot be written.
    """
    placement = np.asarray(schedule.placement)
    if len(names) != placement.size:
        raise ValueError(f"names has {len(names)} entries, expected {placement.size}")
    ranks = None if plan is None or plan.queue == "fifo" else plan.priority
    if ranks is not None and len(ranks) != placement.size:
        raise ValueError(f"the plan has {len(ranks)} ranks, expected {placement.size}")
    times = (
        schedule.start_s,
        schedule.finish_s,
        schedule.transfer_start_s,
        schedule.transfer_finish_s,
    )
    besides = [*handling, *chores]
    handled = [time_s for *_, start_s, finish_s in besides for time_s in (start_s, finish_s)]
    if not np.isfinite(np.concatenate([*times, handled])).all():
        raise ValueError("the schedule has a time that is not finite")
    used = np.concatenate([placement, schedule.transfer_source, schedule.transfer_destination])
    num_devices = int(used.max(initial=-1)) + 1
    if device_names is None:
        device_names = [str(d) for d in range(num_devices)]
    if len(device_names) < num_devices:
        raise ValueError(f"device_names has {len(device_names)} of {num_devices} devices")
    mark = {"start": "inferred"} if inferred_starts else {}
    about = {} if plan is None else {"queue": plan.queue}
    slices = _slices(schedule, names, mark, ranks) + [
        _Slice((d, -1, 0), "handling", "transfers", start_s, finish_s, {})
        for d, start_s, finish_s in handling
    ]
    caller = len(device_names)
    slices += [
        _Slice((d if d >= 0 else caller, -1, 0), "chore", name, start_s, finish_s, {})
        for name, d, start_s, finish_s in chores
    ]
    own = {(d, -1, 0) for d in range(len(device_names))}
    rows = {row: tid for tid, row in enumerate(sorted(own | {s.row for s in slices}))}
    zero_s = min([0.0, *(start_s for _, _, start_s, _ in chores)])
    events = [_complete_event(rows[s.row], s, zero_s) for s in slices]
    events.sort(key=lambda event: (event["ts"], event["tid"]))
    data = {
        "traceEvents": _name_rows(rows, device_names) + events,
        "displayTimeUnit": "ms",
        "otherData": {"starts": "inferred" if inferred_starts else "measured", **about},
    }
    write_json_atomic(path, data)


class _Slice(NamedTuple):
    row: Row
    category: str
    name: str
    start_s: float
    finish_s: float
    args: dict[str, Any]


def _slices(
    schedule: Schedule,
    names: Sequence[str],
    mark: dict[str, Any],
    ranks: Sequence[float] | np.ndarray | None,
) -> list[_Slice]:
    """Returns the tasks and transfers."""
    slices = []
    for v, name in enumerate(names):
        d = int(schedule.placement[v])
        times = (schedule.start_s[v], schedule.finish_s[v])
        rank = {} if ranks is None else {"rank": float(ranks[v])}
        slices.append(_Slice((d, -1, 0), "task", name, *times, {"task": v, **rank, **mark}))
    for k, lane in enumerate(_lanes(schedule)):
        x, d = int(schedule.transfer_tensor[k]), int(schedule.transfer_destination[k])
        name = f"tensor {x}" if x >= 0 else f"graph input {~x}"
        times = (schedule.transfer_start_s[k], schedule.transfer_finish_s[k])
        row = (d, int(schedule.transfer_source[k]), lane)
        slices.append(_Slice(row, "transfer", name, *times, {"tensor": x, **mark}))
    return slices


def _lanes(schedule: Schedule) -> list[int]:
    """Returns for each transfer the first lane of its link that is free when it starts."""
    lanes = [0] * len(schedule.transfer_tensor)
    busy_until: dict[tuple[int, int], list[float]] = {}
    for k in np.lexsort((schedule.transfer_finish_s, schedule.transfer_start_s)):
        link = (int(schedule.transfer_source[k]), int(schedule.transfer_destination[k]))
        ends = busy_until.setdefault(link, [])
        start = schedule.transfer_start_s[k]
        lanes[k] = next((i for i, end in enumerate(ends) if end <= start), len(ends))
        ends[lanes[k] :] = [schedule.transfer_finish_s[k], *ends[lanes[k] + 1 :]]
    return lanes


def _complete_event(tid: int, what: _Slice, zero_s: float) -> dict[str, Any]:
    # Whole nanoseconds, which is what Perfetto keeps: neighbours stay neighbours.
    start_ns, finish_ns = (
        round(float(time_s - zero_s) * 1e9) for time_s in (what.start_s, what.finish_s)
    )
    return {
        "name": what.name,
        "cat": what.category,
        "ph": "X",
        "ts": start_ns / 1e3,
        "dur": (finish_ns - start_ns) / 1e3,
        "pid": what.row[0],
        "tid": tid,
        "args": what.args,
    }


def _name_rows(rows: dict[Row, int], device_names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the metadata that names, and orders, the processes and their rows."""
    events: list[dict[str, Any]] = []

    def add(kind: str, pid: int, tid: int, value: str | int) -> None:
        key = "sort_index" if kind.endswith("sort_index") else "name"
        events.append({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {key: value}})

    for (pid, source, _), tid in rows.items():
        if source < 0:
            is_device = pid < len(device_names)
            add(
                "process_name",
                pid,
                tid,
                f"device {device_names[pid]}" if is_device else "caller",
            )
            add("process_sort_index", pid, tid, pid)
        name = f"from {device_names[source]}" if source >= 0 else "compute"
        add("thread_name", pid, tid, name)
        add("thread_sort_index", pid, tid, tid)
    return events
