"""The tables of `experiments.engine`, as Markdown."""

from typing import Any

from doppler_jax.reports.tables import format_seconds, format_table

Record = dict[str, Any]

PAPER_S = {"chainmm": (0.139, 0.1853), "ffnn": (0.0502, 0.0769)}
"""Work-conserving and bulk-synchronous seconds in the DOPPLER paper, on 4 P100."""

BARE = ("bare call, awaited", "bare call, awaited at the end")


def task_table(backend: str, num_tasks: int, record: Record) -> str:
    """Returns seconds per tiny task beside bare calls of its executable."""
    per_task = record["per_task_s"]
    rows = []
    for what, seconds in per_task.items():
        mode = what.removeprefix(f"{backend}, ")
        period = record["overhead_s"].get(mode)
        rows.append(
            (
                what,
                format_seconds(seconds, 3),
                *(f"{seconds / per_task[bare]:.2f}" for bare in BARE),
                "" if period is None else format_seconds(period, 3),
            )
        )
    columns = ("what", "per task", *(f"over {bare}" for bare in BARE), "start to start")
    title = (
        f"{num_tasks:,} independent tiny tasks, backend `{backend}`. Per task: seconds of all "
        "over their number. Start to start: median on one device.\n\n"
    )
    return title + format_table(columns, rows)


def transfer_table(moved: dict[tuple[str, int], Record]) -> str:
    """Returns seconds of a transfer by backend and size, beside `jax.device_put`."""
    rows = []
    for (backend, num_bytes), record in moved.items():
        bare_s, own_s = record["transfer_s"]["bare device_put, awaited"], record["transfer_s"]
        rows.append(
            (
                backend,
                f"{num_bytes:,}",
                format_seconds(bare_s, 3),
                format_seconds(own_s[backend], 3),
                f"{own_s[backend] / bare_s:.2f}",
            )
        )
    columns = ("backend", "bytes", "bare device_put, awaited", "transfer", "ratio")
    title = "One transfer at a time, mode `work_conserving`.\n\n"
    return title + format_table(columns, rows)


def idle_table(
    found: dict[tuple[str, str], Record], num_placements: int, num_devices: int
) -> str:
    """Returns what devices idle with a ready task, by backend and workload."""
    rows = [
        (
            backend,
            workload,
            f"{record['num_tasks']}",
            format_seconds(record["makespan_s"], 3),
            format_seconds(record["gap_median_s"], 3),
            format_seconds(record["gap_p99_s"], 3),
            f"{record['gap_p99_s'] / record['gap_median_s']:.1f}",
            f"{record['task_gap_p99_s'] / record['gap_median_s']:.1f}",
            f"{record['idle_share_mean']:.2%}",
            f"{record['idle_share_max']:.2%}",
            format_seconds(record["bare_gap_median_s"], 3),
            f"{record['bare_gap_p99_s'] / record['bare_gap_median_s']:.1f}",
            f"{_bare_share(record, num_devices):.2%}",
        )
        for (backend, workload), record in found.items()
    ]
    columns = (
        "backend",
        "workload, small",
        "tasks",
        "makespan",
        "gap, median",
        "99th percentile",
        "over median",
        "of tasks' medians, over median",
        "idle, mean",
        "idle, largest",
        "bare loop: gap, median",
        "over median",
        "idle, mean",
    )
    title = (
        f"Idle with a ready task, {num_placements} random placements, mode "
        "`work_conserving`. A gap is the wait before a task; idle is the sum of the gaps over "
        "the devices' time; a task's median is that of its gaps in all runs of a placement. A "
        "bare loop has one device, and no engine; its idle is what the devices would idle with "
        "gaps like its own.\n\n"
    )
    return title + format_table(columns, rows)


def _bare_share(record: Record, num_devices: int) -> float:
    gaps_s = record["bare_gap_mean_s"] * record["num_tasks"]
    return float(gaps_s / (record["makespan_s"] * num_devices))


def halving_table(backend: str, record: Record) -> str:
    """Returns what two devices make of work that can be halved."""
    rows = [
        (what, format_seconds(record[what], 3))
        for what in ("one device", "all devices", "one process", "all processes")
    ]
    rows += [
        ("speed-up of the devices", f"{record['speed_up']:.3f}"),
        ("speed-up of the processes, the ceiling", f"{record['ceiling']:.3f}"),
        ("speed-up over ceiling", f"{record['speed_up'] / record['ceiling']:.3f}"),
    ]
    title = (
        f"Backend `{backend}`; tasks of 10 ms or more are {record['long_share']:.0%} of the "
        f"compute; simulated {format_seconds(record['simulated_s'], 3)}. The processes each "
        "compute matrix products of their own.\n\n"
    )
    return title + format_table(("ffnn", ""), rows)


def sync_table(backend: str, found: dict[str, Record]) -> str:
    """Returns work-conserving against bulk-synchronous execution of one placement."""
    rows = []
    for workload, record in found.items():
        paper = PAPER_S.get(workload)
        low, high = record["quartiles"]
        rows.append(
            (
                workload,
                f"{record['num_tasks']}",
                *(
                    format_seconds(record["measured_s"][mode], 3)
                    for mode in ("work_conserving", "bulk_synchronous")
                ),
                f"{record['measured_ratio']:.3f} ({low:.3f} to {high:.3f})",
                f"{record['simulated_ratio']:.3f}",
                "" if paper is None else f"{paper[1] / paper[0]:.3f}",
            )
        )
    columns = (
        "workload",
        "tasks",
        "work-conserving",
        "bulk-synchronous",
        "ratio (quartiles)",
        "simulated",
        "paper, 4 P100",
    )
    title = (
        f"Bulk-synchronous over work-conserving, the placement of critical path, backend "
        f"`{backend}`.\n\n"
    )
    return title + format_table(columns, rows)


def jit_table(backend: str, found: dict[str, Record]) -> str:
    """Returns the engine against one `jax.jit`, by workload."""
    kinds = list(dict.fromkeys(what for record in found.values() for what in record["seconds"]))
    rows = [
        (
            workload,
            *(
                format_seconds(record["seconds"][kind], 3) if kind in record["seconds"] else ""
                for kind in kinds
            ),
        )
        for workload, record in found.items()
    ]
    title = (
        f"The engine, backend `{backend}`, against one `jax.jit` in a process pinned to the "
        "same cores.\n\n"
    )
    return title + format_table(("workload", *kinds), rows)
