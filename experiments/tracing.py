"""How long paper-size models take to become task graphs, and in how much memory.

`python -m experiments.tracing` prints the figures and writes runs/tracing.json and
runs/tracing.md. Shapes alone are looked at: no array of that size is allocated.
"""

import dataclasses
import pathlib
import time

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.files import write_json_atomic
from doppler_jax.reports.tables import format_table, print_table
from experiments.process_memory import peak_bytes
from experiments.provenance import provenance


@dataclasses.dataclass(frozen=True)
class TracingSettings:
    """What to trace and partition."""

    workloads: tuple[str, ...] = ("llama_layer", "llama")
    """Names, the smallest first: memory is that of the process so far."""
    preset: str = "paper"
    """Sizes of the workloads."""
    num_shards: int = 4
    """Blocks per tensor."""
    strategy: str = "planner"
    """How tensors are cut."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Folder of the results."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of the result."""

    workload: str
    num_tasks: int
    num_edges: int
    trace_s: float
    partition_s: float
    peak_bytes: float  # resident memory of the process, Python and JAX included


def main(settings: TracingSettings) -> None:
    """Measures, prints, and writes the results."""
    figures = [measure(name, settings) for name in settings.workloads]
    columns = ("workload", "tasks", "edges", "trace (s)", "partition (s)", "peak memory (GB)")
    rows = [
        (
            figure.workload,
            f"{figure.num_tasks:,}",
            f"{figure.num_edges:,}",
            f"{figure.trace_s:.2f}",
            f"{figure.partition_s:.2f}",
            f"{figure.peak_bytes / 1e9:.2f}",
        )
        for figure in figures
    ]
    print_table(f"{settings.preset} sizes, {settings.num_shards} shards", columns, rows)
    settings.runs.mkdir(parents=True, exist_ok=True)
    result = {
        "preset": settings.preset,
        "num_shards": settings.num_shards,
        "strategy": settings.strategy,
        "provenance": provenance(),
        "figures": [dataclasses.asdict(figure) for figure in figures],
    }
    write_json_atomic(settings.runs / "tracing.json", result)
    (settings.runs / "tracing.md").write_text(format_table(columns, rows))


def measure(name: str, settings: TracingSettings) -> Figure:
    """Traces and partitions one workload, once: that is what a user waits for."""
    workload = dj.make_workload(name, settings.preset)
    began = time.perf_counter()
    program = dj.trace(workload.fn, *workload.args)
    traced = time.perf_counter()
    sharded = dj.partition(program, settings.num_shards, strategy=settings.strategy)
    done = time.perf_counter()
    return Figure(
        workload=name,
        num_tasks=sharded.graph.num_tasks,
        num_edges=sharded.graph.num_edges,
        trace_s=traced - began,
        partition_s=done - traced,
        peak_bytes=peak_bytes(),
    )


if __name__ == "__main__":
    cli.run(main, TracingSettings, "Time and memory of tracing and partitioning.")
