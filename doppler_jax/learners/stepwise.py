"""Methods that choose a (task, device) pair at each step, on the list schedule of DOPPLER.

Unlike DOPPLER's own rollout, every step looks at all tasks of the frontier. What a step
looked at is too large to keep, so a loss runs the recorded actions again, some at a time.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from chex import Array, ArrayTree, PRNGKey

from doppler_jax.learners.learner import EpisodeLearner, Explored
from doppler_jax.policies import model
from doppler_jax.policies.device_features import Choice, device_features
from doppler_jax.policies.features import PolicyInputs, with_features
from doppler_jax.policies.list_schedule import ListSchedule, append, begin
from doppler_jax.policies.model import Features, PolicyConfig
from doppler_jax.policies.place import PlaceTables, device_logits
from doppler_jax.policies.rollout import Actions, categorical, draw_index, no_members, teach
from doppler_jax.simulator.batches import simulate_padded
from doppler_jax.training.reinforce import CHUNK, normalised_advantage
from doppler_jax.types import pytree

IMITATED = 30
"""Updates that imitate the critical-path teacher before the policy gradient begins."""

ENTROPY_WEIGHT, ENTROPY_HALVING = 1e-2, 200
"""Of the entropy bonus: at the start, and the updates after which it has halved."""


NUM_DYNAMIC = 3
"""Features of the state: placed, start, finish."""


@pytree
class Pairs:
    """The choices of a step: W heads of chains, D devices."""

    logits: Array  # [W, D] of one softmax; -inf where the choice is not legal
    est_s: Array  # [W, D] earliest start


@pytree
class StepwiseLesson:
    """B episodes and what the log-probability of each weighs."""

    actions: Actions  # [B, T]
    weight: Array  # [B]


def frontier(problem: PolicyInputs, state: ListSchedule) -> Array:
    """Returns which heads of chains may be placed next, bool `[W]`."""
    return (state.missing == 0) & (state.head != problem.padded.padded_tasks)


def place_logits(
    tables: PlaceTables, problem: PolicyInputs, state: ListSchedule
) -> tuple[Array, Array]:
    """Returns PLC's logits of every head on every device, and its start there, `[W, D]`."""
    on = (state.device[:, None] == jnp.arange(problem.padded.num_devices)[None]).astype(
        tables.member.dtype
    )
    members = (on.T @ tables.member) / jnp.maximum(on.sum(0), 1.0)[:, None]

    def look(task: Array) -> tuple[Array, Array, Array]:
        choice = Choice(problem, state, task)
        seen = device_features(choice, tables.kernel.shape[0])
        return seen, choice.est_s, choice.allowed

    features, est_s, allowed = jax.vmap(look)(state.head)
    members = jnp.broadcast_to(members, (len(state.head), *members.shape))
    logits = device_logits(tables, state.head, members, features, allowed)
    return logits, est_s


Chooser = Callable[[ListSchedule], Pairs]
"""Gives the choices in a state of the list schedule."""


def run(
    choose: Chooser, problem: PolicyInputs, draw: Array, *, greedy: bool = False
) -> tuple[Actions, Array]:
    """Runs an episode: actions `[T]` and the placement `[N]`.

    Args:
      choose: the policy on the problem.
      problem: the problem.
      draw: `[T, 2]` of [0, 1), for the task and the device of each step.
      greedy: takes the likeliest pair instead; the draws are 0 then.
    """
    padded = problem.padded

    def step(state: ListSchedule, draw: Array) -> tuple[ListSchedule, Actions]:
        pairs = choose(state)
        # With the bound an empty frontier has weights 0 and not nan.
        most = pairs.logits.max(initial=jnp.finfo(jnp.float32).min)
        weight = jnp.exp(pairs.logits - most)
        if greedy:
            weight = (pairs.logits == most).astype(jnp.float32)
        slot = draw_index(weight.sum(1), draw[0])
        device = draw_index(weight[slot], draw[1])
        possible = frontier(problem, state).any()
        task = jnp.where(possible, state.head[slot], padded.padded_tasks)
        start_s = pairs.est_s[slot, device]
        state = append(problem, no_members(problem), state, task, device, start_s)
        return state, Actions(task=task, device=device)

    state, actions = jax.lax.scan(step, begin(problem, no_members(problem)), draw)
    return actions, jnp.where(state.device[:-1] == padded.num_devices, 0, state.device[:-1])


