"""Placeto: what it sees, what its steps earn, and that it learns."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax.graphs.build import task_edges
from doppler_jax.learners import placeto
from doppler_jax.learners.placeto import (
    Placeto,
    advantages,
    find_closure,
    group_shares,
    placement_at,
    step_makespans,
)
from doppler_jax.simulator.batches import simulate_padded
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from tests.generators import random_params, random_problem, relabel_devices, some_unable
from tests.learners.cases import chainmm_problem, fresh
from tests.policies.cases import padded_problem

TASKS, DEVICES, EPISODES = 10, 3, 64
LEARNERS = {
    once: Placeto(once=once, batch=EPISODES, width=4, rounds=1) for once in (False, True)
}
spans = jax.jit(step_makespans, static_argnames="links")


@jax.jit
def all_shares(problem, order):
    closure = find_closure(problem, order)
    shares = jax.vmap(group_shares, in_axes=(None, None, 0))
    return shares(problem, closure, jnp.arange(len(order), dtype=jnp.int32))


def pad(graph, costs):
    return padded_problem(graph, costs, tasks=16, edges=64)


@pytest.fixture(scope="module")
def case():
    """Graph and costs; a fifth of the devices is unable to run a task."""
    rng = np.random.default_rng(5)
    graph, costs = random_problem(rng, TASKS, DEVICES, homes=False)
    costs = some_unable(rng, costs, 0.2)
    assert np.isinf(costs.compute_s).any()
    return graph, costs


@pytest.fixture(scope="module")
def problem(case):
    return pad(*case)


class Compiled:
    """A learner's functions, compiled once, and parameters without fresh ones' zeros."""

    def __init__(self, learner, problem):
        self.learner = learner
        self.params = random_params(learner.init, problem, 0.7)
        self._explore = jax.jit(learner.explore, static_argnames="links")
        self.propose = jax.jit(learner.draw, static_argnames=("count", "links"))
        self.log_prob = jax.jit(learner.log_prob)
        self.all_logits = jax.jit(self._all_logits)

    def explore(self, problem):
        return self._explore(self.params, problem, jax.random.key(1), jnp.int32(0), "parallel")

    def _all_logits(self, params, problem, start, end):
        """Logits `[N, B, D]` of all steps, from placements changed one by one."""
        policy, variables = self.learner.policy, {"params": params}
        tables = policy.apply(variables, problem, method="tables")

        def step(placement, step):
            logits = policy.apply(variables, problem, tables, placement, step, method="logits")
            task = tables.order[step]
            return placement.at[:, task].set(end[:, task]), logits

        return jax.lax.scan(step, start, jnp.arange(start.shape[1], dtype=jnp.int32))[1]


@pytest.fixture(scope="module", params=[False, True], ids=["each_step", "once"])
def compiled(request, problem):
    return Compiled(LEARNERS[request.param], problem)


@pytest.fixture(scope="module")
def explored(compiled, problem):
    return compiled.explore(problem)


def visiting_order(problem):
    return np.argsort(np.asarray(problem.topological_rank)[:TASKS])


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 45])
def test_groups_are_those_of_a_plain_search(num_tasks):
    graph, costs = random_problem(np.random.default_rng(4), num_tasks, DEVICES, homes=False)
    problem = padded_problem(graph, costs, tasks=48, edges=1024)
    order = np.argsort(np.asarray(problem.topological_rank)[:-1], kind="stable").astype("i4")
    shares = np.asarray(all_shares(problem, order))[:num_tasks]
    above = np.eye(num_tasks, dtype=bool)
    senders, receivers = task_edges(graph)
    for task in order[:num_tasks]:
        above[task] |= above[senders[receivers == task]].any(0)
    below = above.T & ~np.eye(num_tasks, dtype=bool)
    beside = ~(above | above.T)
    above &= ~np.eye(num_tasks, dtype=bool)
    groups = np.stack([above, below, beside], 1).astype(float)
    expected = groups / np.maximum(groups.sum(-1, keepdims=True), 1)
    np.testing.assert_allclose(shares[:, :, :num_tasks], expected, rtol=1e-6)
    assert not shares[:, :, num_tasks:].any()


def test_probabilities_follow_relabelled_devices(compiled, case, problem, explored):
    new = np.array([2, 0, 1], np.int32)
    old, moved = np.argsort(new), pad(*relabel_devices(*case, new))
    start, end = explored.lesson.start, explored.lesson.end
    expected = compiled.all_logits(compiled.params, problem, start, end)[:TASKS]
    found = compiled.all_logits(compiled.params, moved, new[start], new[end])[:TASKS]
    np.testing.assert_allclose(found, np.asarray(expected)[..., old], rtol=1e-4, atol=1e-4)
    finite = np.where(np.isfinite(expected), expected, np.nan)
    assert np.nanmax(np.nanstd(finite, axis=-1)) > 0.1


def test_padding_changes_nothing(compiled, case, problem, explored):
    larger = padded_problem(*case, tasks=20, edges=80)
    start, end = (np.asarray(a) for a in (explored.lesson.start, explored.lesson.end))
    spare = ((0, 0), (0, 4))
    expected = compiled.log_prob(compiled.params, problem, start, end)
    found = compiled.log_prob(compiled.params, larger, np.pad(start, spare), np.pad(end, spare))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a)[:, :TASKS], b[:, :TASKS], atol=1e-4)
        assert not np.asarray(a)[:, TASKS:].any()
    assert np.std(expected[0][:, :TASKS]) > 0.1


def test_log_probabilities_are_those_of_the_steps(compiled, problem, explored):
    start, end = explored.lesson.start, explored.lesson.end
    logits = compiled.all_logits(compiled.params, problem, start, end)[:TASKS]
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1)).transpose(1, 0, 2)
    chosen = np.asarray(end)[:, visiting_order(problem)]
    expected = np.take_along_axis(expected, chosen[:, :, None], axis=-1)[..., 0]
    log_p, entropy = compiled.log_prob(compiled.params, problem, start, end)
    np.testing.assert_allclose(log_p[:, :TASKS], expected, rtol=1e-4, atol=1e-5)
    # Given the steps before, a step's log-probability has the mean -entropy.
    excess = np.asarray(log_p + entropy)[:, :TASKS].sum(-1)
    assert abs(excess.mean()) < 4 * excess.std() / np.sqrt(EPISODES)
    assert np.asarray(entropy)[:, :TASKS].min() >= 0


def test_the_first_proposal_takes_likeliest_choices(problem):
    compiled = Compiled(LEARNERS[True], problem)
    key = jax.random.key(2)
    placements = compiled.propose(compiled.params, problem, key, count=5, links="parallel")
    assert (placements[1:] != placements[:1]).any()
    start = placeto.start_on(problem, jnp.argmin(problem.padded.compute_s.sum(0))[None])
    logits = compiled.all_logits(compiled.params, problem, start, placements[:1])
    likeliest = np.asarray(logits)[:TASKS, 0].argmax(-1)
    np.testing.assert_array_equal(placements[0, visiting_order(problem)], likeliest)


def test_an_episode_is_known_by_its_best_step(case, problem, explored):
    graph, costs = case
    start, end = explored.lesson.start, explored.lesson.end
    steps = [placement_at(problem, start, end, step) for step in range(17)]
    placements = np.stack(steps, axis=1)
    assert ((placements[:, 1:] != placements[:, :-1]).sum(-1) <= 1).all()
    np.testing.assert_array_equal(placements[:, -1, :TASKS], end[:, :TASKS])
    able = np.isfinite(costs.compute_s)
    assert able[np.arange(TASKS)[:, None], placements[..., :TASKS].reshape(-1, TASKS).T].all()
    found = np.asarray(spans(problem, start, end, links="parallel"))
    expected = [
        [makespan_s(simulate_oracle(graph, costs, at)) for at in episode[:, :TASKS]]
        for episode in placements[:3]
    ]
    np.testing.assert_allclose(found[:3], expected, rtol=1e-5)
    np.testing.assert_allclose(explored.makespan_s, found.min(-1), rtol=1e-6)
    best = makespan_s(simulate_oracle(graph, costs, np.asarray(explored.placement)[0, :TASKS]))
    np.testing.assert_allclose(explored.makespan_s[0], best, rtol=1e-5)
    assert (found.min(-1) < found[:, -1]).any()


def test_chunks_of_the_simulation_change_nothing(problem, monkeypatch):
    start, end = np.random.default_rng(0).integers(0, DEVICES, (2, EPISODES, 16), np.int32)
    whole = spans(problem, start, end, links="parallel")
    monkeypatch.setattr(placeto, "ENTRIES", 16 * 100)
    in_chunks = jax.jit(lambda *args: step_makespans(*args, "parallel"))(problem, start, end)
    np.testing.assert_allclose(in_chunks, whole, rtol=1e-6)
    assert np.std(np.where(np.isfinite(whole), whole, 0.0)) > 0.1


def test_rewards_of_the_steps_sum_to_what_the_episode_saved():
    spans_s = np.random.default_rng(0).uniform(1, 2, (6, 9)).astype("f4")
    rewards_s = -np.diff(spans_s)
    returns_s = np.cumsum(rewards_s[:, ::-1], axis=-1)[:, ::-1]
    np.testing.assert_allclose(returns_s[:, 0], spans_s[:, 0] - spans_s[:, -1], rtol=1e-4)
    excess = returns_s - returns_s.mean(0)
    np.testing.assert_allclose(advantages(spans_s), excess / excess.std(), rtol=1e-4, atol=1e-5)
    assert not advantages(np.full((6, 9), 0.3, "f4")).any()


@pytest.mark.parametrize("num_tasks", [0, 1, 2])
def test_the_smallest_problems(compiled, num_tasks):
    graph, costs = random_problem(np.random.default_rng(1), num_tasks, DEVICES, homes=False)
    problem = pad(graph, costs)
    explored = compiled.explore(problem)
    start, end = explored.lesson.start, explored.lesson.end
    log_p, entropy = compiled.log_prob(compiled.params, problem, start, end)
    assert np.isfinite(explored.lesson.advantage).all()
    assert ((np.asarray(log_p) < 0) == (np.arange(16) < num_tasks)).all()
    assert ((np.asarray(entropy) > 0) == (np.arange(16) < num_tasks)).all()
    assert (np.asarray(explored.makespan_s) > 0).all() == (num_tasks > 0)


@pytest.mark.slow
def test_updates_stay_finite_and_are_counted(problem):
    learner = Placeto(once=True, batch=4, width=4, rounds=1)
    smallest = [
        random_problem(np.random.default_rng(1), size, DEVICES, homes=False) for size in (0, 1)
    ]
    for one in (problem, *itertools.starmap(pad, smallest)):
        state, update = fresh(learner, one)
        for _ in range(2):
            state, metrics = update(state)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
        assert all(np.isfinite(value) for value in metrics.values())
        assert int(state.evaluations) == 2 * 4 * 17


@pytest.mark.slow
@pytest.mark.parametrize("once", [False, True])
def test_it_improves_on_its_start_on_chainmm(once):
    problem, learner = chainmm_problem(), Placeto(once=once, width=8, rounds=2)
    ends = jax.jit(learner.draw, static_argnames=("count", "links"))

    def mean_s(params):
        placements = ends(params, problem, jax.random.key(7), count=64, links="parallel")
        return simulate_padded(problem.padded, placements).makespan_s.mean()

    state, update = fresh(learner, problem)
    one_device = placeto.start_on(problem, jnp.zeros(1, jnp.int32))
    start_s = simulate_padded(problem.padded, one_device).makespan_s[0]
    fresh_s = mean_s(state.params)
    for _ in range(80):
        state, _ = update(state)
    trained_s = mean_s(state.params)
    assert trained_s < 0.85 * fresh_s
    assert trained_s < 0.85 * start_s
