"""All modes: right results, legal traces, the promised order."""

import json
import time

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine import ops
from doppler_jax.programs.partition import partition
from doppler_jax.programs.trace import trace
from doppler_jax.programs.workloads import make_arrays, make_workload
from doppler_jax.simulator.validate import validate
from tests.kernels.conftest import (
    all_modes,
    build,
    compile_on,
    delay,
    live_slots,
    num_threads,
    random_program,
    run_plainly,
)

X = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
SIZES = {
    "chainmm": {"n": 64},
    "ffnn": {"batch": 64, "features": 64, "hidden": 64, "classes": 32},
}


@pytest.fixture(scope="module", params=sorted(SIZES))
def workload(request):
    workload = make_workload(request.param, **SIZES[request.param])
    args = make_arrays(workload, jax.random.key(0))
    sharded = partition(trace(workload.fn, *workload.args), 4)
    return sharded, args, jax.jit(workload.fn)(*args), dj.LocalDevices()


@all_modes
@pytest.mark.parametrize("num_devices", [2, 4])
def test_equals_the_plain_function(workload, num_devices, mode):
    sharded, args, expected, local = workload
    rng = np.random.default_rng(num_devices)
    num_tasks = sharded.graph.num_tasks
    for i in range(20):
        placement = rng.integers(0, num_devices, num_tasks)
        priority = rng.permutation(num_tasks) if i % 2 else None
        step = compile_on(sharded, placement, local, num_devices, mode=mode, priority=priority)
        np.testing.assert_allclose(step(*args), expected, atol=1e-4, rtol=1e-4)
        np.testing.assert_array_equal(step.trace.placement, placement)
        validate(sharded.graph, step.trace, tolerance=0)


@all_modes
@pytest.mark.parametrize("num_tasks", [1, 2, 8, 40])
def test_runs_random_programs(local, num_tasks, mode):
    rng = np.random.default_rng(num_tasks)
    for seed in range(10):
        sharded = random_program(seed, num_tasks)
        placement = rng.integers(0, 4, num_tasks)
        step = compile_on(sharded, placement, local, 4, mode=mode)
        out = step(X)
        expected = run_plainly(sharded, X)
        for name in ("in", "out"):
            np.testing.assert_allclose(out[name], expected[name], rtol=1e-5)
        validate(sharded.graph, step.trace, tolerance=0)


@all_modes
def test_runs_a_program_without_tasks(local, mode):
    sharded = build([], ["i0", "i2"])
    step = compile_on(sharded, np.zeros(0, int), local, mode=mode)
    np.testing.assert_array_equal(step(X)["out"], np.append(X[:4], np.arange(4)))
    assert step.trace.finish_s.shape == (0,)


@all_modes
def test_drops_every_buffer_but_the_outputs(local, mode):
    sharded = random_program(3, 40)
    placement = np.arange(40) % 2
    loaded = compile_on(sharded, placement, local, mode=mode)._loaded
    slots = loaded.lay([jax.numpy.asarray(X), *sharded.consts])
    loaded.runner(loaded, slots)
    assert live_slots(slots) == {s for output in loaded.plan.outputs for s in output}


@all_modes
def test_moves_a_tensor_once_for_all_its_readers(local, mode, monkeypatch):
    moved = []
    move = ops.transfer

    def record(array, device):
        moved.append(device.id)
        return move(array, device)

    monkeypatch.setattr(ops, "transfer", record)
    twice = ["t0", "t0"]  # read twice by each of three tasks, two of them on device 1
    sharded = build(
        [("make", []), ("mean", twice), ("mean", twice), ("mean", twice)], ["t1", "t2", "t3"]
    )
    step = compile_on(sharded, [0, 1, 1, 2], local, 3, mode=mode)
    step(X)
    assert sorted(moved) == [1, 2]
    assert step.trace.transfer_tensor.tolist() == [0, 0]


