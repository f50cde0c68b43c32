"""The lock-step simulator of many placements at once: for accelerators, and for other jits.

`simulate_padded` is pure and what training uses; `simulate` uses it on accelerators.
"""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.graphs.padded import PaddedProblem, bucket_size, pad_problem
from doppler_jax.simulator.disciplines import check_ranks, find_discipline
from doppler_jax.simulator.lanes import run_batch
from doppler_jax.simulator.lockstep import handling_seconds, run_lockstep
from doppler_jax.simulator.noise import Factors
from doppler_jax.types import Costs, TaskGraph, pytree, register_pytrees

register_pytrees()  # of noise


@pytree
class PaddedResult:
    """Outcome of `simulate_padded`, in seconds; a leading axis K with draws of noise."""

    makespan_s: chex.Array  # [B]
    start_s: chex.Array | None  # [B, N], where a schedule was asked for
    finish_s: chex.Array | None  # [B, N]


def simulate_in_lockstep(
    graph: TaskGraph,
    costs: Costs,
    placements: np.ndarray,
    *,
    links: str,
    queue: str,
    ranks: np.ndarray | None,
    compute_factor: np.ndarray | None = None,
    transfer_factor: np.ndarray | None = None,
    input_factor: np.ndarray | None = None,
    schedule: bool = False,
) -> tuple[np.ndarray, ...]:
    """Does what `simulate_native` does, by the lock-step simulator in float64.

    Batches and tensors are rounded up to buckets, so that calls share compilations.
    """
    batch, n = placements.shape
    for row in ranks if ranks is not None and ranks.ndim == 2 else ():
        check_ranks(graph, queue, row)
    with jax.enable_x64(True):
        padded = pad_problem(graph, costs, np.float64)
        columns = (0, padded.padded_tasks - n)
        rows = (0, bucket_size(batch) - batch)
        if ranks is not None:
            ranks = np.pad(np.broadcast_to(ranks, placements.shape), (rows, columns))
        factors = None
        if compute_factor is not None:
            transfer, inputs = (
                np.pad(factor, ((0, bucket_size(len(factor)) - len(factor)), (0, 0)))[None]
                for factor in (transfer_factor, input_factor)
                if factor is not None
            )
            compute = np.pad(compute_factor, columns)[None]
            factors = Factors(compute=compute, transfer=transfer, inputs=inputs)
        devices = np.pad(placements.astype(np.int32), (rows, columns))
        result = simulate_padded(
            padded, devices, ranks, factors, links=links, queue=queue, schedule=schedule
        )
    found = jax.tree.map(lambda a: np.asarray(a if factors is None else a[0])[:batch], result)
    if not schedule:
        return (found.makespan_s,)
    return found.makespan_s, found.start_s[:, :n], found.finish_s[:, :n]


@partial(jax.jit, static_argnames=("links", "queue", "schedule"))
def simulate_padded(
    padded: PaddedProblem,
    placements: chex.Array,
    priority: chex.Array | None = None,
    factors: Factors | None = None,
    *,
    links: str = "parallel",
    queue: str | None = None,
    schedule: bool = False,
) -> PaddedResult:
    """Simulates padded placements `[B, N]`; pure, for use inside other jits.

    Works in the precision of the problem: training uses float32. With `factors` of K draws
    every result has a leading axis K, and priorities may be `[K, 1, N]`, of each draw its own.
    `vmap` over stacked problems mixes graphs of a bucket in one call.

    Args:
      padded: the problem.
      placements: `[B, N]` int, not checked.
      priority: `[B, N]` ranks, not checked.
      factors: K draws of noise.
      links: `parallel` or `serial`.
      queue: one of `QUEUES`; without it `priority` where ranks are given, else `fifo`.
      schedule: whether starts and finishes are wanted.

    Raises:
      ValueError: `links` is `duplex`, whose transfers compete in time: arrivals are not known
        when a task starts; or the queue is unknown, or needs ranks that are not given.
    """
    if links not in ("parallel", "serial"):
        raise ValueError(
            f"links {links!r} cannot be simulated inside jit; guide by 'serial' links, as "
            "Objective.guide_links does, and judge by dj.simulate"
        )
    discipline = find_discipline(queue or ("fifo" if priority is None else "priority"))
    if discipline.ranked == (priority is None):
        raise ValueError(
            f"queue {discipline.name!r} {'needs' if discipline.ranked else 'takes no'} ranks"
        )
    spare = padded.padded_tasks + 1 - placements.shape[1]
    placements = jnp.pad(placements, ((0, 0), (0, spare))).astype(jnp.int32)
    handling_s = handling_seconds(padded, placements)
    run = partial(
        run_lockstep, serial=links == "serial", discipline=discipline, schedule=schedule
    )

    def one_draw(noise: Factors | None, rank: chex.Array | None) -> PaddedResult:
        if rank is not None:
            rank = _keys(padded, jnp.broadcast_to(rank, (len(placements), rank.shape[-1])))
            rank = (
                jnp.argsort(rank, stable=True).astype(jnp.int32) if discipline.waits else rank
            )
        shared = _with_noise(padded, noise)
        makespan_s, *times = run_batch(
            run, shared, placements, rank, handling_s, one_kernel=not discipline.waits
        )
        start_s, finish_s = (a[:, :-1] for a in times) if schedule else (None, None)
        return PaddedResult(makespan_s=makespan_s, start_s=start_s, finish_s=finish_s)

    if factors is None:
        return one_draw(None, priority)
    if priority is None or priority.ndim == 2:
        return jax.lax.map(lambda noise: one_draw(noise, priority), factors)
    return jax.lax.map(lambda draw: one_draw(*draw), (factors, priority))


def _keys(padded: PaddedProblem, rank: chex.Array) -> chex.Array:
    """Returns ranks `[B, N + 1]` with padding tasks last."""
    rank = jnp.pad(rank, ((0, 0), (0, padded.padded_tasks + 1 - rank.shape[1])))
    rank = rank.astype(jnp.result_type(padded.compute_s))
    return jnp.where(
        jnp.arange(rank.shape[1], dtype=jnp.int32)[None] < padded.num_tasks, rank, jnp.inf
    )


def _with_noise(
    padded: PaddedProblem, draw: Factors | None
) -> tuple[PaddedProblem, tuple[chex.Array, chex.Array] | None]:
    """Returns the padded with one draw's durations of tasks, and its transfers' factors."""
    if draw is None:
        return padded, None
    dtype = jnp.result_type(padded.compute_s)
    spare = padded.padded_tasks + 1 - draw.compute.shape[0]
    factor = jnp.pad(draw.compute.astype(dtype), (0, spare))
    noisy = dataclasses.replace(padded, compute_s=padded.compute_s * factor[:, None])
    # One row more: a graph may have no tensors or inputs, and tables must not be empty.
    transfer, inputs = (
        jnp.pad(a.astype(dtype), ((0, 1), (0, 0))) for a in (draw.transfer, draw.inputs)
    )
    return noisy, (transfer, inputs)
