"""Rules that mind memory: m-ETF, m-SCT, and placements that are made to fit."""

import dataclasses

import numpy as np
import pytest

from doppler_jax.baselines import m_sct as m_sct_module
from doppler_jax.baselines.etf import m_etf, m_etf_schedule, schedule_earliest
from doppler_jax.baselines.fitting import fit_into_memory
from doppler_jax.baselines.m_sct import favourite_children, m_sct, m_sct_schedule
from doppler_jax.baselines.memory_plans import plan_within_memory, plans_within_memory
from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import simulate_oracle
from doppler_jax.types import RESIDENT
from tests.baselines.listing_cases import held_bytes, run_events, uneven_problem, with_compute
from tests.generators import scale_costs
from tests.simulator.cases import small_problem


def tight_problem(seed, share, num_tasks=24):
    """A problem whose devices hold `share` of all that there is, in whole quarter bytes."""
    graph, costs = uneven_problem(seed, num_tasks, 3, dyadic=True)
    total = costs.tensor_bytes.sum() + costs.input_bytes.sum()
    capacity = np.ceil(share * total * np.array([1.0, 0.8, 1.2]))
    return graph, dataclasses.replace(costs, capacity_bytes=capacity)


@pytest.mark.parametrize("method", [m_etf, m_sct])
def test_capacity_is_never_exceeded(method):
    refused, bound = 0, 0
    for seed in range(30):
        graph, costs = tight_problem(seed, share=0.7)
        if seed % 2:
            maker = np.random.default_rng(seed).integers(0, graph.num_tasks, graph.num_inputs)
            maker = np.where(graph.input_home == RESIDENT, maker, -1)
            graph = graph.replace(input_maker=maker)
        unlimited = dataclasses.replace(costs, capacity_bytes=np.full(3, np.inf))
        try:
            placement = method(graph, costs)
        except ValueError:
            refused += 1
            continue
        bound += not np.array_equal(placement, method(graph, unlimited))
        held = [held_bytes(graph, costs, np.flatnonzero(placement == d), d) for d in range(3)]
        assert (held <= costs.capacity_bytes).all()
        schedule = simulate_oracle(graph, costs, placement)
        assert (peak_memory_bytes(graph, costs, schedule) <= held).all()
    assert refused > 2
    assert bound > 2


def random_favourites(rng, graph):
    """A child for about every task that has one, no child twice."""
    favourite, taken = np.full(graph.num_tasks, -1), set()
    senders, readers = task_edges(graph)
    for e in rng.permutation(graph.num_edges).tolist():
        if favourite[senders[e]] < 0 and readers[e] not in taken:
            favourite[senders[e]] = readers[e]
            taken.add(readers[e])
    return favourite


def follows_events(seed, num_tasks, num_devices, dyadic, share=np.inf, has_favourites=True):
    """Compares the engine with the event simulation; False if a task fits nowhere."""
    graph, costs = uneven_problem(seed, num_tasks, num_devices, dyadic)
    total = costs.tensor_bytes.sum() + costs.input_bytes.sum()
    costs = dataclasses.replace(costs, capacity_bytes=np.full(num_devices, share * total))
    favourite = None
    if has_favourites:
        favourite = random_favourites(np.random.default_rng(seed), graph)
    order = np.arange(num_tasks)
    try:
        schedule = schedule_earliest(graph, costs, order, favourite=favourite, limited=True)
    except ValueError:
        return False
    start_s, placement = run_events(graph, costs, favourite)
    np.testing.assert_array_equal(schedule.placement, placement)
    np.testing.assert_array_equal(schedule.start_s, start_s)
    return True


@pytest.mark.parametrize("share", [0.8, np.inf])
@pytest.mark.parametrize("has_favourites", [False, True])
@pytest.mark.parametrize("dyadic", [False, True])
def test_the_plan_is_that_of_an_event_simulation(share, has_favourites, dyadic):
    planned = [follows_events(s, 20, 3, dyadic, share, has_favourites) for s in range(40)]
    assert sum(planned) >= 20


