"""A sharded program computes what the function does, for any number of shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from doppler_jax import evaluate, partition, trace
from tests.programs.functions import CASES, assert_same, fresh
from tests.programs.functions.registry import EXACT, SUMS, integers, normal

TABLE = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


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
def test_a_function_that_nobody_tuned_for_equals_itself(name, num_shards, traced):
    program, args, expected = traced(name)
    sharded = partition(program, num_shards)
    found = jax.jit(functools.partial(evaluate, sharded))(*fresh(args))
    assert_same(found, expected, CASES[name].tolerance)


def integer_reductions(x):
    parity = lax.reduce_xor(x, axes=(0,))
    return jnp.sum(x, axis=0), jnp.max(x), jnp.prod(x), parity, lax.reduce_or(x, axes=(1,))


def scalars(a, b, x):
    c = a * b + 2.0
    return c, x * c, lax.clamp(a, x, a + 1.0), lax.select_n(a > b, x, x + 1.0)


def zero_size(x, y, z):
    empty = jnp.broadcast_to((z + 1.0)[:, None], (4, 0))
    return x @ y, jnp.sum(x, axis=0), x * 2.0, jnp.max(y @ y.T, axis=0), empty


@functools.partial(jax.jit, static_argnums=1)
def power(x, exponent):
    return x**exponent


@jax.custom_vjp
def twice(x):
    return x * 2.0


twice.defvjp(lambda x: (twice(x), None), lambda _, g: (g * 2.0,))


def nested(x):
    inner = jax.jit(lambda y: power(twice(y), 2))
    return inner(jax.checkpoint(jnp.sin)(x)) + jax.nn.relu(x)


def duplicate_operand(x):
    y = x + 1.0
    return y * y, y @ y, jnp.copy(x) * x


def softmax(x, w):
    return jax.nn.softmax(x @ w, axis=0)


def size_one_dims(x):
    y = (x + 1.0)[:, None, :]
    return y.reshape(1, 4, 8, 1), jnp.squeeze(y * 2.0, axis=1), lax.expand_dims(x, (0,))


X = normal(0, 4, 8)
SMALL = {
    "two contracted": (
        lambda a, b: jnp.einsum("bijk,bjkl->bil", a, b),
        normal(0, 2, 4, 6, 8),
        normal(1, 2, 6, 8, 2),
    ),
    "inner product": (lambda a, b: jnp.einsum("ij,ij->", a, b), X, normal(1, 4, 8)),
    "outer product": (lambda c: jnp.einsum("i,j->ij", c, c), normal(2, 6)),
    "transposed operands": (lambda a, b: jnp.tanh(a.T @ b.T).T, X, normal(1, 6, 4)),
    "integer reductions": (integer_reductions, integers(0, 8, 4)),
    "broadcasting": (
        lambda x, row, column: x * jnp.broadcast_to(jnp.exp(row), (4, 8)) + (column + 1.0),
        X,
        normal(1, 8),
        normal(2, 4, 1),
    ),
    "scalars": (scalars, np.float32(0.1), np.float32(0.5), X),
    "zero size": (zero_size, normal(0, 0, 4), normal(1, 4, 8), normal(2, 4)),
    "empty contraction": (lambda x, y: (x @ y) + 1.0, normal(0, 4, 0), normal(1, 0, 8)),
    "passed through": (
        lambda x, y: (y, TABLE, 3.0, jnp.zeros((4, 2)), x + x, y),
        normal(0, 4),
        normal(1, 4, 2),
    ),
    "constants": (
        lambda x: ((x @ TABLE) * (TABLE[:1] + np.float32(1)), jnp.float32(2) ** 3),
        X,
    ),
    "no operands": (lambda x: jnp.sum(jnp.ones((4, 8)), axis=1) * x, normal(0, 4)),
    "nested": (nested, X),
    "duplicate operand": (duplicate_operand, normal(0, 8, 8)),
    "odd sizes": (softmax, normal(0, 3, 5), normal(1, 5, 7)),
    "half odd sizes": (softmax, normal(0, 6, 12), normal(1, 12, 10)),
    "size one dims": (size_one_dims, X),
}


@pytest.mark.parametrize("name", SMALL)
def test_equals_the_function(name):
    fn, *args = SMALL[name]
    args = fresh(args)
    for num_shards, strategy in ((1, "uniform"), (4, "planner")):
        sharded = partition(trace(fn, *args), num_shards, strategy=strategy)
        assert_same(evaluate(sharded, *args), fn(*args), SUMS)


def test_keyword_arguments_are_pytrees_too():
    def fn(params, *, scale):
        out = (params["w"] @ params["v"][0]) * scale
        return {"out": out, "same": [params["v"][1], None]}

    params = {"w": X, "v": (normal(1, 8, 4), normal(2, 2))}
    sharded = partition(trace(fn, params, scale=np.float32(0.5)), 4)
    found = evaluate(sharded, params, scale=np.float32(0.5))
    assert_same(found, fn(*fresh([params]), scale=np.float32(0.5)), SUMS)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_prints_once(num_shards, capfd):
    def fn(x):
        y = jnp.exp(x)
        jax.debug.print("first is {}, all are {}", y[0, 0], jnp.sum(y))
        return y + 1.0

    def passes(x):
        jax.debug.print("rows {}", x)
        return x

    zeros, rows = np.zeros((8, 8), np.float32), np.arange(2, dtype=np.int32)
    programs = [partition(trace(f, x), num_shards) for f, x in ((fn, zeros), (passes, rows))]
    capfd.readouterr()  # tracing itself prints nothing
    np.testing.assert_allclose(evaluate(programs[0], zeros), 2.0)
    jax.effects_barrier()
    evaluate(programs[1], rows)
    jax.effects_barrier()
    assert capfd.readouterr().out == "first is 1.0, all are 64.0\nrows [0 1]\n"


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_random_numbers_are_those_of_the_function(make_key):
    def fn(key, x):
        first, second = jax.random.split(key)
        noise = jax.random.normal(first, x.shape)
        keep = jax.random.bernoulli(second, 0.5, x.shape)
        return jnp.where(keep, x + noise, 0.0), jax.random.fold_in(first, 7)

    x = jnp.asarray(X)
    sharded = partition(trace(fn, make_key(3), x), 4)
    assert_same(evaluate(sharded, make_key(3), x), fn(make_key(3), x), EXACT)


def test_pure_callbacks_run_as_one_task():
    def fn(x):
        wanted = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.square, wanted, x * 2.0) + 1.0

    x = normal(0, 8, 8)
    sharded = partition(trace(fn, x), 4)
    assert sum("pure_callback" in name for name in sharded.names) == 1
    assert_same(evaluate(sharded, x), fn(x), SUMS)


def test_references_that_stay_inside_are_pure():
    def fn(x):
        total = jax.new_ref(x * 2.0)
        total[0] += 1.0
        return total[...]

    x = normal(0, 8)
    assert_same(evaluate(partition(trace(fn, x), 4), x), fn(x), SUMS)


def test_partial_sums_of_short_floats_are_rounded_once():
    a = jnp.asarray([256, 1, 1, 1], jnp.bfloat16)  # 256 + 1 rounds to 256
    sharded = partition(trace(lax.dot, a, jnp.ones_like(a)), 4)
    assert evaluate(sharded, a, jnp.ones_like(a)) == jnp.asarray(259, jnp.bfloat16)


@pytest.mark.parametrize(
    "name", ["softmax_of_huge_logits", "mixed_partitions", "masks", "bfloat16_program"]
)
def test_kernels_declare_what_they_compute(name, traced):
    for kernel in set(partition(traced(name)[0], 4).kernels):
        results = jax.eval_shape(kernel.fn, *kernel.operands)
        found, declared = ([(r.shape, r.dtype) for r in of] for of in (results, kernel.results))
        assert found == declared


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (({"w": np.ones((2, 2), np.float32)},), {}, r"missing \['scale'\]"),
        (({"v": 1},), {"scale": 1}, r"missing \[\"args\[0\]\['w'\]\"\], not expected"),
        (({"w": np.ones((2, 3), np.float32)},), {"scale": np.float32(1)}, r"float32\[2, 3\]"),
        (({"w": np.ones((2, 2), np.int32)},), {"scale": np.float32(1)}, r"int32\[2, 2\]"),
    ],
)
def test_refuses_other_arguments(args, kwargs, message):
    def fn(params, *, scale):
        return params["w"] * scale

    example = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    sharded = partition(trace(fn, {"w": example}, scale=number))
    with pytest.raises(ValueError, match=message):
        evaluate(sharded, *args, **kwargs)


def test_a_number_of_python_is_taken_in_place_of_an_array():
    number, weights = jax.ShapeDtypeStruct((), jnp.float32), jnp.ones((2, 2))
    sharded = partition(trace(lambda w, *, scale: w * scale, weights, scale=number))
    found = evaluate(sharded, weights, scale=1.5)
    np.testing.assert_array_equal(found, np.full((2, 2), 1.5))
    assert found.dtype == jnp.float32


def test_refuses_a_shape_in_place_of_an_array():
    example = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    with pytest.raises(ValueError, match=r"args\[0\] is ShapeDtypeStruct"):
        evaluate(partition(trace(jnp.tanh, example)), example)
