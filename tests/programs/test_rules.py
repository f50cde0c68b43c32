"""Every rule: however an equation is cut, its blocks make what the primitive makes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from doppler_jax import evaluate, trace
from doppler_jax.programs.fuse import fuse
from doppler_jax.programs.grids import max_counts
from doppler_jax.programs.rules import ELEMENTWISE, RULES, get_labelling
from tests.programs.functions.registry import EXACT, assert_same, cut_as

CASES = {}


def case(name, fn, *args, cuts):
    """Registers a function, the primitive it is about, and the blocks it allows."""
    CASES[f"{name}-{len(CASES)}"] = (name, fn, args, cuts)


def normal(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape), dtype)


def integers(low, high, *shape):
    rng = np.random.default_rng((high, *shape))
    return jnp.asarray(rng.integers(low, high, size=shape), jnp.int32)


def spd(*shape):
    a = normal(*shape, shape[-1])
    identity = jnp.broadcast_to(jnp.eye(shape[-1], dtype=a.dtype), a.shape)
    return a @ jnp.swapaxes(a, -1, -2) + 4 * identity


X = normal(4, 8)
CUBE = normal(2, 4, 8)

# `cuts` is the number of blocks that the finest cut of the primitive's own group has.
case("add", lambda x, y: x + y, X, normal(1, 8), cuts=32)
case("select_n", lambda p, x, y: lax.select_n(p, x, y), X[0, 0] > 0, X, X + 1, cuts=32)
case("clamp", lambda x: lax.clamp(-0.5, x, 0.5), X, cuts=32)
case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), X, cuts=32)
case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int8), X, cuts=1)
case("reduce_precision", lambda x: lax.reduce_precision(x, 5, 7), X, cuts=32)

case("transpose", lambda x: lax.transpose(x, (2, 0, 1)), CUBE, cuts=64)
case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 2, 8), (0, 2)), X, cuts=64)
case("broadcast_in_dim", lambda x: jnp.broadcast_to(x[:, :1], (4, 8)), X, cuts=32)
case("squeeze", lambda x: lax.squeeze(x[:, None], (1,)), X, cuts=32)
case("reshape", lambda x: x.reshape(32), X, cuts=4)
case("reshape", lambda x: x.reshape(2, 2, 8), X, cuts=16)
case("reshape", lambda x: x.reshape(8, 8), CUBE, cuts=16)
case("reshape", lambda x: x.reshape(8, 2, 4), CUBE, cuts=4)
case("reshape", lambda x: x.reshape(6, 8), normal(12, 4), cuts=2)
case("reshape", lambda x: x.reshape(1, 4, 1, 8, 1), X, cuts=32)
case("reshape", lambda x: x.reshape(3, 0, 2), normal(0, 4), cuts=1)
case("iota", lambda: lax.broadcasted_iota(jnp.float32, (4, 8), 1), cuts=32)
case("iota", lambda: lax.iota(jnp.bfloat16, 512), cuts=512)
case("concatenate", lambda x, y: jnp.concatenate([x, y, x], 1), X, normal(4, 2), cuts=4)
case("split", lambda x: lax.split(x, (3, 5), axis=1), X, cuts=4)
case("rev", lambda x: lax.rev(x, (1,)), X, cuts=4)
case("pad", lambda x: lax.pad(x, 0.5, ((0, 0, 0), (1, -2, 1))), X, cuts=4)
case("slice", lambda x: lax.slice(x, (0, 1), (4, 8), (1, 3)), X, cuts=4)
case("slice", lambda x: x[1:3], X, cuts=8)
case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 8)), X, 3, cuts=8)
case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, i), (4, 3)), X, 9, cuts=4)
case("dynamic_update_slice", lambda x: lax.dynamic_update_slice(x, x[:2], (1, 0)), X, cuts=8)

case("dot_general", lambda x, y: x @ y, X, normal(8, 4), cuts=16)
case("dot_general", lambda x, y: jnp.einsum("bij,bkj->bik", x, y), CUBE, CUBE, cuts=32)
case("dot_general", lambda x: (x > 0) @ (x > 0).T, X, cuts=16)
case("reduce_sum", lambda x: jnp.sum(x, 1), X, cuts=4)
case("reduce_max", lambda x: jnp.max(x, 0), X, cuts=8)
case("reduce_min", lambda x: jnp.min(x), X, cuts=1)
case("reduce_prod", lambda x: jnp.prod(x, 1), X, cuts=4)
case("reduce_and", lambda x: jnp.all(x > -1, 1), X, cuts=4)
case("reduce_or", lambda x: jnp.any(x > 1, 1), X, cuts=4)
case("reduce_xor", lambda x: lax.reduce_xor(x, axes=(0,)), integers(-9, 9, 4, 8), cuts=8)
case("argmax", lambda x: jnp.argmax(x, 1), X, cuts=4)
case("argmin", lambda x: jnp.argmin(x, 0), X, cuts=8)
case("cumsum", lambda x: jnp.cumsum(x, 1), X, cuts=4)
case("cumprod", lambda x: jnp.cumprod(x, 0), X, cuts=8)
case("cummax", lambda x: lax.cummax(x, axis=1, reverse=True), X, cuts=4)
case("cummin", lambda x: lax.cummin(x, axis=1), X, cuts=4)
case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, axis=1), X, cuts=4)
case("sort", lambda x: jnp.sort(x, 1), X, cuts=4)
case("sort", lambda x: lax.sort((x, -x, x + 1), dimension=0, num_keys=2), X, cuts=8)
case("top_k", lambda x: lax.top_k(x, 3), X, cuts=4)
case("fft", lambda x: jnp.fft.rfft(x, axis=-1), X, cuts=4)
case("fft", lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x)), CUBE, cuts=2)


def _pairwise(x, y):
    def reducer(a, b):
        return a[0] + b[0], jnp.maximum(a[1], b[1])

    return lax.reduce((x, y), (np.float32(0), np.float32(-9)), reducer, (1,))


case("reduce", _pairwise, X, X + 1, cuts=4)


def conv(**kwargs):
    numbers = ("NHWC", "HWIO", "NHWC")
    options = {"dimension_numbers": numbers, **kwargs}
    return lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", **options)


IMAGE = normal(2, 6, 6, 4)
case("conv_general_dilated", conv(), IMAGE, normal(3, 3, 4, 8), cuts=16)
IMAGES, KERNEL = normal(4, 2, 6, 6), normal(8, 2, 3, 3)
strided = functools.partial(lax.conv, window_strides=(2, 2), padding="VALID")
case("conv_general_dilated", strided, IMAGES, KERNEL, cuts=32)
case("conv_general_dilated", conv(feature_group_count=4), IMAGE, normal(3, 3, 1, 8), cuts=2)
case("conv_general_dilated", conv(batch_group_count=2), IMAGE, normal(3, 3, 4, 8), cuts=1)


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def windowed(initial, combine, dimensions, padding):
    return lambda x: lax.reduce_window(x, initial, combine, dimensions, (1, 1), padding)


def pool_anyhow(x):
    def combine(a, b):
        return a * 0.5 + b

    return lax.reduce_window(x, np.float32(0), combine, (1, 3), (1, 1), "SAME")


case("reduce_window_max", pool, IMAGE, cuts=8)
case("reduce_window_min", windowed(np.inf, lax.min, (2, 1), "VALID"), X, cuts=8)
case("reduce_window_sum", windowed(0.0, lax.add, (1, 2), "SAME"), X, cuts=4)
case("reduce_window", pool_anyhow, X, cuts=4)
case("select_and_scatter_add", jax.grad(lambda x: jnp.sum(pool(x) ** 2)), IMAGE, cuts=8)
case("select_and_gather_add", lambda x: jax.jvp(pool, (x,), (x * 2,))[1], IMAGE, cuts=8)

ROWS = integers(-3, 9, 6, 2)  # some of them do not exist
TABLE = normal(8, 4)
case("gather", lambda t, i: jnp.take(t, i, axis=0), TABLE, ROWS, cuts=16)
case("gather", lambda t, i: t.at[i].get(mode="clip"), TABLE, ROWS, cuts=16)
case("gather", lambda t, i: t[:, i], X, integers(0, 8, 4), cuts=16)
case("gather", lambda t, i: jnp.take_along_axis(t, i, 1), X, integers(0, 8, 4, 2), cuts=8)
case("gather", lambda t, i: jax.vmap(lambda a, b: a[b])(t, i), CUBE, integers(0, 4, 2), cuts=16)


def windows(table, rows):
    return jax.vmap(lambda k: lax.dynamic_slice(table, (k, 0), (3, 4)))(rows)


case("gather", windows, TABLE, integers(0, 9, 4), cuts=16)


def embedding_gradient(table, rows):
    return jax.grad(lambda t: jnp.sum(jnp.take(t, rows, axis=0) ** 2))(table)


UPDATES = normal(6, 2, 4)
case("scatter-add", embedding_gradient, TABLE, jnp.abs(ROWS), cuts=4)
case("scatter", lambda t: t.at[jnp.array([1, 5])].set(2.0), TABLE, cuts=4)
for _how in ("add", "mul", "min", "max", "subtract"):
    _update = functools.partial(lambda how, t, i, u: getattr(t.at[i], how)(u), _how)
    case(f"scatter-{_how.replace('subtract', 'sub')}", _update, TABLE, ROWS, UPDATES, cuts=4)
_add_ones = jax.vmap(lambda a, b: a.at[b].add(1.0))
case("scatter-add", _add_ones, CUBE, integers(0, 4, 2, 3), cuts=16)


def _permutation(pivots):
    return lax.linalg.lu_pivots_to_permutation(pivots, 3)


SPD = spd(4, 3)
case("cholesky", lambda x: lax.linalg.cholesky(x), SPD, cuts=4)
case("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b), SPD, SPD, cuts=4)
case("lu", lambda x: lax.linalg.lu(x), SPD, cuts=4)
case("lu_pivots_to_permutation", _permutation, integers(0, 3, 4, 3), cuts=4)
case("qr", lambda x: jnp.linalg.qr(x), SPD, cuts=4)
case("eigh", lambda x: jnp.linalg.eigvalsh(x), SPD, cuts=4)
case("svd", lambda x: jnp.linalg.svd(x, compute_uv=False), SPD, cuts=4)
case("householder_product", lambda a: lax.linalg.householder_product(a, a[..., 0]), SPD, cuts=4)
case("eig", lambda x: jnp.linalg.eigvals(x), spd(2, 3), cuts=2)


def at_random(most, rng):
    return {label: int(2 ** rng.integers(0, n.bit_length())) for label, n in most.items()}


@pytest.mark.parametrize("key", CASES)
def test_any_cut_equals_the_primitive(key):
    name, fn, args, cuts = CASES[key]
    args = tuple(jnp.asarray(arg) for arg in args)
    program = trace(fn, *args)
    groups = fuse(program)
    finest = [max_counts(group.labelling) for group in groups]
    group, most = next(
        (group, most)
        for group, most in zip(groups, finest, strict=True)
        if name in [step.equation.primitive.name for step in group.steps]
    )
    labels = {label for of in group.labelling.results for label in of}
    assert math.prod(most[label] for label in labels) == cuts

    rng = np.random.default_rng(len(key))
    plans = [[at_random(most, rng) for most in finest]]
    if cuts <= 16:
        plans.append(finest)
    expected = fn(*args)
    for counts in plans:
        found = evaluate(cut_as(program, groups, counts), *args)
        assert_same(found, expected, EXACT)


def test_every_rule_has_a_case():
    tested = {name for name, *_ in CASES.values()}
    assert set(RULES) - set(ELEMENTWISE) - tested == {
        # Other spellings of primitives that have cases.
        *(f"scatter_{how}" for how in ("add", "max", "min", "mul", "sub"))
    }


@pytest.mark.parametrize(
    ("fn", "args", "flops"),
    [
        (lambda x, y: x @ y, (X, normal(8, 4)), [2 * 4 * 8 * 4]),
        (lambda x: jnp.exp(x), (X,), [32]),
        (lambda x: jnp.sum(x, 1), (X,), [32]),
        (lambda x: lax.rev(x, (1,)), (X,), [0]),
        (lambda x: x.reshape(8, 4), (X,), [0]),
        (lambda x: lax.cumsum(x, axis=1), (X,), [32]),
        (lambda x: lax.sort(x, dimension=1), (X,), [32 * 3]),
        (conv(), (IMAGE, normal(3, 3, 4, 8)), [2 * (2 * 6 * 6 * 8) * (3 * 3 * 4)]),
        (conv(feature_group_count=4), (IMAGE, normal(3, 3, 1, 8)), [2 * (2 * 36 * 8) * 9]),
        (
            lambda x: lax.scan(lambda c, y: (jnp.tanh(c @ c), y), x, jnp.zeros(5))[0],
            (normal(4, 4),),
            [5 * (2 * 4**3 + 4**2)],
        ),
        (
            lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x + 1, x),
            (normal(4, 4),),
            [0, 0, 1, 1, 2 * 4**3],
        ),
    ],
)
def test_flops(fn, args, flops):
    found = [get_labelling(equation).task_flops({}) for equation in trace(fn, *args).equations]
    assert found == pytest.approx(flops)


def test_a_primitive_without_a_rule_is_whole():
    program = trace(lambda k: jax.random.bits(k, (8, 8)), jax.random.key(0))
    (equation,) = program.equations
    labelling = get_labelling(equation)
    assert equation.primitive.name == "random_bits"
    assert labelling.whole
    assert set(map(labelling.max_count, range(len(labelling.sizes)))) == {1}


def test_labels_are_numbered_and_divide_their_dimensions():
    # What every rule promises: a label's size divides all dimensions that bear it.
    for _, fn, args, _ in CASES.values():
        for equation in trace(fn, *map(jnp.asarray, args)).equations:
            labelling = get_labelling(equation)
            values = (*equation.operands, *equation.results)
            labels = (*labelling.operands, *labelling.results)
            assert {label for of in labels for label in of} <= set(range(len(labelling.sizes)))
            for value, of in zip(values, labels, strict=True):
                for size, label in zip(value.aval.shape, of, strict=True):
                    assert size % max(labelling.max_count(label), 1) == 0
