"""Moves, and plans that are evaluated from the first position that a move changes."""

import itertools

import numba
import numpy as np
import pytest

from doppler_jax.objective import Objective
from doppler_jax.search import kernels
from doppler_jax.search.kernels import GROUP
from doppler_jax.search.problem import make_search_problem
from doppler_jax.search.walks import make_walker
from doppler_jax.simulator.oracle import simulate_oracle
from doppler_jax.simulator.simulate import simulate
from tests.generators import random_problem
from tests.search.cases import DEVICES, pinned_problem

MOVES = 4096


def moved_placements(graph, costs, placement, count=MOVES):
    """`count` placements `[count, N]`, each one move away."""
    aim = make_search_problem(graph, costs, Objective()).aim
    random, moved = np.array([7], np.uint64), np.zeros((2, GROUP), np.uint32)
    after = np.tile(placement.astype(np.uint32), (count, 1))
    mutate_rows(aim, random, after, moved)
    return after


@numba.njit
def mutate_rows(aim, random, placements, moved):
    for placement in placements:
        kernels.mutate(aim, random, placement, moved, kernels._below(random, len(placement)))


@pytest.mark.parametrize("num_tasks", [1, 2, 12, 16])
def test_moves_are_small_possible_and_reach_everything(num_tasks):
    graph, costs = pinned_problem(num_tasks, num_tasks)
    able = np.isfinite(costs.compute_s)
    placement = able.argmax(1)
    after = moved_placements(graph, costs, placement)
    assert ((after != placement).sum(1) <= GROUP).all()
    reached = np.zeros((num_tasks, DEVICES), bool)
    for v in range(num_tasks):
        reached[v, after[:, v]] = True
    np.testing.assert_array_equal(reached, able)


def test_one_device_changes_nothing():
    graph, costs = random_problem(np.random.default_rng(0), 12, 1)
    assert not moved_placements(graph, costs, np.zeros(12)).any()


def test_every_kind_of_move_is_made():
    graph, costs = random_problem(np.random.default_rng(5), 16, DEVICES)
    placement = np.arange(16) % DEVICES
    after = moved_placements(graph, costs, placement)
    changed = after != placement
    count = changed.sum(1)
    assert (count == 1).mean() > 0.4
    assert (count > 2).any()
    pairs = [(np.flatnonzero(row), k) for k, row in enumerate(changed) if row.sum() == 2]
    swaps = [(after[k, [u, v]] == placement[[v, u]]).all() for (u, v), k in pairs]
    assert 0.2 < np.mean(swaps) < 1  # the others moved to one device


def check_walks(cases, moves, links):
    """Walks of `moves` steps whose every value equals that of the whole plan, in every bit."""
    for seed in itertools.count():
        rng = np.random.default_rng([seed, len(links)])
        graph, costs = random_problem(rng, int(rng.integers(1, 40)), int(rng.integers(1, 6)))
        objective = Objective(links)
        problem = make_search_problem(graph, costs, objective, queue="in_order")
        if not problem.aim.is_plain:  # serial links that carry graph inputs, too
            continue
        cases -= 1
        if cases < 0:
            return
        w = make_walker(problem, rng.integers(0, costs.num_devices, graph.num_tasks), seed)
        ranks, placements, found = [], [], []
        for _ in range(moves):
            kernels.walk(problem.aim, w, 1, 1.0, 1.0, 0.0)
            ranks.append(w.rank.astype(float))
            placements.append(w.placement.copy())
            found.append(w.worth[kernels.ENERGY])
            np.testing.assert_array_equal(w.order[w.rank], range(len(ranks[0])))
        options = {"objective": objective, "queue": "in_order", "priority": np.array(ranks)}
        whole = simulate(graph, costs, np.array(placements), **options)
        np.testing.assert_array_equal(found, whole.makespan_s)


@pytest.mark.parametrize("links", ["parallel", "serial"])
def test_values_from_the_first_changed_position_are_those_of_the_whole(links):
    check_walks(25, 40, links)


@pytest.mark.slow
@pytest.mark.parametrize("links", ["parallel", "serial"])
def test_ten_thousand_values_from_the_changed_position_are_those_of_the_whole(links):
    check_walks(120, 100, links)


@pytest.mark.parametrize("links", ["parallel", "serial", "duplex"])
def test_annealing_knows_a_chain_that_the_makespan_waited_for(links):
    lengths = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        graph, costs = random_problem(rng, 30, DEVICES)
        problem = make_search_problem(graph, costs, Objective(links))
        placement = rng.integers(0, DEVICES, graph.num_tasks)
        w = make_walker(problem, placement, seed)
        kernels.walk(problem.aim, w, 2, 0.5, 0.5, 0.0)  # it evaluates, then looks back
        np.testing.assert_array_equal(w.placement, placement)
        schedule = simulate_oracle(graph, costs, placement, links=links)
        chain = w.chain[: w.count[kernels.LENGTH]].tolist()
        start_s, finish_s = schedule.start_s, schedule.finish_s
        arrivals = {}
        for x, d, at_s in zip(
            schedule.transfer_tensor,
            schedule.transfer_destination,
            schedule.transfer_finish_s,
            strict=True,
        ):
            maker = graph.tensor_producer[x] if x >= 0 else -1
            arrivals.setdefault((maker, d), set()).add(at_s)
        assert finish_s[chain[0]] == finish_s.max()
        for v, u in itertools.pairwise([*chain, -1]):
            same = u >= 0 and placement[u] == placement[v] and finish_s[u] == start_s[v]
            sent = start_s[v] in arrivals.get((u, placement[v]), ())
            assert same or sent or (u < 0 and start_s[v] == 0.0)
        lengths.append(len(chain))
    assert max(lengths) > 5
