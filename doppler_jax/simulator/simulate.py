"""Simulates placements: `simulate` for users, `simulate_padded` for use inside other jits.

`simulate` is native on CPUs (`native.py`) and on accelerators the lock-step one
(`lockstep.py`), which is all that `simulate_padded` uses. Both work in float64 here and are
judged by `oracle.py`.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.costs.build import check_costs
from doppler_jax.graphs.padded import PaddedProblem, bucket_size, pad_problem
from doppler_jax.objective import Objective
from doppler_jax.simulator.disciplines import check_ranks, find_discipline
from doppler_jax.simulator.durations import check_factor, check_placements
from doppler_jax.simulator.lanes import run_batch
from doppler_jax.simulator.lockstep import handling_seconds, run_lockstep
from doppler_jax.simulator.native import Plans, simulate_native
from doppler_jax.simulator.noise import Factors, draw_factors
from doppler_jax.types import Costs, TaskGraph, pytree


@dataclasses.dataclass(frozen=True, eq=False)
class SimulationResult:
    """Outcome of B placements of N tasks, in float64 seconds, as NumPy arrays.

    With K draws of noise every array has a leading axis K. Starts and finishes are worked
    out when one of them is asked for. What never starts or never ends is at inf.
    """

    makespan_s: np.ndarray  # [B]
    work_out: Callable[[], tuple[np.ndarray, np.ndarray]] = dataclasses.field(repr=False)

    @cached_property
    def _times(self) -> tuple[np.ndarray, np.ndarray]:
        return self.work_out()

    @property
    def start_s(self) -> np.ndarray:
        """When each task starts `[B, N]`."""
        return self._times[0]

    @property
    def finish_s(self) -> np.ndarray:
        """When each task ends `[B, N]`."""
        return self._times[1]


@pytree
class PaddedResult:
    """Outcome of `simulate_padded`, in seconds; a leading axis K with draws of noise."""

    makespan_s: chex.Array  # [B]
    start_s: chex.Array | None  # [B, N], where a schedule was asked for
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
) -> SimulationResult:
    """Simulates the asynchronous execution of placements, on all cores of the process.

    Example:
      >>> graph, costs = dj.from_edge_delays([2.0, 1.0], [(0, 1, 1.0)], num_devices=2)
      >>> result = dj.simulate(graph, costs, [[0, 0], [0, 1]])
      >>> result.makespan_s, result.start_s
      (array([3., 4.]), array([[0., 2.],
             [0., 3.]]))

    Args:
      graph: the task graph, N tasks; N = 0 is legal.
      costs: its costs on D devices, seconds.
      placements: `[B, N]` int, device of each task; `[N]` is taken as one placement.
      objective: its links, see `simulate_oracle`, and the number of draws of noise and their
        sigma; its statistic is the caller's to take, see `makespan_statistics`.
      queue: which of its tasks a device starts next, one of `disciplines.QUEUES`, see
        `simulate_oracle`.
      priority: ranks, least first: `[N]` or `[B, N]` for `priority` and `in_order`; `[N]` or
        `[K, N]` for `random`, a permutation per draw, see `random_ranks`.
      factors: K draws of noise, from `draw_factors`, instead of the objective's.
      key: draws the factors where the objective has noise and none are given; consumed.

    Returns:
      Makespans, and start and finish of every task when asked for; with a leading axis K if
      there are draws, by noise or by `[K, N]` permutations. On CPUs they equal the oracle's
      in every bit.

    Raises:
      ValueError: a shape or a name is wrong, a placement names a device that does not
        exist, the objective's noise has neither factors nor a key, the ranks of `random`
        are no permutation, or those of `in_order` have a reader before its producer.
    """
    check_costs(graph, costs)
    plans = Plans(graph, costs, placements)
    factors = _factors(graph, costs, objective, factors, key)
    ranks = _check_ranks(graph, len(plans.placements), queue, priority)
    is_native = jax.default_backend() == "cpu" or objective.links == "duplex"
    if ranks is not None and not (is_native and ranks.ndim == 2):
        ranks = ranks.astype(np.float64)
    per_draw = ranks is not None and ranks.ndim == 2 and find_discipline(queue).per_draw
    draws = _draws(factors, ranks, per_draw=per_draw)
    if is_native:
        run_draw = partial(simulate_native, plans)
    else:
        devices = check_placements(graph, costs, placements)
        run_draw = partial(simulate_in_lockstep, graph, costs, devices)

    def run(*, schedule: bool) -> list[np.ndarray]:
        outcomes = [
            run_draw(links=objective.links, queue=queue, schedule=schedule, **draw)
            for draw in draws
        ]
        if factors is None and not per_draw:
            return list(outcomes[0])  # one execution of each placement: no axis of draws
        return [np.stack(arrays) for arrays in zip(*outcomes, strict=True)]

    def work_out() -> tuple[np.ndarray, np.ndarray]:
        _, start_s, finish_s = run(schedule=True)
        return start_s, finish_s

    return SimulationResult(run(schedule=False)[0], work_out)


def _check_ranks(
    graph: TaskGraph, batch: int, queue: str, priority: ArrayLike | None
) -> np.ndarray | None:
    """Returns ranks `[N]`, `[B, N]` or, of draws, `[K, N]`.

    Those of `[B, N]` are not looked at yet: the simulator does, as it takes them.
    """
    discipline = find_discipline(queue)
    if priority is None or not discipline.ranked or np.ndim(priority) != 2:
        return check_ranks(graph, queue, priority)
    array = np.asarray(priority)
    expected = (len(array) if discipline.per_draw else batch, graph.num_tasks)
    if array.shape != expected:
        raise ValueError(f"priority has shape {array.shape}, expected [N] or {expected}")
    if discipline.per_draw:
        return np.array([check_ranks(graph, queue, row) for row in array])
    return array


def _draws(
    factors: Factors | None, ranks: np.ndarray | None, *, per_draw: bool
) -> list[dict[str, Any]]:
    """Returns what each draw is simulated with: one without noise or ranks of its own."""
    each: list[Any] = list(ranks) if ranks is not None and per_draw else [ranks]
    draws: list[Any] = [{}] if factors is None else factors.draws()
    if per_draw and factors is not None and len(each) != len(draws):
        raise ValueError(f"priority has {len(each)} permutations, factors {len(draws)} draws")
    count = max(len(each), len(draws))
    ranked, drawn = (every * (count // len(every)) for every in (each, draws))
    return [{"ranks": rank, **draw} for rank, draw in zip(ranked, drawn, strict=True)]


def _factors(
    graph: TaskGraph,
    costs: Costs,
    objective: Objective,
    factors: Factors | None,
    key: chex.PRNGKey | None,
) -> Factors | None:
    """Returns the factors given, or those that the objective asks for."""
    if factors is not None:
        draws, devices = np.shape(factors.compute)[:1], costs.num_devices
        sizes = {
            "compute": (graph.num_tasks,),
            "transfer": (graph.num_tensors, devices),
            "inputs": (graph.num_inputs, devices),
        }
        for name, size in sizes.items():
            check_factor(f"factors.{name}", getattr(factors, name), (*draws, *size))
    elif objective.num_noise:
        if key is None:
            raise ValueError(
                f"the objective has {objective.num_noise} draws of noise; give factors or a key"
            )
        sigma = objective.noise_sigma
        factors = draw_factors(key, graph, costs.num_devices, objective.num_noise, sigma, sigma)
    return factors


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