# Rare cases, found by search: a device turns from waiting to free after others have gone on,
# or waits for a child that would start elsewhere sooner, were there room.
@pytest.mark.parametrize(
    ("case", "share"), [((900, 16, 3), np.inf), ((461, 24, 4), np.inf), ((13, 16, 3), 0.8)]
)
def test_devices_that_wait(case, share):
    assert follows_events(*case, dyadic=True, share=share)


def test_a_full_device_is_passed_by():
    # Each task makes 2 bytes; a chain on device 0 until it holds two of them.
    graph, costs = with_compute([(0, 1, 2.0), (1, 2, 2.0), (2, 3, 2.0)], np.ones((4, 2)))
    assert m_etf(graph, costs).tolist() == [0, 0, 0, 0]
    costs = dataclasses.replace(costs, capacity_bytes=np.array([4.0, 9.0]))
    assert m_etf(graph, costs).tolist() == [0, 0, 1, 1]
    schedule = m_etf_schedule(graph, costs)
    assert schedule.start_s.tolist() == [0.0, 1.0, 4.0, 5.0]


def one_input_for_two(capacity):
    """Tasks 0 and 1 read one resident input of 6 bytes; task 2 reads task 0's 1 byte."""
    graph, costs = small_problem([1, 1, 1], [(0, 1, [2])], 2, [(RESIDENT, 6, [0, 1])])
    return graph, costs.replace(capacity_bytes=np.array(capacity))


def test_what_is_there_is_not_counted_again():
    graph, costs = one_input_for_two([7.0, 0.0])
    assert m_etf(graph, costs).tolist() == [0, 0, 0]
    graph, costs = one_input_for_two([7.0, 6.0])
    assert m_etf(graph, costs).tolist() == [0, 1, 0]


@pytest.mark.parametrize("method", [m_etf, m_sct])
def test_an_input_at_home_and_a_copy_take_room(method):
    graph, costs = small_problem([1.0], [], 2, [(0, 3.0, [0])])
    for capacity, compute_s, device in (
        ([3.0, 9.0], [1.0, 1.0], 0),
        ([3.0, 3.0], [np.inf, 1], 1),
    ):
        costs = costs.replace(
            compute_s=np.array([compute_s]), capacity_bytes=np.array(capacity)
        )
        assert method(graph, costs).tolist() == [device]
    for capacity, message in (
        ([9.0, 2.0], "task 0 needs 3 bytes"),
        ([2.0, 9.0], "graph inputs of 3 bytes lie on device 0"),
    ):
        with pytest.raises(ValueError, match=message):
            method(graph, costs.replace(capacity_bytes=np.array(capacity)))


@pytest.mark.parametrize("method", [m_etf, m_sct])
def test_a_task_that_fits_nowhere_is_named(method):
    # A simulator would free tasks 0 and 1 before task 2 starts; here they stay.
    graph, costs = with_compute([(0, 1, 2.0), (1, 2, 2.0), (2, 3, 2.0)], np.ones((4, 1)))
    costs = dataclasses.replace(costs, capacity_bytes=np.array([5.0]))
    with pytest.raises(ValueError, match=r"task 2 fits on no device.*4 are taken.*adds 2\."):
        method(graph, costs)


# Tasks 0 and 1 end at 2; task 2 reads both, task 3 reads task 0.
EDGES = [(0, 2, 4.0), (1, 2, 1.0), (0, 3, 3.0)]
COMPUTE_S = np.array([2.0, 2.0, 10.0, 5.0])


def favourite_problem(edges=EDGES, compute_s=COMPUTE_S):
    return with_compute(edges, np.repeat(compute_s[:, None], 2, axis=1))


@pytest.fixture(params=["program", "greedy"])
def rule(request, monkeypatch):
    if request.param == "greedy":
        monkeypatch.setattr(m_sct_module, "LARGEST_PROGRAM", 0)
    return request.param


@pytest.mark.usefixtures("rule")
def test_the_favourite_is_on_the_longest_path():
    assert favourite_children(*favourite_problem()).tolist() == [2, -1, -1, -1]
    short = np.array([2.0, 2.0, 1.0, 9.0])
    # Task 0 prefers task 3 now, which leaves task 2 to task 1.
    assert favourite_children(*favourite_problem(compute_s=short)).tolist() == [3, 2, -1, -1]


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
    assert favourite_children(*favourite_problem(edges)).tolist() == [-1, -1, -1, -1]
    edges = [(0, 1, 0.0), (2, 3, 1.0)]
    assert favourite_children(*favourite_problem(edges)).tolist() == [-1, -1, 3, -1]


