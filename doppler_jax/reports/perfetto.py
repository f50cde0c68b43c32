"""Chrome trace JSON of a schedule, for https://ui.perfetto.dev or chrome://tracing."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from doppler_jax.files import PathLike, write_json_atomic
from doppler_jax.types import Schedule

Row = tuple[int, int, int]
"""Device, source of the link (-1 for its own tasks), lane: links may carry several at once."""


def write_chrome_trace(
    path: PathLike,
    schedule: Schedule,
    names: Sequence[str],
    *,
    device_names: Sequence[str] | None = None,
    inferred_starts: bool = False,
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

    Raises:
      ValueError: there is not one name per task, a device has none, a time is not finite,
        or the path cannot be written.
    """
    placement = np.asarray(schedule.placement)
    if len(names) != placement.size:
        raise ValueError(f"names has {len(names)} entries, expected {placement.size}")
    times = (
        schedule.start_s,
        schedule.finish_s,
        schedule.transfer_start_s,
        schedule.transfer_finish_s,
    )
    if not np.isfinite(np.concatenate(times)).all():
        raise ValueError("the schedule has a time that is not finite")
    used = np.concatenate([placement, schedule.transfer_source, schedule.transfer_destination])
    num_devices = int(used.max(initial=-1)) + 1
    if device_names is None:
        device_names = [str(d) for d in range(num_devices)]
    if len(device_names) < num_devices:
        raise ValueError(f"device_names has {len(device_names)} of {num_devices} devices")
    mark = {"start": "inferred"} if inferred_starts else {}
    slices = [
        ((int(d), -1, 0), name, start, finish, {"task": v, **mark})
        for v, (name, d, start, finish) in enumerate(
            zip(names, placement, schedule.start_s, schedule.finish_s, strict=True)
        )
    ]
    slices += [
        (
            (int(schedule.transfer_destination[k]), int(schedule.transfer_source[k]), lane),
            f"tensor {schedule.transfer_tensor[k]}",
            schedule.transfer_start_s[k],
            schedule.transfer_finish_s[k],
            {"tensor": int(schedule.transfer_tensor[k]), **mark},
        )
        for k, lane in enumerate(_lanes(schedule))
    ]
    own = {(d, -1, 0) for d in range(len(device_names))}
    rows = {row: tid for tid, row in enumerate(sorted(own | {s[0] for s in slices}))}
    events = [_complete_event(rows[row], row, *rest) for row, *rest in slices]
    events.sort(key=lambda event: (event["ts"], event["tid"]))
    data = {
        "traceEvents": _name_rows(rows, device_names) + events,
        "displayTimeUnit": "ms",
        "otherData": {"starts": "inferred" if inferred_starts else "measured"},
    }
    write_json_atomic(path, data)


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


def _complete_event(
    tid: int, row: Row, name: str, start_s: float, finish_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    # Whole nanoseconds, which is what Perfetto keeps: neighbours stay neighbours.
    start_ns, finish_ns = round(float(start_s) * 1e9), round(float(finish_s) * 1e9)
    return {
        "name": name,
        "cat": "task" if row[1] < 0 else "transfer",
        "ph": "X",
        "ts": start_ns / 1e3,
        "dur": (finish_ns - start_ns) / 1e3,
        "pid": row[0],
        "tid": tid,
        "args": args,
    }


def _name_rows(rows: dict[Row, int], device_names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the metadata that names, and orders, the devices and their rows."""
    events: list[dict[str, Any]] = []

    def add(kind: str, pid: int, tid: int, value: str | int) -> None:
        key = "sort_index" if kind.endswith("sort_index") else "name"
        events.append({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {key: value}})

    for (device, source, _), tid in rows.items():
        if source < 0:
            add("process_name", device, tid, f"device {device_names[device]}")
            add("process_sort_index", device, tid, device)
        add("thread_name", device, tid, _row_name(source, device_names))
        add("thread_sort_index", device, tid, tid)
    return events


def _row_name(source: int, device_names: Sequence[str]) -> str:
    return "compute" if source < 0 else f"from {device_names[source]}"
