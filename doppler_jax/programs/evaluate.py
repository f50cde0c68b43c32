"""What a sharded program means: a sequential interpreter, for tests and as an example."""

from typing import Any

import jax

from doppler_jax.graphs.build import topological_order
from doppler_jax.programs.blocks import are_tied, flatten_args, join_output, slice_block
from doppler_jax.types import InputRef, Ref, ShardedProgram


def evaluate(sharded: ShardedProgram, *args: Any, **kwargs: Any) -> Any:
    """Returns what the traced function returns, by running the tasks one after another.

    Example:
      >>> sharded = dj.partition(dj.trace(jnp.matmul, jnp.eye(4), jnp.eye(4)), num_shards=2)
      >>> float(dj.evaluate(sharded, jnp.eye(4), jnp.eye(4)).sum())
      4.0

    Raises:
      ValueError: the arguments are not like those that the function was traced with.
    """
    values = flatten_args(sharded, args, kwargs)
    if sharded.untied is not None and not are_tied(sharded, values):
        return evaluate(sharded.untied, *args, **kwargs)
    inputs = [slice_block(values[block.source], block) for block in sharded.inputs]
    tensors: dict[int, jax.Array] = {}

    def read(ref: Ref) -> jax.Array:
        return inputs[ref.input] if isinstance(ref, InputRef) else tensors[ref.tensor]

    made: list[list[int]] = [[] for _ in sharded.kernels]
    for x, v in enumerate(sharded.graph.tensor_producer.tolist()):
        made[v].append(x)
    for v in topological_order(sharded.graph).tolist():
        results = sharded.kernels[v].fn(*map(read, sharded.operands[v]))
        tensors.update(zip(made[v], results, strict=True))
    outputs = [
        join_output(output, [read(ref) for ref in output.blocks]) for output in sharded.outputs
    ]
    return jax.tree.unflatten(sharded.out_tree, outputs)
