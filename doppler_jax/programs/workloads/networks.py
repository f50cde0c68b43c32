"""Small networks: a chain of products, a classifier, a mixture of experts, a residual block."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from doppler_jax.programs.workloads.workload import (
    Argument,
    Definition,
    integers,
    normal,
    weight,
)

CHAINMM_PRESETS = {"small": {"n": 512}, "medium": {"n": 1024}, "paper": {"n": 10_000}}


def chainmm(n: int) -> Definition:
    """Returns (A @ B) + (C @ (D @ E)) of `n` x `n` float32 matrices."""

    def fn(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, e: jax.Array) -> jax.Array:
        return (a @ b) + (c @ (d @ e))

    left, right = weight(n, n, n), normal(n, n)
    return fn, (left, right, left, left, right)


FFNN_PRESETS = {
    "small": {"batch": 256, "features": 512, "hidden": 1024, "classes": 128},
    "medium": {"batch": 512, "features": 1024, "hidden": 4096, "classes": 512},
    "paper": {"batch": 2**15, "features": 2**5, "hidden": 2**16, "classes": 2**5},
}

LEARNING_RATE = 0.1


def ffnn(batch: int, features: int, hidden: int, classes: int) -> Definition:
    """Returns a classifier with one hidden layer, in float32: the classes' probabilities.

    The biases are rows, `[1, hidden]` and `[1, classes]`, so that adding one promotes no rank.
    """

    def fn(
        x: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array, b2: jax.Array
    ) -> jax.Array:
        with jax.named_scope("hidden"):
            h = jax.nn.relu(x @ w1 + b1)
        with jax.named_scope("classes"):
            return jax.nn.softmax(h @ w2 + b2)

    params = _classifier_arguments(features, hidden, classes)
    return fn, (normal(batch, features), *params.values())


def ffnn_train(batch: int, features: int, hidden: int, classes: int) -> Definition:
    """Returns one step of gradient descent of `ffnn` on the mean cross-entropy of a batch.

    Maps parameters and a batch (`x` `[batch, features]`, `label` `[batch]`) to the new
    parameters and the loss before the step.
    """
    import optax  # takes a while

    optimizer = optax.sgd(LEARNING_RATE)

    def loss_fn(params: dict[str, jax.Array], data: dict[str, jax.Array]) -> jax.Array:
        with jax.named_scope("hidden"):
            h = jax.nn.relu(data["x"] @ params["w1"] + params["b1"])
        with jax.named_scope("classes"):
            logits = h @ params["w2"] + params["b2"]
        with jax.named_scope("loss"):
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(
                logits, data["label"]
            )
            return jnp.mean(losses)

    def fn(params: dict[str, jax.Array], data: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_fn)(params, data)
        with jax.named_scope("update"):
            # Plain gradient descent keeps no state, so the step needs none handed in.
            updates, _ = optimizer.update(gradient, optimizer.init(params))
            return optax.apply_updates(params, updates), loss

    data = {"x": normal(batch, features), "label": integers(batch, limit=classes)}
    return fn, (_classifier_arguments(features, hidden, classes), data)


def _classifier_arguments(features: int, hidden: int, classes: int) -> dict[str, Argument]:
    return {
        "w1": weight(features, features, hidden),
        "b1": normal(1, hidden),
        "w2": weight(hidden, hidden, classes),
        "b2": normal(1, classes),
    }


MOE_PRESETS = {
    "small": {"tokens": 128, "width": 64, "hidden": 256, "experts": 4, "capacity": 80},
    "medium": {"tokens": 512, "width": 512, "hidden": 2048, "experts": 4, "capacity": 320},
    "paper": {"tokens": 4096, "width": 4096, "hidden": 14_336, "experts": 8, "capacity": 1280},
}
"""At paper size, the widths of Mixtral-8x7B; the capacity is 1.25 times the even share."""

_NUM_CHOICES = 2


def moe_block(tokens: int, width: int, hidden: int, experts: int, capacity: int) -> Definition:
    """Returns a layer `[tokens, width]` to the same: each token through its two best experts.

    Dispatch and combination are dense contractions, as in GShard; a token for which an
    expert has no room left passes it by, earlier tokens and first choices before others.

    Raises:
      ValueError: fewer than two experts.
    """
    if experts < _NUM_CHOICES:
        raise ValueError(f"{experts} experts; top-2 routing needs two")

    def fn(params: dict[str, Any], x: jax.Array) -> jax.Array:
        with jax.named_scope("route"):
            dispatch, combine = _route_top2(jax.nn.softmax(x @ params["router"]), capacity)
        with jax.named_scope("dispatch"):
            inputs = jnp.einsum("tec,tw->ecw", dispatch, x)
        with jax.named_scope("up"):
            h = jax.nn.gelu(jnp.einsum("ecw,ewf->ecf", inputs, params["up"]))
        with jax.named_scope("down"):
            outputs = jnp.einsum("ecf,efw->ecw", h, params["down"])
        with jax.named_scope("combine"):
            return jnp.einsum("tec,ecw->tw", combine, outputs)

    params = {
        "router": weight(width, width, experts),
        "up": weight(width, experts, width, hidden),
        "down": weight(hidden, experts, hidden, width),
    }
    return fn, (params, normal(tokens, width))


def _route_top2(probabilities: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Returns the dispatch and combination weights `[tokens, experts, capacity]`.

    Args:
      probabilities: `[tokens, experts]` router's.
      capacity: tokens that one expert takes.
    """
    tokens, experts = probabilities.shape
    gates, chosen = lax.top_k(probabilities, _NUM_CHOICES)
    gates = gates / jnp.sum(gates, axis=1, keepdims=True)
    # All first choices queue before any second choice: [choices * tokens, experts].
    asked = jax.nn.one_hot(chosen.T.reshape(-1), experts, dtype=jnp.int32)
    position = (jnp.cumsum(asked, axis=0) - asked).reshape(_NUM_CHOICES, tokens, experts)
    asked = asked.reshape(_NUM_CHOICES, tokens, experts)
    # A position past the capacity has no slot: its one-hot row is zero.
    slots = jax.nn.one_hot(position, capacity) * asked[..., None].astype(jnp.float32)
    dispatch = jnp.sum(slots, axis=0)
    combine = jnp.einsum("gtec,tg->tec", slots, gates)
    return dispatch, combine


