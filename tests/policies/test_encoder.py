import numpy as np

from doppler_jax.costs.build import from_edge_delays
from tests.policies.cases import CONFIG, DEVICES, apply, padded_problem, params


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
