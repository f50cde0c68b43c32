"""Where the tasks of a sharded program come from, and how and why its tensors are cut."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from doppler_jax.costs.clusters import make_cluster
from doppler_jax.programs.summary import Summary, summarize
from doppler_jax.types import Cluster, ShardedProgram


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The totals of a sharded program; `str` of it adds all its tensors and tasks."""

    sharded: ShardedProgram
    totals: Summary

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
        made = float(np.sum(self.sharded.graph.tensor_bytes))
        return (
            f"{self.totals.num_tasks} tasks, {self.totals.flops:.4g} flops, {made:.4g} bytes "
            f"made, parallelism {self.totals.parallelism:.2f} (work over critical path)"
        )

    def tensor_rows(self) -> list[tuple[str, ...]]:
        """Returns per tensor: name, dtype and shape, blocks per dimension, line, reason."""
        return [
            (
                tensor.name,
                _describe(tensor.aval),
                "x".join(map(str, tensor.grid)) or "1",
                tensor.source,
                tensor.reason,
            )
            for tensor in self.sharded.tensors
        ]

    def task_rows(self) -> list[tuple[str, ...]]:
        """Returns per task: name, primitives, shapes, flops, bytes made, line."""
        graph, sharded = self.sharded.graph, self.sharded
        made = np.bincount(graph.tensor_producer, graph.tensor_bytes, graph.num_tasks)
        rows: list[tuple[str, ...]] = []
        for v, (name, kernel, origin) in enumerate(
            zip(sharded.names, sharded.kernels, sharded.origins, strict=True)
        ):
            reads, makes = (_describe_all(avals) for avals in (kernel.operands, kernel.results))
            rows.append(
                (
                    name,
                    " ".join(origin.primitives),
                    f"{reads} -> {makes}".lstrip(),
                    f"{graph.flops[v]:.4g}",
                    f"{made[v]:.4g}",
                    origin.source,
                )
            )
        return rows


def explain(sharded: ShardedProgram, cluster: Cluster | None = None) -> Explanation:
    """Returns what a program was cut into; print it to read it.

    For each task: the primitives fused in it and the source line of the first, shapes,
    flops and bytes made. For each tensor: its partition and why. And the totals.

    Args:
      sharded: the program.
      cluster: whose devices' times the parallelism counts, by default those of `p100x4`.
    """
    return Explanation(sharded, summarize(sharded.graph, cluster or make_cluster("p100x4")))


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
