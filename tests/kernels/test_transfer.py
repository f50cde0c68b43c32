"""Moving arrays between devices: what is shared, and what is safe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from kernels import ops


@pytest.fixture
def made():
    """An array that a computation made on device 0."""
    here = SingleDeviceSharding(jax.devices("cpu")[0])
    return jax.jit(lambda: jnp.arange(1024.0), out_shardings=here)().block_until_ready()


def test_cpu_devices_share_memory(made):
    there = jax.devices("cpu")[1]
    moved = ops.transfer(made, there)
    assert moved.devices() == {there}
    assert moved.unsafe_buffer_pointer() == made.unsafe_buffer_pointer()
    np.testing.assert_array_equal(moved, made)


def test_what_was_moved_can_be_donated(made):
    there = jax.devices("cpu")[1]
    moved = ops.transfer(made, there)
    double = jax.jit(
        lambda a: 2 * a, donate_argnums=0, out_shardings=SingleDeviceSharding(there)
    )
    np.testing.assert_array_equal(double(moved), 2 * np.arange(1024.0))
    np.testing.assert_array_equal(made, np.arange(1024.0))


def test_what_was_handed_over_is_no_copy_and_can_be_donated(made):
    there = SingleDeviceSharding(jax.devices("cpu")[1])
    view = ops.hand_over(made, jax.devices("cpu")[1])
    assert isinstance(view, np.ndarray)
    assert view.ctypes.data == made.unsafe_buffer_pointer()
    operand = jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=there)
    double = jax.jit(lambda a: 2 * a, donate_argnums=0, out_shardings=there)
    doubled = double.lower(operand).compile()(view)
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


@pytest.mark.parametrize("make", [lambda: jax.random.key(3), lambda: jnp.ones(3, jnp.bfloat16)])
def test_types_stay(make):
    array, there = make(), jax.devices("cpu")[1]
    moved = ops.transfer(array, there)
    assert (moved.dtype, moved.shape, moved.devices()) == (array.dtype, array.shape, {there})
    assert jnp.array_equal(moved, jax.device_put(array, there))
    handed = ops.hand_over(array, there)
    assert (handed.dtype, handed.shape) == (array.dtype, array.shape)
