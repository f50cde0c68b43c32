"""DOPPLER as a learner: its two stages, and what it makes of a budget."""

import dataclasses
from functools import partial

import chex
import jax
import numpy as np
import pytest

from doppler_jax.budget import Budget
from doppler_jax.learners import doppler
from doppler_jax.learners.doppler import LEAST_UPDATES, Doppler, fit_updates
from doppler_jax.learners.learner import train_learner
from doppler_jax.policies import model
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training import imitation, sim_rl
from doppler_jax.training.reinforce import Lesson, lesson_loss
from doppler_jax.training.sim_rl import SimConfig, sim_phase
from tests.generators import random_params
from tests.policies.cases import CONFIG, EPISODES, case, init, keys, sample, teach
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
        sim_phase(jax.random.key(0), chains_case()[2], CONFIG, SimConfig(batch=4))
    with pytest.raises(ValueError, match="minibatches is 3; expected a divisor of batch, 256"):
        sim_phase(jax.random.key(0), chains_case()[2], CONFIG, SimConfig(minibatches=3))


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


RULES = {
    "both": dataclasses.replace(CONFIG, select="b_level", place="earliest"),
    "plc": dataclasses.replace(CONFIG, select="b_level"),
    "sel": dataclasses.replace(CONFIG, place="earliest"),
}
TASKS = 24


@pytest.fixture(scope="module")
def drawn():
    """By rule: parameters, tables and sampled episodes; beside them the teacher's."""
    problem = case(TASKS)[2]
    params = {
        name: random_params(partial(init, config=config), problem, seed=2)
        for name, config in RULES.items()
    }

    @jax.jit
    def tables_of(params):
        return {n: model.apply(params[n], config, problem) for n, config in RULES.items()}

    tables = tables_of(params)
    found = {n: (params[n], tables[n], sample(keys(), problem, tables[n])) for n in RULES}
    return found | {"teacher": (None, None, teach(keys(seed=1), problem))}


def distinct(episodes):
    """The different placements of episodes, in a fixed order."""
    return np.unique(np.asarray(episodes.placement)[:, :TASKS], axis=0)


def test_both_rules_together_are_the_teacher(drawn):
    both, teacher = drawn["both"][2], drawn["teacher"][2]
    np.testing.assert_array_equal(both.actions.task, teacher.actions.task)
    # Idle devices are drawn at random, so that there are several; both draw all of them.
    assert 1 < len(distinct(teacher)) < EPISODES / 4
    np.testing.assert_array_equal(distinct(both), distinct(teacher))


def test_one_rule_leaves_the_other_choice_to_the_policy(drawn):
    teacher = drawn["teacher"][2].actions
    plc, sel = drawn["plc"][2].actions, drawn["sel"][2].actions
    np.testing.assert_array_equal(plc.task, teacher.task)
    assert len(np.unique(np.asarray(plc.device), axis=0)) > EPISODES / 2
    assert len(np.unique(np.asarray(sel.task), axis=0)) > EPISODES / 2


def test_the_earliest_device_is_taken_whatever_the_order(drawn):
    episodes = drawn["sel"][2]
    real = np.asarray(episodes.actions.task) < TASKS
    late, device = (np.asarray(a) for a in (episodes.features[..., 4], episodes.actions.device))
    taken = np.take_along_axis(late, device[..., None], axis=-1)
    assert taken[real].max() < 1e-2
    assert late[real].max() > 0.1  # there were later ones


@pytest.mark.parametrize(
    ("rule", "absent", "present"),
    [("plc", "Select_0", "Place_0"), ("sel", "Place_0", "Select_0")],
)
def test_rules_have_no_parameters_and_pass_no_gradient(drawn, rule, absent, present):
    params, _, episodes = drawn[rule]
    assert absent not in params
    problem = case(TASKS)[2]
    share = np.full(EPISODES, 1 / EPISODES, np.float32)
    lesson = Lesson(episodes=episodes, weight=share, entropy_weight=share)

    @jax.jit
    def gradient(params):
        return jax.grad(
            lambda p: lesson_loss(problem, model.apply(p, RULES[rule], problem), lesson)
        )(params)

    found = gradient(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert any((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(found[present]))


@pytest.mark.parametrize(("place", "weight"), [("earliest", 0.0), ("learned", 4.0)])
def test_elites_teach_only_a_learned_place(monkeypatch, place, weight):
    asked = []
    monkeypatch.setattr(doppler, "sim_phase", lambda *args: asked.append(args[2:]))
    Doppler(policy=PolicyConfig(place=place)).phases(jax.random.key(0), None, "serial")
    ((policy, simulate),) = asked
    assert (policy.place, simulate.elite_weight, simulate.links) == (place, weight, "serial")
