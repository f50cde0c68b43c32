import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doppler_jax.graphs.build import task_edges
from doppler_jax.objective import LINKS
from doppler_jax.simulator.oracle import makespan_s
from doppler_jax.simulator.synchronous import hop_levels, simulate_synchronous
from doppler_jax.simulator.validate import validate
from tests.generators import problems, small_graph
from tests.simulator.cases import carried, small_problem

# Levels {0, 1, 2} and {3, 4}: tasks 0 and 2 share device 0, so the first ends at 3 s.
TENSORS = [(0, 2, [3]), (1, 1, [3]), (2, 4, [4])]


def problem():
    return small_problem([1, 1, 2, 1, 1], TENSORS, 2, [(0, 0.5, [1])])


def test_levels_run_between_barriers():
    schedule = simulate_synchronous(*problem(), [0, 1, 0, 1, 0])
    # The input moves until 0.5 s; tensor 0, alone to change its device, from 3.5 to 5.5 s.
    assert schedule.start_s.tolist() == [0.5, 0.5, 1.5, 5.5, 5.5]
    assert carried(schedule) == {(-1, 1): (0, 0.5), (0, 1): (3.5, 5.5)}
    assert makespan_s(schedule) == 6.5


@pytest.mark.parametrize(("links", "there"), [("parallel", 8), ("serial", 11), ("duplex", 11)])
def test_a_barrier_waits_for_the_links(links, there):
    # No input moves; the first level takes 4 s on device 0, its tensors take 2, 1 and 4 s.
    schedule = simulate_synchronous(*problem(), [0, 0, 0, 1, 1], links=links)
    assert schedule.start_s.tolist() == [0, 1, 2, there, there + 1]


def test_noise_scales_tasks_and_transfers():
    schedule = simulate_synchronous(
        *problem(),
        [0, 1, 0, 1, 0],
        compute_factor=[1, 4, 1, 1, 1],
        transfer_factor=np.array([[1, 0.5], [1, 1], [1, 1]]),
    )
    assert carried(schedule) == {(-1, 1): (0, 0.5), (0, 1): (4.5, 5.5)}
    assert makespan_s(schedule) == 6.5


def test_nothing_runs_behind_a_task_that_never_finishes():
    graph, costs = problem()
    compute_s = costs.compute_s.copy()
    compute_s[1, 1] = np.inf
    schedule = simulate_synchronous(
        graph, costs.replace(compute_s=compute_s), [0, 1, 0, 1, 0], links="serial"
    )
    assert schedule.finish_s.tolist() == [1.5, np.inf, 3.5, np.inf, np.inf]
    assert carried(schedule) == {(-1, 1): (0, 0.5)}


def test_levels_count_hops():
    graph = small_graph(np.ones(5), [(4, 1, [2]), (2, 1, [0]), (4, 1, [0])])
    assert hop_levels(graph).tolist() == [2, 0, 1, 0, 0]


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(LINKS))
def test_levels_never_overlap(problem, links):
    graph, costs, placement, options = problem
    factors = {name: option for name, option in options.items() if name.endswith("factor")}
    schedule = simulate_synchronous(graph, costs, placement, links=links, **factors)
    validate(graph, schedule)
    level = hop_levels(graph)
    senders, readers = task_edges(graph)
    assert (level[senders] < level[readers]).all()
    is_tensor = schedule.transfer_tensor >= 0
    producer = graph.tensor_producer[schedule.transfer_tensor[is_tensor]]
    for k in range(level.max(initial=-1) + 1):
        end_s = schedule.finish_s[level == k].max()
        sent = level[producer] == k
        starts = schedule.transfer_start_s[is_tensor][sent]
        ends = schedule.transfer_finish_s[is_tensor][sent]
        assert (starts >= end_s).all()
        if links == "parallel":
            assert (starts == end_s).all()
        next_s = schedule.start_s[level == k + 1]
        if next_s.size:
            assert next_s.min() == max(end_s, ends.max(initial=0.0))
        for d in range(costs.num_devices):  # by id, and without a pause
            tasks = np.flatnonzero((level == k) & (placement == d))
            gaps = schedule.start_s[tasks][1:] - schedule.finish_s[tasks][:-1]
            assert (gaps == 0).all()


def test_an_empty_graph_takes_no_time():
    graph, costs = small_problem([], [], 2)
    assert makespan_s(simulate_synchronous(graph, costs, np.zeros(0, int))) == 0
