"""LLaMA inference: one block, one layer between embedding and vocabulary, many layers.

Letters of the contractions: b batch, s and t sequence, w width, h head, k a head's width,
f hidden units, v vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from doppler_jax.programs.workloads.workload import Definition, integers, normal, weight

Params = dict[str, Any]
Rotary = tuple[jax.Array, jax.Array]
"""Cosines and sines `[1, sequence, 1, head / 2]` of the rotary embedding."""

_SMALL = {"batch": 1, "sequence": 128, "width": 256, "hidden": 512, "heads": 4}
_MEDIUM = {"batch": 1, "sequence": 512, "width": 1024, "hidden": 2816, "heads": 8}
_PAPER = {"batch": 1, "sequence": 4096, "width": 4096, "hidden": 11_008, "heads": 32}

BLOCK_PRESETS = {"small": _SMALL, "medium": _MEDIUM, "paper": _PAPER}
LAYER_PRESETS = {
    "small": {**_SMALL, "vocabulary": 512},
    "medium": {**_MEDIUM, "vocabulary": 4096},
    "paper": {**_PAPER, "vocabulary": 32_000},
}
MODEL_PRESETS = {
    "small": {**LAYER_PRESETS["small"], "num_layers": 2},
    "medium": {**LAYER_PRESETS["medium"], "num_layers": 2},
    "paper": {**LAYER_PRESETS["paper"], "num_layers": 32},
}
"""The sizes of LLaMA-7B at the sequence length of the published task graphs."""

_EPSILON = 1e-5
_ROTARY_BASE = 10_000.0


def llama_block(batch: int, sequence: int, width: int, hidden: int, heads: int) -> Definition:
    """Returns one layer, `[batch, sequence, width]` to the same: attention, then SwiGLU.

    Raises:
      ValueError: the width does not divide into heads of even width.
    """

    def fn(params: Params, x: jax.Array) -> jax.Array:
        return _apply_block(params, x, _rotary_tables(sequence, width // heads))

    arguments = (_block_arguments(width, hidden, heads), normal(batch, sequence, width))
    return fn, arguments


def llama_layer(**sizes: int) -> Definition:
    """Returns `llama` of a single layer, the unit of the published experiments."""
    return llama(num_layers=1, **sizes)


def llama(
    num_layers: int,
    vocabulary: int,
    batch: int,
    sequence: int,
    width: int,
    hidden: int,
    heads: int,
) -> Definition:
    """Returns tokens `[batch, sequence]` to logits `[batch, sequence, vocabulary]`.

    Raises:
      ValueError: the width does not divide into heads of even width.
    """

    def fn(params: Params, tokens: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            x = params["embed"][tokens]
        rotary = _rotary_tables(sequence, width // heads)
        for layer, block in enumerate(params["layers"]):
            with jax.named_scope(f"layer{layer}"):
                x = _apply_block(block, x, rotary)
        with jax.named_scope("logits"):
            x = _rms_norm(x, params["norm"])
            return jnp.einsum("bsw,wv->bsv", x, params["logits"])

    params = {
        "embed": normal(vocabulary, width),
        "layers": [_block_arguments(width, hidden, heads) for _ in range(num_layers)],
        "norm": normal(1, 1, width, stddev=0.1, mean=1.0),
        "logits": weight(width, width, vocabulary),
    }
    arguments = (params, integers(batch, sequence, limit=vocabulary))
    return fn, arguments


def _block_arguments(width: int, hidden: int, heads: int) -> Params:
    if width % (2 * heads):
        raise ValueError(f"width {width} does not divide into {heads} heads of even width")
    head = width // heads
    return {
        "attn_norm": normal(1, 1, width, stddev=0.1, mean=1.0),
        "q": weight(width, width, heads, head),
        "k": weight(width, width, heads, head),
        "v": weight(width, width, heads, head),
        "o": weight(width, heads, head, width),
        "mlp_norm": normal(1, 1, width, stddev=0.1, mean=1.0),
        "gate": weight(width, width, hidden),
        "up": weight(width, width, hidden),
        "down": weight(hidden, hidden, width),
    }


def _apply_block(params: Params, x: jax.Array, rotary: Rotary) -> jax.Array:
    with jax.named_scope("attn"):
        x = x + _attend(params, _rms_norm(x, params["attn_norm"]), rotary)
    with jax.named_scope("mlp"):
        y = _rms_norm(x, params["mlp_norm"])
        with jax.named_scope("gate"):
            gate = jax.nn.silu(jnp.einsum("bsw,wf->bsf", y, params["gate"]))
        with jax.named_scope("up"):
            up = jnp.einsum("bsw,wf->bsf", y, params["up"])
        with jax.named_scope("down"):
            return x + jnp.einsum("bsf,fw->bsw", gate * up, params["down"])


def _attend(params: Params, x: jax.Array, rotary: Rotary) -> jax.Array:
    """Returns causal self-attention of `x` `[batch, sequence, width]`, of the same shape."""
    project = "bsw,whk->bshk"
    with jax.named_scope("q"):
        q = _rotate(jnp.einsum(project, x, params["q"]), rotary)
    with jax.named_scope("k"):
        k = _rotate(jnp.einsum(project, x, params["k"]), rotary)
    with jax.named_scope("v"):
        v = jnp.einsum(project, x, params["v"])
    with jax.named_scope("qk"):
        scores = jnp.einsum("bshk,bthk->bhst", q, k) * q.shape[-1] ** -0.5
        sequence = x.shape[1]
        causal = jnp.tril(jnp.ones((1, 1, sequence, sequence), bool))
        scores = jnp.where(causal, scores, -jnp.inf)
    with jax.named_scope("softmax"):
        weights = jax.nn.softmax(scores)
    with jax.named_scope("av"):
        mixed = jnp.einsum("bhst,bthk->bshk", weights, v)
    with jax.named_scope("out"):
        return jnp.einsum("bshk,hkw->bsw", mixed, params["o"])


def _rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    with jax.named_scope("norm"):
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * lax.rsqrt(mean_square + _EPSILON) * gain


def _rotary_tables(sequence: int, head: int) -> Rotary:
    """Returns the rotary embedding of heads of width `head`."""
    with jax.named_scope("rotary"):
        exponents = jnp.arange(0, head, 2, dtype=jnp.float32) / head
        positions = jnp.arange(sequence, dtype=jnp.float32)
        angles = positions[:, None] * (_ROTARY_BASE**-exponents)[None, :]
        angles = angles[None, :, None, :]
        return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, rotary: Rotary) -> jax.Array:
    with jax.named_scope("rotate"):
        cosines, sines = rotary
        left, right = jnp.split(x, 2, axis=-1)
        return jnp.concatenate(
            [left * cosines - right * sines, right * cosines + left * sines], axis=-1
        )
