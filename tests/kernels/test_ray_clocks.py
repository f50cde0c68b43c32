"""One clock out of several, without any process."""

import types

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine.plan import make_plan
from doppler_jax.engine.processes import driver
from doppler_jax.engine.processes.device import DeviceResult
from tests.kernels.conftest import build

SHARDED = build([("make", []), ("mean", ["t0", "t0"]), ("mean", ["t1", "t1"])], ["t2"])
PLAN = make_plan(SHARDED, np.array([0, 1, 0]), None)


def results(ahead_s):
    """Tasks of 1 s and transfers of 0.1 s on devices whose clocks are 10 s, and `ahead_s`."""
    a, b = 10.0, ahead_s
    return [
        DeviceResult(
            [(0, a, a + 1.0), (2, a + 2.2, a + 3.2)],
            [(1, b + 2.1, a + 2.2)],
            [(a + 1.0, a + 1.05), (a + 2.1, a + 2.2)],
            {},
            None,
            None,
        ),
        DeviceResult(
            [(1, b + 1.1, b + 2.1)],
            [(0, a + 1.0, b + 1.1)],
            [(b + 1.0, b + 1.1)],
            {},
            None,
            None,
        ),
    ]


@pytest.mark.parametrize("error_s", [0.0, 0.05, 0.5, -0.5])
def test_no_tensor_arrives_before_it_is_sent(error_s):
    record = driver.make_record(PLAN, results(7.0), [10.0, 7.0 + error_s])
    trace = record.schedule()
    dj.validate(SHARDED.graph, trace, tolerance=1e-12)
    assert trace.start_s.min() == 0.0
    # Moved no further than causes and effects ask for.
    np.testing.assert_allclose(trace.start_s[1], 1.1 - np.clip(error_s, -0.1, 0.1), atol=1e-9)
    np.testing.assert_allclose(trace.finish_s[2], 3.2, atol=1e-9)
    # What a device spends on transfers keeps its distance from its tasks.
    handling = record.handling
    assert handling.device.tolist() == [0, 0, 1]
    np.testing.assert_allclose(handling.start_s[:2], [1.0, 2.1], atol=1e-9)
    np.testing.assert_allclose(handling.finish_s[1:], trace.start_s[[2, 1]], atol=1e-9)


def test_clocks_of_other_machines_are_read_by_round_trips(monkeypatch):
    now = [0.0]

    def answer(devices, method, arguments):
        now[0] += 0.25  # on the way there
        there_s = now[0] + 100.0
        now[0] += 0.25
        return [there_s]

    monkeypatch.setattr(driver, "ask_all", answer)
    monkeypatch.setattr(driver, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    here = types.SimpleNamespace(host=driver.this_host())
    there = types.SimpleNamespace(host="another")
    assert driver.clock_offsets_s([here, there]) == [0.0, 100.0]
