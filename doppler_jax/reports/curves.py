"""Pictures of one quantity against another: learning curves, scaling lines."""

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from doppler_jax.reports.gantt import PALETTE
from doppler_jax.reports.pictures import write_png

if TYPE_CHECKING:  # an import of matplotlib costs too much for those who draw nothing
    from matplotlib.axes import Axes

COLUMNS = 2
"""Panels beside each other."""

_MARKERS = "osD^vPX"
_STYLES = ("-", "--", ":", "-.")


@dataclasses.dataclass(frozen=True)
class Line:
    """Points to be joined, by rising `x`."""

    label: str
    x: np.ndarray  # [K]
    y: np.ndarray  # [K]
    low: np.ndarray | None = None  # [K] of a band around it
    high: np.ndarray | None = None  # [K]


@dataclasses.dataclass(frozen=True)
class Panel:
    """Lines on one pair of axes."""

    title: str
    lines: tuple[Line, ...]
    reference: tuple[str, float] | None = None  # a level to compare with, and its name


def plot_curves(
    path: str | os.PathLike[str],
    panels: Sequence[Panel],
    *,
    x_label: str,
    y_label: str,
    log_y: bool = False,
) -> None:
    """Writes a PNG of lines over a logarithmic `x`, one pair of axes per panel.

    A label has one colour, marker and dash in all panels. Labels name quantity and unit. The
    file appears only when complete.

    Raises:
      ValueError: there is no panel, or a line without points, with unequal lengths, an `x`
        that is not positive, or a number that is not finite.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not panels:
        raise ValueError("nothing to draw: panels is empty")
    for panel in panels:
        for line in panel.lines:
            _check_line(panel.title, line)
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    styles = {label: _style(k) for k, label in enumerate(labels)}
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.4 * columns, 3.7 * rows + 0.4), dpi=150, layout="constrained")
    for k, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, k + 1)
        _draw_panel(axes, panel, styles)
        axes.set(xscale="log", xlabel=x_label, ylabel=y_label)
        if log_y:
            axes.set_yscale("log")
    figure.legend(
        handles=[Line2D([], [], label=label, **styles[label]) for label in labels],
        loc="outside lower center",
        ncols=min(5, max(1, len(labels))),
        frameon=False,
    )
    write_png(path, figure)


def _style(k: int) -> dict[str, Any]:
    # Beyond the palette colours repeat, with another dash: the pair stays unique.
    return {
        "color": PALETTE[k % len(PALETTE)],
        "marker": _MARKERS[k % len(_MARKERS)],
        "linestyle": _STYLES[(k % len(PALETTE) + k // len(PALETTE)) % len(_STYLES)],
    }


def _draw_panel(axes: "Axes", panel: Panel, styles: dict[str, dict[str, Any]]) -> None:
    for line in panel.lines:
        style = styles[line.label]
        axes.plot(line.x, line.y, markersize=4, linewidth=1.6, **style)
        if line.low is not None and line.high is not None:
            axes.fill_between(
                line.x, line.low, line.high, color=style["color"], alpha=0.15, linewidth=0
            )
    if panel.reference is not None:
        name, level = panel.reference
        axes.axhline(level, color="black", linewidth=1, linestyle=(0, (1, 2)))
        axes.text(
            0.99, level, name, transform=axes.get_yaxis_transform(), fontsize=8,
            ha="right", va="bottom",
        )  # fmt: skip
    axes.set_title(panel.title, loc="left", fontsize=11)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _check_line(title: str, line: Line) -> None:
    arrays = [a for a in (line.x, line.y, line.low, line.high) if a is not None]
    what = f"panel {title!r}, line {line.label!r}"
    if len({len(array) for array in arrays}) != 1 or not len(line.x):
        raise ValueError(f"{what}: {[len(array) for array in arrays]} points; expected as many")
    if not all(np.isfinite(array).all() for array in arrays) or not (line.x > 0).all():
        raise ValueError(f"{what}: expected finite numbers, and x above 0")
