"""Placeto's policy: where the task of a step should move, given where all tasks are."""

from typing import Any

import chex
import flax.linen as nn
import jax.numpy as jnp

from doppler_jax.learners.placeto_encoder import (
    Relatives,
    TwoWayEncoder,
    find_relatives,
    group_shares,
)
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.types import pytree


@pytree
class Tables:
    """What all steps and episodes share."""

    order: chex.Array  # [N] int32, tasks in the order of the steps; padding comes last
    relatives: Relatives
    embedding: chex.Array  # [N + 1, 2h] of the static features; [N + 1, 0] if encoded per step


class PlacetoPolicy(nn.Module):
    """Scores devices for one task at a time; equivariant under relabelling of devices.

    Where the source has a column per device, the network sees the graph once from each
    device: whether a task is on *this* device, its compute *here*.
    """

    width: int
    rounds: int
    once: bool

    def setup(self) -> None:
        self.encoder = TwoWayEncoder(self.width, self.rounds)
        self.member = nn.Dense(3 * self.width)
        self.hidden = nn.Dense(2 * self.width)
        self.out = nn.Dense(1, kernel_init=nn.initializers.zeros)

    def tables(self, problem: PolicyInputs) -> Tables:
        """Returns what does not depend on the placement."""
        # Padding has the last rank of all, so that a stable sort keeps it behind.
        order = jnp.argsort(jnp.asarray(problem.topological_rank)[:-1]).astype(jnp.int32)
        features = problem.task_features
        embedding = self.encoder(problem, features) if self.once else features[:, :0]
        return Tables(
            order=order, relatives=find_relatives(problem, order), embedding=embedding
        )

    def logits(
        self, problem: PolicyInputs, tables: Tables, placement: chex.Array, step: chex.Array
    ) -> chex.Array:
        """Returns logits `[B, D]`, -inf for devices that cannot run the task of the step.

        Args:
          problem: the problem.
          tables: its tables.
          placement: `[B, N]` where the tasks are now.
          step: `[]` int.
        """
        task = tables.order[step]
        # Task N is on no device.
        spare = ((0, 0), (0, 1))
        where = jnp.pad(placement, spare, constant_values=problem.padded.num_devices).T
        share = group_shares(problem, tables.relatives, task)
        if self.once:
            seen = self._view_once(problem, tables.embedding, where, task, step, share)
        else:
            seen = self._view_each_step(problem, where, task, step, share)
        score = self.out(nn.leaky_relu(self.hidden(seen)))[..., 0]
        return jnp.where(jnp.isfinite(problem.padded.compute_s[task])[None], score, -jnp.inf)

    def _view_each_step(
        self,
        problem: PolicyInputs,
        where: chex.Array,
        task: chex.Array,
        step: chex.Array,
        share: chex.Array,
    ) -> chex.Array:
        """Encodes the graph as it is now; returns what the head sees, `[B, D, K]`.

        `where` is `[N + 1, B]`, the other arguments as in `logits` and `group_shares`.
        """
        features = _state_features(problem, where, task, step)
        embedding = self.encoder(problem, features)
        members = jnp.split(nn.leaky_relu(self.member(embedding)), 3, axis=-1)
        pooled = [
            jnp.tensordot(group, member, axes=1)
            for group, member in zip(share, members, strict=True)
        ]
        return jnp.concatenate([embedding[task], *pooled], axis=-1)

    def _view_once(
        self,
        problem: PolicyInputs,
        embedding: chex.Array,
        where: chex.Array,
        task: chex.Array,
        step: chex.Array,
        share: chex.Array,
    ) -> chex.Array:
        """Averages static embeddings over the tasks of each device; like `_view_each_step`.

        Of each group, all tasks, those on the device, and those of them that stay there.
        """
        devices = problem.padded.num_devices
        member = self.member(embedding).reshape(-1, 3, self.width)
        on = where[:, :, None] == jnp.arange(devices)[None, None]
        visited = _visited(problem, step)
        on = jnp.stack([on, on & visited[:, None, None]], axis=-1).astype(jnp.float32)
        weighed = (share.T[:, :, None] * member).reshape(len(where), -1)
        pooled = jnp.einsum("nk,nbds->bdsk", weighed, on)
        pooled = pooled.reshape(*pooled.shape[:2], -1)
        static = jnp.concatenate([embedding[task], weighed.sum(0)])
        static = jnp.broadcast_to(static, (*pooled.shape[:2], static.shape[0]))
        near = _near_features(problem, where, task)
        return jnp.concatenate([static, pooled, near], axis=-1)