@pytest.mark.usefixtures("rule")
def test_of_several_tensors_the_slowest_counts():
    # Through tensors of 1 and 6 bytes task 2 is further away than task 1 through one of 5.
    edges = [(0, 2, 1.0), (0, 1, 5.0), (0, 2, 6.0)]
    assert favourite_children(*favourite_problem(edges, np.ones(3))).tolist() == [2, -1, -1]


def test_a_device_waits_for_the_favourite_child():
    # m-ETF starts task 3 at 2 on device 0. m-SCT keeps the device for task 2, which comes
    # at 3, so that task 3 has to move.
    graph, costs = favourite_problem()
    eager = m_etf_schedule(graph, costs)
    assert eager.placement.tolist() == [0, 1, 1, 0]
    assert eager.start_s.tolist() == [0.0, 0.0, 6.0, 2.0]
    patient = m_sct_schedule(graph, costs)
    assert patient.placement.tolist() == [0, 1, 0, 1]
    assert patient.start_s.tolist() == [0.0, 0.0, 3.0, 5.0]


def test_a_device_without_room_for_the_child_does_not_wait():
    # Device 0 has 8 bytes: its outputs are 7, and task 2 reads 1 and makes 1.
    graph, costs = favourite_problem([*EDGES, (2, 4, 1.0)], np.append(COMPUTE_S, 0.0))
    waits = dataclasses.replace(costs, capacity_bytes=np.array([9.0, 99.0]))
    assert m_sct_schedule(graph, waits).start_s[2:4].tolist() == [3.0, 5.0]
    full = dataclasses.replace(costs, capacity_bytes=np.array([8.0, 99.0]))
    assert m_sct_schedule(graph, full).start_s[2:4].tolist() == [6.0, 2.0]


def test_an_urgent_task_does_not_wait():
    # Task 4 needs nothing and comes behind tasks 0 and 1, on the device that is awake.
    graph, costs = favourite_problem(compute_s=np.append(COMPUTE_S, 0.5))
    schedule = m_sct_schedule(graph, costs)
    assert (schedule.placement[4], schedule.start_s[4]) == (0, 2.0)
    assert schedule.start_s[:2].tolist() == [0.0, 0.0]


CHAIN = [(v, v + 1, 1) for v in range(5)]


def chain(capacity_bytes, compute_s=1.0):
    """Six tasks; all but the last add a byte, and one more where they follow from elsewhere."""
    compute_s = np.broadcast_to(compute_s, (6, len(capacity_bytes)))
    return with_compute(CHAIN, compute_s, capacity_bytes=np.array(capacity_bytes, float))


def test_what_does_not_fit_spills_over_and_what_follows_goes_along():
    graph, costs = chain([2, 3, 3])
    np.testing.assert_array_equal(costs.tensor_bytes, 1)
    placement = fit_into_memory(graph, costs, np.zeros(6, int))
    assert placement.tolist() == [0, 0, 1, 1, 2, 2]


def test_the_fastest_of_those_with_room_takes_it_and_then_the_emptiest():
    compute_s = np.array([[1, 2, 1, 1]] * 6, float)
    graph, costs = chain([2, 9, 5, 6], compute_s=compute_s)
    assert fit_into_memory(graph, costs, np.zeros(6, int)).tolist() == [0, 0, 3, 3, 3, 3]
    compute_s[2:, 3] = np.inf
    graph, costs = chain([2, 9, 5, 6], compute_s=compute_s)
    assert fit_into_memory(graph, costs, np.zeros(6, int)).tolist() == [0, 0, 2, 2, 2, 2]


def test_tasks_of_other_devices_stay():
    graph, costs = chain([3, 9, 4])
    placement = fit_into_memory(graph, costs, np.array([0, 0, 1, 1, 0, 0]))
    assert placement.tolist() == [0, 0, 1, 1, 1, 1]  # where there is more room


