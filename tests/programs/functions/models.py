"""Layers and models of neural networks, in inference."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax

from tests.programs.functions.registry import EXACT, built, case, fill, integers, normal


class LinenNet(nn.Module):
    """A small convolutional network with batch normalisation."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), strides=2)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=True)(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.gelu(nn.Dense(16)(x.reshape(x.shape[0], -1)))
        return nn.Dense(6)(nn.LayerNorm()(x))


class LinenEncoder(nn.Module):
    """A transformer's encoder layer."""

    @nn.compact
    def __call__(self, x, mask):
        attend = nn.MultiHeadDotProductAttention(num_heads=4, deterministic=True)
        x = x + attend(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))


class NnxNet(nnx.Module):
    """Embedding, two layers with normalisation, and dropout that is switched off."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(12, 16, rngs=rngs)
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True)
        self.second = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, ids):
        x = nnx.silu(self.norm(self.first(self.embed(ids))))
        return self.second(self.dropout(x))


def linen(module, *inputs):
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return module.apply, (fill(shapes, 0), *inputs)


@built()
def linen_convolutional_network():
    return linen(LinenNet(), normal(1, 4, 8, 8, 3))


@built()
def linen_encoder():
    causal = jnp.tril(jnp.ones((1, 1, 8, 8), bool))
    return linen(LinenEncoder(), normal(1, 2, 8, 16), causal)


@built()
def nnx_network():
    model = nnx.eval_shape(lambda: NnxNet(nnx.Rngs(0)))
    definition, state = nnx.split(model)
    state = fill(state, 0)

    def fn(state, ids):
        return nnx.merge(definition, state)(ids)

    return fn, (state, integers(1, 8, low=0, high=12))


@case(
    normal(0, 4, 1, 8), normal(1, 4, 16, 8), normal(2, 4, 16, 8), integers(3, 1, low=2, high=15)
)
def key_value_cache_step(x, keys, values, position):
    (at,) = position
    keys = lax.dynamic_update_slice(keys, x, (0, at, 0))
    values = lax.dynamic_update_slice(values, x * 2.0, (0, at, 0))
    scores = jnp.einsum("bqd,bkd->bqk", x, keys)
    seen = jnp.arange(16)[None, None, :] <= at
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    return weights @ values, keys, values


@case(normal(0, 8, 16), normal(1, 1, 16), normal(2, 1, 16))
def layer_and_rms_norm(x, gain, bias):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    layer = centred * lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-6) * gain + bias
    rms = x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * gain
    return layer, rms


@case(normal(0, 8, 16) * 1e4)
def softmax_of_huge_logits(x):
    logs = jax.nn.log_softmax(x, axis=1), jax.nn.logsumexp(x, axis=0)
    return jax.nn.softmax(x), logs, jax.nn.softmax(x + 1e30, axis=0)


@case(normal(0, 4, 6, 8, 8), normal(1, 8, 3, 3, 3), normal(2, 4, 1, 8, 1, 1))
def grouped_convolution_with_batch_norm(x, kernel, stats):
    mean, scale, bias, raw = stats
    y = lax.conv_general_dilated(
        x, kernel, (2, 1), ((1, 2), (2, 2)), rhs_dilation=(1, 2), feature_group_count=2
    )
    y = (y - mean) * lax.rsqrt(raw**2 + 1.0) * scale + bias
    return jax.nn.relu(y)


@case(normal(0, 4, 8, 8, 2))
def pooling(x):
    largest = nn.max_pool(x, (2, 2), strides=(2, 2), padding="SAME")
    totals = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 2, 1), "VALID")
    return largest, totals, jnp.mean(x, axis=(1, 2))


@case(normal(0, 4, 8, 8, 3), normal(1, 48, 8))
def image_patches(x, w):
    patches = x.reshape(4, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5)
    return patches.reshape(4, 4, 48) @ w


@case(normal(0, 4, 8, 8, 2), tolerance=EXACT)
def image_resizing(x):
    larger = jax.image.resize(x, (4, 16, 4, 2), "bilinear")
    return larger, jax.image.resize(x, (4, 4, 4, 2), "nearest")
