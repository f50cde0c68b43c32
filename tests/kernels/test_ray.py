"""Device processes, two of Ray: results, traces, memory, what goes wrong, and lost nodes."""

import functools
import os
import pathlib
import signal
import sys
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine.processes.session import ProcessDevice
from doppler_jax.types import Kernel
from tests.commands import printed
from tests.kernels import conftest
from tests.kernels.conftest import (
    BLOCK,
    KERNELS,
    WORKLOADS,
    build,
    compile_on,
    partitioned,
    random_program,
    seconds_until_ctrl_c,
    spin_chain,
    wait,
)

X = np.linspace(0.0, 1.0, 8, dtype=np.float32)
ray = pytest.importorskip("ray")
both_modes = pytest.mark.parametrize("mode", dj.engine.ProcessDevices.modes)


check = functools.partial(conftest.check, x=X, rtol=1e-4)


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
            check(sharded, step, x=scale * X)
        np.testing.assert_array_equal(step.schedule.placement, placement)


def check_placements(ray_pair, mode, workload, count, tolerance):
    sharded, args, fn = workload
    expected = fn(*args)
    rng = np.random.default_rng(0)
    for _ in range(count):
        placement = rng.integers(0, 2, sharded.graph.num_tasks)
        step = compile_on(sharded, placement, ray_pair, mode=mode)
        chex.assert_trees_all_close(step(*args), expected, atol=tolerance, rtol=tolerance)
        dj.simulator.validate(sharded.graph, step.schedule, tolerance=0)


@both_modes
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_equals_the_plain_function(ray_pair, name, mode):
    check_placements(ray_pair, mode, partitioned(name, 4, **WORKLOADS[name]), 3, 1e-4)


@pytest.mark.slow
@both_modes
@pytest.mark.parametrize("name", dj.workloads.list_workloads())
def test_every_workload_on_twenty_placements(ray_pair, name, mode):
    check_placements(ray_pair, mode, partitioned(name, 2, preset="small"), 20, 1e-3)


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
            for t in step.schedule.transfer_tensor
        }
    assert moved >= {jnp.dtype(jnp.bfloat16), jax.random.key(0).dtype}


@both_modes
def test_tells_what_devices_spend_on_transfers(ray_pair, mode):
    sharded = random_program(3, 40)
    placement = np.arange(40) % 2
    step = compile_on(sharded, placement, ray_pair, mode=mode)
    wait(step(X))
    trace, (device, begin_s, end_s) = step.schedule, np.transpose(step.handling)
    for d in (0, 1):
        mine = device == d
        assert mine.any()
        # Nothing else goes on in the meantime: task or transfers, one after another.
        start_s = np.append(trace.start_s[placement == d], begin_s[mine])
        finish_s = np.append(trace.finish_s[placement == d], end_s[mine])
        order = np.lexsort((finish_s, start_s))
        assert (finish_s[order][:-1] <= start_s[order][1:]).all()
    assert (step.profile().handling_s > 0).all()
    alone = compile_on(sharded, np.zeros(40, int), ray_pair, mode=mode)
    alone(X)
    assert bool(alone.handling) == (mode == "bulk_synchronous")  # its barriers


@both_modes
def test_moves_inputs_that_are_not_resident(ray_pair, mode):
    sharded = dj.partition(dj.trace(lambda w, x: w @ x, W, W, resident=["args[0]"]), 2)
    placement = np.arange(sharded.graph.num_tasks) % 2
    step = compile_on(sharded, placement, ray_pair, mode=mode)
    for scale in (1.0, 2.0):
        np.testing.assert_allclose(step(W, scale * W), W @ (scale * W), rtol=1e-5)
        dj.simulator.validate(sharded.graph, step.schedule, tolerance=0)
    assert (step.schedule.transfer_tensor < 0).any()
    assert (step.schedule.transfer_source[step.schedule.transfer_tensor < 0] == 0).all()


W = np.arange(64, dtype=np.float32).reshape(8, 8)


def test_the_smallest_priority_goes_first(ray_pair):
    sharded = build([("make", []), *[("mean", ["t0", "i0"])] * 6], [f"t{v}" for v in range(7)])
    ranks = np.array([0, 3, 6, 1, 5, 2, 4])
    step = compile_on(sharded, [0, 1, 1, 1, 1, 1, 1], ray_pair, priority=ranks)
    check(sharded, step)
    np.testing.assert_array_equal(np.argsort(step.schedule.start_s), np.argsort(ranks))


