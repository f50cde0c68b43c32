"""Placeto (Addanki et al. 2019, arXiv 1906.08879): a placement improved task by task.

An episode starts with all tasks on one device and visits every task once, in a topological
order; a step may move its task to another device, and is rewarded with the time that this
saves. The policy is trained by REINFORCE, with a baseline per step and an entropy bonus that
decays. Where we differ from the source:

- the network is equivariant over devices, so that their number is no part of the parameters;
- it sees the static features of all learned methods here beside compute and output size, and
  links through the time to move an output, for devices and links may be unequal;
- messages are passed in synchronous rounds, as the authors' released code does at scale, not
  from the leaves inward, and are averaged, not summed, so that sizes of graphs may differ;
- the baseline is the mean over the update's episodes, not a running mean.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from chex import Array, ArrayTree, PRNGKey

from doppler_jax.learners.learner import EpisodeLearner, Explored
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.rollout import categorical
from doppler_jax.simulator.batches import simulate_padded
from doppler_jax.types import pytree

ENTRIES = 1 << 24
"""Entries of the placements that are simulated in one call, at most."""


Closure = tuple[Array, Array]
"""Who is upstream, and who downstream of each task, itself included: bool `[N + 1, N + 1]`."""


def find_closure(problem: PolicyInputs, order: Array) -> Closure:
    """Returns the closure of all tasks, given in a topological order `[N]`."""
    padded = problem.padded
    return _join(padded.pred_task, order), _join(padded.succ_task, order[::-1])


def _join(neighbours: Array, order: Array) -> Array:
    """Joins, task after task, the rows of `neighbours` `[N + 1, K]`, which come before it."""
    rows = neighbours.shape[0]
    neighbours = jnp.asarray(neighbours)

    def join(found: Array, task: Array) -> tuple[Array, None]:
        joined = found[neighbours[task]].any(0)
        return found.at[task].set(joined.at[task].set(True)), None

    return jax.lax.scan(join, jnp.zeros((rows, rows), bool), order)[0]


def group_shares(problem: PolicyInputs, closure: Closure, task: Array) -> Array:
    """Returns the weights `[3, N + 1]` that average over a task's groups.

    They are its ancestors, its descendants and all other tasks, which may run beside it.
    """
    tasks = jnp.arange(problem.task_features.shape[0])
    above, below = (related[task] & (tasks != task) for related in closure)
    beside = ~above & ~below & (tasks != task) & (tasks < problem.padded.num_tasks)
    groups = jnp.stack([above, below, beside]).astype(jnp.float32)
    return groups / jnp.maximum(groups.sum(-1, keepdims=True), 1.0)


class TwoWayEncoder(nn.Module):
    """Embeds tasks by what lies upstream of them and, apart from it, by what lies downstream.

    In each of `rounds` rounds a task adds h2(mean of h1 over its producers' embeddings) to
    its own, with h1 and h2 shared by the rounds, and likewise, with others, over its readers.
    """

    width: int
    rounds: int

    @nn.compact
    def __call__(self, problem: PolicyInputs, features: Array) -> Array:
        """Returns embeddings `[N + 1, ..., 2 width]` of features `[N + 1, ..., F]`."""
        start = nn.leaky_relu(nn.Dense(self.width)(features))
        start = nn.Dense(self.width)(start)
        sender, receiver = problem.edge_sender, problem.edge_receiver
        ways = [
            self._pass_messages(neighbour_mean(*ends, start), start)
            for ends in ((sender, receiver), (receiver, sender))
        ]
        return jnp.concatenate(ways, axis=-1)

    def _pass_messages(self, mean: Callable[[Array], Array], start: Array) -> Array:
        message, update = nn.Dense(self.width), nn.Dense(self.width)
        embedding = start
        for _ in range(self.rounds):
            received = mean(nn.leaky_relu(message(embedding)))
            embedding = embedding + nn.leaky_relu(update(received))
        return embedding


def neighbour_mean(source: Array, target: Array, like: Array) -> Callable[[Array], Array]:
    """Returns the function that averages rows of `source` `[E]` for every `target` `[E]`.

    Args:
      source: the rows that are read.
      target: the rows that are written; those that nothing reaches become 0.
      like: `[N + 1, ...]` of the shape that is averaged.
    """
    rows = like.shape[0]
    count = jax.ops.segment_sum(jnp.ones(target.shape, jnp.float32), target, rows)
    share = (1.0 / jnp.maximum(count, 1.0)).reshape((rows,) + (1,) * (like.ndim - 1))
    return lambda values: jax.ops.segment_sum(values[source], target, rows) * share


@pytree
class Tables:
    """What all steps and episodes share."""

    order: Array  # [N] int32, tasks in the order of the steps; padding comes last
    closure: Closure
    embedding: Array  # [N + 1, 2h] of the static features; [N + 1, 0] if encoded per step


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
        return Tables(order=order, closure=find_closure(problem, order), embedding=embedding)

    def logits(
        self, problem: PolicyInputs, tables: Tables, placement: Array, step: Array
    ) -> Array:
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
        share = group_shares(problem, tables.closure, task)
        if self.once:
            seen = self._view_once(problem, tables.embedding, where, task, step, share)
        else:
            seen = self._view_each_step(problem, where, task, step, share)
        score = self.out(nn.leaky_relu(self.hidden(seen)))[..., 0]
        return jnp.where(jnp.isfinite(problem.padded.compute_s[task])[None], score, -jnp.inf)

    def _view_each_step(
        self, problem: PolicyInputs, where: Array, task: Array, step: Array, share: Array
    ) -> Array:
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
        embedding: Array,
        where: Array,
        task: Array,
        step: Array,
        share: Array,
    ) -> Array:
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


def _visited(problem: PolicyInputs, step: Array) -> Array:
    """Whether each task was the task of an earlier step, `[N + 1]`."""
    return jnp.asarray(problem.topological_rank) < step


def _state_features(problem: PolicyInputs, where: Array, task: Array, step: Array) -> Array:
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

    def spread(values: Array) -> Array:
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


def _near_features(problem: PolicyInputs, where: Array, task: Array) -> Array:
    """Returns features `[B, D, 5]` of moving the task to each device.

    Its compute there; mean transfer times of its inputs that are there, of its outputs that
    are read there, and of the other inputs there of its readers; whether it is there now.
    """
    padded = problem.padded
    devices = jnp.arange(padded.num_devices)
    pairs = max(padded.num_devices * (padded.num_devices - 1), 1)
    latency_s = padded.latency_s.sum() / pairs
    seconds_per_byte = padded.seconds_per_byte.sum() / pairs

    def inputs_s(readers: Array) -> Array:
        """Seconds `[B, D]` to move the inputs of readers, but for the task's own."""
        producers = jnp.asarray(padded.pred_task)[readers]
        transfer_s = latency_s + jnp.asarray(padded.pred_bytes)[readers] * seconds_per_byte
        return on_each(producers, jnp.where(producers == task, 0.0, transfer_s))

    def on_each(tasks: Array, transfer_s: Array) -> Array:
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


def act(policy: PlacetoPolicy, params: ArrayTree, method: str, *args: Any) -> Any:
    """Runs a method of the policy."""
    return policy.apply({"params": params}, *args, method=method)


@pytree
class PlacetoLesson:
    """B episodes. Each task moves once, so start and end tell the placement of every step."""

    start: Array  # [B, N] int32
    end: Array  # [B, N] int32
    advantage: Array  # [B, N] of each step


@dataclasses.dataclass(frozen=True)
class Placeto(EpisodeLearner):
    """Settings of Placeto.

    `once` is the fair variant: the graph is encoded once per update, from static features,
    and the placement enters through averages per device alone, so that a step costs little.
    As published, the graph is encoded at every step, with where all tasks are.
    """

    name: ClassVar[str] = "placeto"

    once: bool = False
    learning_rate: float = 3e-3
    entropy_weight: float = 1e-2  # at the start; halves every `entropy_halving` updates
    entropy_halving: int = 100
    width: int = 16  # of embeddings, in each direction
    rounds: int = 4  # of message passing

    @property
    def policy(self) -> PlacetoPolicy:
        """The network."""
        return PlacetoPolicy(self.width, self.rounds, self.once)

    def evaluations(self, num_tasks: int) -> int:
        """Returns how many placements an update simulates: every episode's, at every step."""
        return self.batch * (num_tasks + 1)

    def init(self, key: PRNGKey, problem: PolicyInputs) -> ArrayTree:
        """Returns fresh parameters; the key is consumed."""

        def everything(policy: PlacetoPolicy) -> Array:
            tables = policy.tables(problem)
            placement = jnp.zeros((1, problem.padded.padded_tasks), jnp.int32)
            return policy.logits(problem, tables, placement, jnp.int32(0))

        return self.policy.init(key, method=everything)["params"]

    def explore(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, update: Array, links: str
    ) -> Explored:
        """Returns `batch` episodes, each from a device drawn at random; consumes the key."""
        device_key, key = jax.random.split(key)
        devices = problem.padded.num_devices
        start = start_on(problem, jax.random.randint(device_key, (self.batch,), 0, devices))
        end = self._run(params, problem, start, key, greedy=0)
        makespan_s = step_makespans(problem, start, end, links)
        best = jnp.argmin(makespan_s, axis=-1)
        return Explored(
            lesson=PlacetoLesson(start=start, end=end, advantage=advantages(makespan_s)),
            placement=placement_at(problem, start, end, best),
            makespan_s=makespan_s.min(-1),
        )

    def loss(
        self, params: ArrayTree, problem: PolicyInputs, lesson: PlacetoLesson, update: Array
    ) -> Array:
        """Returns REINFORCE's surrogate per step, less the entropy bonus, `[]`."""
        log_p, entropy = self.log_prob(params, problem, lesson.start, lesson.end)
        bonus = self.entropy_weight * 0.5 ** (update.astype(jnp.float32) / self.entropy_halving)
        steps = jnp.maximum(problem.padded.num_tasks, 1).astype(jnp.float32)
        gain = lesson.advantage * log_p + bonus * entropy
        return -gain.sum(-1).mean() / steps

    def log_prob(
        self, params: ArrayTree, problem: PolicyInputs, start: Array, end: Array
    ) -> tuple[Array, Array]:
        """Returns log-probability and entropy of every step, `[B, N]`, 0 after the last.

        The steps of episodes from `start` to `end` `[B, N]` are recomputed one by one, here
        and again for the gradient: no embeddings are kept.
        """
        policy = self.policy
        tables: Tables = act(policy, params, "tables", problem)

        @jax.checkpoint
        def step(params: ArrayTree, tables: Tables, step: Array) -> tuple[Array, Array]:
            placement = placement_at(problem, start, end, step)
            logits = act(policy, params, "logits", problem, tables, placement, step)
            chosen = end[:, tables.order[step], None] == jnp.arange(logits.shape[1])[None]
            real = jnp.broadcast_to(step < problem.padded.num_tasks, len(end))
            return categorical(logits, chosen, real)

        steps = jnp.arange(problem.padded.padded_tasks, dtype=jnp.int32)
        log_p, entropy = jax.lax.map(lambda t: step(params, tables, t), steps)
        return log_p.T, entropy.T

    def draw(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, count: int, links: str
    ) -> Array:
        """Returns placements `[count, N]`, the ends of episodes; consumes the key.

        The first starts on the device that would run everything soonest and takes the
        likeliest choices; the others are drawn as in training.
        """
        device_key, key = jax.random.split(key)
        devices = problem.padded.num_devices
        device = jax.random.randint(device_key, (count,), 0, devices)
        total_s = problem.padded.compute_s.sum(0)
        device = device.at[0].set(jnp.argmin(total_s).astype(jnp.int32))
        return self._run(params, problem, start_on(problem, device), key, greedy=1)

    def _run(
        self, params: ArrayTree, problem: PolicyInputs, start: Array, key: PRNGKey, greedy: int
    ) -> Array:
        """Returns the ends `[B, N]` of episodes; the first `greedy` take likeliest choices."""
        policy = self.policy
        tables: Tables = act(policy, params, "tables", problem)

        def step(placement: Array, inputs: tuple[Array, PRNGKey]) -> tuple[Array, None]:
            step, key = inputs
            logits = act(policy, params, "logits", problem, tables, placement, step)
            device = jax.random.categorical(key, logits)
            device = device.at[:greedy].set(jnp.argmax(logits[:greedy], axis=-1))
            # Padding never moves.
            task = tables.order[step]
            device = jnp.where(step < problem.padded.num_tasks, device, placement[:, task])
            return placement.at[:, task].set(device.astype(jnp.int32)), None

        count = start.shape[1]
        steps = jnp.arange(count, dtype=jnp.int32)
        return jax.lax.scan(step, start, (steps, jax.random.split(key, count)))[0]


def start_on(problem: PolicyInputs, device: Array) -> Array:
    """Returns placements `[B, N]` of all tasks on one device `[B]`.

    What that one cannot run is where it is fastest.
    """
    compute_s = jnp.asarray(problem.padded.compute_s)[:-1]
    fastest = jnp.argmin(compute_s, axis=-1).astype(jnp.int32)
    able = jnp.isfinite(compute_s).T[device]
    return jnp.where(able, device[:, None].astype(jnp.int32), fastest[None])


def placement_at(problem: PolicyInputs, start: Array, end: Array, step: Array) -> Array:
    """Returns the placements before a step of episodes from `start` to `end` `[B, N]`.

    The step is one for all, `[]`, or each one's own, `[B]`.
    """
    rank = jnp.asarray(problem.topological_rank)[None, :-1]
    moved = rank < jnp.reshape(step, (-1, 1))
    return jnp.where(jnp.broadcast_to(moved, start.shape), end, start)


def step_makespans(problem: PolicyInputs, start: Array, end: Array, links: str) -> Array:
    """Simulates episodes from `start` to `end` `[B, N]` before every step and at the end.

    Returns:
      Makespans `[B, N + 1]`, seconds.
    """
    batch, size = start.shape
    total = batch * (size + 1)
    count = -(-total * max(size, 1) // ENTRIES)
    chunk = -(-total // count)

    def run(index: Array) -> Array:
        episode, step = jnp.minimum(index // (size + 1), batch - 1), index % (size + 1)
        placements = placement_at(problem, start[episode], end[episode], step)
        return simulate_padded(problem.padded, placements, links=links).makespan_s

    index = jnp.arange(count * chunk).reshape(count, chunk)
    return jax.lax.map(run, index).reshape(-1)[:total].reshape(batch, size + 1)


def advantages(makespan_s: Array) -> Array:
    """Returns advantages `[B, N]` of the steps from makespans `[B, N + 1]` around them.

    A step is rewarded with the time that it saves, so that its own and all later rewards sum
    to what was saved from it on. Its advantage is how far that exceeds the mean over
    episodes, in deviations over all steps.
    """
    saved_s = makespan_s[:, :-1] - makespan_s[:, -1:]
    excess_s = saved_s - saved_s.mean(0, keepdims=True)
    spread_s = jnp.sqrt(jnp.mean(excess_s**2))
    # Rounding alone gives equal sums a spread of some 1e-7 of the makespan.
    return excess_s / jnp.where(spread_s > 1e-6 * makespan_s.mean(), spread_s, jnp.inf)
