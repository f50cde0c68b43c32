import csv
import itertools
import pathlib

import numpy as np
import pytest

from experiments import search, search_cells, search_tables
from experiments.cells import Cells
from experiments.search import SearchSettings
from experiments.search_cells import Cell
from experiments.search_runs import COLUMNS, take_runs, write_runs
from experiments.search_tables import OURS

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
BOUNDED = Cell("tiny", "parallel", "evaluations", 10_000)
TIMED = Cell("tiny", "serial", "seconds", 30)
COMPARED = (OURS, "memetic", "annealing")
RECORD = {
    "commit": "abc",
    "makespan_s": 1 / 3,
    "lower_bound_s": 0.1,
    "evaluations": 9_999,
    "seconds": 2.5,
    "first_s": None,
}


def keep(cells, cell, method, seed, **changes):
    name = search_cells.compare_name(cell, method, seed)
    record = RECORD | {"placement": [0, 1]} | changes
    return cells.keep(name, {cell.unit: cell.amount}, record)


@pytest.fixture
def cells(tmp_path):
    cells = Cells(tmp_path / "cells")
    keep(cells, BOUNDED, "doppler+search", 0)
    keep(cells, BOUNDED, "memetic", 4, commit="def")
    keep(cells, TIMED, "annealing", 1, first_s=0.1)
    cells.keep(search_cells.listed_name("tiny", "serial", "heft"), {}, RECORD)
    return cells


def test_what_is_written_is_taken_to_the_last_bit(cells, tmp_path):
    path = tmp_path / "runs.csv"
    write_runs(path, cells, [BOUNDED, TIMED], 5)
    assert len(path.read_text().splitlines()) == 5
    taken = Cells(tmp_path / "taken")
    take_runs(path, taken)
    assert len(list(taken.folder.iterdir())) == 4
    record = search_cells.kept(taken, BOUNDED, "doppler+search", 0)
    assert {key: record[key] for key in RECORD} == RECORD
    assert search_cells.kept(taken, BOUNDED, "memetic", 4)["commit"] == "def"
    assert search_cells.kept(taken, TIMED, "annealing", 1)["first_s"] == 0.1
    name = search_cells.listed_name("tiny", "serial", "heft")
    assert taken.find(name, {})["makespan_s"] == 1 / 3
    again = tmp_path / "again.csv"
    write_runs(again, taken, [BOUNDED, TIMED], 5)
    assert again.read_text() == path.read_text()