def _visited(problem: PolicyInputs, step: chex.Array) -> chex.Array:
    """Whether each task was the task of an earlier step, `[N + 1]`."""
    return jnp.asarray(problem.topological_rank) < step


def _state_features(
    problem: PolicyInputs, where: chex.Array, task: chex.Array, step: chex.Array
) -> chex.Array:
    """Returns features `[N + 1, B, D, F]` of tasks as seen from each device.

    The static ones of all learned methods; compute on the device; whether the task is on the
    device; time to move its largest output from where it is to the device; whether it is the
    one to be placed, and whether it has been.
    """
    padded = problem.padded
    rows, devices = padded.compute_s.shape
    compute_s = jnp.where(jnp.isfinite(padded.compute_s), padded.compute_s, 0.0)
    on = where[:, :, None] == jnp.arange(devices)[None, None]
    num_bytes = jnp.asarray(padded.succ_bytes).max(-1)[:, None, None]
    there = jnp.minimum(where, devices - 1)
    move_s = padded.latency_s[there] + num_bytes * padded.seconds_per_byte[there]
    move_s = jnp.where(padded.num_edges[:, None, None] > 0, move_s, 0.0)

    def spread(values: chex.Array) -> chex.Array:
        return jnp.broadcast_to(values[..., None].astype(jnp.float32), (*on.shape, 1))

    static = problem.task_features[:, None, None]
    return jnp.concatenate(
        [
            jnp.broadcast_to(static, (*on.shape, static.shape[-1])),
            spread(jnp.log1p(compute_s / problem.unit_s)[:, None]),
            spread(on),
            spread(jnp.log1p(move_s / problem.unit_s)),
            spread((jnp.arange(rows) == task)[:, None, None]),
            spread(_visited(problem, step)[:, None, None]),
        ],
        axis=-1,
    )


def _near_features(problem: PolicyInputs, where: chex.Array, task: chex.Array) -> chex.Array:
    """Returns features `[B, D, 5]` of moving the task to each device.

    Its compute there; mean transfer times of its inputs that are there, of its outputs that
    are read there, and of the other inputs there of its readers; whether it is there now.
    """
    padded = problem.padded
    devices = jnp.arange(padded.num_devices)
    pairs = max(padded.num_devices * (padded.num_devices - 1), 1)
    latency_s = padded.latency_s.sum() / pairs
    seconds_per_byte = padded.seconds_per_byte.sum() / pairs

    def inputs_s(readers: chex.Array) -> chex.Array:
        """Seconds `[B, D]` to move the inputs of readers, but for the task's own."""
        producers = jnp.asarray(padded.pred_task)[readers]
        transfer_s = latency_s + jnp.asarray(padded.pred_bytes)[readers] * seconds_per_byte
        return on_each(producers, jnp.where(producers == task, 0.0, transfer_s))

    def on_each(tasks: chex.Array, transfer_s: chex.Array) -> chex.Array:
        on = where[tasks.reshape(-1)][:, :, None] == devices[None, None]
        return jnp.einsum("k,kbd->bd", transfer_s.reshape(-1), on.astype(jnp.float32))

    compute_s = padded.compute_s[task]
    compute_s = jnp.where(jnp.isfinite(compute_s), compute_s, 0.0)
    on = (where[task][:, None] == devices[None]).astype(jnp.float32)
    readers = jnp.asarray(padded.succ_task)[task]
    near_s = [
        jnp.broadcast_to(compute_s[None], on.shape),
        inputs_s(task),
        on_each(readers, jnp.asarray(problem.succ_transfer_s)[task]),
        inputs_s(readers),
    ]
    return jnp.stack([*(jnp.log1p(s / problem.unit_s) for s in near_s), on], axis=-1)


def act(policy: PlacetoPolicy, params: chex.ArrayTree, method: str, *args: Any) -> Any:
    """Runs a method of the policy."""
    return policy.apply({"params": params}, *args, method=method)
