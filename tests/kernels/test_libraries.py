"""Functions of Flax and Optax on the engine: leaf by leaf what `jit` makes of them."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tests.kernels.conftest import check_as_jit
from tests.programs.functions.registry import integers, normal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_libraries_want_it")]

IDS = integers(0, 4, 8, low=0, high=16)
SEQUENCE, IMAGE, ROWS = normal(1, 2, 8, 16), normal(2, 2, 8, 8, 4), normal(3, 8, 16)
LABELS = integers(4, 8, low=0, high=16)


def linen(module, *inputs, mutable=(), rngs=(), **options):
    """A Linen module with its own initial variables."""

    def make():
        keys = dict(enumerate(jax.random.split(jax.random.key(0), 2)))
        variables = module.init({"params": keys[0], "dropout": keys[1]}, *inputs, **options)
        given = {name: jax.random.key(7) for name in rngs}

        def fn(variables, given, *inputs):
            return module.apply(
                variables, *inputs, rngs=given, mutable=list(mutable), **options
            )

        return fn, (variables, given, *inputs)

    return make


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(16)(x)), None


LINEN = {
    "Dense": linen(nn.Dense(8), ROWS),
    "DenseGeneral": linen(nn.DenseGeneral((4, 2), axis=(-2, -1)), SEQUENCE),
    "Einsum": linen(nn.Einsum((16, 4, 2), "btd,dhk->bthk"), SEQUENCE),
    "Conv": linen(nn.Conv(8, (3, 3), strides=2, kernel_dilation=1), IMAGE),
    "Conv of groups": linen(nn.Conv(8, (3,), feature_group_count=4), SEQUENCE),
    "ConvTranspose": linen(nn.ConvTranspose(4, (3, 3), strides=(2, 2)), IMAGE),
    "ConvLocal": linen(nn.ConvLocal(4, (3,)), SEQUENCE),
    "Embed": linen(nn.Embed(16, 8), IDS),
    "LayerNorm": linen(nn.LayerNorm(), SEQUENCE),
    "RMSNorm": linen(nn.RMSNorm(), SEQUENCE),
    "GroupNorm": linen(nn.GroupNorm(num_groups=2), IMAGE),
    "InstanceNorm": linen(nn.InstanceNorm(), IMAGE),
    "WeightNorm": linen(nn.WeightNorm(nn.Dense(8)), ROWS),
    "SpectralNorm": linen(
        nn.SpectralNorm(nn.Dense(8)), ROWS, mutable=["batch_stats"], update_stats=True
    ),
    "BatchNorm in training": linen(
        nn.BatchNorm(), IMAGE, mutable=["batch_stats"], use_running_average=False
    ),
    "Dropout": linen(nn.Dropout(0.5), ROWS, rngs=["dropout"], deterministic=False),
    "attention": linen(nn.MultiHeadDotProductAttention(num_heads=4), SEQUENCE, SEQUENCE),
    "LSTM": linen(nn.RNN(nn.OptimizedLSTMCell(8)), SEQUENCE),
    "GRU in reverse": linen(nn.RNN(nn.GRUCell(8), reverse=True, keep_order=True), SEQUENCE),
    "Bidirectional": linen(
        nn.Bidirectional(nn.RNN(nn.SimpleCell(8)), nn.RNN(nn.SimpleCell(8))), SEQUENCE
    ),
    "ConvLSTM": linen(nn.RNN(nn.ConvLSTMCell(4, (3, 3))), normal(5, 2, 3, 8, 8, 4)),
    "layers by scan": linen(
        nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )(),
        ROWS,
        None,
    ),
}


def module(make, *inputs):
    """An NNX module, its gradient and what else of its state a call changes."""

    def build():
        graph, state = nnx.split(make(nnx.Rngs(0)))

        def fn(state, *inputs):
            model = nnx.merge(graph, state)
            loss, grads = nnx.value_and_grad(lambda m: jnp.sum(m(*inputs) ** 2))(model)
            return loss, nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(model, nnx.Param))

        return fn, (state, *inputs)

    return build


NNX = {
    "nnx.Linear": module(lambda rngs: nnx.Linear(16, 8, rngs=rngs), ROWS),
    "nnx.Conv": module(lambda rngs: nnx.Conv(4, 8, (3, 3), rngs=rngs), IMAGE),
    # The gradient of the bias of a norm, or of a key, is nothing but rounding here.
    "nnx.BatchNorm": module(lambda rngs: nnx.BatchNorm(4, use_bias=False, rngs=rngs), IMAGE),
    "nnx.Embed": module(lambda rngs: nnx.Embed(16, 8, rngs=rngs), IDS),
    "nnx.LoRA": module(lambda rngs: nnx.LoRA(16, 2, 8, rngs=rngs), ROWS),
    "nnx attention": module(
        lambda rngs: nnx.MultiHeadAttention(4, 16, decode=False, use_bias=False, rngs=rngs),
        SEQUENCE,
    ),
    "nnx module as it is": lambda: (
        lambda m, x: m(x),
        (nnx.Linear(16, 8, rngs=nnx.Rngs(0)), ROWS),
    ),
    "nnx.RNN": module(lambda rngs: nnx.RNN(nnx.GRUCell(16, 8, rngs=rngs)), SEQUENCE),
}


def steps(optimizer):
    """Two steps of an optimiser on a least-squares loss, from its own initial state."""

    def make():
        params = {"w": normal(6, 16, 16) * 0.1, "b": normal(7, 16)}

        def loss(params):
            return jnp.mean((ROWS @ params["w"] + params["b"] - 1.0) ** 2)

        def fn(params, state):
            for _ in range(2):
                value, grads = jax.value_and_grad(loss)(params)
                extra = {"value": value, "grad": grads, "value_fn": loss}
                update = optax.with_extra_args_support(optimizer).update
                updates, state = update(grads, state, params, **extra)
                params = optax.apply_updates(params, updates)
            return params, state

        params = jax.tree.map(jnp.asarray, params)
        return fn, (params, optimizer.init(params))

    return make


OPTIMISERS = {
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=8),
    "adagrad": optax.adagrad(0.1),
    "amsgrad": optax.amsgrad(0.1),
    "lamb": optax.lamb(0.1),
    "lion": optax.lion(0.1),
    "novograd": optax.novograd(0.1),
    "radam": optax.radam(0.1),
    "rprop": optax.rprop(0.1),
    "sm3": optax.sm3(0.1),
    "yogi": optax.yogi(0.1),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.rmsprop(0.1), 3),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1, 0, 9)),
    "multi_transform": optax.multi_transform(
        {"w": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "w", "b": "b"}
    ),
    "polyak_sgd": optax.polyak_sgd(),
}
LOGITS = ROWS[None].repeat(2, 0)
LOSSES = {
    "ctc": lambda x: optax.ctc_loss(
        x, jnp.zeros(x.shape[:2]), jnp.array([[1, 2, 3], [3, 2, 0]]), jnp.zeros((2, 3))
    ),
    "focal": lambda x: optax.sigmoid_focal_loss(x, jnp.ones(x.shape), alpha=0.3),
    "integer labels": lambda x: optax.softmax_cross_entropy_with_integer_labels(x[0], LABELS),
    "simplex": lambda x: optax.projections.projection_simplex(x[0, 0]),
    "hungarian": lambda x: optax.assignment.hungarian_algorithm(x[0]),
}
CASES = {
    **LINEN,
    **NNX,
    **{name: steps(optimizer) for name, optimizer in OPTIMISERS.items()},
    **{name: lambda fn=fn: (fn, (jnp.asarray(LOGITS),)) for name, fn in LOSSES.items()},
}


@pytest.mark.parametrize("devices", ["local", "ray_pair"])
@pytest.mark.parametrize("name", CASES)
def test_functions_of_libraries_are_as_jit_has_them(name, devices, request):
    check_as_jit(*CASES[name](), request.getfixturevalue(devices))
