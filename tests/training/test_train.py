import dataclasses

import chex
import jax
import numpy as np
import pytest

from doppler_jax.training import train
from doppler_jax.training.checkpoint import Policy
from doppler_jax.training.sim_rl import SimConfig, init_sim_state
from doppler_jax.training.train import fit_updates, train_policy
from tests.policies.cases import CONFIG
from tests.training.cases import IMITATION, SIM, chains_case, sim_update


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Updates on one device, compiled once, and few of stage 1."""
    monkeypatch.setattr(
        train, "sim_update", lambda s, p, c, i: sim_update(s, p, policy=c, config=i)
    )
    monkeypatch.setattr(train, "WARM_UP", 3)


def trained(**bounds):
    problem = chains_case()[2]
    settings = {"policy": CONFIG, "imitate": IMITATION, "simulate": SIM}
    return train_policy(problem, jax.random.key(0), **settings, **bounds)


@pytest.mark.parametrize(("bound", "updates"), [(88, 1), (263, 2), (264, 3)])
def test_evaluations_are_not_exceeded(bound, updates):
    result = trained(max_evaluations=bound)
    assert int(result.state.update) == updates
    assert int(result.state.evaluations) == 88 * updates <= bound


def test_the_target_ends_training_and_time_allows_one_update():
    full = trained(max_evaluations=88 * 40)
    target_s = float(full.state.best_makespan_s)
    reached = trained(target_s=target_s)
    assert float(reached.state.best_makespan_s) <= target_s
    assert int(reached.state.update) <= 40
    assert int(trained(budget_s=1e-9).state.update) == 1


def test_ctrl_c_returns_what_there_is(monkeypatch):
    proper = train.sim_update

    def interrupted_later(state, *rest):
        if int(state.update) == 2:
            raise KeyboardInterrupt
        return proper(state, *rest)

    monkeypatch.setattr(train, "sim_update", interrupted_later)
    result = trained(max_evaluations=10**6)
    assert result.interrupted
    assert int(result.state.update) == 2
    assert np.isfinite(result.state.best_makespan_s)


@pytest.mark.parametrize("bound", [3, 5, 100, 255, 256, 300, 5000])
def test_updates_fit_into_few_evaluations(bound):
    config = fit_updates(SimConfig(batch=128, num_chains=128, search_rounds=16), bound)
    assert 1 <= config.num_chains <= config.batch
    assert config.evaluations <= bound
    assert config.evaluations > 0.7 * bound or bound == 5000


def test_an_update_without_search_fits_too():
    config = fit_updates(SimConfig(num_chains=0, num_elites=0), 30)
    assert (config.batch, config.evaluations) == (10, 10)


def test_no_bound_and_counts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="max_evaluations is 2; training needs 3"):
        fit_updates(SimConfig(), 2)
    with pytest.raises(ValueError, match="no bound"):
        trained()
    with pytest.raises(ValueError, match="at most batch, 4"):
        init_sim_state(jax.random.key(0), {}, chains_case()[2], SimConfig(batch=4))
    with pytest.raises(ValueError, match="minibatches is 3; expected a divisor of batch, 256"):
        init_sim_state(jax.random.key(0), {}, chains_case()[2], SimConfig(minibatches=3))


def test_training_goes_on_from_a_given_policy(monkeypatch):
    # Its batch is 64 episodes, each update 88 evaluations.
    source = trained(max_episodes=2 * 64)
    assert int(source.state.episodes) == 128
    initial = Policy(params=jax.device_get(source.state.params), config=CONFIG)
    monkeypatch.setattr(train, "imitation_update", None)  # there is no stage 1
    monkeypatch.setattr(train, "_init_params", None)
    tuned = train_policy(
        chains_case()[2], jax.random.key(1), max_episodes=191, initial=initial, simulate=SIM
    )
    assert tuned.policy == CONFIG
    assert (int(tuned.state.update), int(tuned.state.episodes)) == (2, 128)
    moved = jax.tree.map(
        lambda new, old: np.abs(new - old).max(), tuned.state.params, initial.params
    )
    # Two updates of two Adam steps move no parameter further than their learning rates do.
    assert 0 < max(jax.tree.leaves(moved)) <= 4 * SIM.learning_rate * 1.01


def test_a_given_policy_imitates_first_where_asked(monkeypatch):
    source = trained(max_episodes=64)
    initial = Policy(params=jax.device_get(source.state.params), config=CONFIG)
    begun = []

    def imitate(state, problem, policy, config):
        begun.append(jax.device_get(state.params))
        return dataclasses.replace(state, update=state.update + 1), {}

    monkeypatch.setattr(train, "imitation_update", imitate)
    monkeypatch.setattr(train, "_init_params", None)
    train_policy(
        chains_case()[2], jax.random.key(1), max_episodes=64, initial=initial,
        imitate=IMITATION, simulate=SIM,
    )  # fmt: skip
    assert len(begun) == train.WARM_UP
    chex.assert_trees_all_equal(begun[0], initial.params)
