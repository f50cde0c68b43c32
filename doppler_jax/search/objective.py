"""What a search minimises: the makespan, or a statistic of it under noise, within memory."""

import dataclasses
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from doppler_jax.graphs.build import topological_order
from doppler_jax.graphs.padded import PaddedProblem, pad_problem
from doppler_jax.objective import Objective
from doppler_jax.search.memory import MemoryTable, can_overflow, excess, make_memory_table
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.noise import Factors, draw_factors
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.simulate import PaddedResult, simulate, simulate_padded
from doppler_jax.types import Costs, Schedule, TaskGraph, pytree


@pytree
class SearchProblem:
    """The arrays that a search works on."""

    padded: PaddedProblem
    topological_rank: chex.Array  # [N] int32; padding tasks last
    factors: Factors | None  # None without noise
    memory: MemoryTable | None  # None where everything fits everywhere


@pytree
class Scores:
    """What placements are worth."""

    energy: chex.Array  # [B] to be made small: seconds, more where memory is exceeded
    value_s: chex.Array  # [B] seconds; inf where memory is exceeded


def make_search_problem(
    graph: TaskGraph,
    costs: Costs,
    objective: Objective,
    key: chex.PRNGKey,
    dtype: DTypeLike = np.float32,
) -> SearchProblem:
    """Returns the arrays of a problem; the key, which is consumed, is of the noise."""
    padded = pad_problem(graph, costs, dtype)
    factors = None
    if objective.num_noise:
        sigma = objective.noise_sigma
        factors = draw_factors(key, graph, costs.num_devices, objective.num_noise, sigma, sigma)
    memory = make_memory_table(graph, costs, padded) if can_overflow(graph, costs) else None
    rank = np.arange(padded.padded_tasks, dtype=np.int32)
    rank[topological_order(graph)] = np.arange(graph.num_tasks)
    return SearchProblem(padded=padded, topological_rank=rank, factors=factors, memory=memory)


def score(
    objective: Objective,
    problem: SearchProblem,
    placements: chex.Array,
    limit_s: chex.Array | float = jnp.inf,
) -> Scores:
    """Returns what padded placements `[B, N]` are worth, for use inside jits.

    It is computed in the precision of the problem's padded. Where the makespan is not
    below `limit_s` `[B]`, memory is not looked at, and the placement counts as one that fits.
    """
    if problem.factors is None:
        needs_times = problem.memory is not None
        times = _simulate(objective, problem, placements, schedule=needs_times)
        value_s = times.makespan_s
    else:
        draws_s = _simulate(objective, problem, placements, factors=problem.factors).makespan_s
        value_s = _statistic(objective, draws_s)
        if problem.memory is not None:
            times = _simulate(objective, problem, placements, schedule=True)
    if problem.memory is None:
        return Scores(energy=value_s, value_s=value_s)
    over = excess(
        problem.memory,
        problem.padded,
        placements,
        times.start_s,
        times.finish_s,
        value_s < limit_s,
    )
    return Scores(
        energy=value_s * (1 + over),
        value_s=jnp.where(over > 0, jnp.inf, value_s),
    )


def score_padded(
    objective: Objective, problem: SearchProblem, placements: np.ndarray, width: int
) -> Scores:
    """Returns the scores `[B]` of at most `width` padded placements, as NumPy arrays.

    `width` of them are simulated, so that calls share a compilation.
    """
    batch = np.resize(placements, (width, placements.shape[1]))
    scores = jax.device_get(_score(objective, problem, batch.astype(np.int32)))
    return jax.tree.map(lambda array: array[: len(placements)], scores)


@partial(jax.jit, static_argnames="objective")
def _score(objective: Objective, problem: SearchProblem, placements: chex.Array) -> Scores:
    return score(objective, problem, placements)


def _statistic(objective: Objective, draws_s: chex.Array) -> chex.Array:
    """Returns mean or quantile `[B]` of makespans `[K, B]`."""
    if objective.quantile is None:
        return draws_s.mean(0)
    return jnp.quantile(draws_s, objective.quantile, axis=0)


def _simulate(
    objective: Objective,
    problem: SearchProblem,
    placements: chex.Array,
    *,
    schedule: bool = False,
    factors: Factors | None = None,
) -> PaddedResult:
    return simulate_padded(
        problem.padded,
        placements,
        factors=factors,
        links=objective.guide_links,
        schedule=schedule,
    )


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The float64 oracle's word on a placement."""

    value_s: float  # the objective; inf where a device has not the memory
    makespan_s: float  # without noise
    schedule: Schedule  # without noise
    overflow: str  # "device 1 needs 3 of 2 bytes", or empty


def judge(
    graph: TaskGraph,
    costs: Costs,
    placement: np.ndarray,
    objective: Objective,
    factors: Factors | None = None,
    priority: np.ndarray | None = None,
) -> Judgement:
    """Returns what a placement `[N]` is worth by the float64 oracle.

    Args:
      graph: the task graph.
      costs: its costs.
      placement: `[N]` devices.
      objective: what counts.
      factors: the noise, if the objective has any.
      priority: `[N]` ranks of the `priority` queue, in place of `fifo`.
    """
    queue = "fifo" if priority is None else "priority"

    order: dict[str, Any] = {"queue": queue, "priority": priority}
    schedule = simulate_oracle(graph, costs, placement, links=objective.links, **order)
    makespan = value = makespan_s(schedule)
    if factors is not None:
        noisy = simulate(graph, costs, placement, objective=objective, factors=factors, **order)
        draws, level = noisy.makespan_s[:, 0], objective.quantile
        value = float(np.mean(draws) if level is None else np.quantile(draws, level))
    overflow = ""
    if can_overflow(graph, costs):
        peak, capacity = peak_memory_bytes(graph, costs, schedule), costs.capacity_bytes
        for d in np.flatnonzero(peak > capacity)[:1]:
            overflow = (
                f"device {d} needs {peak[d]:.6g} bytes of memory and has {capacity[d]:.6g}"
            )
            value = np.inf
    return Judgement(value, makespan, schedule, overflow)
