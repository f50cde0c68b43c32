import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doppler_jax.costs.build import from_edge_delays
from doppler_jax.objective import LINKS, Objective
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.validate import validate
from doppler_jax.types import RESIDENT
from tests.generators import problems
from tests.simulator.cases import carried, change, small_problem

TWO = [(0, 3, [2]), (1, 3, [3])]


@pytest.mark.parametrize(
    ("links", "compute", "tensors", "placement", "ranks", "moves", "starts"),
    [
        ("parallel", [1] * 4, TWO, [0, 0, 1, 1], None,
         {(0, 1): (1, 4), (1, 1): (2, 5)}, [0, 1, 4, 5]),
        # Each way by itself: task 4 sends back and is not held up by what comes the other way.
        ("serial", [1] * 6, [*TWO, (4, 2, [5])], [0, 0, 1, 1, 1, 0], None,
         {(0, 1): (1, 4), (1, 1): (4, 7), (2, 0): (1, 3)}, [0, 1, 4, 7, 0, 3]),
        # In the order of finishes, then of ids: task 1 goes first and has tensors 1 and 2.
        ("serial", [1] * 4, [(0, 4, [2]), (1, 4, [2]), (1, 4, [3])], [0, 0, 1, 1], [1, 0, 2, 3],
         {(1, 1): (1, 5), (2, 1): (5, 9), (0, 1): (9, 13)}, [1, 0, 13, 9]),
        # Producers of no length in the order of their starts.
        ("serial", [0, 0, 1, 1], [(0, 2, [2]), (1, 2, [3])], [0, 0, 1, 1], [1, 0, 2, 3],
         {(1, 1): (0, 2), (0, 1): (2, 4)}, [0, 0, 4, 2]),
        # Tensor 1 waits for device 2 to receive; meanwhile device 1 sends tensor 2 elsewhere.
        ("duplex", [1, 2, 1, 1, 1], [(0, 4, [2]), (1, 4, [3]), (1, 1, [4])], [0, 1, 2, 2, 0],
         None, {(0, 2): (1, 5), (2, 0): (2, 3), (1, 2): (5, 9)}, [0, 0, 5, 9, 3]),
        # A device sends and receives at the same time.
        ("duplex", [1] * 4, [(0, 4, [2]), (1, 4, [3])], [0, 1, 1, 0], None,
         {(0, 1): (1, 5), (1, 0): (1, 5)}, [0, 0, 5, 5]),
        # By request, then id, then destination: tensor 0 is requested later.
        ("duplex", [1] * 5, [(0, 1, [2]), (1, 2, [3, 4]), (1, 1, [2])], [0, 0, 1, 1, 2],
         [1, 0, 2, 3, 4], {(1, 1): (1, 3), (1, 2): (3, 5), (2, 1): (5, 6), (0, 1): (6, 7)},
         [1, 0, 7, 3, 5]),
    ],
)  # fmt: skip
def test_links_carry_what_they_can(links, compute, tensors, placement, ranks, moves, starts):
    graph, costs = small_problem(compute, tensors, max(placement) + 1)
    order = {} if ranks is None else {"queue": "priority", "priority": ranks}
    schedule = simulate_oracle(graph, costs, placement, links=links, **order)
    assert carried(schedule) == moves
    assert schedule.start_s.tolist() == starts


INPUTS = [(0, 2, [1]), (0, 3, [1]), (0, 1, [2])]


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ("parallel", {(-1, 1): (0, 2), (-2, 1): (0, 3), (-3, 2): (0, 1), (0, 1): (0, 1)}),
        ("serial", {(-1, 1): (0, 2), (-2, 1): (2, 5), (-3, 2): (0, 1), (0, 1): (5, 6)}),
        ("duplex", {(-1, 1): (0, 2), (-2, 1): (2, 5), (-3, 2): (5, 6), (0, 1): (6, 7)}),
    ],
)
def test_graph_inputs_go_before_tensors(links, expected):
    # Task 0 takes no time, so its tensor is requested at 0 as the inputs are.
    graph, costs = small_problem([0, 1, 1], [(0, 1, [1])], 3, INPUTS)
    schedule = simulate_oracle(graph, costs, [0, 1, 2], links=links)
    assert carried(schedule) == expected
    assert schedule.start_s[1] == max(expected[-2, 1][1], expected[0, 1][1])
    # Where an input lies, and where it is resident, nothing moves.
    assert carried(simulate_oracle(graph, costs, [0, 0, 0], links=links)) == {}


