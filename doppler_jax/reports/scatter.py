"""Pictures of simulated against measured makespans."""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from doppler_jax.reports.gantt import OTHER, PALETTE
from doppler_jax.reports.pictures import write_png
from doppler_jax.reports.tables import time_unit

_COLUMNS = 3


@dataclasses.dataclass(frozen=True)
class Panel:
    """One cloud of points, a point per placement."""

    title: str
    simulated_s: np.ndarray  # [B]
    measured_s: np.ndarray  # [B]


def plot_scatter(path: str | os.PathLike[str], panels: Sequence[Panel]) -> None:
    """Writes a PNG of measured against simulated makespans, a panel per workload.

    Both axes of a panel have one scale; on the line the two are equal. The file appears only
    when complete.

    Raises:
      ValueError: there is no panel, or one without points or with unequal lengths.
    """
    from matplotlib.figure import Figure

    if not panels:
        raise ValueError("nothing to draw: panels is empty")
    for panel in panels:
        if len(panel.simulated_s) != len(panel.measured_s) or not len(panel.measured_s):
            raise ValueError(
                f"panel {panel.title!r} has {len(panel.simulated_s)} simulated and "
                f"{len(panel.measured_s)} measured makespans"
            )
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 4.0 * rows), layout="constrained")
    for k, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, k + 1)
        both = np.concatenate([panel.simulated_s, panel.measured_s])
        scale, unit = time_unit(float(both.max()))
        low, high = 0.95 * both.min() / scale, 1.05 * both.max() / scale
        axes.plot([low, high], [low, high], color=OTHER, linewidth=1, zorder=1)
        axes.scatter(
            panel.simulated_s / scale,
            panel.measured_s / scale,
            color=PALETTE[0],
            s=18,
            alpha=0.8,
            linewidths=0,
            zorder=2,
        )
        axes.set(
            xlim=(low, high),
            ylim=(low, high),
            xlabel=f"simulated makespan ({unit})",
            ylabel=f"measured makespan ({unit})",
            title=panel.title,
        )
    write_png(path, figure)
