"""The runs of `experiments.search` in one file, a line each: what the tables are made of.

docs/search_runs.csv holds those of the tables in docs/search.md, so that more can be added
without making them again. Placements and curves are left out.
"""

import csv
import pathlib
from collections.abc import Sequence
from typing import Any

from doppler_jax.files import read_text
from experiments import search_cells
from experiments.cells import Cells
from experiments.search_cells import LISTED, METHODS, Cell

_OF_RUN = ("graph", "links", "unit", "amount", "method", "seed")

_NUMBERS = {
    "makespan_s": float,
    "lower_bound_s": float,
    "evaluations": int,
    "seconds": float,
    "first_s": float,
}

COLUMNS = (*_OF_RUN, *_NUMBERS, "commit")


def write_runs(
    path: pathlib.Path, cells: Cells, wanted: Sequence[Cell], num_seeds: int
) -> None:
    """Writes all runs that have been kept of the cells `wanted`, and list schedulers' first."""
    found: list[tuple[tuple[object, ...], dict[str, Any] | None]] = []
    for name, links in sorted({(cell.graph, cell.links) for cell in wanted}):
        for method in LISTED:
            record = cells.find(search_cells.listed_name(name, links, method), {})
            found.append(((name, links, "", "", method, ""), record))
    for cell in wanted:
        for method in METHODS:
            for seed in range(num_seeds):
                run = (cell.graph, cell.links, cell.unit, cell.amount, method, seed)
                found.append((run, search_cells.kept(cells, cell, method, seed)))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for words, record in found:
            if record is not None:
                numbers = [record.get(column) for column in _NUMBERS]
                writer.writerow([*words, *numbers, record["commit"]])


def take_runs(path: pathlib.Path, cells: Cells) -> None:
    """Keeps the runs of a file as cells, but for those that are kept already.

    Raises:
      ValueError: the file cannot be read, or a line does not say what it should.
    """
    reader = csv.DictReader(read_text(path).splitlines())
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{path}: expected the columns {', '.join(COLUMNS)}")
    for row in reader:
        try:
            name, terms, record = _record(row)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
        if cells.find(name, terms) is None:
            cells.keep(name, terms, record)


def _record(row: dict[str, str]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Returns name, terms and record of a line."""
    record: dict[str, Any] = {"commit": row["commit"]}
    for column, kind in _NUMBERS.items():
        record[column] = kind(row[column]) if row[column] else None
    if not row["unit"]:
        return search_cells.listed_name(row["graph"], row["links"], row["method"]), {}, record
    cell = Cell(row["graph"], row["links"], row["unit"], int(row["amount"]))
    name = search_cells.compare_name(cell, row["method"], int(row["seed"]))
    return name, {cell.unit: cell.amount}, record
