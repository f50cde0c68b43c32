"""Array manipulation, integers, booleans, random numbers, pytrees."""

import typing

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from tests.programs.functions.registry import EXACT, SHORT, built, case, integers, normal


@case(normal(0, 8, 16), tolerance=EXACT)
def sorting(x):
    largest, where = lax.top_k(x, 3)
    return jnp.sort(x, axis=0), jnp.argsort(x, axis=1), largest, where, jnp.median(x, axis=1)


@case(integers(0, 8, 16), normal(1, 8, 16), tolerance=EXACT)
def positions_of_extremes(i, x):
    # Integers of few values tie: the first position counts.
    return jnp.argmax(i, axis=1), jnp.argmin(i, axis=0), jnp.argmax(x), jnp.argmin(x, axis=1)


@case(normal(0, 8, 16), integers(1, 16, 4))
def cumulative_operations(x, i):
    sums = jnp.cumsum(x, axis=0), jnp.cumprod(x, axis=1), lax.cummax(x, axis=1)
    return sums, lax.cumlogsumexp(x, axis=0), jnp.cumsum(i[::-1], axis=0), lax.cummin(i, axis=1)


@case(normal(0, 8, 16), normal(1, 8, 16))
def masks(x, y):
    mask = (x > 0) & ~(y > 1) | jnp.isnan(x)
    filled = jnp.where(mask, x, jnp.where(y > 0, y, -1.0))
    total, mean = jnp.sum(x, axis=1, where=mask), jnp.mean(y, where=mask)
    return filled, mask, total, mean, mask.any(axis=0)


@case(normal(0, 16, 4), integers(1, 16, low=0, high=6))
def segments(x, ids):
    total = jax.ops.segment_sum(x, ids, num_segments=6)
    largest = jax.ops.segment_max(x, ids, num_segments=6)
    return total, largest, jnp.bincount(ids, length=6), jax.nn.one_hot(ids, 6)


@case(normal(0, 8, 16), integers(1, 4, low=0, high=8), normal(2, 4, 16), tolerance=EXACT)
def scattering(x, ids, y):
    return x.at[ids].set(0.0), x.at[ids, 2].max(9.0), x.at[2:6, ::4].multiply(y[:, :4])


@case(normal(0, 8, 16), integers(1, 2, low=0, high=6), tolerance=EXACT)
def dynamic_windows(x, at):
    window = lax.dynamic_slice(x, (at[0], at[1]), (2, 8))
    row = lax.dynamic_index_in_dim(x, at[0], axis=0)
    return window, row, lax.dynamic_update_slice(x, window * 2.0, (at[1], 0))


@case(normal(0, 8, 6), normal(1, 4, 6), tolerance=EXACT)
def rearranging(x, y):
    joined = jnp.concatenate([x, y, x[2:5]], axis=0)
    padded = jnp.pad(x, ((1, 2), (0, 3)), constant_values=7.0)
    edges = jnp.pad(y, 1, mode="reflect")
    return joined, padded, edges, jnp.roll(x, 3, axis=0), jnp.flip(x), jnp.tile(y, (2, 3))


@case(normal(0, 8, 6), normal(1, 8, 6), tolerance=EXACT)
def stacking(x, y):
    parts = jnp.split(jnp.stack([x, y], axis=1), 4)
    repeated = jnp.repeat(x, 2, axis=1).reshape(4, -1)
    return parts, repeated, x.reshape(2, 4, 3, 2).swapaxes(1, 2), jnp.ravel(x[::3, 1::2])


@case(normal(0, 16), np.linspace(-2, 2, 12, dtype=np.float32), normal(1, 12))
def interpolation(x, xp, fp):
    image = x.reshape(4, 4)
    where = [jnp.abs(x), jnp.abs(x[::-1])]
    sampled = jax.scipy.ndimage.map_coordinates(image, where, order=1)
    return jnp.interp(x, xp, fp), sampled, jnp.searchsorted(xp, x)


@case(integers(0, 8, 16), integers(1, 16, 8), tolerance=EXACT)
def integer_program(a, b):
    c = a @ b
    bits = lax.population_count(c & 0xFF) + (c << 2) ^ (c >> 1)
    return c // 3, c % 5, bits, jnp.clip(c, -10, 10), jnp.prod(a, axis=0), jnp.bitwise_or(c, 1)


@case(normal(0, 8, 16) > 0, normal(1, 16, 8) > 0, tolerance=EXACT)
def boolean_program(a, b):
    return a @ b, jnp.any(a ^ b.T, axis=0), jnp.all(a | b.T), jnp.cumsum(a, axis=1), ~a


@case(
    normal(0, 8, 16, dtype=ml_dtypes.bfloat16),
    normal(1, 16, 8, dtype=ml_dtypes.bfloat16),
    tolerance=SHORT,
)
def bfloat16_program(a, b):
    h = jax.nn.gelu(a @ b)
    return h, jax.nn.softmax(h), jnp.sum(a, axis=0), h.astype(jnp.float32) * 2.0


@case(
    integers(0, 8, 16, low=-128, high=127, dtype=np.int8),
    integers(1, 16, 8, low=-128, high=127, dtype=np.int8),
    normal(2, 1, 8),
    tolerance=EXACT,
)
def quantised_product(a, b, scale):
    wide = lax.dot(a, b, preferred_element_type=jnp.int32)
    return wide, wide.astype(jnp.float32) * scale, (wide >> 8).astype(jnp.int8)


@case(normal(0, 4, 8), normal(1, 0, 8), np.float32(1.5), tolerance=EXACT)
def empty_arrays_and_scalars(x, empty, scale):
    weak = jnp.asarray(2.0) * scale
    return empty @ x.T, jnp.sum(empty), jnp.concatenate([empty, x]) * weak, x[:0], scale > 1, 3


@built(tolerance=EXACT)
def dropout_with_typed_keys():
    def fn(key, x):
        keep_key, noise_key, out_key = jax.random.split(key, 3)
        kept = jnp.where(jax.random.bernoulli(keep_key, 0.8, x.shape), x / 0.8, 0.0)
        noise = jax.random.normal(noise_key, x.shape)
        return kept + 0.1 * noise, out_key, jax.random.permutation(jax.random.key(3), 8)

    return fn, (jax.random.key(7), normal(0, 8, 16))


class Pair(typing.NamedTuple):
    """A container that is no plain tuple."""

    left: jax.Array
    right: jax.Array | None


@case({"a": Pair(normal(0, 4, 8), None), "b": [normal(1, 8), (normal(2, 8, 2),)]}, normal(3, 4))
def pytrees(tree, bias):
    x = tree["a"].left @ tree["b"][1][0] + bias[:, None]
    return Pair({"x": x, "same": tree["b"][0]}, None), [jnp.sum(x), (bias, bias)], np.arange(3)


@case(normal(0, 16, 2), normal(1, 4, 2))
def k_means_step(points, centres):
    distances = jnp.sum((points[:, None] - centres[None]) ** 2, axis=-1)
    nearest = jnp.argmin(distances, axis=1)
    members = jax.nn.one_hot(nearest, 4)
    return members.T @ points / (jnp.sum(members, axis=0)[:, None] + 1.0), nearest
