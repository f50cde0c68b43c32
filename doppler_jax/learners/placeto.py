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

import chex
import jax
import jax.numpy as jnp

from doppler_jax.learners.learner import Explored
from doppler_jax.learners.placeto_policy import PlacetoPolicy, Tables, act
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.simulator.simulate import simulate_padded
from doppler_jax.types import pytree

ENTRIES = 1 << 24
"""Entries of the placements that are simulated in one call, at most."""


@pytree
class Lesson:
    """B episodes. Each task moves once, so start and end tell the placement of every step."""

    start: chex.Array  # [B, N] int32
    end: chex.Array  # [B, N] int32
    advantage: chex.Array  # [B, N] of each step


@dataclasses.dataclass(frozen=True)
class Placeto:
    """Settings of Placeto.

    `once` is the fair variant: the graph is encoded once per update, from static features,
    and the placement enters through averages per device alone, so that a step costs little.
    As published, the graph is encoded at every step, with where all tasks are.
    """

    once: bool = False
    batch: int = 16  # episodes per update
    epochs: int = 1
    minibatches: int = 1
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

    def proposal_evaluations(self, num_tasks: int) -> int:
        """Returns 0: an episode's end is proposed unseen."""
        del num_tasks
        return 0

    def init(self, key: chex.PRNGKey, problem: PolicyInputs) -> chex.ArrayTree:
        """Returns fresh parameters; the key is consumed."""

        def everything(policy: PlacetoPolicy) -> chex.Array:
            tables = policy.tables(problem)
            placement = jnp.zeros((1, problem.padded.padded_tasks), jnp.int32)
            return policy.logits(problem, tables, placement, jnp.int32(0))

        return self.policy.init(key, method=everything)["params"]

    def explore(
        self,
        params: chex.ArrayTree,
        problem: PolicyInputs,
        key: chex.PRNGKey,
        update: chex.Array,
        links: str,
    ) -> Explored:
        """Returns `batch` episodes, each from a device drawn at random; consumes the key."""
        del update
        device_key, key = jax.random.split(key)
        devices = problem.padded.num_devices
        start = start_on(problem, jax.random.randint(device_key, (self.batch,), 0, devices))
        end = self._run(params, problem, start, key, greedy=0)
        makespan_s = step_makespans(problem, start, end, links)
        best = jnp.argmin(makespan_s, axis=-1)
        return Explored(
            lesson=Lesson(start=start, end=end, advantage=advantages(makespan_s)),
            placement=jax.vmap(placement_at, in_axes=(None, 0, 0, 0))(
                problem, start, end, best
            ),
            makespan_s=makespan_s.min(-1),
        )

    def loss(
        self,
        params: chex.ArrayTree,
        problem: PolicyInputs,
        lesson: Lesson,
        update: chex.Array,
    ) -> chex.Array:
        """Returns REINFORCE's surrogate per step, less the entropy bonus, `[]`."""
        log_p, entropy = self.log_prob(params, problem, lesson.start, lesson.end)
        bonus = self.entropy_weight * 0.5 ** (update.astype(jnp.float32) / self.entropy_halving)
        steps = jnp.maximum(problem.padded.num_tasks, 1).astype(jnp.float32)
        gain = lesson.advantage * log_p + bonus * entropy
        return -gain.sum(-1).mean() / steps

    def log_prob(
        self,
        params: chex.ArrayTree,
        problem: PolicyInputs,
        start: chex.Array,
        end: chex.Array,
    ) -> tuple[chex.Array, chex.Array]:
        """Returns log-probability and entropy of every step, `[B, N]`, 0 after the last.

        The steps of episodes from `start` to `end` `[B, N]` are recomputed one by one, here
        and again for the gradient: no embeddings are kept.
        """
        policy = self.policy
        tables: Tables = act(policy, params, "tables", problem)

        @jax.checkpoint
        def step(
            params: chex.ArrayTree, tables: Tables, step: chex.Array
        ) -> tuple[chex.Array, chex.Array]:
            placement = placement_at(problem, start, end, step)
            logits = act(policy, params, "logits", problem, tables, placement, step)
            chosen = end[:, tables.order[step]]
            return _categorical(logits, chosen, step < problem.padded.num_tasks)

        steps = jnp.arange(problem.padded.padded_tasks, dtype=jnp.int32)
        log_p, entropy = jax.lax.map(lambda t: step(params, tables, t), steps)
        return log_p.T, entropy.T

    def propose(
        self,
        params: chex.ArrayTree,
        problem: PolicyInputs,
        key: chex.PRNGKey,
        count: int,
        links: str,
    ) -> chex.Array:
        """Returns placements `[count, N]`, the ends of episodes; consumes the key.

        The first starts on the device that would run everything soonest and takes the
        likeliest choices; the others are drawn as in training.
        """
        del links
        device_key, key = jax.random.split(key)
        devices = problem.padded.num_devices
        device = jax.random.randint(device_key, (count,), 0, devices)
        total_s = problem.padded.compute_s.sum(0)
        device = device.at[0].set(jnp.argmin(total_s).astype(jnp.int32))
        return self._run(params, problem, start_on(problem, device), key, greedy=1)

    def _run(
        self,
        params: chex.ArrayTree,
        problem: PolicyInputs,
        start: chex.Array,
        key: chex.PRNGKey,
        greedy: int,
    ) -> chex.Array:
        """Returns the ends `[B, N]` of episodes; the first `greedy` take likeliest choices."""
        policy = self.policy
        tables: Tables = act(policy, params, "tables", problem)

        def step(
            placement: chex.Array, inputs: tuple[chex.Array, chex.PRNGKey]
        ) -> tuple[chex.Array, None]:
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


