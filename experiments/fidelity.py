"""How true the simulator is to the engine: `python -m experiments.fidelity`.

For each workload this machine is calibrated, placements of every quality are chosen at even
quantiles of simulated makespan and measured in turns, first come, first served and in an order
of their own, several rounds, as is each kernel by itself, since the machine's speed drifts:
makespans are medians of warm rounds, each scaled to the median round. They are simulated with
the costs of those rounds, and with costs refitted to what other placements showed, under each
kind of link.

* marks the links of least error (mean relative); bias is signed; in order are pairs that are
told apart by 5% at least.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import numpy as np
from scipy import stats

import doppler_jax as dj
from doppler_jax.baselines.simple import random_placements, round_robin, single
from doppler_jax.costs.calibration import KernelTime
from doppler_jax.costs.observed import refit_costs
from doppler_jax.engine.calibrate import measure_kernels_again
from doppler_jax.graphs.build import topological_order
from doppler_jax.objective import LINKS
from doppler_jax.reports.pictures import plot_scatter
from experiments.catalogue import Problem
from experiments.grid import Cell, Context, Page, Record, Study
from experiments.machine import Machine, MachineSettings, arguments, in_turns, measured_cells
from experiments.tables import table

LISTED = ("critical_path", "heft", "cpop", "peft", "etf")

NUM_SHARDS = 4
"""Blocks per tensor of the planner's cut."""

POOL = 2000
"""Placements that are simulated to choose from."""

KERNEL_REPEATS = 3
"""Executions of each kernel by itself in a round, of which the median counts."""

TELLING = 0.05
"""Pairs of placements whose measured times differ by less are not asked to be told apart."""


