"""What learning adds to direct search: `python -m experiments.search`.

Methods at equal numbers of simulated executions, those of episodes and of training included,
and at equal seconds of a cold call, compilation included. The queue is `fifo`, the paper's
runtime, unless `--queue` says otherwise. Makespans are mean and deviation over
seeds; * is the least of a row. `lns` is the search of `doppler+search` from critical-path
and HEFT placements. `doppler+search` against the others: rows whose mean is below, equal,
above; the same of paired runs. The curves are the best makespans so far.
"""

import pathlib
from collections.abc import Sequence
from functools import partial

import numpy as np

from doppler_jax.reports.pictures import Line, plot_curves
from experiments.catalogue import PUBLISHED, SIZED
from experiments.grid import Cell, Context, Page, Record, Study
from experiments.methods import MethodSettings, Spend, method_cells
from experiments.tables import EQUAL, by, means_table, table

METHODS = ("doppler", "doppler+search", "lns", "annealing")

LISTED = ("critical_path", "heft", "cpop", "peft", "etf")
"""Of these the best is the tables' list scheduler."""

OURS = "doppler+search"
"""The method that the others are compared with."""


def cells(context: Context[MethodSettings]) -> list[Cell]:
    """Returns the list schedulers' cells, then those of all methods and budgets."""
    asked = context.settings
    run = partial(method_cells, context, asked.problems, links=asked.links, queue=asked.queue)
    return run(LISTED, [Spend()]) + run(asked.method, asked.spends(), asked.seeds)


def report(context: Context[MethodSettings], records: list[Record]) -> Page:
    """Returns makespans by problem and budget, and how often ours is below the others'."""
    found = [r for r in records if r["method"] in LISTED and "makespan_s" in r]
    listed = {
        where: min(r["makespan_s"] for r in here)
        for where, here in by(found, "problem", "links").items()
    }
    runs = [record for record in records if record["method"] in context.settings.method]
    extra = {
        "list scheduler": lambda row: f"{listed[row[0]['problem'], row[0]['links']]:.6g}",
        "lower bound": lambda row: f"{max(r.get('lower_bound_s', 0.0) for r in row):.6g}",
    }
    curves = [run for run in runs if "curve" in run and "evaluations" in run]
    makespans = means_table(runs, ("problem", "links", "budget"), extra=extra)
    texts = {"Makespans (s)": makespans, f"`{OURS}` against the others": table(against(runs))}
    return Page(texts, {"curves.png": partial(draw_curves, curves)} if curves else {})


def against(records: Sequence[Record]) -> list[Record]:
    """Returns a row per rival: how often our makespans are below, equal to, above its."""
    rows: list[dict[str, dict[int, float]]] = []  # makespans by method and seed
    for group in by(records, "problem", "links", "budget").values():
        found = by([r for r in group if "makespan_s" in r], "method")
        rows.append(
            {m: {r["seed"]: r["makespan_s"] for r in runs} for m, runs in found.items()}
        )
    counted = []
    for rival in by(records, "method"):
        ratios = [
            np.array([row[OURS][s] / row[rival][s] for s in row[OURS] if s in row[rival]])
            for row in rows
            if rival != OURS and {OURS, rival} <= set(row)
        ]
        if ratios:
            means = np.array([ratio.mean() for ratio in ratios])
            counts = {"rows": _counts(means), "runs": _counts(np.concatenate(ratios))}
            mean = {"mean (%)": 100 * (float(means.mean()) - 1)}
            counted.append({"rival": rival, **counts, **mean})
    return counted


def _counts(ratio: np.ndarray) -> str:
    below, above = int((ratio < 1 - EQUAL).sum()), int((ratio > 1 + EQUAL).sum())
    return f"{below} / {len(ratio) - below - above} / {above}"


def draw_curves(records: Sequence[Record], path: pathlib.Path) -> None:
    """Draws each method's mean best makespan by evaluations, with its least and greatest."""
    panels: dict[str, list[Line]] = {}
    for (problem, links, method), found in by(records, "problem", "links", "method").items():
        runs = [record["curve"] for record in found]
        first, last = max(spent[0] for spent, _, _ in runs), max(c[0][-1] for c in runs)
        x = np.unique(np.geomspace(first, max(last, first), 40).astype(np.int64))
        y = np.array([_best_by(curve, x) for curve in runs])
        line = Line(method, x, y.mean(axis=0), y.min(axis=0), y.max(axis=0))
        panels.setdefault(f"{problem}, {links} links", []).append(line)
    plot_curves(
        path, list(panels.items()), x_label="simulated executions", y_label="best makespan (s)"
    )


def _best_by(curve: Sequence[Sequence[float]], evaluations: np.ndarray) -> np.ndarray:
    """Returns the best makespans `[K]` that a run had after so many evaluations `[K]`."""
    spent, _, makespan_s = (np.array(row) for row in curve)
    return makespan_s[np.searchsorted(spent, evaluations, side="right") - 1]


SETTINGS = MethodSettings(
    problems=(*PUBLISHED, *SIZED), method=METHODS, links=("parallel", "serial"),
    evaluations=(10_000, 100_000), seconds=(30.0,),
)  # fmt: skip

QUICK = {
    "problems": ("chain_mm_112nodes",), "links": ("parallel",), "evaluations": (1000,),
    "seconds": (2.0,), "seeds": 2,
}  # fmt: skip

STUDY = Study("search", SETTINGS, cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
