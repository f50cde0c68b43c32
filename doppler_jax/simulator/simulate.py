"""Simulates placements on all cores: natively (`native.py`), on accelerators in lock-step.

The latter is in `batches.py`. Both work in float64 here and are judged by `oracle.py`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.costs.build import check_costs
from doppler_jax.objective import Objective
from doppler_jax.simulator.disciplines import check_ranks, find_discipline
from doppler_jax.simulator.durations import check_factor, check_placements
from doppler_jax.simulator.native import Plans, simulate_native
from doppler_jax.simulator.noise import Factors, draw_factors
from doppler_jax.types import Costs, TaskGraph

if TYPE_CHECKING:
    import chex


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
    is_native = objective.links == "duplex" or not _has_accelerator()
    if ranks is not None and not (is_native and ranks.ndim == 2):
        ranks = ranks.astype(np.float64)
    per_draw = ranks is not None and ranks.ndim == 2 and find_discipline(queue).per_draw
    draws = _draws(factors, ranks, per_draw=per_draw)
    if is_native:
        run_draw = partial(simulate_native, plans)
    else:
        from doppler_jax.simulator.batches import simulate_in_lockstep

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


def _has_accelerator() -> bool:
    """Returns whether JAX uses one; whoever has not loaded JAX does not wait for it."""
    return "jax" in sys.modules and sys.modules["jax"].default_backend() != "cpu"


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
