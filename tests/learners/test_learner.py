"""The trainer of learned methods, on a learner; learned methods in `place`: budgets, files."""

import dataclasses
import json
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax import methods
from doppler_jax.budget import Budget
from doppler_jax.learners.doppler import Doppler
from doppler_jax.learners.gdp import Gdp
from doppler_jax.learners.giph import Giph
from doppler_jax.learners.learner import best_placements, episode_update, train_learner
from doppler_jax.learners.placeto import Placeto
from doppler_jax.learners.registry import LEARNERS, POLICY_SETTINGS
from doppler_jax.learners.stepwise import PerStep
from doppler_jax.methods import learned
from doppler_jax.methods.learned import Learned
from doppler_jax.policies.features import FEATURE_VERSION, make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.simulator.finalists import NUM_FINALISTS
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.training.state import Placements, TrainState
from doppler_jax.types import Plans
from tests.generators import random_problem
from tests.learners.cases import DEVICES, Toy, chainmm_problem, fresh, slow_device


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


@pytest.fixture(scope="module", autouse=True)
def _toy():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICY_SETTINGS, "toy", Toy)
        patch.setitem(methods.METHODS, "toy", Learned(Toy(cost=2)))
        yield


def toy_policy(logits=(0.0, 0.0, 0.0)):
    params = {"logits": np.array(logits, np.float32)}
    return dj.policies.Policy(params=params, config=Toy(cost=2), method="toy")


@pytest.mark.parametrize("bound", [5, 300])
def test_training_and_proposals_keep_to_the_bound(bound):
    # Of a key with which it does not meet the lower bound, where it would stop.
    options = {"max_evaluations": bound, "key": jax.random.key(1)}
    placed = dj.place(*slow_device(), method="toy", **options)
    assert bound - 32 < placed.evaluations <= bound  # an update takes 32
    assert placed.curve.evaluations[-1] == placed.evaluations
    assert placed.makespan_s == makespan_s(simulate_oracle(*slow_device(), placed.placement))


def test_a_bound_below_an_update_and_a_proposal_is_refused():
    with pytest.raises(ValueError, match="max_evaluations is 3; method 'toy' needs 4 on this"):
        dj.place(*slow_device(), method="toy", max_evaluations=3)
    with pytest.raises(ValueError, match="max_evaluations is 1; a proposal of 'toy' needs 2"):
        dj.place(*slow_device(), method="toy", policy=toy_policy(), max_evaluations=1)


def test_proposals_of_the_trained_policy_and_the_best_of_training_compete(monkeypatch):
    asked = []

    def propose(learner, params, problem, key, count, links):
        asked.append(count)
        return Plans(np.full((count, 8), 2), np.zeros((0, 8), int))

    monkeypatch.setattr(Toy, "propose", propose)
    placed = dj.place(*slow_device(), method="toy", max_evaluations=300)
    assert asked == [Toy.num_proposals]
    np.testing.assert_array_equal(placed.placement, np.full(8, 2))
    none = np.zeros((0, 8), int)
    monkeypatch.setattr(
        Toy, "propose", lambda _, *args: Plans(np.zeros((args[3], 8), int), none)
    )
    placed = dj.place(*slow_device(), method="toy", max_evaluations=300)
    assert (placed.placement != 0).any()


def test_a_policy_proposes_and_does_not_train(monkeypatch):
    monkeypatch.setattr(learned, "train_learner", None)
    policy = toy_policy((0, 0, 1))
    placed = dj.place(*slow_device(), method="toy", policy=policy, max_evaluations=2)
    assert placed.evaluations == 2
    np.testing.assert_array_equal(placed.placement, np.full(8, 2))  # the likeliest


@pytest.mark.parametrize(
    ("method", "of", "message"),
    [
        ("gdp", "joint", "'gdp' takes a policy of 'gdp'; this one is of 'joint'"),
        ("joint", "per_step", "of 'joint'; this one is of 'per_step'"),
        ("doppler+search", "joint", "of 'doppler'; this one is of 'joint'"),
        ("heft", "joint", "'heft' takes no policy; only these do: 'doppler', 'doppler"),
    ],
)
def test_policies_of_other_methods_are_refused(method, of, message):
    policy = dj.policies.Policy(params={}, config=LEARNERS.get(of, PerStep()), method=of)
    with pytest.raises(ValueError, match=message):
        dj.place(*slow_device(), method=method, policy=policy)


