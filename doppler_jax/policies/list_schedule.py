"""The list schedule that grows during an episode, and what PLC is told of it."""

import chex
import jax.numpy as jnp

from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.place import NUM_DEVICE_FEATURES
from doppler_jax.types import pytree

SAME = 1e-3
"""Units of time that two finishes may differ by and be called the same."""


@pytree
class ListSchedule:
    """A list schedule that only appends, under `parallel` links; times in seconds."""

    head: chex.Array  # [W] int32
    missing: chex.Array  # [W] int32, unplaced producers of each head
    free_s: chex.Array  # [D] end of the device's last task
    load_s: chex.Array  # [D] compute placed on the device
    start_s: chex.Array  # [N + 1]
    finish_s: chex.Array  # [N + 1]
    device: chex.Array  # [N + 1] int32, D where unplaced
    near_s: chex.Array  # [N + 1, D] transfer time of a task's inputs already on the device
    member: chex.Array  # [D, m] sum of the members placed on the device
    count: chex.Array  # [D]


@pytree
class Estimates:
    """What PLC is told about putting a task on each device."""

    est_s: chex.Array  # [D] earliest start; inf where the device cannot run it
    allowed: chex.Array  # [D]


def begin(problem: PolicyInputs, member: chex.Array) -> ListSchedule:
    """Returns the empty schedule of a problem; `member` `[N + 1, m]` gives m."""
    padded = problem.padded
    rows, d = padded.compute_s.shape
    head = jnp.asarray(padded.chain_head)
    return ListSchedule(
        head=head,
        missing=(padded.pred_task[head] != rows - 1).sum(-1, dtype=jnp.int32),
        free_s=jnp.zeros(d),
        load_s=jnp.zeros(d),
        start_s=jnp.zeros(rows),
        finish_s=jnp.zeros(rows),
        device=jnp.full(rows, d, jnp.int32),
        near_s=jnp.zeros((rows, d)),
        member=jnp.zeros((d, member.shape[1])),
        count=jnp.zeros(d),
    )


def device_features(
    problem: PolicyInputs,
    state: ListSchedule,
    task: chex.Array,
    num_features: int = NUM_DEVICE_FEATURES["general"],
) -> tuple[chex.Array, Estimates]:
    """Returns the first features `[D, F]` of putting `task` on each device, and the estimates.

    The paper's five (compute placed on d; compute of the task's inputs on d; their
    earliest start and latest end; earliest start of the task), its compute on d, and the
    co-parent affinity: transfer time of the other inputs of its readers that are on d,
    and whether there are any. Points in time count from the earliest possible start over
    all devices, all times in units, compressed by a signed logarithm. After them those of
    `_general_features`, which are not computed unless asked for.
    """
    padded = problem.padded
    d = padded.num_devices
    producers = padded.pred_task[task]  # [P]
    source = state.device[producers]
    on = source[:, None] == jnp.arange(d)[None]  # [P, D]; none for padding
    there = jnp.minimum(source, d - 1)
    # The producers' compute where they run; 0 instead of inf elsewhere.
    input_compute_s = jnp.where(on, padded.compute_s[producers], 0.0).sum(0)
    first_start_s = jnp.where(on, state.start_s[producers][:, None], jnp.inf).min(0)
    last_end_s = jnp.where(on, state.finish_s[producers][:, None], -jnp.inf).max(0)
    latency_s, seconds_per_byte = padded.links
    move_s = latency_s[there] + (padded.pred_bytes[task][:, None] * seconds_per_byte[there])
    real = (producers != padded.padded_tasks)[:, None]
    arrival_s = jnp.where(real, state.finish_s[producers][:, None] + move_s, 0.0).max(0)
    arrival_s = jnp.maximum(arrival_s, padded.input_ready_s[task])
    compute_s = padded.compute_s[task]
    allowed = jnp.isfinite(compute_s)
    est_s = jnp.where(allowed, jnp.maximum(state.free_s, arrival_s), jnp.inf)
    base_s = est_s.min()

    any_input = on.any(0)
    affinity_s = state.near_s[padded.succ_task[task]].sum(0)
    times_s = [
        state.load_s - jnp.where(allowed, state.load_s, jnp.inf).min(),
        input_compute_s,
        jnp.where(any_input, first_start_s - base_s, 0.0),
        jnp.where(any_input, last_end_s - base_s, 0.0),
        jnp.where(allowed, est_s - base_s, 0.0),
        jnp.where(allowed, compute_s, 0.0),
        affinity_s,
    ]
    related = (affinity_s > 0).astype(affinity_s.dtype)[:, None]
    features = jnp.concatenate([_in_units(problem, times_s), related], axis=-1)
    estimates = Estimates(est_s=est_s, allowed=allowed)
    if num_features > features.shape[1]:
        moved_s = jnp.where(real, move_s, 0.0).sum(0)
        general = _general_features(problem, state, task, estimates, moved_s)
        features = jnp.concatenate([features, general], axis=-1)
    return features[:, :num_features], estimates


