import numpy as np
import pytest

from doppler_jax.baselines.cpop import cpop_schedule
from doppler_jax.graphs.levels import b_level, b_path, t_level
from tests.baselines.listing_cases import (
    TOPCUOGLU,
    frontier_order,
    paper_example,
    replay,
    uneven_problem,
    with_compute,
)

INF = np.inf


def test_example_of_the_paper():
    graph, costs = paper_example(TOPCUOGLU)
    schedule = cpop_schedule(graph, costs)
    assert schedule.finish_s.max() == 86.0
    critical = [0, 1, 8, 9]
    np.testing.assert_allclose((b_level(graph, costs) + t_level(graph, costs))[critical], 108.0)
    assert schedule.placement[critical].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dyadic", [False, True])
def test_every_other_task_goes_where_it_finishes_first(seed, dyadic):
    graph, costs = uneven_problem(seed, 40, 3, dyadic)
    levels_s = b_level(graph, costs)
    path, following = [int(np.argmax(levels_s))], b_path(graph, costs)
    while following[path[-1]] >= 0:
        path.append(int(following[path[-1]]))
    able = np.isfinite(costs.compute_s[path])
    total_s = np.where(able, costs.compute_s[path], 0.0).sum(axis=0)
    shared = min(range(3), key=lambda d: (-able[:, d].sum(), total_s[d], d))
    schedule = cpop_schedule(graph, costs)
    order = frontier_order(graph, levels_s + t_level(graph, costs))
    for v, start_s in replay(graph, costs, schedule, order):
        if v in path and np.isfinite(costs.compute_s[v, shared]):
            assert schedule.placement[v] == shared
        else:
            assert schedule.placement[v] == np.argmin(start_s + costs.compute_s[v])
        assert schedule.start_s[v] == start_s[schedule.placement[v]]


def test_a_path_that_no_device_runs_alone():
    # Device 1 runs two of the three critical tasks; the first finishes earliest on 0.
    compute_s = [[1.0, INF], [INF, 5.0], [1.0, 5.0], [1.0, 9.0]]
    graph, costs = with_compute([(0, 1, 1.0), (1, 2, 1.0)], compute_s)
    assert cpop_schedule(graph, costs).placement.tolist() == [0, 1, 0, 0]
    compute_s[0] = [INF, 1.0]
    graph, costs = with_compute([(0, 1, 1.0), (1, 2, 1.0)], compute_s)
    assert cpop_schedule(graph, costs).placement.tolist() == [1, 1, 1, 0]
