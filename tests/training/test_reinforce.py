import functools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax.training import reinforce, state
from doppler_jax.training.reinforce import Lesson, normalised_advantage
from doppler_jax.training.state import Placements
from tests.policies.cases import EPISODES, case, greedy, log_prob, sampled
from tests.training.cases import SIM

lesson_loss = jax.jit(reinforce.lesson_loss)
loss_and_gradient = jax.jit(reinforce.loss_and_gradient)
update_elites = jax.jit(state.update_elites)
imitate_elites = jax.jit(reinforce.imitate_elites, static_argnames="weight")


@functools.cache
def batch():
    """PolicyInputs, tables, episodes, and their log-probability and entropy `[B]` per step."""
    problem = case(8)[2]
    tables, episodes = sampled(8)
    log_p, entropy = log_prob(problem, tables, episodes)
    return problem, tables, episodes, np.mean(log_p[:, :8], 1), np.mean(entropy[:, :8], 1)


ADVANTAGE = np.random.default_rng(0).normal(size=EPISODES).astype("f4")


def lesson(episodes, weight, entropy_weight=0.0):
    weight = np.asarray(weight, np.float32)
    entropy_weight = np.full_like(weight, entropy_weight)
    return Lesson(episodes=episodes, weight=weight, entropy_weight=entropy_weight)


def test_loss_by_its_formula():
    problem, tables, episodes, log_p, entropy = batch()
    found = lesson_loss(problem, tables, lesson(episodes, ADVANTAGE, 0.5))
    expected = -(ADVANTAGE * log_p).sum() - 0.5 * entropy.sum()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 7, 8, 21])
def test_chunks_do_not_change_loss_or_gradient(count):
    problem, tables, episodes, *_ = batch()
    some = jax.tree.map(lambda leaf: leaf[:count], lesson(episodes, ADVANTAGE, 0.3))
    whole = jax.jit(jax.value_and_grad(reinforce.lesson_loss, argnums=1))
    expected = whole(problem, tables, some)
    found = loss_and_gradient(problem, tables, some)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def test_policy_gradient_is_the_score_function_times_the_advantage():
    problem, tables, episodes, *_ = batch()
    _, gradient = loss_and_gradient(problem, tables, lesson(episodes, ADVANTAGE))
    score = np.asarray(tables.score, np.float64)
    expected = np.zeros_like(score)
    for b, advantage in enumerate(ADVANTAGE):
        for t in range(8):
            frontier = np.asarray(episodes.heads)[b, t][episodes.frontier_mask[b, t]]
            weights = np.exp(score[frontier] - score[frontier].max())
            expected[frontier] += advantage * weights / weights.sum()
            expected[episodes.actions.task[b, t]] -= advantage
    np.testing.assert_allclose(gradient.score, expected / 8, atol=1e-4)


def test_gradients_equal_finite_differences():
    problem, tables, episodes, *_ = batch()
    taught = lesson(episodes, ADVANTAGE / EPISODES, 0.3 / EPISODES)
    _, gradient = loss_and_gradient(problem, tables, taught)
    rng = np.random.default_rng(1)
    for _ in range(4):
        direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype("f4"), tables)
        step = jax.tree.map(lambda leaf: np.float32(5e-4) * leaf, direction)
        before, after = (
            lesson_loss(problem, jax.tree.map(move, tables, step), taught)
            for move in (operator.sub, operator.add)
        )
        slope = jax.tree.reduce(operator.add, jax.tree.map(np.vdot, gradient, direction))
        np.testing.assert_allclose((after - before) / 1e-3, slope, rtol=0.02, atol=1e-3)


def test_elites_are_followed_in_the_policys_order_and_weighed_by_their_shares():
    problem, tables, episodes, *_ = batch()
    known = np.array([1.0, 1.0 + reinforce.ELITE_SPREAD, np.inf], np.float32)
    elites = Placements(placement=episodes.placement[:3], makespan_s=known)
    taught = imitate_elites(problem, tables, elites, 2.0)
    np.testing.assert_array_equal(taught.episodes.placement[:2], episodes.placement[:2])
    # An empty place may hold devices that cannot run the tasks, and is not looked at.
    np.testing.assert_array_equal(taught.episodes.placement[2], episodes.placement[0])
    followed = taught.episodes.actions.task[0]
    np.testing.assert_array_equal(followed, greedy(problem, tables).actions.task)
    share = np.array([1.0, np.exp(-1.0), 0.0]) / (1 + np.exp(-1.0))
    np.testing.assert_allclose(taught.weight, 2.0 * share, rtol=1e-3)
    assert (taught.entropy_weight == 0).all()


