"""GiPH: a policy that improves a placement move by move, by REINFORCE."""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from chex import Array, ArrayTree, PRNGKey

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.learners.learner import EpisodeLearner, Explored
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.simulator.batches import simulate_padded
from doppler_jax.types import pytree

MOST_STEPS = 256
"""Moves of an episode at most."""

WALKS = 32
"""Proposals that are walked at once: what they need in memory grows with their number."""


@pytree
class SearchState:
    """A placement, its simulated schedule, and the task that was moved last."""

    placement: Array  # [N] int32
    start_s: Array  # [N]
    finish_s: Array  # [N]
    makespan_s: Array  # []
    last: Array  # [] int32, N if none


@pytree
class GiphLesson:
    """What the loss reads of B episodes of K steps."""

    state: SearchState  # [B, K, ...] before each move
    move: Array  # [B, K] int32, task * D + device, or N * D where none was legal
    advantage: Array  # [B, K]


@pytree
class Walk:
    """B episodes of K moves, time first."""

    state: SearchState  # [K + 1, B, ...] before each move, and at the end
    move: Array  # [K, B] int32

    def best(self) -> tuple[Array, Array]:
        """Returns the best placement of each episode `[B, N]` and its makespan `[B]`."""
        step = self.state.makespan_s.argmin(0)
        episode = jnp.arange(len(step))
        return self.state.placement[step, episode], self.state.makespan_s[step, episode]


