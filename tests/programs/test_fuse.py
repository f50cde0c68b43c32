"""Groups: what fuses with what, and that nothing changes by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from doppler_jax import evaluate, partition, trace
from doppler_jax.programs.fuse import fuse
from doppler_jax.programs.grids import max_counts
from tests.programs.functions.registry import cut_as

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
W = np.linspace(1, 2, 64, dtype=np.float32).reshape(8, 8)


def members(fn, *args):
    """Primitive names of every group."""
    groups = fuse(trace(fn, *args))
    return [[equation.primitive.name for equation in group.equations] for group in groups]


def two_readers(x):
    y = jnp.exp(x)
    return jnp.sum(y, axis=1), jnp.cos(jnp.sin(y))


def output(x):
    y = jnp.exp(x)
    return y, jnp.sin(y)


@pytest.mark.parametrize(
    ("fn", "args", "groups"),
    [
        # A chain follows the contraction that feeds it.
        (lambda x, w, b: jnp.tanh(x @ w + b) * 2.0, (X, W, W[:1]), "dot_general add tanh mul"),
        # Branches that meet again fuse: both are read, but by the same group only.
        (lambda x, w: jax.nn.silu(x @ w), (X, W), "dot_general logistic mul"),
        (lambda x: jax.nn.silu(x + 1.0), (X,), "add logistic mul"),
        # A second reader or an output ends a chain.
        (two_readers, (X,), "exp, reduce_sum, sin cos"),
        (output, (X,), "exp, sin"),
        # One contraction per group.
        (lambda x, w: x @ w + x @ (w * 2.0), (X, W), "dot_general, mul, dot_general add"),
        # Another shape ends a chain.
        (lambda x: jnp.sin(x + 1.0 + jnp.exp(x[:1] * 2.0)), (X,), "slice mul exp, add add sin"),
        # [4, 8] as [32] can be cut in 4 only, and the sum alone in 32: no view.
        (lambda x: x.reshape(32) + 1.0, (X,), "reshape, add"),
        (lambda x: x.reshape(8, 4) + 1.0, (X,), "reshape, add"),
        (lambda x: x.reshape(4, 8, 1) + 1.0, (X,), "add"),
        # What must stay whole takes nothing along: the addition alone can be cut in both.
        (lambda x: jnp.cumsum(x, axis=1) + 1.0, (X,), "cumsum, add"),
    ],
)
def test_what_fuses_with_what(fn, args, groups):
    assert ", ".join(map(" ".join, members(fn, *args))) == groups


def test_views_are_applied_by_their_readers_unless_outputs_or_read_by_whole_tasks():
    def fn(x):
        row = jnp.sum(x, axis=0)
        return (x.T * row[:, None]) @ jnp.broadcast_to(row, (4, 8))

    assert members(fn, X) == [["reduce_sum"], ["mul"], ["dot_general"]]
    scale = fuse(trace(fn, X))[1]
    assert [operand.aval.shape for operand in scale.operands] == [(4, 8), (8,)]
    assert [step.equation.primitive.name for step in scale.steps][-1] == "mul"
    assert members(lambda x: x.T, X) == [["transpose"]]
    groups = members(lambda x: (jnp.exp(x).T, jnp.exp(x).T + 1.0), X)
    assert groups == [["exp"], ["transpose"], ["exp"], ["add"]]

    def whole(x):
        return lax.while_loop(lambda c: c[0, 0] < 0, lambda c: c + 1.0, x.T)

    assert members(whole, X) == [["transpose"], ["while"]]


def test_counting_makes_no_group():
    def fn(x):
        return jnp.where(jnp.tri(4, 8, dtype=bool), x, 0.0)

    (group,) = fuse(trace(fn, X))
    assert "iota" not in [equation.primitive.name for equation in group.equations]
    sharded = partition(trace(fn, X), 4, strategy={group.name: (2, 2)})
    assert len(set(sharded.kernels)) == 4  # each knows where its block begins
    np.testing.assert_array_equal(evaluate(sharded, X), np.tril(X))


def test_the_epilogue_waits_for_the_sum():
    def fn(x, w, b):
        return jnp.tanh(x @ w + b)

    b = W[:1]
    program = trace(fn, X, W, b)
    sharded = partition(program, 4, strategy={"fn.dot_general": (1, 1)})
    (group,) = fuse(program)
    (inner,) = group.labelling.aggregated
    counts = {label: 4 if label == inner else 1 for label in range(len(group.labelling.sizes))}
    sharded = cut_as(program, (group,), [counts])
    assert sharded.names[-1] == "fn.dot_general.sum[0,0]"
    assert [len(refs) for refs in sharded.operands] == [2, 2, 2, 2, 5]
    assert sharded.graph.flops.tolist() == [2 * 4 * 8 * 2] * 4 + [3 * 32 + 2 * 32]
    np.testing.assert_allclose(evaluate(sharded, X, W, b), fn(X, W, b), rtol=1e-5)


def test_root_and_epilogue_may_read_the_same_operand():
    def fn(s, w):
        return (jnp.full((4, 8), 1.0) * s) @ w * s

    def through_a_view(s, w):
        return jnp.broadcast_to(s, (4, 8)) @ w * s

    for each in (fn, through_a_view):
        s = np.float32(3.0)
        program = trace(each, s, W)
        groups = fuse(program)
        sharded = cut_as(program, groups, [max_counts(group.labelling) for group in groups])
        np.testing.assert_allclose(evaluate(sharded, s, W), each(s, W), rtol=1e-5)


def test_names_are_unique_and_readable():
    def fn(x, w):
        with jax.named_scope("attn"):
            y = x @ w
            z = (x * 2.0) @ w
        return y @ w.T + z @ w.T, jnp.exp(y)

    names = " ".join(group.name for group in fuse(trace(fn, X, W)))
    within = "attn.dot_general attn.mul attn.dot_general_1"
    assert names == f"{within} fn.dot_general fn.dot_general_1 fn.exp"

    # A name that ends in a number is not taken twice.
    def numbered(x):
        with jax.named_scope("a"):
            y = lax.sort(x)
            y = lax.sort(y)
        with jax.named_scope("a/sort_1"):
            return lax.sort(y)

    assert len({group.name for group in fuse(trace(numbered, X))}) == 3
