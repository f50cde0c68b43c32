"""Moving arrays between devices: what is shared, and what is safe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from doppler_jax.engine import ops


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


def test_types_stay():
    array, there = jnp.ones(3, jnp.bfloat16), jax.devices("cpu")[1]
    moved = ops.transfer(array, there)
    assert (moved.dtype, moved.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(moved, array)


def test_keys_are_copied():
    key, there = jax.random.key(3), jax.devices("cpu")[1]
    moved = ops.transfer(key, there)
    assert (moved.dtype, moved.shape, moved.devices()) == (key.dtype, key.shape, {there})
    assert jnp.array_equal(moved, jax.device_put(key, there))
