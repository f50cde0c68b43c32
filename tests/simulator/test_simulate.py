import dataclasses
import json

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.baselines.critical_path import critical_path
from experiments.catalogue import PUBLISHED, load_optima
from tests.generators import (
    free_costs,
    random_problem,
    relabel_devices,
    scale_costs,
)


def assert_equals_oracle(graph, costs, placements, **order):
    result = dj.simulate(graph, costs, placements, **order)
    for b, placement in enumerate(placements):
        schedule = dj.simulator.simulate_oracle(graph, costs, placement, **order)
        np.testing.assert_array_equal(result.start_s[b], schedule.start_s)
        np.testing.assert_array_equal(result.finish_s[b], schedule.finish_s)
        assert result.makespan_s[b] == dj.simulator.makespan_s(schedule)
        dj.simulator.validate(graph, schedule, costs, **order)


SIZES = [*range(13), 16, 20, 24, 32, *range(40, 65, 2), 64, 64, 64, 64, 64]


@pytest.mark.parametrize("num_devices", range(1, 9))
@pytest.mark.parametrize("dyadic", [True, False])
def test_equals_the_oracle_event_by_event(num_devices, dyadic):
    assert 2 * 8 * len(SIZES) >= 500
    rng = np.random.default_rng([num_devices, dyadic])
    for num_tasks in SIZES:
        graph, costs = random_problem(rng, num_tasks, num_devices, dyadic=dyadic)
        placements = rng.integers(0, num_devices, (3, num_tasks))
        assert_equals_oracle(graph, costs, placements)
        ranks = rng.integers(0, 12, num_tasks)  # they tie; the smaller id goes first
        assert_equals_oracle(graph, costs, placements, queue="priority", priority=ranks)


@pytest.mark.parametrize("name", [*PUBLISHED, "8gpu_transformer_block"])
def test_agrees_with_the_published_simulator(reference_graphs, name):
    golden = json.loads((reference_graphs / f"{name}.golden.json").read_text())
    graph = dj.load_graph(reference_graphs / f"{name}.txt")
    d = golden["num_devices"]
    costs = free_costs(
        graph,
        np.repeat(np.array(golden["compute_s"])[:, None], d, axis=1),
        tensor_bytes=np.array(golden["transfer_s"])[graph.tensor_producer],
        seconds_per_byte=1.0 - np.eye(d),
    )
    result = dj.simulate(graph, costs, golden["placements"])
    np.testing.assert_allclose(result.makespan_s, golden["makespan_s"], rtol=1e-12)
    oracle = dj.simulator.simulate_oracle(graph, costs, golden["placements"][0])
    np.testing.assert_allclose(
        dj.simulator.makespan_s(oracle), golden["makespan_s"][0], rtol=1e-12
    )


def test_batch_order_and_chunks_do_not_matter():
    rng = np.random.default_rng(1)
    graph, costs = random_problem(rng, 24, 4)
    placements = rng.integers(0, 4, (300, 24))
    together = dj.simulate(graph, costs, placements).makespan_s
    backwards = dj.simulate(graph, costs, placements[::-1]).makespan_s
    np.testing.assert_array_equal(together, np.asarray(backwards)[::-1])
    alone = dj.simulate(graph, costs, placements[5]).makespan_s
    np.testing.assert_array_equal(alone[0], together[5])


def test_relabelled_devices_and_scaled_costs():
    rng = np.random.default_rng(2)
    graph, costs = random_problem(rng, 24, 4)
    placements, new = rng.integers(0, 4, (10, 24)), rng.permutation(4)
    plain = dj.simulate(graph, costs, placements).makespan_s
    moved = dj.simulate(*relabel_devices(graph, costs, new), new[placements]).makespan_s
    np.testing.assert_array_equal(moved, plain)
    twice = dj.simulate(graph, scale_costs(costs, 2.0), placements).makespan_s
    np.testing.assert_array_equal(twice, 2 * plain)


