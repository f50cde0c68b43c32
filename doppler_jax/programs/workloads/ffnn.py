"""A classifier with one hidden layer: inference, and a training step.

The biases are rows, `[1, hidden]` and `[1, classes]`, so that adding one promotes no rank.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from doppler_jax.programs.workloads.workload import Definition, integers, normal, weight

PRESETS = {
    "small": {"batch": 256, "features": 512, "hidden": 1024, "classes": 128},
    "medium": {"batch": 512, "features": 1024, "hidden": 4096, "classes": 512},
    "paper": {"batch": 2**15, "features": 2**5, "hidden": 2**16, "classes": 2**5},
}

LEARNING_RATE = 0.1


def ffnn(batch: int, features: int, hidden: int, classes: int) -> Definition:
    """Returns the inference of the classifier in float32: the classes' probabilities."""

    def fn(
        x: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array, b2: jax.Array
    ) -> jax.Array:
        with jax.named_scope("hidden"):
            h = jax.nn.relu(x @ w1 + b1)
        with jax.named_scope("classes"):
            return jax.nn.softmax(h @ w2 + b2)

    arguments = (
        normal(batch, features),
        weight(features, features, hidden),
        normal(1, hidden),
        weight(hidden, hidden, classes),
        normal(1, classes),
    )
    return fn, arguments


def ffnn_train(batch: int, features: int, hidden: int, classes: int) -> Definition:
    """Returns one step of gradient descent on the mean cross-entropy of a batch.

    Maps parameters and a batch (`x` `[batch, features]`, `label` `[batch]`) to the new
    parameters and the loss before the step.
    """
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

    params = {
        "w1": weight(features, features, hidden),
        "b1": normal(1, hidden),
        "w2": weight(hidden, hidden, classes),
        "b2": normal(1, classes),
    }
    data = {"x": normal(batch, features), "label": integers(batch, limit=classes)}
    return fn, (params, data)
