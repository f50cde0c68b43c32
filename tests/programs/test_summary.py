"""The totals of a task graph, by hand."""

import numpy as np

from doppler_jax.costs.clusters import reference_cluster
from doppler_jax.graphs.build import make_graph
from doppler_jax.programs.summary import summarize


def test_totals_of_a_fork():
    # Task 0 feeds 1, 2 and 3; 1e10 flops are a second and so are 1e10 bytes.
    graph = make_graph(
        flops=[1e10, 2e10, 3e10, 4e10],
        tensor_producer=[0],
        tensor_bytes=[5e10],
        edge_tensor=[0, 0, 0],
        edge_reader=[1, 2, 3],
    )
    summary = summarize(graph, reference_cluster(3))
    assert (summary.num_tasks, summary.num_edges, summary.flops) == (4, 3, 1e11)
    assert summary.most_moved_bytes == 2 * 5e10  # two other devices, three readers
    np.testing.assert_allclose(summary.work_s, 10)
    np.testing.assert_allclose(summary.critical_path_s, 5)
    np.testing.assert_allclose(summary.parallelism, 2)
    assert summarize(graph, reference_cluster(8)).most_moved_bytes == 3 * 5e10


def test_nothing_is_no_work():
    summary = summarize(make_graph(flops=[]), reference_cluster(2))
    assert (summary.num_tasks, summary.work_s, summary.parallelism) == (0, 0.0, 0.0)
