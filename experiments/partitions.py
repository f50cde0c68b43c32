"""The planner's partitions against uniform ones: `python -m experiments.partitions`.

Every workload is traced and cut for every preset cluster in both ways, from shapes alone (no
array is allocated), and placed by critical path; times are of a first call in this process.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import doppler_jax as dj
from doppler_jax.costs.clusters import list_clusters
from doppler_jax.programs.explain import summarize
from doppler_jax.reports.tables import format_seconds
from experiments import grid
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.machine import peak_bytes

STRATEGIES = ("uniform", "planner")

FORMS: dict[str, Callable[[Record], str]] = {
    "tasks": lambda r: f"{r['tasks']:,}",
    "edges": lambda r: f"{r['edges']:,}",
    "moved (MB)": lambda r: f"{r['moved_bytes'] / 1e6:,.4g}",
    "parallelism": lambda r: f"{r['parallelism']:.3g}",
    "makespan": lambda r: format_seconds(r["makespan_s"], 3),
}
"""Columns that both strategies share."""


@dataclasses.dataclass(frozen=True)
class PartitionSettings(Settings):
    """Which workloads are cut, and for what."""

    workloads: tuple[str, ...] = dataclasses.field(
        default_factory=lambda: tuple(dj.list_workloads())
    )
    presets: tuple[str, ...] = ("small", "paper")
    """Sizes of the workloads."""
    clusters: tuple[str, ...] = dataclasses.field(
        default_factory=lambda: tuple(name for name in list_clusters() if name != "host")
    )


def cells(context: Context[PartitionSettings]) -> list[Cell]:
    """Returns a cell per workload, size, cluster and strategy."""
    asked = context.settings
    grid.check_names("--workloads", asked.workloads, dj.list_workloads())
    grid.check_names("--clusters", asked.clusters, list_clusters())
    return [
        Cell(
            {"workload": name, "preset": preset, "cluster": cluster, "strategy": strategy},
            partial(measure, name, preset, cluster, strategy),
        )
        for preset in asked.presets
        for name in asked.workloads
        for cluster in asked.clusters
        for strategy in STRATEGIES
    ]


def measure(name: str, preset: str, cluster_name: str, strategy: str) -> Record:
    """Returns the figures of a workload cut for a cluster's devices by one strategy."""
    workload, cluster = dj.make_workload(name, preset), dj.make_cluster(cluster_name)
    began = time.perf_counter()
    program = dj.trace(workload.fn, *workload.args)
    traced = time.perf_counter()
    num_shards = 1 << (cluster.num_devices - 1).bit_length()
    sharded = dj.partition(program, num_shards, strategy=strategy, cluster=cluster)
    cut = time.perf_counter()
    placed = dj.place(
        sharded.graph, dj.make_costs(sharded.graph, cluster), method="critical_path"
    )
    summary = summarize(sharded.graph, cluster)
    return {
        "tasks": summary.num_tasks,
        "edges": summary.num_edges,
        "moved_bytes": moved_bytes(sharded.graph, placed.schedule),
        "parallelism": summary.parallelism,
        "makespan_s": placed.makespan_s,
        "trace_s": traced - began,
        "partition_s": cut - traced,
        "peak_bytes": peak_bytes(),
    }


def moved_bytes(graph: dj.TaskGraph, schedule: dj.Schedule) -> float:
    """Returns the bytes that the transfers of a schedule carry."""
    sizes = np.concatenate([graph.tensor_bytes, graph.input_bytes[::-1]])  # input i is ~i
    return float(sizes[schedule.transfer_tensor].sum())


def report(context: Context[PartitionSettings], records: list[Record]) -> Page:
    """Returns uniform's figure and the planner's, side by side."""
    pairs: dict[tuple[str, str], dict[str, Record]] = {}
    for r in records:
        where = f"{r['workload']}, {r['preset']}", r["cluster"]
        pairs.setdefault(where, {})[r["strategy"]] = r
    rows = []
    for where, found in pairs.items():
        if set(found) != set(STRATEGIES):
            continue
        both = [found[strategy] for strategy in STRATEGIES]
        row = dict(zip(("workload", "cluster"), where, strict=True))
        for heading, form in FORMS.items():
            row[heading] = " / ".join(form(r) for r in both)
        row |= {"ratio": both[1]["makespan_s"] / both[0]["makespan_s"]}
        row |= {"traced in_s": both[1]["trace_s"], "planned in_s": both[1]["partition_s"]}
        rows.append(row | {"memory so far (GB)": both[1]["peak_bytes"] / 1e9})
    return Page(
        "Uniform / planner, placed by critical path and simulated; the ratio is the planner's "
        f"makespan over uniform's.\n\n{grid.table(rows)}"
    )


QUICK = {
    "presets": ("small",),
}  # fmt: skip

STUDY = Study("partitions", PartitionSettings(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