def log_prob(
    choose: Chooser, problem: PolicyInputs, actions: Actions, kept_steps: int
) -> tuple[Array, Array]:
    """Returns log-probability and entropy of an episode's choices, `[]` each.

    Differentiable, in the memory that `kept_steps` take.
    """
    padded = problem.padded
    devices = jnp.arange(padded.num_devices)

    def step(state: ListSchedule, action: Actions) -> tuple[ListSchedule, tuple[Array, Array]]:
        pairs = choose(state)
        real = action.task != padded.padded_tasks
        chosen = (state.head == action.task)[:, None] & (devices == action.device)[None]
        judged = categorical(pairs.logits.reshape(1, -1), chosen.reshape(1, -1), real[None])
        start_s = jnp.where(chosen & real, pairs.est_s, 0.0).sum()
        state = append(problem, no_members(problem), state, action.task, action.device, start_s)
        return state, (judged[0][0], judged[1][0])

    @jax.checkpoint
    def steps(state: ListSchedule, part: Actions) -> tuple[ListSchedule, tuple[Array, Array]]:
        return jax.lax.scan(step, state, part)

    spare = -padded.padded_tasks % kept_steps
    parts = Actions(
        task=jnp.pad(actions.task, (0, spare), constant_values=padded.padded_tasks),
        device=jnp.pad(actions.device, (0, spare)),
    )
    parts = jax.tree.map(lambda array: array.reshape(-1, kept_steps), parts)
    _, (log_p, entropy) = jax.lax.scan(steps, begin(problem, no_members(problem)), parts)
    return log_p.sum(), entropy.sum()


def sample(
    choose: Chooser, problem: PolicyInputs, key: PRNGKey, batch: int
) -> tuple[Actions, Array]:
    """Returns the actions `[B, T]` and placements `[B, N]` of sampled episodes."""
    draw = jax.random.uniform(key, (batch, problem.padded.padded_tasks, 2))
    return jax.vmap(lambda one: run(choose, problem, one))(draw)


@dataclasses.dataclass(frozen=True)
class Stepwise(EpisodeLearner):
    """Settings of such a method; what differs between them is `chooser`.

    REINFORCE with normalised advantages, after `IMITATED` updates that imitate the
    critical-path teacher; its episodes are simulated and counted like all others.
    """

    kept_steps: ClassVar[int]
    """Steps of which a gradient keeps in memory what they looked at."""

    batch: int = 32
    minibatches: int = 2
    learning_rate: float = 2e-3
    width: int = 32
    rounds: int = 3
    features: Features = "position"

    @abc.abstractmethod
    def chooser(self, params: ArrayTree, problem: PolicyInputs) -> Chooser:
        """Returns the policy on a problem; what all episodes share is computed once."""

    @property
    def config(self) -> PolicyConfig:
        """Of the networks, which are DOPPLER's own."""
        return PolicyConfig(width=self.width, rounds=self.rounds, features=self.features)

    def init(self, key: PRNGKey, problem: PolicyInputs) -> ArrayTree:
        """Returns fresh parameters; the key is consumed."""
        return model.init_params(key, self.config, problem)

    def explore(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, update: Array, links: str
    ) -> Explored:
        """Returns episodes of the teacher in the first updates, of the policy afterwards."""

        def imitated(key: PRNGKey) -> tuple[Actions, Array]:
            keys = jax.random.split(key, self.batch)
            episodes = jax.vmap(teach, in_axes=(0, None))(keys, problem)
            return episodes.actions, episodes.placement

        def drawn(key: PRNGKey) -> tuple[Actions, Array]:
            return sample(self.chooser(params, problem), problem, key, self.batch)

        is_taught = update < IMITATED
        actions, placement = jax.lax.cond(is_taught, imitated, drawn, key)
        makespan_s = simulate_padded(problem.padded, placement, links=links).makespan_s
        weight = jnp.where(is_taught, 1.0, normalised_advantage(makespan_s))
        return Explored(
            lesson=StepwiseLesson(actions=actions, weight=weight),
            placement=placement,
            makespan_s=makespan_s,
        )

    def loss(
        self, params: ArrayTree, problem: PolicyInputs, lesson: StepwiseLesson, update: Array
    ) -> Array:
        """Returns minus the mean of weighted log-probability and entropy bonus, per step."""
        choose = self.chooser(params, problem)

        def judge(actions: Actions) -> tuple[Array, Array]:
            return log_prob(choose, problem, actions, self.kept_steps)

        log_p, entropy = jax.lax.map(judge, lesson.actions, batch_size=CHUNK)
        bonus = ENTROPY_WEIGHT * 0.5 ** (update.astype(jnp.float32) / ENTROPY_HALVING)
        bonus = jnp.where(update < IMITATED, 0.0, bonus)
        steps = jnp.maximum(problem.padded.num_tasks, 1).astype(log_p.dtype)
        return -(lesson.weight * log_p + bonus * entropy).mean() / steps

    def draw(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, count: int, links: str
    ) -> Array:
        """Returns the greedy placement and `count - 1` samples, `[count, N]`."""
        choose = self.chooser(params, problem)
        _, placements = sample(choose, problem, key, count)
        nothing = jnp.zeros((problem.padded.padded_tasks, 2))
        _, likeliest = run(choose, problem, nothing, greedy=True)
        return placements.at[0].set(likeliest)