def test_runs_that_are_kept_already_stay(cells, tmp_path):
    path = tmp_path / "runs.csv"
    write_runs(path, cells, [BOUNDED, TIMED], 5)
    other = Cells(tmp_path / "other")
    keep(other, BOUNDED, "doppler+search", 0, makespan_s=7.0)
    take_runs(path, other)
    record = search_cells.kept(other, BOUNDED, "doppler+search", 0)
    assert (record["makespan_s"], record["placement"]) == (7.0, [0, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph,links\n", "runs.csv: expected the columns graph, links, "),
        (",".join(COLUMNS) + "\nt,serial,seconds,30,heft,0,slow,1,1,1,1,a\n", "line 2: .*slow"),
        (",".join(COLUMNS) + "\nt,serial,seconds,30\n", "runs.csv, line 2"),
    ],
)
def test_a_file_that_holds_no_runs_is_refused(text, message, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        take_runs(path, Cells(tmp_path / "cells"))
    with pytest.raises(ValueError, match=r"no\.csv: No such file"):
        take_runs(tmp_path / "no.csv", Cells(tmp_path / "cells"))


def test_the_command_goes_on_from_a_file(cells, tmp_path, monkeypatch):
    graph = "chain_mm_112nodes"
    cell = Cell(graph, "serial", "evaluations", 10_000)
    keep(cells, cell, "annealing", 0)
    for method in search_cells.LISTED:
        cells.keep(search_cells.listed_name(graph, "serial", method), {}, RECORD)
    path = tmp_path / "kept.csv"
    write_runs(path, cells, search.CELLS, 1)
    monkeypatch.setattr(search_cells, "load_problem", None)  # nothing is run
    settings = {"parts": ("compare",), "graphs": (graph,), "links": ("serial",), "seeds": 1}
    settings |= {"budgets": (10_000,), "methods": ("annealing",), "runs": tmp_path / "runs"}
    search.main(SearchSettings(kept=path, host_devices=4, **settings))
    assert (tmp_path / "runs" / "search" / "runs.csv").read_text() == path.read_text()


def test_the_tables_of_the_docs_are_made_of_the_runs_beside_them(tmp_path):
    cells = Cells(tmp_path / "cells")
    take_runs(DOCS / "search_runs.csv", cells)
    stated = (DOCS / "search.md").read_text()
    for unit in search.BUDGETS:
        wanted = [cell for cell in search.CELLS if cell.unit == unit]
        runs, made = search_tables.tabulate(cells, wanted, search.SEEDS)
        assert runs
        assert len(tables(made)) == 2
        for table in tables(made):
            assert table in stated


def test_the_table_of_what_changed_since_is_made_of_the_runs_beside_it(tmp_path):
    before, again, now = (Cells(tmp_path / name) for name in ("before", "again", "now"))
    take_runs(DOCS / "search_runs.csv", before)
    for cells in (again, now):
        take_runs(DOCS / "search_runs_since.csv", cells)
    take_runs(DOCS / "search_runs.csv", now)  # those that are kept already stay
    text = (DOCS / "search.md").read_text()
    stated = text[text.index("### As the searches are now") : text.index("## Gaps")]
    timed = [cell for cell in search.CELLS if cell.unit == "seconds"]
    runs, made_again = search_tables.tabulate(now, timed, search.SEEDS)
    commits = {"52f3ec0", "e660775", "e7c2c8f"}, {"e3148b1", "52f3ec0", "6c2b55a", "1d2aebb"}
    for amount, expected in zip(search.BUDGETS["seconds"], commits, strict=True):
        of_amount = [run for run in runs if run["terms"] == {"seconds": amount}]
        assert {run["commit"] for run in of_amount} == expected
    for block in tables(made_again):
        assert block in stated
        stated = stated.replace(block, "")
    table = {x for x in stated.splitlines() if x.split(" | ")[0][2:] in search.GRAPHS}
    made = set()
    for cell in (cell for cell in search.CELLS if cell not in timed):
        seeds = [s for s in range(5) if search_cells.kept(again, cell, OURS, s)] or range(5)
        old, new = ([means(c, cell, m, seeds) for m in COMPARED] for c in (before, now))
        if new == old:  # no runs, or the same in every digit
            continue
        listed_s = search_cells.kept_listed(before, cell.graph, cell.links)
        words = [cell.graph, cell.links, f"{cell.amount:,}"]
        numbers = (old[0], *new, listed_s)
        words += ["-" if x is None else f"{x:.6g}" for x in numbers]
        made.add(f"| {' | '.join(words)} | {100 * (new[0] / new[1] - 1):+.2f} |")
    assert made == table
    for unit in search.BUDGETS:
        wanted = [cell for cell in search.CELLS if cell.unit == unit]
        _, made_now = search_tables.tabulate(now, wanted, search.SEEDS)
        for rival in ("memetic", "annealing"):
            line = next(x for x in made_now.splitlines() if x.startswith(f"| {rival} |"))
            count = line.split(" | ")[len(search.BUDGETS[unit]) + 1]
            assert f"{rival}, {unit}: {count}" in " ".join(stated.split())


def test_what_later_commits_are_said_to_change_is_what_the_runs_say():
    before, again = (read_runs(DOCS / f"search_runs{name}.csv") for name in ("", "_since"))
    stated = " ".join((DOCS / "search.md").read_text().split())
    lazy = [run for run, (_, commit) in again.items() if commit == "c603357" and run in before]
    assert all(again[run][0] == before[run][0] for run in lazy)
    assert f"the {len(lazy)} runs made again there came out the same in every digit" in stated
    changes = {
        run: 100 * (makespan_s / before[run][0] - 1)
        for run, (makespan_s, commit) in again.items()
        # Others have other starts, too.
        if commit == "d5b7579" and (run[0] != "random_layered_4k" or run[4] != OURS)
    }
    for graph in ("", *search.GRAPHS[:4]):
        of_graph = [change for run, change in changes.items() if graph in ("", run[0])]
        changed = [change for change in of_graph if change]
        shorter = sum(change < 0 for change in changed)
        numbers = [len(of_graph), len(changed), shorter, f"{np.mean(changed or 0):+.2f}%"]
        if not graph:
            count, others, shorter, mean = numbers
            said = f"Of {count} runs made again at d5b7579 with the starts of before, {others} "
            said += f"came out differently: {shorter} shorter, {mean} in the mean."
        elif not changed:
            said = f"{graph}: {len(of_graph)}, none."
        else:
            said = f"{graph}: {', '.join(map(str, numbers))}"
        assert said in stated


def tables(text):
    lines = itertools.groupby(text.splitlines(), lambda line: line.startswith("|"))
    return ["\n".join(group) for is_table, group in lines if is_table]


def read_runs(path):
    """Makespan and commit of every run of a file that has a seed."""
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["seed"]]
    keys = ("graph", "links", "unit", "amount", "method", "seed")
    return {
        tuple(row[key] for key in keys): (float(row["makespan_s"]), row["commit"])
        for row in rows
    }


def means(cells, cell, method, seeds):
    runs = [search_cells.kept(cells, cell, method, seed) for seed in seeds]
    return float(np.mean([run["makespan_s"] for run in runs])) if all(runs) else None
