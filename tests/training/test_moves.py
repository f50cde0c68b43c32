import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax.graphs.padded import Sizes, pad_problem
from doppler_jax.simulator.batches import simulate_padded
from doppler_jax.training import tempering
from doppler_jax.training.moves import GROUP, WaitingChain, mutate, waiting_chain
from doppler_jax.training.state import Placements
from doppler_jax.training.tempering import RUNGS
from tests.generators import random_problem
from tests.policies.cases import padded_problem
from tests.search.cases import DEVICES, pinned_problem

LANES = 4096
SIZE = 16


@jax.jit
def move(key, padded, placements, chain=None):
    """Moves that draw from one key; without a chain as if every task were on it."""
    if chain is None:
        tasks = jnp.broadcast_to(jnp.arange(SIZE, dtype=jnp.int32), placements.shape)
        length = jnp.broadcast_to(padded.num_tasks, len(placements))
        chain = WaitingChain(task=tasks, length=length)
    return mutate(jax.random.split(key, len(placements)), padded, placements, chain)


CHAIN = jax.jit(waiting_chain)


def pad(graph, costs):
    """The problem in arrays of one size."""
    sizes = Sizes(SIZE, 256, SIZE, SIZE, SIZE, costs.num_devices, home_reads=SIZE)
    return pad_problem(graph, costs, sizes=sizes)


def placed_on_able(costs, rng):
    """One placement `[SIZE]`, padding on device 0."""
    able = np.isfinite(costs.compute_s)
    placement = np.zeros(SIZE, np.int32)
    placement[: len(able)] = [rng.choice(np.flatnonzero(row)) for row in able]
    return placement


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 12, 16])
def test_moves_are_small_possible_and_reach_everything(num_tasks):
    rng = np.random.default_rng(num_tasks)
    graph, costs = pinned_problem(num_tasks, num_tasks)
    placement = placed_on_able(costs, rng)
    before = jnp.broadcast_to(placement[None], (LANES, SIZE))
    after = np.asarray(move(jax.random.key(num_tasks), pad(graph, costs), before))
    assert after.dtype == np.int32
    changed = after != placement
    assert (changed.sum(1) <= GROUP).all()
    assert not changed[:, num_tasks:].any()
    able = np.isfinite(costs.compute_s)
    reached = np.zeros((num_tasks, DEVICES), bool)
    for v in range(num_tasks):
        reached[v, after[:, v]] = True
    np.testing.assert_array_equal(reached, able)


def test_one_device_changes_nothing():
    graph, costs = random_problem(np.random.default_rng(0), 12, 1)
    before = jnp.zeros((64, SIZE), jnp.int32)
    after = move(jax.random.key(0), pad(graph, costs), before)
    np.testing.assert_array_equal(after, before)


def test_every_kind_of_move_is_made():
    graph, costs = random_problem(np.random.default_rng(5), 16, DEVICES)
    placement = np.arange(SIZE, dtype=np.int32) % DEVICES
    before = jnp.broadcast_to(placement[None], (LANES, SIZE))
    after = np.asarray(move(jax.random.key(1), pad(graph, costs), before))
    changed = after != placement
    count = changed.sum(1)
    assert (count == 1).mean() > 0.4
    assert (count > 2).any()
    pairs = [(np.flatnonzero(row), lane) for lane, row in enumerate(changed) if row.sum() == 2]
    swaps = [(after[lane, [u, v]] == placement[[v, u]]).all() for (u, v), lane in pairs]
    assert 0.2 < np.mean(swaps) < 1  # the others moved to one device


def test_half_of_the_moves_are_on_the_chain():
    graph, costs = random_problem(np.random.default_rng(5), 16, DEVICES)
    before = jnp.zeros((LANES, SIZE), jnp.int32)
    chain = WaitingChain(
        task=jnp.full((LANES, SIZE), 7, jnp.int32), length=jnp.ones(LANES, jnp.int32)
    )
    after = move(jax.random.key(1), pad(graph, costs), before, chain)
    moved = np.asarray(after)[(np.asarray(after) != 0).sum(1) == 1]
    assert 0.45 < (moved[:, 7] != 0).mean() < 0.65


def times(padded, placements):
    result = simulate_padded(padded, placements, schedule=True)
    return result.start_s, result.finish_s


@pytest.mark.parametrize("seed", range(8))
def test_each_task_of_the_chain_waited_for_the_next(seed):
    rng = np.random.default_rng(seed)
    graph, costs = random_problem(rng, int(rng.integers(1, 17)), DEVICES)
    padded = pad(graph, costs)
    placements = np.zeros((8, SIZE), np.int32)
    placements[:, : graph.num_tasks] = rng.integers(0, DEVICES, (8, graph.num_tasks))
    start_s, finish_s = times(padded, placements)
    chain = CHAIN(padded, placements, start_s, finish_s)
    makespan_s = np.asarray(finish_s)[:, : graph.num_tasks].max(1)
    for b, place in enumerate(placements):
        tasks = np.asarray(chain.task[b])[: chain.length[b]]
        assert (np.asarray(chain.task[b])[chain.length[b] :] == SIZE).all()
        assert finish_s[b, tasks[0]] == makespan_s[b]
        for v, u in itertools.pairwise(tasks):
            row = np.flatnonzero(padded.pred_task[v] == u)
            sent = padded.latency_s[place[u], place[v]] + (
                padded.pred_bytes[v, row] * padded.seconds_per_byte[place[u], place[v]]
            )
            waits = [*sent, *([0.0] if place[u] == place[v] else [])]
            assert np.isclose(start_s[b, v] - finish_s[b, u], waits, rtol=1e-4, atol=1e-5).any()
        first = tasks[-1]
        arrived = padded.input_ready_s[first, place[first]]
        assert np.isclose(start_s[b, first], arrived)


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


@pytest.mark.slow
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
