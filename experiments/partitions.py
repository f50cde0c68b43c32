"""The planner's partitions against uniform ones: `python -m experiments.partitions`.

Every workload is traced and cut for every preset cluster in both ways, from shapes alone (no
array is allocated), and placed by critical path; times are of a first call in this process.
Figures are uniform's / the planner's; the ratio is the planner's makespan over uniform's.
"""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

import doppler_jax as dj
from doppler_jax.costs.clusters import list_clusters
from doppler_jax.programs.explain import parallelism
from doppler_jax.reports.tables import format_seconds
from experiments import grid
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.machine import peak_bytes
from experiments.tables import by, table

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
class Asked(Settings):
    """Which workloads are cut, and for what."""

    workloads: tuple[str, ...] = tuple(dj.workloads.list_workloads())
    presets: tuple[str, ...] = ("small", "paper")
    """Sizes of the workloads."""
    clusters: tuple[str, ...] = tuple(name for name in list_clusters() if name != "host")


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per workload, size, cluster and strategy."""
    asked = context.settings
    grid.check_names("--workloads", asked.workloads, dj.workloads.list_workloads())
    grid.check_names("--clusters", asked.clusters, list_clusters())
    axes = {"preset": asked.presets, "workload": asked.workloads, "cluster": asked.clusters}
    return grid.cells_of(measure, {**axes, "strategy": STRATEGIES})


def measure(preset: str, workload: str, cluster: str, strategy: str) -> Record:
    """Returns the figures of a workload cut for a cluster's devices by one strategy."""
    made, on = dj.workloads.make_workload(workload, preset), dj.make_cluster(cluster)
    began = time.perf_counter()
    program = dj.trace(made.fn, *made.args)
    traced = time.perf_counter()
    num_shards = 1 << (on.num_devices - 1).bit_length()
    sharded = dj.partition(program, num_shards, strategy=strategy, cluster=on)
    cut = time.perf_counter()
    costs = dj.make_costs(sharded.graph, on)
    placed = dj.place(sharded.graph, costs, method="critical_path")
    return {
        "tasks": sharded.graph.num_tasks,
        "edges": sharded.graph.num_edges,
        "moved_bytes": moved_bytes(sharded.graph, placed.schedule),
        "parallelism": parallelism(sharded.graph, on),
        "makespan_s": placed.makespan_s,
        "trace_s": traced - began,
        "partition_s": cut - traced,
        "peak_bytes": peak_bytes(),
    }


def moved_bytes(graph: dj.graphs.TaskGraph, schedule: dj.simulator.Schedule) -> float:
    """Returns the bytes that the transfers of a schedule carry."""
    sizes = np.concatenate([graph.tensor_bytes, graph.input_bytes[::-1]])  # input i is ~i
    return float(sizes[schedule.transfer_tensor].sum())


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns uniform's figure and the planner's, side by side."""
    rows = []
    for (workload, preset, cluster), found in by(
        records, "workload", "preset", "cluster"
    ).items():
        if len(found) == len(STRATEGIES):
            row = {"workload": f"{workload}, {preset}", "cluster": cluster}
            row |= {what: " / ".join(map(form, found)) for what, form in FORMS.items()}
            uniform, planned = found
            row |= {"ratio": planned["makespan_s"] / uniform["makespan_s"]}
            row |= {"traced in_s": planned["trace_s"], "planned in_s": planned["partition_s"]}
            rows.append(row | {"memory so far (GB)": planned["peak_bytes"] / 1e9})
    return Page({"": table(rows)})


QUICK = {"presets": ("small",)}

STUDY = Study("partitions", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
