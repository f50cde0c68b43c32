"""Episodes: N steps, each SEL choosing a frontier task and PLC its device.

All functions are of one episode and are batched with `vmap`. An episode's device
features depend on its actions alone, so they are recorded, and the log-probabilities of
recorded actions are then recomputed for all steps at once, without the loop.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from chex import Array, PRNGKey

from doppler_jax.policies.device_features import DEVICE_FEATURES, Choice, device_features
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.frontier import frontier_softmax, ready_steps
from doppler_jax.policies.list_schedule import ListSchedule, append, begin
from doppler_jax.policies.place import PRECISION, PlaceTables, device_logits
from doppler_jax.policies.select import b_level_scores
from doppler_jax.types import pytree

RECORDED = 128
"""Chains up to which an episode records what SEL chose from; above, it is worked out again."""


@pytree
class PolicyTables:
    """Everything that an episode needs of a policy on a problem (`model.encode`)."""

    score: Array  # [N + 1] SEL's
    place: PlaceTables


@pytree
class Actions:
    """What an episode did: task and device of each step; N pads the tail."""

    task: Array  # [T] int32
    device: Array  # [T] int32


@pytree
class Episode:
    """Actions with what they were chosen from; T steps, D devices.

    W is the number of chains, or 0 where they are more than `RECORDED`.
    """

    actions: Actions
    heads: Array  # [T, W] int32, first unplaced task of every chain
    frontier_mask: Array  # [T, W] which of them are in the frontier
    features: Array  # [T, D, F] device features of the chosen task
    placement: Array  # [N] int32


SelectWeights = Callable[[Array, Array], Array]
"""Weights `[W]` of the chains' heads `[W]`, 0 where they are not in the frontier `[W]`."""

PlaceWeights = Callable[[Choice, Array, Array], Array]
"""Weights `[D]` of a choice, mean members `[D, m]` and features `[D, F]`."""


def sample(key: PRNGKey, problem: PolicyInputs, tables: PolicyTables) -> Episode:
    """Returns an episode drawn from the policy; the key is consumed."""

    def select(head: Array, frontier: Array) -> Array:
        scores = jnp.where(frontier, tables.score[head], -jnp.inf)
        # With the bound an empty frontier has weights 0 and not nan.
        return jnp.exp(scores - scores.max(initial=jnp.finfo(jnp.float32).min))

    def place(choice: Choice, members: Array, features: Array) -> Array:
        logits = _logits(tables, choice, members, features)
        return jnp.exp(logits - logits.max())

    draw = jax.random.uniform(key, (problem.padded.padded_tasks, 2))
    return _run(problem, tables.place.member, select, place, draw, _num_features(tables))


def greedy(problem: PolicyInputs, tables: PolicyTables) -> Episode:
    """Returns the episode of most probable choices; ties go to the first chain or device."""

    def select(head: Array, frontier: Array) -> Array:
        return _largest(jnp.where(frontier, tables.score[head], -jnp.inf))

    def place(choice: Choice, members: Array, features: Array) -> Array:
        return _largest(_logits(tables, choice, members, features))

    draw = jnp.zeros((problem.padded.padded_tasks, 2))
    return _run(problem, tables.place.member, select, place, draw, _num_features(tables))


def in_b_level_order(problem: PolicyInputs, tables: PolicyTables) -> PolicyTables:
    """Returns the tables with the largest b-level next, in place of what SEL chooses."""
    return dataclasses.replace(tables, score=b_level_scores(problem))


def greedy_plans(problem: PolicyInputs, tables: PolicyTables) -> tuple[Array, Array]:
    """Returns the greedy placements in SEL's order and in that of b-levels, and the orders.

    Both are `[2, N]`, the latter of tasks.
    """
    orders = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), tables, in_b_level_order(problem, tables)
    )
    # One after the other: a loop over many tasks is slower over two at once.
    return jax.lax.map(lambda one: plan_of(greedy(problem, one)), orders)


def plan_of(episode: Episode) -> tuple[Array, Array]:
    """Returns an episode's placement, and the order in which its tasks were placed, `[N]`."""
    return episode.placement, episode.actions.task


def teach(key: PRNGKey, problem: PolicyInputs) -> Episode:
    """Returns an episode of critical-path list scheduling, the teacher of stage 1.

    SEL takes the largest b-level in the frontier, PLC the earliest start; ties are
    broken uniformly at random, for which the key is consumed.
    """

    def select(head: Array, frontier: Array) -> Array:
        return _largest(jnp.where(frontier, problem.b_rank[head], -1))

    def place(choice: Choice, members: Array, features: Array) -> Array:
        first_s = choice.est_s.min()
        earliest = choice.est_s <= first_s * (1 + 1e-6)
        return _after(features, earliest.astype(first_s.dtype))

    draw = jax.random.uniform(key, (problem.padded.padded_tasks, 2))
    return _run(problem, no_members(problem), select, place, draw)


