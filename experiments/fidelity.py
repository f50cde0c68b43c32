"""How true the simulator is to the engine: `python -m experiments.fidelity`.

Whole calls, arguments laid out and outputs handed over. For each workload this machine is
calibrated, and plans are chosen whose simulated times spread evenly, up to twice the least:
half of them differ in placement and order, the other half in order only. They are called in
turns, as is each kernel by itself, since the machine's speed drifts: times are medians over
rounds, each scaled to the median round, and simulations take the kernels of those rounds, by
which what transfers take of a device is scaled, too.
Simulated is the makespan, and as calibrated what laying, handing over and the call itself take.
Where state is carried, loops of six calls are measured beside calls, and their steps are
compared with `period_s`.

`spread` is the longest over the shortest simulated; error is the mean relative one, bias is
signed; in order are pairs that are told apart by 5% at least. Outliers are off by 15% and more;
beside them is what their parts took over what they cost.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from scipy import stats

import doppler_jax as dj
from doppler_jax.baselines.simple import random_placements, round_robin, single
from doppler_jax.costs.calibration import Calibration
from doppler_jax.engine.calibrate import measure_kernels_again
from doppler_jax.engine.loop import Loop
from doppler_jax.graphs.build import topological_order
from doppler_jax.objective import LINKS
from doppler_jax.reports.pictures import plot_scatter
from doppler_jax.simulator.periods import period_s
from experiments.catalogue import Problem
from experiments.grid import Cell, Context, Page, Record, Study, cells_of, check_names
from experiments.machine import (
    Machine,
    MachineSettings,
    arguments,
    calls_s,
    in_turns,
    seconds_of,
)
from experiments.tables import table

LISTED = ("critical_path", "heft", "cpop", "peft", "etf")

ARGUMENTS: dict[str, dict[str, Any]] = {
    "chainmm": {"resident": ()},
    "llama_block": {"resident": 0},
    "random_layered": {"resident": 1},
    "ffnn_train": {"resident": (), "carry": 0},
    "pipeline": {"resident": (), "carry": 0},
    "moe_block": {"resident": 0, "carry": 1},
}
"""Which arguments of each workload stay on the devices, and which is what the call before
returned; the others are laid out anew in each call."""

NUM_SHARDS = 4
"""Blocks per tensor of the planner's cut."""

POOL = 2000
"""Placements, and orders of some of them, that are simulated to choose from."""

REACH = 2.0
"""Times the least simulated makespan up to which plans are spread."""

CALLS_S, LEAST_CALLS = 0.1, 3
"""Of calls in a turn, and how many they are at least; the median counts."""

LOOP = 6
"""Calls of a loop that is measured."""

LINK = "serial"
"""Kind of links whose simulations are shown plan by plan: what `distribute` plans by."""

ROUNDS_S = 900.0
"""Of a workload, after which no further round begins."""

KERNEL_REPEATS = 3
"""Executions of each kernel by itself in a round, of which the median counts."""

TELLING = 0.05
"""Pairs of plans whose measured times differ by less are not asked to be told apart."""

OUTLIER = 0.15
"""Relative error from which on the page asks why."""


