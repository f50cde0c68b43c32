"""One error that names task and device; the others stop, and the next call works."""

import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine import ops
from doppler_jax.engine.memory import Buffers
from doppler_jax.types import Kernel
from tests.kernels.conftest import (
    BLOCK,
    FAILING,
    FAILING_PROGRAM,
    KERNELS,
    X,
    all_modes,
    blocking_modes,
    build,
    check,
    check_failures,
    compile_on,
    fails,
    num_threads,
    random_program,
    seconds_until_ctrl_c,
    spin_chain,
    wait,
    wrap_tasks,
)


@all_modes
def test_a_failing_kernel_ends_the_call_and_the_next_works(local, mode, monkeypatch):
    step = compile_on(FAILING_PROGRAM, [0, 1, 1, 0, 1, 0], local, mode=mode)
    check_failures(step, monkeypatch, (True, False, True, False))


class Poisoned:
    """A result that turns out to have failed when waited for, as on an asynchronous device."""

    def __init__(self, seconds):
        self.seconds = seconds

    def is_ready(self):
        return False

    def block_until_ready(self):
        time.sleep(self.seconds)
        raise ConnectionError("device lost")


@all_modes
def test_names_the_first_to_fail_and_not_its_victims(local, mode, monkeypatch):
    chain = [("make", []), ("mean", ["t0", "i0"]), ("mean", ["t1", "i0"])]
    sharded = build([*chain, ("make", [])], ["t2", "t3"])
    step = compile_on(sharded, [0, 1, 2, 2], local, 3, mode=mode)
    # Task 0 fails late; transfers and readers of what it made are seen to fail before.
    wrap_tasks(step, lambda v, run, *a: run(*a) if v == 3 else (Poisoned(0.2 * (v == 0)),))
    monkeypatch.setattr(ops, "transfer", lambda *_: Poisoned(0.0))
    fails(step, r"^task 0 \(make0\) failed.*device lost", 0)


@all_modes
def test_a_failing_transfer_ends_the_call_and_the_next_works(local, mode, monkeypatch):
    sharded = random_program(1, 40)
    step = compile_on(sharded, np.arange(40) % 4, local, 4, mode=mode)

    def lose(array, device):
        raise ConnectionError("link down")

    with monkeypatch.context() as patch:
        patch.setattr(ops, "transfer", lose)
        error = fails(step, r"tensor \d+, made by .*link down")
    x = int(re.search(r"tensor (\d+)", str(error))[1])
    assert sharded.graph.tensor_producer[x] == error.task
    assert error.device != error.task % 4
    check(sharded, step)


@all_modes
def test_ctrl_c_ends_the_call_and_the_next_works(local, mode, least):
    sharded = spin_chain(10)
    step = compile_on(sharded, np.arange(10) % 2, local, mode=mode)
    wait(step(X))
    threads = num_threads()

    def share():
        whole_s = step.schedule.finish_s.max()
        stopped_s = seconds_until_ctrl_c(lambda: wait(step(X)), whole_s / 4)
        assert num_threads() == threads
        check(sharded, step, rtol=1e-4)
        longest_s = max(whole_s, step.schedule.finish_s.max())
        return np.inf if stopped_s is None else stopped_s / longest_s

    least(share, 0.7)  # a quarter and a task, against all ten tasks


@all_modes
def test_check_nan_names_the_first_task_that_makes_one(local, mode, monkeypatch):
    root = Kernel("root", lambda a: (jnp.sqrt(a),), (BLOCK,), (BLOCK,))
    monkeypatch.setitem(KERNELS, "root", root)
    sharded = build([("root", ["i0"]), ("mean", ["t0", "i0"]), ("root", ["i1"])], ["t1", "t2"])
    step = compile_on(sharded, [1, 0, 0], local, mode=mode, check_nan=True)
    fails(step, r"^task 0 \(root0\) .*device 1.* NaN", 0, 1)  # the first block is negative
    assert np.isfinite(step(np.abs(X))["out"]).all()
    unchecked = compile_on(sharded, [1, 0, 0], local, mode=mode)
    assert np.isnan(unchecked(X)["out"]).any()


