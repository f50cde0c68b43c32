"""The experiments beside the table: ablation, barriers, scaling, samples, topology."""

import json

import numpy as np
import pytest

import doppler_jax as dj
from experiments import ablation, sample_efficiency, scaling, sync_vs_async, topology
from experiments.ablation import AblationSettings
from experiments.method_cells import paper_problem
from experiments.sample_efficiency import EfficiencySettings, best_by, marks
from experiments.scaling import ScalingSettings
from experiments.sync_vs_async import SyncSettings
from experiments.topology import TopologySettings
from experiments.topology_cells import PLACERS, islands, traffic_shares
from tests.experiments.test_table import HOST, record, table_rows

CHAINMM = {"workloads": ("chainmm",), "preset": "small", **HOST}


def test_barriers_are_compared_on_the_same_placement(tmp_path, monkeypatch):
    settings = SyncSettings(methods=("heft", "critical_path"), runs=tmp_path, **CHAINMM)
    sync_vs_async.main(settings)
    folder = tmp_path / "sync_vs_async"
    chosen = paper_problem("chainmm", "small")
    places = dj.place(chosen.graph, chosen.costs, method="heft").placement
    conserving_s = dj.makespan_s(dj.simulate_oracle(chosen.graph, chosen.costs, places))
    waiting_s = dj.makespan_s(dj.simulate_synchronous(chosen.graph, chosen.costs, places))
    assert waiting_s > conserving_s
    text = (folder / "sync_vs_async.md").read_text()
    (row,) = (row for row in table_rows(text) if row[1:3] == ["heft", "simulated"])
    assert float(row[3]) == pytest.approx(1e3 * conserving_s, rel=1e-3)
    assert float(row[4]) == pytest.approx(1e3 * waiting_s, rel=1e-3)
    assert row[5:] == [f"{waiting_s / conserving_s:.3f}", "1.333"]  # 185.3 / 139.0
    assert (folder / "chainmm.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(dj, "place", None)
    sync_vs_async.main(settings)
    assert (folder / "sync_vs_async.md").read_text() == text


@pytest.mark.slow
def test_barriers_are_measured_by_the_engine(tmp_path):
    settings = SyncSettings(
        methods=("heft",), measured=True, backend="local", rounds=3, quick=True,
        runs=tmp_path, **CHAINMM,
    )  # fmt: skip
    sync_vs_async.main(settings)
    text = (tmp_path / "sync_vs_async" / "sync_vs_async.md").read_text()
    (row,) = (row for row in table_rows(text) if row[2] == "measured")
    assert row[:2] == ["chainmm", "critical_path"]
    assert float(row[3]) > 0
    sync_vs_async.main(settings)
    assert (tmp_path / "sync_vs_async" / "sync_vs_async.md").read_text() == text


def test_curves_are_read_at_marks(tmp_path):
    run = {"curve": [[50, 200, 2000], [0.1, 0.2, 0.3], [5.0, 4.0, 3.0]]}
    assert marks(300) == [100, 300]
    assert marks(1000) == [100, 1000]
    assert [best_by(run, n) for n in (50, 199, 200, 1999, 10_000)] == [5.0, 5.0, 4.0, 4.0, 3.0]
    assert np.isnan(best_by(run, 49))
    runs = [
        record("ffnn", method, seed, None) | {"curve": [[first], [0.0], [makespan_s]]}
        for method, first, makespan_s in (("gdp", 10, 0.5), ("joint", 150, 0.3))
        for seed in (0, 1)
    ]
    runs[1]["curve"][2] = [0.7]
    rows = table_rows(sample_efficiency.tabulate(runs, marks(300)))
    assert rows[2:] == [
        ["ffnn", "gdp", "600.0 ± 100.0*", "600.0 ± 100.0"],
        ["ffnn", "joint", "-", "300.0*"],
    ]


@pytest.mark.slow
def test_learned_methods_have_curves(tmp_path, monkeypatch):
    settings = EfficiencySettings(
        methods=("gdp",), evaluations=300, seeds=1, runs=tmp_path, **CHAINMM
    )
    sample_efficiency.main(settings)
    folder = tmp_path / "sample_efficiency"
    results = json.loads((folder / "sample_efficiency.json").read_text())["results"]
    for result in results:
        spent, _, makespan_s = result["curve"]
        assert spent[-1] <= 300
        assert makespan_s[-1] == result["makespan_s"]
        assert makespan_s == sorted(makespan_s, reverse=True)
    assert (folder / "sample_efficiency.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "sample_efficiency.md").read_text()
    monkeypatch.setattr(dj, "place", None)
    sample_efficiency.main(settings)
    assert (folder / "sample_efficiency.md").read_text() == text


def timed(method, tasks, update_s):
    return {
        "method": method, "tasks": tasks, "batch": 4, "evaluations": 40, "update_s": update_s,
        "place_s": 0.5, "compile_s": 1.0, "place_compile_s": 1.0,
    }  # fmt: skip


def test_a_method_ends_where_it_would_take_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(
        scaling, "scaling_cell", lambda cells, method, n, *rest: timed(method, n, n * 1e-3)
    )
    settings = ScalingSettings(sizes=(10, 100, 1000), methods=("gdp",), limit_s=5.0, **HOST)
    records = scaling.grow(None, settings, "gdp", [10, 100, 1000])
    assert [r["tasks"] for r in records] == [10, 100]  # the next might take 10 s
    rows = table_rows(scaling.tabulate(records, settings))
    assert rows[3][:7] == ["gdp", "100", "4", "40", "100 ms", "25.0 ms", "2.50 ms"]
    assert "gdp 1.00 and 0.00" in scaling.tabulate(records, settings)
    assert scaling.growth_of(records[:1]) is None
    tmp_path.joinpath("scaling").mkdir()
    scaling.draw(tmp_path / "scaling", records)
    assert (tmp_path / "scaling" / "scaling.png").exists()


@pytest.mark.slow
def test_training_and_placing_are_timed(tmp_path, monkeypatch):
    settings = ScalingSettings(
        methods=("gdp",), sizes=(8, 12), num_devices=2, batch=2, repeats=1,
        runs=tmp_path, **HOST,
    )  # fmt: skip
    scaling.main(settings)
    text = (tmp_path / "scaling" / "scaling.md").read_text()
    assert [row[:2] for row in table_rows(text)[2:]] == [["gdp", size] for size in ("8", "12")]
    monkeypatch.setattr(dj, "place", None)
    scaling.main(settings)
    assert (tmp_path / "scaling" / "scaling.md").read_text() == text


def test_traffic_is_shared_out_by_bytes():
    """Island 0 is devices 0 to 3; what task 0 makes is read thrice, by tasks 1 to 3."""
    cluster = dj.make_cluster("v100x8")
    assert islands(cluster).tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    assert islands(dj.make_cluster("p100x4")).tolist() == [0, 0, 0, 0]
    graph = dj.make_graph(
        flops=np.ones(5),
        tensor_producer=[0, 1],
        tensor_bytes=[10.0, 70.0],
        edge_tensor=[0, 0, 0, 1],
        edge_reader=[1, 2, 3, 4],
    )
    shares = traffic_shares(graph, cluster, np.array([0, 0, 3, 4, 0]))
    assert shares == pytest.approx([0.8, 0.1, 0.1])
    assert traffic_shares(graph, cluster, np.zeros(5, int)).tolist() == [1, 0, 0]
    lonely, _ = dj.from_edge_delays([1.0], [], num_devices=2)
    assert traffic_shares(lonely, cluster, np.zeros(1, int)).tolist() == [0, 0, 0]


def test_topology_rows_are_means_over_seeds():
    runs = [
        {
            "workload": "ffnn",
            "makespan_s": dict.fromkeys(PLACERS, makespan_s),
            "shares": {placer: [0.5, inside, 0.5 - inside] for placer in PLACERS},
        }
        for makespan_s, inside in ((0.1, 0.2), (0.3, 0.4))
    ]
    rows = table_rows(topology.tabulate(runs, TopologySettings(seeds=2)))
    assert rows[2] == [
        "ffnn",
        PLACERS[0],
        "200.0 ± 100.0",
        "50.0%",
        "30.0%",
        "20.0%",
        "80.0%",
        "-",
    ]
    assert [row[-1] for row in rows[3:]] == ["82.7%", "94.7%"]


@pytest.mark.slow
def test_a_policy_goes_from_one_cluster_to_another(tmp_path, monkeypatch):
    """Of as many devices, and in updates of one size: training is compiled once."""
    settings = TopologySettings(
        source="reference_x4", target="p100x4", evaluations=2432, episodes=256, samples=8,
        seeds=1, runs=tmp_path, **CHAINMM,
    )  # fmt: skip
    topology.main(settings)
    folder = tmp_path / "topology"
    (found,) = json.loads((folder / "topology.json").read_text())["results"]
    target = paper_problem("chainmm", "small")
    for placer in PLACERS:
        places = np.array(found["placements"][placer])
        schedule = dj.simulate_oracle(target.graph, target.costs, places)
        assert dj.makespan_s(schedule) == found["makespan_s"][placer]
        shares = traffic_shares(target.graph, target.cluster, places)
        assert shares.tolist() == found["shares"][placer]
        assert shares.sum() == pytest.approx(1)
    text = (folder / "topology.md").read_text()
    monkeypatch.setattr(dj, "place", None)
    topology.main(settings)
    assert (folder / "topology.md").read_text() == text


def test_ablation_rows_stand_beside_the_paper():
    settings = AblationSettings(
        workloads=("chainmm",), variants=("doppler", "doppler_sel", "without stage 1"), seeds=2
    )
    values = {"doppler": 0.2, "doppler_sel": 0.4, "without stage 1": 0.1}
    records = [record("chainmm", m, s, v + 0.01 * s) for m, v in values.items() for s in (0, 1)]
    assert table_rows(ablation.tabulate(records, settings))[2:] == [
        ["doppler", "205.0 ± 5.0", "123.4"],
        ["doppler_sel", "405.0 ± 5.0", "127.0"],
        ["without stage 1", "105.0 ± 5.0*", "-"],
    ]
    measured = {"workload": "ffnn", "measured_s": {"a": [1.0, 5.0, 2.0], "b": [3.0, 3.0, 3.0]}}
    assert table_rows(ablation.tabulate_measured([measured]))[2:] == [
        ["ffnn", "2000 ± 1700*", "3000"]
    ]


@pytest.mark.slow
def test_stages_are_left_out_once(tmp_path, monkeypatch):
    variants = ("without stage 2",)
    settings = AblationSettings(
        variants=variants, seeds=1, budget_s=0.1, runs=tmp_path, **CHAINMM
    )
    ablation.main(settings)
    folder = tmp_path / "ablation"
    results = json.loads((folder / "ablation.json").read_text())["results"]["simulated"]
    assert [result["method"] for result in results] == list(variants)
    chosen = paper_problem("chainmm", "small")
    for result in results:
        schedule = dj.simulate_oracle(chosen.graph, chosen.costs, np.array(result["placement"]))
        assert dj.makespan_s(schedule) == result["makespan_s"]
    text = (folder / "ablation.md").read_text()
    monkeypatch.setattr(dj, "place", None)
    monkeypatch.setattr("experiments.ablation_cells.imitation_update", None)
    ablation.main(settings)
    assert (folder / "ablation.md").read_text() == text
