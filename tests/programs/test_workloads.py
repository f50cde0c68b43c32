"""Workloads: known by name, cut at any preset from shapes alone, right, of order one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax.programs import (
    evaluate,
    list_workloads,
    make_arrays,
    make_workload,
    partition,
    trace,
)

TINY = {
    "chainmm": {"n": 16},
    "ffnn": {"batch": 8, "features": 4, "hidden": 16, "classes": 6},
}


@pytest.mark.parametrize("name", list_workloads())
def test_sharded_workload_equals_the_function(name):
    workload = make_workload(name, **TINY[name])
    args = make_arrays(workload, jax.random.key(0))
    expected = workload.fn(*args)
    sharded = partition(trace(workload.fn, *workload.args), num_shards=4)
    np.testing.assert_allclose(evaluate(sharded, *args), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list_workloads())
def test_arguments_are_as_declared_and_results_of_order_one(name):
    workload = make_workload(name)
    args = make_arrays(workload, jax.random.key(1))
    assert [(a.shape, a.dtype) for a in args] == [(a.shape, a.dtype) for a in workload.args]
    out = workload.fn(*args)
    assert out.dtype == jnp.float32
    assert 1e-3 < float(jnp.std(out)) < 10


@pytest.mark.parametrize("name", list_workloads())
@pytest.mark.parametrize("preset", ["small", "paper"])
@pytest.mark.parametrize("num_shards", [4, 8])
def test_presets_are_cut_from_shapes_alone(name, preset, num_shards):
    workload = make_workload(name, preset)
    sharded = partition(trace(workload.fn, *workload.args), num_shards)
    assert len(set(sharded.names)) == sharded.graph.num_tasks > 30
    assert len(set(sharded.kernels)) < 25


def test_chainmm_flops():
    workload = make_workload("chainmm", "paper")
    sharded = partition(trace(workload.fn, *workload.args), 4)
    n = 10_000
    # Three products of two partial sums each, and the addition.
    assert sharded.graph.flops.sum() == 3 * (2 * n**3 + n**2) + n**2


def test_ffnn_rows_are_probabilities():
    workload = make_workload("ffnn", batch=8)
    assert workload.sizes["batch"] == 8
    out = workload.fn(*make_arrays(workload, jax.random.key(2)))
    np.testing.assert_allclose(out.sum(axis=1), np.ones(8), rtol=1e-5)


@pytest.mark.parametrize(
    ("args", "sizes", "message"),
    [
        (("chainm",), {}, r"unknown workload 'chainm'; known: \['chainmm', 'ffnn'\]"),
        (("ffnn", "huge"), {}, r"unknown preset 'huge' of ffnn; known: \['paper', 'small'\]"),
        (("chainmm",), {"m": 4}, r"unknown size 'm' of chainmm; known: \['n'\]"),
        (("chainmm",), {"n": 0}, r"size n of chainmm is 0; expected an integer >= 1"),
        (("chainmm",), {"n": 2.5}, r"size n of chainmm is 2.5"),
    ],
)
def test_unknown_names_and_sizes_are_refused(args, sizes, message):
    with pytest.raises(ValueError, match=message):
        make_workload(*args, **sizes)