def follow(problem: PolicyInputs, tables: PolicyTables, placement: Array) -> Episode:
    """Returns the episode that places tasks as in `placement` `[N]`, in SEL's likeliest order.

    To imitate a placement in the order in which the policy itself will place: then what PLC
    sees when it learns is what it sees when it chooses.
    """
    where = jnp.pad(placement, (0, 1))
    devices = jnp.arange(problem.padded.num_devices)

    def select(head: Array, frontier: Array) -> Array:
        return _largest(jnp.where(frontier, tables.score[head], -jnp.inf))

    def place(choice: Choice, members: Array, features: Array) -> Array:
        return _after(features, (devices == where[choice.task]).astype(jnp.float32))

    draw = jnp.zeros((problem.padded.padded_tasks, 2))
    return _run(problem, no_members(problem), select, place, draw, _num_features(tables))


def log_prob(
    problem: PolicyInputs, tables: PolicyTables, episode: Episode
) -> tuple[Array, Array]:
    """Returns log-probability and entropy of every step's choices, `[T]` each, 0 in the tail.

    Both are sums of SEL's and PLC's. Differentiable in the tables.
    """
    task, device = episode.actions.task, episode.actions.device
    real = task != problem.padded.padded_tasks
    logits = device_logits(
        tables.place,
        task,
        _members_before(problem, tables.place.member, episode.actions),
        episode.features,
        jnp.isfinite(problem.padded.compute_s[task]),
    )
    if episode.heads.shape[1]:
        scores = jnp.where(episode.frontier_mask, tables.score[episode.heads], -jnp.inf)
        select, select_entropy = categorical(scores, (episode.heads == task[:, None]), real)
    else:
        # A step of the tail is alone in its frontier, so that its choice is certain.
        score = jnp.where(real, tables.score[task], 0.0)
        select, select_entropy = frontier_softmax(ready_steps(problem, task), score)
    chosen = device[:, None] == jnp.arange(logits.shape[1])[None]
    place, place_entropy = categorical(logits, chosen, real)
    return select + place, select_entropy + place_entropy


def _num_features(tables: PolicyTables) -> int:
    """Returns how many of the device features the policy reads."""
    return tables.place.kernel.shape[0]


def no_members(problem: PolicyInputs) -> Array:
    """Returns members `[N + 1, 1]` for episodes that do without."""
    return jnp.zeros((problem.task_features.shape[0], 1))


def _logits(tables: PolicyTables, choice: Choice, members: Array, features: Array) -> Array:
    return device_logits(tables.place, choice.task, members, features, choice.allowed)


def _after(features: Array, weight: Array) -> Array:
    """Returns the weights `[D]` of a choice that reads no features, for after these are made.

    Otherwise XLA may make them last, for which it copies, at every step, the arrays of all
    tasks that they are made of and the choice changes.
    """
    return weight + 0.0 * features.sum()


def _largest(values: Array) -> Array:
    """Returns 1 where a value `[K]` is the largest, 0 elsewhere."""
    return (values == values.max()).astype(jnp.float32)


