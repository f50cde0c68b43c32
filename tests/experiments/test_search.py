import json
import pathlib

import numpy as np
import pytest

import doppler_jax as dj
from experiments import search, search_cells
from experiments.cells import Cells
from experiments.search import SearchSettings

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny(monkeypatch):
    """Every problem is a chain beside a task."""
    problem = dj.from_edge_delays([1.0, 2.0, 3.0], [(0, 1, 1.0)], num_devices=2)
    monkeypatch.setattr(search_cells, "load_problem", lambda graphs, name: problem)
    return problem


def test_a_cell_is_computed_once_and_holds_what_place_found(tiny, tmp_path, monkeypatch):
    cells = Cells(tmp_path)
    arguments = (cells, tmp_path, "tiny", "parallel", "heft", 1, 0)
    cell = search_cells.compare_cell(*arguments)
    assert cell["makespan_s"] == dj.place(*tiny, method="heft").makespan_s == 3.0
    assert cell["curve"][2][-1] == 3.0
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-parallel-heft-1-0.json"]
    monkeypatch.setattr(dj, "place", None)
    assert search_cells.compare_cell(*arguments) == cell


def test_the_table_marks_the_least_and_counts_the_cells_won(monkeypatch, tmp_path):
    makespans = {"doppler+search": 2.0, "list+search": 2.0, "annealing": 1.0, "heft": 2.5}

    def compare_cell(cells, graphs, problem, links, method, evaluations, seed):
        return {"makespan_s": makespans.get(method, 3.0)}

    monkeypatch.setattr(search_cells, "compare_cell", compare_cell)
    settings = SearchSettings(max_evaluations=10_000, larger=False)
    results, text = search.compare(settings, Cells(tmp_path))
    count = len(search.chosen_cells(settings))
    assert count == 2 * len(search.BEST_KNOWN_S)
    assert len(results) == count * (5 * len(search.METHODS) + len(search.LISTED))
    assert text.count("1*") == count
    assert "| 2.5 |" in text
    assert f"Of {count} cells" in text
    assert f"list+search on {count}, annealing on 0" in text


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
