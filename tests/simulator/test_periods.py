"""Seconds a step of a loop: by hand, and against a pass over one call after another."""

import numpy as np
import pytest

from doppler_jax.graphs.build import topological_order
from doppler_jax.simulator.periods import period_s
from tests.generators import random_problem
from tests.simulator.cases import small_problem


@pytest.mark.parametrize(
    ("maker", "placement", "expected"),
    [
        (1, [0, 0], 3.0),
        (1, [0, 1], 4.0),  # there and back, one after the other
        (0, [0, 1], 2.0),  # the second device is busy all the time
        (0, [0, 0], 3.0),
    ],
)
def test_by_hand(maker, placement, expected):
    """Task 0 takes 1 s and reads the state, task 1 takes 2 s and reads task 0."""
    graph, costs = small_problem([1, 2], [(0, 0.5, [1]), (1, 0.5, [])], 2, [(-1, 0.5, [0])])
    graph = graph.replace(input_maker=np.array([maker]))
    assert period_s(graph, costs, placement, [0, 1]) == pytest.approx(expected)


def spans_s(graph, costs, placement, order):
    """The makespans of three and of four calls, task by task."""
    move = lambda size, s, d: costs.latency_s[s, d] + size * costs.seconds_per_byte[s, d]  # noqa: E731
    free_s, finish_s, spans = np.zeros(costs.num_devices), {}, []
    reads = list(zip(graph.edge_tensor, graph.edge_reader, strict=True))
    input_reads = list(zip(graph.input_edge_input, graph.input_edge_reader, strict=True))
    for k in range(4):
        for v in order.tolist():
            d, ready_s = placement[v], 0.0
            for x in (x for x, reader in reads if reader == v):
                u = graph.tensor_producer[x]
                sent_s = finish_s[k, u] + move(costs.tensor_bytes[x], placement[u], d)
                ready_s = max(ready_s, sent_s)
            for i in (i for i, reader in input_reads if reader == v):
                maker, home = graph.input_maker[i], graph.homes(placement)[i]
                made_s = finish_s.get((k - 1, maker), 0.0) if maker >= 0 else 0.0
                moved_s = 0.0 if home < 0 else move(costs.input_bytes[i], home, d)
                ready_s = max(ready_s, made_s + moved_s)
            finish_s[k, v] = free_s[d] = max(free_s[d], ready_s) + costs.compute_s[v, d]
        spans.append(max(finish_s.values()))
    return spans[2:]


@pytest.mark.parametrize("seed", range(12))
def test_equals_a_pass_over_the_calls(seed):
    rng = np.random.default_rng(seed)
    graph, costs = random_problem(rng, 12, 3, makers=True)
    placement = rng.integers(0, 3, 12)
    rank = np.argsort(topological_order(graph, rng.permutation(12)))
    three_s, four_s = spans_s(graph, costs, placement, np.argsort(rank))
    found = period_s(graph, costs, placement, rank)
    assert found == pytest.approx(four_s - three_s, rel=1e-9)
    assert found > 0
