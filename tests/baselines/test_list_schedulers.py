"""What every list scheduler must keep to."""

import dataclasses

import numpy as np
import pytest

from doppler_jax.baselines.cpop import cpop, cpop_schedule
from doppler_jax.baselines.etf import etf, etf_schedule, m_etf, m_etf_schedule
from doppler_jax.baselines.heft import heft, heft_schedule
from doppler_jax.baselines.listing import _Busy
from doppler_jax.baselines.m_sct import m_sct, m_sct_schedule
from doppler_jax.baselines.peft import peft, peft_schedule
from doppler_jax.graphs.bounds import lower_bound_s
from tests.baselines.listing_cases import check_plan, uneven_problem, with_compute
from tests.generators import random_problem, relabel_devices, scale_costs, with_own_inputs
from tests.simulator.cases import small_problem

PLANNERS = {
    cpop: cpop_schedule,
    etf: etf_schedule,
    heft: heft_schedule,
    m_etf: m_etf_schedule,
    m_sct: m_sct_schedule,
    peft: peft_schedule,
}
planners = pytest.mark.parametrize(
    "plan", PLANNERS.values(), ids=[f.__name__ for f in PLANNERS]
)


@planners
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 8, 64])
def test_plans_are_feasible(plan, num_tasks):
    for seed, dyadic in ((0, False), (1, True), (2, True)):
        for num_devices in (1, 2, 5):
            graph, costs = uneven_problem(seed, num_tasks, num_devices, dyadic)
            schedule = plan(graph, costs)
            check_plan(graph, costs, schedule)
            assert schedule.finish_s.max(initial=0.0) >= lower_bound_s(graph, costs) * (
                1 - 1e-9
            )


@pytest.mark.parametrize("method", PLANNERS, ids=lambda f: f.__name__)
def test_the_placement_is_the_plans_and_the_same_twice(method):
    graph, costs = uneven_problem(3, 40, 3, dyadic=True)
    first = method(graph, costs)
    np.testing.assert_array_equal(first, PLANNERS[method](graph, costs).placement)
    np.testing.assert_array_equal(first, method(graph, costs))
    assert first.dtype == np.int64
    assert len(set(first.tolist())) > 1


@planners
def test_nothing_but_compute_on_equal_devices_fills_them_in_order(plan):
    graph, costs = with_compute([], np.ones((5, 3)))
    schedule = plan(graph, costs)
    assert schedule.placement.tolist() == [0, 1, 2, 0, 1]
    assert schedule.start_s.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


@planners
def test_zero_costs(plan):
    graph, costs = with_compute([(2, 1, 0.0), (1, 0, 0.0)], np.zeros((3, 2)))
    schedule = plan(graph, costs)
    check_plan(graph, costs, schedule)
    assert schedule.placement.tolist() == [0, 0, 0]
    assert schedule.finish_s.tolist() == [0.0, 0.0, 0.0]


# CPOP sends a lone task to the fastest device, wherever its input is.
@pytest.mark.parametrize("plan", [p for p in PLANNERS.values() if p is not cpop_schedule])
def test_a_graph_input_draws_its_reader_home(plan):
    graph, costs = one_input_at_home()
    schedule = plan(graph, costs)
    assert (schedule.placement[0], schedule.start_s[0]) == (1, 0.0)


@planners
def test_a_graph_input_is_waited_for(plan):
    graph, costs = one_input_at_home()
    costs = dataclasses.replace(costs, compute_s=np.array([[1.0, np.inf]]))
    schedule = plan(graph, costs)
    assert (schedule.placement[0], schedule.start_s[0]) == (0, 4.0)


def one_input_at_home():
    """One task that reads 4 bytes from device 1, of two."""
    return small_problem([1.0], [], 2, [(1, 4.0, [0])])


@planners
@pytest.mark.parametrize("seed", range(3))
def test_doubling_every_cost_doubles_the_plan(plan, seed):
    graph, costs = uneven_problem(seed, 30, 3)
    once, doubled = plan(graph, costs), plan(graph, scale_costs(costs, 2.0))
    np.testing.assert_array_equal(doubled.placement, once.placement)
    np.testing.assert_array_equal(doubled.start_s, 2 * once.start_s)


@planners
@pytest.mark.parametrize("seed", range(3))
def test_relabelled_devices_take_the_same_tasks_where_nothing_ties(plan, seed):
    rng = np.random.default_rng(seed)
    problem = with_own_inputs(rng, *random_problem(rng, 30, 4))
    new = rng.permutation(4)  # new label of each device
    before, after = (plan(*p).placement for p in (problem, relabel_devices(*problem, new)))
    np.testing.assert_array_equal(after, new[before])


def first_gap(busy, ready_s, long_s):
    """The start of the first gap that holds a task, by looking at all there are."""
    begin_s = ready_s
    for start_s, finish_s in sorted(busy):
        if finish_s > ready_s:
            if begin_s + long_s <= start_s:
                break
            begin_s = finish_s
    return begin_s


@pytest.mark.parametrize("seed", range(40))
def test_gaps_are_found_among_periods_as_among_tasks(seed):
    rng = np.random.default_rng(seed)
    busy, tasks = _Busy(), []
    lengths = ([0, 1, 2, 3], [0.1, 0.2, 0.3, 1e-17], [1, 1, 1, 0])[seed % 3]
    for _ in range(60):
        ready_s, long_s = float(rng.integers(0, 20)), float(rng.choice(lengths))
        start_s = busy.first_gap(ready_s, long_s)
        assert start_s == first_gap(tasks, ready_s, long_s)
        busy.add(start_s, start_s + long_s)
        tasks.append((start_s, start_s + long_s))
        assert busy.first_gap(ready_s, np.inf) == np.inf


def test_tasks_without_a_pause_between_are_one_period():
    busy = _Busy()
    for start_s in (5.0, 1.0, 3.0, 2.0, 4.0):
        busy.add(start_s, start_s + 1.0)
    assert (busy._begins, busy._ends) == ([1.0], [6.0])
