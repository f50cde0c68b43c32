import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.learners import giph
from doppler_jax.learners.giph import Giph, GiphLesson, move_log_prob, step_advantage
from tests.generators import random_params, random_problem, relabel_devices, some_unable
from tests.policies.cases import padded_problem

LEARNER = Giph(batch=4, width=8, rounds=1)
TASKS, PADDED, DEVICES, STEPS = 9, 12, 3, 24
HEAT = np.array([0.0, 1.0, 1.0, 1.0], np.float32)


@functools.cache
def case():
    """Graph and costs in which some devices cannot run some tasks."""
    rng = np.random.default_rng(0)
    graph, costs = random_problem(rng, TASKS, DEVICES)
    return graph, some_unable(rng, costs, 0.2)


def problem_of(graph, costs, tasks=PADDED):
    return padded_problem(graph, costs, tasks=tasks, edges=64)


@functools.cache
def params():
    return random_params(LEARNER.init, problem_of(*case()))


walk = jax.jit(LEARNER.walk, static_argnums=4)
logits = jax.jit(jax.vmap(LEARNER.logits, in_axes=(None, None, 0)))


@functools.cache
def walked():
    return walk(params(), problem_of(*case()), jax.random.key(1), jnp.asarray(HEAT), "parallel")


def flat_states():
    """All states of the walks but the last, `[K * B, ...]`."""
    return jax.tree.map(lambda leaf: leaf[:-1].reshape(-1, *leaf.shape[2:]), walked().state)


def flat_logits():
    return np.asarray(logits(params(), problem_of(*case()), flat_states()))


def test_a_walk_makes_legal_moves_and_follows_them():
    _, costs = case()
    found = walked()
    placements, moves = np.asarray(found.state.placement), np.asarray(found.move)
    assert moves.shape == (STEPS, len(HEAT))
    assert placements.shape == (STEPS + 1, len(HEAT), PADDED)
    for b in range(len(HEAT)):
        last = PADDED
        for k in range(STEPS):
            task, device = divmod(moves[k, b], DEVICES)
            assert np.asarray(found.state.last)[k, b] == last
            assert task < TASKS
            assert task != last
            assert device != placements[k, b, task]
            assert np.isfinite(costs.compute_s[task, device])
            expected = placements[k, b].copy()
            expected[task] = device
            np.testing.assert_array_equal(placements[k + 1, b], expected)
            last = task


def test_states_carry_the_simulated_schedule():
    graph, costs = case()
    found = walked()
    states = jax.tree.map(lambda a: np.asarray(a).reshape(-1, *a.shape[2:]), found.state)
    for k, placement in enumerate(states.placement):
        schedule = dj.simulator.simulate_oracle(graph, costs, placement[:TASKS])
        np.testing.assert_allclose(states.start_s[k, :TASKS], schedule.start_s, rtol=1e-4)
        np.testing.assert_allclose(states.finish_s[k, :TASKS], schedule.finish_s, rtol=1e-4)
        np.testing.assert_allclose(
            states.makespan_s[k], dj.simulator.makespan_s(schedule), rtol=1e-5
        )
    assert (states.finish_s[:, TASKS:] == 0).all()
    best, best_s = jax.tree.map(np.asarray, found.best())
    np.testing.assert_array_equal(best_s, np.asarray(found.state.makespan_s).min(0))
    for placement, seconds in zip(best, best_s, strict=True):
        again = dj.simulator.simulate_oracle(graph, costs, placement[:TASKS])
        np.testing.assert_allclose(dj.simulator.makespan_s(again), seconds, rtol=1e-5)


def test_what_is_counted_is_what_is_simulated():
    simulated = walked().state.makespan_s.size
    assert LEARNER.evaluations(PADDED) == simulated
    assert LEARNER.batch * LEARNER.proposal_evaluations(PADDED) == simulated
    assert Giph().steps(10_000) == giph.MOST_STEPS


def test_without_heat_the_likeliest_move_is_taken():
    chosen = flat_logits().reshape(STEPS, len(HEAT), -1).argmax(-1)
    moves = np.asarray(walked().move)
    np.testing.assert_array_equal(moves[:, 0], chosen[:, 0])
    assert (moves[:, 1:] != chosen[:, 1:]).any()


