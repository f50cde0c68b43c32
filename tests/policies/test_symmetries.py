"""What must not matter: padding, labels of tasks and devices, the unit of time."""

import dataclasses

import jax
import numpy as np
import pytest

from doppler_jax.graphs.build import make_graph
from doppler_jax.policies import model
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.select import path_sum
from doppler_jax.types import RESIDENT
from tests.policies.cases import (
    CONFIG,
    SIZES,
    apply,
    case,
    log_prob,
    padded_problem,
    parameter_shapes,
    params,
    replay,
    sampled,
)


def rows(tables, tasks):
    """The tables' rows of some tasks, and what has no rows."""
    place = tables.place
    return [np.asarray(array)[tasks] for array in (tables.score, place.task, place.member)] + [
        place.member_kernel,
        place.kernel,
        place.out,
    ]


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
    fields = {
        name: getattr(graph, name) for name in ("tensor_bytes", "edge_tensor", "input_bytes")
    }
    relabelled = make_graph(
        **fields,
        flops=graph.flops[old],
        tensor_producer=new[graph.tensor_producer],
        edge_reader=new[graph.edge_reader],
        input_home=graph.input_home,
        input_edge_input=graph.input_edge_input,
        input_edge_reader=new[graph.input_edge_reader],
    )
    moved = padded_problem(
        relabelled, dataclasses.replace(costs, compute_s=costs.compute_s[old])
    )
    config = dataclasses.replace(CONFIG, features="coparent")

    def tables(config, problem):
        shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0), config, problem))
        rng = np.random.default_rng(0)
        values = jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype("f4"), shapes)
        return model.apply(values, config, problem)

    assert_rows_close(tables(config, moved), new, tables(config, problem), np.arange(24))
    with pytest.raises(AssertionError):
        assert_rows_close(tables(CONFIG, moved), new, tables(CONFIG, problem), np.arange(24))


def test_episodes_follow_relabelled_devices():
    graph, costs, problem = case(24, seed=2)
    assert (graph.input_home != RESIDENT).any()
    tables, episodes = sampled(24, seed=2)
    new = np.array([2, 0, 1])  # device d becomes new[d]
    old = np.argsort(new)
    home = np.where(graph.input_home == RESIDENT, RESIDENT, new[graph.input_home])
    relabelled = padded_problem(
        dataclasses.replace(graph, input_home=home),
        dataclasses.replace(
            costs,
            compute_s=costs.compute_s[:, old],
            latency_s=costs.latency_s[old][:, old],
            seconds_per_byte=costs.seconds_per_byte[old][:, old],
        ),
    )
    actions = episodes.actions.replace(device=new.astype("i4")[episodes.actions.device])
    moved = replay(relabelled, actions)
    real = np.s_[:, :24]
    before = replay(problem, episodes.actions)
    np.testing.assert_allclose(
        moved.features[real], before.features[real][:, :, old], rtol=1e-4, atol=1e-4
    )
    log_p, entropy = log_prob(relabelled, apply(params(), relabelled), moved)
    expected, expected_entropy = log_prob(problem, tables, episodes)
    np.testing.assert_allclose(log_p, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factor", [1e-6, 2.0**20])
def test_the_unit_of_time_does_not_matter(factor):
    graph, costs, problem = case(24)
    actions = sampled(24)[1].actions
    scaled = padded_problem(
        graph,
        dataclasses.replace(
            costs,
            compute_s=costs.compute_s * factor,
            latency_s=costs.latency_s * factor,
            seconds_per_byte=costs.seconds_per_byte * factor,
        ),
    )
    for name in ("task_features", "edge_features", "b_rank", "next_on_b_path"):
        np.testing.assert_allclose(
            getattr(scaled, name), getattr(problem, name), rtol=1e-5, err_msg=name
        )
    np.testing.assert_allclose(
        replay(scaled, actions).features,
        replay(problem, actions).features,
        rtol=1e-4,
        atol=1e-5,
    )
    assert_rows_close(
        apply(params(), scaled), np.arange(24), apply(params(), problem), np.arange(24)
    )


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
    few = dataclasses.replace(
        costs,
        compute_s=np.ones((8, 1)),
        latency_s=np.zeros((1, 1)),
        seconds_per_byte=np.zeros((1, 1)),
    )
    graph = dataclasses.replace(graph, input_home=np.full(graph.num_inputs, RESIDENT))
    assert parameter_shapes(make_policy_inputs(graph, few)) == parameter_shapes(case(64)[2])
