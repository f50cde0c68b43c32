"""State that stays on the devices between calls: loops, failures, and what a user sees."""

import copy
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import doppler_jax as dj
from doppler_jax.programs.outputs import Output
from tests.kernels.conftest import all_modes, compile_on, wait


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


BATCH = normal(0, 8, 4), normal(1, 8, 4)


def train(state, x, y):
    """A step of something like Adam, and a leaf that goes through."""

    def loss(params):
        return ((jnp.tanh(x @ params["w"] + state["bias"][None]) @ params["v"] - y) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mean)
    return {**state, "params": params, "mean": mean, "step": state["step"] + 1}, value


def new_state():
    params = {"w": jnp.asarray(normal(2, 4, 8)), "v": jnp.asarray(normal(3, 8, 4))}
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mean": zeros, "step": jnp.int32(0), "bias": jnp.ones(8)}


@pytest.fixture(scope="module")
def sharded():
    return dj.partition(dj.trace(train, new_state(), *BATCH, carry=0), 2, strategy="uniform")


def some_plan(sharded, seed=0):
    return np.random.default_rng(seed).integers(0, 2, sharded.graph.num_tasks)


def expected(count):
    state = new_state()
    for _ in range(count):
        state, loss = jax.jit(train)(state, *BATCH)
    return state, loss


def equal(found, wanted):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6),
        found,
        wanted,
    )


def moves(schedule):
    ends = schedule.transfer_tensor, schedule.transfer_source, schedule.transfer_destination
    return sorted(zip(*map(np.ndarray.tolist, ends), strict=True))


def check_loop(step, monkeypatch):
    """Five calls: the plain loop's results, the simulated transfers, nothing put together."""
    state, wholes = new_state(), []
    with monkeypatch.context() as patch:
        patch.setattr(Output, "whole", lambda self: wholes.append(self))
        for _ in range(5):
            before = state
            state, loss = step(state, *BATCH)
            order = {"queue": step.plan.queue, "priority": step.plan.priority}
            dj.simulator.validate(step.graph, step.schedule, tolerance=0, **order)
            costs = dj.make_costs(step.graph, dj.make_cluster("p100x4"))
            simulated = dj.simulator.simulate_oracle(step.graph, costs, step.plan.placement)
            assert moves(step.schedule) == moves(simulated)
            assert state["bias"] is before["bias"]
    assert not wholes
    equal((state, loss), expected(5))
    return before, state


@all_modes
def test_a_loop_equals_the_plain_one(local, sharded, mode, monkeypatch):
    step = compile_on(sharded, some_plan(sharded), local, mode=mode)
    before, state = check_loop(step, monkeypatch)
    assert "carried into another call" in repr(before["params"]["w"])
    for use in (np.asarray, jnp.sum, lambda w: w + 1):
        with pytest.raises(ValueError, match=r"float32\[4, 8\] was carried into another call"):
            use(before["params"]["w"])
    with pytest.raises(ValueError, match=r"^args\[0\]\['mean'\]\['v'\] was carried into"):
        step(before, *BATCH)
    equal(step(state, *BATCH), expected(6))  # and that changed nothing


def test_a_loop_of_fused_segments(local, sharded, monkeypatch):
    step = compile_on(sharded, some_plan(sharded), local, fuse_segments=True)
    assert step.graph.num_tasks < sharded.graph.num_tasks
    check_loop(step, monkeypatch)


@pytest.mark.parametrize("mode", dj.engine.ProcessDevices.modes)
def test_a_loop_on_processes(ray_pair, sharded, mode, monkeypatch):
    check_loop(compile_on(sharded, some_plan(sharded), ray_pair, mode=mode), monkeypatch)


@pytest.mark.parametrize("devices", ["local", "ray_pair"])
def test_what_a_user_does_with_state(request, sharded, devices, tmp_path):
    devices = request.getfixturevalue(devices)
    step = compile_on(sharded, some_plan(sharded), devices, check_nan=True)
    first = new_state()
    state, _ = wait(step(first, *BATCH))
    assert first["params"]["w"].is_deleted()
    assert not first["bias"].is_deleted()
    # A call that fails takes nothing, be it the first with a state or a later one.
    for count in (1, 2):
        with pytest.raises(dj.engine.TaskError, match="NaN"):
            wait(step(state, np.full_like(BATCH[0], np.nan), BATCH[1]))
        jax.block_until_ready(state)
        equal(state, expected(count)[0])
        state, _ = step(state, *BATCH)
    # It is an array to everybody else.
    w, wanted = state["params"]["w"], expected(3)[0]["params"]["w"]
    same = copy.deepcopy(w), jnp.add(w, 0), jax.jit(lambda a: a)(w), w.T.T, w + 0, 0 + w, w[:]
    equal(same, (wanted,) * len(same))
    assert (w.shape, w.dtype, w.weak_type, len(w)) == ((4, 8), jnp.float32, False, 4)
    assert isinstance(w, jax.Array)
    assert repr(w) == repr(jnp.asarray(w))
    # Another placement takes it as one, and a checkpoint's arrays begin anew.
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        saved = checkpointer.restore(tmp_path / "state")
    other = compile_on(sharded, some_plan(sharded, 1), devices)
    equal(other(state, *BATCH), expected(4))
    saved, _ = step(saved, *BATCH)
    equal(step(saved, *BATCH), expected(5))


def test_state_is_gone_with_its_devices(ray_pair, sharded):
    ray = pytest.importorskip("ray")
    with dj.ray_devices(2) as devices:
        step = compile_on(sharded, some_plan(sharded), devices)
        state, _ = wait(step(new_state(), *BATCH))
        os.kill(ray.get(devices[1].call("process_id")), signal.SIGKILL)
        for use in (lambda: jax.tree.map(np.asarray, state), lambda: wait(step(state, *BATCH))):
            with pytest.raises(dj.engine.TaskError, match=r"^device 1 \(.*was lost") as caught:
                use()
            assert (caught.value.task, caught.value.device) == (-1, 1)
    with pytest.raises(ValueError, match="the devices were closed; start others"):
        jax.tree.map(np.asarray, state)


def test_measuring_takes_nothing(local, sharded):
    args = new_state(), *BATCH
    step = compile_on(sharded, some_plan(sharded), local)
    assert dj.engine.measure_s(step, *args, repeats=2) > 0
    measure = dj.engine.make_paired_measure(sharded, args, local[:2], max_slowdown=1e3)
    assert len(measure(some_plan(sharded, 1), some_plan(sharded), 2).candidate_s) == 2
    equal(step(*args), expected(1))


def test_the_state_before_counts_as_memory_until_the_end(local):
    x = jnp.eye(8)
    program = dj.trace(lambda state, x: state @ x @ x @ x, x + 0, x, carry=0)
    step = compile_on(dj.partition(program, 1), np.zeros(3, int), local, 1)
    step(x + 0, x)
    assert step.peak_bytes.tolist() == [4 * x.nbytes]  # x, the state, and what is made of it


def test_what_takes_a_place_unchanged(local):
    """Last call's parameters are kept by the state; an array that is passed twice stays."""

    def shift(state, x):
        return {"now": state["now"] * x, "last": state["now"]}, state["last"].sum()

    x = jnp.arange(4.0)
    state = plain = {"now": x, "last": jnp.zeros(4)}
    sharded = dj.partition(dj.trace(shift, state, x, carry="state"), 2)
    step = compile_on(sharded, some_plan(sharded), local)
    for _ in range(4):
        plain, wanted = shift(plain, x)
        state, total = step(state, x)
        equal((state, total), (plain, wanted))
    assert not x.is_deleted()
