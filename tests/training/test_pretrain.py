"""Problems of the stream, the best known of them, and updates: two problems, one bucket."""

import dataclasses
import json
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
import doppler_jax.__main__ as entry
from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.graphs.families import HELD_OUT
from doppler_jax.graphs.padded import Sizes
from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import stack_problems
from doppler_jax.policies.model import PolicyConfig, init_list_scheduler
from doppler_jax.policy_files import read_policy
from doppler_jax.simulator.batches import simulate_padded
from doppler_jax.simulator.simulate import simulate
from doppler_jax.training import pretrain as pretraining
from doppler_jax.training.pools import TRAINED, Bucket, best_known_s, draw_problems
from doppler_jax.training.pretrain import (
    Pretraining,
    PretrainSettings,
    begin_pretraining,
    evaluate,
    pretrain,
    pretrain_update,
)
from tests.commands import assert_one_error_line, run

BUCKET = Bucket(Sizes(24, 64, 12, 12, 16, 3), least_tasks=12, share=1.0)
POLICY = PolicyConfig(width=8, rounds=1, features="general")


@pytest.fixture(scope="module")
def drawn():
    return draw_problems(np.random.default_rng(0), BUCKET, ("layered", "fork_join"), 2)


@pytest.fixture(scope="module")
def problems(drawn):
    return stack_problems([one.problem for one in drawn])


@pytest.fixture(scope="module")
def start(drawn):
    """A state before the first update."""
    params = init_list_scheduler(jax.random.key(0), POLICY, drawn[0].problem)
    best_s = np.full(2, np.inf, "f4")
    return begin_pretraining(jax.random.key(0), params, drawn[0].problem, best_s)


@jax.jit
def greedy_episode(params, problem):
    return rollout.greedy(problem, model.apply(params, POLICY, problem))


def update(state, problems, learning_rate=1e-3):
    options = {"policy": POLICY, "batch": 16, "links": "parallel"}
    weights = jnp.float32(learning_rate), jnp.float32(1e-2)
    return pretrain_update(state, problems, *weights, **options)[0]


def test_problems_are_of_the_bucket_and_seeded(drawn):
    again = draw_problems(np.random.default_rng(0), BUCKET, ("layered", "fork_join"), 2)
    for one, same in zip(drawn, again, strict=True):
        assert 12 <= one.graph.num_tasks <= 24
        assert one.problem.padded.padded_tasks == 24
        assert one.problem.padded.num_devices == 3
        np.testing.assert_array_equal(one.costs.compute_s, same.costs.compute_s)
    assert [one.source for one in drawn] == ["layered", "fork_join"]


def test_held_out_families_are_not_trained_on_and_what_cannot_fit_is_refused():
    assert not set(HELD_OUT) & set(TRAINED)
    narrow = dataclasses.replace(BUCKET, sizes=dataclasses.replace(BUCKET.sizes, chains=1))
    with pytest.raises(ValueError, match="lu: 50 draws, and none fits Sizes"):
        draw_problems(np.random.default_rng(0), narrow, ("lu",), 1)


@pytest.mark.slow
def test_workloads_are_drawn_within_the_bucket():
    wide = Bucket(Sizes(64, 192, 16, 16, 64, 4), least_tasks=30, share=1.0)
    for one in draw_problems(np.random.default_rng(0), wide, ("workload",), 3):
        assert 30 <= one.graph.num_tasks <= 64
    tiny = Bucket(Sizes(4, 8, 4, 4, 4, 2), least_tasks=3, share=1.0)
    with pytest.raises(ValueError, match="no workload has 3 to 4 tasks"):
        draw_problems(np.random.default_rng(0), tiny, ("workload",), 1)


def test_the_best_known_is_found_by_a_search(drawn):
    for one in drawn:
        starts = critical_path(one.graph, one.costs)[None]
        known_s = [
            best_known_s(one, starts, 0, "parallel", evaluations) for evaluations in (0, 2000)
        ]
        listed_s = simulate(one.graph, one.costs, starts).makespan_s[0]
        assert known_s[0] == listed_s > known_s[1] >= dj.lower_bound_s(one.graph, one.costs)


def test_a_fresh_policy_is_a_list_scheduler(drawn, start):
    """b-levels in falling order, each task where it finishes early beside its like."""
    for one in drawn:
        problem = one.problem
        episode = greedy_episode(start.params, problem)
        seen = np.asarray(episode.features)
        merit, able = 3.0 * seen[:, :, 13] - 8.0 * seen[:, :, 8], problem.padded.compute_s
        for step in range(one.graph.num_tasks):
            task, device = int(episode.actions.task[step]), int(episode.actions.device[step])
            can = np.isfinite(able[task])
            assert merit[step, device] >= np.where(can, merit[step], -np.inf).max() - 1e-4
            frontier = np.asarray(episode.heads[step])[np.asarray(episode.frontier_mask[step])]
            level = np.asarray(problem.task_features)[:, 3]
            assert level[task] >= level[frontier].max() - 1e-6


def test_other_features_are_refused(drawn):
    with pytest.raises(ValueError, match="needs features 'general', all learned"):
        init_list_scheduler(jax.random.key(0), PolicyConfig(features="paper"), drawn[0].problem)


