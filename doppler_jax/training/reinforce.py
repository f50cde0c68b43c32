"""Losses of recorded episodes and steps down their gradients: what all stages learn by.

`lesson_loss` is pure in the policy's tables; `descend_batch` is what stages 2 and 3 share:
policy gradient beside imitation of the elites.
"""

import dataclasses

import jax
import jax.numpy as jnp
from chex import Array

from doppler_jax.policies import model
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policies.rollout import Episode, PolicyTables, follow, log_prob
from doppler_jax.training.devices import AXIS, CUT, CUT_SECOND, WHOLE, cut_over
from doppler_jax.training.state import Placements, StateT, TrainState, descend, make_optimizer
from doppler_jax.types import pytree

CHUNK = 8
"""Episodes differentiated together: few enough for the cache."""


@pytree
class Lesson:
    """B episodes and what each weighs: their log-probability is raised, their entropy too."""

    episodes: Episode  # [B, ...]
    weight: Array  # [B] of the log-probability; negative to avoid an episode
    entropy_weight: Array  # [B]


def lesson_loss(problem: PolicyInputs, tables: PolicyTables, lesson: Lesson) -> Array:
    """Returns minus the weighted sum of log-probabilities and entropies, per step.

    With weights 1 / B it is the loss of imitation; with advantages / B, REINFORCE's
    surrogate, whose gradient is minus the mean of advantage times score function
    (Williams 1992).
    """
    log_p, entropy = jax.vmap(log_prob, in_axes=(None, None, 0))(
        problem, tables, lesson.episodes
    )
    steps = jnp.maximum(problem.padded.num_tasks, 1).astype(log_p.dtype)
    log_p, entropy = log_p.sum(-1) / steps, entropy.sum(-1) / steps
    return -(lesson.weight * log_p).sum() - (lesson.entropy_weight * entropy).sum()


def loss_and_gradient(
    problem: PolicyInputs, tables: PolicyTables, lesson: Lesson
) -> tuple[Array, PolicyTables]:
    """Returns `lesson_loss` and its gradient, `CHUNK` episodes at a time."""
    batch = lesson.weight.shape[0]
    count = -(-batch // CHUNK)
    size = -(-batch // count)
    padded = _pad_lesson(lesson, count * size)
    chunks = jax.tree.map(lambda a: a.reshape(count, size, *a.shape[1:]), padded)

    def add(
        total: tuple[Array, PolicyTables], part: Lesson
    ) -> tuple[tuple[Array, PolicyTables], None]:
        new = jax.value_and_grad(lesson_loss, argnums=1)(problem, tables, part)
        return jax.tree.map(jnp.add, total, new), None

    nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, tables))
    return jax.lax.scan(add, nothing, chunks)[0]


def _pad_lesson(lesson: Lesson, size: int) -> Lesson:
    """Returns the lesson as `size` episodes, the last one repeated without weight."""
    spare = size - lesson.weight.shape[0]
    return Lesson(
        episodes=jax.tree.map(
            lambda array: jnp.concatenate([array, jnp.repeat(array[-1:], spare, axis=0)]),
            lesson.episodes,
        ),
        weight=jnp.pad(lesson.weight, (0, spare)),
        entropy_weight=jnp.pad(lesson.entropy_weight, (0, spare)),
    )


def normalised_advantage(makespan_s: Array) -> Array:
    """Returns how much shorter than the mean each makespan `[B]` is, in deviations.

    A batch without spread has advantage 0; infinite makespans count as the worst finite.
    """
    finite = jnp.isfinite(makespan_s)
    worst = jnp.where(finite, makespan_s, -jnp.inf).max()
    makespan_s = jnp.where(finite, makespan_s, jnp.where(jnp.isfinite(worst), worst, 0.0))
    mean, spread = makespan_s.mean(), makespan_s.std()
    # Rounding alone gives equal makespans a spread of some 1e-7 of their mean.
    return (mean - makespan_s) / jnp.where(spread > 1e-6 * mean, spread, jnp.inf)


ELITE_SPREAD = 5e-4
"""Relative excess of the makespan that makes an elite e times less worth imitating."""


@dataclasses.dataclass(frozen=True)
class Descent:
    """Settings that stages 2 and 3 share, all that gradient steps are compiled for."""

    learning_rate: float = 1e-3
    entropy_weight: float = 1e-2  # at the start; halves every `entropy_halving` updates
    entropy_halving: int = 20
    elite_weight: float = 0.5  # of the elites' imitation beside the policy gradient


def weigh_episodes(
    episodes: Episode, advantage: Array, update: Array, settings: Descent
) -> Lesson:
    """Returns M lessons of B episodes each, with the weights of their advantages `[M, B]`."""
    batch = advantage.shape[1]
    bonus = settings.entropy_weight * 0.5 ** (
        update.astype(jnp.float32) / settings.entropy_halving
    )
    return Lesson(
        episodes=episodes,
        weight=advantage / batch,
        entropy_weight=jnp.full_like(advantage, bonus / batch),
    )


