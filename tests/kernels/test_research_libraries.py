"""Functions of Equinox, Haiku, diffrax and JAX's BCOO on the engine: as `jit` has them."""

import diffrax
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

from tests.kernels.conftest import check_as_jit
from tests.programs.functions.registry import integers, normal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_libraries_want_it")]

IDS = integers(0, 4, 8, low=0, high=16)
SEQUENCE, IMAGE, ROWS = normal(1, 2, 8, 16), normal(2, 2, 8, 8, 4), normal(3, 8, 16)
CHANNELS = np.moveaxis(IMAGE, -1, 1)


def mapped(module, *inputs):
    return jax.vmap(module)(*inputs)


def equinox(make, *inputs, call=mapped):
    """What Equinox users do: a module's arrays are passed, and joined with the rest inside."""

    def build():
        arrays, rest = eqx.partition(make(jax.random.key(0)), eqx.is_array)
        fn = lambda arrays, *inputs: call(eqx.combine(arrays, rest), *inputs)  # noqa: E731
        return fn, (arrays, *inputs)

    return build


def unrolled(cell, xs):
    """The states of a cell along a sequence, for a batch of them."""
    start = jnp.zeros(cell.hidden_size)
    start = (start, start) if isinstance(cell, eqx.nn.LSTMCell) else start

    def one(row):
        return jax.lax.scan(lambda h, x: (cell(x, h),) * 2, start, row)[1]

    return jax.vmap(one)(xs)


def batch_norm():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="batch", mode="ema")
    arrays, rest = eqx.partition((norm, state), eqx.is_array)

    def fn(arrays, x):
        norm, state = eqx.combine(arrays, rest)
        run = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = run(x, state)
        return out, eqx.filter(state, eqx.is_array)

    return fn, (arrays, CHANNELS)


def equinox_step():
    optimizer = optax.adam(0.1)
    model = eqx.nn.MLP(16, 4, 16, 2, jax.nn.gelu, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)

    @eqx.filter_value_and_grad
    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    def fn(arrays, state, x):
        value, grads = loss(eqx.combine(arrays, rest), x)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(arrays, updates), state, value

    return fn, (arrays, optimizer.init(arrays), ROWS)


def checkpointed(module, x):
    return jax.grad(lambda x: jnp.sum(jax.vmap(eqx.filter_checkpoint(module))(x) ** 2))(x)


EQUINOX = {
    "eqx.Linear": equinox(lambda key: eqx.nn.Linear(16, 4, key=key), ROWS),
    "eqx.MLP": equinox(lambda key: eqx.nn.MLP(16, 4, 16, 2, jax.nn.gelu, key=key), ROWS),
    "eqx.Conv2d": equinox(lambda key: eqx.nn.Conv2d(4, 8, 3, stride=2, key=key), CHANNELS),
    "eqx.ConvTranspose2d": equinox(
        lambda key: eqx.nn.ConvTranspose2d(4, 2, 3, stride=2, key=key), CHANNELS
    ),
    "eqx.MaxPool2d": equinox(lambda key: eqx.nn.MaxPool2d(2, 2), CHANNELS),
    "eqx.LayerNorm": equinox(lambda key: eqx.nn.LayerNorm(16), ROWS),
    "eqx.GroupNorm": equinox(lambda key: eqx.nn.GroupNorm(2, 4), CHANNELS),
    "eqx.BatchNorm": batch_norm,
    "eqx.Embedding": equinox(
        lambda key: eqx.nn.Embedding(16, 8, key=key),
        IDS,
        call=lambda m, x: jax.vmap(jax.vmap(m))(x),
    ),
    "eqx.attention": equinox(
        lambda key: eqx.nn.MultiheadAttention(4, 16, key=key),
        SEQUENCE,
        call=lambda m, x: jax.vmap(m)(x, x, x),
    ),
    "eqx.rope": equinox(lambda key: eqx.nn.RotaryPositionalEmbedding(16), SEQUENCE),
    "eqx.GRUCell": equinox(lambda key: eqx.nn.GRUCell(16, 8, key=key), SEQUENCE, call=unrolled),
    "eqx.LSTMCell": equinox(
        lambda key: eqx.nn.LSTMCell(16, 8, key=key), SEQUENCE, call=unrolled
    ),
    "eqx.checkpoint": equinox(
        lambda key: eqx.nn.MLP(16, 4, 16, 2, key=key), ROWS, call=checkpointed
    ),
    "eqx training step": equinox_step,
}


