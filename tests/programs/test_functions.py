"""Functions that nobody tuned for equal themselves when cut, task by task."""

import functools

import jax
import pytest

from doppler_jax.programs import evaluate, partition
from tests.programs.functions import CASES, assert_same, fresh


@pytest.fixture(scope="module")
def traced():
    """Returns program, arguments and expected result of a case, made once."""
    known = {}

    def get(name):
        if name not in known:
            case = CASES[name]
            fn, args = case.make()
            expected = jax.jit(fn)(*fresh(args))
            known[name] = case.trace(fn, args), args, expected
        return known[name]

    return get


@pytest.mark.parametrize("num_shards", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_function(name, num_shards, traced):
    program, args, expected = traced(name)
    sharded = partition(program, num_shards)
    found = jax.jit(functools.partial(evaluate, sharded))(*fresh(args))
    assert_same(found, expected, CASES[name].tolerance)
