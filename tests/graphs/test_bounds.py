"""Bounds hold for every plan, and meet the optimum where one argument alone does."""

import numpy as np
import pytest
from scipy.optimize import linprog

import doppler_jax as dj
from doppler_jax.graphs.bounds import MOST_TASKS, common_divisor, lower_bound_s, weighted_load
from doppler_jax.graphs.levels import longest_paths
from tests.generators import random_problem


def path_or_load_s(graph, costs):
    """The larger of the longest path without transfers and the work over devices."""
    least_s = costs.compute_s.min(axis=1)
    head_s, _ = longest_paths(graph, np.zeros(graph.num_edges), least_s)
    return max((head_s + least_s).max(), least_s.sum() / costs.num_devices)


@pytest.mark.parametrize("seed", range(60))
def test_no_proven_optimum_is_below_the_bound(seed):
    pytest.importorskip("ortools", reason="OR-Tools is not installed (extra `exact`)")
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 5))
    graph, costs = random_problem(rng, int(rng.integers(1, 11)), count, dyadic=seed % 2 == 0)
    costs = costs.replace(capacity_bytes=np.full(count, np.inf))
    if seed % 3 == 0:  # equal devices
        apart = 1 - np.eye(count)
        equal_s = np.repeat(costs.compute_s.min(1, keepdims=True), count, axis=1)
        costs = costs.replace(
            compute_s=equal_s, latency_s=0.5 * apart, seconds_per_byte=0.25 * apart
        )
    bound_s = lower_bound_s(graph, costs)
    assert bound_s >= path_or_load_s(graph, costs)
    placed = dj.place(graph, costs, method="exact", budget_s=60.0, queue="in_order")
    assert placed.proven
    assert bound_s <= placed.makespan_s * (1 + 1e-12)


@pytest.mark.parametrize("links", ["parallel", "serial", "duplex"])
@pytest.mark.parametrize("queue", ["fifo", "in_order"])
def test_no_random_plan_is_below_the_bound_in_graphs_of_any_size(links, queue):
    for seed, num_tasks in enumerate((1, 2, 40, MOST_TASKS + 1)):
        rng = np.random.default_rng(seed)
        graph, costs = random_problem(rng, num_tasks, 3)
        able = np.isfinite(costs.compute_s)
        placement = np.argmax(rng.random(able.shape) * able, axis=1)
        rank = dj.graphs.t_level(graph, costs.replace(tensor_bytes=costs.tensor_bytes + 1.0))
        rank = {} if queue == "fifo" else {"priority": rank}
        ran = dj.simulator.simulate_oracle(
            graph, costs, placement, links=links, queue=queue, **rank
        )
        bound_s = lower_bound_s(graph, costs)
        assert path_or_load_s(graph, costs) <= bound_s <= dj.simulator.makespan_s(ran)


@pytest.mark.parametrize(
    ("times", "edges", "num_devices", "expected"),
    [
        # Both producers stay, one after the other: sending one would take until 1 + 9.
        ([4, 3, 1], [(0, 2, 9), (1, 2, 9)], 2, 8),
        ([4, 3, 1], [(0, 2, 2), (1, 2, 2)], 2, 6),  # the shorter one is sent
        ([1, 3, 4], [(0, 1, 9), (0, 2, 9)], 2, 8),  # the same backwards
        ([2, 4, 4, 2], [(v, w, 0) for v, w in ((0, 1), (0, 2), (1, 3), (2, 3))], 1, 12),
        (
            [4, 2, 2, 2, 4],
            [(0, v, 0) for v in (1, 2, 3)] + [(v, 4, 0) for v in (1, 2, 3)],
            2,
            12,
        ),
        ([3, 3, 3, 3, 3], [], 2, 9),  # not 7.5
        # All tasks of 4 s run in 2 of the seconds 2 to 4, and so does the chain's second.
        ([2, 2, 2, 4, 4, 4], [(0, 1, 0), (1, 2, 0)], 3, 8),
        # All sixteen stay; no more than `MOST_KEPT` of them count.
        ([1] * 17, [(v, 16, 99) for v in range(16)], 2, 13),
        ([], [], 2, 0),
    ],
)
def test_bounds_by_hand(times, edges, num_devices, expected):
    problem = dj.from_edge_delays(times, edges, num_devices=num_devices)
    assert lower_bound_s(*problem) == expected


def test_unequal_devices_count_by_device():
    graph, costs = dj.from_edge_delays([1, 1], [(0, 1, 8)], num_devices=2)
    links = {"latency_s": [[0, 1], [3, 0]], "seconds_per_byte": [[0, 0.5], [0.25, 0]]}
    costs = costs.replace(**{name: np.array(link) for name, link in links.items()})
    # Staying takes 10 and 11 s; sending 2 + 1 + 4 + 3.
    costs = costs.replace(compute_s=np.array([[2.0, 8.0], [8.0, 3.0]]))
    assert lower_bound_s(graph, costs) == 10
    costs = costs.replace(compute_s=np.array([[2.0, 8.0], [np.inf, 4.0]]))
    assert lower_bound_s(graph, costs) == 11


@pytest.mark.parametrize(
    ("name", "num_devices", "expected_s"),
    [
        ("chain_mm_112nodes", 4, 1200.07),
        ("ffnn_192nodes", 8, 34.790),
        ("transformer_block_215nodes", 4, 141.09),
        ("full_transformer_layer_261nodes", 4, 97.251),
        ("8gpu_transformer_block", 8, 159.56),
    ],
)
def test_bounds_of_the_published_graphs(reference_graphs, name, num_devices, expected_s):
    graph = dj.load_graph(reference_graphs / f"{name}.txt")
    bound_s = lower_bound_s(graph, dj.reference_costs(graph, num_devices))
    assert bound_s == pytest.approx(expected_s, rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_weights_come_near_the_linear_program_and_never_pass_it(seed):
    rng = np.random.default_rng(seed)
    n, devices = 30, 4
    compute_s = rng.uniform(1, 10, (n, devices))
    cost = np.append(np.zeros(n * devices), 1.0)
    load = np.concatenate([np.diag(row) for row in compute_s], axis=1)
    load = np.concatenate([load, -np.ones((devices, 1))], axis=1)
    once = np.append(np.kron(np.eye(n), np.ones(devices)), np.zeros((n, 1)), axis=1)
    optimum = linprog(cost, load, np.zeros(devices), once, np.ones(n)).fun
    assert 0.98 * optimum < weighted_load(compute_s).sum() <= optimum * (1 + 1e-9)


def test_the_common_divisor_is_exact_or_absent():
    assert common_divisor(np.array([0.0, 1.5, 0.75, 3.75])) == 0.75
    assert common_divisor(2.0**-66 * np.array([6.0, 4.0])) == 2.0**-65
    assert common_divisor(np.array([1.0, 2.0**-60])) == 0.0
    assert common_divisor(np.zeros(2)) == np.inf
