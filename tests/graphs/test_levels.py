import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.costs.build import from_edge_delays
from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.levels import mean_compute_s, mean_transfer_s
from doppler_jax.graphs.relatives import DAMPING, HOPS, NUM_RELATIVES, nearest_relatives
from tests.generators import random_problem


def chain_problem(**changes):
    """Two tasks, 8 bytes between them, two devices; link 0 -> 1 is slower than 1 -> 0."""
    graph, costs = dj.from_edge_delays([2.0, 3.0], [(0, 1, 8.0)], num_devices=2)
    links = {
        "latency_s": [[0.0, 1.0], [3.0, 0.0]],
        "seconds_per_byte": [[0.0, 0.5], [0.25, 0.0]],
    }
    return graph, costs.replace(**{name: np.array(a) for name, a in (links | changes).items()})


def test_means_and_levels_of_two_tasks_by_hand():
    graph, costs = chain_problem()
    # Mean latency 2, mean 0.375 s per byte: 8 bytes take 5 s.
    assert mean_transfer_s(costs).tolist() == [5.0]
    assert dj.graphs.b_level(graph, costs).tolist() == [10.0, 3.0]
    assert dj.graphs.t_level(graph, costs).tolist() == [0.0, 7.0]
    _, costs = chain_problem(compute_s=[[4.0, np.inf], [1.0, 3.0]])
    assert mean_compute_s(costs).tolist() == [4.0, 2.0]
    graph, costs = dj.from_edge_delays([1.0, 1.0], [(0, 1, 9.0)], num_devices=1)
    assert mean_transfer_s(costs).tolist() == [0.0]
    assert dj.graphs.b_level(graph, costs).tolist() == [2.0, 1.0]


def test_the_largest_output_counts_and_ties_go_to_the_smaller_id():
    graph, costs = dj.from_edge_delays([1, 5, 1], [(0, 1, 2.0), (0, 2, 7.0)])
    assert dj.graphs.b_level(graph, costs).tolist() == [9.0, 5.0, 1.0]
    assert dj.graphs.b_path(graph, costs).tolist() == [2, -1, -1]
    edges = [(3, 2, 0.0), (3, 1, 0.0), (2, 0, 0.0), (1, 0, 0.0)]
    graph, costs = dj.from_edge_delays([0.0] * 4, edges)
    assert dj.graphs.b_path(graph, costs).tolist() == [-1, 0, 0, 1]
    assert dj.graphs.t_path(graph, costs).tolist() == [1, 3, 3, -1]


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 8, 12])
@pytest.mark.parametrize("seed", range(10))
def test_levels_equal_the_longest_enumerated_path(num_tasks, seed):
    rng = np.random.default_rng([seed, num_tasks])
    graph, costs = random_problem(rng, num_tasks, 3, dyadic=True)
    compute, transfer = mean_compute_s(costs), mean_transfer_s(costs)
    senders, receivers = task_edges(graph)
    hops = list(zip(senders, receivers, transfer[graph.edge_tensor], strict=True))

    def lengths_to_exit(v):
        yield compute[v]
        for u, w, seconds in hops:
            if u == v:
                yield from (compute[v] + seconds + rest for rest in lengths_to_exit(w))

    def lengths_from_entry(v):
        yield 0.0
        for u, w, seconds in hops:
            if w == v:
                yield from (rest + compute[u] + seconds for rest in lengths_from_entry(u))

    for level, lengths in (
        (dj.graphs.b_level, lengths_to_exit),
        (dj.graphs.t_level, lengths_from_entry),
    ):
        expected = [max(lengths(v)) for v in range(num_tasks)]
        np.testing.assert_allclose(level(graph, costs), expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_following_the_paths_adds_up_to_the_levels(seed):
    graph, costs = random_problem(np.random.default_rng(seed), 30, 4)
    level, head = dj.graphs.b_level(graph, costs), dj.graphs.t_level(graph, costs)
    compute, transfer = mean_compute_s(costs), mean_transfer_s(costs)
    senders, receivers = task_edges(graph)
    seconds = {}
    for u, v, x in zip(senders, receivers, graph.edge_tensor, strict=True):
        seconds[u, v] = max(seconds.get((u, v), 0.0), transfer[x])
    for v, w in enumerate(dj.graphs.b_path(graph, costs)):
        rest = 0.0 if w < 0 else seconds[v, w] + level[w]
        assert level[v] == pytest.approx(compute[v] + rest, rel=1e-12)
        assert (w < 0) == (v not in senders)
    for v, u in enumerate(dj.graphs.t_path(graph, costs)):
        before = 0.0 if u < 0 else head[u] + compute[u] + seconds[u, v]
        assert head[v] == pytest.approx(before, rel=1e-12)
        assert (u < 0) == (v not in receivers)


@pytest.mark.parametrize(
    "measure",
    [
        dj.graphs.b_level,
        dj.graphs.t_level,
        dj.graphs.b_path,
        dj.graphs.t_path,
        dj.lower_bound_s,
    ],
)
def test_costs_of_another_graph_are_refused(measure):
    graph, _ = dj.from_edge_delays([1.0, 2.0], [(0, 1, 1.0)])
    _, costs = dj.from_edge_delays([1.0, 2.0, 3.0], [(0, 1, 1.0)])
    with pytest.raises(ValueError, match="costs are of 3 tasks and 1 tensors"):
        measure(graph, costs)


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