def start_order(step):
    return np.argsort(step.trace.start_s, kind="stable").tolist()


@all_modes
def test_priority_orders_the_tasks(local, mode):
    # Task 3 has the best rank but waits for task 0.
    free = [("split", ["i0"])] * 3
    sharded = build([*free, ("mean", [("t0", 0), ("t0", 1)])], ["t3"])
    by_id = compile_on(sharded, [0] * 4, local, 1, mode=mode)
    by_id(X)
    assert start_order(by_id) == [0, 1, 2, 3]
    ranked = compile_on(sharded, [0] * 4, local, 1, mode=mode, priority=[2, 3, 1, 0])
    ranked(X)
    # Task 1 is in the level before task 3.
    expected = [2, 0, 1, 3] if mode == "bulk_synchronous" else [2, 0, 3, 1]
    assert start_order(ranked) == expected


@pytest.mark.parametrize(
    ("priority", "expected"), [(None, [0, 4, 1]), ([0, 1, 0, 0, 2], [0, 1, 4])]
)
def test_a_worker_takes_the_first_in_its_queue(local, priority, expected):
    # While device 0 is at task 0, device 1 makes task 4 ready, and after it task 1.
    sharded = build(
        [("make", []), ("split", ["t3"]), ("make", []), ("split", ["t2"]), ("split", ["t2"])],
        ["t0", "t1", "t4"],
    )
    step = compile_on(sharded, [0, 0, 1, 1, 0], local, priority=priority)
    delay(step, 0, 0.2)
    step(X)
    assert [v for v in start_order(step) if v not in (2, 3)] == expected


def test_compute_workers_do_not_wait_for_copies(local, monkeypatch):
    move = ops.transfer

    def move_slowly(array, device):
        time.sleep(0.2)
        return move(array, device)

    monkeypatch.setattr(ops, "transfer", move_slowly)
    chain = [("make", []), *[("mean", [f"t{v}", "i0"]) for v in range(5)]]
    sharded = build([*chain, ("mean", ["t0", "i1"])], ["t5", "t6"])
    step = compile_on(sharded, [0] * 6 + [1], local)
    step(X)
    assert step.trace.finish_s[5] < 0.2 < step.trace.transfer_finish_s[0]
    assert step.trace.start_s[6] >= step.trace.transfer_finish_s[0]


def test_an_idle_device_starts_a_ready_task(local):
    # Neither a busy device nor its transfers hold up another device.
    sharded = build(
        [("make", []), ("make", []), ("mean", ["t1", "i0"]), ("mean", ["t0", "t2"])], ["t3"]
    )
    step = compile_on(sharded, [0, 1, 2, 3], local, 4)
    step(X)
    delay(step, 0, 0.3)
    step(X)
    assert step.trace.finish_s[2] < 0.3 < step.trace.start_s[3]


@all_modes
def test_fifty_calls_leave_no_thread(local, mode):
    sharded = random_program(0, 8)
    step = compile_on(sharded, np.arange(8) % 4, local, 4, mode=mode)
    threads = num_threads()
    for _ in range(50):
        step(X)
    assert num_threads() == threads


@all_modes
def test_saves_the_trace(local, mode, tmp_path):
    sharded = random_program(0, 8)
    step = compile_on(sharded, np.arange(8) % 4, local, 4, mode=mode)
    with pytest.raises(ValueError, match="no trace"):
        step.save_trace(tmp_path / "trace.json")
    step(X)
    step.save_trace(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    assert data["otherData"]["starts"] == {"stream": "inferred"}.get(mode, "measured")
    names = {e["name"] for e in data["traceEvents"] if e.get("cat") == "task"}
    assert names == set(step.names)


def test_refuses_other_arguments(local):
    step = compile_on(random_program(0, 2), [0, 1], local)
    with pytest.raises(ValueError, match=r"args\[0\] is float32\[7\]"):
        step(X[:7])
