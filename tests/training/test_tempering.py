import chex
import jax
import numpy as np
import pytest

from doppler_jax.simulator.simulate import simulate_padded
from doppler_jax.training import tempering
from doppler_jax.training.state import Placements
from doppler_jax.training.tempering import RUNGS
from tests.generators import random_problem
from tests.policies.cases import DEVICES, padded_problem

temper = jax.jit(tempering.temper, static_argnames=("rounds", "links"))
exchange = jax.jit(tempering._exchange)
TASKS, BUCKET, CHAINS = 12, 24, 2 * RUNGS
NUMBER = np.arange(CHAINS, dtype=np.int32)


def run(problem, chains, proposals, best_s, number=NUMBER, **options):
    key = jax.random.key(0)
    return temper(key, problem.padded, number, chains, proposals, best_s, **options)


def start():
    rng = np.random.default_rng(0)
    graph, costs = random_problem(rng, TASKS, DEVICES)
    problem = padded_problem(graph, costs, BUCKET, 256)
    placement = np.zeros((CHAINS, BUCKET), np.int32)
    placement[:, :TASKS] = rng.integers(0, DEVICES, (CHAINS, TASKS))
    proposals = Placements(placement=placement, makespan_s=seconds(problem, placement))
    empty = np.full(CHAINS, np.inf, np.float32)
    return problem, Placements(placement=np.zeros_like(placement), makespan_s=empty), proposals


def seconds(problem, placement, links="parallel"):
    result = simulate_padded(problem.padded, placement, links=links)
    return np.asarray(result.makespan_s)


def test_chains_know_their_makespans_and_the_best_is_met():
    problem, empty, proposals = start()
    best_s = proposals.makespan_s.min()
    chains, best = run(problem, empty, proposals, best_s, rounds=12)
    np.testing.assert_allclose(chains.makespan_s, seconds(problem, chains.placement), rtol=1e-6)
    np.testing.assert_allclose(best.makespan_s, seconds(problem, best.placement), rtol=1e-6)
    assert best.makespan_s.min() < 0.95 * best_s
    assert (np.asarray(chains.placement)[:, TASKS:] == 0).all()
    # Cold chains have settled where hot ones roam.
    rung = np.arange(CHAINS) % RUNGS
    made_s = np.asarray(chains.makespan_s)
    assert made_s[rung >= RUNGS - 4].mean() < made_s[rung < 4].mean()


def test_chains_are_simulated_under_the_links_given():
    problem, empty, proposals = start()
    serial_s = seconds(problem, proposals.placement, "serial")
    assert (serial_s > proposals.makespan_s).any()
    proposals = proposals.replace(makespan_s=serial_s)
    for found in run(problem, empty, proposals, serial_s.min(), rounds=3, links="serial"):
        expected_s = seconds(problem, found.placement, "serial")
        np.testing.assert_allclose(found.makespan_s, expected_s, rtol=1e-6)


def test_an_empty_chain_takes_any_proposal_and_a_settled_one_none_that_is_far_worse():
    problem, empty, proposals = start()
    best_s = np.float32(1e-3)
    chains, best = run(problem, empty, proposals, best_s, rounds=0)
    np.testing.assert_array_equal(chains.placement, proposals.placement)
    np.testing.assert_array_equal(best.makespan_s, proposals.makespan_s)
    settled = empty.replace(makespan_s=np.full(CHAINS, best_s))
    chains, _ = run(problem, settled, proposals, best_s, rounds=0)
    np.testing.assert_array_equal(chains.placement, settled.placement)


def test_exchanges_are_permutations_within_a_ladder_that_sort_at_low_temperature():
    temperature_s = np.asarray(tempering._ladder(CHAINS)) * 1e-6
    made_s = np.random.default_rng(0).permutation(CHAINS).astype(np.float32)
    ladder = np.arange(CHAINS) // RUNGS
    for number in range(4 * RUNGS):
        keys = jax.random.split(jax.random.key(number), CHAINS)
        places = np.asarray(exchange(keys, temperature_s, made_s, number % 2))
        assert sorted(places) == list(range(CHAINS))
        assert (ladder[places] == ladder).all()
        assert (places[places] == np.arange(CHAINS)).all()
        made_s = made_s[places]
    # The shortest sink to the coldest rung.
    for half in (made_s[:RUNGS], made_s[RUNGS:]):
        assert (np.diff(half) < 0).all()


@pytest.mark.parametrize("count", [1, 2, RUNGS, RUNGS + 5])
def test_temperatures_fall_along_a_ladder(count):
    found = np.asarray(tempering._ladder(count))
    assert found[0] == np.float32(tempering.HOTTEST)
    assert (np.diff(found[:RUNGS]) < 0).all()
    if count >= RUNGS:
        np.testing.assert_allclose(found[RUNGS - 1], tempering.COLDEST, rtol=1e-5)


def test_ladders_do_the_same_whatever_ladders_are_beside_them():
    problem, empty, proposals = start()
    best_s = proposals.makespan_s.min()

    def of(rows):
        chains, found = (jax.tree.map(lambda a: a[rows], c) for c in (empty, proposals))
        return run(problem, chains, found, best_s, NUMBER[rows], rounds=12)

    together = of(slice(None))
    for half in (slice(RUNGS), slice(RUNGS, None)):
        of_all = jax.tree.map(lambda a, half=half: a[half], together)
        chex.assert_trees_all_equal(of(half), of_all)
