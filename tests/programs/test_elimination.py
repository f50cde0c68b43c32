"""Variable elimination finds the least sum; brute force is the judge."""

import itertools

import numpy as np
import pytest

from doppler_jax.programs.elimination import minimize


def total_cost(costs, pairs, states):
    """Returns the cost of one choice of states."""
    alone = sum(float(table[states[v]]) for v, table in enumerate(costs))
    return alone + sum(float(t[states[a], states[b]]) for (a, b), t in pairs.items())


def random_problem(rng, num_variables, density):
    sizes = rng.integers(1, 5, num_variables)
    costs = [rng.random(size) for size in sizes]
    pairs = {
        (a, b): rng.random((sizes[a], sizes[b]))
        for a, b in itertools.combinations(range(num_variables), 2)
        if rng.random() < density
    }
    return costs, pairs


def least(costs, pairs):
    choices = itertools.product(*(range(table.size) for table in costs))
    return min(total_cost(costs, pairs, states) for states in choices)


@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("num_variables", [0, 1, 2, 6])
def test_equals_brute_force(num_variables, density):
    rng = np.random.default_rng(num_variables)
    for _ in range(10):
        costs, pairs = random_problem(rng, num_variables, density)
        found = total_cost(costs, pairs, minimize(costs, pairs))
        assert found == pytest.approx(least(costs, pairs), abs=1e-12)


def test_small_tables_give_a_local_optimum():
    rng = np.random.default_rng(0)
    for _ in range(20):
        costs, pairs = random_problem(rng, 6, 1.0)
        states = minimize(costs, pairs, limit=8)
        found = total_cost(costs, pairs, states)
        for v, table in enumerate(costs):
            for state in range(table.size):
                other = [*states[:v], state, *states[v + 1 :]]
                assert total_cost(costs, pairs, other) >= found - 1e-12


def test_a_long_chain_is_solved_exactly():
    # States alternate for free, and the last one is forced: the first must give way.
    switch = np.array([[1.0, 0.0], [0.0, 1.0]])
    n = 3001
    costs = [np.zeros(2) for _ in range(n)]
    costs[0], costs[-1] = np.array([0.0, 0.5]), np.array([9.0, 0.0])
    states = minimize(costs, {(v, v + 1): switch for v in range(n - 1)})
    assert states == [(v + 1) % 2 for v in range(n)]


def test_ties_go_to_smaller_states():
    pairs = {(0, 1): np.zeros((3, 3)), (1, 2): np.zeros((3, 3))}
    assert minimize([np.zeros(3)] * 3, pairs) == [0, 0, 0]
