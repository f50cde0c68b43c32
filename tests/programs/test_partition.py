"""The task graph that `partition` makes: which tasks, what they read, what they cost."""

import collections
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from doppler_jax import partition, trace
from doppler_jax.types import RESIDENT, InputBlock, InputRef, TensorRef


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def cut(fn, *args, num_shards=4):
    """Cuts by the uniform strategy, which follows from shapes alone."""
    return partition(trace(fn, *args), num_shards, strategy="uniform")


def kinds(sharded):
    """Number of tasks by name, block indices removed."""
    return collections.Counter(name.split("[")[0] for name in sharded.names)


def test_matmul_at_four_shards():
    sharded = cut(jnp.matmul, shaped(8, 8), shaped(8, 8))
    assert kinds(sharded) == {"dot_general": 8, "dot_general.sum": 4}
    first = ("dot_general[0,0,0]", "dot_general[0,0,1]", "dot_general.sum[0,0]")
    assert sharded.names[:3] == first
    assert sharded.operands[1] == (InputRef(2), InputRef(3))
    assert sharded.inputs[2] == InputBlock(source=0, start=(0, 4), limit=(4, 8))
    assert sharded.inputs[3] == InputBlock(source=1, start=(4, 0), limit=(8, 4))
    assert sharded.operands[2] == (TensorRef(0), TensorRef(1))
    assert len(sharded.inputs) == 8
    assert sharded.outputs[0].grid == (2, 2)
    assert sharded.outputs[0].blocks == tuple(TensorRef(v) for v in (2, 5, 8, 11))


def test_one_shard_is_one_task_per_group():
    def fn(a, b):
        return jnp.sort(jnp.tanh(a @ b) + 1.0)

    sharded = cut(lambda a, b: fn(a, b), shaped(8, 8), shaped(8, 8), num_shards=1)
    assert sharded.names == ("fn.dot_general[0,0]", "fn.sort.sort[0,0]")
    assert sharded.operands == ((InputRef(0), InputRef(1)), (TensorRef(0),))


def test_batch_dimensions_are_cut_first_and_cut_reductions_aggregated():
    batched = cut(jnp.matmul, shaped(4, 64, 8), shaped(4, 8, 64))
    assert (kinds(batched), batched.outputs[0].grid) == ({"dot_general": 4}, (4, 1, 1))
    largest = cut(lambda x: jnp.max(x, axis=0), shaped(8, 8))
    assert kinds(largest) == {"reduce_max": 4, "reduce_max.max": 2}
    assert largest.outputs[0].grid == (2,)
    dot = cut(lambda a, b: lax.dot(a, b), shaped(8), shaped(8))
    assert kinds(dot) == {"dot_general": 4, "dot_general.sum": 1}
    assert dot.names[-1] == "dot_general.sum"


def test_kernels_are_shared_by_tasks_that_compute_the_same():
    sharded = cut(
        lambda a, b, c: (a @ b, a @ c, (b @ c) * 2.0, (c @ c) * 3.0), *[shaped(8, 8)] * 3
    )
    by_kernel = collections.defaultdict(set)
    for name, kernel in zip(sharded.names, sharded.kernels, strict=True):
        by_kernel[kernel].add(name.split("[")[0])
    # Twice and thrice are different computations; the products are one.
    assert sorted(map(sorted, by_kernel.values())) == [
        ["dot_general", "dot_general_1", "dot_general_2", "dot_general_3"],
        ["dot_general.sum", "dot_general_1.sum"],
        ["dot_general_2.sum"],
        ["dot_general_3.sum"],
    ]


def test_kernels_share_loops_by_identity_and_differ_by_dtype_and_block_shape():
    def body(carry, row):
        return carry + row, carry

    def fn(x, y):
        return jax.lax.scan(body, x[0], x), jax.lax.scan(body, y[0], y)

    sharded = cut(fn, shaped(4, 8), shaped(4, 8))
    loops = [k for n, k in zip(sharded.names, sharded.kernels, strict=True) if "scan" in n]
    assert (len(loops), len(set(loops))) == (2, 1)
    arguments = shaped(8), shaped(8, dtype=jnp.int32), shaped(16)
    sharded = cut(lambda *args: [jnp.abs(arg) for arg in args], *arguments)
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
        flops[name.split("[")[0].rpartition(".")[2]] += cost
    assert flops["exp"] == 64
    assert flops["transpose"] == flops["broadcast_in_dim"] == 0
    sums = [i for i, name in enumerate(sharded.names) if "reduce_sum[" in name]
    assert sharded.graph.flops[sums].tolist() == [16.0] * 4
    exps = [i for i, name in enumerate(sharded.names) if "exp[" in name]
    assert sharded.graph.tensor_bytes[exps].tolist() == [32.0] * 4
    # exp, widening to float32, partial sums, two aggregations of four, narrowing.
    assert sharded.graph.flops.sum() == 64 + 64 + 64 + 2 * 4 + 8


def test_formation_cuts_stored_blocks_once_for_all_readers():
    def fn(a, b, w):
        h = a @ b  # [16, 16] in 2 x 2 blocks
        return h @ w, (h @ w) * 2.0  # w is cut in 4 along the contracted dimension

    sharded = cut(lambda *args: fn(*args), shaped(16, 4), shaped(4, 16), shaped(16, 2))
    formed = [v for v, name in enumerate(sharded.names) if ".form" in name]
    # [16, 2] is cut in 4 along rows and along the contraction: blocks of 4 x 4.
    assert len(formed) == 16
    assert sharded.names[formed[1]] == "fn.dot_general.form[0:4,4:8]"
    assert len({sharded.kernels[v] for v in formed}) == 4  # one per offset in a block
    readers = collections.Counter(sharded.graph.edge_tensor.tolist())
    assert {readers[v] for v in formed} == {2}
    assert sharded.graph.flops[formed].tolist() == [0.0] * 16
    assert sharded.graph.tensor_bytes[formed].tolist() == [64.0] * 16


