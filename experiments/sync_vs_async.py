"""What barriers cost: `python -m experiments.sync_vs_async --quick`.

The same placements run work-conserving and bulk-synchronous: simulated on 4 P100, and with
`--measured` by the engine on this machine's devices. The paper's ratios stand beside. The
folder runs/sync_vs_async/ gets a table, its records, a picture of both schedules of each
workload, and all that is needed to go on where a run was stopped.
"""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.reports.tables import format_table
from experiments import published
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.engine_comparisons import sync_cell
from experiments.isolation import BackendChoice, choose_backend
from experiments.machine import Machine
from experiments.method_cells import Budget, MethodCells, check_names, paper_problem
from experiments.problems import Chosen, use_host_devices
from experiments.results import format_ms, write_results

COLUMNS = (
    "workload",
    "placement of",
    "where",
    "work-conserving (ms)",
    "bulk-synchronous (ms)",
    "ratio",
    "paper's ratio",
)


@dataclasses.dataclass(frozen=True)
class SyncSettings:
    """What to compare."""

    workloads: tuple[str, ...] = published.WORKLOADS
    methods: tuple[str, ...] = ("critical_path", "heft", "enumerative", "doppler")
    """Whose placements are run in both ways."""
    preset: str = "paper"
    """Sizes of what is simulated."""
    evaluations: int = 200_000
    """Placements that a method simulates."""
    seed: int = 0
    measured: bool = False
    """Whether to run critical path's placements on this machine's devices too."""
    backend: BackendChoice = "auto"
    """Of the engine, as for stage 3."""
    num_devices: int = 2
    """Devices that are measured on."""
    rounds: int = 15
    """Measured runs of either kind."""
    host_devices: int = os.cpu_count() or 1
    """Devices that the CPU is split into."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to sync_vs_async/ in there."""
    quick: bool = False
    """10,000 simulated executions and small workloads to measure: minutes on two cores."""


def main(settings: SyncSettings) -> None:
    """Runs what is missing, prints and writes the table.

    Raises:
      ValueError: an option names no workload or method, or is out of range.
    """
    if settings.quick:
        settings = dataclasses.replace(
            settings,
            evaluations=min(settings.evaluations, 10_000),
            rounds=min(settings.rounds, 7),
        )
    check_settings(settings)
    check_names("--workloads", settings.workloads, published.WORKLOADS)
    check_names("--methods", settings.methods, dj.list_methods())
    use_host_devices(settings.host_devices)
    folder = settings.runs / "sync_vs_async"
    cells = MethodCells(Cells(folder / "cells"))
    records = []
    for workload in settings.workloads:
        chosen = paper_problem(workload, settings.preset)
        found = [_simulate(cells, settings, workload, chosen, m) for m in settings.methods]
        draw(folder, workload, chosen, found)
        records += found
    if settings.measured:
        records += measure(settings, folder)
    text = (
        "The same placement work-conserving and level by level with barriers. Simulated on 4 "
        "P100, measured on this machine's devices. The paper measured its enumerative "
        "placements on 4 P100.\n\n" + format_table(COLUMNS, [table_row(r) for r in records])
    )
    write_results(folder, "sync_vs_async", text, records)


def measure(settings: SyncSettings, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of critical path's placements, run by the engine."""
    backend = choose_backend(settings.backend, settings.num_devices)
    records = []
    with Machine(settings.num_devices) as machine:
        for workload in settings.workloads:
            terms = {
                "backend": backend,
                "devices": settings.num_devices,
                "rounds": settings.rounds,
                "small": settings.quick,
            }

            def make(workload: str = workload) -> dict[str, Any]:
                path = folder / f"calibration-{workload}-{settings.quick:d}.json"
                return sync_cell(
                    machine, backend, path, workload, settings.rounds, settings.quick
                )

            found = Cells(folder / "cells").get(f"measured-{workload}", terms, make)
            seconds = found["measured_s"]
            records.append(
                {"workload": workload, "method": "critical_path", **found, **seconds}
            )
    return records


def table_row(record: dict[str, Any]) -> tuple[str, ...]:
    """Returns the row of one placement."""
    conserving_s, synchronous_s = record["work_conserving"], record["bulk_synchronous"]
    paper = published.SYNCHRONOUS_MS.get(record["workload"])
    is_measured = "measured_s" in record
    ratio = record["measured_ratio"] if is_measured else synchronous_s / conserving_s
    return (
        record["workload"],
        record["method"],
        "measured" if is_measured else "simulated",
        format_ms(conserving_s, 0.0),
        format_ms(synchronous_s, 0.0),
        f"{ratio:.3f}",
        f"{paper['bulk_synchronous'] / paper['work_conserving']:.3f}" if paper else "-",
    )


def draw(
    folder: pathlib.Path, workload: str, chosen: Chosen, records: list[dict[str, Any]]
) -> None:
    """Draws both schedules of the placement that is best when work-conserving."""
    assert chosen.sharded is not None
    best = min(records, key=lambda record: record["work_conserving"])
    names = chosen.sharded.names
    panels = [
        (f"{workload}, {best['method']}, {mode.replace('_', '-')}", schedule, names)
        for mode, schedule in both(chosen, best["placement"]).items()
    ]
    path = folder / f"{workload}.png"
    dj.plot_gantt(path, panels, num_devices=chosen.costs.num_devices)


def both(chosen: Chosen, placement: list[int]) -> dict[str, dj.Schedule]:
    """Returns the schedules of a placement `[N]` in both modes."""
    places = np.array(placement)
    return {
        "work_conserving": dj.simulate_oracle(chosen.graph, chosen.costs, places),
        "bulk_synchronous": dj.simulate_synchronous(chosen.graph, chosen.costs, places),
    }


def _simulate(
    cells: MethodCells, settings: SyncSettings, workload: str, chosen: Chosen, method: str
) -> dict[str, Any]:
    """Returns the record of a method's placement."""
    budget = Budget(evaluations=settings.evaluations)
    placement = cells.get(chosen, method, settings.seed, budget)["placement"]
    seconds = {mode: dj.makespan_s(s) for mode, s in both(chosen, placement).items()}
    return {"workload": workload, "method": method, "placement": placement, **seconds}


if __name__ == "__main__":
    cli.run(main, SyncSettings, "What barriers cost, simulated and measured.")
