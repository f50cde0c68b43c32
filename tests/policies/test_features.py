import numpy as np
import pytest

from doppler_jax.costs.build import from_edge_delays
from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.levels import b_level, b_path, t_level, t_path
from doppler_jax.policies.features import make_policy_inputs
from tests.generators import free_costs, small_graph
from tests.policies import reference
from tests.policies.cases import CONFIG, DEVICES, SIZES, apply, case, padded_problem, params


def expected_features(graph, costs):
    """Static features `[N, 5]` by plain loops."""
    senders, receivers = task_edges(graph)
    sent = [reference.mean_transfer_s(costs, b) for b in costs.tensor_bytes[graph.edge_tensor]]
    unit_s = reference.time_unit_s(graph, costs)
    level_s = b_level(graph, costs)
    rows = []
    for v in range(graph.num_tasks):
        compute_s = costs.compute_s[v][np.isfinite(costs.compute_s[v])].mean()
        into_s = sum(s for s, r in zip(sent, receivers, strict=True) if r == v)
        out_s = sum(s for s, u in zip(sent, senders, strict=True) if u == v)
        shares = [level_s[v] / level_s.max(), t_level(graph, costs)[v] / level_s.max()]
        rows.append([*np.log1p(np.array([compute_s, into_s, out_s]) / unit_s), *shares])
    return np.array(rows).reshape(-1, 5), np.log1p(np.array(sent) / unit_s)


@pytest.mark.parametrize("num_tasks", SIZES)
def test_static_features_equal_a_plain_recomputation(num_tasks):
    graph, costs, problem = case(num_tasks)
    features, edge_features = expected_features(graph, costs)
    np.testing.assert_allclose(problem.task_features[:num_tasks], features, rtol=1e-6)
    assert (np.asarray(problem.task_features)[num_tasks:] == 0).all()
    e = graph.num_edges
    np.testing.assert_allclose(problem.edge_features[:e, 0], edge_features, rtol=1e-6)
    np.testing.assert_allclose(problem.unit_s, reference.time_unit_s(graph, costs), rtol=1e-6)


@pytest.mark.parametrize("num_tasks", SIZES)
def test_edges_paths_and_orders(num_tasks):
    graph, costs, problem = case(num_tasks)
    nobody = problem.padded.padded_tasks
    ends = np.stack([problem.edge_sender, problem.edge_receiver])
    np.testing.assert_array_equal(ends[:, : graph.num_edges], task_edges(graph))
    assert (ends[:, graph.num_edges :] == nobody).all()
    paths = b_path(graph, costs), t_path(graph, costs)
    for padded, path in zip(
        (problem.next_on_b_path, problem.next_on_t_path), paths, strict=True
    ):
        np.testing.assert_array_equal(padded[:num_tasks], np.where(path < 0, nobody, path))
        assert (np.asarray(padded)[num_tasks:] == nobody).all()
    senders, receivers = task_edges(graph)
    rank = np.asarray(problem.topological_rank)
    assert (rank[senders] < rank[receivers]).all()
    assert sorted(rank[:num_tasks]) == list(range(num_tasks))
    assert (rank[num_tasks:] == nobody).all()
    order = np.argsort(b_level(graph, costs), kind="stable")
    np.testing.assert_array_equal(np.asarray(problem.b_rank)[order], np.arange(num_tasks))


def test_b_levels_that_differ_by_rounding_have_one_rank():
    # 0.1 + 0.2 is not 0.3 in floating point; the tasks are 0 -> 1, 2 and 3.
    graph, costs = from_edge_delays([0.1, 0.2, 0.3, 0.4], [(0, 1, 0.0)])
    assert b_level(graph, costs)[0] != b_level(graph, costs)[2]
    assert make_policy_inputs(graph, costs).b_rank[:4].tolist() == [1, 0, 1, 2]


def test_no_cost_and_one_device_have_finite_features():
    graph = small_graph([0, 0], [(0, 0, [1])])
    problem = make_policy_inputs(graph, free_costs(graph, np.zeros((2, 2))))
    assert (np.asarray(problem.task_features) == 0).all()
    assert problem.unit_s == 1.0
    graph, costs = from_edge_delays([1.0, 2.0], [(0, 1, 5.0)], num_devices=1)
    problem = make_policy_inputs(graph, costs)
    assert (np.asarray(problem.edge_features) == 0).all()
    np.testing.assert_allclose(problem.unit_s, 1.5)


def rows_that_change(problem, **changes):
    before, after = (
        np.asarray(apply(params(), p).place.member)
        for p in (problem, problem.replace(**changes))
    )
    return np.flatnonzero(np.abs(after - before).max(axis=1) > 1e-6).tolist()


def test_every_round_carries_features_one_edge_further_both_ways_and_edges_matter():
    edges = [(v, v + 1, 1.0) for v in range(7)]
    graph, costs = from_edge_delays(np.arange(1.0, 9.0), edges, num_devices=DEVICES)
    problem = padded_problem(graph, costs)
    features = np.array(problem.task_features)
    features[4] += 0.1
    assert CONFIG.rounds == 2
    assert rows_that_change(problem, task_features=features) == [2, 3, 4, 5, 6]
    graph, costs = from_edge_delays(np.ones(4), [(0, 1, 1.0), (2, 3, 1.0)], num_devices=DEVICES)
    problem = padded_problem(graph, costs)
    edge_features = np.array(problem.edge_features)
    edge_features[1] += 0.5
    assert rows_that_change(problem, edge_features=edge_features) == [2, 3]
