import json
import pathlib

import numpy as np
import pytest

import doppler_jax as dj
from experiments import search, search_cells, search_tables
from experiments.cells import Cells
from experiments.search import SearchSettings
from experiments.search_cells import METHODS, Cell

ROOT = pathlib.Path(__file__).resolve().parents[2]
CELL = Cell("tiny", "parallel", "evaluations", 10_000)


@pytest.fixture
def tiny(monkeypatch):
    """Every problem is a chain beside a task."""
    problem = dj.from_edge_delays([1.0, 2.0, 3.0], [(0, 1, 1.0)], num_devices=2)
    monkeypatch.setattr(search_cells, "load_problem", lambda reference, name: problem)
    return problem


def keep(cells, makespans, cell=CELL, seeds=(0,)):
    """Keeps a record of each method; a makespan that is none is of no run."""
    cells.folder.mkdir(exist_ok=True)
    for method, makespan_s in makespans.items():
        for seed in seeds:
            name = search_cells.compare_name(cell, method, seed)
            terms = {cell.unit: cell.amount}
            record = {"makespan_s": makespan_s + seed, "first_s": 7.0, "lower_bound_s": 2.0}
            cells.get(name, terms, lambda record=record: record)


def table_rows(text):
    """The cells of every line of the tables in a text."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if "|" in line]


def test_a_cell_is_computed_once_and_holds_what_place_found(tiny, tmp_path, monkeypatch):
    cells = Cells(tmp_path)
    cell = search_cells.listed_cell(cells, tmp_path, "tiny", "parallel", "heft")
    assert cell["makespan_s"] == dj.place(*tiny, method="heft").makespan_s == 3.0
    assert cell["curve"][2][-1] == 3.0
    assert cell["placement"] == dj.place(*tiny, method="heft").placement.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-parallel-heft.json"]
    monkeypatch.setattr(dj, "place", None)
    assert search_cells.listed_cell(cells, tmp_path, "tiny", "parallel", "heft") == cell


def test_budgets_in_seconds_begin_after_a_first_run(tiny, tmp_path, monkeypatch):
    asked = []

    def place(graph, costs, **options):
        asked.append(options)
        return placed

    placed = dj.place(*tiny, method="heft")
    monkeypatch.setattr(dj, "place", place)
    search_cells._warm_up.cache_clear()
    cell = Cell("tiny", "serial", "seconds", 30)
    record = search_cells.compare_cell(Cells(tmp_path), tmp_path, cell, "annealing", 0)
    search_cells.compare_cell(Cells(tmp_path), tmp_path, cell, "annealing", 1)
    first, second, third = asked
    assert first["budget_s"] == search_cells.WARM_UP_S
    assert second["budget_s"] == third["budget_s"] == 30
    assert second["max_evaluations"] is third["max_evaluations"] is None
    assert {options["objective"] for options in asked} == {dj.Objective("serial")}
    assert record["first_s"] >= 0
    search_cells._warm_up.cache_clear()


def test_the_table_marks_the_least_and_counts_the_cells_won(tmp_path):
    cells = Cells(tmp_path)
    other = Cell("other", "serial", "evaluations", 100_000)
    makespans = dict.fromkeys(METHODS, 4.0)
    keep(cells, makespans | {"doppler+search": 2.0, "local_search": 2.0, "annealing": 1.0})
    keep(cells, makespans | {"doppler+search": 2.0, "local_search": 2.5}, other, (0, 1))
    runs, text = search_tables.tabulate(cells, [CELL, other], 2)
    assert len(runs) == 3 * len(METHODS)
    first, second = (row for row in table_rows(text) if row[0] in ("tiny", "other"))
    assert first[3:] == [
        "1",
        "4",
        "2",
        "4",
        "2",
        "1*",
        "4",
        "-",
        "2",
        "-50.00",
        "+0.00",
        "+100.00",
    ]
    assert second[3:5] == ["2", "4.5"]  # the mean of two seeds
    assert second[5:8] == ["2.5*", "4.5", "3"]
    against = {row[0]: row[1:] for row in table_rows(text) if len(row) == 8}
    below = ["0 / 1 / 0", "1 / 0 / 0", "1 / 1 / 0", "1", "2 / 1 / 0"]
    assert against["local_search"][:5] == below
    assert against["memetic"][3] == "0"  # above its lower bound in both cells
    assert against["annealing"][:3] == ["0 / 0 / 1", "1 / 0 / 0", "1 / 0 / 1"]
    assert against["annealing"][6] == "+100.00"  # at worst
    assert "Not run: tiny parallel: 10,000 (1 of 2 seeds)." in text


def test_only_seeds_that_all_methods_have_count_and_the_rest_is_named(tmp_path):
    cells = Cells(tmp_path)
    keep(cells, {"doppler+search": 2.0}, seeds=(0, 1))
    keep(cells, {"annealing": 3.0}, seeds=(1,))
    unknown = Cell("none", "parallel", "evaluations", 10_000)
    runs, text = search_tables.tabulate(cells, [CELL, unknown], 5)
    assert [run["makespan_s"] for run in runs] == [3.0, 4.0]  # of seed 1
    assert "-33.33" not in text
    (row,) = (row for row in table_rows(text) if row[0] == "tiny")
    assert row[3:7] == ["1", "-", "3*", "-"]
    assert row[-4:] == ["2", "-", "-", "-25.00"]
    assert (
        "Not run: tiny parallel: 10,000 (doppler, memetic, local_search, evolution); " in text
    )
    assert text.endswith("none parallel: 10,000.\n")


def test_a_table_of_nothing_says_so(tmp_path):
    runs, text = search_tables.tabulate(Cells(tmp_path), [CELL], 5)
    assert runs == []
    assert "Commits: none." in text
    assert "| annealing | - | - | - | - | - | - |" in text


def test_subsets_add_up_to_one_table(tiny, tmp_path, monkeypatch):
    asked = []

    def place(graph, costs, *, method, max_evaluations=None, **options):
        asked.append(method)
        return placed

    placed = dj.place(*tiny, method="heft")
    monkeypatch.setattr(dj, "place", place)
    settings = {"parts": ("compare",), "links": ("serial",), "budgets": (10_000,), "seeds": 1}
    settings |= {"reference": tmp_path, "runs": tmp_path, "host_devices": 4}
    for graph in ("ffnn_192nodes", "llama_8"):
        search.main(SearchSettings(graphs=(graph,), **settings))
    assert len(asked) == 2 * (len(METHODS) + len(search_cells.LISTED))
    text = (tmp_path / "search" / "search.md").read_text()
    assert [row[0] for row in table_rows(text) if row[1:2] == ["serial"]] == [
        "ffnn_192nodes",
        "llama_8",
    ]
    assert "llama_8 serial: 10,000 (4 of 5 seeds), 100,000, 1,000,000;" in text
    report = json.loads((tmp_path / "search" / "search.json").read_text())
    assert len(report["results"]["compare"]) == 2 * len(METHODS)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"graphs": ("none",)}, "--graphs: unknown 'none'; known: chain_mm_112nodes, "),
        ({"budgets": (7,)}, "--budgets: unknown 7; known: 10000, 100000, 1000000"),
        ({"methods": ("heft",)}, "--methods: unknown 'heft'; known: doppler, "),
        ({"seconds": (7,)}, "--seconds: unknown 7; known: 30, 120"),
        ({"seeds": 0}, "--seeds is 0; expected at least 1"),
    ],
)
def test_choices_that_no_cell_has_are_refused(option, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        search.main(SearchSettings(**option, runs=tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "num_tasks"),
    [("random_layered_1k", 1000), ("random_layered_4k", 4000), ("llama_8", 2000)],
)
def test_generated_problems_have_about_as_many_tasks_as_they_say(name, num_tasks, tmp_path):
    graph, costs = search_cells.load_problem(tmp_path, name)
    assert abs(graph.num_tasks / num_tasks - 1) < 0.05
    assert costs.num_devices == (8 if name.endswith("4k") else 4)


@pytest.mark.slow
def test_learning_is_recorded_with_its_placement(tiny, tmp_path):
    cell = search_cells.learn_cell(Cells(tmp_path), tmp_path, "tiny", 1.0, 0)
    schedule = dj.simulate_oracle(*tiny, cell["placement"])
    assert dj.makespan_s(schedule) == cell["makespan_s"] == 3.0
    assert cell["greedy_s"] >= 3.0
    assert cell["evaluations"] > cell["episodes"] > 0


def test_placements_found_here_are_worth_what_is_said(reference_graphs):
    found = json.loads((ROOT / "docs" / "best_placements.json").read_text())
    assert found
    for name, entry in found.items():
        graph = dj.load_graph(reference_graphs / f"{name}.txt")
        costs = dj.reference_costs(graph, num_devices=entry["num_devices"])
        schedule = dj.simulate_oracle(graph, costs, np.array(entry["placement"]))
        dj.validate(graph, schedule, costs)
        assert dj.makespan_s(schedule) == pytest.approx(entry["makespan_s"], rel=1e-12)
        assert entry["makespan_s"] < search.BEST_KNOWN_S[name]
