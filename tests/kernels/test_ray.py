"""The Ray backend on two processes: results, traces, memory."""

import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine.processes import driver
from doppler_jax.programs.workloads import make_arrays, make_workload
from doppler_jax.simulator.memory import peak_memory_bytes
from tests.kernels.conftest import build, random_program, run_plainly

X = np.linspace(0.0, 1.0, 8, dtype=np.float32)
MODES = driver.ProcessDevices.modes
SIZES = {
    "chainmm": {"n": 64},
    "ffnn": {"batch": 64, "features": 64, "hidden": 64, "classes": 32},
}

ray = pytest.importorskip("ray")
both_modes = pytest.mark.parametrize("mode", MODES)


def compile_on(sharded, placement, devices, **options):
    return dj.compile(sharded, placement, devices=devices, **options)


def check(sharded, step, x=X):
    out, expected = step(x), run_plainly(sharded, x)
    for name in ("in", "out"):
        np.testing.assert_allclose(out[name], expected[name], rtol=1e-4)
    dj.validate(sharded.graph, step.trace, tolerance=0)


@both_modes
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 8, 40])
def test_runs_random_programs(ray_pair, num_tasks, mode):
    rng = np.random.default_rng(num_tasks)
    for seed in range(4):
        sharded = random_program(seed, num_tasks) if num_tasks else build([], ["i0", "i2"])
        placement = rng.integers(0, 2, num_tasks)
        priority = rng.permutation(num_tasks) if seed % 2 else None
        step = compile_on(sharded, placement, ray_pair, mode=mode, priority=priority)
        for scale in (1.0, 2.0):
            check(sharded, step, scale * X)
        np.testing.assert_array_equal(step.trace.placement, placement)


@both_modes
@pytest.mark.parametrize("name", sorted(SIZES))
def test_equals_the_plain_function(ray_pair, name, mode):
    workload = make_workload(name, **SIZES[name])
    args = make_arrays(workload, jax.random.key(0))
    sharded = dj.partition(dj.trace(workload.fn, *workload.args), 4)
    expected = jax.jit(workload.fn)(*args)
    rng = np.random.default_rng(0)
    for _ in range(3):
        placement = rng.integers(0, 2, sharded.graph.num_tasks)
        step = compile_on(sharded, placement, ray_pair, mode=mode)
        np.testing.assert_allclose(step(*args), expected, atol=1e-4, rtol=1e-4)
        dj.validate(sharded.graph, step.trace, tolerance=0)


@pytest.mark.slow
@both_modes
@pytest.mark.parametrize("name", dj.list_workloads())
def test_every_workload_on_twenty_placements(ray_pair, name, mode):
    workload = make_workload(name, preset="small")
    args = make_arrays(workload, jax.random.key(0))
    sharded = dj.partition(dj.trace(workload.fn, *workload.args), 2)
    expected = jax.jit(workload.fn)(*args)
    rng = np.random.default_rng(0)
    for _ in range(20):
        placement = rng.integers(0, 2, sharded.graph.num_tasks)
        step = compile_on(sharded, placement, ray_pair, mode=mode)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-3),
            step(*args),
            expected,
        )
        dj.validate(sharded.graph, step.trace, tolerance=0)


def test_keys_and_small_floats_travel(ray_pair):
    def fn(x):
        keys = jax.random.split(jax.random.key(3))
        half = x.astype(jnp.bfloat16)
        return jax.random.key_data(keys), (half @ half).T

    x = np.eye(8, dtype=np.float32)
    sharded = dj.partition(dj.trace(fn, x), 2)
    moved = set()
    for flip in (0, 1):
        placement = (np.arange(sharded.graph.num_tasks) + flip) % 2
        step = compile_on(sharded, placement, ray_pair)
        jax.tree.map(np.testing.assert_array_equal, step(x), fn(x))
        moved |= {
            sharded.kernels[sharded.graph.tensor_producer[t]].results[0].dtype
            for t in step.trace.transfer_tensor
        }
    assert moved >= {jnp.dtype(jnp.bfloat16), jax.random.key(0).dtype}


@both_modes
def test_tells_what_devices_spend_on_transfers(ray_pair, mode):
    sharded = random_program(3, 40)
    placement = np.arange(40) % 2
    step = compile_on(sharded, placement, ray_pair, mode=mode)
    step(X)
    handling, trace = step.handling, step.trace
    for d in (0, 1):
        mine = handling.device == d
        assert mine.any()
        # Nothing else goes on in the meantime: task or transfers, one after another.
        start_s = np.append(trace.start_s[placement == d], handling.start_s[mine])
        finish_s = np.append(trace.finish_s[placement == d], handling.finish_s[mine])
        order = np.lexsort((finish_s, start_s))
        assert (finish_s[order][:-1] <= start_s[order][1:]).all()
    assert (step.profile().handling_s > 0).all()
    alone = compile_on(sharded, np.zeros(40, int), ray_pair, mode=mode)
    alone(X)
    assert bool(alone.handling.device.size) == (mode == "bulk_synchronous")  # its barriers


@both_modes
def test_moves_inputs_that_are_not_resident(ray_pair, mode):
    sharded = dj.partition(dj.trace(lambda w, x: w @ x, W, W, resident=["args[0]"]), 2)
    placement = np.arange(sharded.graph.num_tasks) % 2
    step = compile_on(sharded, placement, ray_pair, mode=mode)
    for scale in (1.0, 2.0):
        np.testing.assert_allclose(step(W, scale * W), W @ (scale * W), rtol=1e-5)
        dj.validate(sharded.graph, step.trace, tolerance=0)
    assert (step.trace.transfer_tensor < 0).any()
    assert (step.trace.transfer_source[step.trace.transfer_tensor < 0] == 0).all()


