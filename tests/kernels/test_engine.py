"""Threads of this process: right results, legal traces, the promised order, arguments."""

import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine import memory, ops
from doppler_jax.engine.trace import Chores
from doppler_jax.programs.partition import partition
from doppler_jax.programs.trace import trace
from doppler_jax.simulator.synchronous import hop_levels
from doppler_jax.simulator.validate import validate
from doppler_jax.types import RESIDENT
from tests.kernels.conftest import (
    FAILING_PROGRAM,
    WORKLOADS,
    X,
    all_modes,
    at_home,
    blocking_modes,
    build,
    check,
    check_failures,
    compile_on,
    delay,
    fails,
    live_slots,
    partitioned,
    random_program,
    run_plainly,
    wait,
    wrap_tasks,
)
from tests.programs.functions import CASES, assert_same, fresh


@pytest.fixture(scope="module", params=sorted(WORKLOADS))
def workload(request):
    sharded, args, fn = partitioned(request.param, 4, **WORKLOADS[request.param])
    return sharded, args, fn(*args), dj.engine.LocalDevices()


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
        np.testing.assert_array_equal(step.schedule.placement, placement)
        validate(sharded.graph, step.schedule, tolerance=0)


@all_modes
@pytest.mark.parametrize("num_tasks", [1, 2, 8, 40])
def test_runs_random_programs(local, num_tasks, mode):
    rng = np.random.default_rng(num_tasks)
    for seed in range(10):
        sharded = random_program(seed, num_tasks)
        placement = rng.integers(0, 4, num_tasks)
        check(sharded, compile_on(sharded, placement, local, 4, mode=mode))


@all_modes
def test_runs_a_program_without_tasks(local, mode):
    sharded = build([], ["i0", "i2"])
    step = compile_on(sharded, np.zeros(0, int), local, mode=mode)
    np.testing.assert_array_equal(step(X)["out"], np.append(X[:4], np.arange(4)))
    assert step.schedule.finish_s.shape == (0,)


@all_modes
def test_drops_every_buffer_but_the_outputs(local, mode):
    sharded = random_program(3, 40)
    placement = np.arange(40) % 2
    loaded = compile_on(sharded, placement, local, mode=mode)._loaded
    slots = loaded.lay([jnp.asarray(X), *sharded.consts])
    call = loaded.runner(loaded, slots, Chores())
    call.start(None)
    call.wait()
    assert live_slots(slots) == {s for output in loaded.agenda.outputs for s in output}


@all_modes
def test_what_is_moved_is_moved_once_for_all_its_readers(local, mode, monkeypatch):
    moved = record_moves(monkeypatch)
    twice = ["t0", "t0"]  # read twice by each of three tasks, two of them on device 1
    sharded = build([("make", []), *[("mean", twice)] * 3], ["t1", "t2", "t3"])
    step = compile_on(sharded, [0, 1, 1, 2], local, 3, mode=mode)
    wait(step(X))
    assert sorted(moved) == [1, 2]
    assert step.schedule.transfer_tensor.tolist() == [0, 0]
    moved.clear()
    sharded = at_home(build([("mean", ["i0", "i2"])] * 3, ["t0", "t1", "t2"]), (0, 0, RESIDENT))
    step = compile_on(sharded, [0, 1, 1], local, mode=mode)
    wait(step(X))
    assert moved == [1]
    assert step.schedule.transfer_tensor.tolist() == [~0]
    assert step.schedule.transfer_source.tolist() == [0]
    assert min(step.schedule.start_s[1:]) >= step.schedule.transfer_finish_s[0]


def record_moves(monkeypatch):
    """Returns a list to which every transfer adds the device that it goes to."""
    moved, move = [], ops.transfer
    monkeypatch.setattr(ops, "transfer", lambda *a: moved.append(a[1].id) or move(*a))
    return moved