@dataclasses.dataclass(frozen=True)
class Giph(EpisodeLearner):
    """The method GiPH and its settings.

    A state is a whole placement with its simulated schedule, an action moves one task to
    another device, and the policy is one softmax over all legal moves, those of the task
    moved last excepted. An episode makes min(2 N, 256) moves from a random placement. A
    move's reward is by how much it shortens the makespan.

    Reference: Hu et al., "GiPH: Generalizable Placement Learning for Adaptive Heterogeneous
    Computing", MLSys 2023, arXiv 2305.14562. As published: states, actions, the mask, the
    reward, the discount, episodes of 2 N moves on small graphs, REINFORCE with a mean of
    rewards as baseline, two directions of message passing with weights of their own.
    Where we differ:
    - Their gpNet has a node per feasible (task, device), joined to its neighbours' present
      ones. Here messages pass over the task graph as it is placed, and the (task, device)
      part enters in the last layer: time there, arrival of its inputs, what its transfers
      would take more; memory and time are O(E D) either way, but with D in one layer alone.
    - Messages pass in synchronous rounds (their GiPH-k), not along the whole order.
    - The baseline is the batch's mean return at each step, and advantages are divided by the
      batch's deviation; theirs trains on one episode at a time.
    - Episodes end after 256 moves, and moves to the present device are not legal.
    """

    name: ClassVar[str] = "giph"

    batch: int = 8
    learning_rate: float = 5e-3
    width: int = 16  # of embeddings and hidden layers
    rounds: int = 3  # of message passing
    discount: float = 0.97

    def steps(self, num_tasks: int) -> int:
        """Returns the moves of an episode."""
        return min(2 * num_tasks, MOST_STEPS)

    def evaluations(self, num_tasks: int) -> int:
        """Returns how many placements an update simulates."""
        return self.batch * (self.steps(num_tasks) + 1)

    def proposal_evaluations(self, num_tasks: int) -> int:
        """Returns how many placements a proposal simulates: its start, and one per move."""
        return self.steps(num_tasks) + 1

    def init(self, key: PRNGKey, problem: PolicyInputs) -> ArrayTree:
        """Returns fresh parameters, all moves equally likely; the key is consumed."""
        size = problem.padded.padded_tasks
        nowhere = SearchState(
            placement=jnp.zeros(size, jnp.int32),
            start_s=jnp.zeros(size),
            finish_s=jnp.zeros(size),
            makespan_s=jnp.zeros(()),
            last=jnp.int32(size),
        )
        return GiphNetwork(self.width, self.rounds).init(key, problem, nowhere)["params"]

    def logits(self, params: ArrayTree, problem: PolicyInputs, state: SearchState) -> Array:
        """Returns the logits `[N * D]` of all moves, -inf where not legal."""
        network = GiphNetwork(self.width, self.rounds)
        scores: Any = network.apply({"params": params}, problem, state)
        return scores.reshape(-1)

    def explore(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, update: Array, links: str
    ) -> Explored:
        """Walks `batch` episodes from random placements; the key is consumed."""
        walk = self.walk(params, problem, key, jnp.ones(self.batch), links)
        placement, makespan_s = walk.best()
        lesson = GiphLesson(
            state=jax.tree.map(lambda leaf: leaf[:-1], walk.state),
            move=walk.move,
            advantage=step_advantage(-jnp.diff(walk.state.makespan_s, axis=0), self.discount),
        )
        return Explored(
            lesson=jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), lesson),
            placement=placement,
            makespan_s=makespan_s,
        )

    def loss(
        self, params: ArrayTree, problem: PolicyInputs, lesson: GiphLesson, update: Array
    ) -> Array:
        """Returns minus the mean, over steps, of advantage times log-probability."""

        # Recomputed in the backward pass: embeddings of all steps would not fit.
        @jax.checkpoint
        def log_prob(state: SearchState, move: Array) -> Array:
            return move_log_prob(self.logits(params, problem, state), move)

        def add(total: Array, step: GiphLesson) -> tuple[Array, None]:
            log_p = jax.vmap(log_prob)(step.state, step.move)
            return total - (step.advantage * log_p).mean(), None

        by_step = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), lesson)
        total, _ = jax.lax.scan(add, jnp.zeros(()), by_step)
        return total / lesson.move.shape[1]

    def draw(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, count: int, links: str
    ) -> Array:
        """Returns the best placements `[count, N]` of walks from random ones.

        The first walk takes the likeliest move each time, the others draw theirs. The key is
        consumed.
        """
        chunk = min(count, WALKS)
        chunks = -(-count // chunk)
        heat = jnp.ones((chunks, chunk)).at[0, 0].set(0.0)

        def some(inputs: tuple[PRNGKey, Array]) -> Array:
            return self.walk(params, problem, *inputs, links).best()[0]

        found = jax.lax.map(some, (jax.random.split(key, chunks), heat))
        return found.reshape(chunks * chunk, -1)[:count]

    def walk(
        self, params: ArrayTree, problem: PolicyInputs, key: PRNGKey, heat: Array, links: str
    ) -> Walk:
        """Walks from B random placements; the key is consumed.

        `heat` `[B]` scales the draw's noise: 1 draws from the policy, 0 takes the likeliest.
        """
        size, d = problem.padded.padded_tasks, problem.padded.num_devices
        start_key, key = jax.random.split(key)
        able = jnp.isfinite(problem.padded.compute_s[:-1])
        starts = jax.random.categorical(
            start_key, jnp.where(able, 0.0, -jnp.inf), shape=(len(heat), size)
        )

        def step(
            carry: tuple[Array, Array], key: PRNGKey
        ) -> tuple[tuple[Array, Array], tuple[SearchState, Array]]:
            placement, last = carry
            result = simulate_padded(problem.padded, placement, links=links, schedule=True)
            ran = jnp.isfinite(result.finish_s)  # padding never does
            state = SearchState(
                placement=placement,
                start_s=jnp.where(ran, result.start_s, 0.0),
                finish_s=jnp.where(ran, result.finish_s, 0.0),
                makespan_s=result.makespan_s,
                last=last,
            )
            logits = jax.vmap(self.logits, in_axes=(None, None, 0))(params, problem, state)
            noise = jax.random.gumbel(key, logits.shape)
            drawn = jnp.argmax(logits + heat[:, None] * noise, axis=1).astype(jnp.int32)
            move = jnp.where(jnp.isfinite(logits).any(1), drawn, size * d)
            placement = jax.vmap(_moved, in_axes=(0, 0, None))(placement, move, d)
            return (placement, move // d), (state, move)

        # The move after the last simulated placement is drawn in vain: one body compiles.
        keys = jax.random.split(key, self.steps(size) + 1)
        carry = (starts.astype(jnp.int32), jnp.full(len(heat), size, jnp.int32))
        _, (state, move) = jax.lax.scan(step, carry, keys)
        return Walk(state=state, move=move[:-1])


def move_log_prob(logits: Array, move: Array) -> Array:
    """Returns the log-probability `[]` of a move given logits `[N * D]`; 0 if none is legal."""
    legal = jnp.isfinite(logits)
    none = move == logits.shape[0]
    safe = jnp.where(legal | none, jnp.where(legal, logits, 0.0), -jnp.inf)
    log_p = jax.nn.log_softmax(safe)
    return jnp.where(none, 0.0, log_p[jnp.minimum(move, logits.shape[0] - 1)])


def step_advantage(gained_s: Array, discount: float) -> Array:
    """Returns how much better than the mean each move's return is, in deviations, `[K, B]`.

    The return of a move is what it and the later ones gain, `gained_s` `[K, B]`, discounted;
    the mean is over the episodes at the same step.
    """

    def back(later_s: Array, now_s: Array) -> tuple[Array, Array]:
        total_s = now_s + discount * later_s
        return total_s, total_s

    _, return_s = jax.lax.scan(back, jnp.zeros_like(gained_s[0]), gained_s, reverse=True)
    excess_s = return_s - return_s.mean(1, keepdims=True)
    spread_s = excess_s.std()
    return excess_s / jnp.where(spread_s > 0, spread_s, jnp.inf)


def _moved(placement: Array, move: Array, num_devices: int) -> Array:
    """Returns the placement `[N]` after a move; a task of N or more moves nothing."""
    return placement.at[move // num_devices].set(move % num_devices, mode="drop")


@pytree
class _Edges:
    """The E edges under a placement, padded ones from and to row N; times in seconds."""

    sender: Array  # [E] int32
    reader: Array  # [E] int32
    in_s: Array  # [E, D] transfer if the reader were on device d
    out_s: Array  # [E, D] transfer if the sender were on device d
    now_s: Array  # [E]


class GiphNetwork(nn.Module):
    """Message passing along and against the edges, and a score for every (task, device).

    Tasks and edges carry the schedule of the placement, so that what is embedded is the
    placed graph; a device is known by the tasks on it. Every step costs O(E D).
    """

    width: int
    rounds: int

    @nn.compact
    def __call__(self, problem: PolicyInputs, state: SearchState) -> Array:
        """Returns the logits `[N, D]` of moves, -inf where not legal."""
        padded = problem.padded
        rows, d = padded.compute_s.shape
        device = jnp.pad(state.placement, (0, 1))
        start_s, finish_s = jnp.pad(state.start_s, (0, 1)), jnp.pad(state.finish_s, (0, 1))
        edges = _edges(padded, device)
        arrival_s = jax.ops.segment_max(
            finish_s[edges.sender][:, None] + edges.in_s, edges.reader, rows
        )
        arrival_s = jnp.maximum(arrival_s, padded.input_ready_s)
        in_s = jax.ops.segment_sum(edges.in_s, edges.reader, rows)
        out_s = jax.ops.segment_sum(edges.out_s, edges.sender, rows)
        compute_s = jnp.where(jnp.isfinite(padded.compute_s), padded.compute_s, 0.0)
        load_s = jax.ops.segment_sum(_at(compute_s, device), device, d)

        def units(*times_s: Array) -> Array:
            scaled = jnp.stack(times_s, axis=-1) / problem.unit_s
            return jnp.sign(scaled) * jnp.log1p(jnp.abs(scaled))

        def more(times_s: Array) -> Array:
            return times_s - _at(times_s, device)[:, None]

        makespan_s = jnp.maximum(state.makespan_s, jnp.finfo(jnp.float32).tiny)
        wait_s = start_s - _at(arrival_s, device)
        node = jnp.concatenate(
            [
                problem.task_features,
                units(_at(compute_s, device), wait_s, _at(in_s, device), _at(out_s, device)),
                jnp.stack([start_s, finish_s, load_s[device]], axis=-1) / makespan_s,
            ],
            axis=-1,
        )
        edge_wait_s = start_s[edges.reader] - finish_s[edges.sender] - edges.now_s
        embedding = self._embed(node, units(edges.now_s, edge_wait_s), edges)

        tasks = jnp.arange(rows)
        real = (tasks < padded.num_tasks)[:, None]
        here = (device[:, None] == jnp.arange(d)[None]) & real
        load = jnp.broadcast_to(load_s[None], (rows, d)) / makespan_s
        move = jnp.concatenate(
            [
                units(compute_s, arrival_s - start_s[:, None], more(in_s), more(out_s)),
                jnp.stack([load - load_s[device][:, None] / makespan_s, load], axis=-1),
            ],
            axis=-1,
        )
        scores = self._score(embedding, here, move)
        legal = jnp.isfinite(padded.compute_s) & ~here & real
        legal &= (tasks != state.last)[:, None]
        return jnp.where(legal, scores, -jnp.inf)[:-1]

    def _embed(self, node: Array, edge: Array, edges: _Edges) -> Array:
        """Returns the embeddings `[N + 1, h]`; every direction has its own weights."""
        rows = node.shape[0]
        hidden = nn.Dense(self.width)(node)
        real = (edges.reader != rows - 1).astype(hidden.dtype)[:, None]
        for _ in range(self.rounds):
            heard = [hidden]
            for source, target in (
                (edges.sender, edges.reader),
                (edges.reader, edges.sender),
            ):
                sent = nn.Dense(self.width, use_bias=False)(hidden)[source]
                message = nn.leaky_relu(sent + nn.Dense(self.width)(edge)) * real
                heard.append(jax.ops.segment_sum(message, target, rows))
            new = nn.Dense(self.width)(jnp.concatenate(heard, axis=-1))
            hidden = hidden + nn.leaky_relu(new)
        return nn.LayerNorm()(hidden)

    def _score(self, embedding: Array, here: Array, move: Array) -> Array:
        """Returns scores `[N + 1, D]` from embeddings, device masks and move features."""
        on = here.astype(embedding.dtype)
        members = (on.T @ embedding) / jnp.maximum(on.sum(0), 1.0)[:, None]
        hidden = (
            nn.Dense(self.width)(embedding)[:, None]
            + nn.Dense(self.width, use_bias=False)(members)[None]
            + nn.Dense(self.width, use_bias=False)(move)
        )
        out = nn.Dense(1, kernel_init=nn.initializers.zeros)
        return out(nn.leaky_relu(hidden))[..., 0]


def _edges(padded: PaddedProblem, device: Array) -> _Edges:
    """Returns the edges under the placement `[N + 1]`.

    A tensor counts once per reader, although it travels once per device.
    """
    rows = padded.compute_s.shape[0]
    reader = jnp.asarray(padded.edge_reader)
    sender = jnp.repeat(jnp.arange(rows), padded.num_edges, total_repeat_length=reader.shape[0])
    real = (reader != rows - 1)[:, None]
    num_bytes = jnp.asarray(padded.edge_bytes)[:, None]
    latency_s, per_byte_s = map(jnp.asarray, (padded.latency_s, padded.seconds_per_byte))
    from_s, to_s = device[sender], device[reader]
    in_s = jnp.where(real, latency_s[from_s] + num_bytes * per_byte_s[from_s], 0.0)
    out_s = jnp.where(real, latency_s.T[to_s] + num_bytes * per_byte_s.T[to_s], 0.0)
    return _Edges(sender=sender, reader=reader, in_s=in_s, out_s=out_s, now_s=_at(in_s, to_s))


def _at(values: Array, device: Array) -> Array:
    """Returns the entry of each row of `[..., D]` at its own device."""
    return jnp.take_along_axis(values, device[:, None], axis=1)[:, 0]
