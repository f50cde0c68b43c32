import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.baselines.critical_path import critical_path
from tests.baselines.listing_cases import frontier_order
from tests.generators import with_own_inputs
from tests.policies import reference
from tests.policies.cases import SIZES, case, keys, padded_problem, teach


@pytest.mark.parametrize("num_tasks", SIZES)
def test_every_task_takes_the_first_device_of_earliest_start(num_tasks):
    graph, costs, _ = case(num_tasks)
    placement = critical_path(graph, costs)
    assert placement.shape == (num_tasks,)
    tasks = frontier_order(graph, dj.graphs.b_level(graph, costs))
    for step in reference.steps(graph, costs, tasks, placement[tasks]):
        assert step.device == np.argmin(step.est_s)


def test_a_case_by_hand():
    # Task 0 goes to device 0 and ends at 3. Task 1 could start there at 3 and elsewhere at
    # 3 + 2; then task 2 there at 5, elsewhere at 3 + 1. Task 3 fills the idle device 2.
    edges = [(0, 1, 2.0), (0, 2, 1.0)]
    graph, costs = dj.from_edge_delays([3.0, 2.0, 2.0, 1.0], edges, num_devices=3)
    assert dj.graphs.b_level(graph, costs).tolist() == [7.0, 2.0, 2.0, 1.0]
    assert critical_path(graph, costs).tolist() == [0, 0, 1, 2]


def test_ties_go_to_the_smaller_task_and_device():
    graph, costs = dj.from_edge_delays([1.0, 1.0, 1.0], [], num_devices=2)
    assert critical_path(graph, costs).tolist() == [0, 1, 0]


@pytest.mark.parametrize("num_tasks", [1, 2, 8, 24])
def test_without_ties_the_teacher_places_alike(num_tasks):
    graph, costs = with_own_inputs(np.random.default_rng(num_tasks), *case(num_tasks)[:2])
    expected = critical_path(graph, costs)
    for placement in np.asarray(teach(keys(), padded_problem(graph, costs)).placement):
        np.testing.assert_array_equal(placement[:num_tasks], expected)
