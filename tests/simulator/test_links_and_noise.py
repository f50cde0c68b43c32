"""The vectorised simulator against the oracle: links, queues, noise, devices, growth."""

import dataclasses
from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doppler_jax.costs.build import from_edge_delays, reference_costs
from doppler_jax.graphs import padded as padded_module
from doppler_jax.graphs.build import make_graph
from doppler_jax.graphs.padded import pad_problem
from doppler_jax.objective import Objective
from doppler_jax.simulator import simulate as simulate_module
from doppler_jax.simulator.noise import Factors, draw_factors, random_ranks
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.simulate import simulate, simulate_padded
from tests.generators import problems, random_problem
from tests.simulator.cases import with_idle_devices

SIZES = {2: 256, 4: 128, 8: 32, 16: 1024}


@pytest.fixture
def one_bucket(monkeypatch):
    monkeypatch.setattr(padded_module, "bucket_size", lambda size, smallest: SIZES[smallest])
    monkeypatch.setattr(simulate_module, "bucket_size", lambda size: 96)


def batched(options, num_devices):
    """Options of the oracle as those of `simulate`; noise as one draw."""
    options = dict(options)
    if "compute_factor" in options:
        transfer = options.pop("transfer_factor")
        idle = ((0, 0), (0, num_devices - transfer.shape[1]))
        factors = Factors(
            compute=options.pop("compute_factor")[None],
            transfer=np.pad(transfer, idle, constant_values=1.0)[None],
        )
        options["factors"] = factors
    return options


@pytest.mark.parametrize("links", ["parallel", "serial"])
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_equals_the_oracle(links, problem):
    graph, costs, placement, options = problem
    hypothesis.assume(options.get("queue") != "in_order")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padded_module, "bucket_size", lambda size, smallest: SIZES[smallest])
        patch.setattr(simulate_module, "bucket_size", lambda size: 96)
        more = with_idle_devices(costs, 4)
        result = simulate(
            graph, more, placement, objective=Objective(links), **batched(options, 4)
        )
    schedule = simulate_oracle(graph, costs, placement, links=links, **options)
    for found, expected in [
        (result.start_s, schedule.start_s),
        (result.finish_s, schedule.finish_s),
        (result.makespan_s, makespan_s(schedule)),
    ]:
        expected = np.broadcast_to(expected, found.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("links", ["parallel", "serial"])
@pytest.mark.parametrize("queue", ["fifo", "priority"])
def test_equals_the_oracle_exactly_where_sums_are(links, queue, one_bucket):
    rng = np.random.default_rng(5)
    for _ in range(20):
        graph, costs = random_problem(rng, 30, 4, dyadic=True)
        placements = rng.integers(0, 4, (2, 30))
        priority = rng.integers(0, 9, 30) if queue == "priority" else None
        result = simulate(
            graph, costs, placements, objective=Objective(links), queue=queue, priority=priority
        )
        for b, placement in enumerate(placements):
            schedule = simulate_oracle(
                graph, costs, placement, links=links, queue=queue, priority=priority
            )
            np.testing.assert_array_equal(result.start_s[b], schedule.start_s)
            np.testing.assert_array_equal(result.finish_s[b], schedule.finish_s)


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
        graph, costs = from_edge_delays(weights, edges, num_devices=devices)
        placements = rng.integers(0, devices, (2, len(weights)))
        for links in ("parallel", "serial"):
            result = simulate(graph, costs, placements, objective=Objective(links))
            for b, placement in enumerate(placements):
                schedule = simulate_oracle(graph, costs, placement, links=links)
                np.testing.assert_array_equal(result.finish_s[b], schedule.finish_s)


def test_engine_links_are_simulated_as_such():
    # Two outputs wait for one engine: test_duplex_links.py has the rest.
    edges = [(0, 2, 4.0), (1, 3, 4.0)]
    graph, costs = from_edge_delays([1, 1, 1, 1], edges, num_devices=3)
    placement = [0, 1, 2, 2]
    found = {}
    for links in ("serial", "duplex"):
        found[links] = simulate(graph, costs, placement, objective=Objective(links)).finish_s[0]
        schedule = simulate_oracle(graph, costs, placement, links=links)
        np.testing.assert_array_equal(found[links], schedule.finish_s)
    assert found["duplex"].max() > found["serial"].max()


@pytest.mark.parametrize("queue", ["fifo", "priority"])
def test_wide_graphs_take_queues_and_give_the_same(queue, monkeypatch):
    rng = np.random.default_rng(6)
    graph, costs = random_problem(rng, 20, 3)
    placements = rng.integers(0, 3, (3, 20))
    options = {"queue": queue, "priority": rng.random((3, 20))} if queue == "priority" else {}
    slots = simulate(graph, costs, placements, **options)
    monkeypatch.setattr(simulate_module, "WIDE", (0, 0))
    simulate_padded.clear_cache()
    queues = simulate(graph, costs, placements, **options)
    simulate_padded.clear_cache()
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12), slots, queues)