def imitate_elites(
    problem: PolicyInputs, tables: PolicyTables, elites: Placements, weight: float
) -> Lesson:
    """Returns the K elites as episodes to imitate, with `weight` in all.

    They are followed in the policy's own order.
    """
    known = jnp.isfinite(elites.makespan_s)[:, None]
    # An empty place repeats the best: its own zeros may be devices that cannot run the task.
    placements = jnp.where(known, elites.placement, elites.placement[:1])
    share = elite_shares(elites.makespan_s)
    return Lesson(
        episodes=jax.vmap(follow, in_axes=(None, None, 0))(problem, tables, placements),
        weight=weight * share,
        entropy_weight=jnp.zeros_like(share),
    )


def elite_shares(makespan_s: Array) -> Array:
    """Returns how much of their imitation each elite gets, `[K]`; all 0 if there is none.

    A share falls by e for every `ELITE_SPREAD` that the makespan exceeds the best.
    """
    best_s = makespan_s.min(initial=jnp.inf)
    excess = (makespan_s - best_s) / jnp.maximum(best_s, jnp.finfo(jnp.float32).tiny)
    known = jnp.isfinite(makespan_s)
    weight = jnp.where(known, jnp.exp(-jnp.where(known, excess, 0.0) / ELITE_SPREAD), 0.0)
    return weight / jnp.maximum(weight.sum(), 1.0)


def count_batch(state: StateT, *, episodes: int, evaluations: int) -> StateT:
    """Returns the state with an update counted, and what it took."""
    return dataclasses.replace(
        state,
        update=state.update + 1,
        episodes=state.episodes + episodes,
        evaluations=state.evaluations + evaluations,
    )


def episode_metrics(state: TrainState, loss: Array, makespan_s: Array) -> dict[str, Array]:
    """Returns what an update of simulated episodes reports, given their makespans."""
    return {
        "loss": loss,
        "makespan_mean_s": makespan_s.mean(),
        "makespan_min_s": makespan_s.min(),
        "best_makespan_s": state.best_makespan_s,
    }


def descend_batch(
    state: TrainState,
    problem: PolicyInputs,
    episodes: Episode,
    makespan_s: Array,
    policy: PolicyConfig,
    settings: Descent,
    shards: int = 1,
) -> tuple[TrainState, Array]:
    """Returns the state after M steps of the optimiser, and the mean loss.

    A step learns from B episodes, weighed by their advantages over the M B, and from all
    elites. The entropy bonus is of the episodes alone.

    Args:
      state: parameters, optimiser and elites.
      problem: the problem.
      episodes: `[M, B, ...]`.
      makespan_s: `[M, B]` seconds, simulated or measured.
      policy: sizes of the networks.
      settings: weights and learning rate.
      shards: local devices, a divisor of B, that share the work.
    """
    advantage = normalised_advantage(makespan_s.reshape(-1)).reshape(makespan_s.shape)
    drawn = weigh_episodes(episodes, advantage, state.update, settings)
    models = None
    if state.elites.makespan_s.shape[0]:
        tables = model.apply(state.params, policy, problem)
        lesson = imitate_elites(problem, tables, state.elites, settings.elite_weight)
        count = lesson.weight.shape[0]
        models = _pad_lesson(lesson, count + -count % shards)

    def run(
        state: TrainState, problem: PolicyInputs, drawn: Lesson, models: Lesson | None
    ) -> tuple[TrainState, Array]:
        def step(state: TrainState, part: Lesson) -> tuple[TrainState, Array]:
            if models is not None:
                part = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), part, models)
            axis = AXIS if shards > 1 else None
            return descend_lesson(state, problem, part, policy, settings.learning_rate, axis)

        state, loss = jax.lax.scan(step, state, drawn)
        return state, loss.mean()

    run_cut = cut_over(shards, run, (WHOLE, WHOLE, CUT_SECOND, CUT), WHOLE)
    return run_cut(state, problem, drawn, models)


def descend_lesson(
    state: TrainState,
    problem: PolicyInputs,
    lesson: Lesson,
    policy: PolicyConfig,
    learning_rate: float,
    axis: str | None = None,
) -> tuple[TrainState, Array]:
    """Returns the state after one step down the lesson's gradient, and the loss.

    Along the mesh's `axis` every device has its part of the lesson; all take the same step.
    """
    tables, pull_back = jax.vjp(lambda p: model.apply(p, policy, problem), state.params)
    loss, gradient = loss_and_gradient(problem, tables, lesson)
    if axis is not None:
        loss, gradient = jax.lax.psum((loss, gradient), axis)
    params, opt_state = descend(state, pull_back(gradient)[0], make_optimizer(learning_rate))
    return dataclasses.replace(state, params=params, opt_state=opt_state), loss
