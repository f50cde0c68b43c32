"""`exact`: its schedules are legal, its optima are right, and its bounds are bounds."""

import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.baselines.exact import (
    MAX_TICKS,
    NoneFitsError,
    device_classes,
    durations_s,
    exact,
    first_use_order,
    tick_of,
)
from doppler_jax.baselines.simple import brute_force
from doppler_jax.costs.dnn_partitioning import load_dnn_partitioning
from doppler_jax.graphs.build import topological_order
from doppler_jax.simulator.memory import peak_memory_bytes
from experiments.catalogue import load_optima
from tests.baselines.listing_cases import arrival_s, check_plan
from tests.commands import printed
from tests.generators import (
    free_costs,
    groups_of_loads,
    make_schedule,
    random_problem,
    small_graph,
)
from tests.simulator.cases import small_problem

pytest.importorskip("ortools", reason="OR-Tools is not installed (extra `exact`)")

BUDGET_S = 60.0


def shortest_semi_active(graph, costs):
    """The least makespan over all placements and orders, each task as early as it can."""
    n, d = graph.num_tasks, costs.num_devices
    producers = {
        v: set(graph.tensor_producer[graph.edge_tensor[graph.edge_reader == v]])
        for v in range(n)
    }
    orders = [
        order
        for order in itertools.permutations(range(n))
        if all(producers[v] <= set(order[:i]) for i, v in enumerate(order))
    ]
    shortest = np.inf
    for placement in itertools.product(range(d), repeat=n):
        for order in orders:
            free_s, finish_s = np.zeros(d), np.zeros(n)
            plan = SimpleNamespace(placement=placement, finish_s=finish_s)
            for v in order:
                here = placement[v]
                start = max(free_s[here], arrival_s(graph, costs, plan, v, here))
                finish_s[v] = free_s[here] = start + costs.compute_s[v, here]
            shortest = min(shortest, finish_s.max())
    return shortest


def assert_legal(graph, costs, result):
    """No overlap, nothing read before it is there, and the makespan is the last finish."""
    own_s = costs.compute_s[np.arange(graph.num_tasks), result.placement]
    finish_s = result.start_s + own_s
    assert finish_s.max() == result.makespan_s
    assert result.bound_s <= result.makespan_s
    check_plan(graph, costs, make_schedule(result.placement, result.start_s, finish_s))


@pytest.mark.parametrize("seed", range(8))
def test_optimum_of_tiny_graphs_is_that_of_all_semi_active_schedules(seed):
    rng = np.random.default_rng(seed)
    graph, costs = random_problem(rng, 4 + seed % 2, 2, dyadic=True)
    result = exact(graph, costs, budget_s=BUDGET_S)
    assert_legal(graph, costs, result)
    assert result.proven
    assert result.makespan_s == result.bound_s == shortest_semi_active(graph, costs)


@pytest.mark.parametrize("seed", range(4))
def test_optimum_is_at_most_the_best_placement_under_fifo(seed):
    rng = np.random.default_rng(seed)
    graph, costs = random_problem(rng, 6, 3)
    if seed % 2:  # equal devices, so that the model breaks symmetry; no two numbers alike
        costs = costs.replace(
            compute_s=np.repeat(costs.compute_s[:, :1], 3, axis=1),
            latency_s=0.3 * (1 - np.eye(3)),
            seconds_per_byte=0.2 * (1 - np.eye(3)),
        )
    result = exact(graph, costs, budget_s=BUDGET_S)
    assert_legal(graph, costs, result)
    assert result.proven
    best_s = dj.simulate(graph, costs, brute_force(graph, costs)[None]).makespan_s[0]
    assert result.makespan_s <= best_s * (1 + 1e-6)
    # What rounding leaves: two ticks for each task.
    start_s = dj.place(graph, costs, method="critical_path").makespan_s
    assert result.makespan_s - result.bound_s <= 2 * 6 * start_s / (MAX_TICKS / 2)


