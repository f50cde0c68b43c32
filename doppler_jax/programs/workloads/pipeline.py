"""A training step in a pipeline: P stages, M micro-batches, gradients accumulated.

Each stage is a residual block of two products. Its backward is two halves, as `jax.grad` makes
it: the gradient of what it reads, for the stage before, and that of its weights, for which
nobody waits. Joined in one task, both wait for one another, as in the older schedules.

`doppler_jax.graphs.pipelines` has the same step as a plain graph.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from doppler_jax.programs.workloads.workload import Definition, normal, weight

_HALVES = {"backward_tasks": 2}

PRESETS = {
    "small": {"stages": 2, "micro_batches": 4, "batch": 128, "width": 64, "hidden": 128},
    "medium": {"stages": 4, "micro_batches": 4, "batch": 512, "width": 512, "hidden": 2048},
    "paper": {"stages": 4, "micro_batches": 8, "batch": 2**14, "width": 2**12, "hidden": 2**14},
}
PRESETS = {preset: sizes | _HALVES for preset, sizes in PRESETS.items()}

LEARNING_RATE = 0.1

Params = dict[str, jax.Array]
Stage = Callable[[Params, jax.Array], jax.Array]


def pipeline(
    stages: int, micro_batches: int, batch: int, width: int, hidden: int, backward_tasks: int
) -> Definition:
    """Returns a step of gradient descent on the mean square error of a batch.

    Maps the parameters of every stage and a batch, `x` and `target` `[batch, width]`, to the
    new parameters and the loss before the step. What belongs to stage i is in the named scope
    `stage<i>`, for `dj.pin`.

    Args:
      stages: P.
      micro_batches: M, which divides `batch`.
      batch: rows.
      width: features of a row.
      hidden: features within a stage.
      backward_tasks: 2 for backwards in halves; 1 for whole ones, which nothing cuts, and of
        which stage 0's makes the gradient of its rows, too.

    Raises:
      ValueError: the batch does not divide, or there are other than 1 or 2 `backward_tasks`.
    """
    if batch % micro_batches:
        raise ValueError(f"batch {batch} does not divide into {micro_batches} micro-batches")
    if backward_tasks not in (1, 2):
        raise ValueError(f"backward_tasks is {backward_tasks}; expected 1 or 2")
    run_stage = _stage if backward_tasks == 2 else _with_whole_backward(_stage)
    rows, last = batch // micro_batches, f"stage{stages - 1}"

    def loss_fn(params: list[Params], data: Params, m: int) -> jax.Array:
        here = slice(m * rows, (m + 1) * rows)
        with jax.named_scope("stage0"):
            x = data["x"][here]
        for i, stage in enumerate(params):
            with jax.named_scope(f"stage{i}"):
                x = run_stage(stage, x)
        with jax.named_scope(f"{last}/loss"):
            return jnp.sum((x - data["target"][here]) ** 2) / (batch * width)

    def fn(params: list[Params], data: Params) -> tuple[list[Params], jax.Array]:
        made = []
        for m in range(micro_batches):
            with jax.named_scope(f"micro{m}"):
                made.append(jax.value_and_grad(loss_fn)(params, data, m))
        losses, gradients = zip(*made, strict=True)
        updated = []
        for i, stage in enumerate(params):
            with jax.named_scope(f"stage{i}/update"):
                updated.append(jax.tree.map(_descend, stage, *(each[i] for each in gradients)))
        with jax.named_scope(f"{last}/loss"):
            return updated, sum(losses[1:], losses[0])

    stage = {"up": weight(width, width, hidden), "down": weight(hidden, hidden, width)}
    rows_of = normal(batch, width)
    return fn, ([stage] * stages, {"x": rows_of, "target": rows_of})


def _stage(params: Params, x: jax.Array) -> jax.Array:
    """Returns the output of a stage, `[rows, width]` as `x`."""
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def _descend(weights: jax.Array, *gradients: jax.Array) -> jax.Array:
    return weights - LEARNING_RATE * sum(gradients[1:], gradients[0])


def _with_whole_backward(stage: Stage) -> Stage:
    """Returns the same stage, whose backward is one equation and so one task."""
    made = jax.custom_vjp(stage)
    made.defvjp(functools.partial(jax.vjp, stage), _run_whole)
    return made


def _run_whole(pull: Callable[..., Any], gradient: jax.Array) -> Any:
    # Tasks never begin inside a loop, not even in one that is run once.
    shapes = jax.eval_shape(pull, gradient)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return lax.scan(lambda *_: (pull(gradient), None), zeros, length=1)[0]