@dataclasses.dataclass(frozen=True)
class Asked(MachineSettings):
    """What to compare."""

    placements: int = 40
    """Of each workload; each is run under `fifo` and `in_order`."""
    teaching: int = 8
    """Placements besides, whose executions refit the costs."""
    rounds: int = 21
    """Executions of each placement, of which the median counts."""


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per workload."""
    asked = context.settings
    if asked.placements < 2:
        raise ValueError("--placements is 1; expected at least 2, to compare")
    machine = context.stack.enter_context(Machine(asked.num_devices, asked.backend))
    cut, key = ("planner", NUM_SHARDS), context.key("workloads", "preset", "backend")
    run = partial(measure, context)
    return measured_cells(context, machine, run, asked.workloads, asked.preset, *cut, **key)


def measure(context: Context[Asked], machine: Machine, problem: Problem) -> Record:
    """Returns the measured makespans of plans, and the simulated ones by costs and links.

    The placements under `fifo` come first, then the same ones `in_order`. Each round runs every
    plan and every kernel by itself once. Costs are calibrated with
    the rounds' kernels, and refitted to what the first `teaching` placements showed.
    """
    asked, sharded = context.settings, problem.program
    calibration = dj.clusters.load_calibration(
        context.folder / f"calibration-{problem.name}.json"
    )
    args = arguments(problem)
    placements = choose_placements(problem, asked.placements + asked.teaching)
    teaching = np.zeros(len(placements), bool)  # evenly spread; they come first
    teaching[np.linspace(0, len(placements) - 1, asked.teaching).astype(int)] = True
    placements = np.concatenate([placements[teaching], placements[~teaching]])

    def kernels() -> Mapping[str, KernelTime]:
        again = (calibration, sharded, machine.devices)
        return measure_kernels_again(*again, repeats=KERNEL_REPEATS).kernels

    ranks = random_orders(problem, len(placements))
    keys = [(queue, b) for queue in ("fifo", "in_order") for b in range(len(placements))]
    rest = [(queue, b) for queue, b in keys if b >= asked.teaching]

    runs: dict[Hashable, Callable[[], Any]] = {
        (q, b): partial(
            machine.compile(sharded, dj.Plan(placements[b], ranks[b], q)).run_traced, *args
        )
        for q, b in keys
    }
    found = in_turns({**runs, "kernels": kernels}, asked.rounds)
    lessons = [t for key in keys if key not in rest for t in found[key][1:]]
    steady = {
        digest: dataclasses.replace(
            kernel,
            seconds=tuple(np.median([k[digest].seconds for k in found["kernels"][1:]], axis=0)),
        )
        for digest, kernel in calibration.kernels.items()
    }
    costs = dj.make_costs(sharded, dataclasses.replace(calibration, kernels=steady))
    believed = {"calibrated": costs, "refitted": refit_costs(sharded, costs, lessons)}
    return {
        "tasks": sharded.graph.num_tasks,
        "queues": [queue for queue, _ in rest],
        "measured_s": [[dj.simulator.makespan_s(t) for t in found[key][1:]] for key in rest],
        "simulated_s": {
            name: simulated_s(
                sharded.graph, one, placements[asked.teaching :], ranks[asked.teaching :]
            )
            for name, one in believed.items()
        },
    }


def simulated_s(
    graph: dj.graphs.TaskGraph, costs: dj.Costs, placements: np.ndarray, ranks: np.ndarray
) -> dict[str, list[float]]:
    """Returns makespans by links: of placements `[B, N]` under `fifo`, then by their ranks."""
    found = {}
    for links in LINKS:
        given, objective = (graph, costs, placements), dj.Objective(links)
        served = dj.simulate(*given, objective=objective)
        kept = dj.simulate(*given, objective=objective, queue="in_order", priority=ranks)
        found[links] = [*served.makespan_s.tolist(), *kept.makespan_s.tolist()]
    return found


def choose_placements(problem: Problem, count: int, seed: int = 0) -> np.ndarray:
    """Returns placements `[count, N]` at even quantiles of simulated makespan, best first.

    The pool: list schedulers, one device and round robin; these with some share of the tasks
    moved at random, from a task or two to all; and random ones that prefer some devices.
    """
    graph, costs, rng = problem.graph, problem.costs, np.random.default_rng(seed)
    shape = POOL // 2, graph.num_tasks
    listed = [dj.place(graph, costs, method=name).placement for name in LISTED]
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
    makespan_s = dj.simulate(graph, costs, pool).makespan_s
    order = np.argsort(makespan_s, kind="stable")
    return pool[order[np.linspace(0, len(pool) - 1, count).round().astype(np.int64)]]


def random_orders(problem: Problem, count: int, seed: int = 1) -> np.ndarray:
    """Returns ranks `[count, N]` of orders that devices can keep: by b-level, disturbed."""
    urgency, rng = dj.graphs.b_level(problem.graph, problem.costs), np.random.default_rng(seed)
    spread = urgency.max(initial=0.0) * np.exp(rng.uniform(np.log(0.01), 0.0, count))
    noise = rng.normal(size=(count, urgency.size)) * spread[:, None]
    orders = (topological_order(problem.graph, rank) for rank in noise - urgency)
    return np.stack([np.argsort(order) for order in orders])


def steady_medians(measured_s: np.ndarray) -> np.ndarray:
    """Returns the median makespan `[B]` of placements measured in rounds `[rounds, B]`.

    A round in which the median placement took longer was one of a slower machine: each is
    scaled so that its median is that of the median round.
    """
    round_s = np.median(measured_s, axis=1, keepdims=True)
    return np.median(measured_s / round_s, axis=0) * float(np.median(round_s))


def agree(simulated_s: np.ndarray, measured_s: np.ndarray) -> Record:
    """Returns how well simulated makespans `[B]` tell measured ones `[B]`, B >= 2.

    `in order`: of the `pairs` whose measured times differ by `TELLING` or more, the share in
    the right order, None if there is none.
    """
    a, b = np.triu_indices(len(measured_s), 1)
    gap_s = measured_s[a] - measured_s[b]
    telling = np.abs(gap_s) >= TELLING * np.minimum(measured_s[a], measured_s[b])
    right = np.sign(simulated_s[a] - simulated_s[b]) == np.sign(gap_s)
    relative = simulated_s / measured_s - 1
    return {
        "pearson": float(stats.pearsonr(simulated_s, measured_s).statistic),
        "spearman": float(stats.spearmanr(simulated_s, measured_s).statistic),
        "kendall": float(stats.kendalltau(simulated_s, measured_s).statistic),
        "error": float(np.abs(relative).mean()),
        "bias": float(relative.mean()),
        "pairs": int(telling.sum()),
        "in order": float(right[telling].mean()) if telling.any() else None,
    }


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns agreement by workload, costs and links, the best links first."""
    rows, panels = [], []
    for record in records:
        measured_s = steady_medians(np.array(record["measured_s"]).T)
        queues = np.array(record["queues"])
        for costs, by_links in record["simulated_s"].items():
            simulated = {links: np.array(s) for links, s in by_links.items()}
            errors = {links: agree(s, measured_s)["error"] for links, s in simulated.items()}
            for rank, links in enumerate(sorted(errors, key=errors.__getitem__)):
                where = {"workload": record["workload"], "costs": costs}
                where["links"] = links + "*" * (rank == 0)
                for queue in dict.fromkeys(record["queues"]):
                    here = queues == queue
                    found = agree(simulated[links][here], measured_s[here])
                    rows.append(where | {"queue": queue} | found)
                if rank == 0 and costs == "refitted":
                    title = f"{record['workload']}, {links} links"
                    panels.append((title, simulated[links], measured_s))
    return Page({"": table(rows)}, {"fidelity.png": partial(plot_scatter, panels=panels)})


QUICK = {
    "workloads": ("chainmm", "ffnn"), "preset": "small", "placements": 8, "teaching": 2,
    "rounds": 5,
}  # fmt: skip

STUDY = Study("fidelity", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
