"""What a program was cut into: totals, where tasks come from, how tensors are cut and why."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from doppler_jax.costs.build import make_costs
from doppler_jax.costs.clusters import make_cluster
from doppler_jax.graphs.levels import b_level, longest_paths, mean_compute_s
from doppler_jax.programs.grids import format_grid
from doppler_jax.types import Cluster, ShardedProgram, TaskGraph

MOST = 0.5
"""Share of the work above which loops that are one task each are said to hide it."""

_ADVICE = {
    "scan": "unroll_scans=True of dj.trace cuts loops of known length",
    "while": "lax.scan and lax.fori_loop, of a length that is a Python number, can be cut",
}
"""What to do about a loop, by its primitive."""


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
    """Returns a line on the loops that hold most of the work, one after another; or nothing.

    Each of them is one task, so no other device can help.
    """
    graph, kinds = sharded.graph, [origin.primitives[0] for origin in sharded.origins]
    held = np.where([kind in _ADVICE for kind in kinds], graph.flops, 0.0)
    total = max(float(graph.flops.sum()), 1e-30)
    if held.sum() <= MOST * total:
        return ""
    before, origin = longest_paths(graph, np.zeros(graph.num_edges), held)
    path = [int(np.argmax(before + held))]
    share = float((before + held)[path[0]]) / total
    if share <= MOST:
        return ""
    while origin[path[-1]] >= 0:
        path.append(int(origin[path[-1]]))
    loops = [v for v in path if held[v] > 0]
    largest = max(loops, key=held.__getitem__)
    where = f"{kinds[largest]} at {sharded.origins[largest].source}"
    what = f"{where} hides {share:.0%} of the work in one task, which one device runs"
    if len(loops) > 1:
        what = (
            f"{len(loops)} loops one after another, {where} the largest, hide {share:.0%} of "
            "the work in one task each"
        )
    return f"{what}: {_ADVICE[kinds[largest]]}"


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
