"""A residual block of a convolutional network, in inference."""

from typing import Any

import jax
from jax import lax

from doppler_jax.programs.workloads.workload import Definition, normal, weight

PRESETS = {
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
