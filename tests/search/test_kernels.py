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


def twin_of(walker):
    arrays = {name: value.copy() for name, value in walker._asdict().items() if name != "trial"}
    return walker._replace(**arrays)


def check_walks(cases, moves, links):
    """Walks of `moves` steps whose every value equals that of the whole plan, in every bit."""
    for seed in itertools.count():
        rng = np.random.default_rng([seed, len(links)])
        graph, costs = random_problem(rng, int(rng.integers(1, 120)), int(rng.integers(1, 6)))
        objective = Objective(links)
        problem = make_search_problem(graph, costs, objective, queue="in_order")
        if not problem.aim.is_plain:  # serial links that carry graph inputs, too
            continue
        cases -= 1
        if cases < 0:
            return
        placement = rng.integers(0, costs.num_devices, graph.num_tasks)
        w = make_walker(problem, placement, problem.rank, seed)
        ranks, placements, found = [], [], []
        for k in range(moves):
            # One that takes every move, and one that takes what is no worse.
            before, twin = w.worth[kernels.ENERGY], twin_of(w)
            kernels.walk(problem.aim, twin, 1, 1e9, 1e9, np.zeros(1))
            if k % 16:
                kernels.walk(problem.aim, w, 1, 1e-300, 1e-300, np.zeros(1))
                is_taken = twin.worth[kernels.ENERGY] <= before
                kept_s = twin.worth[kernels.ENERGY] if is_taken else before
                assert w.worth[kernels.ENERGY] == kept_s
                assert not is_taken or (w.rank == twin.rank).all()
            else:
                w = twin
            ranks.append(twin.rank.astype(float))
            placements.append(twin.placement.copy())
            found.append(twin.worth[kernels.ENERGY])
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
