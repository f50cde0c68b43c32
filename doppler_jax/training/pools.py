"""Pools of problems to pretrain on: drawn at random in buckets, and the best known of some."""

import dataclasses
from collections.abc import Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from chex import Array, PRNGKey

from doppler_jax.costs.clusters import make_cluster
from doppler_jax.costs.random_clusters import ClusterKind, costs_of_ccr, random_cluster
from doppler_jax.graphs.families import make_family
from doppler_jax.graphs.padded import Sizes
from doppler_jax.policies.features import PolicyInputs, make_policy_inputs
from doppler_jax.policies.stacking import pad_problem, problem_sizes, stack_problems
from doppler_jax.programs.partition import partition
from doppler_jax.programs.trace import trace
from doppler_jax.programs.workloads import list_workloads, make_workload
from doppler_jax.simulator.simulate import simulate_padded
from doppler_jax.training.state import best_of
from doppler_jax.training.tempering import RUNGS, Chains, temper
from doppler_jax.types import Costs, TaskGraph, pytree

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
        problem = make_policy_inputs(graph, costs)
        if bucket.sizes.holds(problem_sizes(problem)):
            return Drawn(source, graph, costs, pad_problem(problem, bucket.sizes))
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


ROUNDS = 20
"""Moves of every chain in one call of `search`."""


@pytree
class Pool:
    """K problems of a bucket with what is known of them."""

    problem: PolicyInputs  # [K, ...]
    best_placement: Array  # [K, N] int32
    best_s: Array  # [K]
    chain_placement: Array  # [K, C, N] int32, of a ladder of temperatures
    chain_s: Array  # [K, C]


def make_pool(drawn: list[Drawn], starts: list[np.ndarray], links: str) -> Pool:
    """Returns the pool of problems of one bucket.

    Args:
      drawn: K problems.
      starts: per problem, placements `[S, n]` to begin with, S >= 1.
      links: of what is simulated.
    """
    problem = stack_problems([one.problem for one in drawn])
    size = problem.padded.compute_s.shape[1] - 1
    chains = np.zeros((len(drawn), RUNGS, size), np.int32)
    for chain, start in zip(chains, starts, strict=True):
        chain[:, : start.shape[1]] = np.resize(start, (RUNGS, start.shape[1]))
    chain_s = np.asarray(_simulate(problem, chains, links))
    best = chain_s.argmin(1)
    return Pool(
        problem=problem,
        best_placement=chains[np.arange(len(drawn)), best],
        best_s=chain_s.min(1),
        chain_placement=chains,
        chain_s=chain_s,
    )


@partial(jax.jit, static_argnames="links")
def _simulate(problem: PolicyInputs, placements: Array, links: str) -> Array:
    def one(entry: tuple[PolicyInputs, Array]) -> Array:
        return simulate_padded(entry[0].padded, entry[1], links=links).makespan_s

    return jax.lax.map(one, (problem, placements))


@partial(jax.jit, static_argnames="links")
def search(key: PRNGKey, pool: Pool, links: str) -> Pool:
    """Returns the entries after `ROUNDS` of tempering each; the key is consumed.

    What is best so far is proposed to the coldest chains.
    """
    number = jnp.arange(RUNGS, dtype=jnp.int32)

    def one(inputs: tuple[PRNGKey, Pool]) -> Pool:
        key, entry = inputs
        size = entry.best_placement.shape[0]
        # To the coldest rungs alone: the others are to find something else.
        cold = number >= RUNGS - RUNGS // 4
        known = Chains(
            placement=jnp.broadcast_to(entry.best_placement[None], (RUNGS, size)),
            makespan_s=jnp.where(cold, entry.best_s, jnp.inf),
        )
        chains = Chains(placement=entry.chain_placement, makespan_s=entry.chain_s)
        chains, met = temper(
            key, entry.problem.padded, number, chains, known, entry.best_s, ROUNDS, links
        )
        best, best_s = best_of(
            entry.best_placement, entry.best_s, met.placement, met.makespan_s
        )
        return dataclasses.replace(
            entry,
            best_placement=best,
            best_s=best_s,
            chain_placement=chains.placement,
            chain_s=chains.makespan_s,
        )

    count = pool.best_s.shape[0]
    return jax.lax.map(one, (jax.random.split(key, count), pool))
