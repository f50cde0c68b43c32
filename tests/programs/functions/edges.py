"""Corners of primitives: ties, repeats, offsets, negative padding, infinities."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.programs.functions.registry import EXACT, SUMS, case, integers, normal

TIED = np.tile(np.float32([3, 1, 3, 2, 1, 3, 0, 3]), (4, 2))
HOLES = np.where(normal(0, 8, 16) > 1.0, np.nan, normal(1, 8, 16)).astype(np.float32)


@case(TIED, np.zeros((8, 16), np.float32), tolerance=EXACT)
def ties(x, zero):
    order = lax.sort((x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), dimension=1, num_keys=1)
    extremes = jnp.argmax(x, axis=1), jnp.argmin(x.T, axis=0), jnp.argmax(zero)
    return extremes, lax.top_k(x, 5), order


@case(HOLES, tolerance=EXACT)
def not_finite(x):
    rows = jnp.where(jnp.isnan(x), -jnp.inf, x)
    extremes = jnp.max(x, 1), jnp.nanmax(x, 0), jnp.argmax(x, 1), jnp.max(rows, 0)
    infinite = 1.0 / jnp.zeros_like(x), jnp.isinf(rows)
    return extremes, jnp.sort(x, axis=1), infinite, jnp.nan_to_num(x)


@case(normal(0, 8, 12), integers(1, 8, 3, low=0, high=12))
def batched_gather_and_scatter(x, where):
    picked = jnp.take_along_axis(x, where, axis=1)
    added = jax.vmap(lambda row, i, v: row.at[i].add(v))(x, where, picked)
    put = jnp.put_along_axis(x, where[:, :1], 0.0, axis=1, inplace=False)
    return picked, added, put, x[jnp.arange(8), where[:, 0]], x.at[:, where[0]].get()


@case(normal(0, 16), np.int32([3, 3, 0, 15, 3, 40, -1, 0]))
def repeated_and_outlying_indices(x, where):
    ones = jnp.ones(where.shape)
    return (
        x.at[where].add(ones),
        x.at[where].get(mode="fill", fill_value=7.0),
        x.at[where].set(2.0, mode="drop"),
        jax.ops.segment_prod(x[:8], where, num_segments=16),
        jnp.unique(where, size=8, fill_value=-5),
        jnp.nonzero(x > 0, size=12, fill_value=99),
    )


@case(normal(0, 8, 12), np.int32([50, -50]), tolerance=EXACT)
def clamped_windows(x, at):
    far = lax.dynamic_slice(x, (at[0], at[1]), (4, 6))
    return far, lax.dynamic_update_slice(x, far, (at[1], at[0])), x[at[0]], x[:, at[1]]


@case(normal(0, 8, 12), tolerance=EXACT)
def moved_edges(x):
    padded = lax.pad(x, 0.5, ((-2, 3, 1), (1, -4, 2)))
    parts = jnp.array_split(x, 5, axis=1)
    rolled = jnp.roll(x, (3, -5), axis=(0, 1))
    return padded, parts, rolled, lax.rev(x[1:7:2], (0, 1)), x[::-2, 3:], jnp.diff(x, axis=0)


@case(normal(0, 4, 6, 8), tolerance=EXACT)
def reshapes(x):
    merged = jnp.tanh(x).reshape(24, 8)
    split = merged.reshape(2, 12, 2, 4)
    crossed = jnp.exp(x).transpose(2, 0, 1).reshape(16, 12)
    return merged, split, crossed, jnp.ravel(x + 1.0).reshape(3, 64), (x * 2.0).reshape(6, 4, 8)


@case(normal(0, 8, 12), integers(1, 8, 12))
def general_reductions(x, i):
    def larger(a, b):
        return jnp.where(a[0] >= b[0], a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1])

    pair = lax.reduce((x, i), (jnp.float32(-jnp.inf), jnp.int32(0)), larger, (1,))
    hypotenuse = lax.reduce(x, jnp.float32(0.0), lambda a, b: jnp.sqrt(a * a + b * b), (0,))
    windows = lax.reduce_window(x, -jnp.inf, lax.max, (3, 2), (2, 1), "SAME")
    sums = lax.cumsum(x, axis=1, reverse=True), jnp.cumprod(i, axis=0)
    return pair, hypotenuse, windows, sums


@case(normal(0, 8, 4, 9, 9), normal(1, 8, 2, 3, 3))
def gradient_of_grouped_convolution(x, kernel):
    def loss(x, kernel):
        dilated = lax.conv_general_dilated(
            x, kernel, (1, 2), ((0, 1), (2, 0)), lhs_dilation=(2, 1), feature_group_count=2
        )
        return jnp.sum(jnp.sin(dilated))

    patches = lax.conv_general_dilated_patches(x, (3, 3), (3, 3), "VALID")
    return jax.grad(loss, argnums=(0, 1))(x, kernel), patches


@case(normal(0, 8, 16), normal(1, 16, 8))
def mixed_precision(a, b):
    halves = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    short = lax.dot(*halves, preferred_element_type=jnp.float32)
    halves = (a.astype(jnp.float16) * jnp.float16(2)).astype(jnp.float32)
    whole = (a * 100.0).astype(jnp.int8).astype(jnp.uint32) // jnp.uint32(3)
    rounded = lax.reduce_precision(a, 8, 7), jnp.round(a, 1), jnp.floor(b)
    return short, halves, whole, rounded, lax.bitcast_convert_type(a, jnp.int32)


@case(np.uint32(5), normal(0, 8, 16), tolerance=SUMS)
def random_draws(seed, x):
    a, b, c = jax.random.split(jax.random.key(seed), 3)
    rows = jax.vmap(lambda key: jax.random.uniform(key, (16,)))(jax.random.split(a, 8))
    choice = jax.random.categorical(b, x, axis=1)
    return rows, choice, jax.random.randint(c, (8, 4), 0, 9)


@case(normal(0, 8, 16), normal(1, 16, 16))
def library_calls(x, w):
    def on_host(x):
        return np.sinh(x)

    called = jax.pure_callback(on_host, jax.ShapeDtypeStruct((8, 16), jnp.float32), x * 0.5)
    kept = lax.optimization_barrier(x @ w)
    solved = lax.custom_linear_solve(
        lambda v: 4.0 * v + v @ w * 0.01, x, lambda mv, b: b / 4.0, transpose_solve=None
    )
    return called, kept + lax.stop_gradient(x), solved, jax.nn.relu6(kept), jnp.vander(x[0], 4)


@case(np.arange(24, dtype=np.float32), tolerance=EXACT)
def positions(x):
    grid = jnp.meshgrid(jnp.arange(8), jnp.arange(6), indexing="ij")
    ramp = lax.broadcasted_iota(jnp.float32, (8, 24), 0) * x[None]
    made = jnp.eye(8, 12, k=2) + 1.0, jnp.tri(12, 8), jnp.linspace(0.0, x[3], 8)
    return grid, ramp, made, jnp.indices((4, 8))


@case(normal(0, 8, 16))
def results_read_twice(x):
    y = jnp.tanh(x)
    total = jnp.sum(y, axis=0)
    return y, y, total, y - total[None], {"y": y, "x": x}, total[None] * 2.0, jnp.float32(1) * 3
