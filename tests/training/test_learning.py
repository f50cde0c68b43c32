"""Stages 1 and 2 learn, stay finite, and compile once for all graphs of a bucket."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.training import sim_rl
from doppler_jax.training.devices import everywhere
from doppler_jax.training.sim_rl import SimConfig
from doppler_jax.training.state import keep_best
from tests.generators import random_problem
from tests.policies.cases import CONFIG, DEVICES
from tests.search.cases import optimum_s
from tests.training.cases import (
    IMITATION,
    SIM,
    assert_same_bits,
    chains_case,
    fresh_state,
    imitation_update,
    plain,
    sim_update,
    trained_state,
)


def test_imitation_loss_falls():
    problem = chains_case()[2]
    state = fresh_state(problem, IMITATION, SIM.num_elites)
    history = []
    for _ in range(60):
        state, metrics = imitation_update(state, problem, policy=CONFIG, config=IMITATION)
        history.append(float(metrics["loss"]))
    assert np.mean(history[-5:]) < 0.6 * np.mean(history[:5])
    assert int(state.update) == 60
    assert int(state.episodes) == 60 * IMITATION.batch


def test_the_policy_gradient_finds_the_optimum():
    graph, costs, problem = chains_case()
    state = fresh_state(problem, SIM, SIM.num_elites)
    means = []
    for _ in range(80):
        state, metrics = sim_update(state, problem, policy=CONFIG, config=SIM)
        means.append(float(metrics["makespan_mean_s"]))
    least_s = optimum_s(graph, costs)
    # Not only was it sampled; it is what the policy now does.
    assert means[0] > 1.5 * least_s
    assert np.mean(means[-5:]) < 1.15 * least_s
    best = np.asarray(state.best_placement)[:7]
    assert makespan_s(simulate_oracle(graph, costs, best)) == least_s
    np.testing.assert_allclose(state.best_makespan_s, least_s, rtol=1e-6)
    np.testing.assert_allclose(state.elites.makespan_s[0], least_s, rtol=1e-6)
    assert (np.diff(state.elites.makespan_s) > 0).all()
    assert int(state.episodes) == 80 * SIM.batch
    assert int(state.evaluations) == 80 * SIM.evaluations == 80 * (64 + 3 * 8)


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 5])
def test_updates_stay_finite_on_padded_problems(num_tasks):
    # `cases` lets each update be traced once: all these graphs share one compilation.
    rng = np.random.default_rng(num_tasks)
    graph, costs = random_problem(rng, num_tasks, DEVICES, homes=False)
    # Device 0, where the zeros of an archive that is not yet full would put tasks.
    compute_s = np.where(np.arange(DEVICES) == 0, np.inf, costs.compute_s)
    problem = make_policy_inputs(graph, costs.replace(compute_s=compute_s))
    for update, config in ((imitation_update, IMITATION), (sim_update, SIM)):
        state = fresh_state(problem, config, SIM.num_elites)
        start = state.params
        for _ in range(2):
            state, metrics = update(state, problem, policy=CONFIG, config=config)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
        assert all(np.isfinite(value).all() for value in metrics.values())
        changed = jax.tree.map(lambda a, b: bool((a != b).any()), start, state.params)
        assert any(jax.tree.leaves(changed)) == (num_tasks > 0)


def test_an_update_depends_on_the_key_and_its_number_alone():
    problem = chains_case()[2]
    state = fresh_state(problem, SIM, SIM.num_elites)
    twice = [sim_update(state, problem, policy=CONFIG, config=SIM)[0] for _ in range(2)]
    assert_same_bits(*twice)
    later = state.replace(update=state.update + 1)
    other = sim_update(later, problem, policy=CONFIG, config=SIM)[0]
    assert (other.elites.makespan_s != twice[0].elites.makespan_s).any()


def test_parts_of_the_update_can_be_left_out():
    problem = chains_case()[2]
    bare = dataclasses.replace(SIM, num_elites=0, num_chains=0)
    update = jax.jit(sim_rl.update_on, static_argnames=("policy", "config", "shards"))
    state = fresh_state(problem, bare, bare.num_elites)
    for _ in range(2):
        state, metrics = update(state, problem, policy=CONFIG, config=bare, shards=1)
    assert int(state.evaluations) == int(state.episodes) == 2 * bare.batch
    assert bare.evaluations == bare.batch
    assert state.elites.makespan_s.shape == state.chains.makespan_s.shape == (0,)
    assert np.isfinite(state.best_makespan_s)
    assert np.isfinite(metrics["loss"])
    assert dataclasses.replace(SIM, search_rounds=0).evaluations == SIM.batch


@pytest.mark.slow
def test_several_devices_compute_what_one_does():
    # A ladder of chains for each of four devices; a fifth elite, which is hard to share.
    config = SimConfig(batch=128, minibatches=2, num_elites=5, num_chains=128, search_rounds=1)
    assert config.shards == jax.local_device_count() == 4
    problem = chains_case()[2]
    update = jax.jit(sim_rl.update_on, static_argnames=("policy", "config", "shards"))
    start = fresh_state(problem, config, config.num_elites)
    results = []
    for number in (1, 2, 4):
        arguments = jax.device_put((start, problem), everywhere(number))
        results.append(plain(update(*arguments, policy=CONFIG, config=config, shards=number)))
    (state, metrics), *cut = results
    for cut_state, cut_metrics in cut:
        chex.assert_trees_all_close(cut_state.params, state.params, rtol=1e-4, atol=1e-6)
        chex.assert_trees_all_close(cut_state.opt_state, state.opt_state, rtol=1e-4, atol=1e-6)
        chex.assert_trees_all_close(cut_metrics, metrics, rtol=1e-5)
        for name in (
            "chains",
            "best_placement",
            "elites",
            "update",
        ):
            chex.assert_trees_all_equal(getattr(cut_state, name), getattr(state, name))
    assert (state.chains.placement != 0).any()
    changed = jax.tree.map(lambda a, b: np.abs(a - b).max(), start.params, state.params)
    assert min(jax.tree.leaves(changed)) > 1e-4


def test_devices_are_used_as_far_as_they_get_equal_shares():
    for config, shards in (
        (SimConfig(), 4),
        (SimConfig(batch=64, num_chains=64), 2),  # two ladders
        (SimConfig(batch=64, num_chains=48), 1),  # that are not whole
        (SimConfig(batch=64, num_chains=48, search_rounds=0), 4),
        (SimConfig(batch=24, minibatches=4, num_chains=0), 3),
        (SimConfig(batch=5, minibatches=1, num_chains=0), 1),
    ):
        assert config.shards == shards, config


def test_the_best_placement_is_never_given_up():
    state = trained_state()
    worse = np.full((2, 8), 2, np.int32)
    kept = keep_best(state, worse, state.best_makespan_s + np.array([0, 1], np.float32))
    assert_same_bits(kept.replace(elites=state.elites), state)
    better = keep_best(state, worse, state.best_makespan_s - np.array([0, 1], np.float32))
    np.testing.assert_array_equal(better.best_placement, worse[1])
    assert better.best_makespan_s == state.best_makespan_s - 1 == better.elites.makespan_s[0]