def start_order(step):
    return np.argsort(step.schedule.start_s, kind="stable").tolist()


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
    split = [("split", [operand]) for operand in ("t3", "t2", "t2")]
    sharded = build([("make", []), split[0], ("make", []), *split[1:]], ["t0", "t1", "t4"])
    step = compile_on(sharded, [0, 0, 1, 1, 0], local, priority=priority)
    delay(step, 0, 0.2)
    wait(step(X))
    assert [v for v in start_order(step) if v not in (2, 3)] == expected


@pytest.fixture
def run_ahead_on_cpu(monkeypatch):
    for module in ("local", "threads"):
        monkeypatch.setattr(f"doppler_jax.engine.{module}.run_ahead", lambda device: 1)


@pytest.mark.usefixtures("run_ahead_on_cpu")
def test_compute_workers_do_not_wait_for_copies(local, monkeypatch):
    move = ops.transfer

    def move_slowly(array, device):
        time.sleep(0.2)
        return move(array, device)

    monkeypatch.setattr(ops, "transfer", move_slowly)
    chain = [("make", []), *[("mean", [f"t{v}", "i0"]) for v in range(5)]]
    sharded = build([*chain, ("mean", ["t0", "i1"])], ["t5", "t6"])
    step = compile_on(sharded, [0] * 6 + [1], local)
    wait(step(X))
    assert step.schedule.finish_s[5] < 0.2 < step.schedule.transfer_finish_s[0]
    assert step.schedule.start_s[6] >= step.schedule.transfer_finish_s[0]


def test_an_idle_device_starts_a_ready_task(local):
    # Neither a busy device nor its transfers hold up another device.
    means = [("mean", ["t1", "i0"]), ("mean", ["t0", "t2"])]
    sharded = build([("make", []), ("make", []), *means], ["t3"])
    step = compile_on(sharded, [0, 1, 2, 3], local, 4)
    wait(step(X))
    delay(step, 0, 0.3)
    wait(step(X))
    assert step.schedule.finish_s[2] < 0.3 < step.schedule.start_s[3]


@all_modes
def test_saves_the_trace(local, mode, tmp_path):
    sharded = random_program(0, 8)
    step = compile_on(sharded, np.arange(8) % 4, local, 4, mode=mode)
    with pytest.raises(ValueError, match="no trace"):
        step.save_trace(tmp_path / "trace.json")
    wait(step(X))
    step.save_trace(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    assert data["otherData"]["starts"] == ("inferred" if mode == "stream" else "measured")
    names = {e["name"] for e in data["traceEvents"] if e.get("cat") == "task"}
    assert names == set(step.names)


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        lambda step: jax.grad(lambda x: step(x)["out"].sum()),
        lambda step: lambda x: jax.vmap(step)(jnp.stack([x, x])),
        lambda step: lambda x: jax.eval_shape(step, x),
        lambda step: lambda x: jax.make_jaxpr(step)(x),
    ],
)
def test_refuses_to_be_transformed_as_what_jax_has_compiled(local, transform):
    step = compile_on(random_program(0, 2), [0, 1], local)
    x = jnp.asarray(X)
    compiled = jax.jit(lambda x: {"out": x}).lower(x).compile()
    for what in (compiled, step):
        with pytest.raises(TypeError, match="compiled"):
            transform(what)(x)


def test_refuses_other_arguments(local):
    step = compile_on(random_program(0, 2), [0, 1], local)
    with pytest.raises(ValueError, match=r"args\[0\] is float32\[7\]"):
        wait(step(X[:7]))


@pytest.mark.parametrize("homes", [(RESIDENT,) * 3, (0, 1, 2)])
def test_barriers_part_levels_from_transfers(local, homes):
    rng = np.random.default_rng(1)
    for seed in range(8):
        sharded = at_home(random_program(seed, 24), homes)
        placement = rng.integers(0, 3, 24)
        step = compile_on(sharded, placement, local, 3, mode="bulk_synchronous")
        wait(step(X))
        trace, level = step.schedule, hop_levels(sharded.graph)
        is_input = trace.transfer_tensor < 0
        producer = sharded.graph.tensor_producer[np.where(is_input, 0, trace.transfer_tensor)]
        sent_after = np.where(is_input, -1, level[producer])
        for k in range(-1, level.max() + 1):
            sent = sent_after == k
            before = trace.finish_s[level <= k].max(initial=0.0)
            arrived = trace.transfer_finish_s[sent].max(initial=before)
            assert (trace.transfer_start_s[sent] >= before).all()
            assert (trace.start_s[level > k] >= arrived).all()


