import jax
import numpy as np
import pytest

from doppler_jax.costs.build import from_edge_delays
from doppler_jax.policies import rollout
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.frontier import frontier_softmax
from tests.policies import reference
from tests.policies.cases import DEVICES, apply, case, keys, log_prob, params, sample, sampled


def plain(ready, score):
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
        expected = plain(ready[b], score[b].astype(float))
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
        actions = (np.asarray(part)[b, :count] for part in episodes.actions.values())
        steps = reference.steps(graph, costs, *actions)
        expected = [reference.log_prob(tables, step) for step in steps]
        found = np.stack([log_p[b, :count], entropy[b, :count]], axis=1)
        np.testing.assert_allclose(found, expected, atol=2e-5)
