"""Stepwise policies: probabilities of what is sampled, legality, learning."""

from collections import Counter

import jax
import numpy as np
import pytest

from doppler_jax.costs.build import from_edge_delays
from doppler_jax.learners import stepwise
from doppler_jax.learners.learner import episode_update
from doppler_jax.learners.stepwise import Joint, PerStep
from doppler_jax.policies import model
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.simulator.batches import simulate_padded
from tests.generators import random_params
from tests.learners.cases import fresh
from tests.training.cases import chains_case

DRAWS = 4096
LEARNERS = {
    "joint": Joint(batch=16, minibatches=2, width=4, rounds=1, learning_rate=1e-2),
    "per_step": PerStep(batch=16, width=4, rounds=1, learning_rate=1e-2),
}


@pytest.fixture(scope="module")
def problem():
    """Two tasks and their reader on two devices, of which one cannot run the last task."""
    graph, costs = from_edge_delays([1.0, 2.0, 1.5], [(0, 2, 0.5), (1, 2, 2.0)], num_devices=2)
    compute_s = costs.compute_s * np.array([1.0, 1.3])
    compute_s[2, 1] = np.inf
    return make_policy_inputs(graph, costs.replace(compute_s=compute_s))


@pytest.fixture(
    scope="module", params=["joint", pytest.param("per_step", marks=pytest.mark.slow)]
)
def drawn(request, problem):
    """Sampled episodes, their log-probabilities and entropies, and what they shared."""
    learner = LEARNERS[request.param]
    params = random_params(learner.init, problem)

    @jax.jit
    def draw(params, key):
        choose = learner.chooser(params, problem)
        actions, placement = stepwise.sample(choose, problem, key, DRAWS)

        def judge(actions):
            return stepwise.log_prob(choose, problem, actions, learner.kept_steps)

        tables = (
            model.apply(params, learner.config, problem) if request.param == "joint" else None
        )
        return actions, placement, *jax.vmap(judge)(actions), tables

    return jax.tree.map(np.asarray, draw(params, jax.random.key(1)))


def test_what_is_sampled_has_the_probability_that_is_forced(drawn):
    actions, _, log_p, entropy, tables = drawn
    rows = np.stack([actions.task[:, :3], actions.device[:, :3]], -1).reshape(DRAWS, -1)
    counts = Counter(map(tuple, rows))
    probability = dict(zip(map(tuple, rows), np.exp(log_p), strict=True))
    # Two orders of the first two tasks, 2 x 2 devices for them; the third has no choice.
    assert len(probability) == 8
    assert sum(probability.values()) == pytest.approx(1, abs=1e-5)
    for row, count in counts.items():
        expected = DRAWS * probability[row]
        assert abs(count - expected) < 5 * np.sqrt(expected)
    assert max(probability.values()) > 1.5 * min(probability.values())
    # The mean of entropies of the steps is the entropy of the episode.
    whole = -sum(p * np.log(p) for p in probability.values())
    assert entropy.mean() == pytest.approx(whole, rel=0.05)
    if tables is not None:
        # Of one softmax over pairs: PLC's logits weigh in on which task is first.
        first = sum(p for row, p in probability.items() if row[0] == 0)
        by_select = float(jax.nn.softmax(tables.score[:2])[0])
        assert abs(first - by_select) > 1e-2


def test_episodes_are_legal(drawn):
    actions, placement, log_p, _, _ = drawn
    assert np.isfinite(log_p).all()
    assert (np.sort(actions.task[:, :3]) == np.arange(3)).all()
    assert (actions.task[:, 2] == 2).all()  # after what it reads
    assert (actions.task[:, 3:] == placement.shape[1]).all()
    assert (placement[:, 2] == 0).all()
    found = np.take_along_axis(placement, actions.task[:, :3], axis=1)
    np.testing.assert_array_equal(found, actions.device[:, :3])


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_it_imitates_and_then_improves(name, monkeypatch):
    """One compilation: the teacher's updates are the first five."""
    monkeypatch.setattr(stepwise, "IMITATED", 5)
    learner, problem = LEARNERS[name], chains_case((3, 3), 2)[2]
    # Compiled for this test alone: what it sets is part of the trace.
    update = jax.jit(episode_update.__wrapped__, static_argnames=("learner", "links"))
    params = random_params(learner.init, problem, 0.1)
    state, _ = fresh(learner, problem, params=params)
    losses, means_s = [], []
    for _ in range(40):
        state, metrics = update(state, problem, learner, "parallel")
        losses.append(float(metrics["loss"]))
        means_s.append(float(metrics["makespan_mean_s"]))
    assert losses[4] < losses[0]
    assert np.mean(means_s[-5:]) < np.mean(means_s[5:10])
    assert float(state.best_makespan_s) <= min(means_s) * (1 + 1e-5)
    best_s = simulate_padded(problem.padded, state.best_placement[None]).makespan_s[0]
    assert best_s == pytest.approx(float(state.best_makespan_s))
    assert int(state.evaluations) == 40 * 16
