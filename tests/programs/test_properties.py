"""Generated programs equal themselves when cut: random operations on small arrays."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from doppler_jax import evaluate, partition, trace

# Few sizes, so that JAX's caches hit: even, odd, twice even.
SIZES = (8, 4, 6, 3)
SHAPES = st.lists(st.sampled_from(SIZES), min_size=1, max_size=3).map(tuple)


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation on earlier tensors, numbered in the order in which they were made."""

    fn: Callable
    operands: tuple[int, ...]


def tensor(shapes):
    """Draws a tensor; the latest first, so that programs grow long."""
    return st.sampled_from(range(len(shapes))[::-1])


def unary(draw, shapes):
    x = draw(tensor(shapes))
    fn = draw(st.sampled_from([jnp.tanh, jnp.abs, lax.neg, jax.nn.sigmoid]))
    return Step(fn, (x,))


def binary(draw, shapes):
    """Equal shapes, or dimensions of size 1 broadcast, or a scalar."""
    x = draw(tensor(shapes))
    fitting = [i for i, shape in enumerate(shapes) if broadcasts(shape, shapes[x])]
    y = draw(st.sampled_from(fitting))
    fn = draw(st.sampled_from([jnp.add, jnp.multiply, jnp.maximum, smaller]))
    return Step(fn, (x, y))


def broadcasts(shape, other):
    return len(shape) in (0, len(other)) and all(
        1 in (a, b) or a == b for a, b in zip(shape, other, strict=False)
    )


def smaller(x, y):
    return jnp.where(x < y, x, y)


def reduction(draw, shapes):
    x = draw(tensor(shapes))
    rank = len(shapes[x])
    axes = tuple(draw(st.sets(st.integers(0, rank - 1)))) if rank else ()
    keep = draw(st.booleans())
    fn = draw(st.sampled_from([jnp.mean, jnp.max, jnp.min, jax.nn.logsumexp]))
    return Step(lambda a: fn(a, axis=axes, keepdims=keep), (x,))


def product(draw, shapes):
    """Contraction of two tensors over every pair of their dimensions that is drawn."""
    x, y = (draw(tensor(shapes)) for _ in range(2))
    pairs = [
        (i, j) for i, a in enumerate(shapes[x]) for j, b in enumerate(shapes[y]) if a == b > 1
    ]
    if not pairs:
        return unary(draw, shapes)
    i, j = draw(st.sampled_from(pairs))
    return Step(lambda a, b: jnp.tanh(jnp.tensordot(a, b, axes=((i,), (j,)))), (x, y))


def reshape(draw, shapes):
    x = draw(tensor(shapes))
    size = math.prod(shapes[x])
    first = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if size % n == 0]))
    shape = draw(st.sampled_from([(first, size // first), (size // first, 1, first), (size,)]))
    return Step(lambda a: jnp.reshape(a, shape), (x,))


def transpose(draw, shapes):
    x = draw(tensor(shapes))
    order = tuple(draw(st.permutations(range(len(shapes[x])))))
    return Step(lambda a: jnp.transpose(a, order), (x,))


def window(draw, shapes):
    x = draw(tensor(shapes))
    steps = st.sampled_from([1, 2])
    slices = tuple(slice(draw(st.integers(0, n - 1)), n, draw(steps)) for n in shapes[x])
    return Step(lambda a: a[slices], (x,))


def concatenation(draw, shapes):
    x = draw(tensor(shapes))
    if not shapes[x]:
        return unary(draw, shapes)
    axis = draw(st.integers(0, len(shapes[x]) - 1))

    def others(shape):
        return len(shape), shape[:axis], shape[axis + 1 :]

    fitting = [i for i, shape in enumerate(shapes) if others(shape) == others(shapes[x])]
    y = draw(st.sampled_from(fitting))
    return Step(lambda a, b: jnp.concatenate([a, b], axis=axis), (x, y))


def along_axis(draw, shapes):
    x = draw(tensor(shapes))
    if not shapes[x]:
        return unary(draw, shapes)
    axis = draw(st.integers(0, len(shapes[x]) - 1))
    fn = draw(st.sampled_from([jnp.cumsum, jnp.sort, jnp.flip, jax.nn.softmax]))
    return Step(lambda a: fn(a, axis=axis) / 4.0, (x,))


MAKERS = [product, reduction, binary, unary, reshape, transpose, window]
MAKERS += [concatenation, along_axis]


@st.composite
def programs(draw):
    """Draws the argument shapes, the steps and the outputs."""
    shapes = draw(st.lists(SHAPES, min_size=2, max_size=3))
    arguments = tuple(shapes)
    steps = []
    for _ in range(draw(st.integers(4, 8))):
        step = draw(st.sampled_from(MAKERS))(draw, shapes)
        operands = (jax.ShapeDtypeStruct(shapes[i], jnp.float32) for i in step.operands)
        result = jax.eval_shape(step.fn, *operands)
        if math.prod(result.shape) <= 512 and result.ndim <= 4:
            steps.append(step)
            shapes.append(result.shape)
    # What nobody reads is an output, so that no step is dead; so may others be.
    outputs = set(range(len(shapes))) - {i for step in steps for i in step.operands}
    outputs |= draw(st.sets(st.integers(0, len(shapes) - 1), max_size=2))
    return arguments, tuple(steps), tuple(sorted(outputs))


def make_function(steps, outputs):
    def fn(*args):
        tensors = list(args)
        for step in steps:
            tensors.append(step.fn(*(tensors[i] for i in step.operands)))
        return [tensors[i] for i in outputs]

    return fn


SLOW = [HealthCheck.too_slow]


@settings(deadline=None, derandomize=True, max_examples=30, suppress_health_check=SLOW)
@given(programs(), st.sampled_from([2, 4, 8]), st.sampled_from(["planner", "uniform"]))
def test_generated_program_equals_itself_when_cut(program, num_shards, strategy):
    shapes, steps, outputs = program
    fn = make_function(steps, outputs)
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.uniform(-1, 1, shape), jnp.float32) for shape in shapes]
    expected = jax.jit(fn)(*args)
    sharded = partition(trace(fn, *args), num_shards, strategy=strategy)
    run = jax.jit(functools.partial(evaluate, sharded))
    for found, wanted in zip(run(*args), expected, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        # Not below the arguments' own rounding: a generated program may cancel to nothing.
        scale = max(np.abs(wanted).max(initial=0.0), 0.1)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * scale)