def draw_index(weight: Array, draw: Array) -> Array:
    """Returns an index with probability proportional to `weight` `[K]`, of a draw of [0, 1).

    Never one of weight 0, whatever rounding does, unless all are; draw 0 gives the first.
    """
    width = weight.shape[0]
    if width <= 128:
        reached = _reached(weight)
        return _first_past(weight, reached, draw * reached[-1])
    size = 1 << (width.bit_length() // 2)
    blocks = jnp.pad(weight, (0, -width % size)).reshape(-1, size)
    total = blocks.sum(1)
    reached = _reached(total)
    mass = draw * reached[-1]
    block = _first_past(total, reached, mass)
    within = blocks[block]
    mass -= reached[block] - total[block]
    index = block * size + _first_past(within, _reached(within), mass)
    return jnp.minimum(index, width - 1)  # without any weight it lies in the padding


def _reached(weight: Array) -> Array:
    """Returns the sums up to each weight `[K]`, itself included."""
    # A product with a triangle of ones is faster on CPUs than a cumulative sum.
    ones = jnp.ones((weight.shape[0],) * 2)
    return jnp.matmul(jnp.tril(ones), weight, precision=PRECISION)


def _first_past(weight: Array, reached: Array, mass: Array) -> Array:
    """Returns the first of the weights above 0 that ends past `mass`, the last if none does."""
    possible = weight > 0
    passed = possible & (reached > mass)
    last = weight.shape[0] - 1 - jnp.argmax(possible[::-1])
    return jnp.where(passed.any(), jnp.argmax(passed), last).astype(jnp.int32)


def categorical(logits: Array, chosen: Array, real: Array) -> tuple[Array, Array]:
    """Log-probability of the choice and entropy, `[T]` from `[T, K]`; 0 where not real."""
    legal = jnp.isfinite(logits) & real[:, None]
    # Rows without a choice get one of logit 0, so that no gradient is undefined.
    safe = jnp.where(legal, logits, jnp.where(real[:, None], -jnp.inf, 0.0))
    log_p = jax.nn.log_softmax(safe, axis=-1)
    finite = jnp.where(legal, log_p, 0.0)
    entropy = -(jnp.where(legal, jnp.exp(finite), 0.0) * finite).sum(-1)
    return jnp.where(chosen, finite, 0.0).sum(-1), entropy


def _members_before(problem: PolicyInputs, member: Array, actions: Actions) -> Array:
    """Mean member `[T, D, m]` over the tasks that each device had before each step."""
    num_devices = problem.padded.num_devices
    real = actions.task != problem.padded.padded_tasks
    on = (actions.device[:, None] == jnp.arange(num_devices)[None]) & real[:, None]
    on = on.astype(member.dtype)
    rows = jnp.concatenate([member, jnp.ones_like(member[:, :1])], axis=1)[actions.task]
    added = on[:, :, None] * rows[:, None, :]
    total = _sums_before(added.reshape(len(real), -1)).reshape(added.shape)
    return total[:, :, :-1] / jnp.maximum(total[:, :, -1:], 1.0)


def _sums_before(rows: Array) -> Array:
    """Returns, for each row `[T, K]`, the sum of the rows before it.

    By products with triangles, within blocks and between them: on CPUs far cheaper than a
    cumulative sum, above all its gradient.
    """
    steps, block = rows.shape[0], 16
    rows = jnp.pad(rows, ((0, -steps % block), (0, 0))).reshape(-1, block, rows.shape[1])
    count = rows.shape[0]
    earlier = jnp.tril(jnp.ones((block, block)), -1)
    within = jnp.einsum("st,btk->bsk", earlier, rows, precision=PRECISION)
    earlier = jnp.tril(jnp.ones((count, count)), -1)
    before = jnp.matmul(earlier, rows.sum(1), precision=PRECISION)
    return (within + before[:, None]).reshape(count * block, -1)[:steps]


def _run(
    problem: PolicyInputs,
    member: Array,
    select: SelectWeights,
    place: PlaceWeights,
    draw: Array,
    num_features: int = len(DEVICE_FEATURES),
) -> Episode:
    """Runs an episode: draws a task of the frontier, then its device.

    Args:
      problem: the problem.
      member: `[N + 1, m]` what PLC averages over a device's tasks.
      select: SEL.
      place: PLC.
      draw: `[T, 2]` of [0, 1), for the task and the device of each step.
      num_features: of the device features, how many are recorded and seen; by default all.
    """
    padded = problem.padded
    nobody = padded.padded_tasks
    recorded = len(padded.chain_head) if len(padded.chain_head) <= RECORDED else 0

    def step(state: ListSchedule, draw: Array) -> tuple[ListSchedule, tuple[Array, ...]]:
        frontier = (state.missing == 0) & (state.head != nobody)
        chosen = state.head[draw_index(select(state.head, frontier), draw[0])]
        task = jnp.where(frontier.any(), chosen, nobody)
        choice = Choice(problem, state, task)
        features = device_features(choice, num_features)
        members = state.member / jnp.maximum(state.count, 1.0)[:, None]
        device = draw_index(place(choice, members, features), draw[1])
        record = (task, device, state.head[:recorded], frontier[:recorded], features)
        return append(problem, member, state, task, device, choice.est_s[device]), record

    state = begin(problem, member)
    state, records = jax.lax.scan(step, state, draw)
    task, device, heads, frontier_mask, features = records
    return Episode(
        actions=Actions(task=task, device=device),
        heads=heads,
        frontier_mask=frontier_mask,
        features=features,
        placement=jnp.where(state.device[:-1] == padded.num_devices, 0, state.device[:-1]),
    )
