"""Critical path against the Standard Task Graph set: `python -m experiments.neutral`.

Forty graphs of other people's, without communication, on 2 to 16 equal devices: how far
above the published optima are the makespans of critical path's placements, simulated with
the queue `fifo`? (Its list schedules, which keep their own order, can be shorter.)
"""

import csv
import dataclasses
import pathlib
from typing import Any

import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.files import read_text, write_json_atomic
from doppler_jax.reports.tables import format_table
from experiments.provenance import provenance

DEVICES = (2, 4, 8, 16)
COLUMNS = (
    "devices",
    "graphs",
    "optimum proven",
    "best known met",
    "mean gap (%)",
    "median gap (%)",
    "worst gap (%)",
)


@dataclasses.dataclass(frozen=True)
class NeutralSettings:
    """Where the graphs are and where results go."""

    graphs: pathlib.Path = pathlib.Path("../shared/neutral_graphs")
    """Folder with `stg50/`: the .stg files and Case50_P_OPT.csv."""
    runs: pathlib.Path = pathlib.Path("runs")
    """neutral.json and neutral.md go here."""


@dataclasses.dataclass(frozen=True)
class Published:
    """What is known of a graph on some number of equal devices."""

    bound: float  # no placement is shorter
    best: float  # makespan of the best known; proven optimal where equal to the bound


def main(settings: NeutralSettings) -> None:
    """Places every graph on every number of devices, prints and writes the gaps."""
    folder = settings.graphs / "stg50"
    results = [result for d in DEVICES for result in compare(folder, d)]
    table = format_table(
        COLUMNS,
        [_summarise(d, [r for r in results if r["devices"] == d]) for d in DEVICES],
    )
    settings.runs.mkdir(parents=True, exist_ok=True)
    write_json_atomic(
        settings.runs / "neutral.json",
        {"provenance": provenance(), "method": "critical_path", "results": results},
    )
    (settings.runs / "neutral.md").write_text(table, encoding="utf-8")
    print(
        "Critical path (queue fifo) above the best known, Standard Task Graph set, 50 tasks:\n"
    )
    print(table)
    print(f"written to {settings.runs}/: neutral.json, neutral.md")


def compare(folder: pathlib.Path, num_devices: int) -> list[dict[str, Any]]:
    """Returns critical path's makespan beside what is published, per graph of a folder.

    Raises:
      ValueError: there is no graph, or a graph without published makespan.
    """
    published = load_published(folder / f"Case50_{num_devices}_OPT.csv")
    paths = sorted(folder.glob("*.stg"))
    if not paths:
        raise ValueError(f"{folder}: there is no .stg file")
    results = []
    for path in paths:
        if path.name not in published:
            raise ValueError(f"{path}: no makespan is published for {num_devices} devices")
        known = published[path.name]
        graph, costs = dj.from_edge_delays(*dj.load_stg(path), num_devices=num_devices)
        placed = dj.place(graph, costs, method="critical_path")
        results.append(
            {
                "graph": path.stem,
                "devices": num_devices,
                "makespan": placed.makespan_s,
                **dataclasses.asdict(known),
                "gap": placed.makespan_s / known.best - 1,
            }
        )
    return results


def load_published(path: pathlib.Path) -> dict[str, Published]:
    """Returns what a `Case50_P_OPT.csv` knows, by the graph's file name.

    Its columns are file, devices, and the optimum; or, where that is not known, a lower
    bound and the best known makespan.

    Raises:
      ValueError: the file cannot be read, or a line is no such row.
    """
    published = {}
    for number, row in enumerate(csv.reader(read_text(path).splitlines()), start=1):
        try:
            name, _, bound, *rest = row
            (best,) = rest or (bound,)
            known = Published(float(bound), float(best))
        except ValueError as error:
            raise ValueError(
                f"{path}: line {number}: expected file, devices, optimum or bound and best "
                f"known, found {row}"
            ) from error
        published[name.rsplit("/", 1)[-1]] = known
    return published


def _summarise(num_devices: int, results: list[dict[str, Any]]) -> tuple[str, ...]:
    gaps = 100 * np.array([result["gap"] for result in results])
    return (
        str(num_devices),
        str(len(results)),
        str(sum(result["bound"] == result["best"] for result in results)),
        str(sum(result["makespan"] == result["best"] for result in results)),
        f"{gaps.mean():.2f}",
        f"{np.median(gaps):.2f}",
        f"{gaps.max():.2f} ({results[int(gaps.argmax())]['graph']})",
    )


if __name__ == "__main__":
    cli.run(main, NeutralSettings, "Critical path's gap to published optima.")
