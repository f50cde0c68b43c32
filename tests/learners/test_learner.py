"""The trainer of learned methods: what it keeps, counts and steps, on a learner."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax.budget import Budget
from doppler_jax.learners.learner import best_placements, episode_update, train_learner
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.simulator.finalists import NUM_FINALISTS
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.training.state import Placements, TrainState
from tests.learners.cases import DEVICES, Toy, fresh, slow_device


@pytest.fixture(scope="module")
def problem():
    return make_policy_inputs(*slow_device())


def steps_taken(state):
    return int(state.opt_state[1][0].count)


def test_updates_lower_the_probability_of_bad_devices(problem):
    state, update = fresh(Toy(), problem)
    means_s = []
    for _ in range(6):
        state, metrics = update(state)
        means_s.append(metrics["makespan_mean_s"])
    assert jax.nn.softmax(state.params["logits"])[2] > 0.6
    assert means_s[-1] < 0.8 * means_s[0]


def test_the_best_placements_met_are_kept_in_order(problem):
    graph, costs = slow_device()
    trained = train_learner(Toy(), problem, jax.random.key(1), Budget(evaluations=64))
    worth = [makespan_s(simulate_oracle(graph, costs, p)) for p in trained.placements]
    assert (np.diff(worth) >= -1e-5).all()  # the trainer saw them in float32
    # The same draws again, without the trainer.
    state, update = fresh(Toy(), problem, key=1)
    met = []
    for _ in range(4):
        key, _ = jax.random.split(jax.random.fold_in(state.key, state.update))
        met.append(Toy().explore(state.params, problem, key, state.update, "parallel"))
        state, _ = update(state)
    assert min(float(explored.makespan_s.min()) for explored in met) == pytest.approx(worth[0])
    chex.assert_trees_all_equal(jax.device_get(state.params), trained.policy.params)
    assert (trained.policy.config, trained.policy.method) == (Toy(), "toy")


@pytest.mark.parametrize(("bound", "expected"), [(1, 1), (16, 16), (47, 32), (48, 48)])
def test_evaluations_are_counted_and_never_exceed_the_bound(problem, bound, expected):
    spent = []

    def report(state):
        spent.append((int(state.evaluations), state.best_makespan_s))

    budget = Budget(evaluations=bound)
    trained = train_learner(Toy(), problem, jax.random.key(0), budget, report=report)
    assert int(trained.state.evaluations) == expected == spent[-1][0]
    assert len(spent) == int(trained.state.update)
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
    state, update = fresh(watched, problem)
    key, _ = jax.random.split(jax.random.fold_in(state.key, state.update))
    explored = watched.explore(state.params, problem, key, state.update, "parallel")
    expected = sorted(map(tuple, np.asarray(explored.placement)))
    state, _ = jax.block_until_ready(update(state))
    jax.effects_barrier()
    assert steps_taken(state) == len(seen) == 12
    passes = np.asarray(seen).reshape(3, 8, -1)
    for order in passes:
        assert sorted(map(tuple, order)) == expected
    assert (passes[0] != passes[1]).any()  # shuffled afresh


def test_problems_of_one_shape_share_a_compilation(problem):
    graph, costs = slow_device()
    other = make_policy_inputs(graph, costs.replace(compute_s=2 * costs.compute_s))
    update = chex.assert_max_traces(episode_update.__wrapped__, n=1)
    once = jax.jit(update, static_argnames=("learner", "links"))
    states = [fresh(Toy(), p)[0] for p in (problem, other)]
    best = [
        once(s, p, Toy(), "parallel")[0].best_makespan_s
        for s, p in zip(states, (problem, other), strict=True)
    ]
    assert best[0] < best[1]


def test_training_goes_on_from_given_parameters(problem):
    given, budget = {"logits": jnp.array([0.0, 0.0, 30.0])}, Budget(evaluations=16)
    trained = train_learner(Toy(), problem, jax.random.key(0), budget, params=given)
    assert (trained.placements[0] == 2).all()


def test_ctrl_c_leaves_what_was_found_and_time_ends_after_an_update(problem):
    def stop(state):
        if int(state.evaluations) == 32:
            raise KeyboardInterrupt

    budget = Budget(evaluations=640)
    trained = train_learner(Toy(), problem, jax.random.key(0), budget, report=stop)
    assert trained.interrupted
    assert (int(trained.state.update), int(trained.state.evaluations)) == (2, 32)
    trained = train_learner(Toy(), problem, jax.random.key(0), Budget(seconds=1e-9))
    assert int(trained.state.update) == 1


def test_bad_bounds_are_refused(problem):
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="no bound; give evaluations, episodes or seconds"):
        train_learner(Toy(), problem, key, Budget(target_s=1.0))
    with pytest.raises(ValueError, match="max_evaluations is 4; an update of Toy needs 5"):
        train_learner(Toy(cost=5), problem, key, Budget(evaluations=4))
    with pytest.raises(ValueError, match="minibatches is 3; expected a divisor of batch, 16"):
        train_learner(Toy(minibatches=3), problem, key, Budget(seconds=1.0))


def test_candidates_are_the_best_a_state_holds_each_from_where_it_is():
    def rows(first, count):
        return jnp.arange(first, first + count, dtype=jnp.int32)[:, None].repeat(6, 1)

    def state(best_s, elites_s, chains_s):
        nothing = jnp.zeros((), jnp.int32)
        return TrainState(
            params=(), opt_state=(), key=jax.random.key(0), update=nothing, episodes=nothing,
            evaluations=nothing, best_placement=rows(0, 1)[0], best_makespan_s=best_s,
            elites=Placements(placement=rows(10, len(elites_s)), makespan_s=elites_s),
            chains=Placements(placement=rows(20, len(chains_s)), makespan_s=chains_s),
        )  # fmt: skip

    def chosen(*makespans):
        found = best_placements(state(*map(jnp.array, makespans)), 4)
        assert found.shape[1] == 4
        assert found.dtype == np.int64
        assert (found == found[:, :1]).all()
        return found[:, 0].tolist()

    inf = np.inf
    assert chosen(3.0, [3.0, 5.0, inf], [4.0, 3.0, 6.0]) == [0, 10, 21, 20, 11, 22]
    assert chosen(3.0, [], []) == [0]
    assert chosen(inf, [inf], [inf, inf]) == [0]  # what a state begins with is a placement
    many = chosen(1.0, [2.0], np.linspace(9.0, 3.0, 128))
    assert many == [0, 10, *range(147, 147 - NUM_FINALISTS + 3, -1)]
    assert len(many) + 1 == NUM_FINALISTS  # and the teacher's
