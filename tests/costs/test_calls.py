"""What calls take beyond their makespans."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.costs.calls import CallCosts, amounts, fit_calls

COSTS = CallCosts(1e-3, 1e-5, 2e-5, 1e-9, 3e-5, 2e-9, 4e-5, 3e-9)


def cut(num_shards=2, **options):
    """Of `(w [8, 8], x [4, 8]) -> (the next w, y [4, 8])`."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4, 8))]
    program = dj.trace(lambda w, x: (w @ w, x @ w), *shapes, **options)
    return dj.partition(program, num_shards)


def test_only_what_is_laid_and_handed_over_counts():
    stays, brought = amounts(cut(1)), amounts(cut(1, resident=()))
    state = amounts(cut(1, resident=(), carry={0: "out[0]"}))
    assert stays.tolist() == [1, 2, 0, 0, 2, 256 + 128, 0, 0]
    assert brought.tolist() == [1, 2, 2, 256 + 128, 2, 256 + 128, 0, 0]
    assert state.tolist() == [1, 2, 1, 128, 1, 128, 0, 0]
    _, tasks, _, _, *handed, blocks, joined = amounts(cut(2))
    assert handed == [blocks, 256 + 128]
    assert (tasks, blocks) == (4, 4)
    assert joined == 256 + 128


def test_costs_are_found_again_from_calls():
    rows = np.random.default_rng(0).uniform(1, 10, (12, 8)) * [1, 8, 8, 1e6, 8, 1e6, 8, 1e6]
    found = fit_calls(rows, rows @ dataclasses.astuple(COSTS))
    np.testing.assert_allclose(dataclasses.astuple(found), dataclasses.astuple(COSTS))
    sharded = cut(2)
    expected = amounts(sharded) @ dataclasses.astuple(COSTS)
    assert COSTS.beyond_s(sharded) == pytest.approx(expected)
