"""What learning adds to direct search: `python -m experiments.search`.

Two parts, each a table of runs/search/search.md:

- `learn`: stages 1 and 2 from scratch on the published 4-device graphs, one configuration,
  compilation included; the best placement found and the policy's greedy one, as ratios to
  the best makespan known.
- `compare`: methods at equal budgets, on cells listed here beforehand. A budget counts
  simulated executions, those of episodes and of training included.

Every makespan is the float64 oracle's. Each run is kept under runs/search/cells/ and not
repeated on the same terms.
"""

import dataclasses
import pathlib
from typing import Any, Literal

import numpy as np

from doppler_jax import cli
from doppler_jax.files import write_json_atomic
from doppler_jax.reports.tables import format_table
from experiments import search_cells
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.provenance import provenance

Part = Literal["learn", "compare"]

BEST_KNOWN_S = {
    "chain_mm_112nodes": 1200.08,
    "ffnn_192nodes": 56.6963,
    "transformer_block_215nodes": 166.743,
    "full_transformer_layer_261nodes": 122.670,
}
"""Best makespans known on 4 devices, reference costs, `parallel` and `fifo`."""

METHODS = ("doppler", "doppler+search", "list+search", "annealing", "evolution", "local_search")
"""`list+search` is the search of `doppler+search` from critical-path and HEFT placements."""

LISTED = ("critical_path", "heft", "cpop", "peft", "etf")
"""Of these the best is the table's list scheduler."""

LARGER = ("random_layered_1k", "llama_8", "random_layered_4k", "llama_32")
"""Generated problems, see `search_cells.load_problem`."""

CELLS = tuple(
    (problem, links, evaluations)
    for problems, budgets in (
        (tuple(BEST_KNOWN_S), (10_000, 100_000, 1_000_000)),
        (LARGER, (10_000, 100_000)),
    )
    for problem in problems
    for links in ("parallel", "serial")
    for evaluations in budgets
)
"""Problem, links, simulated executions: all that is compared at equal evaluations."""


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """What to run."""

    parts: tuple[Part, ...] = ("learn", "compare")
    seeds: int = 5
    budget_s: float = 120.0
    """Seconds of a run of `learn`, compilation included."""
    max_evaluations: int = 1_000_000
    """Cells of `compare` with larger budgets are left out, and the table says so."""
    larger: bool = True
    """Whether `compare` includes the generated problems of 1,000 tasks and more."""
    graphs: pathlib.Path = pathlib.Path("../shared/reference_graphs")
    """Folder with the published graphs."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to search/ in there."""


def main(settings: SearchSettings) -> None:
    """Runs what is missing, prints and writes the tables."""
    check_settings(settings)
    folder = settings.runs / "search"
    cells = Cells(folder / "cells")
    makers = {"learn": learn, "compare": compare}
    results, texts = {}, []
    for part in settings.parts:
        results[part], text = makers[part](settings, cells)
        print(text, flush=True)
        texts.append(text)
    origin = provenance()
    stated = ", ".join(f"{key} {value}" for key, value in origin.items())
    texts.append(f"Made by `experiments.search`: {stated}.\n")
    write_json_atomic(folder / "search.json", {"provenance": origin, "results": results})
    (folder / "search.md").write_text("\n".join(texts), encoding="utf-8")


def learn(settings: SearchSettings, cells: Cells) -> tuple[list[dict[str, Any]], str]:
    """Returns the runs of stages 1 and 2 from scratch, and their table."""
    results, rows = [], []
    for name, best_s in BEST_KNOWN_S.items():
        found = [
            search_cells.learn_cell(cells, settings.graphs, name, settings.budget_s, seed)
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
    """Returns the runs at equal evaluations, and their table."""
    results, rows, wins = [], [], {"list+search": 0, "annealing": 0}
    for problem, links, evaluations in chosen_cells(settings):
        found = {
            method: [
                search_cells.compare_cell(
                    cells, settings.graphs, problem, links, method, evaluations, seed
                )
                for seed in range(settings.seeds)
            ]
            for method in METHODS
        }
        listed = [
            search_cells.compare_cell(cells, settings.graphs, problem, links, method, 1, 0)
            for method in LISTED
        ]
        results += [*(cell for runs in found.values() for cell in runs), *listed]
        mean_s = {
            method: float(np.mean([cell["makespan_s"] for cell in runs]))
            for method, runs in found.items()
        }
        list_s = min(cell["makespan_s"] for cell in listed)
        for rival in wins:
            wins[rival] += mean_s["doppler+search"] <= mean_s[rival]
        least_s = min(mean_s.values())
        rows.append(
            (
                problem,
                links,
                f"{evaluations:,}",
                *(f"{mean_s[m]:.6g}{'*' if mean_s[m] == least_s else ''}" for m in METHODS),
                f"{list_s:.6g}",
            )
        )
    columns = ("problem", "links", "evaluations", *METHODS, "best list scheduler")
    counts = ", ".join(f"{rival} on {count}" for rival, count in wins.items())
    title = (
        f"Makespans in seconds, mean of {settings.seeds} seeds; * is the least of a row. "
        f"Of {len(rows)} cells, `doppler+search` is at or below {counts}.\n\n"
    )
    return results, title + format_table(columns, rows)


def chosen_cells(settings: SearchSettings) -> list[tuple[str, str, int]]:
    """Returns the cells that the settings leave in."""
    return [
        cell
        for cell in CELLS
        if cell[2] <= settings.max_evaluations and (settings.larger or cell[0] in BEST_KNOWN_S)
    ]


if __name__ == "__main__":
    cli.run(main, SearchSettings, "What learning adds to direct search.")
