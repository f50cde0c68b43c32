"""One policy for many problems: policy gradient on each."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policies.rollout import PolicyTables
from doppler_jax.simulator.simulate import simulate_padded
from doppler_jax.training.best_known import Pool
from doppler_jax.training.devices import AXIS, WHOLE, make_mesh
from doppler_jax.training.losses import Lesson, loss_and_gradient, normalised_advantage
from doppler_jax.training.state import make_optimizer
from doppler_jax.types import pytree

B_LEVEL = 3
"""Column of the b-level among the task features."""

LATE, TIED = 8, 13
"""Columns of the late finish, and of the share of the placed ties, among device features."""

SHARPNESS, TOGETHER = 8.0, 3.0
"""What fresh scores make of b-levels and of late finishes, and of ties."""


@pytree
class Learning:
    """What pretraining carries from update to update."""

    params: chex.ArrayTree
    opt_state: chex.ArrayTree


@pytree
class Weights:
    """What an update's parts count for; traced, so that they may change in a run."""

    learning_rate: chex.Array  # []
    entropy: chex.Array  # []


def init_learning(key: chex.PRNGKey, policy: PolicyConfig, problem: PolicyInputs) -> Learning:
    """Returns the state before the first update, a list scheduler; the key is consumed.

    Raises:
      ValueError: the policy has not the features `general`, or SEL or PLC is not learned.
    """
    if (policy.features, policy.select, policy.place) != ("general", "learned", "learned"):
        raise ValueError(f"a base policy needs features 'general', all learned; got {policy}")
    params = jax.jit(model.init_params, static_argnums=1)(key, policy, problem)
    return begin_learning(_as_list_scheduler(params))


def begin_learning(params: chex.ArrayTree) -> Learning:
    """Returns the state before the first update of some parameters."""
    return Learning(params=params, opt_state=make_optimizer(0.0).init(params))


def _as_list_scheduler(params: chex.ArrayTree) -> chex.ArrayTree:
    """Returns fresh parameters changed so that greedy choices are those of a list scheduler.

    SEL takes the largest b-level, PLC an early finish beside the tasks that belong together:
    a hidden unit for each hands on just that. Training goes on from there.
    """
    params = jax.tree.map(jnp.asarray, params)
    select, place = params["Select_0"], params["Place_0"]
    own, hidden, score = (select[f"Dense_{i}"]["kernel"] for i in range(3))
    first_own = hidden.shape[0] - own.shape[1]  # after embedding and path sums
    select["Dense_0"]["kernel"] = _unit(own, 0, B_LEVEL)
    select["Dense_1"]["kernel"] = _unit(hidden, 0, first_own)
    select["Dense_2"]["kernel"] = score.at[0].set(SHARPNESS)
    task = place["Dense_1"]["kernel"]
    place["Dense_1"]["kernel"] = task.at[:, :2].set(0.0)
    place["member_kernel"] = place["member_kernel"].at[:, :2].set(0.0)
    place["kernel"] = _unit(_unit(place["kernel"], 0, LATE), 1, TIED)
    place["out"] = place["out"].at[:2, 0].set(jnp.array([-SHARPNESS, TOGETHER]))
    return params


def _unit(kernel: chex.Array, column: int, row: int) -> chex.Array:
    """Returns the kernel with a column that passes on one input alone."""
    return kernel.at[:, column].set(0.0).at[row, column].set(1.0)


@partial(jax.jit, static_argnames=("policy", "batch", "links", "shards"))
def pretrain_update(
    key: chex.PRNGKey,
    learning: Learning,
    problems: PolicyInputs,
    weights: Weights,
    *,
    policy: PolicyConfig,
    batch: int,
    links: str,
    shards: int = 1,
) -> Learning:
    """Does one step of the optimiser on G problems.

    Args:
      key: of the draws; it is consumed.
      learning: the state.
      problems: G of one bucket, stacked.
      weights: see `Weights`.
      policy: sizes of the networks.
      batch: episodes of each problem, 1 or more.
      links: of what is simulated.
      shards: local devices over which the problems are cut; a divisor of G.

    Returns:
      The new state.
    """
    keys = jax.random.split(key, problems.unit_s.shape[0])
    run = partial(_gradients, policy=policy, batch=batch, links=links)
    cut = PartitionSpec(AXIS)
    run = jax.shard_map(
        run,
        mesh=make_mesh(shards),
        in_specs=(cut, WHOLE, cut, WHOLE),
        out_specs=cut,
        check_vma=False,
    )
    gradients = run(keys, learning.params, problems, weights)
    gradient = jax.tree.map(lambda leaf: leaf.mean(0), gradients)
    optimizer = make_optimizer(weights.learning_rate)
    # Optax mixes its own integer and float scalars; callers may have forbidden that.
    with jax.numpy_dtype_promotion("standard"):
        steps, opt_state = optimizer.update(gradient, learning.opt_state, learning.params)
        params = jax.tree.map(jnp.add, learning.params, steps)
    return Learning(params=params, opt_state=opt_state)


def _gradients(
    keys: chex.PRNGKey,
    params: chex.ArrayTree,
    problems: PolicyInputs,
    weights: Weights,
    *,
    policy: PolicyConfig,
    batch: int,
    links: str,
) -> chex.ArrayTree:
    """Returns gradients of G problems, stacked; they are computed one after another."""

    def one(inputs: tuple[chex.PRNGKey, PolicyInputs]) -> chex.ArrayTree:
        key, problem = inputs

        def tables_of(params: chex.ArrayTree) -> PolicyTables:
            return model.apply(params, policy, problem)

        tables, pull_back = jax.vjp(tables_of, params)
        episodes = jax.vmap(rollout.sample, in_axes=(0, None, None))(
            jax.random.split(key, batch), problem, tables
        )
        makespan_s = simulate_padded(problem.padded, episodes.placement, links=links).makespan_s
        lesson = Lesson(
            episodes=episodes,
            weight=normalised_advantage(makespan_s) / batch,
            entropy_weight=jnp.full(batch, weights.entropy / batch),
        )
        _, gradient = loss_and_gradient(problem, tables, lesson)
        return pull_back(gradient)[0]

    return jax.lax.map(one, (keys, problems))


@partial(jax.jit, static_argnames=("policy", "samples", "links"))
def evaluate(
    key: chex.PRNGKey,
    params: chex.ArrayTree,
    entries: Pool,
    *,
    policy: PolicyConfig,
    samples: int,
    links: str,
) -> tuple[chex.Array, chex.Array, chex.Array]:
    """Returns the makespans `[G]` of a policy's placements.

    Of the greedy one in SEL's order, of the better of it and the one in the order of b-levels,
    and of the best of these and samples.

    Args:
      key: of the draws; it is consumed.
      params: the policy's.
      entries: G problems.
      policy: sizes of the networks.
      samples: placements drawn of each problem.
      links: of what is simulated.
    """

    def one(inputs: tuple[chex.PRNGKey, Pool]) -> tuple[chex.Array, chex.Array, chex.Array]:
        key, entry = inputs
        tables = model.apply(params, policy, entry.problem)
        keys = jax.random.split(key, samples)
        drawn = jax.vmap(rollout.sample, in_axes=(0, None, None))(keys, entry.problem, tables)
        likeliest = rollout.greedy_placements(entry.problem, tables)
        placements = jnp.concatenate([likeliest, drawn.placement])
        makespan_s = simulate_padded(entry.problem.padded, placements, links=links).makespan_s
        return makespan_s[0], makespan_s[:2].min(), makespan_s.min()

    count = entries.best_s.shape[0]
    return jax.lax.map(one, (jax.random.split(key, count), entries))
