import dataclasses

import numpy as np
import pytest

from doppler_jax.baselines.etf import etf_schedule
from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.levels import b_level
from tests.baselines.listing_cases import arrival_s, uneven_problem, with_compute


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dyadic", [False, True])
def test_the_pair_of_earliest_start_is_next(seed, dyadic):
    graph, costs = uneven_problem(seed, 30, 3, dyadic)
    zeros = np.zeros((3, 3))
    free = dataclasses.replace(costs, latency_s=zeros, seconds_per_byte=zeros)
    level_s = b_level(graph, free)
    schedule = etf_schedule(graph, costs)
    senders, readers = task_edges(graph)
    placed, free_s = [], np.zeros(3)
    while len(placed) < graph.num_tasks:
        blocked = set(readers[~np.isin(senders, placed)].tolist()) | set(placed)
        pairs = [
            (max(free_s[d], arrival_s(graph, costs, schedule, v, d)), -level_s[v], v, d)
            for v in range(graph.num_tasks)
            for d in range(3)
            if v not in blocked and np.isfinite(costs.compute_s[v, d])
        ]
        start_s, _, v, d = min(pairs)
        assert (schedule.start_s[v], schedule.placement[v]) == (start_s, d)
        placed.append(v)
        free_s[d] = schedule.finish_s[v]


def test_equal_starts_go_to_the_larger_static_level():
    # Task 1 has 1 + 4 to follow; its transfer does not count, nor does task 0's of 9.
    graph, costs = with_compute([(0, 2, 9.0), (1, 3, 0.0)], [[1.0], [1.0], [2.0], [4.0]])
    assert etf_schedule(graph, costs).start_s.tolist() == [5.0, 0.0, 6.0, 1.0]


def test_a_free_slow_device_is_taken():
    graph, costs = with_compute([], [[1.0, 50.0], [1.0, 50.0]])
    assert etf_schedule(graph, costs).placement.tolist() == [0, 1]
