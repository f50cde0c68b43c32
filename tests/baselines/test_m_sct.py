import dataclasses

import numpy as np
import pytest

from doppler_jax.baselines import m_sct as m_sct_module
from doppler_jax.baselines.etf import m_etf_schedule
from doppler_jax.baselines.m_sct import favourite_children, m_sct_schedule
from doppler_jax.graphs.build import task_edges
from tests.baselines.listing_cases import uneven_problem, with_compute
from tests.generators import scale_costs

# Tasks 0 and 1 end at 2; task 2 reads both, task 3 reads task 0.
EDGES = [(0, 2, 4.0), (1, 2, 1.0), (0, 3, 3.0)]
COMPUTE_S = np.array([2.0, 2.0, 10.0, 5.0])


def problem(edges=EDGES, compute_s=COMPUTE_S):
    return with_compute(edges, np.repeat(compute_s[:, None], 2, axis=1))


@pytest.fixture(params=["program", "greedy"])
def rule(request, monkeypatch):
    if request.param == "greedy":
        monkeypatch.setattr(m_sct_module, "LARGEST_PROGRAM", 0)
    return request.param


@pytest.mark.usefixtures("rule")
def test_the_favourite_is_on_the_longest_path():
    assert favourite_children(*problem()).tolist() == [2, -1, -1, -1]
    short = np.array([2.0, 2.0, 1.0, 9.0])
    # Task 0 prefers task 3 now, which leaves task 2 to task 1.
    assert favourite_children(*problem(compute_s=short)).tolist() == [3, 2, -1, -1]


@pytest.mark.usefixtures("rule")
@pytest.mark.parametrize("seed", range(6))
def test_favourites_match_readers(seed):
    graph, costs = uneven_problem(seed, 40, 3, dyadic=seed % 2 == 1)
    favourite = favourite_children(graph, costs)
    pairs = set(zip(*(ends.tolist() for ends in task_edges(graph)), strict=True))
    chosen = [(u, v) for u, v in enumerate(favourite.tolist()) if v >= 0]
    assert len(chosen) > 2
    assert set(chosen) <= pairs
    assert len({v for _, v in chosen}) == len(chosen)


def test_favourites_do_not_depend_on_the_unit():
    graph, costs = uneven_problem(0, 40, 3)
    small = favourite_children(graph, scale_costs(costs, 1e-9))
    np.testing.assert_array_equal(small, favourite_children(graph, costs))


@pytest.mark.usefixtures("rule")
def test_transfers_that_take_no_time_make_no_favourites():
    edges = [(u, v, 0.0) for u, v, _ in EDGES]
    assert favourite_children(*problem(edges)).tolist() == [-1, -1, -1, -1]
    edges = [(0, 1, 0.0), (2, 3, 1.0)]
    assert favourite_children(*problem(edges)).tolist() == [-1, -1, 3, -1]


@pytest.mark.usefixtures("rule")
def test_of_several_tensors_the_slowest_counts():
    # Through tensors of 1 and 6 bytes task 2 is further away than task 1 through one of 5.
    edges = [(0, 2, 1.0), (0, 1, 5.0), (0, 2, 6.0)]
    assert favourite_children(*problem(edges, np.ones(3))).tolist() == [2, -1, -1]


def test_a_device_waits_for_the_favourite_child():
    # m-ETF starts task 3 at 2 on device 0. m-SCT keeps the device for task 2, which comes
    # at 3, so that task 3 has to move.
    graph, costs = problem()
    eager = m_etf_schedule(graph, costs)
    assert eager.placement.tolist() == [0, 1, 1, 0]
    assert eager.start_s.tolist() == [0.0, 0.0, 6.0, 2.0]
    patient = m_sct_schedule(graph, costs)
    assert patient.placement.tolist() == [0, 1, 0, 1]
    assert patient.start_s.tolist() == [0.0, 0.0, 3.0, 5.0]


def test_a_device_without_room_for_the_child_does_not_wait():
    # Device 0 has 8 bytes: its outputs are 7, and task 2 reads 1 and makes 1.
    graph, costs = problem([*EDGES, (2, 4, 1.0)], np.append(COMPUTE_S, 0.0))
    waits = dataclasses.replace(costs, capacity_bytes=np.array([9.0, 99.0]))
    assert m_sct_schedule(graph, waits).start_s[2:4].tolist() == [3.0, 5.0]
    full = dataclasses.replace(costs, capacity_bytes=np.array([8.0, 99.0]))
    assert m_sct_schedule(graph, full).start_s[2:4].tolist() == [6.0, 2.0]


def test_an_urgent_task_does_not_wait():
    # Task 4 needs nothing and comes behind tasks 0 and 1, on the device that is awake.
    graph, costs = problem(compute_s=np.append(COMPUTE_S, 0.5))
    schedule = m_sct_schedule(graph, costs)
    assert (schedule.placement[4], schedule.start_s[4]) == (0, 2.0)
    assert schedule.start_s[:2].tolist() == [0.0, 0.0]