@pytest.fixture(scope="module")
def noisy():
    """A problem with 5 placements and 6 draws."""
    rng = np.random.default_rng(1)
    graph, costs = random_problem(rng, 24, 3)
    factors = draw_factors(jax.random.key(0), graph, 3, 6, 0.2, 0.3)
    return graph, costs, rng.integers(0, 3, (5, 24)), factors


def test_draws_equal_the_oracle_and_do_not_depend_on_the_batch(noisy):
    graph, costs, placements, factors = noisy
    result = simulate(graph, costs, placements, factors=factors, schedule=False)
    assert result.makespan_s.shape == (6, 5)
    for k, (compute, transfer) in enumerate(
        zip(factors.compute, factors.transfer, strict=True)
    ):
        for b, placement in enumerate(placements):
            schedule = simulate_oracle(
                graph,
                costs,
                placement,
                compute_factor=np.asarray(compute, np.float64),
                transfer_factor=np.asarray(transfer, np.float64),
            )
            assert result.makespan_s[k, b] == pytest.approx(makespan_s(schedule), rel=1e-12)
    parts = [
        simulate(graph, costs, part, factors=factors, schedule=False).makespan_s
        for part in (placements[:2], placements[2:])
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), result.makespan_s)


def test_noise_without_any_tensor():
    graph, costs = from_edge_delays([1.0, 2.0], [], num_devices=2)
    factors = draw_factors(jax.random.key(0), graph, 2, 3, 0.5, 0.5)
    result = simulate(graph, costs, [0, 0], factors=factors)
    expected = np.asarray(factors.compute, np.float64) @ [1.0, 2.0]
    np.testing.assert_allclose(result.makespan_s[:, 0], expected, rtol=1e-12)


def test_random_queue_takes_a_permutation_per_draw(noisy):
    graph, costs, placements, factors = noisy
    ranks = np.asarray(random_ranks(jax.random.key(1), 6, 24))
    alone = simulate(graph, costs, placements, queue="random", priority=ranks)
    both = simulate(graph, costs, placements, queue="random", priority=ranks, factors=factors)
    assert alone.makespan_s.shape == both.makespan_s.shape == (6, 5)
    for k, rank in enumerate(ranks):
        one = simulate(graph, costs, placements, queue="priority", priority=rank)
        np.testing.assert_array_equal(one.start_s, alone.start_s[k])
        draw = jax.tree.map(lambda a, k=k: a[k : k + 1], factors)
        one = simulate(graph, costs, placements, queue="priority", priority=rank, factors=draw)
        np.testing.assert_array_equal(one.start_s[0], both.start_s[k])


