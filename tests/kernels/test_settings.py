"""JAX settings of the caller's thread hold in whatever runs its tasks."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine.ops import inherit
from doppler_jax.types import Kernel
from tests.kernels.conftest import (
    BLOCK,
    KERNELS,
    X,
    all_modes,
    blocking_modes,
    build,
    compile_on,
    fails,
    run_plainly,
)


def solve(a, b):
    return jnp.linalg.solve(a, b).sum()


def solved(devices, num_devices, mode):
    """Solves a system that float32 cannot, where 64 bits are allowed in this thread alone."""
    with jax.enable_x64(True):
        a = jnp.array([[1.0, 0.9999], [1.0001, 1.0]], jnp.float64)
        b = jnp.array([1.0, 2.0], jnp.float64)
        sharded = dj.partition(dj.trace(solve, a, b), 4)
        placement = np.random.default_rng(0).integers(0, num_devices, sharded.graph.num_tasks)
        found = compile_on(sharded, placement, devices, num_devices, mode=mode)(a, b)
        np.testing.assert_allclose(found, 10000.00002763, rtol=1e-12)
        assert found.dtype == np.float64


@all_modes
def test_64_bits_of_the_callers_thread(local, mode):
    solved(local, 4, mode)


@blocking_modes
def test_64_bits_of_the_callers_thread_on_ray(ray_pair, mode):
    solved(ray_pair, 2, mode)


@all_modes
def test_what_has_been_compiled_runs_though_jit_is_disabled(local, mode):
    sharded = build([("mean", ["i0", "i1"]), ("split", ["t0"])], [("t1", 0), ("t1", 1)])
    with jax.disable_jit():
        step = compile_on(sharded, [0, 1], local, mode=mode)
        out = step(X)["out"]
    np.testing.assert_allclose(out, run_plainly(sharded, X)["out"], rtol=1e-6)


@all_modes
def test_nans_are_looked_for_where_the_caller_wants_it(local, mode, monkeypatch):
    root = Kernel("root", lambda a: (jnp.sqrt(a),), (BLOCK,), (BLOCK,))
    monkeypatch.setitem(KERNELS, "root", root)
    sharded = build([("make", []), ("root", ["i0"])], ["t0", "t1"])
    step = compile_on(sharded, [0, 1], local, mode=mode)
    assert np.isnan(step(X)["out"]).any()
    with jax.debug_nans(True):
        fails(step, r"^task 1 \(root1\) .*nan", 1, 1)


@pytest.mark.parametrize("name", ["default_matmul_precision", "numpy_rank_promotion"])
def test_other_threads_run_as_the_one_that_asks(name):
    value = {"default_matmul_precision": "highest", "numpy_rank_promotion": "warn"}[name]
    seen = []

    def look():
        seen.append(getattr(jax.config, f"jax_{name}"))

    with getattr(jax, name)(value):
        as_here = inherit(look)
    for run in (as_here, look):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert seen[0] == value != seen[1]
