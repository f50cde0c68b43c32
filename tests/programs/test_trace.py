"""The tensor program: flat, live, and clear about what it does not take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax.programs import trace
from doppler_jax.programs.rules import RULES

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def names(program):
    return [equation.primitive.name for equation in program.equations]


def test_nested_functions_are_inlined():
    program = trace(lambda x: jax.jit(jax.nn.relu)(jax.checkpoint(jnp.sin)(x)), X)
    assert names(program) == ["sin", "max"]
    sin, relu = program.equations
    assert sin.operands == program.args
    assert relu.operands[0] is sin.results[0]
    assert program.outputs == relu.results


def test_dead_equations_are_dropped_even_if_unsupported():
    def fn(x):
        jnp.sort(x)
        unused = np.ones((4, 8), np.float32) + jnp.exp(x)
        return jnp.tanh(x), unused.shape[0] + jnp.cos(x)

    program = trace(fn, X)
    assert names(program) == ["tanh", "cos", "add"]
    assert program.consts == ()


def test_identities_and_constant_equations_make_no_equation():
    def fn(x):
        zeros = jnp.zeros((4, 8)) + 1.0
        return jnp.where(x > 0, jax.lax.stop_gradient(x), zeros)

    program = trace(fn, X)
    assert names(program) == ["gt", "select_n"]
    ones = program.equations[1].operands[1]
    assert ones.value == 1.0
    assert ones.aval.shape == (4, 8)


def test_a_constant_named_twice_is_one_constant_and_a_copy():
    table = np.ones((4, 8), np.float32)
    program = trace(lambda x: (x + table) * table, X)
    table[:] = 5.0
    assert len(program.consts) == 1
    np.testing.assert_array_equal(program.const_arrays[0], np.ones((4, 8)))


def test_shapes_alone_are_enough():
    huge = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)  # 4 TiB
    program = trace(lambda a, b: a @ b, huge, huge)
    assert program.outputs[0].aval.shape == huge.shape
    assert program.arg_avals == (huge, huge)


def test_unsupported_primitive_names_primitive_line_and_choices():
    with pytest.raises(ValueError, match="unsupported primitive sort") as error:
        trace(lambda x: jnp.sort(x), X)
    message = str(error.value)
    assert "test_trace.py" in message
    assert "dot_general" in message
    assert all(name in message for name in RULES)


def test_unsupported_reshape_names_shapes_and_line():
    with pytest.raises(ValueError, match=r"reshape at .*test_trace.py.*\[4, 8\] to \[32\]"):
        trace(lambda x: x.reshape(32), X)


def test_side_effects_are_refused_even_if_nested():
    def fn(x):
        jax.debug.print("{x}", x=x[0, 0])
        return x * 2.0

    with pytest.raises(ValueError, match=r"debug_\w+ at .*test_trace.py.* side effect"):
        trace(lambda x: jax.jit(fn)(x), X)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X, 3), {}, r"args\[1\] is int 3; expected an array"),
        (({"w": [X, "relu"]},), {}, r"args\[0\]\['w'\]\[1\] is str 'relu'"),
        ((X,), {"rate": 0.5}, r"rate is float 0.5"),
        ((np.array(["a"]),), {}, r"args\[0\] is ndarray"),
    ],
)
def test_arguments_that_are_no_arrays_are_named(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        trace(lambda *args, **kwargs: args[0], *args, **kwargs)


@pytest.mark.parametrize("leaf", [np.float32(1), np.ones(2, bool), jnp.ones(2, jnp.bfloat16)])
def test_arrays_of_any_kind_are_taken(leaf):
    assert trace(lambda x: x, leaf).arg_avals[0].dtype == leaf.dtype
