"""What each part of DOPPLER is worth: `python -m experiments.ablation --quick`.

DOPPLER with one part taken out or changed, simulated on 4 P100, at equal seconds after a run
that compiled everything: SEL learned alone, PLC learned alone, one joint policy, message
passing at every step, without stage 1, without stage 2. With `--measured` also stage 3 alone,
on this machine's devices. The paper's figures stand beside. The folder runs/ablation/ gets a
table, its records, bars as a picture, and all that is needed to go on where a run was stopped.
"""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from doppler_jax import cli
from doppler_jax.reports.bars import Panel, plot_bars
from doppler_jax.reports.tables import format_table
from doppler_jax.training.system_rl import SystemConfig
from experiments import ablation_cells, published
from experiments.ablation_cells import WITHOUT
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.isolation import BackendChoice, choose_backend
from experiments.machine import Machine
from experiments.measured_cells import MeasuredSettings, make_bench
from experiments.method_cells import Budget, MethodCells, check_names, paper_problem
from experiments.problems import use_host_devices
from experiments.results import format_ms, star_least, write_results
from experiments.table_text import EQUAL, by_method

METHODS = ("doppler", "doppler_sel", "doppler_plc", "joint", "doppler_per_step")

VARIANTS = (*METHODS, *WITHOUT)


@dataclasses.dataclass(frozen=True)
class AblationSettings:
    """What to compare."""

    workloads: tuple[str, ...] = published.WORKLOADS
    variants: tuple[str, ...] = VARIANTS
    preset: str = "paper"
    """Sizes of what is simulated."""
    seeds: int = 5
    budget_s: float = 120.0
    """Seconds of a simulated run, compilation not counted."""
    measured: bool = False
    """Whether to measure what stage 3 is worth without the stages before it."""
    measured_preset: str = "medium"
    """Sizes of what is measured."""
    backend: BackendChoice = "auto"
    """Of the engine, as for stage 3."""
    num_devices: int = 2
    """Devices that are measured on."""
    measured_evaluations: int = 200_000
    """Placements that stages 1 and 2 simulate for what is measured."""
    num_updates: int = 20
    """Of stage 3."""
    rounds: int = 15
    """Runs of each placement that is measured."""
    host_devices: int = os.cpu_count() or 1
    """Devices that the CPU is split into; training and simulation use all."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to ablation/ in there."""
    quick: bool = False
    """Two workloads, one seed of 8 seconds, little measuring: minutes on two cores."""
    training: SystemConfig = dataclasses.field(default_factory=SystemConfig)


def main(settings: AblationSettings) -> None:
    """Runs what is missing, prints and writes the table.

    Raises:
      ValueError: an option names no workload or variant, or is out of range.
    """
    if settings.quick:
        settings = dataclasses.replace(
            settings,
            workloads=settings.workloads[:2],
            seeds=1,
            budget_s=min(settings.budget_s, 8.0),
            measured_evaluations=min(settings.measured_evaluations, 20_000),
            num_updates=min(settings.num_updates, 4),
            rounds=min(settings.rounds, 9),
        )
    check_settings(settings)
    check_names("--workloads", settings.workloads, published.WORKLOADS)
    check_names("--variants", settings.variants, VARIANTS)
    use_host_devices(settings.host_devices)
    folder = settings.runs / "ablation"
    simulated = simulate(settings, folder)
    measured = measure(settings, folder) if settings.measured else []
    text = tabulate(simulated, settings)
    if measured:
        text += "\n" + tabulate_measured(measured)
    write_results(folder, "ablation", text, {"simulated": simulated, "measured": measured})
    draw(folder, simulated)


def simulate(settings: AblationSettings, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the record of every simulated run."""
    cells, budget = Cells(folder / "cells"), Budget(seconds=settings.budget_s)
    runs = MethodCells(cells)
    records = []
    for workload in settings.workloads:
        chosen = paper_problem(workload, settings.preset)
        for seed in range(settings.seeds):  # outside: drift of the machine hits all alike
            for variant in settings.variants:
                if variant in WITHOUT:
                    record = ablation_cells.without_cell(
                        cells, chosen, variant, seed, settings.budget_s
                    )
                else:
                    record = runs.get(chosen, variant, seed, budget)
                records.append({"workload": workload, **record})
        print(f"{workload}: done", flush=True)
    return records


def measure(settings: AblationSettings, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns what was measured of stage 3, a record per workload."""
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
        return [
            ablation_cells.measure_stages(
                options, make_bench(options, workload, backend, devices, here)
            )
            for workload in settings.workloads
        ]


def tabulate(records: list[dict[str, Any]], settings: AblationSettings) -> str:
    """Returns the simulated table: a row per variant, two columns per workload."""
    columns = ["variant"]
    rows = [[variant] for variant in settings.variants]
    for workload in settings.workloads:
        found = by_method(records, workload)
        paper = published.ABLATION_MS[workload]
        means = [float(found[variant].mean()) for variant in settings.variants]
        texts = [
            format_ms(mean, float(found[variant].std()))
            for variant, mean in zip(settings.variants, means, strict=True)
        ]
        columns += [workload, "paper"]
        starred = star_least(texts, means, EQUAL)
        for row, text, variant in zip(rows, starred, settings.variants, strict=True):
            row += [text, f"{paper[variant]:.1f}" if variant in paper else "-"]
    budget = Budget(seconds=settings.budget_s)
    return (
        f"Simulated on 4 P100 (ms), mean and deviation over {settings.seeds} seeds of {budget} "
        "each, compilation not counted; * is the least. Beside it the paper's figures, "
        "measured after all three stages.\n\n" + format_table(columns, rows)
    )


def tabulate_measured(records: list[dict[str, Any]]) -> str:
    """Returns the measured table: a row per workload."""
    stages = list(records[0]["measured_s"])
    rows = []
    for record in records:
        medians = [float(np.median(record["measured_s"][stage])) for stage in stages]
        texts = [
            format_ms(median, float(np.std(record["measured_s"][stage])))
            for stage, median in zip(stages, medians, strict=True)
        ]
        rows.append((record["workload"], *star_least(texts, medians, EQUAL)))
    return (
        "Measured on this machine's devices (ms), median and deviation of runs in turns; * is "
        "the least\n\n" + format_table(("workload", *stages), rows)
    )


def draw(folder: pathlib.Path, records: list[dict[str, Any]]) -> None:
    """Draws the simulated table as bars."""
    panels = []
    for workload in dict.fromkeys(record["workload"] for record in records):
        found, paper = by_method(records, workload), published.ABLATION_MS[workload]
        panels.append(
            Panel(
                title=f"{workload}, simulated, 4 P100",
                labels=tuple(found),
                height=np.array([1e3 * s.mean() for s in found.values()]),
                spread=np.array([1e3 * s.std() for s in found.values()]),
                other=np.array([paper.get(variant, np.nan) for variant in found]),
                emphasised=("doppler",),
            )
        )
    plot_bars(
        folder / "ablation.png", panels, x_label="makespan (ms)", other_label="paper, measured"
    )


if __name__ == "__main__":
    cli.run(main, AblationSettings, "What each part of DOPPLER is worth.")
