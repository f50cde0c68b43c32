import numpy as np
import pytest

from doppler_jax.costs.build import from_edge_delays
from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.levels import mean_transfer_s
from doppler_jax.graphs.relatives import DAMPING, HOPS, NUM_RELATIVES, nearest_relatives
from tests.generators import random_problem


def dense_relatives(graph, costs):
    """How related all tasks are, `[N, N]` as sums of powers, nothing left out."""
    n = graph.num_tasks
    senders, receivers = task_edges(graph)
    mean_s = mean_transfer_s(costs)
    weight = np.zeros((n, n))
    np.add.at(weight, (senders, receivers), mean_s[graph.edge_tensor] + 1e-3 * mean_s.mean())
    weight = weight + weight.T
    total = np.where(weight.sum(1) > 0, weight.sum(1), 1.0)
    weight = DAMPING * weight / np.sqrt(total[:, None] * total[None])
    related = sum(np.linalg.matrix_power(weight, k) for k in range(HOPS + 1))
    np.fill_diagonal(related, 0)
    return related


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 8, 24])
def test_relatives_of_small_graphs_equal_a_dense_computation(num_tasks):
    graph, costs = random_problem(np.random.default_rng(num_tasks), num_tasks, 3)
    task, weight = nearest_relatives(graph, costs)
    assert task.shape == weight.shape == (num_tasks, NUM_RELATIVES)
    found = np.zeros((num_tasks, num_tasks + 1))
    np.add.at(found, (np.arange(num_tasks)[:, None], task), weight)
    expected = dense_relatives(graph, costs) if num_tasks else np.zeros((0, 0))
    total = expected.sum(1, keepdims=True)
    expected = expected / np.where(total > 0, total, 1.0)
    np.testing.assert_allclose(found[:, :-1], expected, atol=1e-7)
    assert (weight[task < 0] == 0).all()


def test_only_the_strongest_are_kept_and_none_where_nothing_moves():
    # A star: its centre is related to every leaf, more to those it exchanges more with.
    leaves = 2 * NUM_RELATIVES
    edges = [(0, v, float(v)) for v in range(1, leaves + 1)]
    task, weight = nearest_relatives(*from_edge_delays([1.0] * (leaves + 1), edges))
    assert task[0].tolist() == list(range(leaves, leaves - NUM_RELATIVES, -1))
    assert (np.diff(weight[0]) <= 0).all()
    np.testing.assert_allclose(weight.sum(1), 1.0)
    task, weight = nearest_relatives(*from_edge_delays([1.0, 1.0], [(0, 1, 0.0)]))
    assert (task == -1).all()
    assert (weight == 0).all()
