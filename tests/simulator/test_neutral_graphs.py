"""Graphs of the Standard Task Graph set: published optima that nothing may undercut."""

import json

import numpy as np
import pytest

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.costs.build import from_edge_delays
from doppler_jax.graphs import padded as padded_module
from doppler_jax.graphs.formats import load_stg
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.simulate import simulate
from experiments import neutral
from experiments.neutral import DEVICES, NeutralSettings, Published, load_published


def candidates(rng, graph, costs):
    """Critical path's placement, 63 neighbours of it, and 64 random ones."""
    listed = critical_path(graph, costs)
    random = rng.integers(0, costs.num_devices, (127, graph.num_tasks))
    near = np.where(rng.random((63, graph.num_tasks)) < 0.05, random[:63], listed)
    return np.concatenate([listed[None], near, random[63:]])


@pytest.mark.parametrize("num_devices", DEVICES)
def test_nothing_is_simulated_below_the_published_optimum(
    neutral_graphs, num_devices, monkeypatch
):
    # One bucket for the tasks of all graphs and one for their widths: a single compilation.
    monkeypatch.setattr(
        padded_module,
        "bucket_size",
        lambda size, smallest: 512 if smallest == 16 else 28 if size <= 28 else 56,
    )
    rng = np.random.default_rng(num_devices)
    folder = neutral_graphs / "stg50"
    published = load_published(folder / f"Case50_{num_devices}_OPT.csv")
    num_met = 0
    paths = sorted(folder.glob("*.stg"))
    assert len(paths) == 40
    for path in paths:
        graph, costs = from_edge_delays(*load_stg(path), num_devices=num_devices)
        placements = candidates(rng, graph, costs)
        makespans = np.asarray(simulate(graph, costs, placements, schedule=False).makespan_s)
        # Task times are whole numbers, so that the simulator is exact.
        assert makespans.min() >= published[path.name].bound, path.name
        for b in (0, 1, 127):
            assert makespan_s(simulate_oracle(graph, costs, placements[b])) == makespans[b]
        num_met += makespans.min() == published[path.name].best
    assert num_met > 0  # otherwise the bounds were never near


def test_published_rows(tmp_path):
    path = tmp_path / "Case50_2_OPT.csv"
    path.write_text("50/a.stg,2,10\n50/b.stg,2,9,11\n")
    expected = {"a.stg": Published(10.0, 10.0), "b.stg": Published(9.0, 11.0)}
    assert load_published(path) == expected
    for line in ("50/a.stg,2", "50/a.stg,2,ten", "50/a.stg,2,1,2,3"):
        path.write_text(f"50/b.stg,2,9,11\n{line}\n")
        with pytest.raises(ValueError, match=r"OPT\.csv: line 2: expected file, devices"):
            load_published(path)


def test_the_gap_of_critical_path_is_reported(neutral_graphs, tmp_path, capsys):
    neutral.main(NeutralSettings(graphs=neutral_graphs, runs=tmp_path / "runs"))
    report = json.loads((tmp_path / "runs" / "neutral.json").read_text())
    assert {"commit", "date", "machine", "jax"} <= set(report["provenance"])
    table = (tmp_path / "runs" / "neutral.md").read_text()
    assert table in capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [int(row[0]) for row in rows] == list(DEVICES)
    for row, num_devices in zip(rows, DEVICES, strict=True):
        results = [r for r in report["results"] if r["devices"] == num_devices]
        assert len(results) == int(row[1]) == 40
        gaps = np.array([r["makespan"] / r["best"] - 1 for r in results])
        assert gaps.min() >= 0
        reported = [float(row[4]), float(row[5]), float(row[6].split()[0])]
        expected = [gaps.mean(), np.median(gaps), gaps.max()]
        np.testing.assert_allclose(reported, 100 * np.array(expected), atol=0.006)


def test_unpublished_and_missing_graphs_are_refused(tmp_path):
    folder = tmp_path / "stg50"
    folder.mkdir()
    for num_devices in DEVICES:
        (folder / f"Case50_{num_devices}_OPT.csv").write_text("50/a.stg,2,10\n")
    settings = NeutralSettings(graphs=tmp_path, runs=tmp_path / "runs")
    with pytest.raises(ValueError, match=r"stg50: there is no \.stg file"):
        neutral.main(settings)
    (folder / "b.stg").write_text("1\n0 0 0\n1 9 1 0\n2 0 1 1\n")
    with pytest.raises(ValueError, match=r"b\.stg: no makespan is published for 2 devices"):
        neutral.main(settings)
    assert not (tmp_path / "runs").exists()