@pytest.mark.parametrize(
    ("placements", "queue", "message"),
    [
        ([[0, 0, 4]], "fifo", "placement 0 puts task 2 on device 4; devices are 0 to 3"),
        ([[0, -1, 0]], "fifo", "puts task 1 on device -1"),
        ([[0, 0]], "fifo", r"expected \[B, 3\]"),
        ([[0.0, 1.0, 1.0]], "fifo", "must hold integers"),
        ([[0, 0, 0]], "lifo", "unknown queue 'lifo'; known: fifo, priority"),
        ([[0, 0, 0]], "priority", "priority"),
    ],
)
def test_bad_placements_and_queues_are_refused(placements, queue, message):
    graph, costs = random_problem(np.random.default_rng(0), 3, 4)
    with pytest.raises(ValueError, match=message):
        dj.simulate(graph, costs, placements, queue=queue)


def test_stars_chains_and_more_devices_than_tasks():
    # Fan-out of 40, fan-in of 40, a chain, and two tasks on eight devices.
    star = [(0, v, 1.0) for v in range(1, 41)] + [(v, 41, 2.0) for v in range(1, 41)]
    chain = [(v, v + 1, 0.5) for v in range(11)]
    rng = np.random.default_rng(0)
    for weights, edges, devices in [
        (np.arange(42) / 4, star, 3),
        (np.ones(12), chain, 2),
        ([1, 0], [(0, 1, 0)], 8),
        ([], [], 2),
        ([3], [], 1),
    ]:
        graph, costs = dj.from_edge_delays(weights, edges, num_devices=devices)
        placements = rng.integers(0, devices, (2, len(weights)))
        for links in ("parallel", "serial"):
            result = dj.simulate(graph, costs, placements, objective=dj.Objective(links))
            for b, placement in enumerate(placements):
                schedule = dj.simulator.simulate_oracle(graph, costs, placement, links=links)
                np.testing.assert_array_equal(result.finish_s[b], schedule.finish_s)


@pytest.fixture(scope="module")
def noisy():
    """A problem with 5 placements and 6 draws."""
    rng = np.random.default_rng(1)
    graph, costs = random_problem(rng, 24, 3)
    factors = dj.simulator.draw_factors(jax.random.key(0), graph, 3, 6, 0.2, 0.3)
    return graph, costs, rng.integers(0, 3, (5, 24)), factors


def test_draws_equal_the_oracle_and_do_not_depend_on_the_batch(noisy):
    graph, costs, placements, factors = noisy
    result = dj.simulate(graph, costs, placements, factors=factors)
    assert result.makespan_s.shape == (6, 5)
    for k, draw in enumerate(factors.draws()):
        for b, placement in enumerate(placements):
            schedule = dj.simulator.simulate_oracle(graph, costs, placement, **draw)
            assert result.makespan_s[k, b] == pytest.approx(
                dj.simulator.makespan_s(schedule), rel=1e-12
            )
    parts = [
        dj.simulate(graph, costs, part, factors=factors).makespan_s
        for part in (placements[:2], placements[2:])
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), result.makespan_s)


def test_noise_without_any_tensor():
    graph, costs = dj.from_edge_delays([1.0, 2.0], [], num_devices=2)
    factors = dj.simulator.draw_factors(jax.random.key(0), graph, 2, 3, 0.5, 0.5)
    result = dj.simulate(graph, costs, [0, 0], factors=factors)
    expected = np.asarray(factors.compute, np.float64) @ [1.0, 2.0]
    np.testing.assert_allclose(result.makespan_s[:, 0], expected, rtol=1e-12)


