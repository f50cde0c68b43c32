import dataclasses
import itertools

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.baselines.simple import brute_force, random_placements, round_robin, single
from doppler_jax.costs.build import from_edge_delays
from doppler_jax.graphs.build import topological_order
from tests.generators import random_problem

INF = np.inf


def problem(compute_s):
    """Tasks 2 -> 0 and 1 alone, with the given costs `[N, D]`."""
    compute_s = np.array(compute_s)
    graph, costs = from_edge_delays(
        np.ones(len(compute_s)), [(2, 0, 1.0)], num_devices=compute_s.shape[1]
    )
    return graph, dataclasses.replace(costs, compute_s=compute_s)


def test_single_takes_the_device_of_least_total():
    graph, costs = problem([[1.0, 9.0, 2.0], [9.0, 1.0, 2.0], [9.0, 1.0, 2.0]])
    assert single(graph, costs).tolist() == [2, 2, 2]


def test_single_passes_by_a_device_that_cannot_run_every_task():
    graph, costs = problem([[1.0, 9.0], [INF, 9.0], [1.0, 9.0]])
    assert single(graph, costs).tolist() == [1, 1, 1]


def test_single_says_when_no_device_runs_everything():
    graph, costs = problem([[1.0, INF], [INF, 1.0], [1.0, 1.0]])
    with pytest.raises(ValueError, match="no device can run every task"):
        single(graph, costs)


def test_round_robin_deals_in_topological_order():
    rng = np.random.default_rng(0)
    graph, costs = random_problem(rng, 20, 3)
    order = topological_order(graph)
    assert order.tolist() != list(range(20))
    assert round_robin(graph, costs)[order].tolist() == [i % 3 for i in range(20)]


def test_round_robin_passes_by_devices_that_cannot_run_a_task():
    # Topological order 1, 2, 0: their turns are devices 0, 1, 2.
    graph, costs = problem([[1.0, 1.0, INF], [INF, INF, 1.0], [1.0, INF, 1.0]])
    assert topological_order(graph).tolist() == [1, 2, 0]
    assert round_robin(graph, costs).tolist() == [0, 2, 2]


def test_random_placements_are_uniform_over_the_devices_that_can():
    _, costs = problem([[1.0, 1.0, 1.0], [1.0, INF, 1.0], [INF, INF, 1.0]])
    count = 3000
    placements = random_placements(costs, np.random.default_rng(0), count)
    assert placements.shape == (count, 3)
    shares = np.stack([(placements == d).mean(axis=0) for d in range(3)], axis=1)
    expected = [[1 / 3, 1 / 3, 1 / 3], [1 / 2, 0, 1 / 2], [0, 0, 1]]
    np.testing.assert_allclose(shares, expected, atol=5 * np.sqrt(0.25 / count))
    assert shares[1, 1] == shares[2, 0] == shares[2, 1] == 0
    # Tasks are drawn independently of each other.
    both = ((placements[:, 0] == 0) & (placements[:, 1] == 0)).mean()
    np.testing.assert_allclose(both, 1 / 6, atol=5 * np.sqrt(0.25 / count))


@pytest.mark.parametrize(("seed", "num_devices"), [(0, 2), (1, 3), (2, 3)])
def test_brute_force_finds_the_best_of_all_placements(seed, num_devices):
    rng = np.random.default_rng(seed)
    graph, costs = random_problem(rng, 5, num_devices, dyadic=seed == 1)
    if seed == 2:  # devices 0 and 2 are alike, task 3 does not run on device 1
        equal = costs.compute_s[:, [0, 1, 0]]
        equal[3, 1] = np.inf
        off = 1.0 - np.eye(3)
        costs = costs.replace(compute_s=equal, latency_s=off, seconds_per_byte=0.3 * off)
        graph = graph.replace(input_home=np.full(graph.num_inputs, dj.graphs.RESIDENT))
    every = {
        placement: dj.simulator.makespan_s(
            dj.simulator.simulate_oracle(graph, costs, np.array(placement))
        )
        for placement in itertools.product(range(num_devices), repeat=5)
    }
    best = tuple(brute_force(graph, costs).tolist())
    assert best == min(
        p for p, makespan_s in every.items() if makespan_s == min(every.values())
    )


def test_brute_force_of_no_tasks_and_of_too_many():
    empty, costs = dj.from_edge_delays([], [], num_devices=3)
    assert brute_force(empty, costs).shape == (0,)
    graph, costs = dj.from_edge_delays(np.ones(21), [], num_devices=2)
    with pytest.raises(ValueError, match="21 tasks on 2 devices have more than 1048576"):
        brute_force(graph, costs)
    # In several calls; equal tasks on equal devices are split evenly.
    graph, costs = dj.from_edge_delays(np.ones(16), [], num_devices=2)
    assert brute_force(graph, costs).tolist() == [0] * 8 + [1] * 8
