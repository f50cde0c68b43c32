"""A small problem with a known optimum, in the smallest bucket, and the updates compiled."""

import functools

import chex
import jax
import numpy as np

from doppler_jax.costs.build import from_edge_delays
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.training import imitation, sim_rl
from doppler_jax.training.imitation import ImitationConfig
from doppler_jax.training.sim_rl import SimConfig
from doppler_jax.training.state import init_state, make_optimizer
from tests.policies.cases import CONFIG, DEVICES, params

IMITATION = ImitationConfig(batch=8, learning_rate=1e-2)
SIM = SimConfig(
    batch=64, learning_rate=1e-2, num_elites=4, num_chains=8, search_rounds=2, minibatches=2
)


def _once(update, *static):
    return jax.jit(chex.assert_max_traces(update, n=1), static_argnames=static)


imitation_update = _once(imitation.imitation_update.__wrapped__, "policy", "config")
sim_update = functools.partial(_once(sim_rl.update_on, "policy", "config", "shards"), shards=1)


@functools.cache
def chains_case(lengths=(4, 3), num_devices=DEVICES):
    """Chains of unit tasks whose tensors take long to move: best is a device for each."""
    num_tasks = sum(lengths)
    edges = [(v, v + 1, 3.0) for v in range(num_tasks - 1) if v + 1 != lengths[0]]
    weights = 1.0 + 0.01 * np.arange(num_tasks)  # without ties
    graph, costs = from_edge_delays(weights, edges, num_devices=num_devices)
    return graph, costs, make_policy_inputs(graph, costs)


def fresh_state(problem, config, num_elites, seed=0, num_chains=None):
    """The start of a stage; `config` is of either."""
    if num_chains is None:
        num_chains = getattr(config, "num_chains", 1)
    begun = jax.tree.map(jax.numpy.asarray, params()), make_optimizer(config.learning_rate)
    return init_state(jax.random.key(seed), *begun, problem, num_elites, num_chains)


@functools.cache
def trained_state(updates=3):
    """A state of stage 2 in which every part has left its start."""
    problem = chains_case()[2]
    state = fresh_state(problem, SIM, SIM.num_elites, seed=3)
    for _ in range(updates):
        state, _ = sim_update(state, problem, policy=CONFIG, config=SIM)
    return state


def plain(tree):
    """The tree with NumPy leaves, keys as their words."""

    def convert(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(convert, tree)


def assert_same_bits(found, expected):
    chex.assert_trees_all_equal_structs(found, expected)
    pair = jax.tree.leaves(plain(found)), jax.tree.leaves(plain(expected))
    for a, b in zip(*pair, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