def _general_features(
    problem: PolicyInputs,
    state: ListSchedule,
    task: chex.Array,
    estimates: Estimates,
    moved_s: chex.Array,
) -> chex.Array:
    """Returns what policies of many graphs see besides `[D, 6]`.

    Finish after the earliest possible one, and whether it is that one; how long the device
    would idle; `moved_s` `[D]`, transfer time of the inputs that are elsewhere; the share of
    the task's ties that is on the device, of all and of those placed.
    """
    d = problem.padded.num_devices
    est_s, allowed = estimates.est_s, estimates.allowed
    late_s = est_s + problem.padded.compute_s[task]
    late_s = jnp.where(allowed, late_s - late_s.min(), 0.0)
    idle_s = jnp.where(allowed, est_s - state.free_s, 0.0)
    times = _in_units(problem, [late_s, idle_s, moved_s])
    first = (late_s <= SAME * problem.unit_s).astype(times.dtype)[:, None]
    tied = state.device[problem.relative_task[task]][:, None] == jnp.arange(d)[None]
    share = jnp.where(tied, problem.relative_weight[task][:, None], 0.0).sum(0)
    ties = jnp.stack([share, share / jnp.maximum(share.sum(), 1e-6)], axis=-1)
    return jnp.concatenate([times[:, :1], first, times[:, 1:], ties], axis=-1)


def _in_units(problem: PolicyInputs, times_s: list[chex.Array]) -> chex.Array:
    """Returns times `[D]` each in units, compressed by a signed logarithm, `[D, K]`."""
    times = jnp.stack(times_s, axis=-1) / problem.unit_s
    return jnp.sign(times) * jnp.log1p(jnp.abs(times))


def append(
    problem: PolicyInputs,
    member: chex.Array,
    state: ListSchedule,
    task: chex.Array,
    device: chex.Array,
    start_s: chex.Array,
) -> ListSchedule:
    """Appends `task` to `device` and moves its chain on; task N changes nothing that counts."""
    padded = problem.padded
    nobody = padded.padded_tasks
    real = task != nobody
    on = (jnp.arange(padded.num_devices) == device) & real
    compute_s = padded.compute_s[task, device]
    finish_s = start_s + compute_s
    readers = padded.succ_task[task]
    follower = padded.chain_next[task]
    moved = state.head == task
    chains = padded.chain[readers]
    waits = (state.head[chains] == readers) & (readers != nobody)
    missing = state.missing.at[chains].add(-waits.astype(jnp.int32))
    where = state.device.at[task].set(jnp.where(real, device, padded.num_devices))
    unplaced = where[padded.pred_task[follower]] == padded.num_devices
    real_producers = padded.pred_task[follower] != nobody
    return ListSchedule(
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