def test_episodes_are_weighed_by_advantage_and_the_entropy_bonus_fades():
    problem, tables, episodes, log_p, entropy = batch()
    halves = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), (episodes, ADVANTAGE))
    for age in (0, 1, 2.5):
        update = np.int32(age * SIM.entropy_halving)
        taught = reinforce.weigh_episodes(*halves, update, SIM)
        for m in range(2):
            found = lesson_loss(problem, tables, jax.tree.map(lambda a, m=m: a[m], taught))
            half = slice(32 * m, 32 * m + 32)
            bonus = SIM.entropy_weight * 0.5**age * entropy[half].mean()
            expected = -(ADVANTAGE[half] * log_p[half]).mean() - bonus
            np.testing.assert_allclose(found, expected, rtol=1e-3, err_msg=str((age, m)))


def test_elites_far_above_the_best_are_not_imitated():
    shares = reinforce.elite_shares(jnp.array([2.0, 2.0, 2.5, jnp.inf]))
    np.testing.assert_allclose(shares, [0.5, 0.5, 0, 0], atol=1e-6)
    assert (reinforce.elite_shares(jnp.full(2, jnp.inf)) == 0).all()


def test_advantage_is_in_deviations_below_the_mean_infinite_as_the_worst_finite():
    found = normalised_advantage(np.array([1, 2, 3], np.float32))
    np.testing.assert_allclose(found, np.array([1, 0, -1]) * 1.5**0.5, rtol=1e-6)
    found = normalised_advantage(np.array([1, np.inf, 3, np.inf], np.float32))
    expected = normalised_advantage(np.array([1, 3, 3, 3], np.float32))
    np.testing.assert_array_equal(found, expected)
    assert (normalised_advantage(np.full(4, np.inf, np.float32)) == 0).all()


@pytest.mark.parametrize("makespan_s", [0.0, 0.1, 3.3e-5, 56.696, 1200.08])
def test_a_batch_without_spread_has_no_advantage(makespan_s):
    # The float32 mean of equal numbers often differs from them in the last bit.
    for size in (3, 24, 64, 128, 130):
        found = jax.jit(normalised_advantage)(np.full(size, makespan_s, np.float32))
        assert (found == 0).all()


TASKS = 6


def rows(count, first):
    """Placements that can be told apart: each of one device, numbered from `first`."""
    return np.repeat(np.arange(first, first + count, dtype=np.int32)[:, None], TASKS, axis=1)


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ([np.inf] * 4, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3]),
        ([1, 3, 5, 7], [2, 9, 9, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 5]),
        ([1, 3, 5, 7], [3, 3, 3, 3, 3, 3, 4, 9, 1, 6], [1, 3, 4, 5]),
        ([1, 2, 3, 4], [9, 9, 9, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 4]),
        ([np.inf] * 4, [2, 2, 2, 2, 2, 2, 2, 2, 2, 2], [2, np.inf, np.inf, np.inf]),
        # More repeats of the best than the archive has places must not crowd out the rest.
        ([np.inf] * 4, [2, 2, 2, 2, 2, 2, 5, 4, 3, 6], [2, 3, 4, 5]),
        ([1, np.inf, np.inf, np.inf], [np.inf] * 9 + [2], [1, 2, np.inf, np.inf]),
        ([], [3, 2, 1, 3, 2, 1, 3, 2, 1, 0], []),
    ],
)
def test_the_best_are_kept_without_repeats(old, new, kept):
    archive = Placements(
        placement=rows(len(old), first=100), makespan_s=np.array(old, np.float32)
    )
    makespan_s = np.array(new, np.float32)
    found = update_elites(archive, rows(len(new), first=0), makespan_s)
    assert found.makespan_s.tolist() == kept
    for placement, value in zip(found.placement, kept, strict=True):
        if value in old and value < np.inf:
            assert (placement == 100 + old.index(value)).all()
        elif value < np.inf:
            assert (placement == new.index(value)).all()
