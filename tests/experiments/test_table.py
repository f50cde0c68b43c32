import json

import jax
import numpy as np
import pytest

import doppler_jax as dj
from experiments import (
    ablation,
    published,
    sample_efficiency,
    scaling,
    sync_vs_async,
    table,
    topology,
)
from experiments.cells import Cells
from experiments.method_cells import WARM_UP_S, WARM_UPS, Budget, MethodCells, paper_problem
from experiments.results import format_ms, star_least
from experiments.table import TableSettings
from experiments.table_text import EQUAL, tabulate, verdict

HOST = {"host_devices": 4}


def table_rows(text):
    """The cells of every line of the tables in a text."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if "|" in line]


def record(workload, method, seed, makespan_s):
    return {"workload": workload, "method": method, "seed": seed, "makespan_s": makespan_s}


@pytest.fixture(scope="module")
def chosen():
    return paper_problem("chainmm", "small")


@pytest.fixture
def place(monkeypatch):
    """What was asked of `dj.place`, which answers without searching."""
    asked, real = [], dj.place

    def answer(graph, costs, **options):
        asked.append(options)
        return real(graph, costs, method="heft")

    monkeypatch.setattr(dj, "place", answer)
    return asked


def test_seconds_begin_after_a_run_that_compiled(chosen, place, tmp_path):
    cells = MethodCells(Cells(tmp_path))
    found = [cells.get(chosen, "gdp", seed, Budget(seconds=3.0)) for seed in (0, 1)]
    assert [options["budget_s"] for options in place] == [*[WARM_UP_S] * WARM_UPS, 3.0, 3.0]
    assert all(options["max_evaluations"] is None for options in place)
    assert found[0]["first_s"] == found[1]["first_s"] > 0
    assert [cell["seed"] for cell in found] == [0, 1]
    assert not np.array_equal(*(jax.random.key_data(o["key"]) for o in place[-2:]))


def test_what_was_run_is_not_run_again_unless_the_terms_change(chosen, place, tmp_path):
    for _ in range(2):
        cells = MethodCells(Cells(tmp_path))
        cells.get(chosen, "gdp", 0, Budget(evaluations=300))
    assert len(place) == 1
    assert place[0]["max_evaluations"] == 300
    cells.get(chosen, "gdp", 0, Budget(evaluations=301))
    cells.get(chosen, "gdp", 1, Budget(evaluations=300))
    assert len(place) == 3


def test_a_run_that_was_stopped_is_not_kept(chosen, monkeypatch, tmp_path):
    stopped = dj.place(chosen.graph, chosen.costs, method="heft")
    object.__setattr__(stopped, "interrupted", True)
    monkeypatch.setattr(dj, "place", lambda *args, **options: stopped)
    with pytest.raises(KeyboardInterrupt):
        MethodCells(Cells(tmp_path)).get(chosen, "gdp", 0, Budget(evaluations=300))
    assert not list(tmp_path.iterdir())


def test_the_simulated_table_is_what_its_cells_say(tmp_path, monkeypatch):
    methods = ("critical_path", "annealing")
    settings = TableSettings(
        workloads=("chainmm",), methods=methods, preset="small", seeds=2, budget_s=0.2,
        measured=False, runs=tmp_path, **HOST,
    )  # fmt: skip
    table.main(settings)
    folder = tmp_path / "table"
    text = (folder / "table.md").read_text()
    chosen = paper_problem("chainmm", "small")
    rows = {row[0]: row[1:] for row in table_rows(text)}
    assert rows["method"] == ["chainmm", "paper"]
    ms = {}
    for method in methods:
        kept = [
            json.loads((folder / "cells" / f"{chosen.name}-{method}-0.2s-{s}.json").read_text())
            for s in (0, 1)
        ]
        for cell in kept:
            schedule = dj.simulate_oracle(chosen.graph, chosen.costs, cell["placement"])
            assert dj.makespan_s(schedule) == cell["makespan_s"]
        ms[method] = np.mean([1e3 * cell["makespan_s"] for cell in kept])
        shown = float(rows[method][0].rstrip("*").split(" ± ")[0])
        assert shown == pytest.approx(ms[method], rel=1e-3)
    best = [m for m in methods if ms[m] <= min(ms.values()) * (1 + EQUAL)]
    assert [m for m in methods if rows[m][0].endswith("*")] == best
    assert rows["critical_path"][1] == "230.4"
    assert rows["annealing"][1] == "-"
    for name in ("table.png", "placements.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(dj, "place", None)  # a second run places nothing
    table.main(settings)
    assert (folder / "table.md").read_text() == text


def test_the_verdict_is_computed_and_says_where_ours_is_not_best():
    makespans = {
        "chainmm": {"heft": 2.0, "gdp": 1.0, "doppler": 0.9, "doppler+search": 1.2},
        "ffnn": {"heft": 1.0, "gdp": 3.0, "doppler": 1.005, "doppler+search": 1.0},
    }
    first, second = verdict("simulated", makespans).split("\n\n")
    assert first == (
        "`doppler`, simulated: best on 1 of 2 workloads, best or within 1% of the best on 2. "
        "Over the best of the other systems: chainmm -10.0% (gdp), ffnn +0.5% (heft)."
    )
    assert "`doppler+search`, simulated: best on 1 of 2" in second
    assert "within 1% of the best on 1, not on chainmm. " in second
    assert "chainmm +20.0% (gdp), ffnn +0.0% (heft)" in second
    assert verdict("measured", {"ffnn": {"heft": 1.0}}) == ""
    assert verdict("measured", {"ffnn": {"doppler": 1.0}}) == ""


def test_measured_times_are_medians_and_have_a_verdict_of_their_own():
    simulated = [
        record("ffnn", m, s, v) for m, v in (("heft", 0.1), ("doppler", 0.2)) for s in (0, 1)
    ]
    measured = {
        "workload": "ffnn",
        "measured_s": {"heft": [1.0, 9.0, 2.0], "doppler_sys": [1.5, 1.0, 1.4]},
        "simulated_s": {"heft": 0.75, "doppler_sys": 0.5},
        "transfers": {"heft": 3, "doppler_sys": 12},
        "stage3": {"measured_placements": 54},
    }
    text = tabulate(simulated, [measured], "12 seconds", 20_000)
    rows = table_rows(text)
    assert ["heft", "100.0*", "-"] in rows
    assert ["doppler", "200.0", "49.9"] in rows
    assert [row[0] for row in rows if row[1].startswith("1400 ±")] == ["doppler_sys"]
    assert "| doppler_sys | 1400 ± 216* | 47.4 |" in text
    assert "| heft | 2000 ± 3559 | - |" in text
    assert "`doppler`, simulated: best on 0 of 1 workloads" in text
    assert "not on ffnn. Over the best of the other systems: ffnn +100.0% (heft)." in text
    assert "`doppler_sys`, measured: best on 1 of 1 workloads" in text
    assert "ffnn -30.0% (heft)" in text
    assert "went on with 54 measured placements" in text
    assert rows[-2:] == [["heft", "750.0", "3"], ["doppler_sys", "500.0", "12"]]


def test_figures_are_written_with_their_deviation_and_the_least_is_marked():
    assert format_ms(0.0123456, 0.0) == "12.35"
    assert format_ms(0.0123456, 2e-4) == "12.35 ± 0.20"
    assert format_ms(1.5, 0.25) == "1500 ± 250"
    texts = star_least(["a", "b", "-", "c"], [1.0, 1.0 + 1e-7, np.nan, 1.1], 1e-5)
    assert texts == ["a*", "b*", "-", "c"]


def test_published_figures_are_of_the_workloads_and_methods_that_exist():
    assert set(published.TABLE_2_MS) == set(published.WORKLOADS) <= set(dj.list_workloads())
    names = {method for found in published.TABLE_2_MS.values() for method in found}
    assert names - {"doppler_sys"} <= set(dj.list_methods())
    assert set(table.METHODS) <= set(dj.list_methods())
    assert set(ablation.METHODS) <= set(dj.list_methods())
    assert set(scaling.METHODS) <= set(dj.list_methods())


@pytest.mark.parametrize(
    ("module", "settings", "options", "message"),
    [
        (table, "TableSettings", {"methods": ("none",)}, "--methods: unknown 'none'; known: "),
        (table, "TableSettings", {"methods": ()}, "--methods: expected at least one of "),
        (table, "TableSettings", {"workloads": ("moe_block",)}, "--workloads: unknown 'moe_bl"),
        (table, "TableSettings", {"seeds": 0}, "--seeds is 0; expected at least 1"),
        (ablation, "AblationSettings", {"variants": ("gdp",)}, "--variants: unknown 'gdp'"),
        (sync_vs_async, "SyncSettings", {"methods": ("none",)}, "--methods: unknown 'none'"),
        (scaling, "ScalingSettings", {"methods": ("heft",)}, "--methods: unknown 'heft'"),
        (
            scaling,
            "ScalingSettings",
            {"sizes": (8,)},
            r"--sizes are \(8,\); expected 2",
        ),
        (topology, "TopologySettings", {"workloads": ("none",)}, "--workloads: unknown 'none'"),
        (sample_efficiency, "EfficiencySettings", {"methods": ("none",)}, "--methods: unknown"),
    ],
)
def test_options_are_checked_before_anything_runs(module, settings, options, message, tmp_path):
    made = getattr(module, settings)(**options, runs=tmp_path / "runs", **HOST)
    with pytest.raises(ValueError, match=message):
        module.main(made)
    assert not (tmp_path / "runs").exists()


def test_links_are_asked_for_and_tell_cells_apart(chosen, place, tmp_path):
    for links in ("parallel", "serial"):
        MethodCells(Cells(tmp_path), links).get(chosen, "heft", 0, Budget(evaluations=9))
    assert [options["links"] for options in place] == ["parallel", "serial"]


@pytest.mark.gpu
@pytest.mark.slow
def test_the_full_table_begins_on_a_gpu(tmp_path):
    settings = TableSettings(seeds=1, budget_s=5.0, measured=False, runs=tmp_path)
    table.main(settings)
    found = json.loads((tmp_path / "table" / "table.json").read_text())["results"]["simulated"]
    assert {record["workload"] for record in found} == set(published.WORKLOADS)
    assert {record["method"] for record in found} == set(table.METHODS)


@pytest.mark.slow
def test_the_measured_part_measures_once(tmp_path, monkeypatch):
    """Stage 3 and its measurements included, on devices of this process."""
    settings = TableSettings(
        workloads=("chainmm",), methods=("heft",), preset="small", seeds=1, budget_s=0.1,
        measured_workloads=("chainmm",), measured_methods=("heft",), measured_preset="small",
        backend="local", measured_evaluations=300, num_updates=1, rounds=3, runs=tmp_path,
        **HOST,
    )  # fmt: skip
    table.main(settings)
    folder = tmp_path / "table"
    (found,) = json.loads((folder / "table.json").read_text())["results"]["measured"]
    assert set(found["measured_s"]) == {"heft", "doppler", "doppler_sys"}
    assert all(len(seconds) == 3 for seconds in found["measured_s"].values())
    text = (folder / "table.md").read_text()
    middle, last = (table_rows(part) for part in text.split("The same placements"))
    shown = {row[0]: row[1] for row in middle}  # measured: below what is simulated
    assert {row[0] for row in last[2:]} == set(found["measured_s"])
    assert all(int(row[2]) >= 0 for row in last[2:])
    for method, seconds in found["measured_s"].items():
        median_ms = 1e3 * sorted(seconds)[1]
        assert float(shown[method].rstrip("*").split(" ± ")[0]) == pytest.approx(
            median_ms, rel=1e-3
        )
    monkeypatch.setattr(dj, "place", None)
    table.main(settings)
    assert (folder / "table.md").read_text() == text
