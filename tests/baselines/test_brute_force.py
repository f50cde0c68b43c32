"""All placements of small graphs, and which devices may be exchanged."""

import itertools

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.baselines.brute_force import brute_force
from doppler_jax.baselines.exact_model import device_classes, first_use_order
from tests.generators import random_problem


@pytest.mark.parametrize(("seed", "num_devices"), [(0, 2), (1, 3), (2, 3)])
def test_it_is_the_best_of_all_placements(seed, num_devices):
    rng = np.random.default_rng(seed)
    graph, costs = random_problem(rng, 5, num_devices, dyadic=seed == 1)
    if seed == 2:  # devices 0 and 2 are alike, task 3 does not run on device 1
        equal = costs.compute_s[:, [0, 1, 0]]
        equal[3, 1] = np.inf
        off = 1.0 - np.eye(3)
        costs = costs.replace(compute_s=equal, latency_s=off, seconds_per_byte=0.3 * off)
        graph = graph.replace(input_home=np.full(graph.num_inputs, dj.RESIDENT))
        assert device_classes(graph, costs) == [[0, 2], [1]]
    every = {
        placement: dj.makespan_s(dj.simulate_oracle(graph, costs, np.array(placement)))
        for placement in itertools.product(range(num_devices), repeat=5)
    }
    result = brute_force(graph, costs)
    assert result.makespan_s == min(every.values()) == every[tuple(result.placement)]
    if seed == 2:
        able = [p for p in every if p[3] != 1]
        alone = [p for p in able if set(p) == {1}]  # none: task 3 cannot
        assert result.evaluations == len(able) / 2 + len(alone)


def test_of_equal_devices_one_order_is_simulated():
    graph, costs = dj.from_edge_delays(np.arange(1.0, 9.0), [], num_devices=2)
    result = brute_force(graph, costs)
    assert result.evaluations == 2**7
    assert result.makespan_s == 18.0
    assert result.placement[0] == 0


def test_no_tasks_and_too_many():
    empty, costs = dj.from_edge_delays([], [], num_devices=3)
    assert brute_force(empty, costs).makespan_s == 0
    graph, costs = dj.from_edge_delays(np.ones(21), [], num_devices=2)
    with pytest.raises(ValueError, match="21 tasks on 2 devices have more than 1048576"):
        brute_force(graph, costs)


def test_what_makes_devices_different():
    graph, costs = dj.from_edge_delays([1, 2], [(0, 1, 1)], num_devices=4)
    assert device_classes(graph, costs) == [[0, 1, 2, 3]]
    slower = costs.compute_s.copy()
    slower[1, 2] = 3
    assert device_classes(graph, costs.replace(compute_s=slower)) == [[0, 1, 3], [2]]
    link = costs.latency_s.copy()
    link[0, 1] = 1
    assert device_classes(graph, costs.replace(latency_s=link)) == [[0], [1], [2, 3]]
    islands = costs.latency_s.copy()
    islands[:2, 2:] = islands[2:, :2] = 1
    assert device_classes(graph, costs.replace(latency_s=islands)) == [[0, 1], [2, 3]]
    memory = np.array([1.0, np.inf, 1.0, np.inf])
    assert device_classes(graph, costs.replace(capacity_bytes=memory)) == [[0, 2], [1, 3]]
    homed = dj.make_graph(
        flops=[1, 2],
        input_bytes=[1, 1],
        input_home=[2, 1],
        input_edge_input=[0],
        input_edge_reader=[1],
    )
    costs = costs.replace(tensor_bytes=np.zeros(0), input_bytes=homed.input_bytes)
    # The second input is read by nobody, so that its home does not matter.
    assert device_classes(homed, costs) == [[0, 1, 3], [2]]


def test_renaming_by_first_use():
    placement = np.array([3, 1, 0, 3, 2])
    renamed = first_use_order(placement, [[0, 1, 3], [2]], np.array([4, 1, 0, 2, 3]))
    assert renamed.tolist() == [1, 0, 3, 1, 2]
