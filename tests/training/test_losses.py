import functools

import jax
import numpy as np
import pytest

from doppler_jax.training import losses, reinforce
from doppler_jax.training.losses import imitation_loss, normalised_advantage
from doppler_jax.training.state import Elites
from tests.policies.cases import EPISODES, case, log_prob, quick_jit, replay, sampled
from tests.training.cases import SIM

policy_gradient_loss = quick_jit(losses.policy_gradient_loss)
reinforce_loss = quick_jit(reinforce.reinforce_loss, static_argnames="settings")


@functools.cache
def batch():
    """Problem, tables, episodes, and their log-probability and entropy `[B]` per step."""
    problem = case(8)[2]
    tables, episodes = sampled(8)
    log_p, entropy = log_prob(problem, tables, episodes)
    return problem, tables, episodes, np.mean(log_p[:, :8], 1), np.mean(entropy[:, :8], 1)


ADVANTAGE = np.random.default_rng(0).normal(size=EPISODES).astype("f4")


def test_policy_gradient_loss_by_its_formula():
    problem, tables, episodes, log_p, entropy = batch()
    found = policy_gradient_loss(problem, tables, episodes, ADVANTAGE, 0.5)
    expected = -(ADVANTAGE * log_p).mean() - 0.5 * entropy.mean()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_policy_gradient_is_the_score_function_times_the_advantage():
    problem, tables, episodes, *_ = batch()
    gradient = quick_jit(jax.grad(losses.policy_gradient_loss, argnums=1))(
        problem, tables, episodes, ADVANTAGE, 0.0
    )
    score = np.asarray(tables.score, np.float64)
    expected = np.zeros_like(score)
    for b, advantage in enumerate(ADVANTAGE):
        for t in range(8):
            frontier = np.asarray(episodes.heads)[b, t][episodes.frontier_mask[b, t]]
            weights = np.exp(score[frontier] - score[frontier].max())
            expected[frontier] += advantage * weights / weights.sum()
            expected[episodes.actions.task[b, t]] -= advantage
    np.testing.assert_allclose(gradient.score, expected / EPISODES / 8, atol=1e-6)


def test_gradients_equal_finite_differences():
    problem, tables, episodes, *_ = batch()
    weight = 0.3  # of the entropy
    gradient = quick_jit(jax.grad(losses.policy_gradient_loss, argnums=1))(
        problem, tables, episodes, ADVANTAGE, weight
    )
    rng = np.random.default_rng(1)
    for _ in range(4):
        direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype("f4"), tables)
        values = [
            policy_gradient_loss(
                problem,
                jax.tree.map(lambda a, b, s=step: a + np.float32(s) * b, tables, direction),
                episodes,
                ADVANTAGE,
                weight,
            )
            for step in (1e-2, -1e-2)
        ]
        slope = sum(
            np.vdot(a, b)
            for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
        )
        np.testing.assert_allclose((values[0] - values[1]) / 2e-2, slope, rtol=0.02, atol=1e-3)


def test_imitation_loss_weighs_episodes():
    problem, tables, episodes, log_p, _ = batch()
    loss = quick_jit(imitation_loss)
    np.testing.assert_allclose(loss(problem, tables, episodes), -log_p.mean(), rtol=1e-5)
    weight = np.zeros(EPISODES, np.float32)
    assert loss(problem, tables, episodes, weight) == 0
    weight[[1, 4]] = 1, 3
    expected = -(log_p[1] + 3 * log_p[4]) / 4
    np.testing.assert_allclose(loss(problem, tables, episodes, weight), expected, rtol=1e-5)


def test_reinforce_adds_elites_and_lets_the_entropy_bonus_fade():
    problem, tables, episodes, log_p, entropy = batch()
    makespan_s = np.arange(EPISODES, dtype=np.float32)
    known = np.where(np.arange(EPISODES) < 2, 1.0, np.inf).astype(np.float32)
    elites = Elites(actions=episodes.actions, makespan_s=known)
    imitated_p, _ = log_prob(problem, tables, replay(problem, episodes.actions))
    imitated = -np.mean(imitated_p[:2, :8])
    gradient_part = -(np.asarray(normalised_advantage(makespan_s)) * log_p).mean()
    for age in (0, 1, 2.5):
        update = np.int32(age * SIM.entropy_halving)
        found = reinforce_loss(problem, tables, episodes, makespan_s, elites, update, SIM)
        bonus = SIM.entropy_weight * 0.5**age * entropy.mean()
        expected = gradient_part - bonus + SIM.elite_weight * imitated
        np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=str(age))


def test_advantage_is_in_deviations_below_the_mean():
    found = normalised_advantage(np.array([1, 2, 3], np.float32))
    np.testing.assert_allclose(found, np.array([1, 0, -1]) * 1.5**0.5, rtol=1e-6)


def test_infinite_makespans_count_as_the_worst_finite_one():
    found = normalised_advantage(np.array([1, np.inf, 3, np.inf], np.float32))
    expected = normalised_advantage(np.array([1, 3, 3, 3], np.float32))
    np.testing.assert_array_equal(found, expected)
    assert (normalised_advantage(np.full(4, np.inf, np.float32)) == 0).all()


@pytest.mark.parametrize("makespan_s", [0.0, 0.1, 3.3e-5, 56.696, 1200.08])
def test_a_batch_without_spread_has_no_advantage(makespan_s):
    # The float32 mean of equal numbers often differs from them in the last bit.
    for size in (3, 24, 64, 128, 130):
        found = quick_jit(normalised_advantage)(np.full(size, makespan_s, np.float32))
        assert (found == 0).all()