@jax.jit
def mean_sampled_s(keys, params, problems):
    """Mean makespan `[G]` of 64 samples of each problem."""

    def one(inputs):
        key, problem = inputs
        tables = model.apply(params, POLICY, problem)
        sample = jax.vmap(rollout.sample, in_axes=(0, None, None))
        drawn = sample(jax.random.split(key, 64), problem, tables)
        return simulate_padded(problem.padded, drawn.placement).makespan_s.mean()

    return jax.lax.map(one, (keys, problems))


@pytest.mark.slow
def test_updates_learn_and_are_counted(problems, start):
    state = start
    for _ in range(60):
        state = update(state, problems, learning_rate=3e-3)
    assert (int(state.update), int(state.episodes)) == (60, 60 * 2 * 16)
    before_s, after_s = (
        mean_sampled_s(jax.random.split(jax.random.key(0), 2), params, problems)
        for params in (start.params, state.params)
    )
    assert (np.asarray(after_s) / before_s).mean() < 1

    measure = partial(evaluate, policy=POLICY, samples=8, links="parallel")
    greedy_s, two_s, best_s = measure(jax.random.key(0), state.params, problems)
    before_s, _, _ = measure(jax.random.key(0), start.params, problems)
    assert (two_s <= greedy_s).all()
    assert (best_s <= two_s).all()
    assert (np.asarray(greedy_s) / before_s).mean() < 1


def test_a_step_of_no_length_changes_nothing(problems, start):
    state = update(start, problems, learning_rate=0.0)
    chex.assert_trees_all_equal(state.params, start.params)


SIZES = {"problems": 4, "held_out": 2, "search_evaluations": 672, "group": 2, "batch": 4}
TINY = PretrainSettings(budget_s=1e6, host_devices=4, policy=POLICY, **SIZES)


@pytest.fixture
def settings(monkeypatch, tmp_path):
    monkeypatch.setattr(pretraining, "BUCKETS", {BUCKET.name: BUCKET})
    monkeypatch.setattr(pretraining, "TRAINED", ("layered", "fork_join"))
    # Weights do not follow the clock, so that runs repeat each other.
    monkeypatch.setattr(pretraining.Budget, "progress", lambda self, evaluations: 0.0)
    return dataclasses.replace(TINY, buckets=(BUCKET.name,), run=tmp_path / "run")


@pytest.mark.slow
def test_a_run_resumes_and_exports(settings, tmp_path, capsys):
    pretrain(settings, num_updates=1)
    folder = pretrain(settings, num_updates=2)
    whole = dataclasses.replace(settings, run=tmp_path / "whole", validate_every_s=0.0)
    policy = dj.load_policy(folder)
    undisturbed = dj.load_policy(pretrain(whole, num_updates=2))
    chex.assert_trees_all_equal(policy.params, undisturbed.params)
    with pytest.raises(ValueError, match=r"other settings \(batch was 4, now 8"):
        pretrain(dataclasses.replace(settings, batch=8))

    assert policy.config == settings.policy
    meta = read_policy(folder)[1]
    assert meta["command"].startswith("python -m doppler_jax")
    for found in (meta, json.loads(capsys.readouterr().out.splitlines()[-2])):
        ratios = found.get("held_out", found.get("ratios"))
        assert found["updates"] == 2
        assert ratios["best of 64"]["buckets"][0] <= ratios["greedy"]["buckets"][0]
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [1, 2]
    last = json.loads(lines[-1])
    kinds = ("held-out families", "trained families")
    assert all(last[f"greedy, {kind}"] == ratios["greedy"][kind] for kind in kinds)
    graph, costs = dj.from_edge_delays([1.0, 2.0, 3.0], [(0, 2, 1.0)], num_devices=5)
    options = {"policy": policy, "max_evaluations": 4, "key": jax.random.key(0)}
    placed = dj.place(graph, costs, method="doppler", **options)
    assert placed.makespan_s == 4.0


@pytest.mark.slow
def test_a_run_goes_on_from_a_policy(settings, tmp_path):
    initial = pretrain(settings, num_updates=1)
    second = dataclasses.replace(settings, initial=initial, run=tmp_path / "second")
    begun = Pretraining(second).prepare().params
    chex.assert_trees_all_equal(begun, dj.load_policy(initial).params)
    other = dataclasses.replace(second, policy=PolicyConfig(width=4))
    with pytest.raises(ValueError, match=r"run.base: PolicyConfig\(.* expected PolicyConfig"):
        Pretraining(other)


def test_the_command_refuses_unknown_buckets_and_leaves_no_run(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    words = ("train", "pretrain", "--host-devices", "4", "--buckets", "9x9")
    assert run(monkeypatch, entry.main, entry.commands(words), *words) == 2
    assert_one_error_line(capsys.readouterr().err, "unknown buckets ['9x9']; known: ['1024x8'")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_problems_with_serial_links_can_be_trained_on():
    run = Pretraining(dataclasses.replace(TINY, buckets=("128x4s",)))
    start = run.prepare()
    state, metrics = run.update(start)
    assert np.isfinite(float(metrics["loss"]))
    state, scores = run.validate(state)
    ratios = scores["ratios"]
    assert ratios["best of 64"]["buckets"][0] <= ratios["greedy"]["buckets"][0]
    moved = jax.tree.map(lambda a, b: (a != b).any(), start.params, state.params)
    assert any(jax.tree.leaves(moved))
