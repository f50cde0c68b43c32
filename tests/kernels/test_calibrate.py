"""Calibration through the engine: all of a program, once, and on from where it stopped."""

import dataclasses
import itertools
import json
import types
from collections import Counter

import jax
import numpy as np
import pytest

import doppler_jax as dj
import doppler_jax.engine.__main__ as entry
from doppler_jax.costs.observed import Observations
from doppler_jax.engine import calibrate
from doppler_jax.engine.calibrate import (
    _pooled_medians,
    handling_program,
    kernel_program,
    measure_kernels_again,
    transfer_program,
)
from doppler_jax.engine.placed import PlacedFunction, as_devices, as_plan
from tests.commands import assert_one_error_line, printed, run
from tests.generators import free_costs
from tests.kernels.conftest import KERNELS, X, build, random_program

TASKS = [("make", []), ("mean", ["t0", "i0"]), ("split", ["t1"]), ("spin", [("t2", 1)])]


@pytest.fixture(scope="module")
def sharded():
    return build(TASKS, ["t3"])


def measure(sharded, path, **options):
    """Returns the calibration of two devices, and the steps that were told of."""
    told = []
    options |= {"path": path, "progress": lambda *what: told.append(what)}
    return dj.engine.measure_calibration(sharded, jax.devices()[:2], **options), told


@pytest.fixture(scope="module")
def measured(sharded, tmp_path_factory):
    """As of `measure`, and the calibration's file."""
    path = tmp_path_factory.mktemp("calibration") / "here.json"
    return *measure(sharded, path, repeats=3), path


def test_every_kernel_and_link_is_measured(sharded, measured):
    found, told, path = measured
    seconds = {kernel.name: kernel.seconds for kernel in found.kernels.values()}
    assert set(seconds) == {"make", "mean", "split", "spin"}
    for name in ("make", "mean", "split"):
        # Spin is a loop of milliseconds, the others are a dispatch.
        assert all(0 < y < z for y, z in zip(seconds[name], seconds["spin"], strict=True))
    assert (found.overhead_s > 0).all()
    costs = dj.make_costs(sharded, found)
    # Which of the two a few noisy measurements of small sizes give is no matter.
    small_s = costs.latency_s + 256 * costs.seconds_per_byte
    assert (small_s[[0, 1], [1, 0]] > 0).all()
    assert found.transfer_noise >= 0
    assert {b for _, _, b in found.transfers} == {256, 1024}
    assert told[0][1:] == (0, 2)
    assert told[-1] == ("done", 2, 2)
    np.testing.assert_equal(dj.clusters.load_calibration(path).kernels, found.kernels)


def test_devices_of_a_kind_share_their_measurements(measured):
    found, _, _ = measured
    for kernel in found.kernels.values():
        assert kernel.seconds[0] == kernel.seconds[1]
    rows, kinds = [[1.0, 2.0], [9.0, 9.0], [4.0, 8.0]], ("a", "b", "a")
    assert _pooled_medians(rows, kinds) == (3.0, 9.0, 3.0)


def test_what_the_file_has_is_not_measured_again(sharded, measured):
    found, _, path = measured
    again, told = measure(sharded, path)
    assert told == [("done", 0, 0)]
    assert again.kernels == found.kernels
    assert again.transfers == found.transfers


@pytest.mark.slow
def test_calls_are_measured_once_and_kept(sharded, measured, tmp_path):
    path = tmp_path / "calls.json"
    path.write_text(measured[2].read_text())
    found, told = measure(sharded, path, calls=True, repeats=1)
    assert told == [("calls", 0, 1), ("done", 1, 1)]
    assert found.calls.beyond_s(sharded) > 0
    again, told = measure(sharded, path, calls=True)
    assert told == [("done", 0, 0)]
    assert again.calls == found.calls


def test_kernels_alone_are_measured_again(sharded, measured):
    found = measured[0]
    absurd = {k: dataclasses.replace(t, seconds=(7.0, 7.0)) for k, t in found.kernels.items()}
    other = {"of another program": absurd[next(iter(absurd))]}
    before = dataclasses.replace(found, kernels=absurd | other)
    again = measure_kernels_again(before, sharded, jax.devices()[:2], repeats=1)
    assert all(0 < max(again.kernels[k].seconds) < 7 for k in found.kernels)
    assert again.kernels["of another program"] == other["of another program"]
    assert (again.transfers, again.handling) == (found.transfers, found.handling)


