"""Devices to measure on, turns, and pinned processes."""

import numpy as np
import pytest

import doppler_jax as dj
from experiments import machine
from experiments.machine import Machine, in_turns, warm, warm_ratio


def test_what_is_compared_takes_turns_after_a_cold_round(monkeypatch):
    monkeypatch.setattr(machine.time, "sleep", lambda _: None)
    played = []

    def play(what, values):
        played.append(what)
        return next(values)

    slow, fast = iter((9.0, 4.0, 40.0, 4.0)), iter((5.0, 1.0, 10.0, 2.0))
    found = in_turns(
        {"slow": lambda: play("slow", slow), "fast": lambda: play("fast", fast)}, 3
    )
    assert found == {"slow": [9.0, 4.0, 40.0, 4.0], "fast": [5.0, 1.0, 10.0, 2.0]}
    assert played[:2] == ["slow", "fast"]
    assert [sorted(played[k : k + 2]) for k in (2, 4, 6)] == [["fast", "slow"]] * 3
    assert (warm(found["slow"]), warm(found["fast"])) == (4.0, 2.0)
    # Per round, so that the second, slow for both, does not count: 4, 4 and 2.
    assert warm_ratio(found["slow"], found["fast"]) == 4.0


def test_no_turn_begins_after_the_seconds_but_the_least_ones(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(machine.time, "sleep", lambda _: None)
    monkeypatch.setattr(machine.time, "monotonic", lambda: float(next(clock)))
    found = in_turns({"one": lambda: 1, "other": lambda: 2}, 9, seconds=3.0, least=2)
    # The clock is asked at the beginning and, by a second each, before the third turn and on.
    assert found == {"one": [1] * 6, "other": [2] * 6}
    clock = iter(range(100))
    found = in_turns({"one": lambda: 1}, 9, seconds=0.0, least=4)
    assert found == {"one": [1] * 5}


@pytest.mark.slow
def test_a_calibrated_workload_is_measured_once(tmp_path, monkeypatch):
    workload = dj.workloads.make_workload("chainmm", "small")
    with Machine(2, "local") as here:
        first = here.calibrated(workload, tmp_path)
        again = here.calibrated(workload, tmp_path)
        np.testing.assert_array_equal(first.costs.compute_s, again.costs.compute_s)
        placements = {"alone": np.zeros(first.graph.num_tasks, int)}
        seconds = machine.measure_plans(here, first, placements, 2)
    assert len(seconds["alone"]) == 2
    assert min(seconds["alone"]) > 0
    assert here.key == {"devices": 2, "backend": "local"}
