"""PLC: which device a task goes to, given what has been placed before it."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from chex import Array

from doppler_jax.policies.device_features import column
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.types import pytree

STEEPNESS = 1e4
"""Of the earliest-start rule: far below it float32 no longer tells starts apart."""

PRECISION = "highest"
"""Of the policies' products: float32 as it is. GPUs round it to ten bits by default (TF32): too
coarse for sums that a draw falls into, and for the earliest-start rule."""


@pytree
class PlaceTables:
    """PLC's first layer split by input, so that a step of an episode computes little.

    The hidden layer of (v, d) is LeakyReLU(task[v] + mean of member over the tasks on
    d @ member_kernel + device_features[v, d] @ kernel), its logit the product with `out`.
    Members are a few numbers, for they are summed per device at every step.
    """

    task: Array  # [N + 1, q]
    member: Array  # [N + 1, m]
    member_kernel: Array  # [m, q]
    kernel: Array  # [F, q]
    out: Array  # [q]


class Place(nn.Module):
    """Makes PLC's tables from embeddings; equivariant under relabelling of devices."""

    width: int
    num_features: int
    member_width: int

    @nn.compact
    def __call__(self, problem: PolicyInputs, embedding: Array) -> PlaceTables:
        """Returns the tables from embeddings `[N + 1, h]`."""
        own = nn.leaky_relu(nn.Dense(self.width)(problem.task_features))
        task = nn.Dense(self.width)(jnp.concatenate([embedding, own], axis=-1))
        init = nn.initializers.lecun_normal()
        kernel = self.param("kernel", init, (self.num_features, self.width))
        member_kernel = self.param("member_kernel", init, (self.member_width, self.width))
        out = self.param("out", nn.initializers.zeros, (self.width, 1))
        return PlaceTables(
            task=task,
            member=nn.Dense(self.member_width, use_bias=False)(embedding),
            member_kernel=member_kernel,
            kernel=kernel,
            out=out[:, 0],
        )


def earliest_tables(problem: PolicyInputs, num_features: int) -> PlaceTables:
    """Returns tables that all but surely choose the earliest start."""
    rows = problem.task_features.shape[0]
    return PlaceTables(
        task=jnp.zeros((rows, 1)),
        member=jnp.zeros((rows, 1)),
        member_kernel=jnp.zeros((1, 1)),
        kernel=jnp.zeros((num_features, 1)).at[column("earliest start")].set(1.0),
        out=jnp.full(1, -STEEPNESS),
    )


def device_logits(
    tables: PlaceTables, task: Array, members: Array, features: Array, allowed: Array
) -> Array:
    """Returns logits `[..., D]`, -inf where not allowed.

    Args:
      tables: PLC's tables.
      task: `[...]` int, the task to place.
      members: `[..., D, m]` mean of `tables.member` over the tasks on each device.
      features: `[..., D, F]` device features of the task; the tables may read fewer.
      allowed: `[..., D]` bool, whether the device can run the task.
    """
    features = features[..., : tables.kernel.shape[0]]
    seen = jnp.concatenate([members, features], axis=-1)
    kernel = jnp.concatenate([tables.member_kernel, tables.kernel])
    product = partial(jnp.matmul, precision=PRECISION)
    hidden = tables.task[task][..., None, :] + product(seen, kernel)
    logits = product(jax.nn.leaky_relu(hidden), tables.out)
    return jnp.where(allowed, logits, -jnp.inf)
