"""The tables of `experiments.search`: all cells that have been kept, and what is missing."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from doppler_jax.reports.tables import format_table
from experiments import search_cells
from experiments.cells import Cells
from experiments.search_cells import METHODS, Cell

OURS = "doppler+search"
"""The method that the others are compared with."""

RIVALS = ("memetic", "local_search", "annealing", "evolution", "doppler")

OVER = RIVALS[:3]
"""Rivals with a column of how far we are above them."""

EQUAL = 1e-5
"""Relative difference up to which two makespans count as equal: simulators agree to that."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A cell, and its runs of the seeds that every method with any run of it has."""

    cell: Cell
    seeds: tuple[int, ...]
    runs: dict[str, list[dict[str, Any]]]  # by method, in the order of `seeds`
    list_s: float | None  # of the best list scheduler

    def makespans(self, method: str) -> np.ndarray:
        """Returns the makespans `[seeds]` of a method that has runs."""
        return np.array([run["makespan_s"] for run in self.runs[method]])

    def lower_bound_s(self) -> float:
        """Returns what no placement is below, by the runs of any method."""
        return max(run["lower_bound_s"] for found in self.runs.values() for run in found)

    def is_solved(self, method: str) -> bool:
        """Returns whether a method's mean is at the lower bound: nothing can be below."""
        return bool(self.makespans(method).mean() <= self.lower_bound_s() * (1 + EQUAL))


def tabulate(
    cells: Cells, wanted: Sequence[Cell], num_seeds: int
) -> tuple[list[dict[str, Any]], str]:
    """Returns all kept runs of the cells `wanted`, of one kind of budget, and their tables."""
    rows = [_load(cells, cell, num_seeds) for cell in wanted]
    done = [row for row in rows if row.seeds]
    unit = wanted[0].unit
    runs = [run for row in done for found in row.runs.values() for run in found]
    commits = sorted({run["commit"] for run in runs})
    text = (
        f"Equal {unit}. Makespans in seconds, mean over the seeds that all methods of a row "
        f"have run; * is the least of a row. Commits: {', '.join(commits) or 'none'}.\n\n"
    )
    text += format_table(_columns(unit), [_row(row) for row in done])
    text += (
        f"\n`{OURS}` against the others: cells in which the mean is below / equal / above, "
        "in how many of them the rival is at the lower bound, below / equal / above of the "
        "paired runs, and its makespan over theirs.\n\n"
    )
    amounts = sorted({cell.amount for cell in wanted})
    columns = (
        "rival",
        *(f"{amount:,}" for amount in amounts),
        "all",
        "solved",
        "runs",
        "mean (%)",
        "worst (%)",
    )
    text += format_table(columns, [_against(rival, done, amounts) for rival in RIVALS])
    return runs, text + "\n" + _missing(rows, num_seeds)


def _load(cells: Cells, cell: Cell, num_seeds: int) -> Row:
    found = {
        method: {
            seed: record
            for seed in range(num_seeds)
            if (record := search_cells.kept(cells, cell, method, seed)) is not None
        }
        for method in METHODS
    }
    found = {method: records for method, records in found.items() if records}
    common = set.intersection(*map(set, found.values())) if found else set()
    seeds = tuple(sorted(common))
    runs = {method: [records[s] for s in seeds] for method, records in found.items()}
    list_s = search_cells.kept_listed(cells, cell.graph, cell.links)
    return Row(cell=cell, seeds=seeds, runs=runs, list_s=list_s)


def _columns(unit: str) -> tuple[str, ...]:
    timed = ("first run, s",) if unit == "seconds" else ()
    over = tuple(f"over {rival} (%)" for rival in OVER)
    return (
        "problem",
        "links",
        unit,
        "seeds",
        *METHODS,
        "list scheduler",
        "lower bound",
        *over,
        *timed,
    )


def _row(row: Row) -> tuple[str, ...]:
    means = {method: float(np.mean(row.makespans(method))) for method in row.runs}
    least_s = min(means.values())
    texts = [
        f"{means[m]:.6g}{'*' if means[m] <= least_s * (1 + EQUAL) else ''}"
        if m in means
        else "-"
        for m in METHODS
    ]
    over = [
        f"{100 * (means[OURS] / means[rival] - 1):+.2f}" if {OURS, rival} <= set(means) else "-"
        for rival in OVER
    ]
    cell = row.cell
    columns = [cell.graph, cell.links, f"{cell.amount:,}", str(len(row.seeds)), *texts]
    columns += ["-" if row.list_s is None else f"{row.list_s:.6g}"]
    columns += [f"{row.lower_bound_s():.6g}", *over]
    if cell.unit == "seconds":
        first = [run["first_s"] for run in row.runs.get(OURS, [])]
        columns.append(f"{max(first):.0f}" if first else "-")
    return tuple(columns)


def _against(rival: str, rows: list[Row], amounts: list[int]) -> tuple[str, ...]:
    """Returns the row of a rival: how often our mean is below, equal to and above its."""
    both = [row for row in rows if {OURS, rival} <= set(row.runs)]
    pairs = [(row, row.makespans(OURS), row.makespans(rival)) for row in both]
    means = [(row, np.array([ours.mean() / theirs.mean()])) for row, ours, theirs in pairs]
    counts = [
        _count([ratio for row, ratio in means if row.cell.amount == amount])
        for amount in amounts
    ]
    ratios = [ratio for _, ratio in means]
    over = 100 * (np.concatenate(ratios) - 1) if ratios else None
    return (
        rival,
        *counts,
        _count(ratios),
        str(sum(row.is_solved(rival) for row in both)) if both else "-",
        _count([ours / theirs for _, ours, theirs in pairs]),
        "-" if over is None else f"{over.mean():+.2f}",
        "-" if over is None else f"{over.max():+.2f}",
    )


def _count(ratios: list[np.ndarray]) -> str:
    if not ratios:
        return "-"
    ratio = np.concatenate(ratios)
    below, above = int((ratio < 1 - EQUAL).sum()), int((ratio > 1 + EQUAL).sum())
    return f"{below} / {len(ratio) - below - above} / {above}"


def _missing(rows: list[Row], num_seeds: int) -> str:
    """Returns the sentence that names the cells without all runs."""
    missing: dict[str, list[str]] = {}
    for row in rows:
        text = f"{row.cell.amount:,}"
        absent = [method for method in METHODS if method not in row.runs]
        if absent and row.seeds:
            text += f" ({', '.join(absent)})"
        elif 0 < len(row.seeds) < num_seeds:
            text += f" ({num_seeds - len(row.seeds)} of {num_seeds} seeds)"
        if absent or len(row.seeds) < num_seeds:
            missing.setdefault(f"{row.cell.graph} {row.cell.links}", []).append(text)
    texts = [f"{name}: {', '.join(cells)}" for name, cells in missing.items()]
    return f"Not run: {'; '.join(texts) or 'nothing'}.\n"