@dataclasses.dataclass(frozen=True)
class Asked(MachineSettings):
    """What to compare."""

    workloads: tuple[str, ...] = tuple(ARGUMENTS)
    plans: int = 24
    """Of each workload, half of them of one placement."""
    rounds: int = 21
    """Turns of each plan, fewer where they take long."""


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per workload."""
    asked = context.settings
    if asked.plans < 4:
        raise ValueError(f"--plans is {asked.plans}; expected at least 4, to compare")
    check_names("--workloads", asked.workloads, list(ARGUMENTS))
    machine = context.stack.enter_context(Machine(asked.num_devices, asked.backend))
    own = machine.key | context.key("workloads", "backend", "num_devices")
    return cells_of(partial(measure, context, machine), {"workload": asked.workloads}, **own)


def measure(context: Context[Asked], machine: Machine, workload: str) -> Record:
    """Returns measured calls and steps of plans, and simulated ones, by kind of links."""
    asked = context.settings
    made = dj.workloads.make_workload(workload, asked.preset)
    cut = "planner", NUM_SHARDS, ARGUMENTS[workload]
    problem = machine.calibrated(made, context.folder, *cut, calls=True)
    calibration = dj.clusters.load_calibration(
        context.folder / f"calibration-{problem.name}.json"
    )
    assert calibration.calls is not None
    sharded, args = problem.program, arguments(problem)
    beyond_s = calibration.calls.beyond_s(sharded)
    plans = choose_plans(problem, asked.plans, beyond_s)
    steps = [machine.compile(sharded, plan) for plan in plans]
    runs: dict[Hashable, Callable[[], Any]] = {}
    loops = [Loop(step, sharded, args, {}) for step in steps]
    for b, loop in enumerate(loops):
        runs["calls", b] = partial(calls_s, loop, CALLS_S, LEAST_CALLS)
        if sharded.carried:
            runs["steps", b] = partial(step_s, loop)
    again = calibration, sharded, machine.devices
    runs["kernels"] = lambda: measure_kernels_again(*again, repeats=KERNEL_REPEATS).kernels
    found = in_turns(runs, asked.rounds, seconds=ROUNDS_S)
    costs = dj.make_costs(sharded, steady(calibration, found.pop("kernels")[1:]))
    simulated = {links: simulated_s(problem, costs, plans, links) for links in LINKS}
    periods = {"steps": periods_s(problem, costs, plans)} if sharded.carried else {}
    return {
        "tasks": sharded.graph.num_tasks,
        "beyond_s": beyond_s,
        "measured_s": {
            kind: [found[kind, b][1:] for b in range(len(plans))]
            for kind in ("calls", *periods)
        },
        "simulated_s": {
            links: {"calls": (beyond_s + makespans).tolist(), **periods}
            for links, makespans in simulated.items()
        },
        "parts": [parts(*run, costs) for run in zip(steps, loops, strict=True)],
    }


def step_s(loop: Loop) -> float:
    """Returns the seconds of a step of a loop."""
    return seconds_of(lambda: [loop() for _ in range(LOOP)][-1]) / LOOP


def steady(calibration: Calibration, rounds: Sequence[Any]) -> Calibration:
    """Returns the calibration with the medians of what kernels took in rounds.

    What a device spends on transfers is its own work, too: it takes as much longer as kernels.
    """
    kernels = {
        digest: dataclasses.replace(
            kernel, seconds=tuple(np.median([k[digest].seconds for k in rounds], axis=0))
        )
        for digest, kernel in calibration.kernels.items()
    }
    slower = np.median(
        [np.divide(kernels[k].seconds, was.seconds) for k, was in calibration.kernels.items()],
        axis=0,
    )
    handling = {end: float(slower[end[0]]) * s for end, s in calibration.handling.items()}
    return dataclasses.replace(calibration, kernels=kernels, handling=handling)


def simulated_s(
    problem: Problem, costs: dj.Costs, plans: Sequence[dj.Plan], links: str = LINK
) -> np.ndarray:
    """Returns the makespans of plans, `[B]`."""
    placements, ranks = (np.stack(each) for each in zip(*map(_arrays, plans), strict=True))
    given, objective = (problem.graph, costs, placements), dj.Objective(links)
    return dj.simulate(*given, objective=objective, queue="in_order", priority=ranks).makespan_s


def periods_s(problem: Problem, costs: dj.Costs, plans: Sequence[dj.Plan]) -> list[float]:
    """Returns what loops of plans take a step."""
    given = problem.graph, costs
    return [period_s(*given, *_arrays(plan), links=LINK) for plan in plans]


def _arrays(plan: dj.Plan) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(plan.placement), np.asarray(plan.priority)


def parts(step: dj.engine.PlacedFunction, loop: Loop, costs: dj.Costs) -> Record:
    """Returns what parts of the next call, awaited, took over what they cost."""
    jax.block_until_ready(loop())
    trace, whole = step.schedule, step.whole_call
    assert trace is not None
    ends = trace.transfer_source, trace.transfer_destination
    sizes = np.concatenate([costs.tensor_bytes, np.asarray(costs.input_bytes)[::-1]])
    moved_s = (
        costs.latency_s[ends] + sizes[trace.transfer_tensor] * costs.seconds_per_byte[ends]
    )
    moving_s = trace.transfer_finish_s - trace.transfer_start_s
    cost_s = costs.compute_s[np.arange(len(trace.placement)), trace.placement]
    return {
        "tasks took": float((trace.finish_s - trace.start_s).sum() / cost_s.sum()),
        "transfers took": float(moving_s.sum() / moved_s.sum()) if moved_s.size else None,
        "beyond the makespan_s": whole.seconds - dj.simulator.makespan_s(trace),
    }


def choose_plans(
    problem: Problem, count: int, beyond_s: float = 0.0, seed: int = 0
) -> list[dj.Plan]:
    """Returns plans with an order of their own, by simulated seconds; see `evenly`.

    The second half are of one placement: among the best ones that whose orders differ most.

    Args:
      problem: to place.
      count: of plans, at least 4.
      beyond_s: by which a call takes longer than its makespan.
      seed: of what is random.
    """
    rng, half = np.random.default_rng(seed), count // 2
    pool = placements_pool(problem, rng)
    ranks = random_orders(problem, len(pool), rng)

    def spread(plans: list[dj.Plan]) -> tuple[list[dj.Plan], np.ndarray]:
        call_s = beyond_s + simulated_s(problem, problem.costs, plans)
        order = np.argsort(call_s, kind="stable")
        return [plans[b] for b in order], call_s[order]

    own, own_s = spread([dj.Plan(*pair, "in_order") for pair in zip(pool, ranks, strict=True)])
    ordered = []
    for one in own[: len(own) // 10 : -(-len(own) // 50)]:
        plans = [dj.Plan(one.placement, rank, "in_order") for rank in ranks[: POOL // 4]]
        ordered.append(spread(plans))
    same, same_s = max(ordered, key=lambda found: found[1][-1] / found[1][0])
    chosen = [own[b] for b in evenly(own_s, count - half)]
    return chosen + [same[b] for b in evenly(same_s, half)]


def evenly(seconds: np.ndarray, count: int) -> list[int]:
    """Returns positions in `seconds` `[B]`, which ascend, that are spread evenly.

    They go from the least up to `REACH` times that, or to the most; none is taken twice.
    """
    left, found = list(range(len(seconds))), []
    for wanted in np.linspace(seconds[0], min(REACH * seconds[0], seconds[-1]), count):
        found.append(left.pop(int(np.argmin(np.abs(seconds[left] - wanted)))))
    return sorted(found)


def placements_pool(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """Returns placements `[B, N]` of every quality, about `POOL`.

    They are list schedulers, one device and round robin; these with some share of the tasks
    moved at random, from a task or two to all; and random ones that prefer some devices.
    """
    graph, costs = problem.graph, problem.costs
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
    return np.unique(np.concatenate([bases, near, uneven]), axis=0)


def random_orders(problem: Problem, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns ranks `[count, N]` of orders that devices can keep: by b-level, disturbed."""
    urgency = dj.graphs.b_level(problem.graph, problem.costs)
    spread = urgency.max(initial=0.0) * np.exp(rng.uniform(np.log(0.01), 0.0, count))
    noise = rng.normal(size=(count, urgency.size)) * spread[:, None]
    orders = (topological_order(problem.graph, rank) for rank in noise - urgency)
    return np.stack([np.argsort(order) for order in orders])


