import jax
import numpy as np
import pytest

from doppler_jax.simulator.noise import draw_factors, makespan_statistics, random_ranks
from tests.simulator.cases import small_problem

GRAPH, _ = small_problem(
    np.ones(40), [(v, 1, []) for v in range(25)], 3, inputs=[(0, 1, [v]) for v in range(9)]
)
DRAW = jax.jit(lambda key, *sigmas: draw_factors(key, GRAPH, 3, 500, *sigmas))


def draw(seed, sigma_compute, sigma_transfer):
    """Returns 500 draws, by one compilation for all tests."""
    factors = DRAW(jax.random.key(seed), sigma_compute, sigma_transfer)
    arrays = factors.compute, factors.transfer, factors.inputs
    return tuple(np.asarray(array, np.float64) for array in arrays)


def test_factors_are_lognormal_of_mean_one():
    compute, transfer, inputs = draw(0, 0.5, 0.1)
    assert compute.shape == (500, 40)
    assert transfer.shape == (500, 25, 3)
    assert inputs.shape == (500, 9, 3)
    for array, sigma in ((compute, 0.5), (transfer, 0.1), (inputs, 0.1)):
        logs = np.log(array).ravel()
        error = 5 / np.sqrt(logs.size)
        np.testing.assert_allclose(logs.std(), sigma, rtol=error)
        np.testing.assert_allclose(logs.mean(), -(sigma**2) / 2, atol=error * sigma)
        np.testing.assert_allclose(array.mean(), 1.0, atol=2 * error * sigma)
    some = compute[:, :10], transfer[:, 0], inputs[:, 0]
    correlation = np.corrcoef(np.concatenate(some, axis=1).T)
    assert np.abs(correlation - np.eye(16)).max() < 5 / np.sqrt(500)  # independent


def test_the_key_decides():
    first, again, other = draw(7, 0.3, 0.3), draw(7, 0.3, 0.3), draw(8, 0.3, 0.3)
    for k in range(3):
        np.testing.assert_array_equal(first[k], again[k])
        assert (first[k] != other[k]).mean() > 0.99
    assert first[0][0, 0] != first[1][0, 0, 0]


def test_without_noise_the_factors_are_one():
    for array in draw(0, 0.0, 0.0):
        assert (array == 1).all()


@pytest.mark.parametrize(
    ("counts", "message"), [((0, 1), "num_devices"), ((1, 0), "num_noise")]
)
def test_refuses_no_draw(counts, message):
    with pytest.raises(ValueError, match=f"{message} is 0; expected at least 1"):
        draw_factors(jax.random.key(0), GRAPH, *counts, 0.1, 0.1)


def test_random_ranks_are_independent_permutations():
    ranks = np.asarray(random_ranks(jax.random.key(0), 600, 5))
    assert ranks.shape == (600, 5)
    np.testing.assert_array_equal(np.sort(ranks, axis=1), np.tile(np.arange(5), (600, 1)))
    # Every task has every rank in a fifth of the draws: 120, give or take five deviations.
    counts = np.array([np.bincount(column, minlength=5) for column in ranks.T])
    assert np.abs(counts - 120).max() < 5 * np.sqrt(600 * 0.2 * 0.8)


def test_statistics_of_makespans():
    draws = np.array([[1.0, 5.0], [3.0, 5.0], [8.0, 5.0]])
    found = makespan_statistics(draws, (0.0, 0.25, 0.5))
    np.testing.assert_allclose(found.mean_s, [4.0, 5.0])
    np.testing.assert_allclose(found.std_s, [np.sqrt(26 / 3), 0.0])
    assert found.quantiles == (0.0, 0.25, 0.5)
    np.testing.assert_allclose(found.quantile_s, [[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])


def test_a_draw_that_never_finishes_shows():
    found = makespan_statistics([[1.0], [np.inf]], (0.0,))
    assert found.mean_s[0] == np.inf
    assert np.isnan(found.std_s[0])
    assert found.quantile_s.tolist() == [[np.inf]]


@pytest.mark.parametrize(
    ("draws", "levels", "message"),
    [
        (np.ones(3), (0.5,), r"makespan_s has shape \(3,\); expected \[K, B\]"),
        (np.ones((0, 3)), (0.5,), "with K >= 1"),
        (np.ones((2, 3)), (1.5,), "quantile 1.5 is outside 0 to 1"),
    ],
)
def test_refuses_what_are_no_draws(draws, levels, message):
    with pytest.raises(ValueError, match=message):
        makespan_statistics(draws, levels)