def test_a_level_waits_for_its_slowest_task(local):
    sharded = build([("make", []), ("make", []), ("mean", ["t1", "i0"])], ["t0", "t2"])
    step = compile_on(sharded, [0, 1, 1], local, mode="bulk_synchronous")
    delay(step, 0, 0.2)
    wait(step(X))
    assert step.schedule.start_s[2] >= step.schedule.finish_s[0] > 0.2


@blocking_modes
@pytest.mark.parametrize("num_tasks", [1, 8, 40])
@pytest.mark.usefixtures("run_ahead_on_cpu")
def test_runs_random_programs_ahead(local, num_tasks, mode):
    rng = np.random.default_rng(num_tasks)
    for seed in range(10):
        sharded = at_home(random_program(seed, num_tasks), (0, -1, -1))
        placement = rng.integers(0, 3, num_tasks)
        check(sharded, compile_on(sharded, placement, local, 3, mode=mode))


@blocking_modes
def test_devices_of_both_sorts_run_together(local, mode, monkeypatch):
    for module in ("local", "threads"):
        monkeypatch.setattr(f"doppler_jax.engine.{module}.run_ahead", lambda d: d.id % 2)
    rng = np.random.default_rng(0)
    for seed in range(10):
        sharded = at_home(random_program(seed, 20), (0, 1, -1))
        step = compile_on(sharded, rng.integers(0, 4, 20), local, 4, mode=mode)
        check(sharded, step)
        assert not step.starts_are_inferred


class Late:
    """What a device that takes its time gives at once."""

    def __init__(self, now, seen):
        self.now, self.seen = now, seen

    def block_until_ready(self):
        time.sleep(0.02)
        self.seen.append(len(self.now))
        self.now.pop()


@pytest.mark.usefixtures("run_ahead_on_cpu")
def test_a_device_has_one_task_waiting_and_no_more(local, monkeypatch):
    # A chain: what follows on the same device is enqueued before its operand is there.
    tasks = [("make", []), *[("mean", [f"t{v}", "i0"]) for v in range(5)]]
    step = compile_on(build(tasks, ["t5"]), [0] * 6, local, 1)
    now, seen, make = [], [], step._loaded.executables[0]
    wrap_tasks(step, lambda v, *_: make() if v == 5 else (now.append(v) or Late(now, seen),))
    monkeypatch.setattr("doppler_jax.engine.memory.Buffers.operands", lambda self, v: [])
    wait(step(X))
    assert max(seen) == 2
    assert seen[:4] == [2] * 4  # the device never waited for the host
    assert (np.diff(step.schedule.finish_s) >= 0).all()
    assert (step.schedule.start_s[1:] >= step.schedule.finish_s[:-1]).all()


@blocking_modes
@pytest.mark.usefixtures("run_ahead_on_cpu")
def test_ahead_the_first_to_fail_is_named_and_the_next_call_works(local, mode, monkeypatch):
    step = compile_on(FAILING_PROGRAM, [0, 1, 1, 1, 1, 0], local, mode=mode)
    check_failures(step, monkeypatch, (True, False, True))


@all_modes
@pytest.mark.parametrize("homes", [(0, 0, RESIDENT), (1, 2, 0)])
def test_runs_programs_whose_inputs_are_moved(local, mode, homes):
    rng = np.random.default_rng(0)
    for seed in range(6):
        sharded = at_home(random_program(seed, 20), homes)
        step = compile_on(sharded, rng.integers(0, 4, 20), local, 4, mode=mode)
        for _ in range(2):
            check(sharded, step)
        moved = {~x for x in step.schedule.transfer_tensor.tolist() if x < 0}
        assert moved <= {i for i, home in enumerate(homes) if home != RESIDENT}
        assert moved