def steady_medians(measured_s: np.ndarray) -> np.ndarray:
    """Returns the median seconds `[B]` of plans measured in rounds `[rounds, B]`.

    A round in which the median plan took longer was one of a slower machine: each is scaled so
    that its median is that of the median round.
    """
    round_s = np.median(measured_s, axis=1, keepdims=True)
    return np.median(measured_s / round_s, axis=0) * float(np.median(round_s))


def agree(simulated_s: np.ndarray, measured_s: np.ndarray) -> Record:
    """Returns how well simulated seconds `[B]` tell measured ones `[B]`, B >= 2.

    `in order`: of the `pairs` whose measured times differ by `TELLING` or more, the share in
    the right order, None if there is none.
    """
    a, b = np.triu_indices(len(measured_s), 1)
    gap_s = measured_s[a] - measured_s[b]
    telling = np.abs(gap_s) >= TELLING * np.minimum(measured_s[a], measured_s[b])
    right = np.sign(simulated_s[a] - simulated_s[b]) == np.sign(gap_s)
    relative = simulated_s / measured_s - 1
    return {
        "spearman": float(stats.spearmanr(simulated_s, measured_s).statistic),
        "error": float(np.abs(relative).mean()),
        "bias": float(relative.mean()),
        "pairs": int(telling.sum()),
        "in order": float(right[telling].mean()) if telling.any() else None,
    }


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns agreement by workload, outliers and why, and agreement by kind of links."""
    rows, links_rows, odd, panels = [], [], [], []
    for record in records:
        where = {"workload": record["workload"]}
        for kind, rounds in record["measured_s"].items():
            measured_s = steady_medians(np.array(rounds).T)
            simulated = {n: np.array(s[kind]) for n, s in record["simulated_s"].items()}
            half = np.arange(len(measured_s)) >= len(measured_s) - len(measured_s) // 2
            of = {"": slice(None)} | ({", order only": half} if kind == "calls" else {})
            for which, here in of.items():
                rows.append(
                    where
                    | {"what": kind + which, "tasks": record["tasks"]}
                    | {"rounds": len(rounds[0])}
                    | _range(measured_s[here], simulated[LINK][here])
                    | agree(simulated[LINK][here], measured_s[here])
                )
            odd += outliers(record, kind, simulated[LINK], measured_s)
            if kind == "calls":
                links_rows += [
                    where | {"links": n} | agree(s, measured_s) for n, s in simulated.items()
                ]
            panels.append((f"{record['workload']}, {kind}", simulated[LINK], measured_s))
    texts = {
        "": table(rows),
        "Outliers": table(odd) or "None.",
        "Calls, by links": table(links_rows),
    }
    return Page(texts, {"fidelity.png": partial(plot_scatter, panels=panels)})


def _range(measured_s: np.ndarray, simulated_s: np.ndarray) -> Record:
    spread = float(simulated_s.max() / simulated_s.min())
    return {"least_s": measured_s.min(), "most_s": measured_s.max(), "spread": spread}


def outliers(
    record: Record, kind: str, simulated_s: np.ndarray, measured_s: np.ndarray
) -> list[Record]:
    """Returns a row for each plan that is off by `OUTLIER`, with what its parts took."""
    off = np.abs(simulated_s / measured_s - 1) >= OUTLIER
    return [
        {"workload": record["workload"], "what": kind, "plan": int(b)}
        | {"measured_s": measured_s[b], "simulated_s": simulated_s[b]}
        | record["parts"][b]
        | {"as calibrated_s": record["beyond_s"]}
        for b in np.flatnonzero(off)
    ]


QUICK = {
    "workloads": ("chainmm", "moe_block"), "preset": "small", "plans": 8, "rounds": 5,
}  # fmt: skip

STUDY = Study("fidelity", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
