"""Pictures of placements: the task graph, coloured by device."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import task_edges
from doppler_jax.reports.gantt import PALETTE
from doppler_jax.reports.pictures import write_png
from doppler_jax.simulator.synchronous import hop_levels
from doppler_jax.types import TaskGraph

if TYPE_CHECKING:  # an import of matplotlib costs too much for those who draw nothing
    from matplotlib.axes import Axes

_MARKERS = "osD^"
_ACROSS, _INSIDE = "#444444", "#cccccc"


def plot_placements(
    path: str | os.PathLike[str],
    panels: Sequence[tuple[str, TaskGraph, ArrayLike]],
    *,
    num_devices: int,
) -> None:
    """Writes a PNG of task graphs, one below the other, each task coloured by its device.

    Each panel is a title, a graph and a placement `[N]`. Tasks stand at their level, entries
    on the left; a line is a tensor read, dark where it goes from device to device. The file
    appears only when complete.

    Raises:
      ValueError: there is no panel, or a placement has another length than its graph or a
        device outside `num_devices`.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not panels:
        raise ValueError("nothing to draw: panels is empty")
    checked = [(title, graph, np.asarray(placement)) for title, graph, placement in panels]
    for title, graph, placement in checked:
        _check_placement(title, graph, placement, num_devices)
    figure = Figure(figsize=(11, 3.4 * len(panels) + 0.4), dpi=150, layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for ax, panel in zip(axes, checked, strict=True):
        _draw_panel(ax, *panel)
    axes[-1].set_xlabel("level: tensors on the longest path from an entry")
    lines = [
        Line2D([], [], linestyle="", markersize=6, label=f"device {d}", **_mark(d))
        for d in range(num_devices)
    ]
    lines += [
        Line2D([], [], color=_INSIDE, label="inside a device"),
        Line2D([], [], color=_ACROSS, label="between devices"),
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=6, frameon=False)
    write_png(path, figure)


def lay_out(graph: TaskGraph) -> np.ndarray:
    """Returns a point for each task, `[N, 2]`: its level, and a row in -0.5 to 0.5.

    Within a level tasks keep the order of what they read, which keeps lines apart.
    """
    senders, readers = task_edges(graph)
    level = hop_levels(graph)
    row = np.zeros(graph.num_tasks)
    for k in range(level.max(initial=-1) + 1):
        tasks = np.flatnonzero(level == k)
        reads = np.isin(readers, tasks)
        total = np.bincount(readers[reads], row[senders[reads]], graph.num_tasks)[tasks]
        count = np.bincount(readers[reads], minlength=graph.num_tasks)[tasks]
        order = np.argsort(total / np.maximum(count, 1), kind="stable")
        row[tasks[order]] = (np.arange(len(tasks)) + 0.5) / len(tasks) - 0.5
    return np.stack([level.astype(np.float64), row], axis=1)


def _draw_panel(ax: "Axes", title: str, graph: TaskGraph, placement: np.ndarray) -> None:
    from matplotlib.collections import LineCollection

    senders, readers = task_edges(graph)
    points = lay_out(graph)
    ends = np.stack([points[senders], points[readers]], axis=1)
    across = placement[senders] != placement[readers]
    for chosen, colour, width in ((~across, _INSIDE, 0.8), (across, _ACROSS, 0.6)):
        ax.add_collection(LineCollection(ends[chosen], colors=colour, linewidths=width))
    size = float(np.clip(6000 / max(graph.num_tasks, 1), 12, 60))
    for d in np.unique(placement).tolist():
        here = points[placement == d]
        ax.scatter(here[:, 0], here[:, 1], s=size, linewidths=0, zorder=2, **_mark(d))
    ax.set_title(
        f"{title}: {across.sum()} of {len(across)} reads go between devices",
        loc="left", fontsize=11,
    )  # fmt: skip
    ax.set_yticks([])
    ax.margins(0.02, 0.06)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _mark(device: int) -> dict[str, Any]:
    return {
        "color": PALETTE[device % len(PALETTE)],
        "marker": _MARKERS[device // len(PALETTE) % len(_MARKERS)],
    }


def _check_placement(
    title: str, graph: TaskGraph, placement: np.ndarray, num_devices: int
) -> None:
    if placement.shape != (graph.num_tasks,):
        raise ValueError(
            f"panel {title!r}: placement has shape {placement.shape}; expected "
            f"({graph.num_tasks},)"
        )
    for v in np.flatnonzero((placement < 0) | (placement >= num_devices))[:1]:
        raise ValueError(
            f"panel {title!r}: task {v} is on device {placement[v]}, of {num_devices} devices"
        )
