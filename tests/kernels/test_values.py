"""Arguments of every type and place that `jit` takes, on both backends: as `jit` has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import doppler_jax as dj
from doppler_jax.engine.agenda import RULES
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
        for dtype in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
    },
    "numbers": (
        lambda h, s, n: (h * s, h + n, n + 1, s),
        np.ones((4, 4), np.float16),
        0.5,
        3,
    ),
    "no work": (lambda x: (x, {"same": x, "three": 3.0}), np.arange(4.0, dtype=np.float32)),
    "nothing": (lambda x: (), np.arange(4.0, dtype=np.float32)),
}


def same(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert getattr(found, "weak_type", False) == getattr(expected, "weak_type", False)
    if expected.dtype != FLOAT0:
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=1e-6
        )


def as_array(leaf):
    is_kept = not isinstance(leaf, np.ndarray) or leaf.dtype == FLOAT0
    return leaf if is_kept else jnp.asarray(leaf)


def as_jit(name, devices, num_devices, *modes):
    fn, *args = CASES[name]
    args = jax.tree.map(as_array, args)
    sharded = dj.partition(dj.trace(fn, *args), 4)
    placement = np.random.default_rng(0).integers(0, num_devices, sharded.graph.num_tasks)
    for mode in modes:
        step = compile_on(sharded, placement, devices, num_devices, mode=mode)
        jax.tree.map(same, step(*args), jax.jit(fn)(*args))


@all_modes
@pytest.mark.parametrize("name", sorted(CASES))
def test_as_jit_has_it(local, name, mode):
    as_jit(name, local, 4, mode)


# Kernels of two bits are refused there: jax.export does not know the types.
@pytest.mark.parametrize("name", sorted(name for name in CASES if "int2" not in name))
def test_as_jit_has_it_on_ray(ray_pair, name):
    as_jit(name, ray_pair, 2, *sorted(RULES))


def logits(params, x, *, scale):
    return (x @ params["embed"]) @ params["head"].T * scale


X = np.arange(32, dtype=np.float32).reshape(4, 8) / 32
TABLE = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
SCALE = np.float32(0.5)


def tied(table):
    return {"embed": table, "head": table}


def placed(devices, num_devices, *args, **kwargs):
    sharded = dj.partition(dj.trace(logits, *args, **kwargs), 2)
    placement = np.arange(sharded.graph.num_tasks) % num_devices
    return compile_on(sharded, placement, devices, max(num_devices, 2))


def spread(kind, *spec):
    """Lays an array on all devices; of axes so typed a slice may not be taken as it is."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    return lambda array: jax.device_put(array, NamedSharding(mesh, jax.P(*spec)))


LAID = {
    "numpy": np.asarray,
    "committed": lambda array: jax.device_put(array, jax.devices()[3]),
    "sharded": spread(AxisType.Auto, None, "x"),
    "explicitly sharded": spread(AxisType.Explicit, None, "x"),
    "more than blocks": spread(AxisType.Explicit, "x"),
}


def check_laid(devices, num_devices):
    step = placed(devices, num_devices, tied(TABLE), X, scale=SCALE)
    for name, lay in LAID.items():
        expected = logits(tied(TABLE), X, scale=SCALE)
        found = step(tied(lay(TABLE)), lay(X), scale=SCALE)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)


def check_keywords(devices, num_devices):
    params = {"embed": TABLE, "head": TABLE + 1}
    expected = logits(params, X, scale=SCALE)
    for as_traced in (0, 1, 2):
        args, kwargs = called(params, as_traced)
        step = placed(devices, num_devices, *args, **kwargs)
        for as_called in (0, 1, 2):
            args, kwargs = called(params, as_called)
            np.testing.assert_allclose(step(*args, **kwargs), expected, rtol=1e-5, atol=1e-5)


def called(params, count):
    """Returns arguments of which so many go by position."""
    rest = {"params": params, "x": X}
    args = [rest.pop(name) for name in ("params", "x")[:count]]
    return args, {"scale": SCALE, **rest}


def check_ties(devices, num_devices):
    """One buffer that is counted once, until a call brings two arrays."""
    step = placed(devices, 1, tied(TABLE), X, scale=SCALE)
    peaks = []
    two = {"embed": TABLE, "head": TABLE + 1}
    for params in (tied(TABLE), tied(jnp.asarray(TABLE + 1)), two, tied(TABLE)):
        expected = logits(params, X, scale=SCALE)
        found = step(params, X, scale=SCALE)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        peaks.append(step.peak_bytes[0])
    once = peaks[0]
    assert peaks == [once, once, once + TABLE.nbytes, once + TABLE.nbytes]


def check_guard(devices, num_devices):
    params, x, scale = jax.tree.map(jnp.asarray, (tied(TABLE), X, SCALE))
    with jax.transfer_guard("disallow"):
        step = placed(devices, num_devices, params, x, scale=scale)
        found = step(params, x, scale=scale)
        for call in (jax.jit(logits), step):  # what JAX refuses for `jit`
            with pytest.raises(RuntimeError, match="Disallowed host-to-device transfer"):
                call(params, X, scale=scale)
    np.testing.assert_allclose(found, logits(tied(TABLE), X, scale=SCALE), rtol=1e-5, atol=1e-5)


CHECKS = (check_laid, check_keywords, check_ties, check_guard)


@pytest.mark.parametrize("check", CHECKS)
def test_arguments_as_jit_takes_them(local, check):
    check(local, 4)


@pytest.mark.parametrize("check", CHECKS)
def test_arguments_as_jit_takes_them_on_ray(ray_pair, check):
    check(ray_pair, 2)


PRINTING = {
    "debug.print": lambda x: (jax.debug.print("{x}", x=x[0]), x * 2)[1],
    "pure_callback": lambda x: jax.pure_callback(np.sin, x, x) * 2,
    "in a loop": lambda x: jax.lax.map(lambda r: (jax.debug.print("{}", r), r)[1], x) * 2,
}


@pytest.mark.parametrize("name", PRINTING)
def test_callbacks_are_for_this_process(local, ray_pair, name):
    sharded = dj.partition(dj.trace(PRINTING[name], X[0]), 1)
    placement = np.zeros(sharded.graph.num_tasks, int)
    expected = np.sin(X[0]) * 2 if name == "pure_callback" else X[0] * 2
    found = compile_on(sharded, placement, local)(X[0])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^task \d+ \(.*calls back into Python"):
        compile_on(sharded, placement, ray_pair)
