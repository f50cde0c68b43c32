"""Problems to pretrain on: drawn at random in buckets, and the best known of some."""

import dataclasses
from collections.abc import Sequence
from functools import cache

import numpy as np

from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.costs.clusters import make_cluster
from doppler_jax.costs.random_clusters import ClusterKind, costs_of_ccr, random_cluster
from doppler_jax.graphs.families import make_family
from doppler_jax.graphs.padded import Sizes, needed_sizes
from doppler_jax.objective import Objective
from doppler_jax.policies.features import PolicyInputs, make_policy_inputs
from doppler_jax.programs.partition import partition
from doppler_jax.programs.trace import trace
from doppler_jax.programs.workloads import list_workloads, make_workload
from doppler_jax.search.anytime import run_search
from doppler_jax.search.lns import LNS
from doppler_jax.search.problem import SearchProblem
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.simulator.oracle import makespan_s
from doppler_jax.types import Costs, Plans, TaskGraph

WORKLOADS = "workload"
"""The source that draws from the registry's workloads, traced and cut."""

TRAINED = (
    "tensor_program",
    "tensor_program",
    WORKLOADS,
    WORKLOADS,
    "layered",
    "fork_join",
    "lu",
    "random_dag",
    "stencil",
    "butterfly",
    "tree",
)
"""Sources of the problems to train on; one named twice is drawn twice as often."""

CCR = (0.1, 10.0)
"""Least and largest ratio of communication to computation; its logarithm is uniform."""

TRIES = 50
"""Draws of a problem that fits a bucket, before it counts as impossible."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Problems that share a compilation: all are padded to the same sizes."""

    sizes: Sizes
    least_tasks: int
    share: float  # of the updates
    links: str = "parallel"

    @property
    def name(self) -> str:
        return f"{self.sizes.tasks}x{self.sizes.devices}{'s' * (self.links == 'serial')}"


BUCKETS = {
    bucket.name: bucket
    for bucket in (
        Bucket(Sizes(64, 192, 16, 16, 64, 8), least_tasks=16, share=2.0),
        Bucket(Sizes(128, 320, 16, 16, 64, 4), least_tasks=40, share=2.0),
        Bucket(Sizes(128, 320, 16, 16, 64, 8), least_tasks=40, share=2.0),
        Bucket(Sizes(128, 320, 16, 16, 64, 4), least_tasks=40, share=1.0, links="serial"),
        Bucket(Sizes(128, 320, 16, 16, 64, 16), least_tasks=40, share=1.0),
        Bucket(Sizes(256, 640, 24, 24, 96, 4), least_tasks=120, share=1.5),
        Bucket(Sizes(256, 640, 24, 24, 96, 8), least_tasks=120, share=1.0),
        Bucket(Sizes(1024, 2560, 32, 32, 192, 8), least_tasks=400, share=0.1),
    )
}
"""Buckets to train on, by name."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A problem of the stream."""

    source: str  # its family, or the workload
    graph: TaskGraph
    costs: Costs
    problem: PolicyInputs  # padded to the bucket


def draw_problems(
    rng: np.random.Generator, bucket: Bucket, sources: Sequence[str], count: int
) -> list[Drawn]:
    """Returns problems of a bucket, the sources in turn.

    Raises:
      ValueError: a source is unknown, or has nothing that fits the bucket.
    """
    return [_draw(rng, bucket, sources[i % len(sources)]) for i in range(count)]


def _draw(rng: np.random.Generator, bucket: Bucket, source: str) -> Drawn:
    most, devices = bucket.sizes.tasks, bucket.sizes.devices
    for _ in range(TRIES):
        graph = _draw_graph(rng, source, bucket.least_tasks, most)
        if not bucket.least_tasks <= graph.num_tasks <= most:
            continue
        count = int(rng.integers(2 if devices <= 4 else devices // 2 + 1, devices + 1))
        kind = ClusterKind(
            num_devices=count,
            is_unequal=bool(rng.random() < 0.4),
            num_islands=2 if count >= 4 and rng.random() < 0.3 else 1,
        )
        ccr = float(np.exp(rng.uniform(*np.log(CCR))))
        latency_share = 0.2 if rng.random() < 0.2 else 0.0
        costs = costs_of_ccr(graph, random_cluster(rng, kind), ccr, latency_share)
        if bucket.sizes.holds(needed_sizes(graph, costs)):
            return Drawn(source, graph, costs, make_policy_inputs(graph, costs, bucket.sizes))
    raise ValueError(f"{source}: {TRIES} draws, and none fits {bucket.sizes}")


def _draw_graph(rng: np.random.Generator, source: str, least: int, most: int) -> TaskGraph:
    if source != WORKLOADS:
        wanted = int(np.exp(rng.uniform(np.log(max(least, 4)), np.log(most))))
        return make_family(source, rng, wanted)
    fitting = [g for g in workload_graphs() if least <= g.num_tasks <= most]
    if not fitting:
        raise ValueError(f"no workload has {least} to {most} tasks")
    return fitting[int(rng.integers(len(fitting)))]


@cache
def workload_graphs() -> tuple[TaskGraph, ...]:
    """Returns the registry's workloads, small, cut in several ways."""
    cluster = make_cluster("p100x4")
    graphs = []
    for name in list_workloads():
        for preset in ("small", "medium"):
            workload = make_workload(name, preset)
            program = trace(workload.fn, *workload.args)
            cuts = [(shards, "uniform") for shards in (2, 4, 8)] + [(4, "planner")]
            for shards, strategy in cuts:
                cut = partition(program, shards, strategy=strategy, cluster=cluster)
                graphs.append(cut.graph)
    return tuple(graphs)


def best_known_s(
    drawn: Drawn, starts: np.ndarray, seed: int, links: str, evaluations: int
) -> float:
    """Returns the shortest makespan that a search from placements `[S, n]` finds, or theirs.

    Args:
      drawn: the problem.
      starts: to search from.
      seed: of the search.
      links: of what is simulated.
      evaluations: simulations of the search.
    """
    found = run_search(
        LNS(),
        SearchProblem(drawn.graph, drawn.costs, Objective(links)),
        Plans(starts, starts[:0]),
        seed,
        Budget(evaluations=evaluations),
        CurveRecorder(),
    )
    candidates = np.concatenate([starts, found.placements])
    return makespan_s(best_placement(drawn.graph, drawn.costs, candidates, links)[1])
