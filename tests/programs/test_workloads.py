"""Workloads: known by name, cut at any preset from shapes alone, right, of order one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from tests.programs.functions.registry import SUMS, assert_same

LLAMA = {"sequence": 8, "width": 16, "hidden": 24, "heads": 2}
TINY = {
    "chainmm": {"n": 16},
    "ffnn": {"batch": 8, "features": 4, "hidden": 16, "classes": 6},
    "ffnn_train": {"batch": 8, "features": 4, "hidden": 16, "classes": 6},
    "llama": {**LLAMA, "vocabulary": 12},
    "llama_block": LLAMA,
    "llama_layer": {**LLAMA, "vocabulary": 12},
    "moe_block": {"tokens": 16, "width": 8, "hidden": 16, "experts": 4, "capacity": 10},
    "pipeline": {"stages": 2, "micro_batches": 2, "batch": 8, "width": 8, "hidden": 16},
    "random_layered": {"num_tasks": 12, "n": 8},
    "resnet_block": {"batch": 4, "side": 6, "channels": 8, "bottleneck": 4},
}


def shapes(args):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), args)


def tiny(name, seed, **sizes):
    """A workload of few numbers, compiled, and arguments for it."""
    workload = dj.workloads.make_workload(name, **TINY[name] | sizes)
    return jax.jit(workload.fn), *dj.workloads.make_arrays(workload, jax.random.key(seed))


@pytest.mark.parametrize("name", dj.workloads.list_workloads())
def test_sharded_workload_equals_the_function(name):
    workload = dj.workloads.make_workload(name, **TINY[name])
    args = dj.workloads.make_arrays(workload, jax.random.key(0))
    expected = jax.jit(workload.fn)(*args)
    sharded = dj.partition(dj.trace(workload.fn, *workload.args), num_shards=4)
    assert_same(jax.jit(functools.partial(dj.evaluate, sharded))(*args), expected, SUMS)


@pytest.mark.parametrize("name", dj.workloads.list_workloads())
def test_arguments_are_as_declared_and_results_of_order_one(name):
    workload = dj.workloads.make_workload(name)
    args = dj.workloads.make_arrays(workload, jax.random.key(1))
    assert shapes(args) == shapes(workload.args)
    for leaf in jax.tree.leaves(jax.jit(workload.fn)(*args)):
        assert leaf.dtype == jnp.float32
        size = float(jnp.sqrt(jnp.mean(leaf**2)))
        assert 1e-3 < size < 10


@pytest.mark.parametrize("name", dj.workloads.list_workloads())
@pytest.mark.parametrize(("preset", "num_shards"), [("small", 4), ("medium", 2), ("paper", 8)])
def test_presets_are_cut_from_shapes_alone(name, preset, num_shards):
    # A few layers show as much as all of them.
    fewer = {
        "llama": {"num_layers": 2},
        "pipeline": {"micro_batches": 2},
        "random_layered": {"num_tasks": 40},
    }
    workload = dj.workloads.make_workload(name, preset, **fewer.get(name, {}))
    sharded = dj.partition(dj.trace(workload.fn, *workload.args), num_shards)
    assert len(set(sharded.names)) == sharded.graph.num_tasks >= 2 * num_shards
    assert len(set(sharded.kernels)) < sharded.graph.num_tasks / 1.5
    # A constant of paper size would be an array that tracing allocated.
    assert sum(const.nbytes for const in sharded.consts) < 1e6


def test_layers_share_kernels():
    few, many = (
        dj.partition(dj.trace(workload.fn, *workload.args), 4)
        for workload in (dj.workloads.make_workload("llama", num_layers=n) for n in (2, 4))
    )
    assert many.graph.num_tasks > 1.7 * few.graph.num_tasks
    assert len(set(many.kernels)) == len(set(few.kernels))


def test_paper_presets_have_their_flops_and_parameters():
    workload = dj.workloads.make_workload("chainmm", "paper")
    sharded = dj.partition(dj.trace(workload.fn, *workload.args), 4, strategy="uniform")
    n = 10_000
    # Three products of two partial sums each, and the addition.
    assert sharded.graph.flops.sum() == 3 * (2 * n**3 + n**2) + n**2
    params, _ = dj.workloads.make_workload("llama", "paper").args
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 6_738_415_616


def test_ffnn_rows_are_probabilities():
    workload = dj.workloads.make_workload("ffnn", batch=8)
    assert workload.sizes["batch"] == 8
    out = workload.fn(*dj.workloads.make_arrays(workload, jax.random.key(2)))
    np.testing.assert_allclose(out.sum(axis=1), np.ones(8), rtol=1e-5)


def test_training_steps_lower_the_loss():
    step, params, data = tiny("ffnn_train", 3)
    losses = []
    for _ in range(20):
        params, loss = step(params, data)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    assert all(b < a for a, b in itertools.pairwise(losses))


def test_llama_is_causal_and_heeds_positions():
    fn, params, tokens = tiny("llama_layer", 4)
    before = fn(params, tokens)
    after = fn(params, tokens.at[0, 5].set((tokens[0, 5] + 1) % 12))
    changed = jnp.any(before != after, axis=(0, 2))
    np.testing.assert_array_equal(changed, np.arange(8) >= 5)
    fn, params, x = tiny("llama_block", 5)
    swapped = x.at[:, 0].set(x[:, 3]).at[:, 3].set(x[:, 0])
    # Without the rotary embedding the last row would not notice that others changed places.
    assert jnp.abs(fn(params, x) - fn(params, swapped))[0, -1].max() > 1e-3


def test_experts_over_capacity_pass_tokens_by_and_with_room_are_mixed():
    fn, params, x = tiny("moe_block", 6, capacity=1)
    out = fn(params, x)
    # Four experts of one slot each serve at most four tokens.
    assert 1 <= int(jnp.sum(jnp.any(out != 0, axis=1))) <= 4
    fn, params, x = tiny("moe_block", 7, capacity=16)
    probabilities = np.asarray(jax.nn.softmax(x @ params["router"]))
    hidden = jax.nn.gelu(jnp.einsum("tw,ewf->etf", x, params["up"]))
    outputs = np.asarray(jnp.einsum("etf,efw->etw", hidden, params["down"]))
    expected = []
    for token, row in enumerate(probabilities):
        best = np.argsort(row)[-2:]
        expected.append(row[best] @ outputs[best, token] / np.sum(row[best]))
    np.testing.assert_allclose(fn(params, x), np.stack(expected), atol=1e-5)


@pytest.mark.parametrize(("num_tasks", "seed"), [(1, 0), (2, 1), (17, 2), (100, 3)])
def test_random_layered_has_as_many_tasks_as_asked(num_tasks, seed):
    workload = dj.workloads.make_workload("random_layered", num_tasks=num_tasks, seed=seed, n=8)
    sharded = dj.partition(dj.trace(workload.fn, *workload.args), 1)
    assert sharded.graph.num_tasks == num_tasks


def test_random_layered_repeats_by_seed():
    same, again, other = (
        str(jax.make_jaxpr(workload.fn)(*workload.args))
        for workload in (
            dj.workloads.make_workload("random_layered", seed=seed) for seed in (1, 1, 2)
        )
    )
    assert same == again != other


@pytest.mark.parametrize(
    ("args", "sizes", "message"),
    [
        (("chainm",), {}, r"unknown workload 'chainm'; known: \['chainmm', 'ffnn'"),
        (
            ("ffnn", "huge"),
            {},
            r"unknown preset 'huge' of ffnn; known: \['medium', 'paper', 's",
        ),
        (("chainmm",), {"m": 4}, r"unknown size 'm' of chainmm; known: \['n'\]"),
        (("chainmm",), {"n": 0}, r"size n of chainmm is 0; expected an integer >= 1"),
        (("chainmm",), {"n": 2.5}, r"size n of chainmm is 2.5"),
        (("random_layered",), {"seed": -1}, r"size seed .* is -1; expected an integer >= 0"),
        (("random_layered",), {"n": 7}, r"n is 7; random_layered halves it"),
        (("llama_block",), {"heads": 3}, r"width 256 does not divide into 3 heads"),
        (("pipeline",), {"batch": 7}, r"batch 7 does not divide into 4 micro-batches"),
        (("pipeline",), {"backward_tasks": 3}, r"backward_tasks is 3; expected 1 or 2"),
        (("moe_block",), {"experts": 1}, r"1 experts; top-2 routing needs two"),
    ],
)
def test_unknown_names_and_sizes_are_refused(args, sizes, message):
    with pytest.raises(ValueError, match=message):
        dj.workloads.make_workload(*args, **sizes)
