"""The vectorised simulator: many placements of one graph at once, jit-compiled.

`simulate` is for users, in float64 and on all devices; `simulate_padded` is the pure core
for use inside other jits. The formulations are modules of their own (docs/simulator.md).
"""

import dataclasses
from collections.abc import Callable
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from numpy.typing import ArrayLike

from doppler_jax.costs.build import check_costs
from doppler_jax.graphs.padded import PaddedProblem, bucket_size, pad_problem
from doppler_jax.objective import Objective
from doppler_jax.simulator.chain_slots import run_chain_slots
from doppler_jax.simulator.disciplines import QUEUES
from doppler_jax.simulator.duplex_links import run_duplex_links
from doppler_jax.simulator.handling import handling_seconds
from doppler_jax.simulator.lockstep import Run, run_batch
from doppler_jax.simulator.noise import Factors, draw_factors
from doppler_jax.simulator.queue_trees import queue_order
from doppler_jax.simulator.ready_queues import run_ready_queues
from doppler_jax.types import Costs, TaskGraph, pytree

WIDE = (56, 224)
"""Chains beyond which queues are faster than slots, under `fifo` and under `priority`."""

SHARD_AT = 64
"""Placements per device from which on several devices share a call."""


@pytree
class SimulationResult:
    """Outcome of B placements of N tasks, in seconds; no schedule unless asked for.

    With K draws of noise every array has a leading axis K.
    """

    makespan_s: chex.Array  # [B]
    start_s: chex.Array | None  # [B, N]
    finish_s: chex.Array | None  # [B, N]


def simulate(
    graph: TaskGraph,
    costs: Costs,
    placements: ArrayLike,
    *,
    objective: Objective = Objective(),  # noqa: B008, frozen
    queue: str = "fifo",
    priority: ArrayLike | None = None,
    factors: Factors | None = None,
    key: chex.PRNGKey | None = None,
    schedule: bool = True,
) -> SimulationResult:
    """Simulates the work-conserving execution of placements.

    Runs in chunks, on all local devices and cores, whatever the size of the batch.

    Args:
      graph: the task graph, N tasks; N = 0 is legal.
      costs: its costs on D devices, seconds.
      placements: `[B, N]` int, device of each task; `[N]` is taken as one placement.
      objective: its links, see `simulate_oracle`, and the number of draws of noise and their
        sigma; its statistic is the caller's to take, see `makespan_statistics`.
      queue: `fifo`; `priority`, where a device starts the ready task of least rank; or
        `random`, the same with permutations as ranks, see `random_ranks`.
      priority: `[N]` or `[B, N]` ranks for `priority`; `[N]` or `[K, N]` for `random`, a
        permutation per draw.
      factors: K draws of noise, from `draw_factors`, instead of the objective's.
      key: draws the factors where the objective has noise and none are given; consumed.
      schedule: whether start and finish of every task are wanted, or makespans only.

    Returns:
      Makespans, and with `schedule` the start and finish of every task, as NumPy arrays;
      with a leading axis K if there are draws, by `factors` or by `[K, N]` permutations.
      Computed in float64, as by the oracle: in float32 rounding can order two events that
      are close, and move a makespan by percents.

    Raises:
      ValueError: a shape or a name is wrong, a placement names a device that does not
        exist, the objective's noise has neither factors nor a key, or the ranks of `random`
        are no permutation.
    """
    check_costs(graph, costs)
    placements = check_placements(graph, costs, placements)
    factors = _factors(graph, costs, objective, factors, key)
    ranks = _check_priority(graph, placements, queue, priority)
    if ranks is not None and ranks.ndim == 3:
        factors = factors or _no_noise(len(ranks), graph, costs)
        if len(ranks) != len(factors.compute):
            raise ValueError(
                f"priority has {len(ranks)} permutations, factors {len(factors.compute)} draws"
            )
    with jax.enable_x64(True):
        padded = pad_problem(graph, costs, np.float64)
        result = _on_all_devices(padded, placements, ranks, factors, objective.links, schedule)
    start_s, finish_s = result.start_s, result.finish_s
    if start_s is None or finish_s is None:
        return result
    n = graph.num_tasks
    return dataclasses.replace(result, start_s=start_s[..., :n], finish_s=finish_s[..., :n])


