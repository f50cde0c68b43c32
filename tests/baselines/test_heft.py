import numpy as np
import pytest

from doppler_jax.baselines.heft import heft_schedule
from doppler_jax.baselines.listing import ListSchedule
from doppler_jax.graphs.levels import b_level
from tests.baselines.listing_cases import (
    ARABNEJAD,
    TOPCUOGLU,
    frontier_order,
    paper_example,
    replay,
    uneven_problem,
    with_compute,
)


def test_example_of_the_paper():
    graph, costs = paper_example(TOPCUOGLU)
    ranks = [108.0, 77.0, 80.0, 80.0, 69.0, 63.333, 42.667, 35.667, 44.333, 14.667]
    np.testing.assert_allclose(b_level(graph, costs), ranks, atol=1e-3)
    schedule = heft_schedule(graph, costs)
    assert schedule.finish_s.max() == 80.0
    # Figure 3 of the paper: P1, P2, P3 are devices 0, 1, 2.
    assert schedule.placement.tolist() == [2, 0, 2, 1, 2, 1, 2, 0, 1, 1]


def test_makespan_that_the_paper_of_peft_gives():
    assert heft_schedule(*paper_example(ARABNEJAD)).finish_s.max() == 133.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dyadic", [False, True])
def test_every_task_goes_where_it_finishes_first(seed, dyadic):
    graph, costs = uneven_problem(seed, 40, 3, dyadic)
    schedule = heft_schedule(graph, costs)
    order = frontier_order(graph, b_level(graph, costs))
    for v, start_s in replay(graph, costs, schedule, order):
        finish_s = start_s + costs.compute_s[v]
        assert schedule.placement[v] == np.argmin(finish_s)
        assert schedule.start_s[v] == start_s[schedule.placement[v]]


def test_a_gap_is_filled():
    # Ranks 12, 11, 2, 2: task 1 waits on device 0 for nothing, task 3 for task 0's result.
    graph, costs = with_compute([(0, 1, 4.0)], [[1.0, 9.0], [7.0, 1.0], [2.0, 9.0]])
    schedule = heft_schedule(graph, costs)
    assert schedule.placement.tolist() == [0, 1, 0]
    graph, costs = with_compute([(0, 1, 4.0)], [[1.0, 9.0], [9.0, 1.0], [9.0, 2.0]])
    schedule = heft_schedule(graph, costs)
    assert schedule.placement.tolist() == [0, 1, 1]
    assert schedule.start_s.tolist() == [0.0, 5.0, 0.0]  # before task 1, placed earlier


def test_gaps():
    graph, costs = with_compute([], [[2.0], [1.0], [3.0], [0.0], [2.0]])
    plan = ListSchedule(graph, costs)
    plan.put(0, 0, 2.0)  # busy from 2 to 4
    plan.put(1, 0, 5.0)  # and from 5 to 6
    assert plan.earliest_start_s(4).tolist() == [0.0]  # touches the next task
    assert plan.earliest_start_s(2).tolist() == [6.0]  # fits no gap
    plan.put(4, 0, 0.0)
    assert plan.earliest_start_s(3).tolist() == [0.0]
    plan.put(3, 0, 4.5)  # splits the gap from 4 to 5
    assert plan.earliest_start_s(1).tolist() == [6.0]
