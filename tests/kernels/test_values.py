"""Values of every type that `jit` takes, on both backends: as `jit` has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from tests.kernels.conftest import all_modes, compile_on

FLOAT0 = jax.dtypes.float0


def squares(params):
    return (params["w"][params["idx"]] ** 2).sum()


gradient = jax.grad(squares, allow_int=True)
PARAMS = {"w": np.arange(8, dtype=np.float32), "idx": np.array([3, 1, 5])}
TANGENTS = {"w": np.ones(8, np.float32), "idx": np.zeros(3, FLOAT0)}
CASES = {
    "gradient of integers": (gradient, PARAMS),
    "tangents of integers": (
        lambda p, t: ({"w": p["w"] - t["w"]}, t, jax.jvp(squares, (p,), (t,))),
        PARAMS,
        TANGENTS,
    ),
    **{
        f"{dtype} weights": (
            lambda q, s, x: (x @ (q.astype(np.float32) * s), q * q[:1]),
            np.arange(16).reshape(4, 4).astype(jnp.dtype(dtype)),
            np.full((1, 4), 0.5, np.float32),
            np.ones((2, 4), np.float32),
        )
        for dtype in ("int4", "uint4", "float4_e2m1fn")  # XLA aborts where int2 is joined
    },
    "numbers": (
        lambda h, s, n: (h * s, h + n, n + 1, s),
        np.ones((4, 4), np.float16),
        0.5,
        3,
    ),
    "no work": (lambda x: (x, {"same": x}), np.arange(4.0, dtype=np.float32)),
}


def same(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if expected.dtype != FLOAT0:
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=1e-6
        )


def as_array(leaf):
    is_kept = not isinstance(leaf, np.ndarray) or leaf.dtype == FLOAT0
    return leaf if is_kept else jnp.asarray(leaf)


def as_jit(name, devices, num_devices, mode):
    fn, *args = CASES[name]
    args = jax.tree.map(as_array, args)
    sharded = dj.partition(dj.trace(fn, *args), 4)
    placement = np.random.default_rng(0).integers(0, num_devices, sharded.graph.num_tasks)
    step = compile_on(sharded, placement, devices, num_devices, mode=mode)
    jax.tree.map(same, step(*args), jax.jit(fn)(*args))


@all_modes
@pytest.mark.parametrize("name", sorted(CASES))
def test_as_jit_has_it(local, name, mode):
    as_jit(name, local, 4, mode)


@pytest.mark.parametrize("name", sorted(CASES))
def test_as_jit_has_it_on_ray(ray_pair, name):
    as_jit(name, ray_pair, 2, None)