RESNET_PRESETS = {
    "small": {"batch": 8, "side": 14, "channels": 32, "bottleneck": 16},
    "medium": {"batch": 16, "side": 28, "channels": 128, "bottleneck": 64},
    "paper": {"batch": 256, "side": 56, "channels": 256, "bottleneck": 64},
}
"""At paper size, a block of ResNet-50's first stage."""

_EPSILON = 1e-5


def resnet_block(batch: int, side: int, channels: int, bottleneck: int) -> Definition:
    """Returns ReLU(x + three convolutions of x) of images `[batch, side, side, channels]`.

    The convolutions are 1x1, 3x3 and 1x1, through `bottleneck` channels; each is followed
    by batch normalisation with running statistics.
    """

    def fn(params: list[dict[str, Any]], x: jax.Array) -> jax.Array:
        first, second, third = params
        with jax.named_scope("reduce"):
            y = jax.nn.relu(_convolve(first, x))
        with jax.named_scope("spatial"):
            y = jax.nn.relu(_convolve(second, y))
        with jax.named_scope("expand"):
            return jax.nn.relu(_convolve(third, y) + x)

    params = [
        _layer_arguments(1, channels, bottleneck),
        _layer_arguments(3, bottleneck, bottleneck),
        _layer_arguments(1, bottleneck, channels),
    ]
    return fn, (params, normal(batch, side, side, channels))


def _layer_arguments(side: int, channels: int, features: int) -> dict[str, Any]:
    return {
        "kernel": weight(side * side * channels, side, side, channels, features),
        "mean": normal(1, 1, 1, features, stddev=0.1),
        "variance": normal(1, 1, 1, features, stddev=0.1, mean=1.0),
        "gain": normal(1, 1, 1, features, stddev=0.1, mean=1.0),
        "bias": normal(1, 1, 1, features, stddev=0.1),
    }


def _convolve(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    y = lax.conv_general_dilated(
        x,
        layer["kernel"],
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    with jax.named_scope("norm"):
        scale = layer["gain"] * lax.rsqrt(layer["variance"] + _EPSILON)
        return (y - layer["mean"]) * scale + layer["bias"]
