"""Pictures of what each of several methods got, beside other figures for the same."""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from doppler_jax.reports.gantt import OTHER, PALETTE
from doppler_jax.reports.pictures import write_png

_COLUMNS = 2


@dataclasses.dataclass(frozen=True)
class Panel:
    """B bars on one pair of axes."""

    title: str
    labels: tuple[str, ...]  # [B]
    height: np.ndarray  # [B]
    spread: np.ndarray  # [B] half the length of the error bar
    other: np.ndarray  # [B] of the mark beside the bar, nan where there is none
    emphasised: tuple[str, ...] = ()  # labels to be coloured


def plot_bars(
    path: str | os.PathLike[str], panels: Sequence[Panel], *, x_label: str, other_label: str
) -> None:
    """Writes a PNG of horizontal bars with their values, one pair of axes per panel.

    Black diamonds are the `other` figures. The file appears only when complete.

    Raises:
      ValueError: there is no panel, or one whose lengths differ or that has no bar.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not panels:
        raise ValueError("nothing to draw: panels is empty")
    for panel in panels:
        lengths = [len(x) for x in (panel.labels, panel.height, panel.spread, panel.other)]
        if len(set(lengths)) != 1 or not lengths[0]:
            raise ValueError(f"panel {panel.title!r}: {lengths} bars; expected as many of each")
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    most = max(len(panel.labels) for panel in panels)
    figure = Figure(
        figsize=(5.6 * columns, (0.32 * most + 1.0) * rows + 0.3), dpi=150, layout="constrained"
    )
    for k, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, k + 1)
        y = np.arange(len(panel.labels))
        colours = [PALETTE[0] if e in panel.emphasised else OTHER for e in panel.labels]
        bars = axes.barh(y, panel.height, xerr=panel.spread, color=colours, height=0.7)
        axes.bar_label(bars, fmt="{:.4g}", padding=3, fontsize=8)
        axes.scatter(panel.other, y, marker="D", s=16, color="black", zorder=3)
        axes.set_yticks(y, panel.labels)
        axes.invert_yaxis()
        axes.set_xlabel(x_label)
        axes.set_title(panel.title, loc="left", fontsize=11)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    if any(np.isfinite(panel.other).any() for panel in panels):
        mark = Line2D(
            [], [], marker="D", color="black", linestyle="", markersize=4, label=other_label
        )
        figure.legend(handles=[mark], loc="outside lower center", frameon=False)
    write_png(path, figure)
