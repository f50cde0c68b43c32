import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doppler_jax.objective import LINKS
from doppler_jax.simulator.critical_chain import chain_seconds, critical_chain
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from tests.generators import problems
from tests.simulator.cases import small_problem


def summary(chain):
    return ", ".join(f"{link.kind} {link.item} {link.waited_for}" for link in chain)


THROUGH_A_LINK = "task 0 nothing, transfer 0 input, transfer 1 link, task 3 input"


def test_a_chain_of_inputs():
    # Input 0 travels for 2 s, task 0 runs for 1 s, its tensor travels for 4 s.
    graph, costs = small_problem([1, 1, 3], [(0, 4, [1])], 2, [(1, 2, [0])])
    schedule = simulate_oracle(graph, costs, [0, 1, 0])
    assert schedule.start_s.tolist() == [3, 8, 0]
    chain = critical_chain(graph, schedule)
    assert summary(chain) == "task 2 nothing, task 0 device, transfer 0 input, task 1 input"
    spent = chain_seconds(chain)
    # Task 2 runs for 3 s; in the last of them task 0 has its input and waits.
    assert spent.compute_s == 2 + 1 + 1
    assert (spent.transfer_s, spent.queueing_s, spent.idle_s) == (4, 1, 0)
    apart = critical_chain(graph, simulate_oracle(graph, costs, [0, 1, 1]))
    assert summary(apart).startswith("transfer -1 nothing, task 0 input, ")


def test_a_chain_through_a_serial_link():
    graph, costs = small_problem([1, 1, 1, 1], [(0, 3, [2]), (1, 3, [3])], 2)
    chain = critical_chain(graph, simulate_oracle(graph, costs, [0, 0, 1, 1], links="serial"))
    assert summary(chain) == THROUGH_A_LINK
    assert [(link.source, link.device) for link in chain] == [(0, 0), (0, 1), (0, 1), (1, 1)]
    assert chain[2].ready_s == 2
    spent = chain_seconds(chain)
    # From 2 to 4 s tensor 1 waits for the link.
    assert (spent.compute_s, spent.transfer_s, spent.queueing_s) == (2, 4, 2)


def test_a_chain_through_another_link_of_the_same_engine():
    # Device 2 receives from 0, then from 1.
    graph, costs = small_problem([1, 2, 1, 1], [(0, 4, [2]), (1, 4, [3])], 3)
    schedule = simulate_oracle(graph, costs, [0, 1, 2, 2], links="duplex")
    assert summary(critical_chain(graph, schedule)) == THROUGH_A_LINK


def test_gaps_of_a_measured_run_are_idle():
    graph, costs = small_problem([1, 1], [(0, 4, [1])], 2)
    schedule = simulate_oracle(graph, costs, [0, 1])
    delay_s = np.array([0.25, 1.0])
    late = schedule.replace(
        start_s=schedule.start_s + delay_s,
        finish_s=schedule.finish_s + delay_s,
        transfer_start_s=schedule.transfer_start_s + 0.5,
        transfer_finish_s=schedule.transfer_finish_s + 0.5,
    )
    chain = critical_chain(graph, late)
    assert summary(chain) == "task 0 nothing, transfer 0 input, task 1 input"
    spent = chain_seconds(chain)
    assert (spent.compute_s, spent.transfer_s, spent.queueing_s, spent.idle_s) == (2, 4, 0, 1)


def test_nothing_to_explain():
    graph, costs = small_problem([], [], 1)
    assert critical_chain(graph, simulate_oracle(graph, costs, np.zeros(0, int))) == ()
    graph, costs = small_problem([np.inf], [], 1)
    assert critical_chain(graph, simulate_oracle(graph, costs, [0])) == ()


def test_a_missing_transfer_is_refused():
    graph, costs = small_problem([1, 1], [(0, 4, [1])], 2)
    schedule = simulate_oracle(graph, costs, [0, 1])
    bare = simulate_oracle(graph, costs, [0, 0]).replace(placement=schedule.placement)
    with pytest.raises(ValueError, match="tensor 0 has no transfer to device 1"):
        critical_chain(graph, bare)


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from(LINKS))
def test_links_abut_and_reach_zero(problem, links):
    graph, costs, placement, options = problem
    schedule = simulate_oracle(graph, costs, placement, links=links, **options)
    chain = critical_chain(graph, schedule)
    assert bool(chain) == bool(graph.num_tasks)
    if not chain:
        return
    assert chain[0].start_s == 0
    assert chain[-1].finish_s == makespan_s(schedule)
    assert chain[-1].kind == "task"
    for before, after in itertools.pairwise(chain):
        assert before.finish_s == after.start_s
        assert after.ready_s <= after.start_s
        assert (after.waited_for == "input") == (after.ready_s == after.start_s)
        if after.waited_for == "device":
            assert before.kind == after.kind == "task"
            assert before.device == after.device
        elif after.waited_for == "link":
            assert before.kind == after.kind == "transfer"
            assert before.device == after.device or before.source == after.source
            if links == "serial":
                assert (before.device, before.source) == (after.device, after.source)
        elif after.kind == "transfer":
            assert (before.kind, before.item) == ("task", graph.tensor_producer[after.item])
        else:
            assert before.device == after.device
    assert [link.waited_for for link in chain].count("nothing") == 1
    spent = chain_seconds(chain)
    parts = (spent.compute_s, spent.transfer_s, spent.queueing_s)
    assert spent.idle_s == 0
    assert min(parts) >= 0
    np.testing.assert_allclose(sum(parts), makespan_s(schedule), rtol=1e-12, atol=1e-12)
    if links == "parallel":
        assert "link" not in {link.waited_for for link in chain}
