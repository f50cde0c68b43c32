import numpy as np
import pytest

from doppler_jax.baselines.peft import optimistic_costs, peft_schedule
from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.levels import mean_transfer_s
from tests.baselines.listing_cases import (
    ARABNEJAD,
    frontier_order,
    paper_example,
    replay,
    uneven_problem,
    with_compute,
)


def test_example_of_the_paper():
    graph, costs = paper_example(ARABNEJAD)
    table = [
        *([64, 68, 86], [42, 39, 42], [27, 41, 43], [42, 39, 50], [28, 37, 28]),
        *([42, 39, 44], [13, 16, 22], [13, 16, 33], [13, 16, 20], [0, 0, 0]),
    ]
    assert optimistic_costs(graph, costs).tolist() == table
    schedule = peft_schedule(graph, costs)
    assert schedule.finish_s.max() == 122.0
    assert schedule.placement.tolist() == [0, 0, 0, 0, 2, 1, 0, 1, 2, 1]


def naive_table(graph, costs):
    """The optimistic costs by the recursion as it is written."""
    senders, readers = task_edges(graph)
    move_s = mean_transfer_s(costs)[graph.edge_tensor]
    devices = range(costs.num_devices)
    known = {}

    def cost(t, p):
        if (t, p) not in known:
            known[t, p] = max(
                (
                    min(
                        cost(readers[e], q)
                        + costs.compute_s[readers[e], q]
                        + (q != p) * move_s[e]
                        for q in devices
                    )
                    for e in np.flatnonzero(senders == t)
                ),
                default=0.0,
            )
        return known[t, p]

    return np.array([[cost(t, p) for p in devices] for t in range(graph.num_tasks)])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dyadic", [False, True])
def test_every_task_goes_where_finish_and_rest_are_least(seed, dyadic):
    graph, costs = uneven_problem(seed, 40, 3, dyadic)
    table_s = optimistic_costs(graph, costs)
    np.testing.assert_allclose(table_s, naive_table(graph, costs), rtol=1e-12)
    able = np.isfinite(costs.compute_s)
    rank_s = np.where(able, table_s, 0.0).sum(axis=1) / able.sum(axis=1)
    schedule = peft_schedule(graph, costs)
    order = frontier_order(graph, rank_s)
    for v, start_s in replay(graph, costs, schedule, order):
        assert schedule.placement[v] == np.argmin(start_s + costs.compute_s[v] + table_s[v])
        assert schedule.start_s[v] == start_s[schedule.placement[v]]


def test_it_looks_ahead():
    # Task 0 is done sooner on device 0, where task 1 cannot run.
    graph, costs = with_compute([(0, 1, 9.0)], [[1.0, 2.0], [np.inf, 1.0]])
    assert peft_schedule(graph, costs).placement.tolist() == [1, 1]
