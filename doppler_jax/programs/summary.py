"""A task graph in a few numbers: how much work, how much to move, how parallel."""

import dataclasses

import numpy as np

from doppler_jax.costs.build import make_costs
from doppler_jax.graphs.levels import b_level, mean_compute_s
from doppler_jax.types import Cluster, TaskGraph


@dataclasses.dataclass(frozen=True)
class Summary:
    """The totals of a task graph on a cluster, whatever the placement."""

    num_tasks: int
    num_edges: int
    flops: float
    most_moved_bytes: float  # if every reader is on another device than its producer
    work_s: float  # of all tasks, each at the mean of its roofline times
    critical_path_s: float  # longest path of those times, transfers left out

    @property
    def parallelism(self) -> float:
        """How many devices the work could keep busy: total work over critical path."""
        return self.work_s / self.critical_path_s if self.critical_path_s else 0.0


def summarize(graph: TaskGraph, cluster: Cluster) -> Summary:
    """Returns the totals of a task graph.

    Raises:
      ValueError: the cluster is not one.
    """
    costs = make_costs(graph, cluster)
    d = cluster.num_devices
    at_once = dataclasses.replace(
        costs, latency_s=np.zeros((d, d)), seconds_per_byte=np.zeros((d, d))
    )
    readers = np.bincount(graph.edge_tensor, minlength=graph.num_tensors)
    return Summary(
        num_tasks=graph.num_tasks,
        num_edges=graph.num_edges,
        flops=float(graph.flops.sum()),
        most_moved_bytes=float((np.minimum(readers, d - 1) * graph.tensor_bytes).sum()),
        work_s=float(mean_compute_s(costs).sum()),
        critical_path_s=float(b_level(graph, at_once).max(initial=0.0)),
    )