def test_formation_joins_stored_blocks():
    def fn(small, large):
        # [8, 1] is cut in 4 along rows; what adds it to 2 x 2 blocks reads halves.
        y, z = jnp.exp(small), jnp.exp(large)
        return y, z, y + z

    sharded = cut(fn, shaped(8, 1), shaped(8, 8))
    formed = [v for v, name in enumerate(sharded.names) if ".form" in name]
    names = [sharded.names[v] for v in formed]
    assert names == ["fn.exp.form[0:4,0:1]", "fn.exp.form[4:8,0:1]"]
    assert sharded.operands[formed[1]] == (TensorRef(2), TensorRef(3))
    assert len({sharded.kernels[v] for v in formed}) == 1


def test_a_tensor_read_twice_by_a_task_is_one_edge():
    sharded = cut(lambda x: (y := jnp.sort(x)) @ y, shaped(8, 8), num_shards=1)
    assert sharded.operands[1] == (TensorRef(0), TensorRef(0))
    assert sharded.graph.num_edges == 1
    squared = cut(lambda x: (y := jnp.abs(x)) * y, shaped(8), num_shards=1)
    assert squared.operands == ((InputRef(0),),)  # fused


def test_graph_inputs_are_resident_blocks_each_once_and_pass_without_a_task():
    sharded = cut(lambda x: (jnp.exp(x), jnp.sin(x) * 2.0), shaped(8, 8))
    assert len(sharded.inputs) == len(set(sharded.inputs)) == 4
    assert (sharded.graph.input_home == RESIDENT).all()
    assert sharded.graph.input_bytes.tolist() == [64.0] * 4
    assert sharded.graph.input_edge_input.size == 8
    sharded = cut(lambda x: {"x": x, "one": 1.0}, shaped(8, 8))
    assert sharded.graph.num_tasks == 0
    assert sharded.outputs[0].blocks == (InputRef(0),)
    assert sharded.inputs == (InputBlock(1, (), ()), InputBlock(0, (0, 0), (8, 8)))


@pytest.mark.parametrize("num_shards", [0, -4, 3, 6, 2.0, "4", True, None])
def test_number_of_shards_must_be_a_power_of_two(num_shards):
    program = trace(jnp.tanh, shaped(8))
    with pytest.raises(ValueError, match=r"num_shards is .*; expected a power of two"):
        partition(program, num_shards)


def test_several_results_are_tensors_of_one_task():
    sharded = cut(lambda x: jax.lax.top_k(x, 2), shaped(8, 8))
    assert kinds(sharded) == {"top_k": 4}
    assert sharded.graph.tensor_producer.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sharded.graph.tensor_bytes.tolist() == [16.0] * 8
    assert sharded.outputs[1].blocks == tuple(TensorRef(x) for x in (1, 3, 5, 7))
    assert [tensor.name for tensor in sharded.tensors] == ["top_k.0", "top_k.1"]


def test_a_loop_is_one_task_that_counts_its_iterations():
    def fn(x, w):
        return jax.lax.scan(lambda c, row: (c @ w, row + c), x[0], x)

    sharded = cut(fn, shaped(4, 8), shaped(8, 8))
    (loop,) = (v for v, name in enumerate(sharded.names) if "scan" in name)
    assert sharded.graph.flops[loop] == 4 * (2 * 8 * 8 + 8)
    assert [i.limit for i in sharded.inputs][-2:] == [(8, 8), (4, 8)]


def test_printing_is_one_task_without_tensors():
    def fn(x):
        y = jnp.exp(x)
        jax.debug.print("{y}", y=y)
        return y

    sharded = cut(fn, shaped(8))
    (printing,) = (v for v, name in enumerate(sharded.names) if "debug_print" in name)
    assert printing not in sharded.graph.tensor_producer.tolist()
    assert sharded.kernels[printing].results == ()
    assert kinds(sharded) == {"fn.exp": 4, "fn.exp.form": 1, "fn.debug_print": 1}


def test_origins_and_tensors_tell_where_tasks_come_from():
    def fn(a, b):
        return jnp.tanh(a @ b)

    sharded = cut(fn, shaped(8, 8), shaped(8, 8))
    assert sharded.origins[0].primitives == ("dot_general",)
    assert sharded.origins[2].primitives == ("sum", "tanh")
    assert {origin.group for origin in sharded.origins} == {0}
    (tensor,) = sharded.tensors
    assert (tensor.name, tensor.grid, tensor.aval.shape) == ("fn.dot_general", (2, 2), (8, 8))
    assert "test_partition.py" in tensor.source == sharded.origins[0].source
    assert tensor.reason


def deep(num_layers):
    def layer(x, w):
        y = jax.nn.softmax(x @ w) * 2.0
        return x + jnp.concatenate([y[:, 1:], y[:, :1]], axis=1)

    def fn(x, w):
        for _ in range(num_layers):
            x = layer(x, w)
        return x

    return cut(fn, shaped(64, 64), shaped(64, 64))


def count_calls(run):
    """Returns what `run` returns, and how many functions were called meanwhile."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        return run(), calls
    finally:
        sys.setprofile(None)


def test_work_grows_with_the_number_of_layers_alone():
    deep(2)
    _, few = count_calls(lambda: deep(8))
    sharded, many = count_calls(lambda: deep(64))
    assert sharded.graph.num_tasks > 1000
    assert len(set(sharded.kernels)) < 20
    assert many < 2 * 8 * few  # a quadratic step would call 64 times as often
