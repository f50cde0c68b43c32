"""The planner's partitions against uniform ones, and our graphs beside the published.

`python -m experiments.partitions` writes runs/partitions.json and runs/partitions.md.
"""

import dataclasses
import pathlib
import time

import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.costs.clusters import list_clusters
from doppler_jax.files import write_json_atomic
from doppler_jax.programs.explain import summarize
from doppler_jax.programs.workloads import Workload, list_workloads
from doppler_jax.reports.tables import format_seconds, format_table, print_table
from doppler_jax.simulator.oracle import makespan_s
from experiments.provenance import provenance

STRATEGIES = ("uniform", "planner")


@dataclasses.dataclass(frozen=True)
class PartitionSettings:
    """Which workloads are partitioned, and for what."""

    workloads: tuple[str, ...] = ()
    """Names of workloads; none means all."""
    clusters: tuple[str, ...] = ()
    """Names of preset clusters; none means all but this machine."""
    quick: bool = False
    """Only the small presets of the workloads."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Folder of the results."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """A workload cut by one strategy, placed by critical path."""

    tasks: int
    edges: int
    flops: float
    made_bytes: float  # of all tensors
    moved_bytes: float  # by the placement
    makespan_s: float  # by the oracle
    parallelism: float
    partition_s: float  # wall time of tracing, planning and cutting


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A workload on a cluster, by strategy."""

    workload: str
    preset: str
    cluster: str
    by_strategy: dict[str, Figures]

    @property
    def ratio(self) -> float:
        """The planner's makespan over uniform's."""
        figures = self.by_strategy
        return figures["planner"].makespan_s / figures["uniform"].makespan_s


@dataclasses.dataclass(frozen=True)
class Published:
    """A graph of the paper: file, and the sums of its columns."""

    graph: str
    workload: str
    tasks: int
    edges: int
    compute: float
    communication: float


PUBLISHED = (
    Published("chain_mm_112nodes", "chainmm", 76, 80, 4.80028e13, 1.92011e14),
    Published("ffnn_192nodes", "ffnn", 180, 208, 2.26783e12, 9.07133e12),
    Published("transformer_block_215nodes", "llama_block", 182, 234, 3.88678e12, 1.55471e13),
    Published(
        "full_transformer_layer_261nodes", "llama_layer", 229, 284, 3.88977e12, 1.55591e13
    ),
)

PUBLISHED_CLUSTER = "p100x4"

DIFFERENCES = """\
Why the published graphs have other numbers:

- A published task carries the number of its whole operation, ours its share. In
  transformer_block, 12 tasks carry 4096 x 4096 x 11008 each, the multiply-adds of a whole
  product of the feed-forward part, of which there are three; 24 carry 4096 x 4096 x 4096, of
  which there are six. In chain_mm, 48 tasks carry 10,000^3 each, for three products.
- The published numbers count a multiply-add once, we count two operations.
- The published communication is 4 times the compute number of the same task, whatever the
  size of its result. Ours is the size of the result in bytes.
- The published full_transformer_layer computes the logits of one position: 4 tasks of
  4096 x 32,000. Ours computes those of all 4096, a third of all its operations.
- Chains of element-wise operations are one task here and several there: 94 of the 182 tasks
  of transformer_block carry 4096 x 4096 or less. Where a reader needs other blocks than
  were stored, we have formation tasks of no operations; no published task has none.
- The published cut is fixed: a product of chain_mm is 16 tasks and 8 sums of two, one of
  transformer_block 4 tasks. Ours are cut for the cluster, into up to 4 tasks per device and
  operation where that ends sooner in simulation.
"""


def main(settings: PartitionSettings) -> None:
    """Compares, prints, and writes the tables."""
    comparisons = []
    for name in settings.workloads or list_workloads():
        for preset in ("small",) if settings.quick else ("small", "paper"):
            workload = dj.make_workload(name, preset)
            for cluster in settings.clusters or preset_clusters():
                comparisons.append(compare(workload, preset, cluster))
    ours = compare_published()
    tables = [comparison_table(comparisons), published_table(ours)]
    titles = ["Planner against uniform partitions", "Published graphs and ours, 4 devices"]
    for title, (columns, rows) in zip(titles, tables, strict=True):
        print_table(title, columns, rows)
    print(DIFFERENCES)
    settings.runs.mkdir(parents=True, exist_ok=True)
    origin = provenance()
    result = {
        "provenance": origin,
        "comparisons": [dataclasses.asdict(comparison) for comparison in comparisons],
        "published": [dataclasses.asdict(published) for published in PUBLISHED],
        "ours": [dataclasses.asdict(comparison) for comparison in ours],
    }
    write_json_atomic(settings.runs / "partitions.json", result)
    sections = [
        f"## {title}\n\n{format_table(columns, rows)}"
        for title, (columns, rows) in zip(titles, tables, strict=True)
    ]
    made = ", ".join(f"{key} {value}" for key, value in origin.items())
    text = "\n".join([*sections, DIFFERENCES, f"Made by `experiments.partitions`: {made}.\n"])
    (settings.runs / "partitions.md").write_text(text)