@dataclasses.dataclass(frozen=True)
class Joint(Stepwise):
    """A joint policy: DOPPLER's networks under one softmax over (frontier task, device) pairs.

    An ablation: the logit of a pair is SEL's score of the task plus PLC's logit of the device,
    on the same features, so that DOPPLER's factored choice is all that differs.
    """

    name: ClassVar[str] = "joint"
    kept_steps: ClassVar[int] = 64

    def chooser(self, params: ArrayTree, problem: PolicyInputs) -> Chooser:
        """Returns the policy on a problem, whose tables serve all episodes."""
        tables = model.apply(params, self.config, problem)

        def choose(state: ListSchedule) -> Pairs:
            logits, est_s = place_logits(tables.place, problem, state)
            logits = logits + tables.score[state.head][:, None]
            possible = frontier(problem, state)[:, None]
            return Pairs(logits=jnp.where(possible, logits, -jnp.inf), est_s=est_s)

        return choose


@dataclasses.dataclass(frozen=True)
class PerStep(Stepwise):
    """DOPPLER with message passing at every step, the paper's ablation of once per episode.

    At each step the encoder runs again and sees, beside the static features of every task,
    whether it is placed and when it starts and finishes in the list schedule so far. The
    choice is factored as DOPPLER's: SEL's softmax over the frontier, then PLC's over devices.
    """

    name: ClassVar[str] = "per_step"
    kept_steps: ClassVar[int] = 4

    batch: int = 16
    minibatches: int = 1

    def init(self, key: PRNGKey, problem: PolicyInputs) -> ArrayTree:
        """Returns fresh parameters; the key is consumed."""
        rows = problem.task_features.shape[0]
        seen = with_features(problem, jnp.zeros((rows, NUM_DYNAMIC)))
        return model.init_params(key, self.config, seen)

    def chooser(self, params: ArrayTree, problem: PolicyInputs) -> Chooser:
        """Returns the policy on a problem; steps share nothing."""

        def choose(state: ListSchedule) -> Pairs:
            placed = state.device != problem.padded.num_devices
            times_s = jnp.stack([state.start_s, state.finish_s], axis=-1)
            times = jnp.log1p(jnp.where(placed[:, None], times_s, 0.0) / problem.unit_s)
            dynamic = jnp.concatenate([placed[:, None].astype(times.dtype), times], axis=-1)
            tables = model.apply(params, self.config, with_features(problem, dynamic))

            logits, est_s = place_logits(tables.place, problem, state)
            possible = frontier(problem, state)
            scores = jnp.where(possible, tables.score[state.head], -jnp.inf)
            # A row that is masked, or an empty frontier, must not make a gradient of nan.
            scores = jax.nn.log_softmax(jnp.where(possible.any(), scores, 0.0))
            legal = possible[:, None] & jnp.isfinite(logits)
            logits = jax.nn.log_softmax(jnp.where(possible[:, None], logits, 0.0), axis=-1)
            return Pairs(
                logits=jnp.where(legal, scores[:, None] + logits, -jnp.inf), est_s=est_s
            )

        return choose
