"""Bounds of a search or a training."""

import time

import pytest

from doppler_jax.budget import Budget


@pytest.mark.parametrize(
    ("budget", "last", "next_"),
    [
        (Budget(evaluations=10), {"evaluations": 10}, {"evaluations": 11}),
        (Budget(episodes=10), {"episodes": 10}, {"episodes": 11}),
        (Budget(target_s=2.0), {"makespan_s": 2.1}, {"makespan_s": 2.0}),
    ],
    ids=["evaluations", "episodes", "target"],
)
def test_counts_are_kept_and_a_target_is_met(budget, last, next_):
    assert budget.is_bounded == (budget.target_s is None)
    assert not budget.reached(**last)
    assert budget.reached(**next_)


def test_seconds_count_from_the_beginning_whatever_was_spent_before():
    assert not Budget(seconds=60.0).reached()
    assert Budget(seconds=60.0).after(61.0).reached()
    half = Budget(seconds=60.0, began=time.monotonic() - 30).progress(0)
    assert half == pytest.approx(0.5, abs=0.05)


def test_nothing_bounds_nothing_and_the_larger_share_is_the_progress():
    assert not Budget().is_bounded
    assert not Budget().reached(10**9, 10**9, 0.0)
    budget = Budget(evaluations=100, seconds=1000.0).after(100.0)
    assert budget.progress(50) == 0.5
    assert budget.progress(0) == pytest.approx(0.1, abs=0.05)
    assert budget.progress(1000) == 1.0
