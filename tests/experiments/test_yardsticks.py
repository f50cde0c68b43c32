"""The yardsticks simulate what the oracle simulates, so that their times may be compared."""

import numba
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.baselines.simple import random_placements
from doppler_jax.graphs.chains import chain_cover
from experiments.catalogue import WIDTH, layered_problem
from experiments.yardsticks import numba_model
from tests.generators import random_problem
from tests.search.cases import seconds

SIZES = ((0, 1), (1, 1), (1, 3), (2, 1), (3, 5), (12, 2), (40, 3), (90, 4))


def cases(seed):
    """Small problems with four placements each; dyadic ones, where ties are exact, and not."""
    for num_tasks, num_devices in SIZES:
        for dyadic in (True, True, False):
            rng = np.random.default_rng([seed, num_tasks, num_devices, dyadic])
            seed += 1
            graph, costs = random_problem(rng, num_tasks, num_devices, dyadic=dyadic)
            yield graph, costs, random_placements(costs, rng, 4)


@pytest.mark.parametrize("links", ["parallel", "serial"])
def test_numba_agrees_with_the_oracle(links):
    for graph, costs, placements in cases(100):
        makespans = numba_model.makespans_s(graph, costs, placements, links=links)
        assert makespans.dtype == np.float64
        assert makespans.tolist() == seconds(graph, costs, placements, links=links).tolist()


def test_the_tie_rule_decides():
    # At 1 s devices 0 and 1 are idle, tasks 2 and 3 ready there. Task 2 takes no time and
    # makes task 1 ready on device 1 within the instant, before task 3, which was ready too.
    graph, costs = dj.from_edge_delays(
        [1.0, 2.0, 0.0, 4.0, 8.0],
        [(0, 2, 0.0), (0, 3, 0.0), (2, 1, 0.0), (1, 4, 0.0)],
        num_devices=3,
    )
    placement = np.array([0, 1, 0, 1, 2])
    assert seconds(graph, costs, [placement]) == [11.0]  # 1 + 2 + 8; 15 if task 3 went first
    assert numba_model.makespans_s(graph, costs, placement[None]).tolist() == [11.0]


def test_a_task_that_cannot_run_never_ends():
    graph, costs = dj.from_edge_delays([1.0, 1.0], [(0, 1, 1.0)], num_devices=2)
    costs.compute_s[0, 1] = np.inf
    placements = np.array([[0, 0], [1, 0], [0, 1], [1, 1]])
    expected = [2.0, np.inf, 3.0, np.inf]
    assert seconds(graph, costs, placements).tolist() == expected
    assert numba_model.makespans_s(graph, costs, placements).tolist() == expected


def test_threads_share_a_batch():
    rng = np.random.default_rng(7)
    graph, costs = random_problem(rng, 30, 3, dyadic=True)
    placements = random_placements(costs, rng, 101)
    expected = seconds(graph, costs, placements).tolist()
    for batch in (0, 1, 31, 32, 101):
        for threads in {1, numba.get_num_threads()}:
            makespans = numba_model.makespans_s(graph, costs, placements[:batch], threads)
            assert makespans.tolist() == expected[:batch]


def test_numba_refuses_what_it_cannot_index():
    graph, costs = dj.from_edge_delays([1.0, 1.0], [], num_devices=2)
    for wrong, message in (
        ([[0, 2]], "a device outside 0 to 1"),
        ([[-1, 0]], "a device outside 0 to 1"),
        ([0, 1], r"shape \(2,\)"),
        ([[0, 1, 0]], r"shape \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            numba_model.makespans_s(graph, costs, np.array(wrong))
    good = np.array([[0, 1]])
    with pytest.raises(ValueError, match="unknown links 'duplex'; known: parallel, serial"):
        numba_model.makespans_s(graph, costs, good, links="duplex")
    with pytest.raises(ValueError, match="number of threads must be"):
        numba_model.makespans_s(graph, costs, good, 0)
    assert numba_model.makespans_s(graph, costs, good).tolist() == [1.0]


def test_layered_graphs_have_bounded_width():
    for num_tasks in (1, 17, 300):
        graph, costs = layered_problem(num_tasks, 3)
        assert (graph.num_tasks, costs.num_devices) == (num_tasks, 3)
        assert len(chain_cover(graph)) == min(num_tasks, WIDTH)
    assert graph.num_edges > 1.5 * num_tasks
