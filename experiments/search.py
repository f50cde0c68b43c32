"""What learning adds to direct search: `python -m experiments.search`.

Three parts, each a table of runs/search/search.md:

- `learn`: stages 1 and 2 from scratch on the published 4-device graphs, one configuration,
  compilation included; the best placement found and the policy's greedy one, as ratios to
  the best makespan known.
- `compare`: methods at equal numbers of simulated executions, those of episodes and of
  training included.
- `timed`: the same at equal seconds, which begin after everything was compiled.

The cells of the last two are listed here beforehand. Options choose some of them to run;
each run is kept under runs/search/cells/, and the tables show all that has been kept and
name what is missing. runs/search/runs.csv has a line for each run; docs/search_runs.csv is
that of the tables in docs/search.md, and `--kept` goes on from it. Every makespan
is the float64 oracle's.
"""

import dataclasses
import os
import pathlib
from typing import Any, Literal

import numpy as np

from doppler_jax import cli
from doppler_jax.files import write_json_atomic
from doppler_jax.reports.tables import format_table
from experiments import search_cells, search_tables
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.problems import use_host_devices
from experiments.provenance import provenance
from experiments.search_cells import METHODS, Cell
from experiments.search_runs import take_runs, write_runs

Part = Literal["learn", "compare", "timed"]
Links = Literal["parallel", "serial"]

BEST_KNOWN_S = {
    "chain_mm_112nodes": 1200.08,
    "ffnn_192nodes": 56.6963,
    "transformer_block_215nodes": 166.743,
    "full_transformer_layer_261nodes": 122.670,
}
"""Best makespans known on 4 devices, reference costs, `parallel` and `fifo`."""

GRAPHS = (*BEST_KNOWN_S, "random_layered_1k", "llama_8", "random_layered_4k", "llama_32")
"""The last four are generated, see `search_cells.load_problem`."""

LINKS: tuple[Links, ...] = ("parallel", "serial")

SEEDS = 5

BUDGETS = {"evaluations": (10_000, 100_000, 1_000_000), "seconds": (30, 120)}

CELLS = tuple(
    Cell(graph, links, unit, amount)
    for unit, amounts in BUDGETS.items()
    for graph in GRAPHS
    for links in LINKS
    for amount in amounts
)
"""All that is compared."""


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """What to run."""

    parts: tuple[Part, ...] = ("learn", "compare", "timed")
    graphs: tuple[str, ...] = GRAPHS
    links: tuple[Links, ...] = LINKS
    methods: tuple[str, ...] = METHODS
    budgets: tuple[int, ...] = BUDGETS["evaluations"]
    """Simulated executions of a run of `compare`."""
    seconds: tuple[int, ...] = BUDGETS["seconds"]
    """Seconds of a run of `timed`."""
    seeds: int = SEEDS
    budget_s: float = 120.0
    """Seconds of a run of `learn`, compilation included."""
    host_devices: int = os.cpu_count() or 1
    """Devices that the CPU is split into; training and simulation use all."""
    reference: pathlib.Path = pathlib.Path("../shared/reference_graphs")
    """Folder with the published graphs."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to search/ in there."""
    kept: pathlib.Path | None = None
    """A runs.csv of earlier: what it holds of `compare` and `timed` is not run again."""


def main(settings: SearchSettings) -> None:
    """Runs what is missing, prints and writes the tables."""
    check_settings(settings)
    _check_choices(settings)
    use_host_devices(settings.host_devices)
    folder = settings.runs / "search"
    cells = Cells(folder / "cells")
    if settings.kept is not None:
        take_runs(settings.kept, cells)
    results: dict[str, Any] = {}
    texts = []
    makers = {"learn": learn, "compare": compare, "timed": timed}
    for part in (p for p in makers if p in settings.parts):
        results[part], text = makers[part](settings, cells)
        print(text, flush=True)
        texts.append(text)
    origin = provenance()
    stated = ", ".join(f"{key} {value}" for key, value in origin.items())
    texts.append(f"Made by `experiments.search`: {stated}.\n")
    write_json_atomic(folder / "search.json", {"provenance": origin, "results": results})
    write_runs(folder / "runs.csv", cells, CELLS, max(settings.seeds, SEEDS))
    (folder / "search.md").write_text("\n".join(texts), encoding="utf-8")