@pytest.mark.parametrize("links", LINKS)
def test_what_takes_no_time_arrives_before_the_next_task_starts(links):
    # At 1 task 2 is ready by way of two tensors that take no time; it goes before task 1.
    tensors = [(0, 0, [2]), (0, 0, [2]), (3, 0, [1])]
    graph, costs = small_problem([1, 1, 1, 1], tensors, 2)
    schedule = simulate_oracle(
        graph, costs, [0, 1, 1, 1], links=links, queue="priority", priority=[0, 2, 1, 0]
    )
    assert schedule.start_s.tolist() == [0, 2, 1, 0]


def test_a_made_input_lies_where_its_maker_runs():
    graph, costs = small_problem([1, 1, 1], [(0, 5, [2])], 3, [(RESIDENT, 2, [0, 1])])
    graph = graph.replace(input_maker=np.array([2]))
    schedule = simulate_oracle(graph, costs, [0, 1, 1])
    assert carried(schedule) == {(-1, 0): (0, 2), (0, 1): (3, 8)}
    assert schedule.start_s.tolist() == [2, 0, 8]
    schedule = simulate_oracle(graph, costs, [0, 0, 2], links="serial")
    assert carried(schedule) == {(-1, 0): (0, 2), (0, 2): (3, 8)}


def test_noise_multiplies_tasks_and_transfers():
    graph, costs = small_problem([1, 1, 1], [(0, 4, [1, 2])], 3, [(1, 2, [0])])
    schedule = simulate_oracle(
        graph,
        costs,
        [0, 1, 2],
        compute_factor=[2.0, 3.0, 1.0],
        transfer_factor=np.array([[9.0, 0.5, 2.0]]),
        input_factor=np.array([[1.5, 9.0, 9.0]]),
    )
    assert schedule.start_s.tolist() == [3, 7, 13]
    assert schedule.finish_s.tolist() == [5, 10, 14]
    assert makespan_s(schedule) == 14


def test_random_is_the_priority_of_a_permutation():
    graph, costs = from_edge_delays([1.0, 2.0, 4.0], [], num_devices=1)
    schedule = simulate_oracle(graph, costs, [0, 0, 0], queue="random", priority=[2, 0, 1])
    assert schedule.start_s.tolist() == [6, 0, 2]


def test_a_task_that_never_finishes_leaves_the_rest_alone():
    graph, costs = small_problem([1, 1, 1, 1], [(0, 1, [1]), (2, 1, [3])], 2)
    stuck = costs.compute_s.copy()
    stuck[0] = np.inf
    schedule = simulate_oracle(
        graph, costs.replace(compute_s=stuck), [0, 1, 0, 1], links="duplex"
    )
    assert schedule.start_s.tolist() == [0, np.inf, np.inf, np.inf]
    schedule = simulate_oracle(
        graph, costs.replace(compute_s=stuck), [0, 1, 1, 0], links="duplex"
    )
    assert schedule.finish_s.tolist() == [np.inf, np.inf, 1, np.inf]
    assert carried(schedule) == {(1, 0): (1, 2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"links": "ring"}, "unknown links 'ring'; known: parallel, serial, duplex"),
        ({"queue": "lifo"}, "unknown queue 'lifo'; known: fifo, priority, in_order, random"),
        ({"queue": "fifo", "priority": [0, 1, 2]}, "queue 'fifo' takes no priority"),
        ({"queue": "in_order"}, "queue 'in_order' needs a priority"),
        (
            {"queue": "in_order", "priority": [1, 2, 0]},
            r"priority has task 2 \(rank 0\) before task 0 \(rank 1\), from which it reads",
        ),
        ({"queue": "in_order", "priority": [0, np.nan, 2]}, r"priority\[1\] is nan"),
        ({"queue": "random"}, "queue 'random' needs a priority"),
        ({"queue": "priority", "priority": [1.0]}, r"priority has shape \(1,\)"),
        ({"queue": "random", "priority": [0, 2, 2]}, "needs a permutation of 0 to 2"),
        ({"compute_factor": [1.0]}, r"compute_factor has shape \(1,\), expected \(3,\)"),
        ({"compute_factor": [1.0, 0.0, 1.0]}, r"compute_factor\[1\] is 0.0"),
        ({"transfer_factor": np.ones((1, 2))}, r"transfer_factor .* expected \(1, 3\)"),
        ({"transfer_factor": [[1, 1, np.nan]]}, r"transfer_factor\[0, 2\] is nan"),
        ({"input_factor": np.ones((1, 3))}, r"input_factor .* expected \(0, 3\)"),
        ({"placement": [0, 0]}, r"placement has shape \(2,\), expected \(3,\)"),
        ({"placement": [0, 3, 0]}, "placement puts task 1 on device 3; devices are 0 to 2"),
        ({"placement": [0.0, 1.0, 0.0]}, "placement must hold integers"),
    ],
)
def test_refuses_bad_arguments(options, message):
    graph, costs = small_problem([1, 1, 1], [(0, 4, [1, 2])], 3)
    with pytest.raises(ValueError, match=message):
        simulate_oracle(graph, costs, **{"placement": [0, 1, 2], **options})


