"""What the tests of policies and training share: problems of one bucket, compiled functions.

Compilations dominate the tests' time. Problems padded by `padded_problem` share one per
function, whatever their size.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.graphs.padded import Sizes
from doppler_jax.policies import model, rollout
from doppler_jax.policies.device_features import DEVICE_FEATURES
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policies.place import earliest_tables
from doppler_jax.policies.rollout import PolicyTables
from tests.generators import random_params, random_problem, some_unable
from tests.policies import reference

CONFIG = PolicyConfig(width=8, rounds=2, member_width=reference.MEMBERS)
DEVICES = 3
EPISODES = 64
SIZES = [0, 1, 2, 8, 24, 64]


BUCKET = Sizes(
    tasks=64, edges=2048, producers=64, readers=64, chains=64, devices=DEVICES, home_reads=32
)


def padded_problem(graph, costs, tasks=64, edges=2048):
    """The problem in arrays of given sizes; chains and readers are padded to `tasks` too."""
    sizes = Sizes(tasks, edges, tasks, tasks, tasks, costs.num_devices, home_reads=32)
    return make_policy_inputs(graph, costs, sizes)


@functools.cache
def case(num_tasks, seed=0, partial=True):
    """Graph, costs and padded problem; if `partial`, a third of the devices runs less."""
    rng = np.random.default_rng([num_tasks, seed])
    graph, costs = random_problem(rng, num_tasks, DEVICES)
    if partial:
        costs = some_unable(rng, costs, 0.2)
    return graph, costs, padded_problem(graph, costs)


def init(key, problem, config=CONFIG):
    return model.init_params(key, config, problem)


@functools.cache
def params(seed=0):
    return random_params(init, case(8)[2], seed=seed)


def keys(count=EPISODES, seed=0):
    return jax.random.split(jax.random.key(seed), count)


@jax.jit
def apply(parameters, problem):
    return model.apply(parameters, CONFIG, problem)


def replay_one(problem, actions):
    """The episode of given actions, with all features, whatever a policy reads."""
    steps = problem.padded.padded_tasks
    score = jnp.zeros(steps + 1).at[actions.task].set(-jnp.arange(steps, dtype=jnp.float32))
    placement = jnp.zeros(steps, jnp.int32).at[actions.task].set(actions.device, mode="drop")
    place = earliest_tables(problem, len(DEVICE_FEATURES))
    return rollout.follow(problem, PolicyTables(score=score, place=place), placement)


sample = jax.jit(jax.vmap(rollout.sample, in_axes=(0, None, None)))
teach = jax.jit(jax.vmap(rollout.teach, in_axes=(0, None)))
replay = jax.jit(jax.vmap(replay_one, in_axes=(None, 0)))
log_prob = jax.jit(jax.vmap(rollout.log_prob, in_axes=(None, None, 0)))
greedy = jax.jit(rollout.greedy)


@functools.cache
def sampled(num_tasks, seed=0):
    """Tables and `EPISODES` sampled episodes of a case."""
    problem = case(num_tasks, seed)[2]
    tables = apply(params(), problem)
    return tables, sample(keys(), problem, tables)


def one(tree, index):
    """Entry `index` of a batched tree, as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], tree)
