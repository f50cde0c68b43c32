"""GDP: what its placer sees, what its loss does, and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.learners import gdp
from doppler_jax.learners.gdp import (
    Gdp,
    GraphSage,
    SegmentAttention,
    chosen_log_prob,
    clipped_gain,
    cut_segments,
)
from doppler_jax.policies.features import make_policy_inputs
from tests.generators import random_params, random_problem, some_unable
from tests.policies.cases import padded_problem

SMALL = Gdp(batch=32, epochs=2, minibatches=1, width=8, rounds=1, layers=1, heads=2)
TASKS, DEVICES = 21, 3


def propose_of(learner):
    return jax.jit(learner.draw, static_argnames=("count", "links"))


logits_of = jax.jit(SMALL.logits)
explore = jax.jit(SMALL.explore, static_argnames="links")
propose = propose_of(SMALL)
loss_and_gradient = jax.jit(jax.value_and_grad(SMALL.loss))


@pytest.fixture(scope="module")
def case():
    """Graph and costs; a quarter of the devices is unable to run a task."""
    rng = np.random.default_rng(3)
    graph, costs = random_problem(rng, TASKS, DEVICES)
    return graph, some_unable(rng, costs, 0.25)


@pytest.fixture(scope="module")
def problem(case):
    return make_policy_inputs(*case)


@pytest.fixture(scope="module")
def params(problem):
    return random_params(SMALL.init, problem)


def test_fresh_parameters_have_no_preference(problem):
    fresh = jax.jit(SMALL.init)(jax.random.key(1), problem)
    logits = np.asarray(logits_of(fresh, problem))
    assert set(logits[np.isfinite(logits)]) == {0.0}


@pytest.fixture(scope="module")
def siblings():
    """Five tasks of equal cost on equal devices, four of them the readers of the first."""
    edges = [(0, reader, 1.0) for reader in range(1, 5)]
    return make_policy_inputs(*dj.from_edge_delays(np.ones(5), edges, num_devices=DEVICES))


def test_equal_devices_and_symmetric_tasks_are_told_apart_by_superposition(siblings, params):
    logits = np.asarray(logits_of(params, siblings))[:5]
    assert len(np.unique(logits.round(4))) == 5 * DEVICES
    # Without any scale the placer reads nothing, and all tasks look alike to it.
    silent = jax.tree.map(jnp.zeros_like, params["Dense_0"])
    logits = np.asarray(logits_of({**params, "Dense_0": silent}, siblings))[:5]
    np.testing.assert_allclose(logits, np.broadcast_to(logits[:1], logits.shape), atol=1e-6)


def test_episodes_have_the_log_probabilities_of_the_loss(problem, params):
    explored = explore(params, problem, jax.random.key(0), jnp.int32(0), links="parallel")
    lesson, logits = explored.lesson, logits_of(params, problem)
    real = np.arange(problem.padded.padded_tasks) < TASKS
    p = np.asarray(jax.nn.softmax(logits))
    chosen = np.take_along_axis(p[None], np.asarray(lesson.placement)[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.exp(lesson.log_p)[:, real], chosen[:, real], rtol=1e-5)

    # At ratio 1 the surrogate is the mean advantage, whose mean is 0: the bonus remains.
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)[real].mean()
    value, gradient = loss_and_gradient(params, problem, lesson, jnp.int32(0))
    np.testing.assert_allclose(value, -SMALL.entropy_weight * entropy, atol=1e-6)
    later, _ = loss_and_gradient(params, problem, lesson, jnp.int32(SMALL.entropy_halving))
    np.testing.assert_allclose(later, -SMALL.entropy_weight * entropy / 2, atol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert np.ptp(lesson.advantage) > 1


def test_explored_makespans_are_those_of_the_placements(case, problem, params):
    explored = explore(params, problem, jax.random.key(4), jnp.int32(0), links="parallel")
    placements = np.asarray(explored.placement)[:, :TASKS]
    truth = [
        dj.simulator.makespan_s(dj.simulator.simulate_oracle(*case, p)) for p in placements
    ]
    np.testing.assert_allclose(explored.makespan_s, truth, rtol=1e-4)
    best = np.argmin(truth)
    assert explored.lesson.advantage[best] == explored.lesson.advantage.max()


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.0, 2.0, 2.0),
        (1.1, 2.0, 2.0),
        (1.3, 2.0, 0.0),  # likely enough
        (0.7, 2.0, 2.0),  # became unlikely: may come back
        (0.7, -2.0, 0.0),  # unlikely enough
        (1.3, -2.0, -2.0),
    ],
)
def test_gain_has_no_slope_where_it_is_clipped(ratio, advantage, slope):
    assert jax.grad(clipped_gain)(ratio, advantage, 0.2) == pytest.approx(slope)


def test_devices_that_cannot_run_a_task_are_never_chosen(case, problem, params):
    placements = np.asarray(propose(params, problem, jax.random.key(2), 512, "parallel"))
    allowed = np.isfinite(case[1].compute_s)
    chosen = np.zeros_like(allowed)
    for placement in placements[:, :TASKS]:
        chosen[np.arange(TASKS), placement] = True
    assert not chosen[~allowed].any()
    assert chosen[allowed].mean() > 0.8


def test_first_proposal_is_the_likeliest(problem, params):
    placements = propose(params, problem, jax.random.key(2), 5, "parallel")
    logits = logits_of(params, problem)
    likeliest = chosen_log_prob(logits, jnp.argmax(logits, -1)[None])
    got = chosen_log_prob(logits, placements)
    np.testing.assert_array_equal(got[0], likeliest[0])
    assert (np.asarray(got[1:]).sum(-1) < np.asarray(got[0]).sum()).all()


def test_padding_changes_nothing(case, problem, params, monkeypatch):
    monkeypatch.setattr(gdp, "SEGMENT", 8)
    padded = padded_problem(*case, tasks=40, edges=256)
    # Compiled afresh, for the segments.
    small, large = (jax.jit(lambda p: SMALL.logits(params, p))(p) for p in (problem, padded))
    small, large = np.asarray(small)[:TASKS], np.asarray(large)[:TASKS]
    np.testing.assert_allclose(small, large, atol=2e-5)
    assert np.ptp(small[np.isfinite(small)]) > 0.1


def test_embeddings_take_the_largest_of_both_directions():
    """Tasks 0 -> 1 -> 2, and 3 alone: checked against loops."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(5, 2)).astype("f4")
    edges = jnp.array([0, 1, 4]), jnp.array([1, 2, 4])
    network = GraphSage(4, 1)
    weights = jax.jit(network.init)(jax.random.key(0), features, *edges)
    got = jax.jit(network.apply)(weights, features, *edges)

    def dense(name, values):
        layer = weights["params"][name]
        return np.maximum(values @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"]), 0)

    hidden = dense("Dense_0", features)
    sent = dense("Dense_1", hidden)
    pooled = np.stack([sent[1], np.maximum(sent[0], sent[2]), sent[1], 0 * sent[3]])
    expected = dense("Dense_2", np.concatenate([hidden[:4], pooled], axis=1))
    np.testing.assert_allclose(got[:4], expected, atol=1e-5)


@pytest.fixture(scope="module")
def attention():
    """A layer over three segments of four, as a function of its hidden states."""
    layer = SegmentAttention(8, 2)
    real = jnp.ones((3, 4), bool).at[2, 3].set(False)
    hidden = jax.random.normal(jax.random.key(0), (3, 4, 8))
    weights = jax.jit(layer.init)(jax.random.key(1), hidden, real)
    return hidden, jax.jit(lambda values: layer.apply(weights, values, real))


def test_a_segment_sees_itself_and_the_one_before(attention):
    hidden, layer = attention
    for source in range(3):
        moved = layer(hidden.at[source, 1, 0].add(1.0)) - layer(hidden)
        seen = np.abs(np.asarray(moved)).max(-1) > 1e-6
        expected = np.isin(np.arange(3), [source, source + 1])
        np.testing.assert_array_equal(seen, np.broadcast_to(expected[:, None], (3, 4)))


def test_padding_is_not_attended_to_and_no_gradient_flows_into_the_cache(attention):
    hidden, layer = attention
    moved = layer(hidden.at[2, 3, 0].add(1.0)) - layer(hidden)
    assert np.abs(np.asarray(moved)[:2]).max() == np.abs(np.asarray(moved)[2, :3]).max() == 0
    hidden, layer = attention
    slope = jax.jit(jax.jacobian(lambda values: layer(values)[:, 0, 0]))(hidden)
    slope = np.abs(slope).max((2, 3))
    np.testing.assert_array_equal(slope > 0, np.eye(3, dtype=bool))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_segments_hold_everything_in_order(length):
    segments = cut_segments(jnp.arange(1, length + 1))
    assert segments.shape[1] == min(length, gdp.SEGMENT)
    np.testing.assert_array_equal(segments.reshape(-1)[:length], np.arange(1, length + 1))
    assert not segments.reshape(-1)[length:].any()


@pytest.mark.slow
def test_ten_thousand_tasks_take_linear_memory():
    """Attention between all tasks would take four times as much for twice as many."""
    spent = []
    for num_tasks in (5_000, 10_000):
        edges = [(v, v + 8, 1.0) for v in range(num_tasks - 8)]
        graph, costs = dj.from_edge_delays(np.ones(num_tasks), edges, num_devices=4)
        problem = make_policy_inputs(graph, costs)
        learner = Gdp()
        weights = jax.jit(learner.init)(jax.random.key(0), problem)
        lowered = propose_of(learner).lower(weights, problem, jax.random.key(1), 4, "parallel")
        run = lowered.compile()
        spent.append(run.memory_analysis().temp_size_in_bytes)
        placements = np.asarray(run(weights, problem, jax.random.key(1)))
        assert np.ptp(placements[1:, :num_tasks]) == 3
    assert spent[1] < 2.5 * spent[0]
    assert spent[1] < 2**29