def test_random_queue_takes_a_permutation_per_draw(noisy):
    graph, costs, placements, factors = noisy
    ranks = np.asarray(dj.simulator.random_ranks(jax.random.key(1), 6, 24))
    alone = dj.simulate(graph, costs, placements, queue="random", priority=ranks)
    both = dj.simulate(
        graph, costs, placements, queue="random", priority=ranks, factors=factors
    )
    assert alone.makespan_s.shape == both.makespan_s.shape == (6, 5)
    for k, rank in enumerate(ranks):
        one = dj.simulate(graph, costs, placements, queue="priority", priority=rank)
        np.testing.assert_array_equal(one.start_s, alone.start_s[k])
        draw = jax.tree.map(lambda a, k=k: a[k : k + 1], factors)
        one = dj.simulate(
            graph, costs, placements, queue="priority", priority=rank, factors=draw
        )
        np.testing.assert_array_equal(one.start_s[0], both.start_s[k])


def test_bad_draws_are_refused(noisy):
    graph, costs, placements, factors = noisy
    ranks = np.tile(np.arange(24), (4, 1))
    with pytest.raises(ValueError, match="4 permutations, factors 6 draws"):
        dj.simulate(graph, costs, placements, queue="random", priority=ranks, factors=factors)
    with pytest.raises(ValueError, match="permutation of 0 to 23"):
        dj.simulate(graph, costs, placements, queue="random", priority=ranks // 2)
    bad = dataclasses.replace(factors, compute=factors.compute[:, 1:])
    with pytest.raises(ValueError, match=r"factors.compute has shape \(6, 23\)"):
        dj.simulate(graph, costs, placements, factors=bad)
    bad = dataclasses.replace(factors, transfer=-factors.transfer)
    with pytest.raises(
        ValueError, match=r"factors.transfer\[0, 0, 0\] is -.* a positive number"
    ):
        dj.simulate(graph, costs, placements, factors=bad)


def test_noise_of_the_objective_needs_factors_or_a_key(noisy):
    graph, costs, placements, factors = noisy
    objective = dj.Objective(num_noise=6, noise_sigma=0.2)
    with pytest.raises(ValueError, match="6 draws of noise; give factors or a key"):
        dj.simulate(graph, costs, placements, objective=objective)
    drawn = dj.simulate(graph, costs, placements, objective=objective, key=jax.random.key(0))
    factors = dj.simulator.draw_factors(jax.random.key(0), graph, 3, 6, 0.2, 0.2)
    given = dj.simulate(graph, costs, placements, factors=factors)
    np.testing.assert_array_equal(drawn.makespan_s, given.makespan_s)


def candidates(rng, graph, costs):
    """Critical path's placement, 63 neighbours of it, and 64 random ones."""
    listed = critical_path(graph, costs)
    random = rng.integers(0, costs.num_devices, (127, graph.num_tasks))
    near = np.where(rng.random((63, graph.num_tasks)) < 0.05, random[:63], listed)
    return np.concatenate([listed[None], near, random[63:]])


@pytest.mark.parametrize("num_devices", [2, 4, 8, 16])
def test_nothing_is_simulated_below_the_published_optimum(neutral_graphs, num_devices):
    rng = np.random.default_rng(num_devices)
    folder = neutral_graphs / "stg50"
    optima = load_optima(folder / f"Case50_{num_devices}_OPT.csv")
    num_met = 0
    paths = sorted(folder.glob("*.stg"))
    assert len(paths) == 40
    for path in paths:
        graph, costs = dj.from_edge_delays(*dj.graphs.load_stg(path), num_devices=num_devices)
        assert graph.num_tasks == 52
        placements = candidates(rng, graph, costs)
        makespans = np.asarray(dj.simulate(graph, costs, placements).makespan_s)
        # Task times are whole numbers, so that the simulator is exact.
        bound_s, best_s = optima[path.stem]
        assert makespans.min() >= bound_s, path.name
        assert 0 < dj.lower_bound_s(graph, costs) <= best_s
        for b in (0, 1, 127):
            assert (
                dj.simulator.makespan_s(
                    dj.simulator.simulate_oracle(graph, costs, placements[b])
                )
                == makespans[b]
            )
        num_met += makespans.min() == best_s
    assert num_met > 0  # otherwise the bounds were never near
