"""DOPPLER as a learner: its two stages, and what it makes of a budget."""

import chex
import jax
import numpy as np
import pytest

from doppler_jax.budget import Budget
from doppler_jax.learners import doppler
from doppler_jax.learners.doppler import LEAST_UPDATES, Doppler, fit_updates
from doppler_jax.learners.learner import train_learner
from doppler_jax.training import imitation, sim_rl
from doppler_jax.training.sim_rl import SimConfig, init_sim_state
from tests.policies.cases import CONFIG
from tests.training.cases import IMITATION, SIM, chains_case, sim_update

LEARNER = Doppler(policy=CONFIG, imitate=IMITATION, simulate=SIM, warm_up=3)


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Updates on one device, compiled once; a bound makes them no other than they are."""
    monkeypatch.setattr(
        sim_rl, "sim_update", lambda s, p, c, i: sim_update(s, p, policy=c, config=i)
    )
    monkeypatch.setattr(doppler, "LEAST_UPDATES", 1)


def trained(learner=LEARNER, key=0, params=None, **bounds):
    problem = chains_case()[2]
    return train_learner(learner, problem, jax.random.key(key), Budget(**bounds), params=params)


@pytest.mark.parametrize(("bound", "updates"), [(88, 1), (263, 2), (264, 3)])
def test_evaluations_are_not_exceeded(bound, updates):
    state = trained(evaluations=bound).state
    assert int(state.update) == updates
    assert int(state.evaluations) == 88 * updates <= bound


def test_the_target_ends_training_and_time_allows_one_update():
    target_s = float(trained(evaluations=88 * 40).state.best_makespan_s)
    reached = trained(target_s=target_s, evaluations=88 * 100)
    assert float(reached.state.best_makespan_s) <= target_s
    assert int(reached.state.update) <= 40
    assert int(trained(seconds=1e-9).state.update) == 1


def interrupted_at(number, proper):
    def update(state, *rest):
        if int(state.update) == number:
            raise KeyboardInterrupt
        return proper(state, *rest)

    return update


def test_ctrl_c_returns_what_there_is(monkeypatch):
    monkeypatch.setattr(sim_rl, "sim_update", interrupted_at(2, sim_rl.sim_update))
    result = trained(evaluations=10**6)
    assert result.interrupted
    assert int(result.state.update) == 2
    assert np.isfinite(result.state.best_makespan_s)


@pytest.mark.parametrize(("module", "number"), [(imitation, 2), (sim_rl, 0)])
def test_ctrl_c_before_there_is_anything_passes_on(monkeypatch, module, number):
    name = f"{module.__name__.split('.')[-1].removesuffix('_rl')}_update"
    monkeypatch.setattr(module, name, interrupted_at(number, getattr(module, name)))
    with pytest.raises(KeyboardInterrupt):
        trained(evaluations=10**6)


@pytest.mark.parametrize("bound", [3, 5, 100, 255, 256, 300, 5000])
def test_updates_fit_into_few_evaluations(bound):
    config = fit_updates(SimConfig(batch=128, num_chains=128, search_rounds=16), bound)
    assert 1 <= config.num_chains <= config.batch
    assert config.evaluations <= bound
    assert config.evaluations > 0.7 * bound or bound == 5000


def test_an_update_without_search_fits_too():
    config = fit_updates(SimConfig(num_chains=0, num_elites=0), 30)
    assert (config.batch, config.evaluations) == (10, 10)
    assert Doppler(simulate=SimConfig(num_chains=0)).within(8, 10**6).simulate.num_chains == 0


@pytest.mark.parametrize(
    ("bound", "search_evaluations"),
    [
        (300, 0),
        (100_000, 0),
        (204_799, 0),  # 400 updates of 256 episodes, and a round less than each could have
        (204_800, 2 * 128),
        (300_000, 3 * 128),
        (1_000_000, 17 * 128),
    ],
)
def test_local_search_takes_what_episodes_leave(monkeypatch, bound, search_evaluations):
    monkeypatch.setattr(doppler, "LEAST_UPDATES", LEAST_UPDATES)
    config = Doppler().within(8, bound).simulate
    assert config.search_evaluations == search_evaluations
    assert config.batch == SimConfig().batch
    if search_evaluations:
        assert bound // config.evaluations >= LEAST_UPDATES


def test_no_bound_and_counts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="max_evaluations is 2; training needs 3"):
        Doppler().within(8, 2)
    with pytest.raises(ValueError, match="no bound"):
        trained()
    with pytest.raises(ValueError, match="at most batch, 4"):
        init_sim_state(jax.random.key(0), {}, chains_case()[2], SimConfig(batch=4))
    with pytest.raises(ValueError, match="minibatches is 3; expected a divisor of batch, 256"):
        init_sim_state(jax.random.key(0), {}, chains_case()[2], SimConfig(minibatches=3))


def test_training_goes_on_from_given_parameters_without_stage_1(monkeypatch):
    # Its batch is 64 episodes, each update 88 evaluations.
    source = trained(episodes=2 * 64)
    assert int(source.state.episodes) == 128
    monkeypatch.setattr(imitation, "imitation_update", None)
    monkeypatch.setattr(Doppler, "init", None)
    alone = Doppler(policy=CONFIG, simulate=SIM, warm_up=0)
    tuned = trained(alone, key=1, params=source.policy.params, episodes=191)
    assert (tuned.policy.config, tuned.policy.method) == (CONFIG, "doppler")
    assert (int(tuned.state.update), int(tuned.state.episodes)) == (2, 128)
    moved = jax.tree.map(np.subtract, tuned.state.params, source.policy.params)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(moved))
    # Two updates of two Adam steps move no parameter further than their learning rates do.
    assert 0 < largest <= 4 * SIM.learning_rate * 1.01


def test_given_parameters_imitate_first_where_asked(monkeypatch):
    source = trained(episodes=64)
    begun = []

    def imitate(state, problem, policy, config):
        begun.append(jax.device_get(state.params))
        return state.replace(update=state.update + 1), {}

    monkeypatch.setattr(imitation, "imitation_update", imitate)
    monkeypatch.setattr(Doppler, "init", None)
    trained(key=1, params=source.policy.params, episodes=64)
    assert len(begun) == LEARNER.warm_up
    chex.assert_trees_all_equal(begun[0], source.policy.params)
