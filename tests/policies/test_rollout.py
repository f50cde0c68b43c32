import dataclasses
import itertools
from functools import partial

import jax
import numpy as np
import pytest
from jax.lax import Precision

from doppler_jax.costs.build import from_edge_delays
from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.levels import b_level
from doppler_jax.policies import model, rollout
from doppler_jax.policies.device_features import DEVICE_FEATURES, FEATURE_SETS
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.frontier import frontier_softmax
from tests.equations import equations
from tests.policies import reference
from tests.policies.cases import (
    CONFIG,
    DEVICES,
    EPISODES,
    SIZES,
    apply,
    case,
    greedy,
    init,
    keys,
    log_prob,
    one,
    padded_problem,
    params,
    replay,
    sample,
    sampled,
    teach,
)

CHECKED = 8  # episodes recomputed by plain loops


def choices(episode, num_tasks):
    """Tasks and devices of an episode's real steps; the tail must be padding."""
    nobody = episode.placement.shape[0]
    assert (episode.actions.task[num_tasks:] == nobody).all()
    actions = episode.actions
    return [part[:num_tasks].tolist() for part in (actions.task, actions.device)]


def tiny_problem(edges, compute_s=1.0):
    """Three tasks on equal links; on equal devices unless `compute_s` `[N, D]` says more."""
    graph, costs = from_edge_delays(np.ones(3), edges, num_devices=DEVICES)
    compute_s = np.broadcast_to(compute_s, (3, DEVICES))
    return padded_problem(graph, costs.replace(compute_s=compute_s))


def first_choices(draw, batches):
    """Tasks and devices of the first three steps of many episodes, `[B, 3]` each."""
    drawn = [draw(keys(seed=seed)).actions for seed in range(batches)]
    return (
        np.concatenate([getattr(a, name)[:, :3] for a in drawn]) for name in ("task", "device")
    )


@pytest.mark.parametrize("num_tasks", SIZES)
def test_sampled_episodes_are_legal(num_tasks):
    graph, costs, _ = case(num_tasks)
    senders, receivers = task_edges(graph)
    _, episodes = sampled(num_tasks)
    for b in range(CHECKED):
        episode = one(episodes, b)
        tasks, devices = choices(episode, num_tasks)
        assert sorted(tasks) == list(range(num_tasks))
        position = np.argsort(tasks)
        assert (position[senders] < position[receivers]).all()
        assert episode.placement[tasks].tolist() == devices
        assert np.isfinite(costs.compute_s[tasks, devices]).all()
        assert not episode.frontier_mask[num_tasks:].any()


def test_each_set_of_device_features_begins_with_the_smaller_ones():
    sets = [FEATURE_SETS.index(row.since) for row in DEVICE_FEATURES]
    assert sets == sorted(sets)


