import dataclasses

import jax
import numpy as np
import pytest

from doppler_jax.objective import Objective
from doppler_jax.search.memory import can_overflow, excess, make_memory_table
from doppler_jax.search.objective import judge, make_search_problem, score
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.simulate import simulate_padded
from tests.generators import random_problem
from tests.search.cases import DEVICES, SIZE, one_size, pinned_problem

EXCESS = jax.jit(excess)
SCORE = jax.jit(score, static_argnums=0)


@pytest.fixture(scope="module", autouse=True)
def _one_compilation():
    with pytest.MonkeyPatch.context() as patch:
        one_size(patch)
        yield


def random_rows(rng, num_tasks):
    placements = rng.integers(0, DEVICES, (8, num_tasks))
    return placements, np.pad(placements, ((0, 0), (0, SIZE - num_tasks))).astype(np.int32)


def pad_items(table, size=64):
    """The table with items of no bytes, so that all have one shape."""
    items = size - len(table.item_bytes)
    edges = size - len(table.edge_item)
    return dataclasses.replace(
        table,
        item_bytes=np.pad(table.item_bytes, (0, items)),
        producer=np.pad(table.producer, (0, items), constant_values=SIZE),
        home=np.pad(table.home, (0, items)),
        is_result=np.pad(table.is_result, (0, items)),
        edge_item=np.pad(table.edge_item, (0, edges), constant_values=size - 1),
        edge_reader=np.pad(table.edge_reader, (0, edges), constant_values=SIZE),
    )


def test_in_float64_it_is_the_oracles_word_and_memory_to_the_byte():
    graph, costs = random_problem(np.random.default_rng(3), 14, DEVICES)
    placements, padded = random_rows(np.random.default_rng(0), 14)
    peaks = np.array(
        [peak_memory_bytes(graph, costs, simulate_oracle(graph, costs, p)) for p in placements]
    )
    costs = dataclasses.replace(costs, capacity_bytes=0.9 * peaks.max(0))
    with jax.enable_x64(True):
        problem = make_search_problem(graph, costs, Objective(), jax.random.key(0), np.float64)
        scores = jax.device_get(SCORE(Objective(), problem, padded))
    judged = np.array([judge(graph, costs, p, Objective()).value_s for p in placements])
    np.testing.assert_allclose(scores.value_s, judged, rtol=1e-12)
    assert 0 < np.isinf(judged).sum() < len(judged)
    over = np.maximum(peaks / costs.capacity_bytes - 1.0, 0.0).sum(1)
    makespans = [makespan_s(simulate_oracle(graph, costs, p)) for p in placements]
    np.testing.assert_allclose(scores.energy, makespans * (1 + over), rtol=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_memory_is_that_of_the_exact_account(seed):
    rng = np.random.default_rng(seed)
    graph, costs = random_problem(rng, int(rng.integers(1, 15)), DEVICES, dyadic=bool(seed % 2))
    placements, padded = random_rows(rng, graph.num_tasks)
    schedules = [simulate_oracle(graph, costs, p) for p in placements]
    peaks = np.array([peak_memory_bytes(graph, costs, s) for s in schedules])
    capacity = np.array([np.median(peaks[:, 0]), np.inf, peaks[:, 2].max() + 1.0])
    costs = dataclasses.replace(costs, capacity_bytes=capacity)
    problem = make_search_problem(graph, costs, Objective(), jax.random.key(0))
    times = simulate_padded(problem.padded, padded, schedule=True)
    table = pad_items(make_memory_table(graph, costs, problem.padded))
    over = EXCESS(
        table, problem.padded, padded, times.start_s, times.finish_s, np.ones(8, bool)
    )
    expected = np.maximum(peaks[:, 0] - capacity[0], 0.0) / max(capacity[0], 1.0)
    np.testing.assert_allclose(over, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999, 1.001, 1.1, 1.5, 4.0])
def test_memory_is_the_same_whether_peaks_are_worked_out_or_not(share):
    """From far too little to more than a device ever holds, where no peak is worked out."""
    graph, costs = random_problem(np.random.default_rng(3), 14, DEVICES)
    placements, padded = random_rows(np.random.default_rng(0), 14)
    schedules = [simulate_oracle(graph, costs, p) for p in placements]
    peaks = np.array([peak_memory_bytes(graph, costs, s) for s in schedules])
    costs = dataclasses.replace(costs, capacity_bytes=share * peaks.max(0))
    problem = make_search_problem(graph, costs, Objective(), jax.random.key(0))
    times = simulate_padded(problem.padded, padded, schedule=True)
    table = pad_items(make_memory_table(graph, costs, problem.padded))
    over = EXCESS(
        table, problem.padded, padded, times.start_s, times.finish_s, np.ones(8, bool)
    )
    expected = np.maximum(peaks / costs.capacity_bytes - 1.0, 0.0).sum(1)
    np.testing.assert_allclose(over, expected, rtol=1e-4, atol=1e-5)
    assert (expected > 0).any() == (share < 1)