def test_it_goes_on_from_where_it_stopped(sharded, measured, tmp_path):
    found, _, path = measured
    data = json.loads(path.read_text())
    gone = next(k for k, t in data["kernels"].items() if t["name"] == "mean")
    del data["kernels"][gone]
    partial = tmp_path / "partial.json"
    partial.write_text(json.dumps(data))
    again, told = measure(sharded, partial, repeats=1)
    assert told == [("1 kernels", 0, 1), ("done", 1, 1)]
    assert set(again.kernels) == set(found.kernels)
    kept = {k: t for k, t in again.kernels.items() if k != gone}
    assert kept == {k: t for k, t in found.kernels.items() if k != gone}


def test_a_stop_keeps_what_was_measured(sharded, tmp_path):
    path = tmp_path / "here.json"

    def stop(what, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dj.engine.measure_calibration(
            sharded, jax.devices()[:2], repeats=1, path=path, progress=stop
        )
    kept = dj.clusters.load_calibration(path)
    assert len(kept.kernels) == 4
    assert not kept.transfers


def test_where_seconds_are_short_no_more_than_the_least_is_run(sharded, monkeypatch):
    runs, run = Counter(), PlacedFunction.__call__

    def count(step, *args):
        runs[step] += 1
        return run(step, *args)

    monkeypatch.setattr(PlacedFunction, "__call__", count)
    dj.engine.measure_calibration(
        sharded, jax.devices()[:2], repeats=50, budget_s=1e-6, calls=True
    )
    assert len(runs) > 6  # kernels, handling, and what else calls do
    assert set(runs.values()) == {calibrate.WARM_UPS + calibrate.LEAST}


def test_every_size_of_transfer_has_a_share_of_the_time(monkeypatch):
    until_s, now_s = [], 100.0

    def spend_what_is_there(bench, *args):
        nonlocal now_s
        until_s.append(bench.until_s)
        now_s = bench.until_s + (2.0 if len(until_s) == 1 else 0.0)  # the first takes too long
        if len(until_s) == 1:
            return Observations({}, {}, {(1, 2, b): [1e-3] for b in sizes})
        return np.zeros((3, 2, 3))  # ends, by round, placement and device

    clock = types.SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(calibrate, "time", clock)  # other threads need theirs
    for name in ("observe", "finishes"):
        monkeypatch.setattr(calibrate._Bench, name, spend_what_is_there)
    sizes = [256, 1 << 20, 1 << 22]
    bench = calibrate._Bench(as_devices(jax.devices()[:3]), 9, until_s=112.0)
    calibrate._with_transfers(bench, calibrate._begin(bench.devices, None), sizes, 1, 2)
    # A quarter of 12 s, then, as 2 s more went by, thirds of the 7 that are left.
    assert until_s == pytest.approx([103.0, 105 + 7 / 3, 105 + 14 / 3, 112.0])


def test_a_file_of_other_devices_and_no_repeats_are_refused(sharded, measured):
    with pytest.raises(ValueError, match="remove the file"):
        dj.engine.measure_calibration(sharded, jax.devices()[1:3], path=measured[2])
    with pytest.raises(ValueError, match="repeats is 0"):
        dj.engine.measure_calibration(sharded, jax.devices()[:2], repeats=0)


def test_kernel_programs_wait_for_nothing():
    kernels = [KERNELS["mean"], KERNELS["split"]]
    program, placement = kernel_program(kernels, 3)
    assert program.graph.num_edges == 0
    assert placement.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for d in range(3):
        assert list(program.kernels[3 * d + 1 : 3 * d + 3]) == kernels


def test_transfer_programs_move_each_size_each_way_alone():
    program, placement = transfer_program([256, 1024], 2, 1)
    costs = dj.make_costs(program.graph, dj.make_cluster("p100x4"))
    trace = dj.simulator.simulate_oracle(program.graph, costs, placement)
    moved_bytes = program.graph.tensor_bytes[trace.transfer_tensor]
    moved = np.stack([trace.transfer_source, trace.transfer_destination, moved_bytes], axis=1)
    expected = itertools.product((1, 2), (4.0, 256.0, 1024.0))
    assert sorted(moved.tolist()) == [[here, 3 - here, size] for here, size in expected]
    order = np.argsort(trace.transfer_start_s)
    assert (trace.transfer_finish_s[order][:-1] <= trace.transfer_start_s[order][1:]).all()


@pytest.mark.parametrize(("size", "sent"), [(256, 16), (1 << 20, 16), (1 << 24, 4)])
def test_handling_programs_differ_in_what_they_move_alone(size, sent):
    program, apart, home, priority = handling_program(size, 2, 1)
    for device in (1, 2):
        ours, theirs = (
            Counter(program.kernels[v].name for v in np.flatnonzero(placement == device))
            for placement in (apart, home)
        )
        assert ours == theirs
    costs = dj.make_costs(program.graph, dj.make_cluster("p100x4"))
    options = {"queue": "priority", "priority": priority}
    moves = dj.simulator.simulate_oracle(program.graph, costs, apart, **options)
    stays = dj.simulator.simulate_oracle(program.graph, costs, home, **options)
    assert len(stays.transfer_tensor) == 0
    links = zip(moves.transfer_source, moves.transfer_destination, strict=True)
    assert Counter(links) == {(2, 1): sent, (1, 2): sent}
    assert (program.graph.tensor_bytes[moves.transfer_tensor] == size).all()


def test_what_devices_spend_is_told_from_what_transfers_take(sharded, monkeypatch):
    """The engine replaced by the simulator, whose costs are known; three devices of a kind."""
    truth = {"latency": 3e-4, "per_byte": 1e-9, "handling": 1e-4, "handling_per_byte": 2e-10}
    pairs = []

    class Step:
        def __init__(self, program, plan, *_):
            plan = as_plan(plan)
            if plan.queue == "priority":
                pairs.append(tuple(sorted(set(plan.placement.tolist()))))
            n, off = program.graph.num_tasks, 1.0 - np.eye(3)
            costs = free_costs(
                program.graph,
                np.full((n, 3), 1e-3),
                latency_s=truth["latency"] * off,
                seconds_per_byte=truth["per_byte"] * off,
                handling_s=np.full(3, truth["handling"]),
                handling_s_per_byte=np.full(3, truth["handling_per_byte"]),
            )
            order = {"queue": plan.queue, "priority": plan.priority}
            self.trace = dj.simulator.simulate_oracle(
                program.graph, costs, plan.placement, **order
            )

        def run_traced(self, *args):
            return self.trace

    monkeypatch.setattr(calibrate, "load", Step)
    found = dj.engine.measure_calibration(sharded, jax.devices()[:3], repeats=1)
    assert set(pairs) == {(0, 1)}  # which stands for the other two
    costs = dj.make_costs(sharded, found)
    np.testing.assert_allclose(costs.handling_s, truth["handling"], rtol=1e-6)
    np.testing.assert_allclose(costs.handling_s_per_byte, truth["handling_per_byte"], rtol=1e-6)


def test_the_command_writes_a_file_and_prints_it(tmp_path):
    out = tmp_path / "here.json"
    words = ("-m", "doppler_jax.engine", "--out", out, "--repeats", "1")
    found = printed(*words, COLUMNS="120")
    assert "dot_general" in found
    assert "one end of a transfer" in found
    assert dj.clusters.load_calibration(out).num_devices == 2


def test_the_command_refuses_with_one_line(tmp_path, monkeypatch, capsys):
    words = ("--out", tmp_path / "here.json", "--workload", "nothing")
    assert run(monkeypatch, entry.main, entry.CalibrateSettings, *words) == 2
    assert_one_error_line(capsys.readouterr().err, "error: unknown workload 'nothing'")
    assert not list(tmp_path.iterdir())


def test_what_calibration_compiled_is_there_for_the_program():
    devices = dj.engine.LocalDevices(jax.devices()[:2])
    sharded = random_program(0, 8)
    dj.engine.measure_calibration(sharded, devices, repeats=1)
    compiled = len(devices.executables)
    dj.compile(sharded, np.arange(8) % 2, devices=devices)
    zeros = np.zeros(8, int)
    dj.engine.make_paired_measure(sharded, (X,), devices)(zeros, zeros, 1)
    assert len(devices.executables) == compiled
