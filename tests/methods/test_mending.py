"""Memory that an order decides on: list methods look for a plan that fits."""

import dataclasses
import itertools

import numpy as np
import pytest

from doppler_jax.graphs.build import task_edges
from doppler_jax.placing import place
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import simulate_oracle
from tests.generators import groups_of_loads, random_problem
from tests.methods.cases import COMPILED, HERE, from_samples

MENDING = [m for m in HERE if m not in (*COMPILED, "exact", "single", "round_robin")]


def peaks(graph, costs, placement, ranks):
    schedule = simulate_oracle(graph, costs, placement, queue="in_order", priority=ranks)
    return peak_memory_bytes(graph, costs, schedule)


def all_plans(graph, num_devices):
    """Yields every placement with the ranks of every linear extension."""
    senders, readers = task_edges(graph)
    orders = np.array(list(itertools.permutations(range(graph.num_tasks))))
    ranks = orders[(orders[:, senders] < orders[:, readers]).all(axis=1)]
    for placement in itertools.product(range(num_devices), repeat=graph.num_tasks):
        for rank in ranks:
            yield np.array(placement), rank


@pytest.fixture(scope="module")
def tightest():
    """Problems, each with the least capacity into which a plan fits."""
    problems = []
    for seed in range(16):
        graph, costs = random_problem(np.random.default_rng(seed), 4, 2)
        least = min(peaks(graph, costs, *plan).max() for plan in all_plans(graph, 2))
        problems.append((graph, costs, least))
    return problems


@pytest.mark.parametrize("method", MENDING)
def test_every_list_method_finds_the_order_of_groups(method):
    graph, costs = groups_of_loads()
    placed = place(graph, costs, method=method)
    peak = peak_memory_bytes(graph, costs, placed.schedule)
    assert (peak <= costs.capacity_bytes).all()
    assert placed.makespan_s < 20.0


def test_the_default_search_balances_groups_without_a_byte_more():
    graph, costs = groups_of_loads()
    placed = place(graph, costs, method=from_samples(None), max_evaluations=100_000)
    np.testing.assert_allclose(placed.makespan_s, 17.1, rtol=1e-6)
    assert peaks(graph, costs, placed.placement, placed.priority).max() <= 360.001


@pytest.mark.parametrize("method", MENDING)
def test_what_exists_is_mostly_found_and_never_exceeds(method, tightest):
    for share, floor in ((1.001, 15), (1.25, 16)):
        found = 0
        for graph, costs, least in tightest:
            costs = dataclasses.replace(costs, capacity_bytes=np.full(2, share * least))
            try:
                placed = place(graph, costs, method=method, queue="in_order")
            except ValueError:
                continue
            found += 1
            peak = peaks(graph, costs, placed.placement, placed.priority)
            assert (peak <= costs.capacity_bytes).all()
        assert found >= floor
