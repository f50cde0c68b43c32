"""Tables of records: a row each, or mean ± deviation over seeds."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from doppler_jax.reports.tables import format_seconds, format_table
from experiments.grid import Record

EQUAL = 1e-5
"""Relative difference up to which two makespans count as equal: simulators agree to that."""


def by(records: Sequence[Record], *fields: str) -> dict[Any, list[Record]]:
    """Returns the records by what a field holds, or by a tuple of what several hold."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        words = tuple(record.get(field) for field in fields)
        found.setdefault(words if len(fields) > 1 else words[0], []).append(record)
    return found


def table(rows: Sequence[Record]) -> str:
    """Returns a table of rows by their headings; a heading's end `_s` makes seconds of numbers.

    Other floats have three digits, None is `-`; of no rows there is no table.
    """
    if not rows:
        return ""

    def text(heading: str, value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or "-"
        if isinstance(value, int):
            return f"{value:,}"
        return format_seconds(value, 3) if heading.endswith("_s") else f"{value:.3f}"

    headings = [heading.removesuffix("_s") for heading in rows[0]]
    return format_table(headings, [[text(*cell) for cell in row.items()] for row in rows])


def means_table(
    records: Sequence[Record],
    rows: Sequence[str],
    column: str = "method",
    value: str = "makespan_s",
    scale: float = 1.0,
    extra: Mapping[str, Callable[[list[Record]], str]] | None = None,
    show: Callable[[np.ndarray], str] | None = None,
) -> str:
    """Returns a table of mean ± standard deviation over seeds, `*` behind a row's least.

    Args:
      records: of the cells.
      rows: fields that tell rows apart.
      column: field of which each value is a column.
      value: field that is shown; records without it, which refused, count as absent.
      scale: of the value as shown.
      extra: further columns, of the records of a row.
      show: makes a text of values instead, without stars.
    """
    columns, lines = list(by(records, column)), []
    if not records:
        return ""
    for group in by(records, *rows).values():
        found = [
            np.array([scale * r[value] for r in group if r[column] == c and value in r])
            for c in columns
        ]
        means = [float(values.mean()) if values.size else np.nan for values in found]
        texts = [(show or format_spread)(values) if values.size else "-" for values in found]
        words = [str(group[0].get(field, "")) for field in rows]
        more = [make(group) for make in (extra or {}).values()]
        lines.append([*words, *(texts if show else star_least(texts, means)), *more])
    return format_table((*rows, *columns, *(extra or {})), lines)


def with_paper(
    records: Sequence[Record], field: str, paper_ms: Mapping[str, Mapping[str, float]]
) -> list[Record]:
    """Returns records with the paper's, of the same methods, after those of each workload.

    The workload is what the field holds before a colon.
    """
    found = []
    for name, here in by(records, field).items():
        methods, where = by(here, "method"), {field: f"{name}, paper"}
        ms = paper_ms.get(name.partition(":")[0], {}).items()
        paper = [where | {"method": m, "makespan_s": 1e-3 * t} for m, t in ms if m in methods]
        found += here + paper
    return found


def format_spread(values: np.ndarray) -> str:
    """Returns mean and standard deviation, `12.35 ± 0.04`; runs that agree show none."""
    if not len(values):
        return "-"
    mean, deviation = float(values.mean()), float(values.std())
    decimals = max(0, 3 - int(np.floor(np.log10(max(abs(mean), 1e-6)))))
    spread = f" ± {deviation:.{decimals}f}" if deviation > 1e-6 * abs(mean) else ""
    return f"{mean:.{decimals}f}{spread}"


def star_least(texts: Sequence[str], values: Sequence[float]) -> list[str]:
    """Returns the texts with `*` behind those whose value is the least, nan being none."""
    least = np.nanmin(values) if not np.isnan(values).all() else np.nan
    pairs = zip(texts, values, strict=True)
    return [text + "*" * bool(value <= least * (1 + EQUAL)) for text, value in pairs]


def growth(records: list[Record], field: str) -> float:
    """Returns the exponent of a time between the first and the last record."""
    first, last = records[0], records[-1]
    return math.log(last[field] / first[field]) / math.log(last["tasks"] / first["tasks"])
