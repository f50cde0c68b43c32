"""The text of `experiments.table`: two tables, and what can be said of ours."""

from typing import Any

import numpy as np

from doppler_jax.reports.tables import format_table
from experiments import published
from experiments.results import format_ms, star_least

OURS = ("doppler", "doppler+search", "doppler_sys")

CLOSE = 0.01
"""Relative excess over the best up to which a method counts as within reach of it."""

EQUAL = 1e-5
"""Relative difference up to which two makespans count as equal: simulators agree to that."""


def by_method(records: list[dict[str, Any]], workload: str) -> dict[str, np.ndarray]:
    """Returns the makespans `[seeds]` in seconds of each method on a workload."""
    found: dict[str, list[float]] = {}
    for record in records:
        if record["workload"] == workload:
            found.setdefault(record["method"], []).append(record["makespan_s"])
    return {method: np.array(values) for method, values in found.items()}


def tabulate(
    simulated: list[dict[str, Any]],
    measured: list[dict[str, Any]],
    budget: str,
    evaluations: int,
) -> str:
    """Returns both tables with their verdicts.

    Args:
      simulated: records of `experiments.table.simulate`.
      measured: records of `experiments.table.measure`; may be none.
      budget: of a simulated run, as text.
      evaluations: placements that a method simulated for what was measured.
    """
    workloads = list(dict.fromkeys(record["workload"] for record in simulated))
    seconds = {workload: by_method(simulated, workload) for workload in workloads}
    means = {w: {m: float(s.mean()) for m, s in found.items()} for w, found in seconds.items()}
    seeds = len({record["seed"] for record in simulated})
    text = (
        f"Simulated on 4 P100 (ms), mean and deviation over {seeds} seeds of {budget} each, "
        "compilation not counted; * is the least. Beside it the paper's figures, measured.\n\n"
        + format_table(*_table(seconds, means))
        + f"\n{verdict('simulated', means)}\n"
    )
    if not measured:
        return text
    seconds = {
        record["workload"]: {m: np.array(s) for m, s in record["measured_s"].items()}
        for record in measured
    }
    medians = {
        w: {m: float(np.median(s)) for m, s in found.items()} for w, found in seconds.items()
    }
    rounds = len(next(iter(measured[0]["measured_s"].values())))
    return (
        f"{text}\nMeasured on this machine's devices (ms), median and deviation over {rounds} "
        f"runs in turns, of placements that took {evaluations:,} simulated executions under "
        "calibrated costs; `doppler_sys` went on with "
        f"{', '.join(str(r['stage3']['measured_placements']) for r in measured)} measured "
        f"placements. * is the least. Beside it the paper's figures.\n\n"
        + format_table(*_table(seconds, medians))
        + f"\n{verdict('measured', medians)}\n"
        + "\nThe same placements simulated (ms), and the transfers that they need:\n\n"
        + format_table(*_believed(measured))
    )


def _believed(
    measured: list[dict[str, Any]],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns columns and rows of simulated makespans and of transfers."""
    methods = list(dict.fromkeys(m for record in measured for m in record["simulated_s"]))
    columns = ["method"]
    for record in measured:
        columns += [record["workload"], "transfers"]
    rows = []
    for method in methods:
        row = [method]
        for record in measured:
            believed_s = record["simulated_s"].get(method)
            row.append("-" if believed_s is None else format_ms(believed_s, 0.0))
            row.append(str(record["transfers"].get(method, "-")))
        rows.append(tuple(row))
    return tuple(columns), rows


def verdict(what: str, makespans_s: dict[str, dict[str, float]]) -> str:
    """Returns what the makespans, by workload and method, say of our methods."""
    lines = []
    for ours in OURS:
        rows = {w: found for w, found in makespans_s.items() if ours in found}
        if not rows:
            continue
        over, names = {}, {}
        for workload, found in rows.items():
            rivals = {method: s for method, s in found.items() if method not in OURS}
            if rivals:
                names[workload] = min(rivals, key=lambda method: rivals[method])
                over[workload] = found[ours] / rivals[names[workload]] - 1
        if not over:
            continue
        close = [w for w, excess in over.items() if excess <= CLOSE]
        best = [w for w, excess in over.items() if excess <= EQUAL]
        listed = ", ".join(f"{w} {over[w]:+.1%} ({names[w]})" for w in over)
        missed = [w for w in over if w not in close]
        lines.append(
            f"`{ours}`, {what}: best on {len(best)} of {len(over)} workloads, best or within "
            f"{CLOSE:.0%} of the best on {len(close)}"
            + (f", not on {', '.join(missed)}" if missed else "")
            + f". Over the best of the other systems: {listed}."
        )
    return "\n\n".join(lines)


def _table(
    seconds: dict[str, dict[str, np.ndarray]], middles: dict[str, dict[str, float]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns columns and rows: a row per method, two columns per workload."""
    methods = list(dict.fromkeys(method for found in seconds.values() for method in found))
    columns: list[str] = ["method"]
    cells: list[list[str]] = [[method] for method in methods]
    for workload, found in seconds.items():
        paper = published.TABLE_2_MS[workload]
        middle = [middles[workload].get(method, np.nan) for method in methods]
        texts = [_cell(found.get(m), s) for m, s in zip(methods, middle, strict=True)]
        columns += [workload, "paper"]
        for row, text, method in zip(
            cells, star_least(texts, middle, EQUAL), methods, strict=True
        ):
            row += [text, f"{paper[method]:.1f}" if method in paper else "-"]
    return tuple(columns), [tuple(row) for row in cells]


def _cell(runs_s: np.ndarray | None, middle_s: float) -> str:
    if runs_s is None:
        return "-"
    return format_ms(middle_s, float(runs_s.std()))