def start_on(problem: PolicyInputs, device: chex.Array) -> chex.Array:
    """Returns placements `[B, N]` of all tasks on one device `[B]`.

    What that one cannot run is where it is fastest.
    """
    compute_s = jnp.asarray(problem.padded.compute_s)[:-1]
    fastest = jnp.argmin(compute_s, axis=-1).astype(jnp.int32)
    able = jnp.isfinite(compute_s).T[device]
    return jnp.where(able, device[:, None].astype(jnp.int32), fastest[None])


def placement_at(
    problem: PolicyInputs, start: chex.Array, end: chex.Array, step: chex.Array
) -> chex.Array:
    """Returns the placement before a step `[]` of episodes from `start` to `end` `[..., N]`."""
    moved = jnp.asarray(problem.topological_rank)[:-1] < step
    return jnp.where(jnp.broadcast_to(moved, start.shape), end, start)


def step_makespans(
    problem: PolicyInputs, start: chex.Array, end: chex.Array, links: str
) -> chex.Array:
    """Simulates episodes from `start` to `end` `[B, N]` before every step and at the end.

    Returns:
      Makespans `[B, N + 1]`, seconds.
    """
    batch, size = start.shape
    total = batch * (size + 1)
    count = -(-total * max(size, 1) // ENTRIES)
    chunk = -(-total // count)

    def run(index: chex.Array) -> chex.Array:
        episode, step = jnp.minimum(index // (size + 1), batch - 1), index % (size + 1)
        placements = jax.vmap(placement_at, in_axes=(None, 0, 0, 0))(
            problem, start[episode], end[episode], step
        )
        return simulate_padded(problem.padded, placements, links=links).makespan_s

    index = jnp.arange(count * chunk).reshape(count, chunk)
    return jax.lax.map(run, index).reshape(-1)[:total].reshape(batch, size + 1)


def advantages(makespan_s: chex.Array) -> chex.Array:
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


def _categorical(
    logits: chex.Array, chosen: chex.Array, real: chex.Array
) -> tuple[chex.Array, chex.Array]:
    """Log-probability `[B]` of the choice and entropy `[B]`; 0 where the step is not real."""
    legal = jnp.isfinite(logits)
    log_p = jnp.where(legal, jax.nn.log_softmax(logits, axis=-1), 0.0)
    entropy = -(jnp.where(legal, jnp.exp(log_p), 0.0) * log_p).sum(-1)
    picked = jnp.take_along_axis(log_p, chosen[:, None], axis=-1)[:, 0]
    return jnp.where(real, picked, 0.0), jnp.where(real, entropy, 0.0)
