"""`make demo`, small: what it writes, and that it goes on where it was stopped."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import doppler_jax as dj
from experiments import demo
from experiments.demo import DemoSettings
from experiments.problems import choose_workload
from tests.commands import snapshot

METHODS = ("critical path", "random, best of 1000", "learned")
SIMULATED = (*METHODS[:2], "critical path, cut by the planner", METHODS[2])


def run_demo(folder, **changes):
    settings = {"imitation_updates": 2, "simulation_updates": 2, "system_updates": 1}
    settings |= {"backend": "local"}
    demo.main(DemoSettings(folder=folder, **(settings | changes)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of a demo on the devices that this process has."""
    folder = tmp_path_factory.mktemp("demo") / "runs" / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "use_host_devices", lambda count: None)
        run_demo(folder)
    return folder


@pytest.fixture(autouse=True)
def _devices_are_settled(monkeypatch):
    monkeypatch.setattr(demo, "use_host_devices", lambda count: None)


@pytest.mark.slow
def test_summary_has_every_method_on_both(finished):
    summary = json.loads((finished / "summary.json").read_text())
    assert {"commit", "date", "machine", "devices", "jax"} <= set(summary["provenance"])
    assert summary["settings"]["simulation_updates"] == "2"
    preset = choose_workload("chainmm", "paper", dj.make_cluster("p100x4"), "p100x4", "uniform")
    bound = dj.lower_bound_s(preset.graph, preset.costs)
    measured = [row["method"] for row in summary["measured"]]
    for names, rows in ((SIMULATED, list(summary["simulated"])), (METHODS, measured)):
        for name, row in zip(names, rows, strict=True):
            assert row.startswith(name)
    planned_s = summary["simulated"].pop(SIMULATED[2])  # another graph: another bound
    assert 0 < planned_s < 2 * bound
    assert all(seconds >= bound for seconds in summary["simulated"].values())
    assert summary["output_error"] <= 1e-4
    for row in summary["measured"]:
        low, high = row["quartiles_s"]
        assert 0 < low <= row["measured_s"] <= high


@pytest.mark.slow
def test_figures_can_be_had_again(finished):
    summary = json.loads((finished / "summary.json").read_text())
    here = choose_workload(
        "chainmm", "small", dj.load_cluster(finished / "host.json"), "host", "uniform"
    )
    calibration = dj.load_calibration(finished / "calibration-local.json")
    costs = dj.make_costs(here.sharded, calibration)
    for row in summary["measured"]:
        schedule = dj.simulate_oracle(here.graph, costs, row["placement"])
        assert row["simulated_s"] == dj.makespan_s(schedule)
    written = json.loads((finished / "placement.json").read_text())
    assert written["placement"] == summary["measured"][-1]["placement"]
    assert written["tasks"] == list(here.sharded.names)
    policy = dj.load_policy(finished / "stage3" / f"{here.name}-local")
    placed = dj.place(here.graph, costs, policy=policy, max_evaluations=64)
    assert np.isfinite(placed.makespan_s)


@pytest.mark.slow
def test_pictures_and_traces_open(finished):
    assert (finished / "gantt.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((finished / "trace.json").read_text())["traceEvents"]
    placement = json.loads((finished / "placement.json").read_text())
    spans = {event["name"] for event in events if event["ph"] == "X"}
    assert set(placement["tasks"]) <= spans


@pytest.mark.slow
def test_a_second_run_trains_and_logs_nothing(finished):
    def trained():
        return {path: content for path, content in snapshot(finished).items()
                if "stage" in str(path.relative_to(finished))}  # fmt: skip

    before = trained()
    log = finished / "stage3" / "chainmm-small-uniform-host-local" / "measurements.jsonl"
    assert before[log]
    run_demo(finished)
    assert trained() == before


@pytest.mark.slow
def test_devices_are_isolated_by_default(tmp_path):
    pytest.importorskip("ray")
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "experiments.demo", "--folder", str(folder)]
    for stage in ("imitation", "simulation", "system"):
        command += [f"--{stage}-updates", "1"]
    root = pathlib.Path(demo.__file__).parents[1]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "tasks on 2 CPU devices of a core each" in ended.stdout
    assert "share the machine's cores" not in ended.stdout
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["output_error"] <= 1e-4
    assert summary["settings"]["backend"] == "auto"


@pytest.mark.slow
def test_other_settings_are_refused(finished):
    before = snapshot(finished)
    with pytest.raises(ValueError, match=r"config\.json belongs to a run with other settings"):
        run_demo(finished, seed=1)
    assert snapshot(finished) == before


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