def learn(settings: SearchSettings, cells: Cells) -> tuple[list[dict[str, Any]], str]:
    """Returns the runs of stages 1 and 2 from scratch, and their table."""
    results, rows = [], []
    for name in (graph for graph in settings.graphs if graph in BEST_KNOWN_S):
        best_s = BEST_KNOWN_S[name]
        found = [
            search_cells.learn_cell(cells, settings.reference, name, settings.budget_s, seed)
            for seed in range(settings.seeds)
        ]
        results += found
        best = np.array([cell["makespan_s"] for cell in found]) / best_s
        greedy = np.array([cell["greedy_s"] for cell in found]) / best_s
        rows.append(
            (
                name,
                f"{best_s:g}",
                f"{best.mean():.4f}",
                f"{best.max():.4f}",
                f"{greedy.mean():.4f}",
                f"{greedy.max():.4f}",
                f"{np.mean([cell['seconds'] for cell in found]):.0f}",
                f"{np.mean([cell['evaluations'] for cell in found]):,.0f}",
            )
        )
    columns = (
        "graph",
        "best known",
        "best, mean",
        "worst",
        "greedy, mean",
        "worst",
        "seconds",
        "evaluations",
    )
    title = f"Stages 1 and 2 from scratch, {settings.seeds} seeds, over the best known\n\n"
    return results, title + format_table(columns, rows)


def compare(settings: SearchSettings, cells: Cells) -> tuple[list[dict[str, Any]], str]:
    """Returns all runs kept at equal evaluations, and their tables."""
    return _compare(settings, cells, "evaluations", settings.budgets)


def timed(settings: SearchSettings, cells: Cells) -> tuple[list[dict[str, Any]], str]:
    """Returns all runs kept at equal seconds, and their tables."""
    return _compare(settings, cells, "seconds", settings.seconds)


def _compare(
    settings: SearchSettings, cells: Cells, unit: str, amounts: tuple[int, ...]
) -> tuple[list[dict[str, Any]], str]:
    """Runs the chosen cells of one kind of budget; tabulates whatever has been kept."""
    for graph in settings.graphs:
        for links in settings.links:
            for method in search_cells.LISTED:
                search_cells.listed_cell(cells, settings.reference, graph, links, method)
    for amount in sorted(amounts):
        for graph in settings.graphs:
            for links in settings.links:
                cell = Cell(graph, links, unit, amount)
                for seed in range(settings.seeds):
                    for method in settings.methods:
                        search_cells.compare_cell(cells, settings.reference, cell, method, seed)
                print(f"{graph}, {links}, {amount:,} {unit}: done", flush=True)
    wanted = [cell for cell in CELLS if cell.unit == unit]
    return search_tables.tabulate(cells, wanted, max(settings.seeds, SEEDS))


def _check_choices(settings: SearchSettings) -> None:
    """Raises `ValueError` where an option names what no cell has."""
    for option, chosen, known in (
        ("--graphs", settings.graphs, GRAPHS),
        ("--methods", settings.methods, METHODS),
        ("--budgets", settings.budgets, BUDGETS["evaluations"]),
        ("--seconds", settings.seconds, BUDGETS["seconds"]),
    ):
        for choice in chosen:
            if choice not in known:
                listed = ", ".join(map(str, known))
                raise ValueError(f"{option}: unknown {choice!r}; known: {listed}")


if __name__ == "__main__":
    cli.run(main, SearchSettings, "What learning adds to direct search.")
