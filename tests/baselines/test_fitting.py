import dataclasses

import numpy as np
import pytest

from doppler_jax.baselines.fitting import fit_into_memory
from doppler_jax.graphs.build import topological_order
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import simulate_oracle
from tests.baselines.listing_cases import held_bytes, uneven_problem, with_compute

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
