"""The paper's Table 2: `python -m experiments.table --quick`.

Two parts. Simulated: every method places the four workloads on 4 P100, all given the same
seconds after a run that compiled everything. Measured: every method places them under this
machine's calibrated costs, and its placements run here, on isolated devices, in turns;
`doppler_sys` is stage 3, which goes on from DOPPLER's policy by measuring. The paper's own
figures stand beside, and what can be said of ours below. The folder runs/table/ gets table.md,
table.json, table.png, placements.png, and all that is needed to go on where a run was stopped.
"""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.reports.bars import Panel, plot_bars
from doppler_jax.reports.placements import plot_placements
from doppler_jax.training.system_rl import SystemConfig
from experiments import measured_cells, published, table_text
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.isolation import BackendChoice, choose_backend
from experiments.machine import Machine
from experiments.measured_cells import MeasuredSettings
from experiments.method_cells import Budget, MethodCells, check_names, paper_problem
from experiments.problems import Chosen, use_host_devices
from experiments.results import write_results

METHODS = (
    "critical_path",
    "heft",
    "placeto",
    "gdp",
    "enumerative",
    "annealing",
    "doppler",
    "doppler+search",
)

SLOW = ("placeto", "gdp", "doppler+search")
"""Of these `--quick` measures none."""


@dataclasses.dataclass(frozen=True)
class TableSettings:
    """What to compare."""

    workloads: tuple[str, ...] = published.WORKLOADS
    methods: tuple[str, ...] = METHODS
    """Of `dj.list_methods()`."""
    preset: str = "paper"
    """Sizes of what is simulated."""
    seeds: int = 10
    budget_s: float = 600.0
    """Seconds of a simulated run, compilation not counted."""
    measured: bool = True
    """Whether to measure on this machine's devices too."""
    measured_workloads: tuple[str, ...] = published.WORKLOADS
    measured_methods: tuple[str, ...] = METHODS
    measured_preset: str = "medium"
    """Sizes of what is measured."""
    backend: BackendChoice = "auto"
    """Of the engine, as for stage 3."""
    num_devices: int = 2
    """Devices that are measured on."""
    measured_evaluations: int = 400_000
    """Placements that a method simulates for what is measured."""
    num_updates: int = 20
    """Of stage 3."""
    rounds: int = 21
    """Runs of each placement that is measured."""
    host_devices: int = os.cpu_count() or 1
    """Devices that the CPU is split into; training and simulation use all."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to table/ in there."""
    quick: bool = False
    """3 seeds of 8 seconds; the rivals that learn, which compile for a minute each, are not
    measured: 40 minutes on two cores. Without it the simulated half alone is 33 hours."""
    training: SystemConfig = dataclasses.field(default_factory=SystemConfig)


def main(settings: TableSettings) -> None:
    """Runs what is missing, prints and writes the table.

    Raises:
      ValueError: an option names no workload or method, or is out of range.
    """
    if settings.quick:
        settings = dataclasses.replace(
            settings,
            seeds=min(settings.seeds, 3),
            budget_s=min(settings.budget_s, 8.0),
            measured_methods=tuple(m for m in settings.measured_methods if m not in SLOW),
            num_updates=min(settings.num_updates, 4),
        )
    check_settings(settings)
    check_names("--workloads", settings.workloads, published.WORKLOADS)
    check_names("--methods", settings.methods, dj.list_methods())
    check_names("--measured-workloads", settings.measured_workloads, published.WORKLOADS)
    check_names("--measured-methods", settings.measured_methods, dj.list_methods())
    use_host_devices(settings.host_devices)
    folder = settings.runs / "table"
    problems = [paper_problem(name, settings.preset) for name in settings.workloads]
    simulated = simulate(settings, problems, folder)
    measured = measure(settings, folder) if settings.measured else []
    budget = str(Budget(seconds=settings.budget_s))
    text = table_text.tabulate(simulated, measured, budget, settings.measured_evaluations)
    write_results(folder, "table", text, {"simulated": simulated, "measured": measured})
    draw(settings, problems, simulated, measured, folder)


def simulate(
    settings: TableSettings, problems: list[Chosen], folder: pathlib.Path
) -> list[dict[str, Any]]:
    """Returns the record of every simulated run."""
    cells = MethodCells(Cells(folder / "cells"))
    budget = Budget(seconds=settings.budget_s)
    records = []
    for workload, chosen in zip(settings.workloads, problems, strict=True):
        for seed in range(settings.seeds):  # outside: drift of the machine hits all alike
            for method in settings.methods:
                record = cells.get(chosen, method, seed, budget)
                records.append({"workload": workload, **record})
        print(
            f"{workload}: {len(settings.methods)} methods, {settings.seeds} seeds", flush=True
        )
    return records


def measure(settings: TableSettings, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns what was measured, a record per workload."""
    backend = choose_backend(settings.backend, settings.num_devices)
    here = folder / f"{backend}x{settings.num_devices}-{settings.measured_preset}"
    options = MeasuredSettings(
        preset=settings.measured_preset,
        evaluations=settings.measured_evaluations,
        num_updates=settings.num_updates,
        rounds=settings.rounds,
        training=settings.training,
    )
    with Machine(settings.num_devices) as machine:
        devices = machine.devices(backend)
        records = []
        for workload in settings.measured_workloads:
            bench = measured_cells.make_bench(options, workload, backend, devices, here)
            records.append(
                measured_cells.measure_methods(options, bench, settings.measured_methods)
            )
            print(f"{workload}: measured", flush=True)
    return records


def draw(
    settings: TableSettings,
    problems: list[Chosen],
    simulated: list[dict[str, Any]],
    measured: list[dict[str, Any]],
    folder: pathlib.Path,
) -> None:
    """Draws the table's bars, and the best placement found of each workload."""
    panels, pictures = [], []
    for workload, chosen in zip(settings.workloads, problems, strict=True):
        found = table_text.by_method(simulated, workload)
        panels.append(_panel(f"{workload}, simulated, 4 P100", workload, found))
        runs = [record for record in simulated if record["workload"] == workload]
        best = min(runs, key=lambda record: record["makespan_s"])
        pictures.append((f"{workload}, {best['method']}", chosen.graph, best["placement"]))
    for record in measured:
        workload = record["workload"]
        seconds = {method: np.array(s) for method, s in record["measured_s"].items()}
        panels.append(_panel(f"{workload}, measured here", workload, seconds))
    plot_bars(
        folder / "table.png", panels, x_label="makespan (ms)", other_label="paper, measured"
    )
    num_devices = problems[0].costs.num_devices
    plot_placements(folder / "placements.png", pictures, num_devices=num_devices)


def _panel(title: str, workload: str, seconds: dict[str, np.ndarray]) -> Panel:
    paper = published.TABLE_2_MS[workload]
    return Panel(
        title=title,
        labels=tuple(seconds),
        height=np.array([1e3 * s.mean() for s in seconds.values()]),
        spread=np.array([1e3 * s.std() for s in seconds.values()]),
        other=np.array([paper.get(method, np.nan) for method in seconds]),
        emphasised=table_text.OURS,
    )


if __name__ == "__main__":
    cli.run(main, TableSettings, "The paper's Table 2, simulated and measured.")
