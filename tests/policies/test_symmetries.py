"""What must not matter: padding, labels of tasks and devices, the unit of time."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from doppler_jax.graphs.padded import needed_sizes
from doppler_jax.policies import model
from doppler_jax.policies.features import make_policy_inputs, stack_problems
from doppler_jax.policies.select import path_sum
from doppler_jax.simulator.batches import simulate_padded
from doppler_jax.simulator.simulate import simulate
from doppler_jax.types import RESIDENT
from tests.generators import random_params, random_problem, relabel_devices, scale_costs
from tests.policies.cases import (
    BUCKET,
    CONFIG,
    SIZES,
    apply,
    case,
    init,
    keys,
    log_prob,
    padded_problem,
    params,
    replay,
    sampled,
    teach,
)


def rows(tables, tasks):
    """The tables' rows of some tasks, and what has no rows."""
    place = tables.place
    of_tasks = [np.asarray(array)[tasks] for array in (tables.score, place.task, place.member)]
    return [*of_tasks, place.member_kernel, place.kernel, place.out]


def assert_rows_close(tables, tasks, expected, expected_tasks):
    for found, wanted in zip(rows(tables, tasks), rows(expected, expected_tasks), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_tables_do_not_depend_on_padding():
    graph, costs, padded = case(24)
    exact = make_policy_inputs(graph, costs)
    assert exact.padded.padded_tasks == 24
    tasks = np.arange(24)
    assert_rows_close(apply(params(), exact), tasks, apply(params(), padded), tasks)


def test_tables_follow_relabelled_tasks_but_for_positions():
    graph, costs, problem = case(24)
    new = np.random.default_rng(0).permutation(24)  # task v becomes new[v]
    old = np.argsort(new)
    relabelled = graph.replace(
        flops=graph.flops[old],
        tensor_producer=new[graph.tensor_producer],
        edge_reader=new[graph.edge_reader],
        input_edge_reader=new[graph.input_edge_reader],
    )
    moved = padded_problem(relabelled, costs.replace(compute_s=costs.compute_s[old]))
    config = dataclasses.replace(CONFIG, features="coparent")

    def tables(config, problem):
        values = random_params(partial(init, config=config), problem)
        return model.apply(values, config, problem)

    assert_rows_close(tables(config, moved), new, tables(config, problem), np.arange(24))
    with pytest.raises(AssertionError):
        assert_rows_close(tables(CONFIG, moved), new, tables(CONFIG, problem), np.arange(24))


def test_episodes_follow_relabelled_devices():
    graph, costs, problem = case(24, seed=2)
    assert (graph.input_home != RESIDENT).any()
    tables, episodes = sampled(24, seed=2)
    new = np.array([2, 0, 1])
    old, relabelled = np.argsort(new), padded_problem(*relabel_devices(graph, costs, new))
    actions = episodes.actions.replace(device=new.astype("i4")[episodes.actions.device])
    moved = replay(relabelled, actions)
    real = np.s_[:, :24]
    before = replay(problem, episodes.actions)
    expected = before.features[real][:, :, old]
    np.testing.assert_allclose(moved.features[real], expected, rtol=1e-4, atol=1e-4)
    log_p, entropy = log_prob(relabelled, apply(params(), relabelled), moved)
    expected, expected_entropy = log_prob(problem, tables, episodes)
    np.testing.assert_allclose(log_p, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factor", [1e-6, 2.0**20])
def test_the_unit_of_time_does_not_matter(factor):
    graph, costs, problem = case(24)
    actions = sampled(24)[1].actions
    scaled = padded_problem(graph, scale_costs(costs, factor))
    for name in ("task_features", "edge_features", "b_rank", "next_on_b_path"):
        found, expected = getattr(scaled, name), getattr(problem, name)
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)
    found, expected = replay(scaled, actions).features, replay(problem, actions).features
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    tasks = np.arange(24)
    assert_rows_close(apply(params(), scaled), tasks, apply(params(), problem), tasks)


@pytest.mark.parametrize("num_tasks", SIZES)
def test_path_sums_equal_a_walk_along_the_path(num_tasks):
    problem = case(num_tasks)[2]
    nobody = problem.padded.padded_tasks
    values = np.random.default_rng(0).normal(size=(nobody + 1, 4)).astype("f4")
    following = np.asarray(problem.next_on_b_path)
    totals, hops = np.zeros((num_tasks, 4)), np.zeros(num_tasks)
    for v in range(num_tasks):
        w = v
        while w != nobody:
            totals[v] += values[w]
            hops[v] += 1
            w = following[w]
    found = jax.jit(path_sum)(values, following)[:num_tasks]
    np.testing.assert_allclose(found, totals / hops.max(initial=1), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def wide():
    """A problem of `case` with two devices more, which can run nothing."""
    graph, costs, _ = case(24)
    return make_policy_inputs(graph, costs, dataclasses.replace(BUCKET, devices=5, tasks=80))


def test_devices_that_pad_change_no_makespan(wide):
    graph, costs, _ = case(24)
    placements = np.random.default_rng(0).integers(0, 3, (16, 24))
    able = np.isfinite(costs.compute_s[np.arange(24), placements]).all(1)
    placements = placements[able] if able.any() else np.asarray(sampled(24)[1].placement)
    placements = placements[:, :24].astype("i4")
    found = simulate_padded(wide.padded, placements).makespan_s
    expected = simulate(graph, costs, placements).makespan_s
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_devices_that_pad_are_never_chosen_and_change_no_feature(wide):
    _, _, problem = case(24)
    tables, episodes = sampled(24)
    task, device = episodes.actions.task, episodes.actions.device
    more, none = ((0, 0), (0, 16)), 80  # the number that stands for no task
    task = np.pad(np.where(task == 64, none, task), more, constant_values=none)
    moved = replay(wide, episodes.actions.replace(task=task, device=np.pad(device, more)))
    found, expected = moved.features[:, :24, :3], replay(problem, episodes.actions).features
    np.testing.assert_allclose(found, expected[:, :24], rtol=1e-4, atol=1e-5)
    wide_tables = apply(params(), wide)
    found, _ = log_prob(wide, wide_tables, moved)
    expected, _ = log_prob(problem, tables, episodes)
    np.testing.assert_allclose(found[:, :24], expected[:, :24], rtol=1e-4, atol=1e-4)
    assert np.asarray(teach(keys(), wide).placement).max() <= 2


def test_problems_stack():
    problems = [case(8)[2], case(24)[2]]
    stacked = stack_problems(problems)
    assert stacked.padded.num_tasks.tolist() == [8, 24]
    second = jax.tree.map(lambda array: array[1], stacked)
    np.testing.assert_array_equal(second.task_features, problems[1].task_features)


def test_what_does_not_fit_is_refused():
    graph, costs = random_problem(np.random.default_rng(0), 24, 3)
    sizes = needed_sizes(graph, costs)
    assert make_policy_inputs(graph, costs, sizes).padded.padded_tasks == 24
    with pytest.raises(ValueError, match=r"does not fit into Sizes\(tasks=24.*chains=1"):
        make_policy_inputs(graph, costs, dataclasses.replace(sizes, chains=1))
