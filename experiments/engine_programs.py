"""What `experiments.engine` runs: tiny programs made by hand, and workloads of some size."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import doppler_jax as dj
from doppler_jax.graphs.build import make_graph
from doppler_jax.programs.workloads import Workload
from doppler_jax.types import (
    InputBlock,
    InputRef,
    Kernel,
    OutputBlocks,
    ShardedProgram,
    TensorRef,
)
from experiments.config import Strategy

SIZES = {
    "chainmm": {"n": 1024},
    "ffnn": {"batch": 2048, "features": 1024, "hidden": 2048, "classes": 512},
    "llama_block": {"batch": 1, "sequence": 512, "width": 512, "hidden": 1024, "heads": 8},
    "moe_block": {"tokens": 512, "width": 256, "hidden": 1024, "experts": 4, "capacity": 320},
}
"""Sizes that give most products 5 to 30 ms on one core, cut for two devices."""

Program = tuple[ShardedProgram, tuple[Any, ...]]
"""A sharded program and the arguments to call it with."""


def make_named(name: str, small: bool) -> Workload:
    """Returns a workload at the sizes above, or of its small preset."""
    return dj.make_workload(name, "small", **({} if small else SIZES.get(name, {})))


def load_workload(
    name: str, num_shards: int, small: bool, strategy: Strategy = "planner"
) -> Program:
    """Returns a workload as `make_named` does, cut, and random arguments."""
    workload = make_named(name, small)
    program = dj.trace(workload.fn, *workload.args)
    sharded = dj.partition(program, num_shards, strategy=strategy)
    return sharded, dj.make_arrays(workload, jax.random.key(0))


def independent_tasks(num_tasks: int) -> Program:
    """Returns tiny tasks that read the argument and wait for no other task."""
    return _increments([None] * num_tasks, length=64)


def relay(num_tasks: int, length: int) -> Program:
    """Returns a chain of tasks on float32 vectors; on alternating devices each is moved."""
    return _increments([None, *range(num_tasks - 1)], length)


def _increments(reads: Sequence[int | None], length: int) -> Program:
    """Returns x + 1 as often as `reads` is long, each of the argument or an earlier task's.

    The program returns what the last one makes.
    """
    vector = jax.ShapeDtypeStruct((length,), jnp.float32)
    kernel = Kernel("increment", lambda x: (x + jnp.float32(1),), (vector,), (vector,))
    num_tasks, num_bytes = len(reads), 4.0 * length
    edges = [(u, v) for v, u in enumerate(reads) if u is not None]
    entries = [v for v, u in enumerate(reads) if u is None]
    argument = np.zeros(length, np.float32)
    sharded = ShardedProgram(
        graph=make_graph(
            flops=np.full(num_tasks, float(length)),
            tensor_producer=np.arange(num_tasks),
            tensor_bytes=np.full(num_tasks, num_bytes),
            edge_tensor=[u for u, _ in edges],
            edge_reader=[v for _, v in edges],
            input_bytes=[num_bytes],
            input_edge_input=[0] * len(entries),
            input_edge_reader=entries,
        ),
        names=tuple(f"increment{v}" for v in range(num_tasks)),
        kernels=(kernel,) * num_tasks,
        operands=tuple((InputRef(0) if u is None else TensorRef(u),) for u in reads),
        inputs=(InputBlock(0, (0,), (length,)),),
        outputs=(OutputBlocks(vector, (1,), (TensorRef(num_tasks - 1),)),),
        arg_avals=(vector,),
        consts=(),
        in_tree=jax.tree.structure(((argument,), {})),
        out_tree=jax.tree.structure(0),
    )
    return sharded, (jnp.asarray(argument),)