@both_modes
def test_counts_memory_as_the_simulator_does(ray_pair, mode):
    sharded, args, _ = partitioned("chainmm", 4, n=64)
    step = compile_on(sharded, np.arange(sharded.graph.num_tasks) % 2, ray_pair, mode=mode)
    wait(step(*args))
    costs = dj.make_costs(sharded.graph, dj.make_cluster("p100x4"))
    predicted = dj.simulator.peak_memory_bytes(sharded.graph, costs, step.schedule)[:2]
    np.testing.assert_allclose(step.peak_bytes, predicted, rtol=0.1)


def test_lays_arguments_once_and_forgets_them(ray_pair, monkeypatch):
    laid, tell = [], ProcessDevice.send

    def told(device, method, *args):
        laid.append(len(args[2]))
        tell(device, method, *args)

    sharded = build([("mean", ["i0", "i2"]), ("mean", ["i0", "i1"])], ["t0", "t1"])
    x, session = jnp.asarray(X), ray_pair[0].session
    first, second = (compile_on(sharded, [0, v], ray_pair) for v in (0, 1))
    with monkeypatch.context() as patched:
        patched.setattr(ProcessDevice, "send", told)
        wait((first(x), first(x)))
        assert laid == [3, 0, 0, 0]
        wait((second(x), first(x), second(x)))
        assert laid[4:] == [0, 2, 0, 0, 0, 0]  # what device 1 had not
    assert not session.forgotten
    del x, first
    assert {what for what, _ in session.forgotten} == {"block", "program"}
    gone = set(session.forgotten)
    wait(second(X))
    assert not gone & set(session.forgotten)


@pytest.mark.slow
def test_a_thousand_calls_grow_nothing(ray_pair):
    sharded = random_program(3, 8)
    step = compile_on(sharded, np.arange(8) % 2, ray_pair)
    pids = [os.getpid(), *(ray.get(device.call("process_id")) for device in ray_pair)]
    sizes = []
    for num_calls in (300, 700):
        for _ in range(num_calls):
            wait(step(X))
        sizes.append([_threads_and_pages(pid) for pid in pids])
    for (threads, pages), (threads_after, pages_after) in zip(*sizes, strict=True):
        assert threads_after <= threads + 2  # Ray's own come and go
        assert pages_after <= 1.05 * pages


