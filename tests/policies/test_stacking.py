import dataclasses

import jax
import numpy as np
import pytest

from doppler_jax.graphs import padded
from doppler_jax.graphs.padded import Sizes
from doppler_jax.policies import features
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.stacking import pad_problem, problem_sizes, stack_problems
from doppler_jax.simulator.simulate import simulate, simulate_padded
from tests.generators import random_problem
from tests.policies.cases import apply, case, keys, log_prob, params, replay, sampled, teach


@pytest.mark.parametrize("num_tasks", [0, 1, 8, 24])
def test_padding_equals_that_of_the_buckets(num_tasks, monkeypatch):
    graph, costs, _ = case(num_tasks)
    exact = make_policy_inputs(graph, costs)
    monkeypatch.setattr(features, "bucket_size", lambda *_, **__: 2048)  # of edges
    sizes = {16: 2048, 2: 32}  # of edges, and of reads of inputs
    monkeypatch.setattr(padded, "bucket_size", lambda _, smallest: sizes.get(smallest, 64))
    wanted = make_policy_inputs(graph, costs)
    found = pad_problem(exact, problem_sizes(wanted))
    for (path, one), array in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True
    ):
        np.testing.assert_array_equal(array, one, err_msg=jax.tree_util.keystr(path))
        assert array.dtype == one.dtype


@pytest.fixture(scope="module")
def wide():
    """A problem of `case` with two devices more, which can run nothing."""
    problem = case(24)[2]
    sizes = dataclasses.replace(problem_sizes(problem), devices=5, tasks=80)
    return pad_problem(problem, sizes)


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
    np.testing.assert_allclose(
        moved.features[:, :24, :3],
        replay(problem, episodes.actions).features[:, :24],
        rtol=1e-4,
        atol=1e-5,
    )
    wide_tables = apply(params(), wide)
    found, _ = log_prob(wide, wide_tables, moved)
    expected, _ = log_prob(problem, tables, episodes)
    np.testing.assert_allclose(found[:, :24], expected[:, :24], rtol=1e-4, atol=1e-4)
    assert np.asarray(teach(keys(), wide).placement).max() <= 2


def test_problems_stack():
    problems = [case(8)[2], case(24)[2]]
    sizes = Sizes(*np.max([dataclasses.astuple(problem_sizes(p)) for p in problems], axis=0))
    stacked = stack_problems([pad_problem(p, sizes) for p in problems])
    assert stacked.padded.num_tasks.tolist() == [8, 24]
    second = jax.tree.map(lambda array: array[1], stacked)
    np.testing.assert_array_equal(second.task_features, problems[1].task_features)


def test_what_does_not_fit_is_refused():
    graph, costs = random_problem(np.random.default_rng(0), 24, 3)
    problem = make_policy_inputs(graph, costs)
    sizes = dataclasses.replace(problem_sizes(problem), chains=1)
    with pytest.raises(ValueError, match=r"does not fit into Sizes\(tasks=24.*chains=1"):
        pad_problem(problem, sizes)