@all_modes
def test_a_failing_input_transfer_names_the_input(local, mode, monkeypatch):
    sharded = at_home(build([("mean", ["i0", "i2"])], ["t0"]), (0, 0, RESIDENT))
    step = compile_on(sharded, [1], local, mode=mode)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "transfer", lambda *_: 1 / 0)
        fails(step, r"^transfer of graph input 0, .*device 1", -1, 1)
    np.testing.assert_allclose(step(X)["out"], run_plainly(sharded, X)["out"])


def test_residents_stay_until_another_array_comes(local, monkeypatch):
    cuts, cut = [], memory.slice_block
    monkeypatch.setattr(memory, "slice_block", lambda *a: cuts.append(a[1].start) or cut(*a))
    sharded = build([("mean", ["i0", "i1"]), ("mean", ["i1", "i2"])], ["t0", "t1"])
    sharded = at_home(sharded, (RESIDENT, 0, RESIDENT))
    step = compile_on(sharded, [0, 1], local)
    first, second = jnp.asarray(X), jnp.asarray(X + 1)
    wait(step(first))
    assert sorted(cuts) == [(0,), (0,), (4,)]
    for array, expected in ((first, [(4,)]), (second, [(0,), (4,)]), (first, [(0,), (4,)])):
        cuts.clear()
        np.testing.assert_allclose(step(array)["out"], run_plainly(sharded, array)["out"])
        assert sorted(cuts) == expected  # input 1 is no resident, input 2 always the same


@all_modes
@pytest.mark.parametrize("out_device", [None, 0, 2])
def test_outputs_land_where_asked(local, mode, out_device):
    sharded = build([("mean", ["i0", "i1"]), ("mean", ["t0", "i2"])], ["t1", "t0"])
    step = compile_on(sharded, [2, 1], local, 3, mode=mode, out_device=out_device)
    out = step(X)
    np.testing.assert_allclose(out["out"], run_plainly(sharded, X)["out"], rtol=1e-5)
    where = jax.devices()[1 if out_device is None else out_device]
    assert out["out"].devices() == {where}  # by default that of its first block


FAST = ("linen_encoder", "dropout_with_typed_keys", "rnn_unrolled", "sorting")
"""Run by default, and on four devices; compiling all the kernels takes minutes.

That each function equals itself in blocks for four, `programs/test_evaluate.py` shows.
"""


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        *(
            pytest.param(name, 2, marks=[pytest.mark.slow] * (name not in FAST))
            for name in CASES
        ),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in FAST),
    ],
)
def test_placed_function_equals_the_function(name, num_devices):
    case = CASES[name]
    fn, args = case.make()
    expected = jax.jit(fn)(*fresh(args))
    sharded = partition(case.trace(fn, args), num_devices)
    rng = np.random.default_rng(num_devices)
    devices = dj.engine.LocalDevices(jax.devices()[:num_devices])
    for mode in ("work_conserving", "in_order", "stream"):
        placement = rng.integers(num_devices, size=sharded.graph.num_tasks)
        step = compile_on(sharded, placement, devices, num_devices, mode=mode)
        assert_same(step(*fresh(args)), expected, case.tolerance)


def test_print_runs_once_on_one_device(capfd):
    def prints(x):
        y = jnp.tanh(x)
        jax.debug.print("total {}", jnp.sum(x))
        return y

    x = np.ones((8, 4), np.float32)
    sharded = partition(trace(prints, x), 4)
    placement = np.arange(sharded.graph.num_tasks) % 4
    step = dj.compile(sharded, placement, devices=jax.devices()[:4])
    assert "total" not in capfd.readouterr().out
    found = wait(step(x))
    jax.effects_barrier()
    assert capfd.readouterr().out == "total 32.0\n"
    np.testing.assert_allclose(found, np.tanh(x), rtol=1e-5)


@all_modes
def test_threads_live_between_calls(local, mode):
    sharded = random_program(3, 8)
    step = compile_on(sharded, np.arange(8) % 2, local, mode=mode)
    check(sharded, step)
    threads = set(threading.enumerate())
    for _ in range(20):
        check(sharded, step)
    assert set(threading.enumerate()) == threads
