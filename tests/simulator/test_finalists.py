import dataclasses

import numpy as np
import pytest

from doppler_jax.costs.build import from_edge_delays
from doppler_jax.graphs.build import topological_order
from doppler_jax.simulator.finalists import NUM_FINALISTS, best_placement, start_order
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from tests.generators import random_problem


def topological_rank(graph):
    rank = np.empty(graph.num_tasks, np.int64)
    rank[topological_order(graph)] = np.arange(graph.num_tasks)
    return rank


@pytest.mark.parametrize("count", [1, NUM_FINALISTS, NUM_FINALISTS + 1, 120])
def test_agrees_with_the_oracle_on_all(count):
    rng = np.random.default_rng(count)
    for dyadic in (True, False):
        for num_tasks in (1, 7, 24):
            graph, costs = random_problem(rng, num_tasks, 3, dyadic=dyadic)
            placements = rng.integers(0, 3, (count, num_tasks))
            makespans = [makespan_s(simulate_oracle(graph, costs, p)) for p in placements]
            placement, schedule = best_placement(graph, costs, placements)
            assert makespan_s(schedule) == min(makespans)
            assert makespan_s(simulate_oracle(graph, costs, placement)) == makespan_s(schedule)
            if dyadic:
                first = int(np.argmin(makespans))
                np.testing.assert_array_equal(placement, placements[first])


def test_what_float32_cannot_tell_apart_counts():
    # In float32 the tiny tasks vanish beside the huge one and all placements tie.
    graph, costs = from_edge_delays([1e9, 1.0, 1.0, 1.0], [], 2)
    placements = np.array([[0, 0, 0, 0]] * 10 + [[0, 1, 1, 0]] * 9 + [[0, 1, 1, 1]])
    placement, schedule = best_placement(graph, costs, placements)
    assert placement.tolist() == [0, 1, 1, 1]
    assert makespan_s(schedule) == 1e9


def test_ties_go_to_the_earlier_placement():
    graph, costs = from_edge_delays([1.0, 1.0], [], 2)
    for count in (2, NUM_FINALISTS + 4):
        placements = np.array([[0, 1], [1, 0]] * (count // 2))
        assert best_placement(graph, costs, placements)[0].tolist() == [0, 1]


@pytest.mark.parametrize("copies", [1, NUM_FINALISTS])
def test_links_count(copies):
    # Two tensors of 6 s follow each other over a link: the second arrives at 14, or at 16.
    graph, costs = from_edge_delays([4.0, 4.0, 1.0, 1.0], [(0, 2, 6.0), (1, 3, 6.0)], 2)
    costs = dataclasses.replace(costs, compute_s=costs.compute_s * [1.0, 1.6])
    placements = np.array([[0, 0, 1, 1], [1, 1, 1, 1]] * copies)
    for links, device, expected_s in (("parallel", 0, 15.6), ("serial", 1, 16.0)):
        placement, schedule = best_placement(graph, costs, placements, links)
        assert placement[0] == device
        assert makespan_s(schedule) == pytest.approx(expected_s, rel=1e-12)


def test_no_tasks():
    graph, costs = random_problem(np.random.default_rng(0), 0, 2)
    placement, schedule = best_placement(graph, costs, np.zeros((1, 0), int))
    assert placement.shape == (0,)
    assert makespan_s(schedule) == 0
    assert start_order(schedule, topological_rank(graph)).shape == (0,)


@pytest.mark.parametrize("dyadic", [True, False])
def test_start_order_replays_fifo_under_priority(dyadic):
    rng = np.random.default_rng(8)
    for _ in range(300):
        num_devices = int(rng.integers(1, 5))
        graph, costs = random_problem(rng, int(rng.integers(1, 20)), num_devices, dyadic=dyadic)
        placement = rng.integers(0, num_devices, graph.num_tasks)
        fifo = simulate_oracle(graph, costs, placement)
        rank = start_order(fifo, topological_rank(graph))
        replayed = simulate_oracle(graph, costs, placement, queue="priority", priority=rank)
        np.testing.assert_array_equal(replayed.start_s, fifo.start_s)


def test_start_order_of_a_task_without_length():
    # At 3 the device starts task 4, ready since 1 and of no length, and task 3 after it;
    # topologically 3 comes first, and in that order 4 would wait until 4.
    graph, costs = from_edge_delays([1, 1, 1, 1, 0], [(0, 4, 0), (1, 3, 0)], 1)
    fifo = simulate_oracle(graph, costs, np.zeros(5, int))
    np.testing.assert_array_equal(fifo.start_s, [0, 1, 2, 3, 3])
    rank = start_order(fifo, topological_rank(graph))
    assert rank.tolist() == [0, 1, 2, 4, 3]


def test_start_order_is_topological_among_equal_times():
    # 2 -> 1 -> 0, all of no length and at time 0.
    graph, costs = from_edge_delays([0, 0, 0], [(2, 1, 0), (1, 0, 0)], 2)
    fifo = simulate_oracle(graph, costs, np.array([0, 1, 0]))
    assert start_order(fifo, topological_rank(graph)).tolist() == [2, 1, 0]