W = np.arange(64, dtype=np.float32).reshape(8, 8)


def test_the_smallest_priority_goes_first(ray_pair):
    sharded = build([("make", []), *[("mean", ["t0", "i0"])] * 6], [f"t{v}" for v in range(7)])
    ranks = np.array([0, 3, 6, 1, 5, 2, 4])
    step = compile_on(sharded, [0, 1, 1, 1, 1, 1, 1], ray_pair, priority=ranks)
    check(sharded, step)
    np.testing.assert_array_equal(np.argsort(step.trace.start_s), np.argsort(ranks))


@both_modes
def test_counts_memory_as_the_simulator_does(ray_pair, mode):
    workload = make_workload("chainmm", n=64)
    sharded = dj.partition(dj.trace(workload.fn, *workload.args), 4)
    step = compile_on(sharded, np.arange(sharded.graph.num_tasks) % 2, ray_pair, mode=mode)
    step(*make_arrays(workload, jax.random.key(0)))
    costs = dj.make_costs(sharded.graph, dj.make_cluster("p100x4"))
    predicted = peak_memory_bytes(sharded.graph, costs, step.trace)[:2]
    np.testing.assert_allclose(step.peak_bytes, predicted, rtol=0.1)


def test_lays_arguments_once_and_forgets_them(ray_pair, monkeypatch):
    asked = []
    ask_all = driver.ask_all
    monkeypatch.setattr(
        driver, "ask_all", lambda *args: asked.append(args[1]) or ask_all(*args)
    )
    sharded = build([("mean", ["i0", "i2"]), ("mean", ["i0", "i1"])], ["t0", "t1"])
    x, session = jnp.asarray(X), ray_pair[0].session
    first, second = (compile_on(sharded, [0, v], ray_pair) for v in (0, 1))
    first(x), first(x)
    assert asked.count("keep") == 1
    second(x), first(x), second(x)
    assert asked.count("keep") == 2  # what device 1 had not
    assert not session.forgotten
    del x, first
    assert {what for what, _ in session.forgotten} == {"block", "program"}
    gone = set(session.forgotten)
    second(X)
    assert not gone & set(session.forgotten)


@pytest.mark.slow
def test_a_thousand_calls_grow_nothing(ray_pair):
    sharded = random_program(3, 8)
    step = compile_on(sharded, np.arange(8) % 2, ray_pair)
    pids = [os.getpid(), *(ray.get(device.call("process_id")) for device in ray_pair)]
    sizes = []
    for num_calls in (300, 700):
        for _ in range(num_calls):
            step(X)
        sizes.append([_threads_and_pages(pid) for pid in pids])
    for (threads, pages), (threads_after, pages_after) in zip(*sizes, strict=True):
        assert threads_after <= threads + 2  # Ray's own come and go
        assert pages_after <= 1.05 * pages


def _threads_and_pages(pid):
    folder = pathlib.Path(f"/proc/{pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return len(list((folder / "task").iterdir())), pages


@pytest.mark.slow
def test_a_device_does_not_idle_with_a_ready_task(ray_pair):
    """Some 30 ms a task; 2% of the makespan, in the best of many runs on a busy machine."""
    tasks = [("spin", ["i0"])] * 4 + [("spin", [f"t{v}"]) for v in range(16)]
    step = compile_on(build(tasks, ["t19"]), np.arange(20) // 2 % 2, ray_pair)
    shares = []
    while not shares or (len(shares) < 100 and min(shares) > 0.02):
        step(X)
        shares.append(step.profile().idle_ready_share)
    assert min(shares) <= 0.02


def test_closed_devices_refuse_and_start_nothing(ray_pair):
    sharded = random_program(0, 8)
    devices = dj.ray_devices(1)
    step = compile_on(sharded, np.zeros(8, int), devices)
    check(sharded, step)
    devices.close()
    for use in (
        lambda: compile_on(sharded, np.zeros(8, int), devices),
        lambda: compile_on(sharded, np.zeros(8, int), list(devices)),
        lambda: dj.measure_calibration(sharded, devices),
        lambda: dj.make_measure(sharded, (X,), devices),
        lambda: step(X),
    ):
        with pytest.raises(
            ValueError, match=r"the devices were closed; start others by dj\.ray"
        ):
            use()
    check(sharded, compile_on(sharded, np.zeros(8, int), ray_pair))


def test_refuses_what_it_cannot_do(ray_pair, monkeypatch):
    sharded = build([("make", [])], ["t0"])
    with pytest.raises(ValueError, match="unknown mode 'stream'"):
        compile_on(sharded, [0], ray_pair, mode="stream")
    with pytest.raises(
        ValueError, match=r"devices\[1\] is .*; expected a device of dj\.ray_dev"
    ):
        compile_on(sharded, [0], [ray_pair[0], *jax.devices()[:1]])
    with pytest.raises(ValueError, match="occurs before"):
        compile_on(sharded, [0], [ray_pair[0], ray_pair[0]])
    with pytest.raises(ValueError, match="out_device"):
        compile_on(sharded, [0], ray_pair, out_device=0)
    with pytest.raises(ValueError, match="num_devices is 0"):
        dj.ray_devices(0)
    with pytest.raises(ValueError, match=r"num_devices is 100, but Ray has \d CPUs"):
        dj.ray_devices(100)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="extra 'cluster'"):
        dj.ray_devices(2)
