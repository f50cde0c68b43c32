"""What a program was cut into: totals, where tasks come from, how tensors are cut and why."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from doppler_jax.costs.build import make_costs
from doppler_jax.costs.clusters import make_cluster
from doppler_jax.graphs.levels import b_level, mean_compute_s
from doppler_jax.programs.grids import format_grid
from doppler_jax.types import Cluster, ShardedProgram, TaskGraph

MOST = 0.5
"""Share of the work above which a loop that is one task is said to hide it."""


def parallelism(graph: TaskGraph, cluster: Cluster) -> float:
    """Returns how many devices the work could keep busy: total work over critical path.

    Tasks count with the means of their roofline times, transfers not at all.
    """
    costs = make_costs(graph, cluster)
    nothing = np.zeros_like(costs.latency_s)
    at_once = dataclasses.replace(costs, latency_s=nothing, seconds_per_byte=nothing)
    longest_s = float(b_level(graph, at_once).max(initial=0.0))
    return float(mean_compute_s(costs).sum()) / longest_s if longest_s else 0.0


def hidden_work(sharded: ShardedProgram) -> str:
    """Returns a line on the loop that holds most of the work in one task; or nothing."""
    flops = sharded.graph.flops
    total = max(float(flops.sum()), 1e-30)
    loops = [
        f"{origin.primitives[0]} at {origin.source} hides {flops[v] / total:.0%}"
        for v, origin in enumerate(sharded.origins)
        if origin.primitives[0] in ("scan", "while") and flops[v] > MOST * total
    ]
    advice = "unroll_scans=True of dj.trace cuts loops of known length"
    return (
        f"{loops[0]} of the work in one task, which one device runs: {advice}" if loops else ""
    )


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The totals of a sharded program; `str` of it adds all its tensors and tasks."""

    sharded: ShardedProgram
    parallelism: float  # see the function of that name

    def __str__(self) -> str:
        lines = [self.summary(), "", "Tensors, and how they are cut:"]
        lines += _align(("tensor", "shape", "blocks", "line", "why"), self.tensor_rows())
        lines += ["", "Tasks:"]
        lines += _align(
            ("task", "primitives", "reads and makes", "flops", "bytes made", "line"),
            self.task_rows(),
        )
        return "\n".join(lines)

    def summary(self) -> str:
        """Returns the totals in one line."""
        graph = self.sharded.graph
        return (
            f"{graph.num_tasks} tasks, {graph.flops.sum():.4g} flops, "
            f"{graph.tensor_bytes.sum():.4g} bytes made, parallelism {self.parallelism:.2f} "
            "(work over critical path)"
        ) + "".join(f"; {hidden}" for hidden in filter(None, [hidden_work(self.sharded)]))

    def tensor_rows(self) -> list[tuple[str, ...]]:
        """Returns per tensor: name, dtype and shape, blocks per dimension, line, reason."""
        return [
            (t.name, _describe(t.aval), format_grid(t.grid), t.source, t.reason)
            for t in self.sharded.tensors
        ]

    def task_rows(self) -> list[tuple[str, ...]]:
        """Returns per task: name, primitives, shapes, flops, bytes made, line."""
        graph, sharded = self.sharded.graph, self.sharded
        made = np.bincount(graph.tensor_producer, graph.tensor_bytes, graph.num_tasks)
        shapes = [
            f"{_describe_all(kernel.operands)} -> {_describe_all(kernel.results)}".lstrip()
            for kernel in sharded.kernels
        ]
        flops, made_bytes = ([f"{x:.4g}" for x in column] for column in (graph.flops, made))
        primitives = [" ".join(origin.primitives) for origin in sharded.origins]
        sources = [origin.source for origin in sharded.origins]
        columns = sharded.names, primitives, shapes, flops, made_bytes, sources
        return list(zip(*columns, strict=True))


def explain(sharded: ShardedProgram, cluster: Cluster | None = None) -> Explanation:
    """Returns what a program was cut into; print it to read it.

    For each task: the primitives fused in it and the source line of the first, shapes,
    flops and bytes made. For each tensor: its partition and why. And the totals.

    Example:
      >>> sharded = dj.partition(dj.trace(jnp.matmul, jnp.eye(4), jnp.eye(4)), num_shards=2)
      >>> print(dj.explain(sharded))
      2 tasks, 128 flops, 64 bytes made, ...

    Args:
      sharded: the program.
      cluster: whose devices' times the parallelism counts, by default those of `p100x4`.
    """
    return Explanation(sharded, parallelism(sharded.graph, cluster or make_cluster("p100x4")))


def _describe(aval: jax.ShapeDtypeStruct) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _describe_all(avals: Sequence[jax.ShapeDtypeStruct]) -> str:
    """Returns the avals one after another, a run of equal ones as `4 x float32[8]`."""
    runs = [(text, len(list(run))) for text, run in itertools.groupby(map(_describe, avals))]
    return ", ".join(f"{count} x {text}" if count > 1 else text for text, count in runs)


def _align(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table whose columns start at the same position."""
    table = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
