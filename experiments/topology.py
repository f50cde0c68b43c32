"""Where tensors go on another topology: `python -m experiments.topology --quick`.

A policy learns on 4 equal devices and then places the same graphs on 8 devices in two NVLink
islands, as it is (zero-shot) and after 2,000 episodes there. Reads of tensors stay inside a
device, inside an island, or go across; shares are of bytes. The folder runs/topology/ gets a
table, its records, the placements as a picture, and all that is needed to go on where a run
was stopped.
"""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from doppler_jax import cli
from doppler_jax.reports.placements import plot_placements
from doppler_jax.reports.tables import format_table
from experiments import published
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.method_cells import check_names, paper_problem
from experiments.problems import Chosen, use_host_devices
from experiments.results import format_ms, write_results
from experiments.topology_cells import PLACERS, topology_cell

COLUMNS = (
    "workload",
    "placement",
    "makespan (ms)",
    "inside a device",
    "inside an island",
    "across",
    "not across",
    "paper",
)


@dataclasses.dataclass(frozen=True)
class TopologySettings:
    """What to compare."""

    workloads: tuple[str, ...] = published.WORKLOADS
    preset: str = "paper"
    """Sizes of the workloads."""
    source: str = "p100x4"
    """Cluster that the policy learns on."""
    target: str = "v100x8"
    """Cluster in islands that it is used on."""
    evaluations: int = 200_000
    """Placements that learning on the source simulates."""
    episodes: int = 2000
    """Of fine-tuning on the target."""
    samples: int = 256
    """Placements drawn from a policy, of which the best counts."""
    seeds: int = 5
    host_devices: int = os.cpu_count() or 1
    """Devices that the CPU is split into; training uses all."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to topology/ in there."""
    quick: bool = False
    """Two workloads, one seed, 20,000 executions on the source: minutes on two cores."""


def main(settings: TopologySettings) -> None:
    """Runs what is missing, prints and writes the table.

    Raises:
      ValueError: an option names no workload or cluster, or is out of range.
    """
    if settings.quick:
        settings = dataclasses.replace(
            settings,
            workloads=settings.workloads[:2],
            evaluations=min(settings.evaluations, 20_000),
            seeds=1,
        )
    check_settings(settings)
    check_names("--workloads", settings.workloads, published.WORKLOADS)
    use_host_devices(settings.host_devices)
    folder = settings.runs / "topology"
    cells = Cells(folder / "cells")
    records: list[dict[str, Any]] = []
    pictures = []
    for workload in settings.workloads:
        source = paper_problem(workload, settings.preset, settings.source)
        target = paper_problem(workload, settings.preset, settings.target)
        found = [
            {
                "workload": workload,
                **topology_cell(
                    cells,
                    source,
                    target,
                    seed=seed,
                    evaluations=settings.evaluations,
                    episodes=settings.episodes,
                    samples=settings.samples,
                ),
            }
            for seed in range(settings.seeds)
        ]
        records += found
        pictures += _pictures(workload, target, found[0])
        print(f"{workload}: done", flush=True)
    write_results(folder, "topology", tabulate(records, settings), records)
    plot_placements(folder / "topology.png", pictures, num_devices=target.costs.num_devices)


def tabulate(records: list[dict[str, Any]], settings: TopologySettings) -> str:
    """Returns the table: means over the seeds, a row per workload and placer."""
    rows = []
    for workload in dict.fromkeys(record["workload"] for record in records):
        runs = [record for record in records if record["workload"] == workload]
        for placer in PLACERS:
            seconds = np.array([run["makespan_s"][placer] for run in runs])
            shares = np.array([run["shares"][placer] for run in runs]).mean(axis=0)
            paper = published.INSIDE_SHARE.get(placer)
            rows.append(
                (
                    workload,
                    placer,
                    format_ms(float(seconds.mean()), float(seconds.std())),
                    *(f"{share:.1%}" for share in shares),
                    f"{shares[:2].sum():.1%}",
                    "-" if paper is None else f"{paper:.1%}",
                )
            )
    return (
        f"From {settings.source} to {settings.target}: makespans and shares of the bytes that "
        f"tasks read, {settings.seeds} seeds, {settings.episodes:,} episodes of fine-tuning, "
        f"best of {settings.samples} samples and of what fine-tuning met. The paper's share is "
        "taken to be of what does not go across, of a graph that it does not name.\n\n"
        + format_table(COLUMNS, rows)
    )


def _pictures(
    workload: str, target: Chosen, record: dict[str, Any]
) -> list[tuple[str, Any, list[int]]]:
    return [
        (f"{workload}, {placer}", target.graph, record["placements"][placer])
        for placer in PLACERS[1:]
    ]


if __name__ == "__main__":
    cli.run(main, TopologySettings, "Traffic on two islands, before and after fine-tuning.")
