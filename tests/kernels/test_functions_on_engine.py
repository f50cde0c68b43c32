"""Functions that nobody tuned for equal themselves on the engine, placed at random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.programs import partition, trace
from tests.programs.functions import CASES, assert_same, fresh

FAST = ("linen_encoder", "dropout_with_typed_keys", "rnn_unrolled", "sorting")
"""Run by default; compiling all the kernels takes minutes."""


@pytest.mark.parametrize("num_devices", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES],
)
def test_placed_function_equals_the_function(name, num_devices):
    case = CASES[name]
    fn, args = case.make()
    expected = jax.jit(fn)(*fresh(args))
    sharded = partition(case.trace(fn, args), num_devices)
    rng = np.random.default_rng(num_devices)
    devices = dj.LocalDevices(jax.devices()[:num_devices])
    for mode in ("work_conserving", "stream"):
        placement = rng.integers(num_devices, size=sharded.graph.num_tasks)
        step = dj.compile(sharded, placement, devices=devices, mode=mode)
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
    found = step(x)
    jax.effects_barrier()
    assert capfd.readouterr().out == "total 32.0\n"
    np.testing.assert_allclose(found, np.tanh(x), rtol=1e-5)
