import json
import os

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.types import Schedule
from experiments import engine, engine_comparisons, engine_overhead, engine_tables, pinned
from experiments.config import check_settings
from experiments.engine import EngineSettings
from experiments.engine_programs import SIZES, independent_tasks, load_workload, relay
from experiments.machine import Machine, cores, in_turns
from experiments.pinned import SHARDINGS, Pinned


@pytest.fixture(scope="module")
def machine():
    with Machine(2) as found:
        yield found


def run_on(machine, program, places):
    sharded, args = program
    step = machine.compile(sharded, places, "local")
    return step, step(*args)


def test_tiny_tasks_wait_for_nothing_and_a_relay_for_everything(machine):
    step, out = run_on(machine, independent_tasks(6), [0, 1] * 3)
    assert out.tolist() == [1.0] * 64
    assert step.trace.transfer_tensor.size == 0
    step, out = run_on(machine, relay(6, length=3), [0, 1] * 3)
    assert out.tolist() == [6.0] * 3
    assert step.trace.transfer_tensor.tolist() == [0, 1, 2, 3, 4]


def test_sizes_are_of_workloads_that_exist():
    for name, sizes in SIZES.items():
        assert dj.make_workload(name, "small", **sizes).sizes == sizes


def test_workloads_are_cut_for_the_devices():
    sharded, args = load_workload("chainmm", 2, small=True)
    assert args[0].shape == (512, 512)
    assert sharded.graph.num_tasks > 4


def test_turns_alternate_and_the_first_does_not_count():
    seen = []

    def run(name):
        seen.append(name)
        return float(len(seen))

    found = in_turns({name: lambda name=name: run(name) for name in "ab"}, rounds=2)
    assert seen == ["a", "b"] * 3
    assert {name: values.tolist() for name, values in found.items()} == {
        "a": [3.0, 5.0],
        "b": [4.0, 6.0],
    }


def test_a_machine_refuses_devices_that_are_not_there():
    with Machine(99) as found, pytest.raises(ValueError, match="99 devices asked for, 4 there"):
        found.devices("local")


def test_the_period_is_from_start_to_start_on_one_device():
    nothing = np.zeros(0)
    trace = Schedule(
        placement=np.array([0, 1, 0, 1, 0]),
        start_s=np.array([0.0, 100.0, 3.0, 105.0, 4.0]),
        finish_s=np.array([1.0, 101.0, 4.0, 106.0, 5.0]),
        transfer_tensor=nothing.astype(int),
        transfer_source=nothing.astype(int),
        transfer_destination=nothing.astype(int),
        transfer_start_s=nothing,
        transfer_finish_s=nothing,
    )
    assert engine_overhead._period_s(trace) == 3  # of 3, 1 and 5


def test_cells_of_overhead_hold_all_that_the_tables_show(machine):
    cell = engine_overhead.task_cell(machine, "local", 20, rounds=1)
    ran = {f"local, {mode}" for mode in engine_overhead.MODES["local"]}
    assert set(cell["per_task_s"]) == {*engine_tables.BARE, *ran}
    assert min([*cell["per_task_s"].values(), *cell["overhead_s"].values()]) > 0
    text = engine_tables.task_table("local", 20, cell)
    assert text.count("\n| local, ") == len(ran)
    moved = engine_overhead.transfer_cell(machine, "local", 64, num_transfers=3, rounds=1)
    assert set(moved["transfer_s"]) == {"bare device_put, awaited", "local"}
    assert "| local | 64 |" in engine_tables.transfer_table({("local", 64): moved})


def test_idle_time_is_of_random_placements(machine):
    cell = engine_overhead.idle_cell(machine, "local", "chainmm", 2, rounds=1, seed=0)
    assert 0 < cell["gap_median_s"] <= cell["gap_p99_s"] < cell["makespan_s"]
    assert cell["task_gap_p99_s"] == pytest.approx(cell["gap_p99_s"])  # of one round
    assert 0 < cell["idle_share_mean"] <= cell["idle_share_max"] < 1
    assert 0 < cell["bare_gap_median_s"] <= cell["bare_gap_p99_s"] < cell["makespan_s"]
    assert "| local | chainmm |" in engine_tables.idle_table({("local", "chainmm"): cell}, 2, 2)


def test_a_pinned_process_has_its_cores_and_says_when_it_ends():
    core = cores()[:1]
    with Pinned(core) as process:
        assert process.seconds(matmul=8, repeats=2) > 0
        assert sorted(os.sched_getaffinity(process.pid)) == core
        process.ask(matmul=-1, repeats=1)
        with pytest.raises(RuntimeError, match="a pinned process ended with code 1"):
            process.answer()
    with Pinned(core) as process:
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_arguments_are_sharded_as_named():
    args = ({"w": np.zeros((8, 6, 4))}, np.zeros((3, 12)), np.zeros(4), np.float32(1))
    spec = {
        sharding: [
            tuple(array.sharding.spec)
            for array in jax.tree.leaves(pinned._shard(args, sharding))
        ]
        for sharding in SHARDINGS
    }
    rows = [("x", None, None), (None, "x"), ("x",), ()]
    assert spec["rows"] == rows
    assert spec["columns"] == [(None, None, "x"), *rows[1:]]
    assert spec["argument 0"] == [rows[0], (None, None), (None,), ()]
    assert spec["argument 1"] == [(None, None, None), *rows[1:2], (None,), ()]