def check_placements(graph: TaskGraph, costs: Costs, placements: ArrayLike) -> np.ndarray:
    """Returns the placements as int32 `[B, N]`, or raises a `ValueError` that says why not."""
    array = np.atleast_2d(np.asarray(placements))
    if array.ndim != 2 or array.shape[1] != graph.num_tasks:
        raise ValueError(
            f"placements have shape {np.shape(placements)}, expected [B, {graph.num_tasks}]"
        )
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"placements must hold integers, hold {array.dtype}")
    bad = np.argwhere((array < 0) | (array >= costs.num_devices))
    if len(bad):
        b, v = bad[0]
        raise ValueError(
            f"placement {b} puts task {v} on device {array[b, v]}; "
            f"devices are 0 to {costs.num_devices - 1}"
        )
    return array.astype(np.int32)


def _check_priority(
    graph: TaskGraph, placements: np.ndarray, queue: str, priority: ArrayLike | None
) -> np.ndarray | None:
    """Returns ranks `[B, N]`, or `[K, 1, N]` where every draw has its own."""
    if queue not in QUEUES:
        raise ValueError(f"unknown queue {queue!r}; known: {', '.join(QUEUES)}")
    if queue == "in_order":
        raise ValueError("queue 'in_order' is simulated by `simulate_oracle` only, so far")
    if (queue == "fifo") != (priority is None):
        raise ValueError("give a priority with queue 'priority' or 'random', and only there")
    if priority is None:
        return None
    ranks = np.asarray(priority, np.float64)
    rows = (1, len(placements)) if queue == "priority" else (len(ranks),)
    if ranks.ndim not in (1, 2) or ranks.shape[-1] != graph.num_tasks:
        raise ValueError(f"priority has shape {ranks.shape}, expected [.., {graph.num_tasks}]")
    if queue == "random":
        expected = np.arange(graph.num_tasks)
        if not np.array_equal(np.sort(ranks, -1), np.broadcast_to(expected, ranks.shape)):
            raise ValueError(f"queue 'random' needs permutations of 0 to {len(expected) - 1}")
        if ranks.ndim == 2:
            return ranks[:, None]
    elif ranks.ndim == 2 and len(ranks) not in rows:
        raise ValueError(
            f"priority has shape {ranks.shape}, expected [N] or [B, N] for {len(placements)} "
            "placements"
        )
    return np.broadcast_to(ranks, placements.shape)


def _factors(
    graph: TaskGraph,
    costs: Costs,
    objective: Objective,
    factors: Factors | None,
    key: chex.PRNGKey | None,
) -> Factors | None:
    """Returns the factors given, or those that the objective asks for."""
    if factors is not None:
        _check_factors(graph, costs, factors)
    elif objective.num_noise:
        if key is None:
            raise ValueError(
                f"the objective has {objective.num_noise} draws of noise; give factors or a key"
            )
        sigma = objective.noise_sigma
        factors = draw_factors(key, graph, costs.num_devices, objective.num_noise, sigma, sigma)
    return factors


def _check_factors(graph: TaskGraph, costs: Costs, factors: Factors) -> None:
    draws = np.shape(factors.compute)[:1]
    for name, expected in (
        ("compute", (*draws, graph.num_tasks)),
        ("transfer", (*draws, graph.num_tensors, costs.num_devices)),
    ):
        array = np.asarray(getattr(factors, name))
        if array.shape != expected or not draws:
            raise ValueError(f"factors.{name} has shape {array.shape}, expected {expected}")
        if not (np.isfinite(array) & (array > 0)).all():
            raise ValueError(f"factors.{name} must hold positive numbers")


def _no_noise(draws: int, graph: TaskGraph, costs: Costs) -> Factors:
    return Factors(
        compute=np.ones((draws, graph.num_tasks)),
        transfer=np.ones((draws, graph.num_tensors, costs.num_devices)),
    )


