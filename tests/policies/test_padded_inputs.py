import dataclasses

import jax
import numpy as np
import pytest

from doppler_jax.graphs.padded import needed_sizes
from doppler_jax.policies.features import make_policy_inputs, stack_problems
from doppler_jax.simulator.simulate import simulate, simulate_padded
from tests.generators import random_problem
from tests.policies.cases import (
    BUCKET,
    apply,
    case,
    keys,
    log_prob,
    params,
    replay,
    sampled,
    teach,
)


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