@all_modes
def test_a_device_out_of_memory_names_the_task(mode, monkeypatch):
    huge = jax.ShapeDtypeStruct((1 << 45,), jnp.float32)
    kernel = Kernel("huge", lambda a: (jnp.broadcast_to(a[0], huge.shape),), (BLOCK,), (huge,))
    monkeypatch.setitem(KERNELS, "huge", kernel)
    shrink = Kernel("shrink", lambda a: (a[:4],), (huge,), (BLOCK,))
    monkeypatch.setitem(KERNELS, "shrink", shrink)
    sharded = build([("mean", ["i0", "i1"]), ("huge", ["t0"]), ("shrink", ["t1"])], ["t2"])
    step = compile_on(sharded, [0, 1, 1], dj.engine.LocalDevices(), mode=mode)
    for _ in range(2):
        fails(step, r"^task 1 \(huge1\) .*RESOURCE_EXHAUSTED", 1)


@all_modes
def test_a_kernel_that_does_not_compile_names_the_task(mode, monkeypatch):
    def refuse(a):
        raise NotImplementedError("no such operation")

    monkeypatch.setitem(KERNELS, "refuse", Kernel("refuse", refuse, (BLOCK,), (BLOCK,)))
    sharded = build([("make", []), ("refuse", ["t0"])], ["t1"])
    wanted = r"^task 1 \(refuse1\): .*compile.*no such operation"
    with pytest.raises(dj.engine.TaskError, match=wanted) as caught:
        compile_on(sharded, [0, 1], dj.engine.LocalDevices(), mode=mode)
    assert (caught.value.task, caught.value.device) == (1, 1)


def test_a_kernel_that_xla_refuses_names_the_task(monkeypatch):
    class Refused:
        def compile(self):
            raise RuntimeError("INTERNAL: no code for this")

    lower, bad = ops._lower, KERNELS["make"]
    monkeypatch.setattr(ops, "_lower", lambda *k: Refused() if k[0] is bad else lower(*k))
    shared = dj.engine.LocalDevices()
    with pytest.raises(dj.engine.TaskError, match=r"^task 1 \(make1\): .*no code for this"):
        compile_on(build([("mean", ["i0", "i1"]), ("make", [])], ["t0", "t1"]), [0, 1], shared)
    assert len(shared.executables) == 1  # what compiled before is kept


@all_modes
def test_a_timeout_names_what_ran_and_the_next_call_works(local, mode, monkeypatch):
    sharded = build([("make", []), ("boom", ["t0"]), ("mean", ["t1", "i0"])], ["t2"])
    step = compile_on(sharded, [0, 1, 0], local, mode=mode, timeout_s=0.3)
    wait(step(X))
    monkeypatch.setitem(FAILING, "sleep_s", 0.8)  # it ends within the grace
    fails(step, r"^task 1 \(boom1\) .*device 1 .*TimeoutError.* 0.3 s", 1)
    monkeypatch.setitem(FAILING, "sleep_s", 0.0)
    check(sharded, step)


@all_modes
def test_a_timeout_does_not_wait_for_a_stuck_task(local, mode, monkeypatch):
    monkeypatch.setattr("doppler_jax.engine.threads.GRACE_S", 0.05)
    monkeypatch.setattr("doppler_jax.engine.stream.GRACE_S", 0.05)
    go_on = threading.Event()
    sharded = build([("boom", ["i0"]), ("mean", ["t0", "i0"])], ["t1"])
    step = compile_on(sharded, [0, 1], local, mode=mode, timeout_s=0.1)
    monkeypatch.setitem(FAILING, "wait", go_on)
    threads = num_threads()
    try:
        with pytest.raises(dj.engine.TaskError, match=r"^task 0 \(boom0\) .*TimeoutError"):
            wait(step(X))
    finally:
        go_on.set()
    monkeypatch.setitem(FAILING, "wait", None)
    check(sharded, step)
    while num_threads() > threads:  # what was stuck ends by itself
        time.sleep(0.01)


@blocking_modes
def test_a_worker_that_dies_ends_the_call(local, mode, monkeypatch):
    sharded = random_program(1, 8)
    step = compile_on(sharded, np.arange(8) % 2, local, mode=mode)
    with monkeypatch.context() as patch:
        patch.setattr(Buffers, "made", lambda *_: 1 / 0)
        fails(step, r"worker 'compute \d' died on device \d .*ZeroDivision", -1)
    check(sharded, step)
