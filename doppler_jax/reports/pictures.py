"""Pictures: bars, lines, points, task graphs. One pair of axes a panel; PNG files.

A panel is a tuple that begins with its title. All raise `ValueError` where there is no panel,
or where one cannot be drawn, before anything is written; a file appears only when complete.
"""

import dataclasses
import io
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.files import PathLike
from doppler_jax.graphs.build import task_edges
from doppler_jax.reports.tables import time_unit
from doppler_jax.simulator.durations import check_placement
from doppler_jax.simulator.synchronous import hop_levels
from doppler_jax.types import TaskGraph

if TYPE_CHECKING:  # an import of matplotlib costs too much for those who draw nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart under every common colour blindness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442")
OTHER = "#999999"

_MARKERS = "osD^vPX"
_STYLES = ("-", "--", ":", "-.")
_ACROSS, _INSIDE = "#444444", "#cccccc"


@dataclasses.dataclass(frozen=True)
class Bars:
    """B bars on one pair of axes.

    Attributes:
      labels: `[B]`.
      height: `[B]` of each bar.
      spread: `[B]` half the length of its error bar.
      other: `[B]` of the mark beside it, nan where there is none.
      emphasised: labels to be coloured.
    """

    labels: tuple[str, ...]
    height: np.ndarray
    spread: np.ndarray
    other: np.ndarray
    emphasised: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Line:
    """K points to be joined, by rising `x`, and a band around them from `low` to `high`."""

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def plot_bars(
    path: PathLike, panels: Sequence[tuple[str, Bars]], *, x_label: str, other_label: str
) -> None:
    """Writes horizontal bars with their values; black diamonds are the `other` figures.

    A panel is a title and its bars.
    """
    from matplotlib.lines import Line2D

    for title, bars in panels:
        lengths = [len(x) for x in (bars.labels, bars.height, bars.spread, bars.other)]
        if len(set(lengths)) != 1 or not lengths[0]:
            raise ValueError(f"panel {title!r}: {lengths} bars; expected as many of each")

    def draw(axes: "Axes", bars: Bars) -> None:
        y = np.arange(len(bars.labels))
        colours = [PALETTE[0] if e in bars.emphasised else OTHER for e in bars.labels]
        drawn = axes.barh(y, bars.height, xerr=bars.spread, color=colours, height=0.7)
        axes.bar_label(drawn, fmt="{:.4g}", padding=3, fontsize=8)
        axes.scatter(bars.other, y, marker="D", s=16, color="black", zorder=3)
        axes.set_yticks(y, bars.labels)
        axes.invert_yaxis()
        axes.set_xlabel(x_label)
        axes.margins(x=0.12)

    most = max((len(bars.labels) for _, bars in panels), default=0)
    figure = _draw_panels(panels, (5.6, 0.32 * most + 1.0), draw)
    if any(np.isfinite(bars.other).any() for _, bars in panels):
        style: dict[str, Any] = {"marker": "D", "linestyle": "", "markersize": 4}
        add_legend(figure, [Line2D([], [], color="black", label=other_label, **style)])
    write_png(path, figure)


def plot_curves(
    path: PathLike,
    panels: Sequence[tuple[str, Sequence[Line]]],
    *,
    x_label: str,
    y_label: str,
) -> None:
    """Writes lines over a logarithmic `x`; a panel is a title and its lines.

    A label has one colour, marker and dash in all panels. Labels name quantity and unit.
    """
    from matplotlib.lines import Line2D

    for title, lines in panels:
        for line in lines:
            _check_line(title, line)
    labels = list(dict.fromkeys(line.label for _, lines in panels for line in lines))
    styles = {label: line_style(k) for k, label in enumerate(labels)}

    def draw(axes: "Axes", lines: Sequence[Line]) -> None:
        for line in lines:
            style = styles[line.label]
            axes.plot(line.x, line.y, markersize=4, linewidth=1.6, **style)
            if line.low is not None and line.high is not None:
                axes.fill_between(
                    line.x, line.low, line.high, color=style["color"], alpha=0.15, linewidth=0
                )
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set(xscale="log", xlabel=x_label, ylabel=y_label)

    figure = _draw_panels(panels, (5.4, 3.7), draw)
    add_legend(figure, [Line2D([], [], label=label, **styles[label]) for label in labels])
    write_png(path, figure)


