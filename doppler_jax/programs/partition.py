"""Cuts a tensor program into tasks on blocks, by the tensor relational algebra.

A contraction joins blocks on equal block index and aggregates over the contracted one; an
element-wise operation joins on equal indices; a reduction aggregates; where a reader needs
other blocks than the producer stored, formation tasks slice and concatenate. `rules` says
which dimensions go together, `fuse` which equations do, `planner` into how many blocks each
dimension is cut.
"""

from collections.abc import Sequence

import numpy as np

from doppler_jax.programs.fuse import fuse
from doppler_jax.programs.grids import Counts, grid_of
from doppler_jax.programs.kernels import KernelCache
from doppler_jax.programs.overrides import Strategy
from doppler_jax.programs.planner import PartitionPlan, plan_partition
from doppler_jax.programs.program import Group, Program
from doppler_jax.programs.tasks import make_tasks, result_name
from doppler_jax.types import Cluster, ShardedProgram, TaskGraph, TensorOrigin


def partition(
    program: Program,
    num_shards: int = 4,
    *,
    strategy: Strategy = "planner",
    cluster: Cluster | None = None,
) -> ShardedProgram:
    """Returns the program cut into tasks, its tensors into up to `num_shards` blocks.

    Blocks of arguments and constants are graph inputs: each reader gets the one that it
    needs, without a task. Those of arguments that are not resident are at home on device 0;
    the planner counts their transfers only where it compares whole graphs.

    Args:
      program: what `trace` made.
      num_shards: blocks per tensor, a power of two; a tensor whose dimensions cannot be
        halved that often gets fewer.
      strategy: how the blocks are chosen, see `planner.plan_partition`.
      cluster: what the planner assumes; by default `num_shards` equal devices.

    Raises:
      ValueError: `num_shards` is not a power of two, or the strategy is unknown.
    """
    whole = isinstance(num_shards, int | np.integer) and not isinstance(num_shards, bool)
    if not whole or num_shards < 1 or num_shards & (num_shards - 1):
        raise ValueError(f"num_shards is {num_shards!r}; expected a power of two: 1, 2, 4, ...")
    groups = fuse(program)
    kernels = KernelCache()

    def build(counts: Sequence[Counts]) -> TaskGraph:
        return make_tasks(program, groups, counts, kernels).task_graph()

    plan = plan_partition(groups, int(num_shards), strategy, cluster, build=build)
    return shard(program, groups, plan, kernels)


def shard(
    program: Program, groups: Sequence[Group], plan: PartitionPlan, kernels: KernelCache
) -> ShardedProgram:
    """Returns the program cut as planned; `kernels` keeps what was made for other plans."""
    made = make_tasks(program, groups, plan.counts, kernels)
    return ShardedProgram(
        graph=made.task_graph(),
        names=tuple(task.name for task in made.tasks),
        kernels=tuple(task.kernel for task in made.tasks),
        operands=tuple(task.operands for task in made.tasks),
        inputs=tuple(made.inputs),
        outputs=tuple(map(made.output, program.outputs)),
        arg_avals=program.arg_avals,
        consts=program.const_arrays,
        in_tree=program.in_tree,
        out_tree=program.out_tree,
        origins=tuple(task.origin for task in made.tasks),
        tensors=_tensor_origins(groups, plan),
    )


def _tensor_origins(groups: Sequence[Group], plan: PartitionPlan) -> tuple[TensorOrigin, ...]:
    return tuple(
        TensorOrigin(
            name=result_name(group, position),
            aval=value.aval,
            grid=grid_of(labels, counts),
            source=group.root.source,
            reason=reason,
        )
        for group, counts, reason in zip(groups, plan.counts, plan.reasons, strict=True)
        for position, (value, labels) in enumerate(
            zip(group.results, group.labelling.results, strict=True)
        )
    )