def haiku(fn, *inputs):
    """A Haiku function with its initial parameters and state."""

    def make():
        pure = hk.transform_with_state(fn)
        params, state = pure.init(jax.random.key(0), *inputs)
        return pure.apply, (params, state, jax.random.key(1), *inputs)

    return make


def stack(x):
    return hk.experimental.layer_stack(3)(lambda x: jnp.tanh(hk.Linear(16)(x)))(x)


HAIKU = {
    "hk.MLP": haiku(lambda x: hk.nets.MLP([16, 4])(x), ROWS),
    "hk.Conv2D": haiku(lambda x: hk.Conv2D(8, 3, stride=2)(x), IMAGE),
    "hk.DepthwiseConv2D": haiku(lambda x: hk.DepthwiseConv2D(2, 3)(x), IMAGE),
    "hk.BatchNorm": haiku(lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=True), IMAGE),
    "hk.LayerNorm": haiku(lambda x: hk.LayerNorm(-1, True, True)(x), ROWS),
    "hk.Embed": haiku(lambda x: hk.Embed(16, 8)(x), IDS),
    "hk.attention": haiku(
        lambda x: hk.MultiHeadAttention(4, 4, w_init=hk.initializers.VarianceScaling(1.0))(
            x, x, x
        ),
        SEQUENCE,
    ),
    "hk.LSTM": haiku(
        lambda x: hk.dynamic_unroll(
            hk.LSTM(8), x, hk.LSTM(8).initial_state(2), time_major=False
        ),
        SEQUENCE,
    ),
    "hk.GRU": haiku(
        lambda x: hk.dynamic_unroll(hk.GRU(8), x, jnp.zeros((2, 8)), time_major=False), SEQUENCE
    ),
    "hk.VectorQuantizerEMA": haiku(
        lambda x: hk.nets.VectorQuantizerEMA(16, 8, 0.25, 0.9)(x, is_training=True), ROWS
    ),
    "hk.dropout": haiku(lambda x: hk.dropout(hk.next_rng_key(), 0.5, x), ROWS),
    "hk.layer_stack": haiku(stack, ROWS),
    "hk.remat": haiku(lambda x: hk.remat(hk.Linear(4))(x), ROWS),
    "hk block of a ResNet": haiku(
        lambda x: hk.nets.ResNet.BlockV1(
            8, 2, True, {"create_scale": True, "create_offset": True, "decay_rate": 0.9}, False
        )(x, is_training=True, test_local_stats=False),
        IMAGE,
    ),
}


def decay(t, y, args):
    return -args * y + jnp.sin(t)


def solved(solver, dt=0.1, terms=lambda: diffrax.ODETerm(decay), **options):
    """An initial value problem, solved to 1; its statistics too."""

    def fn(y0, rate):
        found = diffrax.diffeqsolve(
            terms(), solver, 0.0, 1.0, dt, y0, rate, throw=False, **options
        )
        return found.ts, found.ys, found.stats

    return lambda: (fn, (jnp.linspace(1.0, 2.0, 4), jnp.float32(0.5)))


def gradient_of(make):
    def build():
        fn, (y0, rate) = make()
        return jax.grad(lambda y0, rate: jnp.sum(fn(y0, rate)[1]), argnums=(0, 1)), (y0, rate)

    return build


def noisy():
    noise = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(4,), key=jax.random.key(0))
    control = diffrax.ControlTerm(lambda t, y, args: 0.1 * jnp.eye(4), noise)
    return diffrax.MultiTerm(diffrax.ODETerm(decay), control)


