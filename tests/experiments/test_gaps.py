"""The comparison with known optima: its tables, and that finished cells are kept."""

import dataclasses
import json

import numpy as np
import pytest

import doppler_jax as dj
from experiments import gap_cells, gaps
from experiments.cells import Cells
from experiments.gaps import GapSettings


def rows(text, title):
    """The cells of the table whose title starts so."""
    table = text[text.index(title) :].split("\n\n")[1]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_random_graphs_are_measured_against_both_references(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ortools", reason="OR-Tools is not installed (extra `exact`)")
    settings = GapSettings(
        methods=("critical_path", "round_robin"), parts=("small",), num_small=3, runs=tmp_path
    )
    gaps.main(settings)
    text = (tmp_path / "gaps" / "gaps.md").read_text()
    report = json.loads((tmp_path / "gaps" / "gaps.json").read_text())
    assert {"commit", "date", "machine", "jax"} <= set(report["provenance"])
    assert "3 of 3 optima proven" in text
    references = [r for r in report["results"]["small"] if "optimum_s" in r]
    for seed, reference in enumerate(references):
        assert reference["bound_s"] == reference["optimum_s"] <= reference["fifo_best_s"]
        placed = dj.place(*gap_cells.small_problem(seed), method="critical_path")
        assert placed.makespan_s >= reference["fifo_best_s"]
    found = rows(text, "Random graphs")
    assert [row[0] for row in found] == ["best placement, fifo", "critical_path", "round_robin"]
    makespans = [
        dj.place(*gap_cells.small_problem(s), method="round_robin").makespan_s for s in range(3)
    ]
    gap = 100 * (np.array(makespans) / [r["optimum_s"] for r in references] - 1)
    assert [float(cell) for cell in found[2][2:4]] == pytest.approx(
        [gap.mean(), gap.max()], abs=0.006
    )
    assert text.split("\nAt most")[0] in capsys.readouterr().out

    def refuse(*args, **kwargs):
        raise AssertionError("a finished cell is computed again")

    monkeypatch.setattr(dj, "place", refuse)
    monkeypatch.setattr(gap_cells, "exact", refuse)
    gaps.main(settings)
    assert (
        json.loads((tmp_path / "gaps" / "gaps.json").read_text())["results"]
        == (report["results"])
    )


def test_what_ctrl_c_cut_short_is_not_kept(tmp_path, monkeypatch):
    proper = dj.place

    def stopped(*problem, **settings):
        return dataclasses.replace(proper(*problem, method="heft"), interrupted=True)

    monkeypatch.setattr(dj, "place", stopped)
    cells = Cells(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        gap_cells.small_cell(cells, 0, "annealing", gap_cells.Budget(2000, None, 0))
    assert not list(tmp_path.rglob("*.json"))


def test_a_cell_on_other_terms_is_made_again(tmp_path):
    cells = Cells(tmp_path)
    assert cells.get("a", {"seed": 0}, lambda: {"x": 1})["x"] == 1
    assert cells.get("a", {"seed": 0}, lambda: {"x": 2})["x"] == 1
    assert cells.get("a", {"seed": 1}, lambda: {"x": 3})["x"] == 3


def test_random_graphs_are_small_and_whole_in_ticks():
    for seed in range(40):
        graph, costs = gap_cells.small_problem(seed)
        assert 5 <= graph.num_tasks <= 10
        assert costs.num_devices == 2 + seed % 2
        ticks = costs.compute_s * gap_cells.TICKS_PER_S
        np.testing.assert_array_equal(ticks, np.round(ticks))


def test_published_optima_are_not_undercut(neutral_graphs, tmp_path):
    settings = GapSettings(
        methods=("round_robin",),
        parts=("stg",),
        quick=True,
        graphs=neutral_graphs,
        runs=tmp_path,
    )
    gaps.main(settings)
    results = json.loads((tmp_path / "gaps" / "gaps.json").read_text())["results"]["stg"]
    assert len(results) == 4
    for result in results:
        assert result["bound"] <= result["makespan_s"] <= result["placed_s"]
    assert any(r["makespan_s"] < r["placed_s"] for r in results)  # by the b-level
    (row,) = rows((tmp_path / "gaps" / "gaps.md").read_text(), "Standard Task Graph set")
    gap = np.array([r["makespan_s"] / r["best"] - 1 for r in results])
    assert float(row[6]) == pytest.approx(100 * gap.max(), abs=0.006)
    assert row[3] == row[5] == "-"  # 4 and 16 devices are left out


def test_networks_report_their_memory(neutral_graphs, tmp_path):
    pytest.importorskip("ortools", reason="OR-Tools is not installed (extra `exact`)")
    settings = GapSettings(
        methods=("exact", "round_robin"),
        parts=("dnn",),
        quick=True,
        graphs=neutral_graphs,
        runs=tmp_path,
    )
    gaps.main(settings)
    results = json.loads((tmp_path / "gaps" / "gaps.json").read_text())["results"]["dnn"]
    expert, best, placed = results
    assert best["makespan_s"] <= placed["makespan_s"]
    assert best["filled"] <= 1
    assert expert["accelerators"] == 6
    assert expert["filled"] == pytest.approx(0.95671765)
    assert max(placed["peak_bytes"][:5]) == pytest.approx(placed["filled"] * 629145600)
    assert placed["filled"] <= 1
    assert placed["tasks_elsewhere"] > 0
    for result in results:
        assert result["makespan_s"] >= result["lower_bound_s"]
    table = rows((tmp_path / "gaps" / "gaps.md").read_text(), "Networks")
    assert [row[1] for row in table] == ["human expert", "exact", "round_robin"]
    assert float(table[1][3]) < 0.05  # above the bound
    assert [row[-1] for row in table] == ["yes"] * 3


def test_methods_are_chosen_from_the_registry(tmp_path):
    every = gaps.choose_methods(GapSettings())
    assert every == dj.list_methods()
    quick = gaps.choose_methods(GapSettings(quick=True))
    assert set(every) - set(quick) == set(gaps.TRAINED) & set(every)
    with pytest.raises(ValueError, match="unknown method 'none'; known: "):
        gaps.main(GapSettings(methods=("none",), runs=tmp_path / "runs"))
    with pytest.raises(ValueError, match=r"stg50: there is no \.stg file"):
        gaps.main(
            GapSettings(
                methods=("single",), parts=("stg",), graphs=tmp_path, runs=tmp_path / "runs"
            )
        )
    assert not (tmp_path / "runs").exists()


def test_a_refusal_is_reported(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise ValueError("too much for me")

    monkeypatch.setattr(dj, "place", refuse)
    budget = gap_cells.Budget(1, None, 0)
    record = gap_cells.small_cell(Cells(tmp_path), 0, "single", budget)
    assert record["refused"] == "too much for me"
