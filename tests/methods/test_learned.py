"""`doppler` in `place`: with a policy, and trained within a budget."""

import dataclasses
import time
from unittest import mock

import jax
import numpy as np
import pytest

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.learners import doppler as doppler_learner
from doppler_jax.learners import learner
from doppler_jax.learners.doppler import policy_candidates
from doppler_jax.methods import learned
from doppler_jax.objective import Objective
from doppler_jax.placing import place
from doppler_jax.policies import apply, greedy
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from tests.methods.cases import (
    BOUND,
    PROBLEMS,
    assert_is_sound,
    make,
    tight,
)


@pytest.mark.slow
def test_doppler_without_a_policy_is_never_worse_than_its_teacher():
    gains = []
    options = {"method": "doppler", "max_evaluations": BOUND}
    for name in PROBLEMS:
        graph, costs = make(name)
        taught = makespan_s(simulate_oracle(graph, costs, critical_path(graph, costs)))
        placed = place(graph, costs, key=jax.random.key(1), **options)
        gains.append(taught - placed.makespan_s)
    assert min(gains) >= 0
    assert max(gains) > 0  # its samples are worth something


@pytest.mark.slow
def test_the_teacher_competes_when_training_finds_nothing_better(monkeypatch):
    graph, costs = make("unequal")
    worst = np.full((1, 12), int(costs.compute_s.sum(axis=0).argmax()))
    monkeypatch.setattr(learner, "best_placements", lambda state, num_tasks: worst)
    placed = place(graph, costs, method="doppler", max_evaluations=BOUND)
    np.testing.assert_array_equal(placed.placement, critical_path(graph, costs))


@pytest.mark.slow
def test_the_smallest_bound_is_the_teachers():
    graph, costs = make("unequal")
    only_teacher = place(graph, costs, method="doppler", max_evaluations=1)
    assert only_teacher.evaluations == 1
    np.testing.assert_array_equal(only_teacher.placement, critical_path(graph, costs))


def _says(placements):
    """A stand-in for a child: it says what it is given, then nothing for ever."""

    class Child:
        def __init__(self, work, *given, keep_compiled):
            self.said = [(7 + k, 1.0, p) for k, p in enumerate(placements)]

        def receive(self, timeout_s):
            if self.said:
                return self.said.pop(0)
            time.sleep(timeout_s)
            return None

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    return Child


@pytest.mark.parametrize("bounds", [{"budget_s": 0.3}, {}])
def test_training_is_given_up_at_the_bound_and_the_best_so_far_returned(monkeypatch, bounds):
    graph, costs = make("unequal")
    monkeypatch.setattr(learned, "TRAINING_S", 0.3)
    good = place(graph, costs, method="annealing", max_evaluations=4000).placement
    for said, evaluations in (([], 1), ([good], 7)):
        monkeypatch.setattr(learned, "Child", _says(said))
        placed = place(graph, costs, method="doppler", **bounds)
        assert placed.evaluations == evaluations
        assert placed.seconds < 20
        if said:
            np.testing.assert_array_equal(placed.placement, good)
        else:
            assert placed.makespan_s <= place(graph, costs, method="heft").makespan_s


@pytest.mark.slow
def test_a_child_trains():
    graph, costs = make("unequal")
    placed = place(graph, costs, method="doppler", budget_s=120, max_evaluations=128)
    assert 64 < placed.evaluations <= 128
    assert placed.seconds < 110  # it says that it is done
    assert len(placed.curve.makespan_s)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [5, 128, 300])
def test_doppler_never_simulates_more_than_allowed(bound):
    graph, costs = make("unequal")
    placed = place(graph, costs, method="doppler", max_evaluations=bound)
    assert bound / 2 < placed.evaluations <= bound
    assert_is_sound(placed, graph, costs)


