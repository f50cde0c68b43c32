"""Best makespan against effort: `python -m experiments.sample_efficiency --quick`.

Learned methods train on a workload, simulated on 4 P100, within a number of simulated
executions; the curve is of the best placement so far. The folder runs/sample_efficiency/ gets
a table at powers of ten, its records, the curves as a picture, and all that is needed to go on
where a run was stopped.
"""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.reports.curves import Line, Panel, plot_curves
from doppler_jax.reports.tables import format_table
from experiments import published
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.method_cells import Budget, MethodCells, check_names, paper_problem
from experiments.problems import use_host_devices
from experiments.results import format_ms, star_least, write_results

EQUAL = 1e-5
"""Relative difference up to which two makespans count as equal: simulators agree to that."""


@dataclasses.dataclass(frozen=True)
class EfficiencySettings:
    """What to compare."""

    workloads: tuple[str, ...] = published.WORKLOADS
    methods: tuple[str, ...] = ("doppler", "placeto", "gdp", "joint")
    preset: str = "paper"
    """Sizes of the workloads."""
    evaluations: int = 1_000_000
    """Placements that a run simulates."""
    seeds: int = 5
    host_devices: int = os.cpu_count() or 1
    """Devices that the CPU is split into; training and simulation use all."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to sample_efficiency/ in there."""
    quick: bool = False
    """Two workloads, one seed, 20,000 simulated executions: minutes on two cores."""


def main(settings: EfficiencySettings) -> None:
    """Runs what is missing, prints and writes the table.

    Raises:
      ValueError: an option names no workload or method, or is out of range.
    """
    if settings.quick:
        settings = dataclasses.replace(
            settings,
            workloads=settings.workloads[:2],
            seeds=1,
            evaluations=min(settings.evaluations, 20_000),
        )
    check_settings(settings)
    check_names("--workloads", settings.workloads, published.WORKLOADS)
    check_names("--methods", settings.methods, dj.list_methods())
    use_host_devices(settings.host_devices)
    folder = settings.runs / "sample_efficiency"
    cells, budget = (
        MethodCells(Cells(folder / "cells")),
        Budget(evaluations=settings.evaluations),
    )
    records = []
    for workload in settings.workloads:
        chosen = paper_problem(workload, settings.preset)
        for seed in range(settings.seeds):
            for method in settings.methods:
                found = cells.get(chosen, method, seed, budget)
                records.append({"workload": workload, **found})
        print(f"{workload}: done", flush=True)
    grid = marks(settings.evaluations)
    write_results(folder, "sample_efficiency", tabulate(records, grid), records)
    draw(folder, records, settings.evaluations)


def marks(evaluations: int) -> list[int]:
    """Returns the powers of ten from 100 up to a bound, and the bound."""
    powers = [10**k for k in range(2, 12) if 10**k < evaluations]
    return [*powers, evaluations]


def best_by(record: dict[str, Any], evaluations: int) -> float:
    """Returns the best makespan in seconds that a run had by then, nan if it had none."""
    spent, _, makespan_s = record["curve"]
    last = int(np.searchsorted(spent, evaluations, side="right"))
    return makespan_s[last - 1] if last else np.nan


def tabulate(records: list[dict[str, Any]], grid: list[int]) -> str:
    """Returns the table: best makespans at the marks, a row per workload and method."""
    workloads = list(dict.fromkeys(record["workload"] for record in records))
    rows = []
    for workload in workloads:
        runs: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            if record["workload"] == workload:
                runs.setdefault(record["method"], []).append(record)
        columns = [_column(runs, mark) for mark in grid]
        rows += [
            (workload, method, *(column[k] for column in columns))
            for k, method in enumerate(runs)
        ]
    seeds = len({record["seed"] for record in records})
    title = (
        f"Best makespan so far (ms) by simulated executions, mean and deviation over {seeds} "
        "seeds; * is the least. An episode is one execution for GDP and the joint policy, one "
        "per task for Placeto; DOPPLER's updates spend most of theirs on local search, and its "
        "first update comes after stage 1, which simulates nothing. `-`: none yet.\n\n"
    )
    return title + format_table(("workload", "method", *(f"{m:,}" for m in grid)), rows)


def draw(folder: pathlib.Path, records: list[dict[str, Any]], evaluations: int) -> None:
    """Draws the mean curve of each method, with its least and greatest seed."""
    panels = []
    for workload in dict.fromkeys(record["workload"] for record in records):
        here = [record for record in records if record["workload"] == workload]
        methods = dict.fromkeys(record["method"] for record in here)
        lines = [
            _line(method, [r for r in here if r["method"] == method], evaluations)
            for method in methods
        ]
        panels.append(Panel(f"{workload}, simulated, 4 P100", tuple(lines)))
    plot_curves(
        folder / "sample_efficiency.png",
        panels,
        x_label="simulated executions",
        y_label="best makespan (ms)",
    )


def _line(method: str, runs: list[dict[str, Any]], evaluations: int) -> Line:
    first = max(run["curve"][0][0] for run in runs)
    x = np.unique(np.geomspace(first, max(evaluations, first), 40).astype(np.int64))
    ms = np.array([[1e3 * best_by(run, n) for n in x.tolist()] for run in runs])
    return Line(method, x, ms.mean(axis=0), ms.min(axis=0), ms.max(axis=0))


def _column(runs: dict[str, list[dict[str, Any]]], mark: int) -> list[str]:
    """Returns the cells of one mark, one per method."""
    found = [np.array([best_by(run, mark) for run in kept]) for kept in runs.values()]
    means = [float(s.mean()) for s in found]
    texts = [
        "-" if np.isnan(mean) else format_ms(mean, float(s.std()))
        for mean, s in zip(means, found, strict=True)
    ]
    return texts if np.isnan(means).all() else star_least(texts, means, EQUAL)


if __name__ == "__main__":
    cli.run(main, EfficiencySettings, "Best makespan against simulated executions.")