def test_in_order_waits_for_the_next_task_and_never_overtakes():
    # Device 1 is to run task 2, which waits for task 0, before task 1, which is ready.
    graph, costs = small_problem([2, 4, 1], [(0, 3, [2])], 2)
    found = {
        queue: simulate_oracle(graph, costs, [0, 1, 1], queue=queue, priority=[0, 2, 1])
        for queue in ("priority", "in_order")
    }
    assert found["priority"].start_s.tolist() == [0, 0, 5]
    assert found["in_order"].start_s.tolist() == [0, 6, 5]
    ranks = {"queue": "in_order", "priority": [0, 2, 1]}
    validate(graph, found["in_order"], costs, tolerance=0, **ranks)
    with pytest.raises(ValueError, match=r"device 1 idles from 0 s"):
        validate(graph, found["in_order"], costs, queue="in_order", priority=[0, 1, 2])
    with pytest.raises(
        ValueError, match=r"device 1 starts task 1 .* before task 2 .* queue has"
    ):
        validate(graph, found["priority"], costs, **ranks)
    late = change(found["in_order"], start_s={1: 6.5}, finish_s={1: 10.5})
    with pytest.raises(
        ValueError, match=r"device 1 idles from 6 s, when task 1 could start, to 6\.5"
    ):
        validate(graph, late, costs, **ranks)
    validate(graph, late, **ranks)  # as a measured trace
    with pytest.raises(ValueError, match=r"task 2 on .* overtakes task 1 on device 1"):
        validate(graph, late, queue="in_order", priority=[0, 1, 2])


def test_equal_ranks_go_by_id():
    graph, costs = small_problem([1, 1, 1], [(1, 0, [0])], 1)
    options = {"queue": "in_order", "priority": [1, 0, 0]}
    schedule = simulate_oracle(graph, costs, [0, 0, 0], **options)
    assert schedule.start_s.tolist() == [2, 0, 1]
    with pytest.raises(ValueError, match=r"priority has task 0 .* before task 1"):
        simulate_oracle(graph, costs, [0, 0, 0], queue="in_order", priority=[0, 0, 0])


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from(LINKS))
def test_every_schedule_is_legal(problem, links):
    graph, costs, placement, options = problem
    schedule = simulate_oracle(graph, costs, placement, links=links, **options)
    validate(graph, schedule, costs, objective=Objective(links), tolerance=0, **options)
    validate(graph, schedule)  # as a measured trace


@settings(max_examples=100, deadline=None)
@given(problems(), st.permutations(LINKS))
def test_links_differ_or_the_schedules_are_equal(problem, links):
    """At tolerance 0 the rules of links leave one schedule: the one that the oracle makes."""
    graph, costs, placement, options = problem
    theirs, ours = (
        simulate_oracle(graph, costs, placement, links=name, **options) for name in links[:2]
    )
    if carried(theirs) == carried(ours):
        validate(graph, theirs, costs, objective=Objective(links[1]), tolerance=0, **options)
    else:
        with pytest.raises(ValueError, match=r"transfer|device|task"):
            validate(
                graph, theirs, costs, objective=Objective(links[1]), tolerance=0, **options
            )


@settings(max_examples=100, deadline=None)
@given(
    problems(), st.sampled_from(LINKS), st.sampled_from([-0.125, 0.125]), st.integers(0, 10**6)
)
def test_a_transfer_moved_in_time_is_refused(problem, links, delay_s, which):
    graph, costs, placement, options = problem
    schedule = simulate_oracle(graph, costs, placement, links=links, **options)
    if not schedule.transfer_tensor.size:
        return
    moved = np.eye(schedule.transfer_tensor.size)[which % schedule.transfer_tensor.size]
    late = dataclasses.replace(
        schedule,
        transfer_start_s=schedule.transfer_start_s + delay_s * moved,
        transfer_finish_s=schedule.transfer_finish_s + delay_s * moved,
    )
    with pytest.raises(ValueError, match=r"transfer|starts before"):
        validate(graph, late, costs, objective=Objective(links), tolerance=0, **options)
