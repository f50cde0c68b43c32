"""Calls are asynchronous: what is ready when, what a failure leaves, and who waits for whom."""

import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine.stream import StreamCall
from tests.kernels.conftest import (
    FAILING,
    FAILING_PROGRAM,
    X,
    build,
    check,
    compile_on,
    num_threads,
    run_plainly,
    spin_chain,
    wait,
)

W = np.eye(4, dtype=np.float32)
devices = pytest.mark.parametrize("devices", ["local", "ray_pair"])


@pytest.fixture
def pair(request, devices):
    return request.getfixturevalue(devices)[:2]


def add(state, x):
    """Two chains that meet, and a NaN where x has one."""
    left = jnp.tanh(state["a"] @ x) @ x
    right = jnp.tanh(state["b"] @ x) @ x
    return {"a": state["a"] + right, "b": state["b"] - left}, (left * right).sum()


def start():
    return {
        name: jnp.full((4, 4), value, jnp.float32) for name, value in (("a", 0.5), ("b", -0.25))
    }


def stepper(pair, mode=None, **options):
    sharded = dj.partition(dj.trace(add, start(), W, carry="state"), 2, strategy="uniform")
    placement = np.random.default_rng(0).integers(0, len(pair), sharded.graph.num_tasks)
    return compile_on(sharded, placement, pair, mode=mode, **options)


def plainly(count):
    state, seen = start(), []
    for _ in range(count):
        state, total = jax.jit(add)(state, W)
        seen.append(total)
    return state, seen


def equal(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


@devices
@pytest.mark.parametrize("mode", dj.engine.ProcessDevices.modes)
def test_a_chain_of_calls_is_the_plain_loop(pair, mode):
    step, state, seen = stepper(pair, mode), start(), []
    for _ in range(30):
        state, total = step(state, W)
        assert isinstance(total, jax.Array)
        seen.append(total)
    equal((state, seen), plainly(30))
    assert not step._loaded.calls.latest


def test_a_chain_on_accelerators_is_the_plain_loop(local):
    step, state = stepper(local[:2], "stream"), start()
    for _ in range(10):
        state, _ = step(state, W)
    equal(state, plainly(10)[0])


def test_a_call_is_behind_another_however_late_its_thread_wakes(local, monkeypatch):
    step, work = stepper(local[:2], "stream"), StreamCall.work
    first, _ = step(start(), W)

    def late(call):
        time.sleep(0.2)  # somebody waits for it by then
        work(call)

    monkeypatch.setattr(StreamCall, "work", late)
    behind, _ = step(first, W)
    equal(behind, plainly(2)[0])


@devices
def test_one_call_runs_ahead_and_the_next_one_waits(pair):
    step = compile_on(spin_chain(40), np.arange(40) % 2, pair)
    first, second = step(X), step(X)
    assert not any(call["out"].is_ready() for call in (first, second))
    third = step(X)
    assert first["out"].is_ready()
    assert not third["out"].is_ready()
    other = compile_on(build([("mean", ["i0", "i1"])], ["t0"]), [1], pair)
    other(X)  # has the devices when they are free
    assert third["out"].is_ready()
    wait(third)
    expected = run_plainly(spin_chain(40), X)["out"]
    for found in (first, second, third):
        np.testing.assert_allclose(found["out"], expected, rtol=1e-4)


@devices
def test_a_failure_gives_back_the_state_before_it(pair):
    step = stepper(pair, check_nan=True)
    before, _ = step(start(), W)
    failed, total = step(before, W * np.nan)
    with pytest.raises(ValueError, match=r"^args\[0\]\['a'\] was carried into"):
        step(before, W)
    queued, _ = step(failed, W)
    assert before["a"].is_deleted()
    for use in (np.asarray, jnp.sum):
        with pytest.raises(ValueError, match="was carried into another call"):
            use(before["a"])
    with pytest.raises(
        dj.engine.TaskError, match=r"^task \d+ .* device [01] .*in call 2.*NaN"
    ) as e:
        float(total)
    assert e.value.call == 2
    for use in (lambda: np.asarray(queued["b"]), lambda: step(queued, W), lambda: wait(failed)):
        with pytest.raises(dj.engine.TaskError) as again:
            use()
        assert again.value is e.value
    equal(before, plainly(1)[0])
    equal(step(before, W)[0], plainly(2)[0])


@devices
def test_an_error_that_nobody_saw_ends_the_next_call(pair):
    step = stepper(pair, check_nan=True)
    step(start(), W * np.nan)
    step(start(), W)  # it runs ahead
    with pytest.raises(dj.engine.TaskError, match="in call 1"):
        step(start(), W)
    equal(step(start(), W)[0], plainly(1)[0])
    step(start(), W * np.nan)
    with pytest.raises(dj.engine.TaskError, match="in call 4"):
        print(step.whole_call)


@devices
def test_an_array_that_the_caller_made_is_refused_at_once(pair):
    step, state = stepper(pair), start()
    after, _ = step(state, W)
    with pytest.raises(ValueError, match=r"^args\[0\]\['a'\] was carried into"):
        step(state, W)
    wait(after)
    assert state["a"].is_deleted()


@devices
def test_the_call_behind_one_out_of_time_ends_with_it(pair):
    step = compile_on(spin_chain(300), np.arange(300) % 2, pair, timeout_s=0.1)
    first, second = step(X), step(X)
    for call in (second, first):
        with pytest.raises(dj.engine.TaskError, match=r"task \d+ \(spin.*in call 1.* 0.1 s"):
            wait(call)
    sharded = spin_chain(4)
    check(sharded, compile_on(sharded, np.arange(4) % 2, pair), rtol=1e-4)


def test_the_calls_behind_a_failing_task_end_with_it(local, monkeypatch):
    step = compile_on(FAILING_PROGRAM, [0, 1, 1, 0, 1, 0], local)
    threads = num_threads()
    monkeypatch.setitem(FAILING, "now", True)
    calls = [step(X), step(X)]
    for call in calls:
        with pytest.raises(dj.engine.TaskError, match=r"^task 2 .* device 1 .*in call 1.*boom"):
            wait(call)
    assert num_threads() == threads
    monkeypatch.setitem(FAILING, "now", False)
    check(FAILING_PROGRAM, step, rtol=1e-4)


def test_a_process_killed_in_a_chain_leaves_nothing(ray_pair):
    ray = pytest.importorskip("ray")
    with dj.ray_devices(2) as devices:
        step, state = stepper(devices), start()
        first, _ = wait(step(state, W))
        before, _ = step(first, W)
        wait(before)
        os.kill(ray.get(devices[1].call("process_id")), signal.SIGKILL)
        second, _ = step(before, W)
        third, _ = step(second, W)
        for state in (third, second):
            with pytest.raises(dj.engine.TaskError, match=r"^device 1 \(.*was lost, in call 3"):
                wait(state)
        assert not step._loaded.calls.latest
        assert devices.alive() == (0,)
        left = stepper(devices.without_lost())
        equal(left(start(), W)[0], plainly(1)[0])
        out = left(start(), W)[1]
    equal(out, plainly(1)[1][0])  # it had come before the devices were closed
