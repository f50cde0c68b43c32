"""What lies where, for how long, and what is moved without a copy."""

import gc
import pathlib
import resource
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import doppler_jax as dj
from doppler_jax.engine import ops
from doppler_jax.engine.memory import MIN_BYTES
from doppler_jax.types import Kernel
from tests.commands import printed
from tests.kernels.conftest import (
    KERNELS,
    X,
    all_modes,
    at_home,
    blocking_modes,
    build,
    compile_on,
    partitioned,
    wait,
    wrap_tasks,
)

THREADS = pathlib.Path("/proc/self/task")
BIG = jax.ShapeDtypeStruct((MIN_BYTES // 4,), jnp.float32)
BIG_KERNELS = {
    "big": Kernel("big", lambda: (jnp.full(BIG.shape, 2.0, BIG.dtype),), (), (BIG,)),
    "scale": Kernel("scale", lambda a: (a * 0.5,), (BIG,), (BIG,)),
    "add": Kernel("add", lambda a, b: (a + b,), (BIG, BIG), (BIG,)),
}


@pytest.fixture(autouse=True)
def big_kernels(monkeypatch):
    for name, kernel in BIG_KERNELS.items():
        monkeypatch.setitem(KERNELS, name, kernel)


def big_chain(num_tasks):
    tasks = [("big", []), *[("scale", [f"t{v}"]) for v in range(num_tasks - 1)]]
    return build(tasks, [f"t{num_tasks - 1}"])


@all_modes
@pytest.mark.parametrize("name", ["chainmm", "ffnn"])
def test_peak_is_the_simulators_of_the_trace(name, mode):
    sharded, args, _ = partitioned(name, 4, preset="small")
    costs = dj.make_costs(sharded.graph, dj.make_cluster("p100x4"))
    placement = np.random.default_rng(0).integers(0, 3, sharded.graph.num_tasks)
    step = compile_on(sharded, placement, dj.engine.LocalDevices(), 3, mode=mode)
    for _ in range(2):
        step(*args)
        expected = dj.simulator.peak_memory_bytes(sharded.graph, costs, step.schedule)[:3]
        np.testing.assert_allclose(step.peak_bytes, expected, rtol=0.1)


@blocking_modes
def test_peak_counts_what_lies_there(local, mode):
    # Four bytes a number: inputs of 16 each, tensors of 16 each.
    sharded = build([("mean", ["i0", "i2"]), ("split", ["t0"]), ("make", [])], ["t2"])
    step = compile_on(sharded, [0, 1, 1], local, mode=mode)
    wait(step(X))
    # Device 0: two blocks and the result, beside the block that is an output as it is.
    # Device 1: the copy and two results, beside the output once that is made.
    assert step.peak_bytes.tolist() in ([64.0, 48.0], [64.0, 64.0])
    moved = at_home(sharded, (0, 0, dj.graphs.RESIDENT))
    step = compile_on(moved, [1, 0, 0], local, mode=mode)
    wait(step(X))
    assert step.peak_bytes[1] == 48.0  # the resident block, the copy of the other, the result


@all_modes
def test_a_chain_holds_two_tensors_at_most(mode):
    sharded = big_chain(13)
    step = compile_on(sharded, [0] * 13, dj.engine.LocalDevices(), 1, mode=mode)
    wait(step(X))
    assert step.peak_bytes[0] == 2 * MIN_BYTES + 16
    if mode == "stream":
        return  # the host is far ahead of what it could count
    seen = []
    wrap_tasks(step, lambda v, run, *operands: seen.append(big_bytes()) or run(*operands))
    gc.collect()
    before = big_bytes()
    wait(step(X))
    assert max(seen) - before == MIN_BYTES


def big_bytes():
    return sum(a.nbytes for a in jax.live_arrays() if a.nbytes == MIN_BYTES)


@blocking_modes
def test_results_take_the_memory_of_what_nobody_reads_any_more(mode):
    tasks = [("big", []), ("scale", ["t0"]), ("add", ["t1", "t1"]), ("add", ["t2", "t3"])]
    sharded = build([*tasks[:3], ("big", []), ("add", ["t2", "t3"])], ["t4"])
    shared = dj.engine.LocalDevices()
    step = compile_on(sharded, [0] * 5, shared, 1, mode=mode)
    pointers, alive = {}, {}

    def watch(v, run, *operands):
        before = [a.unsafe_buffer_pointer() for a in operands]
        (result,) = run(*operands)
        result.block_until_ready()
        pointers[v] = (before, result.unsafe_buffer_pointer())
        alive[v] = [not a.is_deleted() for a in operands]
        return (result,)

    wrap_tasks(step, watch)
    np.testing.assert_allclose(step(X)["out"], 4.0)
    assert pointers[1][1] == pointers[1][0][0]  # in place
    assert alive[1] == [False]
    assert alive[2] == [True, True]  # the same operand twice
    assert alive[4] == [False, True]  # one result, so one operand
    np.testing.assert_allclose(step(X)["out"], 4.0)


def test_what_others_read_is_kept_and_stream_donates_nothing():
    # Read by two tasks, moved, an output; a graph input that is big.
    read = [None, "t0", "t0", None, "t3", "t4", None, "t6"]
    tasks = [("scale", [operand]) if operand else ("big", []) for operand in read]
    sharded = build(tasks, ["t1", "t2", "t5", "t6", "t7"])
    shared = dj.engine.LocalDevices()
    compile_on(sharded, [0] * 8, shared)
    compiled = shared.executables
    assert sorted(k.donated for k in compiled if k.kernel.name == "scale") == [(), (0,)]
    step = compile_on(sharded, [0, 0, 1, 0, 1, 0, 0, 0], shared)
    out = step(X)["out"].reshape(5, -1)
    np.testing.assert_allclose(out, np.repeat([[1.0], [1.0], [0.5], [2.0], [1.0]], BIG.size, 1))
    np.testing.assert_allclose(step(X)["out"].reshape(5, -1), out)
    shared = dj.engine.LocalDevices()
    compile_on(big_chain(2), [0, 0], shared, mode="stream")
    assert {key.donated for key in shared.executables} == {()}


@all_modes
def test_a_call_leaves_nothing_behind(mode):
    step = compile_on(big_chain(2), [0, 1], dj.engine.LocalDevices(), mode=mode)
    gc.collect()
    before = big_bytes()  # other tests of this process may keep some
    for _ in range(3):
        out = wait(step(X))
        ref = weakref.ref(out["out"])
        del out
        gc.collect()
        assert ref() is None
        assert big_bytes() <= before


@pytest.mark.slow
@pytest.mark.skipif(not THREADS.is_dir(), reason="counts threads in /proc")
@all_modes
def test_a_thousand_calls_grow_nothing(mode):
    """In a process of its own: how much memory other tests leave to be used again varies."""
    grown = printed("-W", "error", "-m", "tests.kernels.test_memory", mode)
    peak_kib, num_threads, num_arrays = map(int, grown.split())
    assert peak_kib < 20 * MIN_BYTES / 1024  # to leak a block in each call were 1000
    assert num_threads <= 0
    assert num_arrays <= 0


def main(mode):
    """Prints by how much a thousand calls grew peak memory (KiB), threads and arrays."""
    jax.config.update("jax_num_cpu_devices", 2)
    KERNELS.update(BIG_KERNELS)
    step = compile_on(big_chain(7), np.arange(7) % 2, dj.engine.LocalDevices(), mode=mode)

    def held():
        gc.collect()
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak_kib, len(list(THREADS.iterdir())), len(jax.live_arrays())

    for _ in range(200):
        wait(step(X))
    before = held()
    for _ in range(1000):
        wait(step(X))
    print(*np.subtract(held(), before))


if __name__ == "__main__":
    main(sys.argv[1])


@pytest.fixture
def made():
    """An array that a computation made on device 0."""
    here = SingleDeviceSharding(jax.devices("cpu")[0])
    return jax.jit(lambda: jnp.arange(1024.0), out_shardings=here)().block_until_ready()


def test_cpu_devices_share_memory(made):
    moved = ops.transfer(made, jax.devices("cpu")[1])
    assert isinstance(moved, np.ndarray)
    assert moved.ctypes.data == made.unsafe_buffer_pointer()
    assert ops.are_ready([moved])
    np.testing.assert_array_equal(moved, made)


def test_a_kernel_may_take_over_what_was_moved(made):
    there = SingleDeviceSharding(jax.devices("cpu")[1])
    moved = ops.transfer(made, jax.devices("cpu")[1])
    operand = jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=there)
    double = jax.jit(lambda a: 2 * a, donate_argnums=0, out_shardings=there)
    doubled = double.lower(operand).compile()(moved)
    assert doubled.devices() == {jax.devices("cpu")[1]}
    np.testing.assert_array_equal(doubled, 2 * np.arange(1024.0))
    np.testing.assert_array_equal(made, np.arange(1024.0))


def test_what_was_moved_outlives_its_source():
    source = jax.device_put(np.full(1 << 20, 7.0, np.float32), jax.devices("cpu")[0])
    moved = ops.transfer(source, jax.devices("cpu")[1])
    source.delete()
    del source
    for _ in range(4):
        jax.block_until_ready(jnp.zeros(1 << 20))  # would take the memory
    assert (np.asarray(moved) == 7.0).all()


def test_types_stay_and_keys_are_copied():
    array, there = jnp.ones(3, jnp.bfloat16), jax.devices("cpu")[1]
    moved = ops.transfer(array, there)
    assert (moved.dtype, moved.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(moved, array)
    key, there = jax.random.key(3), jax.devices("cpu")[1]
    moved = ops.transfer(key, there)
    assert (moved.dtype, moved.shape, moved.devices()) == (key.dtype, key.shape, {there})
    assert jnp.array_equal(moved, jax.device_put(key, there))


@all_modes
def test_calls_leave_no_array_to_the_garbage_collector(local, mode):
    step = compile_on(
        build([("mean", ["i0", "i1"]), ("mean", ["t0", "t0"])], ["t1"]),
        [0, 1],
        local,
        mode=mode,
    )
    jax.block_until_ready(step(X))
    gc.collect()
    before = len(jax.live_arrays())
    gc.disable()
    try:
        for _ in range(3):
            jax.block_until_ready(step(X))
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()