@pytest.mark.parametrize("schedule", [False, True])
def test_one_two_and_four_devices_give_the_same(noisy, schedule, monkeypatch):
    graph, costs, _, factors = noisy
    placements = np.random.default_rng(2).integers(0, 3, (67, 24))
    priority = np.random.default_rng(3).random((67, 24))
    monkeypatch.setattr(simulate_module, "SHARD_AT", 16)
    used = []
    sharded = simulate_module.sharded
    monkeypatch.setattr(simulate_module, "sharded", lambda *a: used.append(a[0]) or sharded(*a))
    run = partial(
        simulate,
        graph,
        costs,
        placements,
        queue="priority",
        priority=priority,
        factors=factors,
        schedule=schedule,
    )
    results = []
    for devices in (1, 2, 4):
        monkeypatch.setattr(jax, "local_device_count", lambda n=devices: n)
        results.append(run())
    assert used == [1, 2, 4]
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)


def test_a_batch_may_mix_graphs_of_a_bucket(one_bucket):
    rng = np.random.default_rng(4)
    problem_list = [random_problem(rng, n, 3) for n in (20, 25, 30)]
    padded_list = [pad_problem(graph, costs) for graph, costs in problem_list]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *padded_list)
    placements = rng.integers(0, 3, (3, 4, 32))
    mixed = jax.jit(jax.vmap(simulate_padded))(stacked, placements).makespan_s
    for i, padded in enumerate(padded_list):
        alone = simulate_padded(padded, placements[i]).makespan_s
        np.testing.assert_array_equal(mixed[i], alone)


@pytest.mark.parametrize("num_tasks", [1024, 16384])
def test_float32_is_exact_on_large_graphs_with_dyadic_costs(num_tasks):
    rng = np.random.default_rng(num_tasks)
    width = 16
    v = np.arange(width, num_tasks)
    random_parent = (v // width - 1) * width + rng.integers(0, width, len(v))
    sources = np.concatenate([v - width, random_parent])
    edges = np.unique(np.stack([sources, np.tile(v, 2)]), axis=1)
    graph = make_graph(
        flops=np.ones(num_tasks),
        tensor_producer=np.arange(num_tasks),
        tensor_bytes=rng.integers(0, 9, num_tasks) / 4,
        edge_tensor=edges[0],
        edge_reader=edges[1],
    )
    costs = reference_costs(graph, 4)
    costs = dataclasses.replace(
        costs,
        compute_s=rng.integers(1, 9, costs.compute_s.shape) / 4,
        seconds_per_byte=1.0 - np.eye(4),
    )
    placement = rng.integers(0, 4, (1, num_tasks))
    found = simulate_padded(pad_problem(graph, costs), placement, schedule=True)
    schedule = simulate_oracle(graph, costs, placement[0])
    np.testing.assert_array_equal(found.finish_s[0, :num_tasks], schedule.finish_s)


@given(st.sampled_from(["engines", "Serial", ""]))
def test_unknown_links_are_refused(links):
    graph, costs = from_edge_delays([1, 1], [(0, 1, 1)])
    with pytest.raises(ValueError, match="unknown links"):
        simulate(graph, costs, [0, 1], objective=Objective(links))


def test_bad_draws_are_refused(noisy):
    graph, costs, placements, factors = noisy
    ranks = np.tile(np.arange(24), (4, 1))
    with pytest.raises(ValueError, match="4 permutations, factors 6 draws"):
        simulate(graph, costs, placements, queue="random", priority=ranks, factors=factors)
    with pytest.raises(ValueError, match="permutations of 0 to 23"):
        simulate(graph, costs, placements, queue="random", priority=ranks // 2)
    bad = dataclasses.replace(factors, compute=factors.compute[:, 1:])
    with pytest.raises(ValueError, match=r"factors.compute has shape \(6, 23\)"):
        simulate(graph, costs, placements, factors=bad)
    bad = dataclasses.replace(factors, transfer=-factors.transfer)
    with pytest.raises(ValueError, match=r"factors.transfer must hold positive"):
        simulate(graph, costs, placements, factors=bad)
