"""Functions as users write them, with arguments: what `experiments.distribute` runs.

A training step takes its state as its first argument and returns the next as its first output.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import doppler_jax as dj


@dataclasses.dataclass(frozen=True)
class Function:
    """A function to call in a row, and its first arguments."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    is_step: bool = False


Sizes = Mapping[str, int]


def workload(name: str, is_step: bool = False, **sizes: int) -> Callable[[str], Function]:
    """Returns what makes a workload at a preset, with random arguments."""

    def make(preset: str) -> Function:
        made = dj.workloads.make_workload(name, preset, **sizes)
        return Function(made.fn, dj.workloads.make_arrays(made, jax.random.key(0)), is_step)

    return make


class _Block(nn.Module):
    """A layer of a transformer."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        return x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))


class _Transformer(nn.Module):
    layers: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = _Block(self.width)(x)
        return nn.LayerNorm()(x)


def flax_step(layers: int, width: int, rows: int, length: int) -> Function:
    """Returns a training step of a transformer by AdamW; its state is a pair of trees."""
    import optax  # takes a while

    model, optimizer = _Transformer(layers, width), optax.adamw(1e-3)
    keys = jax.random.split(jax.random.key(0), 3)
    x, target = (jax.random.normal(key, (rows, length, width)) for key in keys[:2])

    def as_flax_wants_it(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return fn(*args)

        return run

    @as_flax_wants_it
    def step(state: tuple[Any, Any], x: jax.Array, target: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state

        def loss_fn(params: Any) -> jax.Array:
            found: Any = model.apply(params, x)
            return jnp.mean((found - target) ** 2)

        loss, gradient = jax.value_and_grad(loss_fn)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    params = as_flax_wants_it(model.init)(keys[2], x)
    return Function(step, ((params, optimizer.init(params)), x, target), is_step=True)


def scan_over_layers(layers: int, width: int, rows: int) -> Function:
    """Returns a stack of residual layers as one `lax.scan`."""

    def run(ups: jax.Array, downs: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            return h + jnp.tanh(h @ weights[0]) @ weights[1], None

        return jax.lax.scan(layer, x, (ups, downs))[0]

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (layers, width, 4 * width), (layers, 4 * width, width), (rows, width)
    return Function(run, tuple(map(_scaled, keys, shapes)))


def tiny_mlp(width: int, rows: int) -> Function:
    """Returns two layers that take less than a millisecond."""

    def run(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ up) @ down

    keys = jax.random.split(jax.random.key(0), 3)
    return Function(run, tuple(map(_scaled, keys, ((width, width),) * 2 + ((rows, width),))))


def both_ways(length: int, width: int) -> Function:
    """Returns a recurrent network over a sequence, from either end: no operation is large."""

    def one_way(w: jax.Array, xs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, xs[0], xs)[1]

    def run(forth: jax.Array, back: jax.Array, xs: jax.Array) -> jax.Array:
        return one_way(forth, xs) + one_way(back, xs[::-1])[::-1]

    keys = jax.random.split(jax.random.key(0), 3)
    return Function(run, tuple(map(_scaled, keys, ((width, width),) * 2 + ((length, width),))))


def _scaled(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape) / shape[-2] ** 0.5


def sized(make: Callable[..., Function], small: Sizes, medium: Sizes) -> Any:
    """Returns what makes a function at a preset."""
    return lambda preset: make(**{"small": small, "medium": medium}[preset])


FUNCTIONS: Mapping[str, Callable[[str], Function]] = {
    "training step (Flax)": sized(
        flax_step,
        {"layers": 1, "width": 16, "rows": 2, "length": 8},
        {"layers": 4, "width": 256, "rows": 8, "length": 128},
    ),
    "two stages, 8 micro-batches": workload(
        "pipeline", is_step=True, stages=2, micro_batches=8
    ),
    "scan over layers": sized(
        scan_over_layers,
        {"layers": 2, "width": 16, "rows": 8},
        {"layers": 6, "width": 512, "rows": 256},
    ),
    "both ways (irregular)": sized(
        both_ways, {"length": 32, "width": 16}, {"length": 4096, "width": 128}
    ),
    "moe_block": workload("moe_block"),
    "resnet_block": workload("resnet_block"),
    "tiny MLP": sized(tiny_mlp, {"width": 32, "rows": 8}, {"width": 256, "rows": 32}),
    "chainmm": workload("chainmm"),
    "ffnn": workload("ffnn"),
    "llama_block": workload("llama_block"),
    "random_layered": workload("random_layered"),
}
"""By name, what makes each at a preset, `small` or `medium`."""
