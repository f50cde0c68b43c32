"""Loops, branches, vectorised functions."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.functions.registry import built, case, integers, normal


def rnn(xs, h, w, u):
    def step(h, x):
        h = jnp.tanh(x @ w + h @ u)
        return h, (h, jnp.sum(h, axis=1))

    return lax.scan(step, h, xs, reverse=True)


RNN_ARGS = normal(0, 6, 8, 4), normal(1, 8, 16), normal(2, 4, 16), normal(3, 16, 16) * 0.2


@built()
def rnn_whole():
    return rnn, RNN_ARGS


@built(unroll_scans=True)
def rnn_unrolled():
    return rnn, RNN_ARGS


@built(unroll_scans=True)
def gradient_of_unrolled_rnn():
    def loss(w, u, xs, h):
        return jnp.mean(rnn(xs, h, w, u)[0] ** 2)

    xs, h, w, u = RNN_ARGS
    return jax.grad(loss, argnums=(0, 1)), (w, u, xs, h)


@case(normal(0, 8, 16), normal(1, 16, 16))
def branches(x, w):
    y = lax.cond(jnp.sum(x) > 0, lambda x: x @ w, lambda x: x - 1.0, x)
    z = lax.switch(jnp.argmax(x[0]) % 3, [jnp.sin, jnp.cos, lambda x: x * 2.0], x)
    return y, z


@case(normal(0, 8, 8))
def loops(x):
    def cond(state):
        i, y = state
        return (i < 10) & (jnp.max(jnp.abs(y)) < 50.0)

    count, y = lax.while_loop(cond, lambda s: (s[0] + 1, s[1] * 1.5), (0, x))
    return count, y, lax.fori_loop(0, 4, lambda i, y: y @ x * 0.3 + i.astype(jnp.float32), x)


@case(normal(0, 16, 4), normal(1, 16, 4))
def associative_scan(a, b):
    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(combine, (jax.nn.sigmoid(a), b))


@case(normal(0, 4, 8, 16), normal(1, 4, 16), normal(2, 16, 2))
def vectorised(a, x, w):
    product = jax.vmap(lambda a, x: jnp.tanh(a @ x))(a, x)
    rows = jax.vmap(jax.vmap(jnp.dot, (None, 1)), (0, None))(x, w)
    picked = jax.vmap(lambda row, i: row[i])(x, jnp.argmax(x, axis=1))
    return product, rows, picked, lax.map(lambda row: row @ w, x)


@functools.partial(jax.jit, static_argnames=("power", "scale"))
def scaled_power(x, *, power, scale=1.0):
    return scale * x**power


@case(normal(0, 8, 4), integers(1, 8, 4))
def static_arguments_and_weak_types(x, i):
    y = jax.jit(scaled_power, static_argnames="power")(x, power=3)
    return scaled_power(y, power=2, scale=0.5), scaled_power(i, power=2, scale=2), 2.5 * x - 1
