"""The trainer of learned methods: what it keeps, counts and steps, on a learner."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax.learners.learner import init_learner, learner_update, train_learner
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from tests.learners.cases import DEVICES, Toy, slow_device


@pytest.fixture(scope="module")
def problem():
    return make_policy_inputs(*slow_device())


def steps_taken(state):
    return int(state.opt_state[1][0].count)


def test_updates_lower_the_probability_of_bad_devices(problem):
    state = init_learner(jax.random.key(0), problem, Toy())
    means_s = []
    for _ in range(6):
        state, metrics = learner_update(state, problem, Toy(), "parallel")
        means_s.append(metrics["makespan_mean_s"])
    assert jax.nn.softmax(state.params["logits"])[2] > 0.6
    assert means_s[-1] < 0.8 * means_s[0]


def test_the_best_placements_met_are_kept_in_order(problem):
    graph, costs = slow_device()
    trained = train_learner(Toy(), problem, jax.random.key(1), max_evaluations=64)
    worth = [makespan_s(simulate_oracle(graph, costs, p)) for p in trained.placements]
    assert (np.diff(worth) >= -1e-5).all()  # the trainer saw them in float32
    # The same draws again, without the trainer.
    state = init_learner(jax.random.key(1), problem, Toy())
    met = []
    for _ in range(4):
        key, _ = jax.random.split(jax.random.fold_in(state.key, state.update))
        met.append(Toy().explore(state.params, problem, key, state.update, "parallel"))
        state, _ = learner_update(state, problem, Toy(), "parallel")
    assert min(float(explored.makespan_s.min()) for explored in met) == pytest.approx(worth[0])
    chex.assert_trees_all_equal(jax.device_get(state.params), trained.params)


@pytest.mark.parametrize(("bound", "expected"), [(1, 1), (16, 16), (47, 32), (48, 48)])
def test_evaluations_are_counted_and_never_exceed_the_bound(problem, bound, expected):
    spent = []
    trained = train_learner(
        Toy(),
        problem,
        jax.random.key(0),
        max_evaluations=bound,
        record=lambda evaluations, best_s: spent.append((evaluations, best_s)),
    )
    assert trained.evaluations == expected == spent[-1][0]
    assert len(spent) == trained.updates
    assert [best_s for _, best_s in spent] == sorted((b for _, b in spent), reverse=True)
    assert all(p.min() >= 0 and p.max() < DEVICES for p in trained.placements)


def test_every_pass_takes_a_step_per_minibatch_and_sees_every_episode_once(problem):
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Watched(Toy):
        def loss(self, params, problem, lesson, update):
            jax.debug.callback(seen.append, lesson["device"])
            return super().loss(params, problem, lesson, update)

    watched = Watched(batch=8, epochs=3, minibatches=4)
    state = init_learner(jax.random.key(0), problem, watched)
    key, _ = jax.random.split(jax.random.fold_in(state.key, state.update))
    explored = watched.explore(state.params, problem, key, state.update, "parallel")
    expected = sorted(map(tuple, np.asarray(explored.placement)))
    state, _ = jax.block_until_ready(learner_update(state, problem, watched, "parallel"))
    jax.effects_barrier()
    assert steps_taken(state) == len(seen) == 12
    passes = np.asarray(seen).reshape(3, 8, -1)
    for order in passes:
        assert sorted(map(tuple, order)) == expected
    assert (passes[0] != passes[1]).any()  # shuffled afresh


def test_problems_of_one_shape_share_a_compilation(problem):
    graph, costs = slow_device()
    other = make_policy_inputs(graph, costs.replace(compute_s=2 * costs.compute_s))
    once = jax.jit(
        chex.assert_max_traces(learner_update.__wrapped__, n=1),
        static_argnames=("learner", "links"),
    )
    states = [init_learner(jax.random.key(0), p, Toy()) for p in (problem, other)]
    best = [
        once(s, p, Toy(), "parallel")[0].best_makespan_s
        for s, p in zip(states, (problem, other), strict=True)
    ]
    assert best[0] < best[1]


def test_training_goes_on_from_given_parameters(problem):
    given = {"logits": jnp.array([0.0, 0.0, 30.0])}
    trained = train_learner(Toy(), problem, jax.random.key(0), max_evaluations=16, params=given)
    assert (trained.placements[0] == 2).all()


def test_ctrl_c_leaves_what_was_found(problem):
    def stop(evaluations, best_s):
        if evaluations == 32:
            raise KeyboardInterrupt

    trained = train_learner(Toy(), problem, jax.random.key(0), max_evaluations=640, record=stop)
    assert trained.interrupted
    assert (trained.updates, trained.evaluations) == (2, 32)


def test_time_ends_training_after_an_update(problem):
    trained = train_learner(Toy(), problem, jax.random.key(0), budget_s=1e-9)
    assert trained.updates == 1


def test_bad_bounds_are_refused(problem):
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="no bound; give budget_s or max_evaluations"):
        train_learner(Toy(), problem, key)
    with pytest.raises(ValueError, match="max_evaluations is 4; an update of Toy needs 5"):
        train_learner(Toy(cost=5), problem, key, max_evaluations=4)
    with pytest.raises(ValueError, match="minibatches is 3; expected a divisor of batch, 16"):
        train_learner(Toy(minibatches=3), problem, key, budget_s=1.0)