def test_what_a_pinned_process_times_is_the_workload():
    result = pinned._make(workload="chainmm", small=True, sharding="rows")()
    workload = dj.make_workload("chainmm")
    args = dj.make_arrays(workload, jax.random.key(0))
    np.testing.assert_allclose(result, workload.fn(*args), rtol=1e-4, atol=1e-4)
    assert len(result.sharding.device_set) == 4


def test_tables_of_comparisons():
    halved = {
        "one device": 0.2,
        "all devices": 0.11,
        "one process": 0.01,
        "all processes": 0.0105,
        "speed_up": 1.8,
        "ceiling": 1.9,
        "long_share": 0.9,
        "simulated_s": 0.1,
    }
    text = engine_tables.halving_table("ray", halved)
    assert "Backend `ray`; tasks of 10 ms or more are 90% of the compute" in text
    assert "| speed-up over ceiling | 0.947 |" in text
    modes = ("work_conserving", "bulk_synchronous")
    found = {
        "num_tasks": 36,
        "measured_s": dict(zip(modes, (0.1, 0.12), strict=True)),
        "measured_ratio": 1.2,
        "quartiles": [1.1, 1.25],
        "simulated_ratio": 1.3,
    }
    row = "| chainmm | 36 | 100 ms | 120 ms | 1.200 (1.100 to 1.250) | 1.300 | 1.333 |"
    text = engine_tables.sync_table("ray", {"chainmm": found, "moe_block": found})
    assert row in text
    assert row.replace("chainmm", "moe_block").replace(" 1.333 |", "  |") in text
    timed = {"a": {"seconds": {"jit, 1 core": 0.5}}, "b": {"seconds": {"jit, 2 cores": 0.25}}}
    text = engine_tables.jit_table("ray", timed)
    assert "| workload | jit, 1 core | jit, 2 cores |" in text
    assert "| a | 500 ms |  |\n| b |  | 250 ms |" in text


def test_parts_are_kept_and_measured_again_when_asked(tmp_path, monkeypatch, capsys):
    calls = []

    def cell(machine, backend, workload, num_placements, rounds, seed):
        calls.append((backend, workload, num_placements, rounds))
        gaps = (
            "gap_median_s",
            "gap_p99_s",
            "task_gap_p99_s",
            "idle_share_mean",
            "idle_share_max",
            "makespan_s",
        )
        bare = {"bare_gap_median_s": 0.01, "bare_gap_mean_s": 0.02, "bare_gap_p99_s": 0.05}
        return {"num_tasks": 3, **dict.fromkeys(gaps, 0.25), **bare}

    monkeypatch.setattr(engine_overhead, "idle_cell", cell)
    settings = {"parts": ("idle",), "backend": "local", "quick": True, "runs": tmp_path}
    engine.run(EngineSettings(**settings))
    assert calls == [("local", name, 3, 3) for name in dj.list_workloads()]
    engine.run(EngineSettings(**settings))
    assert len(calls) == len(dj.list_workloads())
    engine.run(EngineSettings(again=True, **settings))
    assert len(calls) == 2 * len(dj.list_workloads())
    result = json.loads((tmp_path / "engine" / "engine.json").read_text())
    assert result["results"]["idle"]["local-chainmm"]["num_tasks"] == 3
    text = (tmp_path / "engine" / "engine.md").read_text()
    row = "| local | chainmm | 3 | 250 ms | 250 ms | 250 ms | 1.0 | 1.0 | 25.00% | 25.00% |"
    assert f"{row} 10.0 ms | 5.0 | 12.00% |" in text
    assert text.startswith(capsys.readouterr().out.split("\nIdle")[0][:20])


def test_refuses_settings_out_of_range():
    check_settings(EngineSettings())
    with pytest.raises(ValueError, match="--rounds is 0; expected at least 1"):
        engine.main(EngineSettings(rounds=0))
    with pytest.raises(ValueError, match="--devices is 1; expected at least 2"):
        engine.run(EngineSettings(devices=1))


@pytest.mark.slow
def test_comparisons_on_local_devices(machine, tmp_path):
    calibration = tmp_path / "calibration.json"
    cell = engine_comparisons.halving_cell(machine, "local", calibration, 1, small=True)
    assert cell["speed_up"] == cell["one device"] / cell["all devices"]
    assert cell["ceiling"] == 2 * cell["one process"] / cell["all processes"]
    arguments = (machine, "local", calibration, "chainmm", 1, True)
    cell = engine_comparisons.sync_cell(*arguments)
    assert cell["simulated_ratio"] >= 1
    assert cell["measured_ratio"] > 0
    cell = engine_comparisons.jit_cell(*arguments)
    assert cell["seconds"]["engine, makespan"] <= cell["seconds"]["engine, call"]
    assert {f"jit sharded, {sharding}" for sharding in SHARDINGS} < set(cell["seconds"])
