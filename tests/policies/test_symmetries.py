"""What must not matter: padding, labels of tasks and devices, the unit of time."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from doppler_jax.policies import model
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.select import path_sum
from doppler_jax.types import RESIDENT
from tests.generators import random_params, relabel_devices
from tests.policies.cases import (
    CONFIG,
    SIZES,
    apply,
    case,
    init,
    log_prob,
    padded_problem,
    params,
    replay,
    sampled,
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
    times = ("compute_s", "latency_s", "seconds_per_byte")
    scaled_costs = costs.replace(**{name: getattr(costs, name) * factor for name in times})
    scaled = padded_problem(graph, scaled_costs)
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


def test_parameters_fit_any_size_and_number_of_devices():
    graph, costs, _ = case(8)
    none = np.zeros((1, 1))
    few = costs.replace(compute_s=np.ones((8, 1)), latency_s=none, seconds_per_byte=none)
    graph = dataclasses.replace(graph, input_home=np.full(graph.num_inputs, RESIDENT))
    shapes = partial(jax.eval_shape, init, jax.random.key(0))
    assert shapes(make_policy_inputs(graph, few)) == shapes(case(64)[2])