def test_nothing_is_returned_while_something_shorter_is_known():
    # The shortest schedule idles on purpose; first come, first served, its placement takes
    # 218 ms, and HEFT's takes the 204 that are proven to be the least.
    graph = dj.make_graph(
        flops=[2e9, 6e9, 20e9, 24e9, 16e9, 30e9, 28e9, 22e9, 10e9, 40e9, 36e9, 8e9],
        tensor_producer=range(12),
        tensor_bytes=[2e8, 1.8e8, 1.2e8, 1.2e8, 9e7, 6e7, 6e7, 5e7, 1.5e8, 8e7, 8e7, 1e6],
        edge_tensor=[0, 1, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10],
        edge_reader=[1, 2, 3, 4, 10, 5, 7, 6, 7, 8, 8, 8, 9, 10, 11, 11],
    )
    rates = np.array([[np.inf, 1e10, 2e9], [1e10, np.inf, 5e9], [2e9, 5e9, np.inf]])
    compute_s, latency_s = graph.flops[:, None] / [1e12, 5e11, 2.5e11], 1e-5 * (1 - np.eye(3))
    costs = free_costs(graph, compute_s, latency_s=latency_s, seconds_per_byte=1 / rates)
    placed = dj.place(graph, costs, method="exact", budget_s=BUDGET_S)
    assert placed.makespan_s <= dj.place(graph, costs, method="heft").makespan_s
    np.testing.assert_allclose([placed.makespan_s, placed.lower_bound_s], 0.204, rtol=1e-5)


def test_a_schedule_that_fits_as_it_is_executed_is_proven():
    # A chain whose tensors never lie anywhere together, and tasks that no list schedule packs.
    chain = [(v, v + 1, 6.0) for v in range(4)]
    graph, costs = dj.from_edge_delays([1, 1, 1, 1, 1, 3, 3, 2, 2, 2.1], chain, num_devices=2)
    costs = costs.replace(capacity_bytes=np.full(2, 12.0))
    placed = dj.place(graph, costs, method="exact", budget_s=BUDGET_S)
    assert (dj.simulator.peak_memory_bytes(graph, costs, placed.schedule) <= 12).all()
    assert placed.proven


def test_where_no_placement_surely_fits_lists_do_and_the_bound_stays():
    graph, costs = groups_of_loads()
    with pytest.raises(NoneFitsError, match="surely fits") as refused:
        exact(graph, costs, budget_s=BUDGET_S)
    placed = dj.place(graph, costs, method="exact", budget_s=BUDGET_S)
    assert (dj.simulator.peak_memory_bytes(graph, costs, placed.schedule) <= 400).all()
    assert placed.lower_bound_s >= refused.value.bound_s


def test_unequal_shares_that_greedy_rules_miss():
    graph, costs = dj.from_edge_delays([3, 3, 2, 2, 2], [], num_devices=2)
    result = exact(graph, costs, budget_s=BUDGET_S)
    assert (result.makespan_s, result.bound_s, result.proven) == (6.0, 6.0, True)


def test_idling_beats_work_conserving_execution():
    # Device 0 does best to wait a second for task 2, which device 1 waits for.
    graph, costs = dj.from_edge_delays([10, 1, 1, 10], [(1, 2, 0), (2, 3, 0)], num_devices=2)
    pinned = np.full((4, 2), np.inf)
    pinned[np.arange(4), [0, 1, 0, 1]] = [10, 1, 1, 10]
    costs = costs.replace(compute_s=pinned)
    assert dj.simulate(graph, costs, brute_force(graph, costs)[None]).makespan_s == 21
    result = exact(graph, costs, budget_s=BUDGET_S)
    assert_legal(graph, costs, result)
    assert (result.makespan_s, result.proven) == (12.0, True)
    assert result.placement.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(("delay", "expected"), [(4.0, 8.0), (0.5, 5.5)])
def test_a_fork_is_spread_only_if_transfers_are_cheap(delay, expected):
    edges = [(0, 1, delay), (0, 2, delay)]
    graph, costs = dj.from_edge_delays([2, 3, 3], edges, num_devices=3)
    assert exact(graph, costs, budget_s=BUDGET_S).makespan_s == expected


def test_no_tasks_and_a_hopeless_budget():
    empty, costs = dj.from_edge_delays([], [], num_devices=2)
    assert exact(empty, costs, budget_s=1.0).proven
    graph, costs = random_problem(np.random.default_rng(0), 30, 4)
    result = exact(graph, costs, budget_s=1e-9)
    assert_legal(graph, costs, result)
    assert result.bound_s >= dj.lower_bound_s(graph, costs)


def test_same_seed_same_schedule():
    graph, costs = random_problem(np.random.default_rng(1), 12, 3)
    first, second = (exact(graph, costs, budget_s=BUDGET_S) for _ in range(2))
    assert first.proven
    np.testing.assert_array_equal(first.placement, second.placement)
    np.testing.assert_array_equal(first.start_s, second.start_s)


