"""GiPH: a policy that improves a placement move by move, by REINFORCE."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from doppler_jax.learners.giph_network import GiphNetwork, SearchState
from doppler_jax.learners.learner import Explored
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.simulator.simulate import simulate_padded
from doppler_jax.types import pytree

MOST_STEPS = 256
"""Moves of an episode at most."""

WALKS = 32
"""Proposals that are walked at once: what they need in memory grows with their number."""


@pytree
class GiphLesson:
    """What the loss reads of B episodes of K steps."""

    state: SearchState  # [B, K, ...] before each move
    move: chex.Array  # [B, K] int32, task * D + device, or N * D where none was legal
    advantage: chex.Array  # [B, K]


@pytree
class Walk:
    """B episodes of K moves, time first."""

    state: SearchState  # [K + 1, B, ...] before each move, and at the end
    move: chex.Array  # [K, B] int32

    def best(self) -> tuple[chex.Array, chex.Array]:
        """Returns the best placement of each episode `[B, N]` and its makespan `[B]`."""
        step = self.state.makespan_s.argmin(0)
        episode = jnp.arange(len(step))
        return self.state.placement[step, episode], self.state.makespan_s[step, episode]


@dataclasses.dataclass(frozen=True)
class Giph:
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

    batch: int = 8  # episodes per update
    epochs: int = 1
    minibatches: int = 1
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

    def init(self, key: chex.PRNGKey, problem: PolicyInputs) -> chex.ArrayTree:
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

    def logits(
        self, params: chex.ArrayTree, problem: PolicyInputs, state: SearchState
    ) -> chex.Array:
        """Returns the logits `[N * D]` of all moves, -inf where not legal."""
        network = GiphNetwork(self.width, self.rounds)
        scores: Any = network.apply({"params": params}, problem, state)
        return scores.reshape(-1)

    def explore(
        self,
        params: chex.ArrayTree,
        problem: PolicyInputs,
        key: chex.PRNGKey,
        update: chex.Array,
        links: str,
    ) -> Explored:
        """Walks `batch` episodes from random placements; the key is consumed."""
        del update
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
        self,
        params: chex.ArrayTree,
        problem: PolicyInputs,
        lesson: GiphLesson,
        update: chex.Array,
    ) -> chex.Array:
        """Returns minus the mean, over steps, of advantage times log-probability."""
        del update

        # Recomputed in the backward pass: embeddings of all steps would not fit.
        @jax.checkpoint
        def log_prob(state: SearchState, move: chex.Array) -> chex.Array:
            return move_log_prob(self.logits(params, problem, state), move)

        def add(total: chex.Array, step: GiphLesson) -> tuple[chex.Array, None]:
            log_p = jax.vmap(log_prob)(step.state, step.move)
            return total - (step.advantage * log_p).mean(), None

        by_step = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), lesson)
        total, _ = jax.lax.scan(add, jnp.zeros(()), by_step)
        return total / lesson.move.shape[1]

    def propose(
        self,
        params: chex.ArrayTree,
        problem: PolicyInputs,
        key: chex.PRNGKey,
        count: int,
        links: str,
    ) -> chex.Array:
        """Returns the best placements `[count, N]` of walks from random ones.

        The first walk takes the likeliest move each time, the others draw theirs. The key is
        consumed.
        """
        chunk = min(count, WALKS)
        chunks = -(-count // chunk)
        heat = jnp.ones((chunks, chunk)).at[0, 0].set(0.0)

        def some(inputs: tuple[chex.PRNGKey, chex.Array]) -> chex.Array:
            return self.walk(params, problem, *inputs, links).best()[0]

        found = jax.lax.map(some, (jax.random.split(key, chunks), heat))
        return found.reshape(chunks * chunk, -1)[:count]

    def walk(
        self,
        params: chex.ArrayTree,
        problem: PolicyInputs,
        key: chex.PRNGKey,
        heat: chex.Array,
        links: str,
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
            carry: tuple[chex.Array, chex.Array], key: chex.PRNGKey
        ) -> tuple[tuple[chex.Array, chex.Array], tuple[SearchState, chex.Array]]:
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


def move_log_prob(logits: chex.Array, move: chex.Array) -> chex.Array:
    """Returns the log-probability `[]` of a move given logits `[N * D]`; 0 if none is legal."""
    legal = jnp.isfinite(logits)
    none = move == logits.shape[0]
    safe = jnp.where(legal | none, jnp.where(legal, logits, 0.0), -jnp.inf)
    log_p = jax.nn.log_softmax(safe)
    return jnp.where(none, 0.0, log_p[jnp.minimum(move, logits.shape[0] - 1)])


def step_advantage(gained_s: chex.Array, discount: float) -> chex.Array:
    """Returns how much better than the mean each move's return is, in deviations, `[K, B]`.

    The return of a move is what it and the later ones gain, `gained_s` `[K, B]`, discounted;
    the mean is over the episodes at the same step.
    """

    def back(later_s: chex.Array, now_s: chex.Array) -> tuple[chex.Array, chex.Array]:
        total_s = now_s + discount * later_s
        return total_s, total_s

    _, return_s = jax.lax.scan(back, jnp.zeros_like(gained_s[0]), gained_s, reverse=True)
    excess_s = return_s - return_s.mean(1, keepdims=True)
    spread_s = excess_s.std()
    return excess_s / jnp.where(spread_s > 0, spread_s, jnp.inf)


def _moved(placement: chex.Array, move: chex.Array, num_devices: int) -> chex.Array:
    """Returns the placement `[N]` after a move; a task of N or more moves nothing."""
    return placement.at[move // num_devices].set(move % num_devices, mode="drop")