def preset_clusters() -> list[str]:
    """Returns the named clusters whose figures do not depend on this machine."""
    return [name for name in list_clusters() if name != "host"]


def compare(workload: Workload, preset: str, cluster_name: str) -> Comparison:
    """Returns the figures of a workload on a preset cluster, by strategy."""
    cluster = dj.make_cluster(cluster_name)
    return Comparison(
        workload=workload.name,
        preset=preset,
        cluster=cluster_name,
        by_strategy={strategy: measure(workload, cluster, strategy) for strategy in STRATEGIES},
    )


def measure(workload: Workload, cluster: dj.Cluster, strategy: str) -> Figures:
    """Returns the figures of a workload cut for a cluster's devices by one strategy."""
    began = time.perf_counter()
    num_shards = 1 << (cluster.num_devices - 1).bit_length()
    program = dj.trace(workload.fn, *workload.args)
    sharded = dj.partition(program, num_shards, strategy=strategy, cluster=cluster)
    partition_s = time.perf_counter() - began
    graph = sharded.graph
    costs = dj.make_costs(graph, cluster)
    schedule = dj.simulate_oracle(graph, costs, critical_path(graph, costs))
    summary = summarize(graph, cluster)
    return Figures(
        tasks=summary.num_tasks,
        edges=summary.num_edges,
        flops=summary.flops,
        made_bytes=float(graph.tensor_bytes.sum()),
        moved_bytes=moved_bytes(graph, schedule),
        makespan_s=makespan_s(schedule),
        parallelism=summary.parallelism,
        partition_s=partition_s,
    )


def moved_bytes(graph: dj.TaskGraph, schedule: dj.Schedule) -> float:
    """Returns the bytes that the transfers of a schedule carry."""
    sizes = np.concatenate([graph.tensor_bytes, graph.input_bytes[::-1]])  # input i is ~i
    return float(sizes[schedule.transfer_tensor].sum())


def compare_published() -> list[Comparison]:
    """Returns our figures for the workloads that the paper publishes graphs of."""
    return [
        compare(dj.make_workload(published.workload, "paper"), "paper", PUBLISHED_CLUSTER)
        for published in PUBLISHED
    ]


Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def comparison_table(comparisons: list[Comparison]) -> Table:
    """Returns columns and rows: uniform's figure and the planner's, side by side."""
    columns: tuple[str, ...] = (
        "workload",
        "cluster",
        "tasks",
        "edges",
        "moved (MB)",
        "parallelism",
        "makespan",
        "ratio",
        "planned in",
    )
    rows: list[tuple[str, ...]] = []
    for comparison in comparisons:
        both = [comparison.by_strategy[strategy] for strategy in STRATEGIES]
        rows.append(
            (
                f"{comparison.workload}, {comparison.preset}",
                comparison.cluster,
                " / ".join(f"{figures.tasks:,}" for figures in both),
                " / ".join(f"{figures.edges:,}" for figures in both),
                " / ".join(f"{figures.moved_bytes / 1e6:,.4g}" for figures in both),
                " / ".join(f"{figures.parallelism:.3g}" for figures in both),
                " / ".join(format_seconds(figures.makespan_s, 3) for figures in both),
                f"{comparison.ratio:.3f}",
                format_seconds(both[-1].partition_s, 3),
            )
        )
    return columns, rows


def published_table(ours: list[Comparison]) -> Table:
    """Returns columns and rows: a published graph, then ours by strategy."""
    columns: tuple[str, ...] = ("graph", "tasks", "edges", "compute", "communication")
    rows: list[tuple[str, ...]] = []
    for published, comparison in zip(PUBLISHED, ours, strict=True):
        rows.append(
            (
                f"{published.graph}, published",
                f"{published.tasks}",
                f"{published.edges}",
                f"{published.compute:.4g}",
                f"{published.communication:.4g}",
            )
        )
        for strategy, figures in comparison.by_strategy.items():
            rows.append(
                (
                    f"{published.workload}, {strategy}",
                    f"{figures.tasks}",
                    f"{figures.edges}",
                    f"{figures.flops:.4g} flops",
                    f"{figures.made_bytes:.4g} bytes",
                )
            )
    return columns, rows


if __name__ == "__main__":
    cli.run(main, PartitionSettings, "Partitions: planner against uniform, ours and published.")
