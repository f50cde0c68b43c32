"""CPOP, ETF, HEFT and PEFT: the examples of their papers, and their rules task by task."""

import dataclasses

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.baselines.cpop import cpop_schedule
from doppler_jax.baselines.etf import etf_schedule
from doppler_jax.baselines.heft import heft_schedule
from doppler_jax.baselines.listing import ListSchedule
from doppler_jax.baselines.peft import optimistic_costs, peft_schedule
from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.graphs.levels import b_level, b_path, mean_transfer_s, t_level
from tests.baselines.listing_cases import (
    ARABNEJAD,
    TOPCUOGLU,
    arrival_s,
    frontier_order,
    paper_example,
    replay,
    uneven_problem,
    with_compute,
)

INF = np.inf


def test_example_of_topcuoglu():
    graph, costs = paper_example(TOPCUOGLU)
    ranks = [108.0, 77.0, 80.0, 80.0, 69.0, 63.333, 42.667, 35.667, 44.333, 14.667]
    np.testing.assert_allclose(b_level(graph, costs), ranks, atol=5e-4)
    # 1-2-9-10 in the paper's numbering is the critical path.
    assert b_path(graph, costs).tolist() == [1, 8, 6, 8, 8, 7, 9, 9, 9, -1]
    assert dj.graphs.t_path(graph, costs).tolist() == [-1, 0, 0, 0, 0, 0, 2, 1, 1, 8]
    assert t_level(graph, costs)[9] == pytest.approx(108 - 44 / 3)
    critical = [0, 1, 8, 9]
    np.testing.assert_allclose((b_level(graph, costs) + t_level(graph, costs))[critical], 108.0)
    schedule = heft_schedule(graph, costs)
    assert schedule.finish_s.max() == 80.0
    # Figure 3 of the paper: P1, P2, P3 are devices 0, 1, 2.
    assert schedule.placement.tolist() == [2, 0, 2, 1, 2, 1, 2, 0, 1, 1]
    schedule = cpop_schedule(graph, costs)
    assert schedule.finish_s.max() == 86.0
    assert schedule.placement[critical].tolist() == [1, 1, 1, 1]


def test_example_of_arabnejad():
    graph, costs = paper_example(ARABNEJAD)
    table = [
        *([64, 68, 86], [42, 39, 42], [27, 41, 43], [42, 39, 50], [28, 37, 28]),
        *([42, 39, 44], [13, 16, 22], [13, 16, 33], [13, 16, 20], [0, 0, 0]),
    ]
    assert optimistic_costs(graph, costs).tolist() == table
    schedule = peft_schedule(graph, costs)
    assert schedule.finish_s.max() == 122.0
    assert schedule.placement.tolist() == [0, 0, 0, 0, 2, 1, 0, 1, 2, 1]
    assert heft_schedule(graph, costs).finish_s.max() == 133.0


def heft_rule(graph, costs):
    """The plan, what it goes by, and which device a task takes that finishes `[D]` there."""
    return heft_schedule, b_level(graph, costs), lambda v, finish_s: np.argmin(finish_s)


def cpop_rule(graph, costs):
    """All tasks of the critical path go to one device, if that can run them."""
    levels_s = b_level(graph, costs)
    path, following = [int(np.argmax(levels_s))], b_path(graph, costs)
    while following[path[-1]] >= 0:
        path.append(int(following[path[-1]]))
    able = np.isfinite(costs.compute_s[path])
    total_s = np.where(able, costs.compute_s[path], 0.0).sum(axis=0)
    shared = min(range(3), key=lambda d: (-able[:, d].sum(), total_s[d], d))

    def choose(v, finish_s):
        is_shared = v in path and np.isfinite(costs.compute_s[v, shared])
        return shared if is_shared else np.argmin(finish_s)

    return cpop_schedule, levels_s + t_level(graph, costs), choose


def peft_rule(graph, costs):
    """What follows a task counts."""
    table_s = optimistic_costs(graph, costs)
    np.testing.assert_allclose(table_s, naive_table(graph, costs), rtol=1e-12)
    able = np.isfinite(costs.compute_s)
    rank_s = np.where(able, table_s, 0.0).sum(axis=1) / able.sum(axis=1)
    return peft_schedule, rank_s, lambda v, finish_s: np.argmin(finish_s + table_s[v])


def naive_table(graph, costs):
    """The optimistic costs by the recursion as it is written, edge by edge."""
    senders, readers = task_edges(graph)
    move_s = mean_transfer_s(costs)[graph.edge_tensor]
    apart = 1 - np.eye(costs.num_devices)
    table_s = np.zeros(costs.compute_s.shape)
    for t in topological_order(graph)[::-1]:
        for e in np.flatnonzero(senders == t):
            there_s = table_s[readers[e]] + costs.compute_s[readers[e]]
            table_s[t] = np.maximum(table_s[t], (there_s + move_s[e] * apart).min(axis=1))
    return table_s


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dyadic", [False, True])
@pytest.mark.parametrize("rule", [heft_rule, cpop_rule, peft_rule])
def test_every_task_goes_where_the_rule_says(rule, seed, dyadic):
    graph, costs = uneven_problem(seed, 40, 3, dyadic)
    plan, priority, choose = rule(graph, costs)
    schedule = plan(graph, costs)
    for v, start_s in replay(graph, costs, schedule, frontier_order(graph, priority)):
        assert schedule.placement[v] == choose(v, start_s + costs.compute_s[v])
        assert schedule.start_s[v] == start_s[schedule.placement[v]]


def test_a_critical_path_that_no_device_runs_alone():
    # Device 1 runs two of the three critical tasks; the first finishes earliest on 0.
    compute_s = [[1.0, INF], [INF, 5.0], [1.0, 5.0], [1.0, 9.0]]
    graph, costs = with_compute([(0, 1, 1.0), (1, 2, 1.0)], compute_s)
    assert cpop_schedule(graph, costs).placement.tolist() == [0, 1, 0, 0]
    compute_s[0] = [INF, 1.0]
    graph, costs = with_compute([(0, 1, 1.0), (1, 2, 1.0)], compute_s)
    assert cpop_schedule(graph, costs).placement.tolist() == [1, 1, 1, 0]


def test_peft_looks_ahead():
    # Task 0 is done sooner on device 0, where task 1 cannot run.
    graph, costs = with_compute([(0, 1, 9.0)], [[1.0, 2.0], [INF, 1.0]])
    assert peft_schedule(graph, costs).placement.tolist() == [1, 1]


def test_heft_fills_a_gap():
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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dyadic", [False, True])
def test_etf_takes_the_pair_of_earliest_start_next(seed, dyadic):
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


def test_of_equal_starts_etf_takes_the_larger_static_level():
    # Task 1 has 1 + 4 to follow; its transfer does not count, nor does task 0's of 9.
    graph, costs = with_compute([(0, 2, 9.0), (1, 3, 0.0)], [[1.0], [1.0], [2.0], [4.0]])
    assert etf_schedule(graph, costs).start_s.tolist() == [5.0, 0.0, 6.0, 1.0]


def test_etf_takes_a_free_slow_device():
    graph, costs = with_compute([], [[1.0, 50.0], [1.0, 50.0]])
    assert etf_schedule(graph, costs).placement.tolist() == [0, 1]