def controlled():
    def fn(ts, xs, weights):
        path = diffrax.CubicInterpolation(ts, diffrax.backward_hermite_coefficients(ts, xs))
        term = diffrax.ControlTerm(
            lambda t, y, args: jnp.outer(jnp.tanh(y), args), path
        ).to_ode()
        found = diffrax.diffeqsolve(
            term, diffrax.Heun(), 0.0, 1.0, 0.25, jnp.ones(3), weights, throw=False
        )
        return found.ys

    return fn, (jnp.linspace(0, 1, 8), SEQUENCE[0, :, :2], jnp.array([0.5, -0.5]))


PID = diffrax.PIDController(rtol=1e-3, atol=1e-3)
DIFFRAX = {
    "diffrax Tsit5": solved(diffrax.Tsit5(), stepsize_controller=PID),
    "diffrax saved": solved(
        diffrax.Dopri5(),
        stepsize_controller=PID,
        saveat=diffrax.SaveAt(ts=np.linspace(0, 1, 5, dtype=np.float32)),
    ),
    "diffrax dense steps": solved(
        diffrax.Euler(), saveat=diffrax.SaveAt(steps=True), max_steps=16
    ),
    "diffrax implicit": solved(diffrax.Kvaerno3(), stepsize_controller=PID),
    "diffrax noise": solved(diffrax.EulerHeun(), terms=noisy),
    "diffrax gradient": gradient_of(solved(diffrax.Tsit5(), dt=0.25, max_steps=16)),
    "diffrax backsolve": gradient_of(
        solved(diffrax.Tsit5(), dt=0.25, adjoint=diffrax.BacksolveAdjoint())
    ),
    "diffrax control": controlled,
}

DENSE = np.where(normal(8, 8, 16) > 0.8, normal(9, 8, 16), 0).astype(np.float32)


def bcoo(fn, *inputs, **options):
    return lambda: (
        fn,
        (sparse.BCOO.fromdense(jnp.asarray(DENSE), **options), *map(jnp.asarray, inputs)),
    )


@sparse.sparsify
def dense_code(m, x):
    return jnp.sum(m * 2.0 + m, 0) @ x.T


BCOO = {
    "BCOO @ matrix": bcoo(lambda m, x: m @ x, ROWS.T),
    "matrix @ BCOO": bcoo(lambda m, x: x @ m, ROWS[:, :8]),
    "BCOO @ vector": bcoo(lambda m, x: m @ x, ROWS[0]),
    "BCOO transposed": bcoo(lambda m: m.T),
    "BCOO reduced": bcoo(lambda m: (m.sum(0), m.sum())),
    "BCOO times dense": bcoo(lambda m, x: sparse.bcoo_multiply_dense(m, x), ROWS),
    "BCOO of a batch": bcoo(
        lambda m, x: sparse.bcoo_dot_general(m, x, dimension_numbers=(([1], [1]), ([0], [0]))),
        normal(10, 8, 16, 2),
        n_batch=1,
    ),
    "BCOO @ BCOO": bcoo(lambda m: (m @ m.T).sum_duplicates(nse=64)),
    "BCOO from dense": lambda: (
        lambda x: sparse.BCOO.fromdense(x, nse=32),
        (jnp.asarray(DENSE),),
    ),
    "BCOO sorted": bcoo(lambda m: m.T.sort_indices().todense()),
    "BCOO's gradient": bcoo(
        jax.grad(lambda m, x: jnp.sum((m @ x) ** 2), allow_int=True), ROWS.T
    ),
    "dense code of BCOO": bcoo(dense_code, ROWS),
}
CASES = {**EQUINOX, **HAIKU, **DIFFRAX, **BCOO}


@pytest.mark.parametrize("devices", ["local", "ray_pair"])
@pytest.mark.parametrize("name", CASES)
def test_functions_of_libraries_are_as_jit_has_them(name, devices, request):
    check_as_jit(*CASES[name](), request.getfixturevalue(devices))
