"""`make demo`, small: what it writes, and that it goes on where it was stopped."""

import json

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.simulator.oracle import simulate_plan
from experiments import demo
from experiments.catalogue import load_problem
from experiments.demo import DemoSettings
from tests.commands import printed, snapshot

METHODS = ("dj.place, 4 s", "critical path", "random, best of 1000", "learned")
SIMULATED = (*METHODS[:3], "critical path, cut by the planner", METHODS[3])


HERE = "chainmm-uniform2-rayx2"
"""The workload on the devices of the test: cut in 2, on 2."""

SMALL = {"imitation_updates": 2, "simulation_updates": 2, "system_updates": 1}


def run_demo(folder, **changes):
    """Runs it in this process, for what ends before a device is asked for."""
    demo.main(DemoSettings(folder=folder, **(SMALL | changes)))


def demo_command(folder):
    """Runs it as users do, and returns what it printed."""
    words = ["-m", "experiments.demo", "--folder", folder]
    for name, value in SMALL.items():
        words += [f"--{name.replace('_', '-')}", value]
    return printed(*words)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of a demo, and what it printed."""
    pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("demo") / "runs" / "demo"
    return folder, demo_command(folder)


@pytest.fixture(autouse=True)
def _devices_are_settled(monkeypatch):
    monkeypatch.setattr(demo, "use_host_devices", lambda count: None)


@pytest.mark.slow
def test_summary_has_every_method_on_both(finished):
    folder, said = finished
    assert "tasks on 2 CPU devices of a core each" in said  # isolated by default
    assert "share the machine's cores" not in said
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["settings"]["backend"] == "auto"
    assert {"commit", "date", "machine"} <= set(summary["provenance"])
    assert summary["settings"]["simulation_updates"] == "2"
    preset = load_problem("chainmm:p100x4:uniform")
    bound = dj.lower_bound_s(preset.graph, preset.costs)
    measured = [row["method"] for row in summary["measured"]]
    for names, rows in ((SIMULATED, list(summary["simulated"])), (METHODS, measured)):
        for name, row in zip(names, rows, strict=True):
            assert row.startswith(name)
    planned_s = summary["simulated"].pop(SIMULATED[3])  # another graph: another bound
    assert 0 < planned_s < 2 * bound
    least_s = bound * (1 - 1e-9)  # which sums in another order
    assert all(seconds >= least_s for seconds in summary["simulated"].values())
    assert summary["output_error"] <= 1e-4
    for row in summary["measured"]:
        low, high = row["quartiles_s"]
        assert 0 < low <= row["measured_s"] <= high


@pytest.mark.slow
def test_figures_and_pictures_can_be_had_again(finished):
    folder = finished[0]
    summary = json.loads((folder / "summary.json").read_text())
    here = load_problem("chainmm/small:p100x4:uniform2")
    calibration = dj.clusters.load_calibration(folder / f"calibration-{HERE}.json")
    costs = dj.make_costs(here.sharded, calibration)
    for row in summary["measured"]:
        plan = dj.Plan(row["placement"], row["priority"], row["queue"])
        schedule = simulate_plan(here.graph, costs, plan)
        assert row["simulated_s"] == dj.simulator.makespan_s(schedule)
    written = json.loads((folder / "placement.json").read_text())
    assert written["placement"] == summary["measured"][-1]["placement"]
    assert written["tasks"] == list(here.sharded.names)
    assert (folder / "gantt.png").read_bytes().startswith(b"\x89PNG")
    assert "learned</title>" in (folder / "report.html").read_text()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert set(written["tasks"]) <= {event["name"] for event in events if event["ph"] == "X"}
    policy = dj.load_policy(folder / "stage3" / HERE)
    placed = dj.place(here.graph, costs, policy=policy, max_evaluations=64)
    assert np.isfinite(placed.makespan_s)


@pytest.mark.slow
def test_a_second_run_trains_and_logs_nothing(finished):
    folder = finished[0]

    def trained():
        return {path: content for path, content in snapshot(folder).items()
                if "stage" in str(path.relative_to(folder))}  # fmt: skip

    before = trained()
    log = folder / "stage3" / HERE / "measurements.jsonl"
    assert before[log]
    demo_command(folder)
    assert trained() == before


@pytest.mark.slow
def test_other_settings_are_refused(finished):
    folder = finished[0]
    before = snapshot(folder)
    with pytest.raises(ValueError, match=r"config\.json belongs to a run with other settings"):
        run_demo(folder, seed=1)
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": "chain"}, "unknown workload 'chain'"),
        ({"cluster": "p1000"}, "unknown cluster 'p1000'"),
        ({"seed": -1}, "--seed is -1"),
        ({"system_updates": -1}, "--system-updates is -1; expected at least 0"),
    ],
)
def test_bad_settings_are_refused_before_any_work(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run_demo(tmp_path / "demo", **changes)
    assert list(tmp_path.iterdir()) == []


def test_the_default_settings_fit_a_process(monkeypatch):
    # The demo's own process has 2 devices; this one's number is settled.
    counts = []
    monkeypatch.setattr(demo, "use_host_devices", counts.append)
    with pytest.raises(ValueError, match="unknown cluster"):
        run_demo(None, cluster="nowhere")
    assert counts == [2]
    assert len(jax.devices()) == 4


def test_an_unknown_backend_is_refused_before_any_work(tmp_path):
    settings = demo.DemoSettings(folder=tmp_path / "demo", backend="mpi")
    with pytest.raises(ValueError, match="--backend: unknown 'mpi'; known: auto, local, ray"):
        demo.main(settings)
    assert not (tmp_path / "demo").exists()