def _threads_and_pages(pid):
    folder = pathlib.Path(f"/proc/{pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return len(list((folder / "task").iterdir())), pages


def test_a_device_does_not_idle_with_a_ready_task(ray_pair):
    """Some 10 to 30 ms a task, 20 on two devices: one that begins a task late costs 5%."""
    tasks = [("spin", ["i0"])] * 4 + [("spin", [f"t{v}"]) for v in range(16)]
    step = compile_on(build(tasks, ["t19"]), np.arange(20) // 2 % 2, ray_pair)
    shares = []
    for _ in range(11):
        wait(step(X))
        shares.append(step.profile().idle_ready_share)
    # A busy machine stops what it likes, but not in every call for as long as a task.
    assert min(shares) <= 0.03
    assert np.median(shares) <= 0.06


def test_closed_devices_refuse_and_start_nothing(ray_pair):
    sharded = random_program(0, 8)
    devices = dj.ray_devices(1)
    step = compile_on(sharded, np.zeros(8, int), devices)
    check(sharded, step)
    devices.close()
    for use in (
        lambda: compile_on(sharded, np.zeros(8, int), devices),
        lambda: compile_on(sharded, np.zeros(8, int), list(devices)),
        lambda: dj.engine.measure_calibration(sharded, devices),
        lambda: dj.engine.make_paired_measure(sharded, (X,), devices),
        lambda: step(X),
    ):
        with pytest.raises(ValueError, match=r"the devices were closed; start others"):
            use()
    check(sharded, compile_on(sharded, np.zeros(8, int), ray_pair))


def test_refuses_what_it_cannot_do(ray_pair, monkeypatch):
    sharded = build([("make", [])], ["t0"])
    with pytest.raises(ValueError, match="unknown mode 'eager'"):
        compile_on(sharded, [0], ray_pair, mode="eager")
    with pytest.raises(ValueError, match=r"devices\[1\] is .*; expected a device process"):
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


HUGE = jax.ShapeDtypeStruct((2**44,), jnp.float32)
KERNELS["huge"] = Kernel(
    "huge", lambda a: (a, jnp.ones(HUGE.shape, HUGE.dtype)), (BLOCK,), (BLOCK, HUGE)
)
KERNELS["log"] = Kernel("log", lambda a: (jnp.log(a),), (BLOCK,), (BLOCK,))


def test_a_failing_task_ends_the_call_and_the_next_works(ray_pair):
    sharded = build([("mean", ["i0", "i0"]), ("huge", ["t0"]), ("mean", ["t1", "t0"])], ["t2"])
    step = compile_on(sharded, [0, 1, 0], ray_pair)
    sound = random_program(0, 8)
    for _ in range(2):
        with pytest.raises(
            dj.engine.TaskError, match=r"task 1 \(huge1\).* device 1 .*memory"
        ) as e:
            wait(step(X))
        assert (e.value.task, e.value.device) == (1, 1)
        check(sound, compile_on(sound, np.arange(8) % 2, ray_pair))


@both_modes
def test_checks_for_nan_on_request(ray_pair, mode):
    sharded = build([("log", ["i0"]), ("mean", ["t0", "i0"])], ["t1"])
    step = compile_on(sharded, [1, 0], ray_pair, mode=mode)
    assert np.isnan(step(-1 - X)["out"]).all()
    step = compile_on(sharded, [1, 0], ray_pair, mode=mode, check_nan=True)
    with pytest.raises(dj.engine.TaskError, match=r"task 0 \(log0\) .*device 1.*NaN"):
        wait(step(-1 - X))
    check(sharded, step, x=1 + X)


@both_modes
def test_a_timeout_names_the_task_and_the_next_call_works(ray_pair, mode):
    sharded = build([("spin", ["i0"])] * 300, ["t299"])  # near a second or more on each device
    placement = np.arange(300) % 2
    step = compile_on(sharded, placement, ray_pair, mode=mode, timeout_s=0.3)
    with pytest.raises(dj.engine.TaskError, match=r"task \d+ \(spin\d+\).*0\.3 s") as caught:
        wait(step(X))
    assert caught.value.device == placement[caught.value.task]
    sound = random_program(0, 8)
    check(sound, compile_on(sound, np.arange(8) % 2, ray_pair, mode=mode))


def _seconds(step):
    wait(step(X))
    return step.schedule.finish_s.max()


def test_ctrl_c_ends_the_call_and_the_next_works(ray_pair, least):
    sharded = spin_chain(60)  # long beside the looks for Ctrl-C
    step = compile_on(sharded, np.arange(60) % 2, ray_pair)

    def share():
        whole_s = _seconds(step)
        stopped_s = seconds_until_ctrl_c(lambda: wait(step(X)), whole_s / 4)
        check(sharded, step)
        longest_s = max(whole_s, step.schedule.finish_s.max())
        return np.inf if stopped_s is None else stopped_s / longest_s

    least(share, 0.7)  # a quarter, a look for Ctrl-C and a task, against all tasks


@both_modes
@pytest.mark.parametrize(
    "interrupted",
    [[("run", 0)], [("run", 1)], [("run", 1), ("stop", 0)], [("run", 1), ("stop", 1)]],
)
def test_ctrl_c_while_devices_are_told(ray_pair, monkeypatch, mode, interrupted):
    """At the start only some devices run the call; a second Ctrl-C leaves one at it."""
    sharded = spin_chain(10)
    step = compile_on(sharded, np.arange(10) % 2, ray_pair, mode=mode, timeout_s=60)
    left = list(interrupted)

    def interrupting(tell):
        def told(device, method, *args):
            if left and (method, device.index) == left[0]:
                left.pop(0)
                raise KeyboardInterrupt
            return tell(device, method, *args)

        return told

    with monkeypatch.context() as patched:
        for way in ("call", "send"):
            patched.setattr(ProcessDevice, way, interrupting(getattr(ProcessDevice, way)))
        with pytest.raises(KeyboardInterrupt):
            wait(step(X))
    assert not left
    for _ in range(2):
        check(sharded, step)


def test_ctrl_c_while_arguments_are_laid_leaves_nothing_on_devices(ray_pair, monkeypatch):
    sharded = build([("mean", ["i0", "i2"]), ("mean", ["i1", "i0"])], ["t0", "t1"])
    step = compile_on(sharded, [0, 1], ray_pair)
    session, laid = ray_pair[0].session, []
    tell = ProcessDevice.send

    def send(device, method, *args):
        if device.index == 1:
            raise KeyboardInterrupt
        laid.extend(("block", number) for number in args[2])
        return tell(device, method, *args)

    with monkeypatch.context() as patched:
        patched.setattr(ProcessDevice, "send", send)
        with pytest.raises(KeyboardInterrupt):
            wait(step(X))
    assert laid
    assert set(laid) <= set(session.forgotten)
    check(sharded, step)
    assert not set(laid) & set(session.forgotten)  # the devices have been told


@pytest.mark.slow
def test_a_killed_process_is_one_error_and_the_rest_goes_on(ray_pair):
    sharded = spin_chain(200)  # most of it is left however late the kill
    with dj.ray_devices(2) as devices:
        step = compile_on(sharded, np.arange(200) % 2, devices)
        whole_s = _seconds(step)
        victim = ray.get(devices[1].call("process_id"))
        timer = threading.Timer(whole_s / 4, os.kill, (victim, signal.SIGKILL))
        timer.start()
        with pytest.raises(dj.engine.TaskError, match=r"^device 1 \(.*was lost") as caught:
            wait(step(X))
        timer.join()
        assert (caught.value.task, caught.value.device) == (-1, 1)
        with pytest.raises(dj.engine.TaskError, match=r"^device 1 \(.*was lost"):
            wait(step(X))
        assert devices.alive() == (0,)
        check(sharded, compile_on(sharded, np.zeros(200, int), devices.without_lost()))


def test_kernels_that_do_not_compile_or_cannot_travel_are_named(ray_pair, monkeypatch):
    sharded = build([("make", []), ("boom", ["t0"])], ["t1"])
    with pytest.raises(ValueError, match=r"task 1 \(boom1\).*'boom'.*jax.export"):
        compile_on(sharded, [0, 1], ray_pair)
    sharded = build([("make", []), ("mean", ["t0", "t0"])], ["t1"])
    session = ray_pair[0].session
    make = next(iter(session.export(build([("make", [])], ["t0"]))[1].values()))
    serialised = {"digest of make": make, "digest of mean": b"no kernel"}
    monkeypatch.setattr(session, "export", lambda sharded: (tuple(serialised), serialised))
    with pytest.raises(dj.engine.TaskError, match=r"task 1 \(mean1\) does not compile on.* 1"):
        compile_on(sharded, [0, 1], ray_pair)
    assert ray.get(ray_pair[1].call("missing_kernels", serialised)) == set(serialised)


SPINS = spin_chain(200)  # seconds: a busy machine takes its time to kill a node


@pytest.mark.slow
def test_two_nodes_and_the_loss_of_one():
    """In a process of its own: one connects to one Ray only, and other tests have theirs."""
    assert printed("-m", "tests.kernels.test_ray").splitlines()[-1] == "the rest went on"


def main():
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "include_dashboard": False}  # so each has one of the devices
    cluster = Cluster(initialize_head=True, head_node_args=node)
    second = cluster.add_node(**node)
    cluster.wait_for_nodes()
    with dj.ray_devices(2, address=cluster.address) as devices:
        for mode in devices.modes:
            check_placements(
                devices, mode, partitioned("ffnn", 2, **WORKLOADS["ffnn"]), 1, 1e-4
            )
        left = lose_a_node(devices, lambda: cluster.remove_node(second, allow_graceful=False))
        check(SPINS, dj.compile(SPINS, np.zeros(200, int), devices=left))
    cluster.shutdown()
    print("the rest went on")


def lose_a_node(devices, kill):
    """Kills a node in the middle of a call; returns the devices that are left."""
    step = dj.compile(SPINS, np.arange(200) % 2, devices=devices)
    wait(step(X))
    timer = threading.Timer(step.schedule.finish_s.max() / 16, kill)
    timer.start()
    with pytest.raises(dj.engine.TaskError, match=r"^device \d \(.*was lost"):
        wait(step(X))
    timer.join()
    left = devices.without_lost()
    assert len(left) == 1
    return left


if __name__ == "__main__":
    main()
