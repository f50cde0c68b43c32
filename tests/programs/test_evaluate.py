"""A sharded program computes what the function does, for any number of shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from doppler_jax.programs import evaluate, partition, trace

TABLE = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
CASES = {}


def case(*args, **kwargs):
    """Registers a function with the arguments that it is tested on."""

    def register(fn):
        CASES[fn.__name__] = (fn, args, kwargs)
        return fn

    return register


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def integers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(-9, 9, size=shape), jnp.int32)


@case(normal(0, 8, 4), normal(1, 4, 16))
def matmul(a, b):
    return a @ b


@case(normal(0, 2, 4, 6, 8), normal(1, 2, 6, 8, 2))
def einsum_two_contracted(a, b):
    return jnp.einsum("bijk,bjkl->bil", a, b)


@case(normal(0, 4, 8), normal(1, 4, 8), normal(2, 6))
def inner_and_outer_product(a, b, c):
    return jnp.einsum("ij,ij->", a, b), jnp.einsum("i,j->ij", c, c)


@case(normal(0, 4, 8), normal(1, 6, 4))
def transposed_operands(a, b):
    return jnp.tanh(a.T @ b.T).T


@case(normal(0, 8, 12))
def softmax(x):
    return jax.nn.softmax(x, axis=1)


@case(normal(0, 4, 8), normal(1, 1, 8), normal(2, 1, 8))
def layer_norm(x, gain, bias):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-5) * gain + bias


@case(normal(0, 4, 8))
def reductions(x):
    mask = x > 0.5
    return {
        "max": jnp.max(x, axis=1),
        "min": jnp.min(x, axis=0),
        "prod": jnp.prod(x, axis=1),
        "sum": jnp.sum(x + 1.0),
        "any": jnp.any(mask, axis=0),
        "all": jnp.all(mask, axis=1),
    }


@case(integers(0, 8, 4))
def integer_reductions(x):
    parity = lax.reduce_xor(x, axes=(0,))
    return jnp.sum(x, axis=0), jnp.max(x), jnp.prod(x), parity, lax.reduce_or(x, axes=(1,))


@case(normal(0, 4, 8), normal(1, 8), normal(2, 4, 1))
def broadcasting(x, row, column):
    full = jnp.broadcast_to(jnp.exp(row), x.shape)
    return x * full + (column + 1.0) * 2.0


@case(normal(0), normal(1), normal(2, 4, 8))
def scalars(a, b, x):
    c = a * b + 2.0
    return c, x * c, lax.clamp(a, x, a + 1.0), lax.select_n(a > b, x, x + 1.0)


@case(normal(0, 4, 8))
def pointwise(x):
    y = jnp.clip(jnp.tanh(x), -0.5, 0.5) + jax.nn.sigmoid(x) * lax.erf(x)
    return jnp.sign(x) * y**3 - jnp.maximum(jnp.abs(x), 0.25) ** 0.5, jax.nn.gelu(x)


@case(integers(0, 8, 4), integers(1, 4, 8))
def integer_matmul(a, b):
    c = a @ b
    return lax.rem(c, 7) + jnp.sum(c, axis=0, keepdims=True), c & 5


@case(normal(0, 4, 8) > 1, normal(1, 8, 4) > 1)
def boolean_matmul(a, b):
    return a @ b


@case(normal(0, 4, 8))
def masked(x):
    mask = (x > 0) & ~(x > 1)
    return jnp.where(mask, x, 0.0), mask, jnp.sum(mask, axis=0)


@case(normal(0, 8, 8, dtype=jnp.bfloat16), normal(1, 8, 8, dtype=jnp.bfloat16))
def short_floats(a, b):
    return a @ b, jnp.sum(a, axis=0), jnp.matmul(a, b, preferred_element_type=jnp.float32)


@case(normal(0, 0, 4), normal(1, 4, 8), normal(2, 4))
def zero_size(x, y, z):
    empty = jnp.broadcast_to((z + 1.0)[:, None], (4, 0))
    return x @ y, jnp.sum(x, axis=0), x * 2.0, jnp.max(y @ y.T, axis=0), empty


@case(normal(0, 4, 0), normal(1, 0, 8))
def empty_contraction(x, y):
    return (x @ y) + 1.0


@case(normal(0, 4), normal(1, 4, 2))
def passed_through(x, y):
    return y, TABLE, 3.0, jnp.zeros((4, 2)), x + x, y


@case(normal(0, 4, 8))
def with_constants(x):
    return (x @ TABLE) * (TABLE[:1] + np.float32(1.0)), jnp.float32(2) ** 3


@case(normal(0, 4))
def tasks_without_operands(x):
    return jnp.sum(jnp.ones((4, 8)), axis=1) * x


@case({"w": normal(0, 4, 8), "v": (normal(1, 8, 4), normal(2, 2))}, scale=normal(3))
def pytrees(params, *, scale):
    return {"out": (params["w"] @ params["v"][0]) * scale, "same": [params["v"][1], None]}


@functools.partial(jax.jit, static_argnums=1)
def power(x, exponent):
    return x**exponent


@jax.custom_vjp
def twice(x):
    return x * 2.0


twice.defvjp(lambda x: (twice(x), None), lambda _, g: (g * 2.0,))


@case(normal(0, 4, 8))
def nested(x):
    inner = jax.jit(lambda y: power(twice(y), 2))
    return inner(jax.checkpoint(jnp.sin)(x)) + jax.nn.relu(x)


@case(normal(0, 8, 8))
def duplicate_operand(x):
    y = x + 1.0
    return y * y, y @ y, jnp.copy(x) * x


@case(normal(0, 3, 5), normal(1, 5, 7))
def odd_sizes(x, w):
    return jax.nn.softmax(x @ w, axis=0)


@case(normal(0, 6, 12), normal(1, 12, 10))
def half_odd_sizes(x, w):
    return jax.nn.softmax(x @ w, axis=0)


@case(normal(0, 16, 4), normal(1, 4, 16), normal(2, 16, 2))
def formation(x, w, v):
    h = x @ w
    narrow = h @ v
    return h + h.T, narrow.T @ narrow, jnp.max(h, axis=0)[:, None] * narrow


@case(normal(0, 4, 8))
def size_one_dims(x):
    y = (x + 1.0)[:, None, :]
    return y.reshape(1, 4, 8, 1), jnp.squeeze(y * 2.0, axis=1), lax.expand_dims(x, (0,))


@case(normal(0, 4, 8), normal(1, 8, 4))
def gradient(x, w):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_function(name):
    fn, args, kwargs = CASES[name]
    expected = fn(*args, **kwargs)
    program = trace(fn, *args, **kwargs)
    for num_shards, strategy in ((1, "uniform"), (4, "planner")):
        sharded = partition(program, num_shards, strategy=strategy)
        found = evaluate(sharded, *args, **kwargs)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(x, jnp.asarray(y))


def assert_close(found, expected):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        np.testing.assert_array_equal(found, expected)
        return
    tolerance = 1e-4 if expected.dtype == jnp.float32 else 2e-2
    wide = np.asarray(expected, np.float64)
    scale = np.abs(wide).max(initial=1e-30)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), wide, rtol=0, atol=tolerance * scale
    )


def rnn(x, w):
    def body(carry, row):
        carry = jnp.tanh(carry @ w + row)
        return carry, (carry * 2.0, 1.0)

    return lax.scan(body, x[0], x, reverse=True)


def test_unrolled_scan_equals_the_scan():
    x, w = normal(0, 4, 2, 8), normal(1, 8, 8)
    expected = rnn(x, w)
    for unroll_scans, num_scans in ((False, 1), (True, 0)):
        sharded = partition(trace(rnn, x, w, unroll_scans=unroll_scans), 4)
        assert sum("rnn.scan[" in name for name in sharded.names) == num_scans
        jax.tree.map(assert_close, evaluate(sharded, x, w), expected)


def test_prints_once(capfd):
    def fn(x):
        y = jnp.exp(x)
        jax.debug.print("first is {}", y[0, 0])
        return y + 1.0

    x = np.zeros((8, 8), np.float32)
    sharded = partition(trace(fn, x), 4)
    capfd.readouterr()
    evaluate(sharded, x)
    jax.effects_barrier()
    assert capfd.readouterr().out == "first is 1.0\n"


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_random_numbers_are_those_of_the_function(make_key):
    def fn(key, x):
        first, second = jax.random.split(key)
        noise = jax.random.normal(first, x.shape)
        keep = jax.random.bernoulli(second, 0.5, x.shape)
        return jnp.where(keep, x + noise, 0.0), jax.random.fold_in(first, 7)

    x = normal(0, 4, 8)
    sharded = partition(trace(fn, make_key(3), x), 4)
    found, expected = evaluate(sharded, make_key(3), x), fn(make_key(3), x)
    assert_close(found[0], expected[0])
    assert found[1].dtype == expected[1].dtype
    as_bits = [jnp.asarray(_bits(key)) for key in (found[1], expected[1])]
    np.testing.assert_array_equal(*as_bits)


def _bits(key):
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(key) if typed else key


def test_pure_callbacks_run_as_one_task():
    def fn(x):
        wanted = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.square, wanted, x * 2.0) + 1.0

    x = normal(0, 8, 8)
    sharded = partition(trace(fn, x), 4)
    assert sum("pure_callback" in name for name in sharded.names) == 1
    assert_close(evaluate(sharded, x), fn(x))


def test_references_that_stay_inside_are_pure():
    def fn(x):
        total = jax.new_ref(x * 2.0)
        total[0] += 1.0
        return total[...]

    x = normal(0, 8)
    assert_close(evaluate(partition(trace(fn, x), 4), x), fn(x))


def test_partial_sums_of_short_floats_are_rounded_once():
    a = jnp.asarray([256, 1, 1, 1], jnp.bfloat16)  # 256 + 1 rounds to 256
    sharded = partition(trace(lax.dot, a, jnp.ones_like(a)), 4)
    assert evaluate(sharded, a, jnp.ones_like(a)) == jnp.asarray(259, jnp.bfloat16)


def test_kernels_declare_what_they_compute():
    for name in ("softmax", "formation", "masked", "short_floats", "tasks_without_operands"):
        fn, args, kwargs = CASES[name]
        sharded = partition(trace(fn, *args, **kwargs), 4)
        for kernel in set(sharded.kernels):
            results = jax.eval_shape(kernel.fn, *kernel.operands)
            assert tuple((r.shape, r.dtype) for r in results) == tuple(
                (r.shape, r.dtype) for r in kernel.results
            )


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (({"w": np.ones((2, 2), np.float32)},), {}, r"missing \['scale'\]"),
        (({"v": 1},), {"scale": 1}, r"missing \[\"args\[0\]\['w'\]\"\], not expected"),
        (({"w": np.ones((2, 3), np.float32)},), {"scale": np.float32(1)}, r"float32\[2, 3\]"),
        (({"w": np.ones((2, 2), np.int32)},), {"scale": np.float32(1)}, r"int32\[2, 2\]"),
        (({"w": np.ones((2, 2), np.float32)},), {"scale": 1.0}, "scale is float 1.0"),
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


def test_refuses_a_shape_in_place_of_an_array():
    example = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    with pytest.raises(ValueError, match=r"args\[0\] is ShapeDtypeStruct"):
        evaluate(partition(trace(jnp.tanh, example)), example)