@pytest.mark.parametrize(
    ("scale", "tick"), [(1.0, 0.75), (3.0, 2.25), (2.0**-66, 0.75 * 2.0**-66)]
)
def test_the_tick_divides_all_durations_where_it_can(scale, tick):
    graph, costs = dj.from_edge_delays([1.5, 0.75], [(0, 1, 3.75)], num_devices=2)
    costs = costs.replace(
        compute_s=costs.compute_s * scale, tensor_bytes=3.75 * np.full(1, scale)
    )
    found = tick_of(durations_s(graph, costs), 2.25 * scale)
    assert found == 0.75 * scale
    # A duration that nothing else is a multiple of: a power of two that fills the horizon.
    costs = costs.replace(compute_s=costs.compute_s * [[1], [1 + 2.0**-40]])
    found = tick_of(durations_s(graph, costs), 2.25 * scale)
    assert MAX_TICKS / 2 < 2.25 * scale / found <= MAX_TICKS
    assert np.log2(found) % 1 == 0


@pytest.mark.parametrize(
    ("name", "num_devices"), [("rand0000", 2), ("rand0000", 4), ("rand0003", 8)]
)
def test_published_optima_are_proven(neutral_graphs, name, num_devices):
    folder = neutral_graphs / "stg50"
    bound_s, best_s = load_optima(folder / f"Case50_{num_devices}_OPT.csv")[name]
    assert bound_s == best_s
    problem = dj.from_edge_delays(
        *dj.graphs.load_stg(folder / f"{name}.stg"), num_devices=num_devices
    )
    result = exact(*problem, budget_s=BUDGET_S)
    assert_legal(*problem, result)
    assert (result.makespan_s, result.bound_s, result.proven) == (best_s, best_s, True)


def test_what_it_cannot_do_is_refused(monkeypatch):
    graph, costs = dj.from_edge_delays([1, 1], [(0, 1, 8.0)], num_devices=2)
    zero = np.zeros(2)
    with pytest.raises(ValueError, match="costs have handling_s, which method 'exact'"):
        exact(graph, costs.replace(handling_s=zero, handling_s_per_byte=zero), budget_s=1)
    made = small_graph([1.0], inputs=[(dj.graphs.RESIDENT, 1.0, [0])])
    made = made.replace(input_maker=np.zeros(1, int))
    with pytest.raises(ValueError, match="graph input 0 has a maker, which method 'exact'"):
        exact(made, free_costs(made, [[1.0, 1.0]]), budget_s=1)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ImportError, match=r"doppler-jax\[exact\]"):
        exact(graph, costs, budget_s=1.0)


def weighted(times, weights, num_devices, capacity, tensors=()):
    """A problem whose tasks have resident weights, on devices of little memory."""
    inputs = [(dj.graphs.RESIDENT, weight, [v]) for v, weight in enumerate(weights)]
    graph, costs = small_problem(times, tensors, num_devices, inputs)
    return graph, costs.replace(capacity_bytes=np.full(num_devices, float(capacity)))


def test_weights_that_do_not_fit_together_are_spread():
    problem = weighted([1, 1], [60, 60], 2, 100, [(0, 5, [1])])
    result = exact(*problem, budget_s=BUDGET_S)
    assert_legal(*problem, result)
    assert (result.makespan_s, result.bound_s, result.proven) == (7.0, 7.0, True)
    enough = problem[1].replace(capacity_bytes=np.array([np.inf, 125.0]))
    assert exact(problem[0], enough, budget_s=BUDGET_S).makespan_s == 2.0


def test_results_that_do_not_fit_together_are_spread_too():
    graph = small_graph([1] * 3, [(v, 60, []) for v in range(3)])
    costs = free_costs(graph, [[1.0, 5.0, 5.0]] * 3, capacity_bytes=np.full(3, 100.0))
    result = exact(graph, costs, budget_s=BUDGET_S)
    # The bound knows weights alone, and these tasks have none.
    assert (result.makespan_s, result.bound_s, result.proven) == (5.0, 3.0, False)
    assert sorted(result.placement) == [0, 1, 2]
    two = free_costs(graph, costs.compute_s[:, :2], capacity_bytes=np.full(2, 100.0))
    with pytest.raises(ValueError, match="no placement that surely fits into memory"):
        exact(graph, two, budget_s=BUDGET_S)


