"""A mixture of experts with top-2 routing and a capacity per expert."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from doppler_jax.programs.workloads.workload import Definition, normal, weight

PRESETS = {
    "small": {"tokens": 128, "width": 64, "hidden": 256, "experts": 4, "capacity": 80},
    "medium": {"tokens": 512, "width": 512, "hidden": 2048, "experts": 4, "capacity": 320},
    "paper": {
        "tokens": 4096,
        "width": 4096,
        "hidden": 14_336,
        "experts": 8,
        "capacity": 1280,
    },
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
            dispatch, combine = _route(jax.nn.softmax(x @ params["router"]), capacity)
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


def _route(probabilities: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
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