def test_the_loss_weighs_log_probabilities_by_advantage():
    found = walked()
    rng = np.random.default_rng(0)
    advantage = rng.normal(size=found.move.shape).astype("f4")
    state = jax.tree.map(lambda leaf: leaf[:-1], found.state)
    lesson = GiphLesson(state=state, move=found.move, advantage=advantage)
    lesson = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), lesson)
    loss, gradient = jax.jit(jax.value_and_grad(LEARNER.loss))(
        params(), problem_of(*case()), lesson, jnp.int32(0)
    )
    scores = flat_logits().astype(np.float64)
    log_p = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    taken = log_p[np.arange(len(log_p)), np.asarray(found.move).ravel()]
    expected = -(advantage.ravel() * taken).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert any(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(gradient))


def test_relabelled_devices_permute_the_moves():
    new, states = np.array([1, 2, 0]), flat_states()
    states = dataclasses.replace(states, placement=jnp.asarray(new)[states.placement])
    relabelled = problem_of(*relabel_devices(*case(), new))
    found = np.asarray(logits(params(), relabelled, states))
    expected = flat_logits().reshape(len(found), PADDED, DEVICES)[:, :, np.argsort(new)]
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-3, atol=1e-4)


def test_padding_changes_no_move():
    states, more = flat_states(), ((0, 0), (0, 4))
    wider = dataclasses.replace(
        states,
        placement=jnp.pad(states.placement, more),
        start_s=jnp.pad(states.start_s, more),
        finish_s=jnp.pad(states.finish_s, more),
        last=jnp.where(states.last == PADDED, PADDED + 4, states.last),
    )
    found = np.asarray(logits(params(), problem_of(*case(), tasks=PADDED + 4), wider))
    expected = flat_logits()
    np.testing.assert_allclose(found[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-5)
    assert (found[:, expected.shape[1] :] == -np.inf).all()


def test_with_no_legal_move_nothing_moves():
    value_and_grad = jax.jit(jax.value_and_grad(move_log_prob))
    value, gradient = value_and_grad(np.full(6, -np.inf, np.float32), jnp.int32(6))
    assert value == 0
    assert (np.asarray(gradient) == 0).all()
    some = np.array([-np.inf, 1.0, 1.0, -np.inf, -np.inf, -np.inf], np.float32)
    value, gradient = value_and_grad(some, jnp.int32(2))
    np.testing.assert_allclose(value, -np.log(2.0), rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, -0.5, 0.5, 0, 0, 0], atol=1e-6)
    moved = jax.jit(giph._moved, static_argnums=2)
    placement = np.array([1, 0, 2], np.int32)
    np.testing.assert_array_equal(moved(placement, jnp.int32(9), 3), placement)
    np.testing.assert_array_equal(moved(placement, jnp.int32(5), 3), [1, 2, 2])


def test_returns_are_discounted_and_compared_at_the_same_step():
    gained_s = np.random.default_rng(0).normal(size=(5, 3)).astype("f4")
    total = np.zeros((5, 3))
    for k in range(5):
        total[k] = sum(0.5 ** (later - k) * gained_s[later] for later in range(k, 5))
    excess = total - total.mean(1, keepdims=True)
    advantage = jax.jit(step_advantage, static_argnums=1)
    expected = excess / excess.std()
    np.testing.assert_allclose(advantage(gained_s, 0.5), expected, rtol=1e-4, atol=1e-5)
    assert (np.asarray(advantage(np.ones((5, 3), np.float32), 0.5)) == 0).all()


@pytest.mark.slow
def test_proposals_of_several_chunks(monkeypatch):
    monkeypatch.setattr(giph, "WALKS", 2)
    _, costs = case()
    propose = jax.jit(LEARNER.draw, static_argnums=(3, 4))
    found = propose(params(), problem_of(*case()), jax.random.key(0), 5, "parallel")
    assert found.shape == (5, PADDED)
    assert np.isfinite(costs.compute_s[np.arange(TASKS), np.asarray(found)[:, :TASKS]]).all()
    assert len(np.unique(found, axis=0)) > 1