@pytest.mark.parametrize("seed", range(6))
def test_memory_is_respected_and_the_bound_holds(seed):
    rng = np.random.default_rng(seed)
    graph, costs = random_problem(rng, 4, 2, dyadic=True)
    total = costs.input_bytes[graph.input_edge_input].sum() + costs.tensor_bytes.sum()
    costs = costs.replace(capacity_bytes=np.full(2, 0.8 * total))
    result = exact(graph, costs, budget_s=BUDGET_S)
    assert_legal(graph, costs, result)
    order = topological_order(graph, result.start_s)
    executed = {"queue": "in_order", "priority": np.argsort(order)}
    schedule = dj.simulator.simulate_oracle(graph, costs, result.placement, **executed)
    assert dj.simulator.makespan_s(schedule) == result.makespan_s
    assert (peak_memory_bytes(graph, costs, schedule) <= costs.capacity_bytes).all()
    free = costs.replace(capacity_bytes=np.full(2, np.inf))
    assert exact(graph, free, budget_s=BUDGET_S).makespan_s <= result.bound_s
    for placement in itertools.product(range(2), repeat=4):
        schedule = dj.simulator.simulate_oracle(graph, costs, placement)
        if (peak_memory_bytes(graph, costs, schedule) <= costs.capacity_bytes).all():
            assert result.bound_s <= dj.simulator.makespan_s(schedule)


def test_what_cannot_fit_is_refused():
    with pytest.raises(ValueError, match="task 1 needs 120 bytes"):
        dj.place(*weighted([1, 1], [60, 120], 2, 100), method="exact")
    with pytest.raises(ValueError, match="no placement fits into the devices' memory"):
        exact(*weighted([1, 1, 1], [60, 60, 60], 2, 100), budget_s=BUDGET_S)


def test_a_network_with_memory_limits(neutral_graphs):
    folder = neutral_graphs / "dnn_partitioning"
    problem = load_dnn_partitioning(folder / "LayerGraphs" / "bert24_inference.json")
    result = exact(*problem, budget_s=BUDGET_S)
    assert_legal(*problem, result)
    held = np.bincount(result.placement, problem[0].input_bytes, 13)
    assert (held <= problem[1].capacity_bytes).all()
    assert result.proven
    assert result.makespan_s == pytest.approx(0.1002185)
    assert result.bound_s == pytest.approx(result.makespan_s, rel=1e-5)


def test_ctrl_c_is_left_to_python():
    pytest.importorskip("ortools")
    code = """
import signal
from doppler_jax.baselines.exact import exact
from doppler_jax.costs.build import from_edge_delays
exact(*from_edge_delays([1.0, 2.0], [(0, 1, 1.0)], num_devices=2), budget_s=5.0)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("python's")
"""
    assert printed("-c", code) == "python's\n"


def test_what_makes_devices_different():
    graph, costs = dj.from_edge_delays([1, 2], [(0, 1, 1)], num_devices=4)
    assert device_classes(graph, costs) == [[0, 1, 2, 3]]
    slower = costs.compute_s.copy()
    slower[1, 2] = 3
    assert device_classes(graph, costs.replace(compute_s=slower)) == [[0, 1, 3], [2]]
    link = costs.latency_s.copy()
    link[0, 1] = 1
    assert device_classes(graph, costs.replace(latency_s=link)) == [[0], [1], [2, 3]]
    islands = costs.latency_s.copy()
    islands[:2, 2:] = islands[2:, :2] = 1
    assert device_classes(graph, costs.replace(latency_s=islands)) == [[0, 1], [2, 3]]
    memory = np.array([1.0, np.inf, 1.0, np.inf])
    assert device_classes(graph, costs.replace(capacity_bytes=memory)) == [[0, 2], [1, 3]]
    homed = small_graph([1, 2], [], [(2, 1, [1]), (1, 1, [])])
    costs = costs.replace(tensor_bytes=np.zeros(0), input_bytes=homed.input_bytes)
    # The second input is read by nobody, so that its home does not matter.
    assert device_classes(homed, costs) == [[0, 1, 3], [2]]


def test_renaming_by_first_use():
    placement = np.array([3, 1, 0, 3, 2])
    renamed = first_use_order(placement, [[0, 1, 3], [2]], np.array([4, 1, 0, 2, 3]))
    assert renamed.tolist() == [1, 0, 3, 1, 2]


def test_devices_that_are_one_pool_run_tasks_of_no_length_too():
    # Tasks 3 and 4 take no time, while both devices are busy: they must not take a place.
    edges = [(0, 3, 0), (3, 4, 0), (4, 2, 0), (1, 2, 0), (5, 6, 0)]
    problem = dj.from_edge_delays([2, 2, 3, 0, 0, 4, 3], edges, num_devices=2)
    result = exact(*problem, budget_s=BUDGET_S)
    assert_legal(*problem, result)
    assert (result.makespan_s, result.bound_s, result.proven) == (7.0, 7.0, True)