def test_what_does_not_fit_is_worth_nothing_and_costs_more():
    graph, costs = random_problem(np.random.default_rng(1), 12, DEVICES)
    placements, padded = random_rows(np.random.default_rng(0), 12)
    peaks = np.array(
        [peak_memory_bytes(graph, costs, simulate_oracle(graph, costs, p)) for p in placements]
    )
    tight = dataclasses.replace(costs, capacity_bytes=np.quantile(peaks, 0.8, axis=0))
    free = make_search_problem(graph, costs, Objective(), jax.random.key(0))
    assert free.memory is None
    bound = make_search_problem(graph, tight, Objective(), jax.random.key(0))
    plain, limited = (SCORE(Objective(), problem, padded) for problem in (free, bound))
    fits = (peaks <= tight.capacity_bytes).all(1)
    assert 0 < fits.sum() < len(fits)
    np.testing.assert_array_equal(np.isfinite(limited.value_s), fits)
    np.testing.assert_allclose(limited.energy[fits], plain.energy[fits])
    assert (limited.energy[~fits] > plain.energy[~fits]).all()
    for placement, is_fit in zip(placements, fits, strict=True):
        judgement = judge(graph, tight, placement, Objective())
        assert (judgement.overflow == "") == is_fit
        assert np.isfinite(judgement.value_s) == is_fit


def test_memory_is_looked_at_below_the_limit():
    graph, costs = random_problem(np.random.default_rng(1), 12, DEVICES)
    _, padded = random_rows(np.random.default_rng(0), 12)
    costs = dataclasses.replace(costs, capacity_bytes=np.ones(DEVICES))  # nothing fits
    problem = make_search_problem(graph, costs, Objective(), jax.random.key(0))
    thorough = jax.device_get(SCORE(Objective(), problem, padded))
    assert np.isinf(thorough.value_s).all()
    free = dataclasses.replace(problem, memory=None)
    makespan_s = np.asarray(SCORE(Objective(), free, padded).value_s)
    limit_s = np.where(np.arange(8) % 2, 1.001 * makespan_s, makespan_s)
    scores = SCORE(Objective(), problem, padded, limit_s)
    np.testing.assert_array_equal(scores.energy[1::2], thorough.energy[1::2])
    np.testing.assert_array_equal(scores.value_s[1::2], thorough.value_s[1::2])
    np.testing.assert_array_equal(scores.energy[::2], makespan_s[::2])
    np.testing.assert_array_equal(scores.value_s[::2], makespan_s[::2])


def test_memory_that_holds_everything_is_no_concern():
    graph, costs = pinned_problem(1, 12)
    total = costs.tensor_bytes.sum() + costs.input_bytes.sum()
    for capacity, expected in ((total * 1.01, False), (total * 0.99, True)):
        capacities = np.array([np.inf, capacity, np.inf])
        limited = dataclasses.replace(costs, capacity_bytes=capacities)
        assert can_overflow(graph, limited) == expected


@pytest.mark.parametrize("quantile", [None, 0.0, 0.9])
def test_under_noise_a_statistic_of_the_draws_counts(quantile):
    graph, costs = pinned_problem(2, 12)
    objective = Objective(num_noise=5, noise_sigma=0.4, quantile=quantile)
    problem = make_search_problem(graph, costs, objective, jax.random.key(3))
    placement = np.isfinite(costs.compute_s).argmax(1)
    draws = [
        makespan_s(
            simulate_oracle(graph, costs, placement, compute_factor=c, transfer_factor=t)
        )
        for c, t in zip(problem.factors.compute, problem.factors.transfer, strict=True)
    ]
    expected = np.mean(draws) if quantile is None else np.quantile(draws, quantile)
    judgement = judge(graph, costs, placement, objective, problem.factors)
    np.testing.assert_allclose(judgement.value_s, expected)
    assert judgement.makespan_s == makespan_s(simulate_oracle(graph, costs, placement))
    padded = np.pad(placement[None], ((0, 0), (0, SIZE - 12))).astype(np.int32)
    scores = SCORE(objective, problem, padded)
    np.testing.assert_allclose(scores.value_s[0], expected, rtol=1e-5)


def test_links_are_the_oracles():
    graph, costs = random_problem(np.random.default_rng(4), 14, DEVICES)
    placements, padded = random_rows(np.random.default_rng(4), 14)
    found = {}
    for links in ("parallel", "serial"):
        objective = Objective(links=links)
        problem = make_search_problem(graph, costs, objective, jax.random.key(0))
        expected = [
            makespan_s(simulate_oracle(graph, costs, p, links=links)) for p in placements
        ]
        found[links] = np.asarray(SCORE(objective, problem, padded).value_s)
        np.testing.assert_allclose(found[links], expected, rtol=1e-5)
        judged = [judge(graph, costs, p, objective).value_s for p in placements]
        assert judged == expected
    assert (found["serial"] > found["parallel"] * 1.01).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"links": "wireless"}, "unknown links 'wireless'; known: parallel, serial, duplex"),
        ({"num_noise": -1}, "num_noise is -1; expected 0 or more"),
        ({"noise_sigma": -0.1}, "noise_sigma is -0.1"),
        ({"noise_sigma": np.nan}, "noise_sigma is nan"),
        ({"num_noise": 4, "quantile": 1.5}, "quantile is 1.5; expected 0 to 1"),
        ({"quantile": 0.9}, "give num_noise too"),
    ],
)
def test_objectives_that_are_none_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Objective(**options)
