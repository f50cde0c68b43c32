"""DOPPLER with one of its two policies replaced by the teacher's rule."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from doppler_jax.learners import doppler
from doppler_jax.learners.doppler import Doppler
from doppler_jax.policies import model
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.reinforce import Lesson, lesson_loss
from tests.generators import random_params
from tests.policies.cases import CONFIG, EPISODES, case, init, keys, sample, teach

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