@pytest.mark.parametrize("name", PROBLEMS)
def test_doppler_with_a_policy_returns_its_best_sample(policy, name):
    graph, costs = make(name)
    options = {"policy": policy, "key": 3, "max_evaluations": BOUND}
    placed = place(graph, costs, method="doppler", **options)
    assert_is_sound(placed, graph, costs)
    assert placed.evaluations == BOUND
    inputs = make_policy_inputs(graph, costs)
    drawn = doppler_learner.policy_plans(inputs, policy, jax.random.key(3), BOUND)
    ordered = [
        makespan_s(simulate_oracle(graph, costs, p, queue="in_order", priority=rank))
        for p, rank in zip(*drawn, strict=True)
    ]
    assert placed.makespan_s == min(ordered)
    fifo = place(graph, costs, method="doppler", queue="fifo", **options)
    assert fifo.makespan_s == min(
        makespan_s(simulate_oracle(graph, costs, p)) for p in drawn.placements
    )


def test_the_first_two_candidates_of_a_policy_are_greedy_in_two_orders(policy):
    problem = make_policy_inputs(*make("unequal"))
    one, other = (
        policy_candidates(problem, policy, jax.random.key(k), BOUND) for k in range(2)
    )
    np.testing.assert_array_equal(one[:2], other[:2])
    assert (one[2:] != other[2:]).any()
    for count in (1, 2):
        few = policy_candidates(problem, policy, jax.random.key(0), count)
        np.testing.assert_array_equal(few, one[:count])
    given = dataclasses.replace(policy.config, select="b_level")
    for expected, config in zip(one, (policy.config, given), strict=False):
        tables = apply(policy.params, config, problem)
        found = greedy(problem, tables).placement[: one.shape[1]]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("count", [6, 8, 11])
def test_candidates_do_not_depend_on_how_many_are_drawn_at_once(policy, monkeypatch, count):
    problem = make_policy_inputs(*make("unequal"))
    expected = policy_candidates(problem, policy, jax.random.key(5), count)
    monkeypatch.setattr(doppler_learner, "DRAWN_STEPS", 1)
    monkeypatch.setattr(doppler_learner, "LEAST_DRAWN", 3)
    found = policy_candidates(problem, policy, jax.random.key(5), count)
    np.testing.assert_array_equal(found, expected)
    chunks = list(doppler_learner.draw_plans(problem, policy, jax.random.key(5), count))
    assert [len(chunk.placements) for chunk in chunks] == [
        2,
        *[3] * ((count - 2) // 3),
        *[1] * ((count - 2) % 3 == 1),
    ]
    np.testing.assert_array_equal(
        np.concatenate([chunk.placements for chunk in chunks]), expected
    )


def test_doppler_makes_what_it_finds_fit(policy, monkeypatch):
    graph, costs = make("unequal")
    costs = tight(graph, costs, 0.95)
    listed = critical_path(graph, costs)[None]
    found = mock.Mock(
        placements=listed, interrupted=False, state=mock.Mock(evaluations=BOUND - 1)
    )
    learn = mock.Mock(return_value=found)
    monkeypatch.setattr(learned, "train_learner", learn)
    for given, bound in ((policy, BOUND), (None, 1), (None, BOUND)):
        placed = place(graph, costs, method="doppler", policy=given, max_evaluations=bound)
        assert (peak_memory_bytes(graph, costs, placed.schedule) <= costs.capacity_bytes).all()
    assert learn.call_count == 1


@pytest.mark.parametrize(
    ("links", "guide"), [("parallel", "parallel"), ("serial", "serial"), ("duplex", "serial")]
)
def test_training_simulates_the_links_that_are_asked_for(links, guide, monkeypatch):
    asked = []

    def phase(key, problem, policy, config):
        asked.append(config.links)
        raise KeyboardInterrupt

    monkeypatch.setattr(doppler_learner, "sim_phase", phase)
    with pytest.raises(KeyboardInterrupt):
        place(
            *make("unequal"),
            method="doppler",
            objective=Objective(links),
            max_evaluations=100,
        )
    assert asked == [guide]
