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
from doppler_jax.policies.place import NUM_DEVICE_FEATURES, PlaceTables, device_logits
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


@pytree
class _State:
    """A list schedule that only appends, under `parallel` links; times in seconds."""

    head: chex.Array  # [W] int32
    missing: chex.Array  # [W] int32, unplaced producers of each head
    free_s: chex.Array  # [D] end of the device's last task
    load_s: chex.Array  # [D] compute placed on the device
    start_s: chex.Array  # [N + 1]
    finish_s: chex.Array  # [N + 1]
    device: chex.Array  # [N + 1] int32, D where unplaced
    near_s: chex.Array  # [N + 1, D] transfer time of a task's inputs already on the device
    member: chex.Array  # [D, q] sum of the members placed on the device
    count: chex.Array  # [D]


DeviceLogits = Callable[[chex.Array, chex.Array, "Estimates", chex.Array], chex.Array]
"""Device logits `[D]` of (task, mean members `[D, q]`, estimates, features `[D, F]`)."""


@pytree
class Estimates:
    """What PLC is told about putting a task on each device."""

    est_s: chex.Array  # [D] earliest start; inf where the device cannot run it
    allowed: chex.Array  # [D]


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
        state: _State, inputs: tuple[chex.Array, Actions | None]
    ) -> tuple[_State, tuple[chex.Array, ...]]:
        noise, given = inputs
        frontier = (state.missing == 0) & (state.head != nobody)
        if given is None:
            keys = jnp.where(frontier, score[state.head] + noise[:num_chains], -jnp.inf)
            task = jnp.where(frontier.any(), state.head[jnp.argmax(keys)], nobody)
        else:
            task = given.task
        features, estimates = _device_features(problem, state, task)
        if given is None:
            members = state.member / jnp.maximum(state.count, 1.0)[:, None]
            logits = logits_of(task, members, estimates, features)
            device = jnp.argmax(logits + noise[num_chains:]).astype(jnp.int32)
        else:
            device = given.device
        record = (task, device, state.head, frontier, features)
        return _place(problem, member, state, task, device, estimates.est_s[device]), record

    state = _initial(problem, member)
    state, records = jax.lax.scan(step, state, (noise, forced))
    task, device, heads, frontier_mask, features = records
    return Episode(
        actions=Actions(task=task, device=device),
        heads=heads,
        frontier_mask=frontier_mask,
        features=features,
        placement=jnp.where(state.device[:-1] == instance.num_devices, 0, state.device[:-1]),
    )


def _initial(problem: Problem, member: chex.Array) -> _State:
    instance = problem.instance
    rows, d = instance.compute_s.shape
    head = jnp.asarray(instance.chain_head)
    return _State(
        head=head,
        missing=(instance.pred_task[head] != rows - 1).sum(-1, dtype=jnp.int32),
        free_s=jnp.zeros(d),
        load_s=jnp.zeros(d),
        start_s=jnp.zeros(rows),
        finish_s=jnp.zeros(rows),
        device=jnp.full(rows, d, jnp.int32),
        near_s=jnp.zeros((rows, d)),
        member=jnp.zeros((d, member.shape[1])),
        count=jnp.zeros(d),
    )


def _device_features(
    problem: Problem, state: _State, task: chex.Array
) -> tuple[chex.Array, Estimates]:
    """Returns the features `[D, F]` of putting `task` on each device, and the estimates.

    The paper's five (compute placed on d; compute of the task's inputs on d; their
    earliest start and latest end; earliest start of the task), its compute on d, and the
    co-parent affinity: transfer time of the other inputs of its readers that are on d,
    and whether there are any. Points in time count from the earliest possible start over
    all devices, all times in units, compressed by a signed logarithm.
    """
    instance = problem.instance
    d = instance.num_devices
    producers = instance.pred_task[task]  # [P]
    source = state.device[producers]
    on = source[:, None] == jnp.arange(d)[None]  # [P, D]; none for padding
    there = jnp.minimum(source, d - 1)
    # The producers' compute where they run; 0 instead of inf elsewhere.
    input_compute_s = jnp.where(on, instance.compute_s[producers], 0.0).sum(0)
    first_start_s = jnp.where(on, state.start_s[producers][:, None], jnp.inf).min(0)
    last_end_s = jnp.where(on, state.finish_s[producers][:, None], -jnp.inf).max(0)
    move_s = instance.latency_s[there] + (
        instance.pred_bytes[task][:, None] * instance.seconds_per_byte[there]
    )
    real = (producers != instance.padded_tasks)[:, None]
    arrival_s = jnp.where(real, state.finish_s[producers][:, None] + move_s, 0.0).max(0)
    arrival_s = jnp.maximum(arrival_s, instance.input_ready_s[task])
    compute_s = instance.compute_s[task]
    allowed = jnp.isfinite(compute_s)
    est_s = jnp.where(allowed, jnp.maximum(state.free_s, arrival_s), jnp.inf)
    base_s = est_s.min()

    any_input = on.any(0)
    affinity_s = state.near_s[instance.succ_task[task]].sum(0)
    features = jnp.stack(
        [
            state.load_s - state.load_s.min(),
            input_compute_s,
            jnp.where(any_input, first_start_s - base_s, 0.0),
            jnp.where(any_input, last_end_s - base_s, 0.0),
            jnp.where(allowed, est_s - base_s, 0.0),
            jnp.where(allowed, compute_s, 0.0),
            affinity_s,
        ],
        axis=-1,
    )
    features = features / problem.unit_s
    features = jnp.sign(features) * jnp.log1p(jnp.abs(features))
    related = (affinity_s > 0).astype(features.dtype)[:, None]
    features = jnp.concatenate([features, related], axis=-1)
    chex.assert_shape(features, (d, NUM_DEVICE_FEATURES))
    return features, Estimates(est_s=est_s, allowed=allowed)


def _place(
    problem: Problem,
    member: chex.Array,
    state: _State,
    task: chex.Array,
    device: chex.Array,
    start_s: chex.Array,
) -> _State:
    """Appends `task` to `device` and moves its chain on; task N changes nothing that counts."""
    instance = problem.instance
    nobody = instance.padded_tasks
    real = task != nobody
    on = (jnp.arange(instance.num_devices) == device) & real
    compute_s = instance.compute_s[task, device]
    finish_s = start_s + compute_s
    readers = instance.succ_task[task]
    follower = instance.chain_next[task]
    moved = state.head == task
    missing = state.missing - (state.head[:, None] == readers[None]).sum(-1, dtype=jnp.int32)
    where = state.device.at[task].set(jnp.where(real, device, instance.num_devices))
    unplaced = where[instance.pred_task[follower]] == instance.num_devices
    real_producers = instance.pred_task[follower] != nobody
    return _State(
        head=jnp.where(moved, follower, state.head),
        missing=jnp.where(moved, (unplaced & real_producers).sum(dtype=jnp.int32), missing),
        free_s=jnp.where(on, finish_s, state.free_s),
        load_s=state.load_s + jnp.where(on, compute_s, 0.0),
        start_s=state.start_s.at[task].set(start_s),
        finish_s=state.finish_s.at[task].set(finish_s),
        device=where,
        near_s=state.near_s.at[readers, device].add(problem.succ_transfer_s[task]),
        member=state.member + jnp.where(on[:, None], member[task][None], 0.0),
        count=state.count + on.astype(state.count.dtype),
    )