VERSION = {"feature_version": FEATURE_VERSION}
ABLATIONS = (PerStep(), Placeto(once=True), Doppler(policy=PolicyConfig(select="b_level")))


every = pytest.mark.parametrize(
    "learner", [*LEARNERS.values(), *ABLATIONS], ids=lambda one: one.name
)


@every
def test_parameters_know_neither_tasks_nor_devices(learner):
    init = partial(jax.eval_shape, learner.init, jax.random.key(0))
    problems = (random_problem(np.random.default_rng(0), n, d) for n, d in ((3, 5), (24, 1)))
    one, other = (init(make_policy_inputs(*problem)) for problem in problems)
    assert one == other


@every
def test_every_policy_is_written_and_read(learner, tmp_path):
    params = {"a": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}}
    settings, method = dataclasses.replace(learner.settings, width=24), learner.name
    policy = dj.policies.Policy(params=params, config=settings, method=method)
    dj.policies.save_policy(tmp_path / "here", policy, {"score": 1.5})
    read = dj.load_policy(tmp_path / "here")
    assert (read.method, read.config) == (method, settings)
    chex.assert_trees_all_equal(read.params, params)
    with pytest.raises(ValueError, match="here: holds a checkpoint already"):
        dj.policies.save_policy(tmp_path / "here", policy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "oracle"}, "a policy of the unknown method 'oracle'"),
        ({"policy": {"feature_version": 1}}, "feature version 1, this library"),
        ({"policy": {**VERSION, "depth": 3}}, "settings that 'toy' does not know: .*'depth'"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, changes, message):
    dj.policies.save_policy(tmp_path, toy_policy())
    file = tmp_path / "0" / "meta" / "metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        dj.load_policy(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "learner",
    [learner for learner in (*LEARNERS.values(), *ABLATIONS) if learner.num_proposals],
    ids=lambda one: one.name,
)
def test_every_rival_trains_proposes_and_keeps_to_its_bound(learner, tmp_path):
    graph, costs = random_problem(np.random.default_rng(1), 7, 3)
    costs = costs.replace(compute_s=costs.compute_s + np.diag([np.inf] * 3 + [0.0] * 4)[:, :3])
    name, small = "gdp", dataclasses.replace(learner, batch=4, width=8, rounds=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(methods.METHODS, name, Learned(small))
        placed = dj.place(graph, costs, method=name, max_evaluations=150)
        assert 0 < placed.evaluations <= 150
        assert np.isfinite(placed.makespan_s)
        shapes = jax.eval_shape(small.init, jax.random.key(0), make_policy_inputs(graph, costs))
        params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        dj.policies.save_policy(
            tmp_path, dj.policies.Policy(params=params, config=small, method=small.name)
        )
        policy = dj.load_policy(tmp_path)
        # As many proposals as after training, so that they share its compilation.
        each = small.proposal_evaluations(8) + 1
        bound = min(small.num_proposals * each, max(150 // 4 // each, 1) * each)
        placed = dj.place(graph, costs, method=name, policy=policy, max_evaluations=bound)
        assert placed.evaluations == bound
        assert np.isfinite(placed.makespan_s)


GDP = Gdp(batch=128, minibatches=1, width=32, learning_rate=2e-3, entropy_weight=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learner", "updates", "share"), [(GDP, 80, 0.85), (Giph(), 50, 0.95)], ids=["gdp", "giph"]
)
def test_a_policy_improves_over_its_start(learner, updates, share):
    state, update = fresh(learner, chainmm_problem("paper", strategy="uniform"))
    drawn_s = []
    for _ in range(updates):
        state, metrics = update(state)
        drawn_s.append(float(metrics["makespan_mean_s"]))
    assert np.mean(drawn_s[-5:]) < share * np.mean(drawn_s[:5])
