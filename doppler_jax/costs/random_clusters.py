"""Random clusters, and costs of a wanted communication-to-computation ratio (CCR) on them."""

import dataclasses

import numpy as np

from doppler_jax.costs.build import make_costs
from doppler_jax.graphs.levels import mean_compute_s, mean_transfer_s
from doppler_jax.types import Cluster, Costs, TaskGraph


@dataclasses.dataclass(frozen=True)
class ClusterKind:
    """What a random cluster is like."""

    num_devices: int
    is_unequal: bool = False  # speeds uniform in [1/3, 1] of the fastest, else equal
    num_islands: int = 1  # links between islands are 3 to 10 times as slow as within


def random_cluster(rng: np.random.Generator, kind: ClusterKind) -> Cluster:
    """Returns a cluster of a kind: speeds and links around 1, no latency, ample memory.

    Raises:
      ValueError: fewer than one device, or not from one to as many islands as devices.
    """
    count = kind.num_devices
    if not 1 <= kind.num_islands <= count:
        raise ValueError(f"num_islands is {kind.num_islands}; expected 1 to {count}")
    speed = rng.uniform(1 / 3, 1.0, count) if kind.is_unequal else np.ones(count)
    island = np.arange(count) * kind.num_islands // count
    across = island[:, None] != island[None, :]
    slower = float(rng.uniform(3.0, 10.0))
    rates = np.where(across, 1.0 / slower, 1.0)
    np.fill_diagonal(rates, np.inf)
    return Cluster(flops_per_s=speed, link_bytes_per_s=rates)


def costs_of_ccr(
    graph: TaskGraph, cluster: Cluster, ccr: float, latency_share: float = 0.0
) -> Costs:
    """Returns the costs on a cluster, all transfers slowed or sped up to a given CCR.

    CCR here is the mean transfer time of an edge over the mean compute time of a task, both
    means over devices; with two devices or more and edges of positive size it is met.

    Args:
      graph: the task graph.
      cluster: its costs before; what its latencies are is replaced.
      ccr: the wanted ratio.
      latency_share: of the mean transfer time, that is the same for every size.
    """
    costs = make_costs(graph, dataclasses.replace(cluster, latency_s=0.0 * cluster.latency_s))
    transfer_s = mean_transfer_s(costs)[graph.edge_tensor]
    if not transfer_s.size or transfer_s.mean() == 0:
        return costs
    wanted_s = ccr * float(mean_compute_s(costs).mean())
    factor = (1 - latency_share) * wanted_s / float(transfer_s.mean())
    latency_s = latency_share * wanted_s * (1.0 - np.eye(costs.num_devices))
    return dataclasses.replace(
        costs, seconds_per_byte=costs.seconds_per_byte * factor, latency_s=latency_s
    )