@pytest.mark.parametrize("num_tasks", SIZES)
def test_frontier_and_device_features_equal_a_plain_recomputation(num_tasks):
    graph, costs, problem = case(num_tasks)
    episodes = replay(problem, sampled(num_tasks)[1].actions)
    for b in range(CHECKED):
        episode = one(episodes, b)
        plain = reference.steps(graph, costs, *choices(episode, num_tasks))
        for t, step in enumerate(plain):
            heads = episode.heads[t][episode.frontier_mask[t]].tolist()
            assert sorted(heads) == sorted(step.frontier)
            np.testing.assert_allclose(episode.features[t], step.features, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tasks", SIZES)
def test_log_probs_equal_a_plain_recomputation(num_tasks):
    graph, costs, problem = case(num_tasks)
    tables, episodes = sampled(num_tasks)
    log_p, entropy = log_prob(problem, tables, episodes)
    assert (np.asarray(log_p)[:, num_tasks:] == 0).all()
    assert (np.asarray(entropy)[:, num_tasks:] == 0).all()
    tables = jax.tree.map(np.asarray, tables)
    for b in range(CHECKED):
        plain = reference.steps(graph, costs, *choices(one(episodes, b), num_tasks))
        expected = np.array([reference.log_prob(tables, step) for step in plain]).reshape(-1, 2)
        found = np.stack([log_p[b, :num_tasks], entropy[b, :num_tasks]], axis=1)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_greedy_takes_the_likeliest_task_and_device():
    graph, costs, problem = case(24)
    tables = apply(params(), problem)
    tasks, devices = choices(one(greedy(problem, tables), ...), 24)
    tables = jax.tree.map(np.asarray, tables)
    for step in reference.steps(graph, costs, tasks, devices):
        select, place = reference.step_log_probs(tables, step)
        assert step.task == max(select, key=select.get)
        assert step.device == np.argmax(place)


@pytest.mark.parametrize("num_tasks", SIZES)
def test_a_placement_followed_in_its_order_gives_the_episode_back(num_tasks):
    problem = case(num_tasks)[2]
    _, episodes = sampled(num_tasks)
    again = replay(problem, episodes.actions)
    for name in ("heads", "frontier_mask", "placement"):
        np.testing.assert_array_equal(getattr(again, name), getattr(episodes, name), name)
    read = again.features[..., : episodes.features.shape[-1]]  # by the policy
    np.testing.assert_allclose(read, episodes.features, rtol=1e-6, atol=1e-6)


def test_keys_decide_the_samples():
    problem = case(24)[2]
    tables, episodes = sampled(24)
    again = sample(keys(), problem, tables)
    other = sample(keys(seed=1), problem, tables)
    np.testing.assert_array_equal(again.placement, episodes.placement)
    assert len(np.unique(np.concatenate([again.placement, other.placement]), axis=0)) > EPISODES


def test_samples_follow_the_probabilities():
    unequal = np.random.default_rng(0).uniform(0.5, 2.0, (3, DEVICES))
    problem = tiny_problem([(0, 2, 1.0), (1, 2, 1.0)], unequal)
    tables = apply(params(seed=1), problem)
    orders = [(0, 1, 2), (1, 0, 2)]
    possible = list(itertools.product(orders, itertools.product(range(DEVICES), repeat=3)))
    task = np.full((EPISODES, 64), 64, np.int32)
    device = np.zeros((EPISODES, 64), np.int32)
    for row, (order, where) in enumerate(possible):
        task[row, :3], device[row, :3] = order, where
    actions = rollout.Actions(task=task, device=device)
    log_p, _ = log_prob(problem, tables, replay(problem, actions))
    probability = np.exp(np.asarray(log_p, np.float64).sum(-1))[: len(possible)]
    np.testing.assert_allclose(probability.sum(), 1.0, rtol=1e-5)
    assert probability.max() > 3 * probability.min()

    tasks, devices = first_choices(lambda batch: sample(batch, problem, tables), batches=32)
    draws = tasks[:, 0] * 27 + devices @ [9, 3, 1]
    expected = len(draws) * probability
    assert (expected > 5).all()
    # Chi-square with 53 degrees of freedom: mean 53, and above 110 once in 100,000.
    count = np.bincount(draws, minlength=54)
    assert ((count - expected) ** 2 / expected).sum() < 110
    # More sensitive to a wrong temperature: how probable the draws are.
    log_p = np.log(probability)
    mean = probability @ log_p
    deviation = np.sqrt(probability @ (log_p - mean) ** 2 / len(draws))
    assert abs(log_p[draws].mean() - mean) < 4 * deviation


@pytest.mark.parametrize("num_tasks", [n for n in SIZES if n])
def test_the_teacher_takes_the_largest_b_level_and_the_earliest_start(num_tasks):
    graph, costs, problem = case(num_tasks)
    level_s = b_level(graph, costs)
    episodes = teach(keys(), problem)
    for b in range(CHECKED):
        tasks, devices = choices(one(episodes, b), num_tasks)
        for step in reference.steps(graph, costs, tasks, devices):
            assert level_s[step.task] == max(level_s[list(step.frontier)])
            assert step.est_s[step.device] <= step.est_s.min() * (1 + 1e-5)


def test_the_papers_features_leave_out_what_is_ours():
    problem = case(24)[2]
    tables, episodes = sampled(24)
    paper = tables.replace(place=tables.place.replace(kernel=tables.place.kernel[:6]))
    config = dataclasses.replace(CONFIG, features="paper")
    shapes = jax.eval_shape(partial(init, config=config), jax.random.key(0), problem)
    assert shapes["Place_0"]["kernel"].shape == paper.place.kernel.shape
    changed = episodes.replace(features=episodes.features.at[..., 6:].add(1.0))
    for found, reads_all in ((paper, False), (tables, True)):
        before, after = (log_prob(problem, found, e)[0] for e in (episodes, changed))
        assert bool((before != after).any()) == reads_all


def test_no_draw_takes_what_has_no_weight():
    # 1e-8 vanishes in the sum, and the largest draw may round to the whole.
    for weight in ([0, 3, 1e-8, 0], [1, 0, 0, 1e-8], [0, 0, 2, 0], [0.1] * 7 + [0]):
        weight = np.array(weight, np.float32)
        for draw in (0.0, 0.3, 0.7, np.float32(1 - 2**-23), np.float32(1.0)):
            assert weight[int(rollout.draw_index(weight, np.float32(draw)))] > 0


def test_the_teacher_breaks_ties_uniformly():
    problem = tiny_problem([])
    tasks, devices = first_choices(lambda batch: teach(batch, problem), batches=10)
    count = np.bincount(tasks[:, 0] * DEVICES + devices[:, 0], minlength=9)
    assert np.abs(count - len(tasks) / 9).max() < 5 * np.sqrt(len(tasks) / 9)


@pytest.mark.parametrize("width", [3, 128, 129, 1000])
def test_draws_follow_the_weights_at_any_width(width):
    rng = np.random.default_rng(width)
    weight = np.where(rng.random(width) < 0.5, rng.integers(1, 9, width), 0).astype(np.float32)
    weight[1] = 5.0
    draws = np.linspace(0, 1, 512, endpoint=False, dtype=np.float32)
    found = jax.vmap(rollout.draw_index, in_axes=(None, 0))(weight, draws)
    expected = np.searchsorted(np.cumsum(weight), draws * weight.sum(), side="right")
    np.testing.assert_array_equal(found, expected)
    assert 0 <= int(rollout.draw_index(np.zeros(width, np.float32), draws[1])) < width


def test_products_are_of_float32_as_it_is():
    # GPUs round to ten bits by default, and the earliest start is told by less than that.
    problem, (tables, episodes) = case(8)[2], sampled(8)
    for fn, *arguments in (
        (lambda p, problem: model.apply(p, CONFIG, problem), params(), problem),
        (rollout.sample, jax.random.key(0), problem, tables),
        (rollout.greedy, problem, tables),
        (rollout.log_prob, problem, tables, one(episodes, 0)),
    ):
        products = [e for e in equations(fn, *arguments) if e.primitive.name == "dot_general"]
        assert products
        assert {e.params["precision"] for e in products} == {(Precision.HIGHEST,) * 2}


def plain_softmax(ready, score):
    """Log-probabilities and entropies by a plain loop in float64."""
    log_p, entropy = [], []
    for t in range(len(ready)):
        waiting = [u for u in range(t, len(ready)) if ready[u] <= t]
        logs = score[waiting] - np.logaddexp.reduce(score[waiting])
        log_p.append(logs[0])
        entropy.append(-(np.exp(logs) * logs).sum())
    return np.array(log_p), np.array(entropy)


@pytest.mark.parametrize("spread", [1.0, 20.0, 64e3])
@pytest.mark.parametrize("steps", [1, 2, 37])
def test_every_step_sees_all_that_wait(steps, spread):
    rng = np.random.default_rng(steps)
    batch = 16
    # From all at once to one at a time.
    longest = np.linspace(1, steps, batch, dtype=int)[:, None]
    ready = np.maximum(np.arange(steps) - rng.integers(0, longest, (batch, steps)), 0)
    score = rng.uniform(-spread, spread, (batch, steps)).astype("f4")
    found = jax.jit(jax.vmap(frontier_softmax))(ready, score)
    for b in range(batch):
        expected = plain_softmax(ready[b], score[b].astype(float))
        np.testing.assert_allclose(found[0][b], expected[0], rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(found[1][b], expected[1], rtol=1e-5, atol=1e-5)


def test_gradients_are_finite_and_those_of_recorded_frontiers():
    problem = case(24)[2]
    tables, episodes = sampled(24)
    nothing = episodes.replace(heads=episodes.heads[..., :0])

    def total(tables, episodes):
        log_prob = jax.vmap(rollout.log_prob, in_axes=(None, None, 0))
        log_p, entropy = log_prob(problem, tables, episodes)
        return (log_p * np.sin(np.arange(log_p.shape[1]))[None]).sum() + 0.3 * entropy.sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(tables, episodes)
    again, regained = jax.jit(jax.value_and_grad(total))(tables, nothing)
    np.testing.assert_allclose(again, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(regained), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_episodes_of_many_chains_record_no_frontiers_and_have_their_log_probs():
    rng = np.random.default_rng(0)
    count = rollout.RECORDED + 20
    edges = [(u, count - 1 - u, 1.0) for u in range(15)]
    graph, costs = from_edge_delays(rng.lognormal(size=count), edges, num_devices=DEVICES)
    problem = make_policy_inputs(graph, costs)
    assert len(problem.padded.chain_head) > rollout.RECORDED
    tables = apply(params(), problem)
    episodes = sample(keys(count=2), problem, tables)
    assert episodes.heads.size == 0
    log_p, entropy = np.asarray(log_prob(problem, tables, episodes))
    assert (log_p[:, count:] == 0).all()
    assert (entropy[:, count:] == 0).all()
    tables = jax.tree.map(np.asarray, tables)
    for b in range(2):
        actions = (np.asarray(part)[b, :count] for part in vars(episodes.actions).values())
        steps = reference.steps(graph, costs, *actions)
        expected = [reference.log_prob(tables, step) for step in steps]
        found = np.stack([log_p[b, :count], entropy[b, :count]], axis=1)
        np.testing.assert_allclose(found, expected, atol=2e-5)
