"""What learning adds to direct search: `python -m experiments.search`.

Methods at equal numbers of simulated executions, those of episodes and of training included,
and at equal seconds of a cold call; `--warm-seconds` for seconds that begin when everything
has been compiled. `memetic` is the search of `doppler+search` from critical-path and HEFT
placements.
"""

from collections.abc import Sequence

import numpy as np

from doppler_jax.reports.tables import format_table
from experiments.catalogue import BEST_KNOWN_S, SIZED
from experiments.grid import (
    EQUAL,
    Cell,
    Context,
    MethodSettings,
    Page,
    Record,
    Spend,
    Study,
    means_table,
    method_cells,
)

METHODS = ("doppler", "doppler+search", "memetic", "local_search", "annealing", "evolution")

LISTED = ("critical_path", "heft", "cpop", "peft", "etf")
"""Of these the best is the tables' list scheduler."""

OURS = "doppler+search"
"""The method that the others are compared with."""


def cells(context: Context[MethodSettings]) -> list[Cell]:
    """Returns the list schedulers' cells, then those of all methods and budgets."""
    asked = context.settings
    listed = method_cells(context, asked.problems, LISTED, [Spend()], links=asked.links)
    return listed + method_cells(
        context, asked.problems, asked.method, asked.spends(), asked.seeds, asked.links
    )


def report(context: Context[MethodSettings], records: list[Record]) -> Page:
    """Returns makespans by problem and budget, and how often ours is below the others'."""
    listed: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record["method"] in LISTED and "makespan_s" in record:
            where = record["problem"], record["links"]
            listed.setdefault(where, []).append(record["makespan_s"])
    runs = [record for record in records if record["method"] in context.settings.method]
    if not runs:
        return Page("No run yet.")
    table = means_table(
        runs,
        ("problem", "links", "budget"),
        extra={
            "list scheduler": lambda row: (
                f"{min(listed[row[0]['problem'], row[0]['links']]):.6g}"
            ),
            "lower bound": lambda row: f"{max(r.get('lower_bound_s', 0.0) for r in row):.6g}",
        },
    )
    columns = ("rival", "below", "equal", "above", "runs below / equal / above", "mean (%)")
    return Page(
        "Makespans (s), mean and deviation over seeds; * is the least of a row. Evaluations "
        "are simulated executions; seconds are of a cold call, compilation included, unless "
        f"they are named warm.\n\n{table}\n`{OURS}` against the others: rows whose mean is "
        f"below, equal, above; the same of paired runs.\n\n"
        f"{format_table(columns, against(runs))}"
    )


def against(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Returns a row per rival: how often our makespans are below, equal to, above its."""
    found: dict[tuple[str, ...], dict[str, dict[int, float]]] = {}
    for record in records:
        if "makespan_s" in record:
            names = ("problem", "links", "evaluations", "seconds", "warm")
            row = found.setdefault(tuple(str(record.get(name)) for name in names), {})
            row.setdefault(record["method"], {})[record["seed"]] = record["makespan_s"]
    rows: list[tuple[str, ...]] = []
    for rival in dict.fromkeys(record["method"] for record in records):
        ratios = [
            np.array([row[OURS][s] / row[rival][s] for s in row[OURS] if s in row[rival]])
            for row in found.values()
            if rival != OURS and {OURS, rival} <= set(row)
        ]
        if ratios:
            means = np.array([ratio.mean() for ratio in ratios])
            runs = " / ".join(_counts(np.concatenate(ratios)))
            rows.append((rival, *_counts(means), runs, f"{100 * (means.mean() - 1):+.2f}"))
    return rows


def _counts(ratio: np.ndarray) -> tuple[str, str, str]:
    below, above = int((ratio < 1 - EQUAL).sum()), int((ratio > 1 + EQUAL).sum())
    return str(below), str(len(ratio) - below - above), str(above)


STUDY = Study(
    name="search",
    title="What learning adds to direct search",
    settings=MethodSettings(
        problems=(*BEST_KNOWN_S, *SIZED),
        method=METHODS,
        links=("parallel", "serial"),
        evaluations=(10_000, 100_000),
        seconds=(30.0,),
    ),
    cells=cells,
    report=report,
    quick={
        "problems": ("chain_mm_112nodes",),
        "links": ("parallel",),
        "evaluations": (1000,),
        "seconds": (2.0,),
        "seeds": 2,
    },
)

if __name__ == "__main__":
    STUDY.command()
