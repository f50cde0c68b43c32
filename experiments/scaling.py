"""Time against the number of tasks: `python -m experiments.scaling --quick`.

Every learned method on layered graphs: seconds of an update and of an episode in it, and
seconds to place a graph with a policy at hand (`dj.place`: features, one greedy proposal, its
judgement by the oracle), compilation apart. A method ends where its next update would take
too long. The folder runs/scaling/ gets a table, its records, lines as a picture, and all that
is needed to go on where a run was stopped.
"""

import dataclasses
import math
import os
import pathlib
from typing import Any

import numpy as np

from doppler_jax import cli
from doppler_jax.learned import LEARNERS
from doppler_jax.reports.curves import Line, Panel, plot_curves
from doppler_jax.reports.tables import format_seconds, format_table
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.method_cells import check_names
from experiments.problems import use_host_devices
from experiments.results import write_results
from experiments.scaling_cells import scaling_cell

METHODS = tuple(LEARNERS)

QUICK_SIZES = (125, 1000)

COLUMNS = (
    "method",
    "tasks",
    "episodes of an update",
    "executions of an update",
    "update",
    "per episode",
    "per execution",
    "placing",
    "compilation",
)


@dataclasses.dataclass(frozen=True)
class ScalingSettings:
    """What to time."""

    methods: tuple[str, ...] = METHODS
    sizes: tuple[int, ...] = (100, 300, 1000, 3000, 10_000)
    """Tasks of the graphs."""
    num_devices: int = 4
    batch: int = 16
    """Episodes of an update."""
    repeats: int = 3
    limit_s: float = 600.0
    """Of an update; what would take longer, if time grew as the square, is left out."""
    host_devices: int = os.cpu_count() or 1
    """Devices that the CPU is split into; DOPPLER's training uses all."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to scaling/ in there."""
    quick: bool = False
    """125 and 1,000 tasks, batches of 4: minutes on two cores."""


def main(settings: ScalingSettings) -> None:
    """Times what is missing, prints and writes the table.

    Raises:
      ValueError: a method does not learn or does not exist, there are fewer than two sizes,
        or another option is out of range.
    """
    if settings.quick:
        settings = dataclasses.replace(
            settings,
            sizes=QUICK_SIZES,
            batch=min(settings.batch, 4),
            limit_s=min(settings.limit_s, 20.0),
        )
    check_settings(settings)
    check_names("--methods", settings.methods, METHODS)
    sizes = sorted(set(settings.sizes))
    if len(sizes) < 2 or sizes[0] < 1:
        raise ValueError(f"--sizes are {settings.sizes}; expected 2 or more counts")
    use_host_devices(settings.host_devices)
    folder = settings.runs / "scaling"
    cells = Cells(folder / "cells")
    records = [
        record for method in settings.methods for record in grow(cells, settings, method, sizes)
    ]
    write_results(folder, "scaling", tabulate(records, settings), records)
    draw(folder, records)


def grow(
    cells: Cells, settings: ScalingSettings, method: str, sizes: list[int]
) -> list[dict[str, Any]]:
    """Returns the records of a method, up to the size whose update would take too long."""
    records: list[dict[str, Any]] = []
    for size in sizes:
        if records:
            growth = (size / records[-1]["tasks"]) ** 2
            if records[-1]["update_s"] * growth > settings.limit_s:
                print(f"{method}: {size:,} tasks would take too long", flush=True)
                break
        record = scaling_cell(
            cells, method, size, settings.num_devices, settings.batch, settings.repeats
        )
        records.append(record)
        print(f"{method}: {size:,} tasks, {format_seconds(record['update_s'])}", flush=True)
    return records


def tabulate(records: list[dict[str, Any]], settings: ScalingSettings) -> str:
    """Returns the table, and how each method's times grow."""
    rows = [
        (
            r["method"],
            f"{r['tasks']:,}",
            str(r["batch"]),
            f"{r['evaluations']:,}",
            format_seconds(r["update_s"], 3),
            format_seconds(r["update_s"] / r["batch"], 3),
            format_seconds(r["update_s"] / r["evaluations"], 3),
            format_seconds(r["place_s"], 3),
            format_seconds(r["compile_s"], 3),
        )
        for r in records
    ]
    slopes = [
        f"{method} {found[0]:.2f} and {found[1]:.2f}"
        for method in dict.fromkeys(r["method"] for r in records)
        if (found := growth_of([r for r in records if r["method"] == method])) is not None
    ]
    return (
        f"Layered graphs on {settings.num_devices} devices, medians of {settings.repeats}\n\n"
        f"{format_table(COLUMNS, rows)}\n"
        "Slope of log time over log tasks, from the smallest to the largest graph, of an "
        f"update and of placing: {'; '.join(slopes) or 'none'}.\n"
    )


def growth_of(records: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Returns the exponents of update and placing time, None where there is one size only."""
    if len(records) < 2:
        return None
    first, last = records[0], records[-1]
    tasks = math.log(last["tasks"] / first["tasks"])
    update, place = (math.log(last[k] / first[k]) / tasks for k in ("update_s", "place_s"))
    return update, place


def draw(folder: pathlib.Path, records: list[dict[str, Any]]) -> None:
    """Draws seconds of an episode and of placing over the number of tasks."""

    def line(method: str, seconds: str, share: str | None) -> Line:
        runs = [r for r in records if r["method"] == method]
        over = np.array([r[share] if share else 1 for r in runs])
        return Line(
            method,
            np.array([r["tasks"] for r in runs]),
            np.array([r[seconds] for r in runs]) / over,
        )

    methods = list(dict.fromkeys(record["method"] for record in records))
    panels = [
        Panel("training, per episode", tuple(line(m, "update_s", "batch") for m in methods)),
        Panel("placing with a policy", tuple(line(m, "place_s", None) for m in methods)),
    ]
    plot_curves(folder / "scaling.png", panels, x_label="tasks", y_label="time (s)", log_y=True)


if __name__ == "__main__":
    cli.run(main, ScalingSettings, "Time of every learned method against the number of tasks.")
