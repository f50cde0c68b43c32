"""Pictures of schedules: which device ran what, when."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from doppler_jax.files import PathLike
from doppler_jax.reports.pictures import OTHER, PALETTE, add_legend, write_png
from doppler_jax.reports.tables import format_seconds, time_unit
from doppler_jax.simulator.oracle import makespan_s
from doppler_jax.types import Schedule

if TYPE_CHECKING:  # an import of matplotlib costs too much for those who draw nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRANSFER = "#333333"

_LETTERS = 170
"""Of a task's name, that fit beside each other along the axis."""


def plot_gantt(
    path: PathLike,
    panels: Sequence[tuple[str, Schedule, Sequence[str]]],
    *,
    num_devices: int,
) -> None:
    """Writes a PNG of schedules, one below the other on one time axis.

    Each panel is a title, a schedule and the names `[N]` of its tasks. Every device is a row,
    labelled with its utilisation (busy time over makespan); bars are coloured by `op_type` of
    the task's name, which is written into those that have room for it; thin lines are
    transfers, from the row that sends to the row that receives; a dashed line marks the
    makespan. The file appears only when complete.

    Raises:
      ValueError: there is no panel, or a panel's lengths differ, a task is placed outside
        `num_devices`, or a time is negative, not finite or a finish before its start.
    """
    write_png(path, draw_gantt(panels, num_devices))


def op_type(name: str) -> str:
    """Returns the operation in a task's name: `exp` for `attn.exp_3[0,1]` or `exp 3`."""
    return re.sub(r"([_ ]\d+)+$", "", name.split("[")[0].rpartition(".")[2])


def _check_panel(
    title: str, schedule: Schedule, names: Sequence[str], num_devices: int
) -> None:
    device = np.asarray(schedule.placement, np.int64)
    start_s, finish_s = np.asarray(schedule.start_s), np.asarray(schedule.finish_s)
    lengths = len(names), len(device), len(start_s), len(finish_s)
    if len(set(lengths)) != 1:
        raise ValueError(
            f"panel {title!r}: {lengths[0]} names, {lengths[1]} placements, {lengths[2]} "
            f"starts and {lengths[3]} finishes; expected as many of each"
        )
    for v in np.flatnonzero((device < 0) | (device >= num_devices))[:1]:
        raise ValueError(
            f"panel {title!r}: task {v} is on device {device[v]}, of {num_devices} devices"
        )
    legal = (start_s >= 0) & (finish_s >= start_s) & (finish_s < np.inf)
    for v in np.flatnonzero(~legal)[:1]:
        raise ValueError(
            f"panel {title!r}: task {v} runs from {start_s[v]} to {finish_s[v]} s; "
            "expected 0 <= start <= finish < inf"
        )


def draw_gantt(
    panels: Sequence[tuple[str, Schedule, Sequence[str]]], num_devices: int
) -> "Figure":
    """Returns the figure that `plot_gantt` writes."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if not panels:
        raise ValueError("no schedule to draw: panels is empty")
    for panel in panels:
        _check_panel(*panel, num_devices)
    colours = op_colours([op_type(name) for *_, names in panels for name in names])
    longest_s = max(makespan_s(schedule) for _, schedule, _ in panels)
    scale, unit = time_unit(longest_s)
    height = 0.9 + len(panels) * (0.55 + 0.36 * num_devices)
    figure = Figure(figsize=(11, height), dpi=150, layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for ax, (title, schedule, names) in zip(axes, panels, strict=True):
        label = f"{title}: makespan {format_seconds(makespan_s(schedule))}"
        ax.set_title(label, loc="left", fontsize=11)
        _draw_schedule(ax, schedule, names, num_devices, scale, colours)
        _write_names(ax, schedule, names, scale, longest_s)
    axes[-1].set_xlim(0, 1.01 * longest_s / scale or 1)
    axes[-1].set_xlabel(f"time ({unit})")
    legend = {op: colour for op, colour in colours.items() if colour != OTHER}
    if len(legend) < len(colours):
        legend["other"] = OTHER
    handles: list[Any] = [Patch(color=colour, label=op) for op, colour in legend.items()]
    if any(len(schedule.transfer_tensor) for _, schedule, _ in panels):
        handles.append(Line2D([], [], color=TRANSFER, linewidth=0.8, label="transfer"))
    add_legend(figure, handles, most=len(handles))
    return figure


def _draw_schedule(
    ax: "Axes",
    schedule: Schedule,
    names: Sequence[str],
    num_devices: int,
    scale: float,
    colours: Mapping[str, str],
) -> None:
    from matplotlib.collections import LineCollection

    ops = np.array([op_type(name) for name in names], dtype=str)
    duration_s = schedule.finish_s - schedule.start_s
    for op in np.unique(ops):
        tasks = ops == op
        ax.barh(
            schedule.placement[tasks],
            duration_s[tasks] / scale,
            left=schedule.start_s[tasks] / scale,
            height=0.8,
            color=colours[op],
            edgecolor="white",
            linewidth=0.4,
        )
    times_s = schedule.transfer_start_s, schedule.transfer_finish_s
    rows = schedule.transfer_source, schedule.transfer_destination
    ends = np.array([times_s, rows], np.float64).transpose(2, 1, 0) / [scale, 1]
    ax.add_collection(LineCollection(list(ends), colors=TRANSFER, linewidths=0.5))
    longest_s = makespan_s(schedule)
    ax.axvline(longest_s / scale, color="black", linestyle="--", linewidth=1)
    busy_s = np.bincount(schedule.placement, weights=duration_s, minlength=num_devices)
    shares = busy_s / (longest_s or 1.0)
    labels = [f"device {d} ({share:.0%} busy)" for d, share in enumerate(shares)]
    ax.set_yticks(range(num_devices), labels)
    ax.set_ylim(num_devices - 0.4, -0.6)  # device 0 on top
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _write_names(
    ax: "Axes", schedule: Schedule, names: Sequence[str], scale: float, longest_s: float
) -> None:
    """Writes the names of those tasks whose bars have room for them."""
    long_s = schedule.finish_s - schedule.start_s
    for v in np.flatnonzero(long_s > longest_s / _LETTERS).tolist():
        if len(names[v]) * longest_s / _LETTERS < long_s[v]:
            middle = (schedule.start_s[v] + schedule.finish_s[v]) / 2 / scale
            ax.text(
                middle, schedule.placement[v], names[v],
                ha="center", va="center", fontsize=6, clip_on=True,
            )  # fmt: skip


def op_colours(ops: Sequence[str]) -> dict[str, str]:
    """Returns the colour of every operation, most frequent first; the rare ones share grey."""
    return {
        op: PALETTE[i] if i < len(PALETTE) else OTHER
        for i, (op, _) in enumerate(Counter(ops).most_common())
    }