def plot_scatter(path: PathLike, panels: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> None:
    """Writes measured against simulated makespans.

    A panel is a title, and simulated and measured makespans `[B]` in seconds. Both of its axes
    have one scale; on the line the two are equal.
    """
    for title, simulated_s, measured_s in panels:
        if len(simulated_s) != len(measured_s) or not len(measured_s):
            raise ValueError(
                f"panel {title!r} has {len(simulated_s)} simulated and {len(measured_s)} "
                "measured makespans"
            )

    def draw(axes: "Axes", simulated_s: np.ndarray, measured_s: np.ndarray) -> None:
        both = np.concatenate([simulated_s, measured_s])
        scale, unit = time_unit(float(both.max()))
        ends = 0.95 * both.min() / scale, 1.05 * both.max() / scale
        axes.plot(ends, ends, color=OTHER, linewidth=1, zorder=1)
        points = simulated_s / scale, measured_s / scale
        axes.scatter(*points, s=18, alpha=0.8, linewidths=0, color=PALETTE[0])
        axes.set(xlim=ends, ylim=ends, xlabel=f"simulated makespan ({unit})")
        axes.set_ylabel(f"measured makespan ({unit})")

    write_png(path, _draw_panels(panels, (4.2, 4.0), draw, columns=3))


def plot_placements(
    path: PathLike,
    panels: Sequence[tuple[str, TaskGraph, ArrayLike]],
    *,
    num_devices: int,
) -> None:
    """Writes task graphs, one below the other, each task coloured by its device.

    Each panel is a title, a graph and a placement `[N]`. Tasks stand at their level, entries
    on the left; a line is a tensor read, dark where it goes from device to device.
    """
    from matplotlib.lines import Line2D

    checked = []
    for title, graph, placement in panels:
        try:
            device = check_placement(graph, num_devices, placement)
        except ValueError as error:
            raise ValueError(f"panel {title!r}: {error}") from error
        checked.append((title, graph, device))
    figure = _draw_panels(checked, (11, 3.4), _draw_placement, columns=1)
    figure.axes[-1].set_xlabel("level: tensors on the longest path from an entry")
    lines = [
        Line2D([], [], linestyle="", markersize=6, label=f"device {d}", **_mark(d))
        for d in range(num_devices)
    ]
    lines += [
        Line2D([], [], color=_INSIDE, label="inside a device"),
        Line2D([], [], color=_ACROSS, label="between devices"),
    ]
    add_legend(figure, lines, most=6)
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


def line_style(k: int) -> dict[str, Any]:
    """Returns what the k-th line of a picture looks like; no two are alike."""
    # Beyond the palette colours repeat, with another dash: the pair stays unique.
    return {
        "color": PALETTE[k % len(PALETTE)],
        "marker": _MARKERS[k % len(_MARKERS)],
        "linestyle": _STYLES[(k % len(PALETTE) + k // len(PALETTE)) % len(_STYLES)],
    }


def add_legend(figure: "Figure", handles: Sequence[Any], most: int = 5) -> None:
    """Adds a legend below the axes, of at most so many columns."""
    columns = min(most, max(1, len(handles)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


def write_png(path: PathLike, figure: "Figure") -> None:
    """Writes a figure as a PNG, which replaces an old one only when it is complete."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(picture.getvalue())
    temporary.replace(path)


def _draw_panels(
    panels: Sequence[tuple[Any, ...]],
    size: tuple[float, float],
    draw: Callable[..., None],
    columns: int = 2,
) -> "Figure":
    """Returns a figure of panels, each `size` (width, height) inches, with their titles.

    `draw` is called with the axes and what of a panel comes after its title.
    """
    from matplotlib.figure import Figure

    if not panels:
        raise ValueError("nothing to draw: panels is empty")
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    inches = (size[0] * columns, size[1] * rows + 0.4)
    figure = Figure(figsize=inches, dpi=150, layout="constrained")
    for k, (title, *panel) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, k + 1)
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, *panel)
    return figure


def _check_line(title: str, line: Line) -> None:
    arrays = [a for a in (line.x, line.y, line.low, line.high) if a is not None]
    what = f"panel {title!r}, line {line.label!r}"
    if len({len(array) for array in arrays}) != 1 or not len(line.x):
        raise ValueError(f"{what}: {[len(array) for array in arrays]} points; expected as many")
    if not all(np.isfinite(array).all() for array in arrays) or not (line.x > 0).all():
        raise ValueError(f"{what}: expected finite numbers, and x above 0")


def _draw_placement(axes: "Axes", graph: TaskGraph, placement: np.ndarray) -> None:
    from matplotlib.collections import LineCollection

    senders, readers = task_edges(graph)
    points = lay_out(graph)
    ends = np.stack([points[senders], points[readers]], axis=1)
    across = placement[senders] != placement[readers]
    for chosen, colour, width in ((~across, _INSIDE, 0.8), (across, _ACROSS, 0.6)):
        axes.add_collection(LineCollection(ends[chosen], colors=colour, linewidths=width))
    size = float(np.clip(6000 / max(graph.num_tasks, 1), 12, 60))
    for d in np.unique(placement).tolist():
        here = points[placement == d]
        axes.scatter(here[:, 0], here[:, 1], s=size, linewidths=0, zorder=2, **_mark(d))
    moved = f"{across.sum()} of {len(across)} reads go between devices"
    axes.set_title(f"{axes.get_title('left')}: {moved}", loc="left", fontsize=11)
    axes.set_yticks([])
    axes.margins(0.02, 0.06)
    axes.spines["left"].set_visible(False)


def _mark(device: int) -> dict[str, Any]:
    shapes = _MARKERS[:4]
    return {
        "color": PALETTE[device % len(PALETTE)],
        "marker": shapes[device // len(PALETTE) % len(shapes)],
    }
