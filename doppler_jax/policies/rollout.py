"""Episodes: N steps, each SEL choosing a frontier task and PLC its device.

All functions are of one episode and are batched with `vmap`. An episode's device
features depend on its actions alone, so they are recorded, and the log-probabilities of
recorded actions are then recomputed for all steps at once, without the loop.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from doppler_jax.policies.features import Problem
from doppler_jax.policies.list_schedule import (
    Estimates,
    ListSchedule,
    append,
    begin,
    device_features,
)
from doppler_jax.policies.place import PlaceTables, device_logits
from doppler_jax.types import pytree


@pytree
class PolicyTables:
    """Everything that an episode needs of a policy on a problem (`model.encode`)."""

    score: chex.Array  # [N + 1] SEL's
    place: PlaceTables


@pytree
class Actions:
    """What an episode did: task and device of each step; N pads the tail."""

    task: chex.Array  # [T] int32
    device: chex.Array  # [T] int32


@pytree
class Episode:
    """Actions with what they were chosen from; T steps, W chains, D devices."""

    actions: Actions
    heads: chex.Array  # [T, W] int32, first unplaced task of every chain
    frontier_mask: chex.Array  # [T, W] which of them are in the frontier
    features: chex.Array  # [T, D, F] device features of the chosen task
    placement: chex.Array  # [N] int32


DeviceLogits = Callable[[chex.Array, chex.Array, Estimates, chex.Array], chex.Array]
"""Device logits `[D]` of (task, mean members `[D, q]`, estimates, features `[D, F]`)."""


def sample(key: chex.PRNGKey, problem: Problem, tables: PolicyTables) -> Episode:
    """Returns an episode drawn from the policy; the key is consumed."""
    noise = jax.random.gumbel(key, _noise_shape(problem))
    return _run(problem, tables.score, tables.place.member, _plc(tables), noise)


def greedy(problem: Problem, tables: PolicyTables) -> Episode:
    """Returns the episode of most probable choices; ties go to the first chain or device."""
    noise = jnp.zeros(_noise_shape(problem))
    return _run(problem, tables.score, tables.place.member, _plc(tables), noise)


def teach(key: chex.PRNGKey, problem: Problem) -> Episode:
    """Returns an episode of critical-path list scheduling, the teacher of stage 1.

    SEL takes the largest b-level in the frontier, PLC the earliest start; ties are
    broken uniformly at random, for which the key is consumed.
    """

    def earliest(
        task: chex.Array, members: chex.Array, estimates: Estimates, features: chex.Array
    ) -> chex.Array:
        del task, members, features
        first_s = estimates.est_s.min()
        return jnp.where(estimates.est_s <= first_s * (1 + 1e-6), 0.0, -32.0)

    noise = jax.random.gumbel(key, _noise_shape(problem))
    # Gumbel draws in float32 differ by less than 32, so that noise decides between ties only.
    score = problem.b_rank.astype(jnp.float32) * 32.0
    no_members = jnp.zeros((score.shape[0], 1))
    return _run(problem, score, no_members, earliest, noise)


def replay(problem: Problem, actions: Actions) -> Episode:
    """Returns the episode of given actions, whose tasks are in a topological order."""
    none = jnp.zeros((problem.task_features.shape[0], 1))

    def forced(task: chex.Array, members: chex.Array, *_: object) -> chex.Array:
        del task
        return jnp.zeros(members.shape[0])

    noise = jnp.zeros(_noise_shape(problem))
    return _run(problem, none[:, 0], none, forced, noise, actions)


def log_prob(
    problem: Problem, tables: PolicyTables, episode: Episode
) -> tuple[chex.Array, chex.Array]:
    """Returns log-probability and entropy of every step's choices, `[T]` each, 0 in the tail.

    Both are sums of SEL's and PLC's. Differentiable in the tables.
    """
    task, device = episode.actions.task, episode.actions.device
    real = task != problem.instance.padded_tasks
    scores = jnp.where(episode.frontier_mask, tables.score[episode.heads], -jnp.inf)
    logits = device_logits(
        tables.place,
        task,
        _members_before(problem, tables.place.member, episode.actions),
        episode.features,
        jnp.isfinite(problem.instance.compute_s[task]),
    )
    select, select_entropy = _categorical(scores, (episode.heads == task[:, None]), real)
    chosen = device[:, None] == jnp.arange(logits.shape[1])[None]
    place, place_entropy = _categorical(logits, chosen, real)
    return select + place, select_entropy + place_entropy


def _noise_shape(problem: Problem) -> tuple[int, int]:
    instance = problem.instance
    return instance.padded_tasks, instance.chain_head.shape[0] + instance.num_devices


def _plc(tables: PolicyTables) -> DeviceLogits:
    def logits(
        task: chex.Array, members: chex.Array, estimates: Estimates, features: chex.Array
    ) -> chex.Array:
        return device_logits(tables.place, task, members, features, estimates.allowed)

    return logits


def _categorical(
    logits: chex.Array, chosen: chex.Array, real: chex.Array
) -> tuple[chex.Array, chex.Array]:
    """Log-probability of the choice and entropy, `[T]` from `[T, K]`; 0 where not real."""
    legal = jnp.isfinite(logits) & real[:, None]
    # Rows without a choice get one of logit 0, so that no gradient is undefined.
    safe = jnp.where(legal, logits, jnp.where(real[:, None], -jnp.inf, 0.0))
    log_p = jax.nn.log_softmax(safe, axis=-1)
    finite = jnp.where(legal, log_p, 0.0)
    entropy = -(jnp.where(legal, jnp.exp(finite), 0.0) * finite).sum(-1)
    return jnp.where(chosen, finite, 0.0).sum(-1), entropy


def _members_before(problem: Problem, member: chex.Array, actions: Actions) -> chex.Array:
    """Mean member `[T, D, q]` over the tasks that each device had before each step."""
    num_devices = problem.instance.num_devices
    real = actions.task != problem.instance.padded_tasks
    on = (actions.device[:, None] == jnp.arange(num_devices)[None]) & real[:, None]
    on = on.astype(member.dtype)
    added = on[:, :, None] * member[actions.task][:, None, :]
    total = jnp.cumsum(added, axis=0) - added
    count = jnp.cumsum(on, axis=0) - on
    return total / jnp.maximum(count, 1.0)[:, :, None]


def _run(
    problem: Problem,
    score: chex.Array,
    member: chex.Array,
    logits_of: DeviceLogits,
    noise: chex.Array,
    forced: Actions | None = None,
) -> Episode:
    """Runs an episode: argmax of score plus noise over the frontier, then over devices.

    Args:
      problem: the problem.
      score: `[N + 1]` SEL's score of every task.
      member: `[N + 1, q]` what PLC averages over a device's tasks.
      logits_of: PLC.
      noise: `[T, W + D]`, Gumbel to sample from the softmax, 0 for the argmax.
      forced: actions to take instead of choosing.
    """
    instance = problem.instance
    nobody = instance.padded_tasks
    num_chains = instance.chain_head.shape[0]

    def step(
        state: ListSchedule, inputs: tuple[chex.Array, Actions | None]
    ) -> tuple[ListSchedule, tuple[chex.Array, ...]]:
        noise, given = inputs
        frontier = (state.missing == 0) & (state.head != nobody)
        if given is None:
            keys = jnp.where(frontier, score[state.head] + noise[:num_chains], -jnp.inf)
            task = jnp.where(frontier.any(), state.head[jnp.argmax(keys)], nobody)
        else:
            task = given.task
        features, estimates = device_features(problem, state, task)
        if given is None:
            members = state.member / jnp.maximum(state.count, 1.0)[:, None]
            logits = logits_of(task, members, estimates, features)
            device = jnp.argmax(logits + noise[num_chains:]).astype(jnp.int32)
        else:
            device = given.device
        record = (task, device, state.head, frontier, features)
        return append(problem, member, state, task, device, estimates.est_s[device]), record

    state = begin(problem, member)
    state, records = jax.lax.scan(step, state, (noise, forced))
    task, device, heads, frontier_mask, features = records
    return Episode(
        actions=Actions(task=task, device=device),
        heads=heads,
        frontier_mask=frontier_mask,
        features=features,
        placement=jnp.where(state.device[:-1] == instance.num_devices, 0, state.device[:-1]),
    )