def _on_all_devices(
    padded: PaddedProblem,
    placements: np.ndarray,
    ranks: np.ndarray | None,
    factors: Factors | None,
    links: str,
    schedule: bool,
) -> SimulationResult:
    """Simulates `[B, N]` on all local devices; returns NumPy arrays of the padded tasks."""
    batch, tasks = placements.shape
    shards = max(min(jax.local_device_count(), batch // SHARD_AT), 1)
    rows, columns = (0, -batch % shards), (0, padded.padded_tasks - tasks)
    placements = np.pad(placements, (rows, columns))
    if ranks is not None:
        ranks = np.pad(ranks, (rows, columns) if ranks.ndim == 2 else ((0, 0), (0, 0), columns))
    if factors is not None:
        tensors = (0, bucket_size(factors.transfer.shape[1]) - factors.transfer.shape[1])
        factors = Factors(
            compute=np.pad(factors.compute, ((0, 0), columns)),
            transfer=np.pad(factors.transfer, ((0, 0), tensors, (0, 0))),
        )
    per_draw = ranks is not None and ranks.ndim == 3
    run = sharded(shards, links, schedule, per_draw, factors is not None)
    result = run(padded, placements, ranks, factors)
    if factors is None:
        return jax.tree.map(lambda a: np.asarray(a)[:batch], result)
    return jax.tree.map(lambda a: np.asarray(a)[:, :batch], result)


@cache
def sharded(
    shards: int,
    links: str = "parallel",
    schedule: bool = False,
    ranks_per_draw: bool = False,
    has_draws: bool = False,
) -> Callable[..., SimulationResult]:
    """Returns `simulate_padded`, jitted for batches cut over so many local devices.

    It takes padded, placements, priority or None, and factors or None; the batch must be a
    multiple of `shards`. On CPUs give every core a device (`jax_num_cpu_devices`).
    """
    run = partial(simulate_padded, links=links, schedule=schedule)
    if shards == 1:
        return run
    mesh = Mesh(np.array(jax.local_devices()[:shards]), ("batch",))
    whole, cut = PartitionSpec(), PartitionSpec("batch")
    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(whole, cut, whole if ranks_per_draw else cut, whole),
            out_specs=PartitionSpec(None, "batch") if has_draws else cut,
            check_vma=False,
        )
    )


@partial(jax.jit, static_argnames=("links", "schedule"))
def simulate_padded(
    padded: PaddedProblem,
    placements: chex.Array,
    priority: chex.Array | None = None,
    factors: Factors | None = None,
    *,
    links: str = "parallel",
    schedule: bool = False,
) -> SimulationResult:
    """Simulates padded placements `[B, N]`; pure, unchecked, for use inside other jits.

    Works in the precision of the padded: training uses float32. With `priority` `[B, N]`
    the queue is `priority`, without it `fifo`. With `factors` of K draws every result has a
    leading axis K, and priorities may be `[K, 1, N]`, of each draw its own. `vmap` over
    stacked padded problems mixes graphs of a bucket in one call.
    """
    spare = padded.padded_tasks + 1 - placements.shape[1]
    placements = jnp.pad(placements, ((0, 0), (0, spare))).astype(jnp.int32)
    if priority is not None:
        spare = padded.padded_tasks + 1 - priority.shape[-1]
        priority = jnp.pad(priority, (*((0, 0),) * (priority.ndim - 1), (0, spare)))
    handling_s = handling_seconds(padded, placements)
    run, by_order = _formulation(padded, links, priority is not None)

    def one_draw(noise: Factors | None, rank: chex.Array | None) -> SimulationResult:
        if rank is not None:
            rank = jnp.broadcast_to(rank, placements.shape)
            rank = queue_order(rank) if by_order else rank
        shared = _with_noise(padded, noise)
        makespan_s, *times = run_batch(
            partial(run, schedule=schedule), shared, placements, rank, handling_s
        )
        start_s, finish_s = (a[:, :-1] for a in times) if schedule else (None, None)
        return SimulationResult(makespan_s=makespan_s, start_s=start_s, finish_s=finish_s)

    if factors is None:
        return one_draw(None, priority)
    if priority is None or priority.ndim == 2:
        return jax.lax.map(lambda noise: one_draw(noise, priority), factors)
    return jax.lax.map(lambda draw: one_draw(*draw), (factors, priority))


def _formulation(padded: PaddedProblem, links: str, has_rank: bool) -> tuple[Run, bool]:
    """Returns the fastest formulation, and whether it wants a `queue_order` for ranks."""
    if links == "duplex":
        return run_duplex_links, False
    wide = len(padded.chain_head) > WIDE[has_rank]
    run = run_ready_queues if wide else run_chain_slots
    return partial(run, serial=links == "serial"), wide


def _with_noise(
    padded: PaddedProblem, draw: Factors | None
) -> tuple[PaddedProblem, chex.Array | None]:
    """Returns the padded with one draw's durations of tasks, and its transfers' factors."""
    if draw is None:
        return padded, None
    dtype = jnp.result_type(padded.compute_s)
    spare = padded.padded_tasks + 1 - draw.compute.shape[0]
    factor = jnp.pad(draw.compute.astype(dtype), (0, spare))
    noisy = dataclasses.replace(padded, compute_s=padded.compute_s * factor[:, None])
    # One row more: a graph may have no tensors, and tables must not be empty.
    return noisy, jnp.pad(draw.transfer.astype(dtype), ((0, 1), (0, 0)))
