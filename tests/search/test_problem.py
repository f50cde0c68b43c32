"""What placements are worth to a search: what the oracle says, and what memory says."""

import dataclasses

import jax
import numpy as np
import pytest

from doppler_jax.objective import Objective
from doppler_jax.search import problem as problems
from doppler_jax.search.problem import can_overflow, judge, make_search_problem
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from tests.generators import random_problem
from tests.search.cases import DEVICES, pinned_problem, seconds


def peaks(graph, costs, placements):
    return np.array(
        [peak_memory_bytes(graph, costs, simulate_oracle(graph, costs, p)) for p in placements]
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("share", [0.5, 0.9, 0.999, 1.001, 4.0])
def test_values_are_the_oracles_and_energies_count_what_exceeds_memory(seed, share):
    rng = np.random.default_rng(seed)
    graph, costs = random_problem(rng, int(rng.integers(1, 15)), DEVICES, dyadic=bool(seed % 2))
    placements = rng.integers(0, DEVICES, (8, graph.num_tasks))
    peak = peaks(graph, costs, placements)
    capacity = share * np.array([np.median(peak[:, 0]), np.inf, peak[:, 2].max() + 1.0])
    costs = dataclasses.replace(costs, capacity_bytes=capacity)
    makespans = seconds(graph, costs, placements)
    problem = make_search_problem(graph, costs, Objective())
    value_s, energy = problem.score(problem.ordered(placements))
    fits = (peak <= capacity).all(1)
    np.testing.assert_array_equal(value_s, np.where(fits, makespans, np.inf))
    over = np.maximum(peak - capacity, 0.0) / np.maximum(capacity, 1.0)
    over = np.where(np.isinf(capacity), 0.0, over).sum(1)
    np.testing.assert_allclose(energy, makespans * (1 + over), rtol=1e-12)
    for placement, is_fit, value in zip(placements, fits, value_s, strict=True):
        judgement = judge(graph, costs, placement, Objective())
        assert (judgement.overflow == "") == is_fit
        assert judgement.value_s == value


def test_memory_that_has_room_for_everything_is_no_concern():
    graph, costs = pinned_problem(1, 12)
    total = costs.tensor_bytes.sum() + costs.input_bytes.sum()
    for capacity, expected in ((total * 1.01, False), (total * 0.99, True)):
        limited = dataclasses.replace(
            costs, capacity_bytes=np.array([np.inf, capacity, np.inf])
        )
        assert can_overflow(graph, limited) == expected
        assert make_search_problem(graph, limited, Objective()).is_limited == expected


@pytest.mark.parametrize("quantile", [None, 0.0, 0.9, 1.0])
@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_under_noise_a_statistic_of_the_draws_counts(
    quantile, is_tight, is_compiled, monkeypatch
):
    monkeypatch.setattr(problems, "is_compiled", lambda: is_compiled)
    graph, costs = pinned_problem(2, 12)
    placement = np.isfinite(costs.compute_s).argmax(1)
    if is_tight:
        peak = peaks(graph, costs, [placement])[0]
        costs = dataclasses.replace(costs, capacity_bytes=peak)
    objective = Objective(num_noise=5, noise_sigma=0.4, quantile=quantile)
    problem = make_search_problem(graph, costs, objective, jax.random.key(3))
    draws = [
        makespan_s(simulate_oracle(graph, costs, placement, **draw))
        for draw in problem.factors.draws()
    ]
    expected = np.mean(draws) if quantile is None else np.quantile(draws, quantile)
    judgement = judge(graph, costs, placement, objective, problem.factors)
    np.testing.assert_allclose(judgement.value_s, expected)
    assert judgement.makespan_s == makespan_s(simulate_oracle(graph, costs, placement))
    scored = problem.score(problem.ordered(placement[None]))
    np.testing.assert_allclose(scored, expected, rtol=1e-12)


@pytest.mark.parametrize("queue", ["priority", "in_order"])
def test_placements_without_orders_are_executed_by_level_and_do_not_wait(queue):
    graph, costs = random_problem(np.random.default_rng(4), 14, DEVICES)
    placements = np.random.default_rng(4).integers(0, DEVICES, (8, 14))
    problem = make_search_problem(graph, costs, Objective(), queue=queue)
    expected = seconds(graph, costs, placements, queue="priority", priority=problem.rank)
    plans = problem.ordered(placements)
    np.testing.assert_array_equal(problem.score(plans)[0], expected)
    values = [
        seconds(graph, costs, [placement], queue=queue, priority=rank)[0]
        for placement, rank in zip(*plans, strict=True)
    ]
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("links", ["parallel", "serial", "duplex"])
def test_links_are_the_oracles(links):
    graph, costs = random_problem(np.random.default_rng(4), 14, DEVICES, makers=True)
    assert (graph.input_maker >= 0).any()
    placements = np.random.default_rng(4).integers(0, DEVICES, (8, 14))
    expected = seconds(graph, costs, placements, links=links)
    problem = make_search_problem(graph, costs, Objective(links))
    found, _ = problem.score(problem.ordered(placements))
    np.testing.assert_array_equal(found, expected)
    judged = [judge(graph, costs, p, Objective(links)).value_s for p in placements]
    np.testing.assert_array_equal(judged, expected)
    if links == "serial":
        assert (found > seconds(graph, costs, placements) * 1.01).any()


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
def test_invalid_objectives_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Objective(**options)
