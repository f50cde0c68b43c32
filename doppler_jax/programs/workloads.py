"""Named example functions of configurable size, to place, train on and measure."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Workload:
    """A JAX function and the shapes of its arguments."""

    name: str
    sizes: dict[str, int]
    fn: Callable[..., Any]
    args: tuple[jax.ShapeDtypeStruct, ...]
    stddevs: tuple[float, ...]  # per argument; random ones so drawn give results of order 1


def chainmm(n: int) -> Workload:
    """Returns (A @ B) + (C @ (D @ E)) of `n` x `n` float32 matrices."""

    def fn(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, e: jax.Array) -> jax.Array:
        return (a @ b) + (c @ (d @ e))

    scale = n**-0.5
    return Workload(
        name="chainmm",
        sizes={"n": n},
        fn=fn,
        args=(jax.ShapeDtypeStruct((n, n), jnp.float32),) * 5,
        stddevs=(scale, 1.0, scale, scale, 1.0),
    )


def ffnn(batch: int, features: int, hidden: int, classes: int) -> Workload:
    """Returns the inference of a classifier with one hidden layer, in float32.

    The biases are rows, `[1, hidden]` and `[1, classes]`, so that adding one promotes no
    rank.
    """

    def fn(
        x: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array, b2: jax.Array
    ) -> jax.Array:
        return jax.nn.softmax(jax.nn.relu(x @ w1 + b1) @ w2 + b2)

    shapes = (
        (batch, features),
        (features, hidden),
        (1, hidden),
        (hidden, classes),
        (1, classes),
    )
    return Workload(
        name="ffnn",
        sizes={"batch": batch, "features": features, "hidden": hidden, "classes": classes},
        fn=fn,
        args=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        stddevs=(1.0, features**-0.5, 1.0, hidden**-0.5, 1.0),
    )


_FACTORIES: dict[str, Callable[..., Workload]] = {"chainmm": chainmm, "ffnn": ffnn}

_PRESETS: dict[str, dict[str, dict[str, int]]] = {
    "chainmm": {"small": {"n": 512}, "paper": {"n": 10_000}},
    "ffnn": {
        "small": {"batch": 256, "features": 512, "hidden": 1024, "classes": 128},
        "paper": {"batch": 2**15, "features": 2**5, "hidden": 2**16, "classes": 2**5},
    },
}
"""Sizes by workload and preset; `small` takes milliseconds on a laptop."""


def list_workloads() -> list[str]:
    """Returns the names that `make_workload` knows, sorted."""
    return sorted(_FACTORIES)


def make_workload(name: str, preset: str = "small", **sizes: int) -> Workload:
    """Returns a named workload at the preset's sizes, those given in `sizes` replaced.

    Raises:
      ValueError: no such workload, preset or size, or a size is not a positive integer.
    """
    if name not in _FACTORIES:
        raise ValueError(f"unknown workload {name!r}; known: {list_workloads()}")
    presets = _PRESETS[name]
    if preset not in presets:
        raise ValueError(f"unknown preset {preset!r} of {name}; known: {sorted(presets)}")
    known = presets[preset]
    for size, value in sizes.items():
        if size not in known:
            raise ValueError(f"unknown size {size!r} of {name}; known: {sorted(known)}")
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"size {size} of {name} is {value!r}; expected an integer >= 1")
    return _FACTORIES[name](**{**known, **sizes})


def make_arrays(workload: Workload, key: jax.Array) -> tuple[jax.Array, ...]:
    """Returns normal random arguments of a workload; the key is consumed."""
    keys = jax.random.split(key, len(workload.args))
    return tuple(
        stddev * jax.random.normal(k, aval.shape, aval.dtype)
        for k, aval, stddev in zip(keys, workload.args, workload.stddevs, strict=True)
    )