def test_where_there_is_no_room_a_task_stays():
    graph, costs = chain([2, 0.5])
    assert fit_into_memory(graph, costs, np.zeros(6, int)).tolist() == [0] * 6


@pytest.mark.parametrize("share", [0.5, 0.7, np.inf])
def test_no_execution_exceeds_a_memory_if_every_task_has_room(share):
    changed = fitting = 0
    for seed in range(30):
        graph, costs = uneven_problem(seed, 24, 3, dyadic=True)
        total = costs.tensor_bytes.sum() + costs.input_bytes.sum()
        costs = dataclasses.replace(costs, capacity_bytes=np.full(3, share * total))
        rng = np.random.default_rng(seed)
        able = np.isfinite(costs.compute_s)
        given = np.array([rng.choice(np.flatnonzero(row)) for row in able])
        placement = fit_into_memory(graph, costs, given)
        assert able[np.arange(24), placement].all()
        changed += (placement != given).any()
        held = [held_bytes(graph, costs, np.flatnonzero(placement == d), d) for d in range(3)]
        if (held > costs.capacity_bytes).any():
            assert _first_without_room(graph, costs, placement)
            continue
        fitting += 1
        schedule = simulate_oracle(graph, costs, placement)
        assert (peak_memory_bytes(graph, costs, schedule) <= costs.capacity_bytes).all()
    assert fitting >= 5
    assert changed == 0 if share == np.inf else changed >= 5


def _first_without_room(graph, costs, placement):
    """Says whether some task had room nowhere, those before it being where they are."""
    before = []
    for v in topological_order(graph).tolist():
        able = np.flatnonzero(np.isfinite(costs.compute_s[v]))
        held = [
            held_bytes(graph, costs, [u for u in before if placement[u] == d] + [v], d)
            for d in able
        ]
        if (np.array(held) > costs.capacity_bytes[able]).all():
            return True
        before.append(v)
    return False


@pytest.mark.parametrize("dyadic", [False, True])
def test_list_schedules_within_memory_fit_as_they_are_executed(dyadic):
    made = tight = 0
    for seed in range(30):
        graph, costs = uneven_problem(seed, 24, 3, dyadic=dyadic)
        able = np.isfinite(costs.compute_s)
        rank = np.argsort(topological_order(graph))
        rng = np.random.default_rng(seed)
        placement = np.array([rng.choice(np.flatnonzero(row)) for row in able])
        unlimited = simulate_oracle(graph, costs, placement, queue="in_order", priority=rank)
        peak = peak_memory_bytes(graph, costs, unlimited).max()
        costs = dataclasses.replace(costs, capacity_bytes=np.full(3, 0.8 * peak))
        for plan in plans_within_memory(graph, costs, placement[None], rank):
            assert able[np.arange(24), plan.placement].all()
            executed = {"queue": "in_order", "priority": plan.priority}
            schedule = simulate_oracle(graph, costs, plan.placement, **executed)
            peak = peak_memory_bytes(graph, costs, schedule)
            assert (peak <= costs.capacity_bytes * (1 + 1e-12)).all()
            made += 1
            tight += peak.max() > 0.9 * costs.capacity_bytes[0]
    assert made >= 30
    assert tight >= 20


@pytest.mark.parametrize("readers", [[0], []])
def test_list_schedules_leave_room_for_two_generations_of_state(readers):
    # Task 0 makes 5 bytes in the place of as many, task 1 makes 3; devices hold 12.
    inputs = [(RESIDENT, 5, readers)]
    graph, costs = small_problem([1, 1], [(0, 5, []), (1, 3, [])], 2, inputs)
    graph = graph.replace(input_maker=np.array([0]))
    costs = dataclasses.replace(costs, capacity_bytes=np.full(2, 12.0))
    rank, meant = np.arange(2), np.zeros(2, int)
    assert plan_within_memory(graph, costs, rank, meant).placement.tolist() == [0, 1]
    assert fit_into_memory(graph, costs, meant).tolist() == [0, 1]
    assert peak_memory_bytes(graph, costs, simulate_oracle(graph, costs, meant))[0] == 13
