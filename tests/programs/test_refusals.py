"""What cannot be traced is refused by name and source line; a print runs once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from doppler_jax.programs import evaluate, partition, trace

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def refusal(fn, *args):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the message
        partition(trace(fn, *args), 2)
    return str(caught.value)


def line_of(fn, offset):
    """Returns the place `offset` lines below the function's first as errors write it."""
    return f"test_refusals.py:{fn.__code__.co_firstlineno + offset}"


def test_data_dependent_shape_is_refused_at_its_line():
    def keep_positive(x):
        y = x * 2.0
        return y[y > 0.0]

    message = refusal(keep_positive, X)
    assert line_of(keep_positive, 2) in message
    assert re.search("shape|boolean|concrete", message)


def test_branch_on_a_value_is_refused_at_its_line():
    def absolute(x):
        if jnp.sum(x) > 0.0:
            return x
        return -x

    assert line_of(absolute, 1) in refusal(absolute, X)


def test_argument_that_is_no_array_is_refused_by_its_path():
    message = refusal(lambda tree: tree["w"], {"w": X, "name": "layer"})
    assert "args[0]['name']" in message
    assert "'layer'" in message
    assert "functools.partial" in message


def test_io_callback_is_refused_at_its_line_with_the_reason():
    def logs(x):
        y = x + 1.0
        io_callback(lambda y: None, None, y)
        return y

    message = refusal(logs, X)
    assert line_of(logs, 2) in message
    assert "io_callback" in message
    assert "side effect" in message


def test_io_callback_within_a_loop_is_refused():
    def logs(x):
        def body(i, x):
            io_callback(lambda x: None, None, x)
            return x + 1.0

        return jax.lax.fori_loop(0, 3, body, x)

    assert "test_refusals.py" in refusal(logs, X)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_debug_print_runs_once(num_shards, capfd):
    def prints(x):
        y = jnp.tanh(x)
        jax.debug.print("total {} of {}", jnp.sum(x), y.shape[0])
        return y

    x = np.ones((8, 4), np.float32)
    program = trace(prints, X)
    capfd.readouterr()  # tracing itself prints nothing
    found = evaluate(partition(program, num_shards), x)
    jax.effects_barrier()
    assert capfd.readouterr().out == "total 32.0 of 8\n"
    np.testing.assert_allclose(found, np.tanh(x), rtol=1e-5)


def test_print_alone_is_not_dropped(capfd):
    def prints(x):
        jax.debug.print("rows {}", x)
        return x

    sharded = partition(trace(prints, jax.ShapeDtypeStruct((2,), jnp.int32)), 2)
    evaluate(sharded, np.arange(2, dtype=np.int32))
    jax.effects_barrier()
    assert capfd.readouterr().out == "rows [0 1]\n"
