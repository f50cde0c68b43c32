"""What a workload is: a JAX function, the shapes of its arguments, and how to draw them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array argument: shape, dtype, and what random values make a sensible call."""

    aval: jax.ShapeDtypeStruct
    stddev: float = 1.0  # of the normal values of a floating argument
    mean: float = 0.0
    limit: int = 1  # an integer argument is uniform over 0..limit-1


def normal(*shape: int, stddev: float = 1.0, mean: float = 0.0) -> Argument:
    """Returns a float32 argument of normal values."""
    return Argument(jax.ShapeDtypeStruct(shape, jnp.float32), stddev=stddev, mean=mean)


def weight(inputs: int, *shape: int) -> Argument:
    """Returns a float32 argument `[*shape]` whose product with `inputs` terms keeps scale."""
    return normal(*shape, stddev=inputs**-0.5)


def integers(*shape: int, limit: int) -> Argument:
    """Returns an int32 argument of values below `limit`."""
    return Argument(jax.ShapeDtypeStruct(shape, jnp.int32), limit=limit)


Definition = tuple[Callable[..., Any], tuple[Any, ...]]
"""What makes a workload at given sizes: its function and its pytrees of `Argument`s."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A JAX function and the shapes of its arguments; none of them is allocated."""

    name: str
    sizes: dict[str, int]
    fn: Callable[..., Any]
    arguments: tuple[Any, ...]  # per argument of `fn`, a pytree of `Argument`s

    @property
    def args(self) -> tuple[Any, ...]:
        """Per argument of `fn`, a pytree of `jax.ShapeDtypeStruct`s."""
        return jax.tree.map(lambda argument: argument.aval, self.arguments)


def make_arrays(workload: Workload, key: jax.Array) -> tuple[Any, ...]:
    """Returns random arguments of a workload, pytrees of arrays; the key is consumed."""
    # On the host: compiling one draw per shape would take longer than drawing.
    seed = np.asarray(jax.random.bits(key, (4,), jnp.uint32))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda argument: _draw(argument, rng), workload.arguments)


def _draw(argument: Argument, rng: np.random.Generator) -> jax.Array:
    shape, dtype = argument.aval.shape, argument.aval.dtype
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.integers(argument.limit, size=shape), dtype)
    values = argument.mean + argument.stddev * rng.standard_normal(shape, np.float32)
    return jnp.asarray(values, dtype)
