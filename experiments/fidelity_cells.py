"""The parts of `experiments.fidelity`: placements, their measured times, agreement."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy import stats

import doppler_jax as dj
from doppler_jax.baselines.simple import random_placements, round_robin, single
from doppler_jax.costs.calibration import Calibration
from doppler_jax.costs.observed import Observations, observe
from doppler_jax.engine.devices import Devices, Options
from doppler_jax.engine.placed import PlacedFunction, load
from doppler_jax.objective import Objective
from experiments.cells import Cells

LIST_SCHEDULERS = ("critical_path", "heft", "cpop", "peft", "etf")
LINKS = ("parallel", "serial", "duplex")
POOL = 2000
"""Placements that are simulated to choose from."""
TELLING = 0.05
"""Pairs of placements whose measured times differ by less are not asked to be told apart."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How well simulated makespans tell the measured ones."""

    pearson: float
    spearman: float
    kendall: float
    mean_relative_error: float
    bias: float  # mean of simulated / measured - 1
    telling_pairs: int  # whose measured times differ by `TELLING` or more
    ordered_share: float | None  # of those, in the right order; None if there is none


@dataclasses.dataclass(frozen=True)
class Rounds:
    """What was measured of B placements in rounds."""

    makespan_s: np.ndarray  # [rounds, B]
    seen: Observations  # of tasks and transfers
    kernel_s: dict[str, np.ndarray]  # [rounds, D] of kernels by themselves, by digest


def choose_placements(
    graph: dj.TaskGraph, costs: dj.Costs, count: int, seed: int
) -> np.ndarray:
    """Returns placements `[count, N]` at even quantiles of simulated makespan, best first.

    The pool: list schedulers, one device and round robin; these with some share of the tasks
    moved at random, from a task or two to all; and random ones that prefer some devices.
    """
    rng = np.random.default_rng(seed)
    shape = POOL // 2, graph.num_tasks
    listed = [dj.place(graph, costs, method=name).placement for name in LIST_SCHEDULERS]
    bases = np.stack([*listed, single(graph, costs), round_robin(graph, costs)])
    moved = np.exp(rng.uniform(np.log(1 / graph.num_tasks), 0.0, (shape[0], 1)))
    near = np.where(
        rng.random(shape) < moved,
        random_placements(costs, rng, shape[0]),
        bases[rng.integers(len(bases), size=shape[0])],
    )
    shares = np.cumsum(rng.dirichlet(np.ones(costs.num_devices), shape[0]), axis=1)
    uneven = (rng.random(shape)[:, :, None] > shares[:, None, :-1]).sum(axis=2)
    pool = np.unique(np.concatenate([bases, near, uneven]), axis=0)
    makespan_s = dj.simulate(graph, costs, pool, schedule=False).makespan_s
    order = np.argsort(makespan_s, kind="stable")
    return pool[order[np.linspace(0, len(pool) - 1, count).round().astype(np.int64)]]


def simulate_all(
    graph: dj.TaskGraph, costs: dj.Costs, placements: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the simulated makespans `[B]` of placements `[B, N]` by kind of link."""
    return {
        links: dj.simulate(
            graph, costs, placements, objective=Objective(links), schedule=False
        ).makespan_s
        for links in LINKS
    }


def measure_rounds(
    cells: Cells,
    sharded: dj.ShardedProgram,
    args: Sequence[Any],
    devices: Devices,
    placements: np.ndarray,
    costs: dj.Costs,
    teaching: int,
    rounds: int,
    kernel_seconds: Callable[[], dict[str, list[float]]] = dict,
) -> Rounds:
    """Measures placements `[B, N]` in turns.

    Each round runs every placement once, in an order of its own, and calls `kernel_seconds`,
    so that the machine's drift hits all alike; a round is kept when it is complete. The first
    `teaching` placements are those that are `seen`. `kernel_seconds` gives seconds `[D]` of
    kernels by digest.
    """
    digest = hashlib.sha256(np.ascontiguousarray(placements, np.int64).tobytes()).hexdigest()
    steps: list[PlacedFunction] = []

    def run(b: int) -> dj.Schedule:
        steps[b](*args)
        trace = steps[b].trace
        assert trace is not None
        return trace

    def measure_round(turn: int) -> dict[str, Any]:
        if not steps:
            steps.extend(load(sharded, p, None, devices, Options()) for p in placements)
            for b in range(len(steps)):  # what a first run sets up is not to be timed
                run(b)
        order = np.random.default_rng(turn).permutation(len(placements)).tolist()
        traces = {b: run(b) for b in order}
        return {
            "kernels": kernel_seconds(),
            "makespan_s": [dj.makespan_s(traces[b]) for b in range(len(placements))],
            "seen": observe(sharded, [traces[b] for b in range(teaching)], costs).to_json(),
        }

    terms = {"placements": digest, "teaching": teaching, "kernels": "measured in each round"}
    found = [cells.get(f"round-{r}", terms, partial(measure_round, r)) for r in range(rounds)]
    return Rounds(
        makespan_s=np.array([cell["makespan_s"] for cell in found]),
        seen=Observations.merge(Observations.from_json(cell["seen"]) for cell in found),
        kernel_s={
            kernel: np.array([cell["kernels"][kernel] for cell in found])
            for kernel in found[0]["kernels"]
        },
    )


def with_medians(calibration: Calibration, kernel_s: dict[str, np.ndarray]) -> Calibration:
    """Returns the calibration with the medians of kernels' seconds `[rounds, D]`."""
    kernels = {
        digest: dataclasses.replace(
            kernel, seconds=tuple(np.median(kernel_s[digest], axis=0).tolist())
        )
        for digest, kernel in calibration.kernels.items()
    }
    return dataclasses.replace(calibration, kernels=kernels)


def steady_medians(measured_s: np.ndarray) -> np.ndarray:
    """Returns the median makespan `[B]` of placements measured in rounds `[rounds, B]`.

    A round in which the median placement took longer was one of a slower machine: each is
    scaled so that its median is that of the median round.
    """
    round_s = np.median(measured_s, axis=1, keepdims=True)
    return np.median(measured_s / round_s, axis=0) * float(np.median(round_s))


def agree(simulated_s: np.ndarray, measured_s: np.ndarray) -> Agreement:
    """Returns how well simulated makespans `[B]` tell measured ones `[B]`, B >= 2."""
    a, b = np.triu_indices(len(measured_s), 1)
    gap_s = measured_s[a] - measured_s[b]
    telling = np.abs(gap_s) >= TELLING * np.minimum(measured_s[a], measured_s[b])
    right = np.sign(simulated_s[a] - simulated_s[b]) == np.sign(gap_s)
    relative = simulated_s / measured_s - 1
    return Agreement(
        pearson=float(stats.pearsonr(simulated_s, measured_s).statistic),
        spearman=float(stats.spearmanr(simulated_s, measured_s).statistic),
        kendall=float(stats.kendalltau(simulated_s, measured_s).statistic),
        mean_relative_error=float(np.abs(relative).mean()),
        bias=float(relative.mean()),
        telling_pairs=int(telling.sum()),
        ordered_share=float(right[telling].mean()) if telling.any() else None,
    )
