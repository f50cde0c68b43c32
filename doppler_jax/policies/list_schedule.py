"""The list schedule that grows during an episode."""

import jax.numpy as jnp
from chex import Array

from doppler_jax.policies.features import PolicyInputs
from doppler_jax.types import pytree


@pytree
class ListSchedule:
    """A list schedule that only appends, under `parallel` links; times in seconds."""

    head: Array  # [W] int32
    missing: Array  # [W] int32, unplaced producers of each head
    free_s: Array  # [D] end of the device's last task
    load_s: Array  # [D] compute placed on the device
    start_s: Array  # [N + 1]
    finish_s: Array  # [N + 1]
    device: Array  # [N + 1] int32, D where unplaced
    near_s: Array  # [N + 1, D] transfer time of a task's inputs already on the device
    member: Array  # [D, m] sum of the members placed on the device
    count: Array  # [D]


def begin(problem: PolicyInputs, member: Array) -> ListSchedule:
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


def append(
    problem: PolicyInputs,
    member: Array,
    state: ListSchedule,
    task: Array,
    device: Array,
    start_s: Array,
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
