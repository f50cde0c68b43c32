"""The task graph that `partition` makes: which tasks, what they read, what they cost."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from doppler_jax.programs import partition, trace
from doppler_jax.types import RESIDENT, InputBlock, InputRef, TensorRef


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def cut(fn, *args, num_shards=4):
    return partition(trace(fn, *args), num_shards)


def kinds(sharded):
    """Number of tasks by name, block indices removed."""
    return collections.Counter(name.split("[")[0] for name in sharded.names)


def test_matmul_at_four_shards():
    sharded = cut(jnp.matmul, shaped(8, 8), shaped(8, 8))
    assert kinds(sharded) == {"dot_general_0": 8, "dot_general_0.sum": 4}
    assert sharded.names[:3] == (
        "dot_general_0[0,0,0]",
        "dot_general_0[0,0,1]",
        "dot_general_0.sum[0,0]",
    )
    assert sharded.operands[1] == (InputRef(2), InputRef(3))
    assert sharded.inputs[2] == InputBlock(source=0, start=(0, 4), limit=(4, 8))
    assert sharded.inputs[3] == InputBlock(source=1, start=(4, 0), limit=(8, 4))
    assert sharded.operands[2] == (TensorRef(0), TensorRef(1))
    assert len(sharded.inputs) == 8
    assert sharded.outputs[0].grid == (2, 2)
    assert sharded.outputs[0].blocks == tuple(TensorRef(v) for v in (2, 5, 8, 11))


def test_one_shard_is_one_task_per_equation():
    sharded = cut(lambda a, b: jnp.tanh(a @ b), shaped(8, 8), shaped(8, 8), num_shards=1)
    assert sharded.names == ("dot_general_0[0,0,0]", "tanh_1[0,0]")
    assert sharded.operands == ((InputRef(0), InputRef(1)), (TensorRef(0),))


def test_batch_dimensions_are_cut_first():
    sharded = cut(
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b), shaped(4, 64, 8), shaped(4, 8, 64)
    )
    assert kinds(sharded) == {"dot_general_0": 4}
    assert sharded.outputs[0].grid == (4, 1, 1)


def test_kernels_are_shared_by_tasks_that_compute_the_same():
    def fn(a, b, c):
        return (a @ b) + (a @ c) * 2.0 - (b @ c) * 3.0

    sharded = cut(fn, *[shaped(8, 8)] * 3)
    by_kernel = collections.defaultdict(set)
    for name, kernel in zip(sharded.names, sharded.kernels, strict=True):
        by_kernel[kernel].add(name.split("[")[0])
    # Twice and thrice are different computations; the three products are one.
    assert sorted(map(sorted, by_kernel.values())) == [
        ["add_3"],
        ["dot_general_0", "dot_general_1", "dot_general_4"],
        ["dot_general_0.sum", "dot_general_1.sum", "dot_general_4.sum"],
        ["mul_2"],
        ["mul_5"],
        ["sub_6"],
    ]


def test_kernels_differ_by_dtype_and_block_shape():
    def fn(a, b, c):
        return jnp.abs(a), jnp.abs(b), jnp.abs(c)

    sharded = cut(fn, shaped(8), shaped(8, dtype=jnp.int32), shaped(16))
    assert len(set(sharded.kernels)) == 3


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_flops_and_bytes_of_a_matmul(num_shards):
    n, m, k = 16, 32, 8
    sharded = cut(jnp.matmul, shaped(n, k), shaped(k, m), num_shards=num_shards)
    is_sum = np.array([".sum" in name for name in sharded.names])
    flops = sharded.graph.flops
    assert flops[~is_sum].sum() == 2 * n * m * k
    splits = (~is_sum).sum() // math.prod(sharded.outputs[0].grid)
    assert flops[is_sum].sum() == (splits - 1) * n * m
    assert sharded.graph.tensor_bytes[~is_sum].sum() == splits * n * m * 4
    assert sharded.graph.input_bytes.sum() == (n * k + k * m) * 4


def test_costs_of_other_operations():
    def fn(x):
        y = jnp.exp(x)
        return jnp.sum(y, axis=1), y.T, y[None]

    sharded = cut(fn, shaped(8, 8, dtype=jnp.bfloat16))
    flops = collections.Counter()
    for name, cost in zip(sharded.names, sharded.graph.flops, strict=True):
        flops[name.split("[")[0].rstrip("0123456789_")] += cost
    assert flops["exp"] == 64
    assert flops["transpose"] == flops["broadcast_in_dim"] == 0
    sums = [i for i, name in enumerate(sharded.names) if name.startswith("reduce_sum_2[")]
    assert sharded.graph.flops[sums].tolist() == [16.0] * 4
    exps = [i for i, name in enumerate(sharded.names) if name.startswith("exp_0")]
    assert sharded.graph.tensor_bytes[exps].tolist() == [32.0] * 4
    # exp, widening to float32, partial sums, two aggregations of four, narrowing.
    assert sharded.graph.flops.sum() == 64 + 64 + 64 + 2 * 4 + 8


def test_reduction_over_a_cut_dimension_is_aggregated():
    sharded = cut(lambda x: jnp.max(x, axis=0), shaped(8, 8))
    assert kinds(sharded) == {"reduce_max_0": 4, "reduce_max_0.max": 2}
    assert sharded.outputs[0].grid == (2,)


def test_formation_cuts_stored_blocks_once_for_all_readers():
    def fn(a, b, w):
        h = a @ b  # [16, 16] in 2 x 2 blocks
        return h @ w, (h @ w) * 2.0  # w is cut in 4 along the contracted dimension

    sharded = cut(fn, shaped(16, 4), shaped(4, 16), shaped(16, 2))
    formed = [v for v, name in enumerate(sharded.names) if ".form" in name]
    # [16, 2] is cut in 4 along rows and along the contraction: blocks of 4 x 4.
    assert len(formed) == 16
    assert sharded.names[formed[1]] == "dot_general_0.form[0:4,4:8]"
    assert len({sharded.kernels[v] for v in formed}) == 4  # one per offset in a block
    readers = collections.Counter(sharded.graph.edge_tensor.tolist())
    assert {readers[v] for v in formed} == {2}
    assert sharded.graph.flops[formed].tolist() == [0.0] * 16
    assert sharded.graph.tensor_bytes[formed].tolist() == [64.0] * 16


def test_formation_joins_stored_blocks():
    def fn(small, large):
        # [8, 1] is cut in 4 along rows; what adds it to 2 x 2 blocks reads halves.
        return jnp.exp(small) + jnp.exp(large)

    sharded = cut(fn, shaped(8, 1), shaped(8, 8))
    formed = [v for v, name in enumerate(sharded.names) if ".form" in name]
    assert [sharded.names[v] for v in formed] == ["exp_0.form[0:4,0:1]", "exp_0.form[4:8,0:1]"]
    assert sharded.operands[formed[1]] == (TensorRef(2), TensorRef(3))
    assert len({sharded.kernels[v] for v in formed}) == 1


def test_a_tensor_read_twice_by_a_task_is_one_edge():
    sharded = cut(lambda x: (x + 1.0) * (x + 1.0), shaped(8), num_shards=1)
    square = cut(lambda x: jax.lax.mul(y := x + 1.0, y), shaped(8), num_shards=1)
    assert sharded.graph.num_edges == 2
    assert square.operands[1] == (TensorRef(0), TensorRef(0))
    assert square.graph.num_edges == 1


def test_graph_inputs_are_resident_blocks_each_once():
    sharded = cut(lambda x: (jnp.exp(x), jnp.sin(x) * 2.0), shaped(8, 8))
    assert len(sharded.inputs) == len(set(sharded.inputs)) == 4
    assert (sharded.graph.input_home == RESIDENT).all()
    assert sharded.graph.input_bytes.tolist() == [64.0] * 4
    assert sharded.graph.input_edge_input.size == 8


@pytest.mark.parametrize("num_shards", [0, -4, 3, 6, 2.0, "4", True, None])
def test_number_of_shards_must_be_a_power_of_two(num_shards):
    program = trace(jnp.tanh, shaped(8))
    with pytest.raises(ValueError, match=r"num_shards is .*; expected a power of two"):
        partition(program, num_shards)


def test_pass_through_makes_no_task():
    sharded = cut(lambda x: {"x": x, "one": 1.0}, shaped(8, 8))
    assert sharded.graph.num_tasks == 0
    assert sharded.outputs[0].blocks == (InputRef(0),)
    assert sharded.inputs == (InputBlock(1, (), ()), InputBlock(0, (0, 0), (8, 8)))


def test_dot_product_ends_in_one_task():
    sharded = cut(lambda a, b: lax.dot(a, b), shaped(8), shaped(8))
    assert kinds(sharded) == {"dot_general_0": 4, "dot_general_0.sum": 1}
    assert sharded.names[-1] == "dot_general_0.sum"
