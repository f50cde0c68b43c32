"""Gradients and training steps."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

from tests.programs.functions.registry import built, case, fill, integers, normal


class Classifier(nn.Module):
    """What the training step trains."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.relu(nn.Dense(32)(x)))
        return nn.Dense(8)(x)


@built()
def adamw_training_step():
    x, labels = normal(1, 16, 8), integers(2, 16, low=0, high=8)
    model = Classifier()
    params = fill(jax.eval_shape(model.init, jax.random.key(0), x), 0)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def loss_fn(params, x, labels):
        logits = model.apply(params, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses), jnp.mean(jnp.argmax(logits, axis=1) == labels)

    def fn(params, state, x, labels):
        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x, labels)
        # Adam's bias correction mixes integers and floats.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, accuracy

    state = fill(jax.eval_shape(optimizer.init, params), 1)
    state = jax.tree.map(jnp.abs, state)  # second moments are no less than 0
    return fn, (params, state, x, labels)


@case(normal(0, 12, 8), integers(1, 16, low=0, high=12))
def gradient_of_embedding(table, ids):
    return jax.grad(lambda table: jnp.sum(jnp.tanh(table[ids]) ** 2))(table)


@case(normal(0, 4, 8, 8, 2), normal(1, 3, 3, 2, 4))
def gradient_of_convolution(x, kernel):
    def loss(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=layout)
        return jnp.sum(nn.max_pool(jnp.tanh(y), (2, 2)))

    return jax.grad(loss, argnums=(0, 1))(x, kernel)


@case(normal(0, 8, 16), normal(1, 16, 16), normal(2, 16, 8))
def gradient_through_remat(x, w, v):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def block(x, w):
        return jnp.tanh(x @ w) * x

    return jax.value_and_grad(lambda w: jnp.mean(block(block(x, w), w) @ v))(w)


@case(normal(0, 8, 8), normal(1, 8))
def gradient_through_scan(w, h):
    def loss(w):
        final, _ = lax.scan(lambda h, _: (jnp.tanh(w @ h), None), h, length=4)
        return jnp.sum(final)

    return jax.grad(loss)(w)


@jax.custom_vjp
def clipped(x):
    return x * 3.0


def clipped_forward(x):
    return clipped(x), x


def clipped_backward(x, g):
    return (jnp.clip(g, -0.1, 0.1) * jnp.sign(x),)


clipped.defvjp(clipped_forward, clipped_backward)


@jax.custom_jvp
def smooth(x):
    return jnp.log1p(jnp.exp(x))


@smooth.defjvp
def smooth_derivative(primals, tangents):
    (x,), (t,) = primals, tangents
    return smooth(x), t * jax.nn.sigmoid(x)


@case(normal(0, 8, 16))
def custom_derivatives(x):
    return jax.grad(lambda x: jnp.sum(clipped(x) * smooth(x)))(x)


@case(normal(0, 4, 8), normal(1, 8, 8))
def second_derivatives(x, w):
    def loss(w):
        return jnp.mean(jnp.sin(x @ w) ** 2)

    direction = jnp.ones_like(w)
    hessian_vector = jax.jvp(jax.grad(loss), (w,), (direction,))[1]
    return hessian_vector, jax.jacfwd(lambda x: jnp.tanh(x @ w[:, :2]))(x[0])


@case(normal(0, 16, 8), normal(1, 16, 8), normal(2, 8, 4))
def contrastive_loss(a, b, w):
    def loss(w):
        left, right = a @ w, b @ w
        left = left / jnp.linalg.norm(left, axis=1, keepdims=True)
        right = right / jnp.linalg.norm(right, axis=1, keepdims=True)
        logs = jax.nn.log_softmax(left @ right.T * 5.0, axis=1)
        return -jnp.mean(jnp.diag(logs))

    return jax.value_and_grad(loss)(w)


@case(normal(0, 8, 2), normal(1, 8))
def gaussian_process_likelihood(x, y):
    def loss(scale):
        squares = jnp.sum((x[:, None, :] - x[None, :, :]) ** 2, axis=-1)
        kernel = jnp.exp(-squares / scale) + 0.1 * jnp.eye(8)
        factor = jnp.linalg.cholesky(kernel)
        z = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return 0.5 * z @ z + jnp.sum(jnp.log(jnp.diag(factor)))

    return jax.value_and_grad(loss)(jnp.float32(2.0))


@case(normal(0, 4, 8, 16), normal(1, 16, 8))
def gradients_per_example(x, w):
    def loss(w, x):
        return jnp.sum(jax.nn.softplus(x @ w))

    return jax.vmap(jax.grad(loss), in_axes=(None, 0))(w, x)
