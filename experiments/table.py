"""The paper's Table 2, and what barriers cost: `python -m experiments.table`.

Simulated: every method places the four workloads on 4 P100 within the same seconds of a cold
call. Measured: every method places them under this machine's calibrated costs, and its
placements run here, on isolated devices, in turns; `doppler_sys` is stage 3, which goes on
from DOPPLER's policy by measuring. The paper's own figures stand beside.

Makespans are in ms, mean and deviation; * is the least of a row. Barriers: the same placements
bulk-synchronous, level by level, over work-conserving; measured of critical path's.
"""

import dataclasses
from functools import partial

import numpy as np

import doppler_jax as dj
from doppler_jax.reports.pictures import Bars, plot_bars
from doppler_jax.training.system_rl import SystemConfig
from experiments.catalogue import PAPER, WORKLOADS, Problem
from experiments.grid import Cell, Context, Page, Record, Study
from experiments.machine import Machine, measure_plans, measured_cells
from experiments.methods import MethodSettings, Spend, method_cells, place_cell
from experiments.stage3_study import improve
from experiments.tables import by, means_table, with_paper

_SYSTEMS = ("critical_path", "placeto", "gdp", "enumerative", "doppler", "doppler_sys")

TABLE_2_MS = {
    "chainmm": dict(zip(_SYSTEMS, (230.4, 137.1, 198.0, 139.0, 122.5, 123.4), strict=True)),
    "ffnn": dict(zip(_SYSTEMS, (217.8, 126.3, 100.3, 50.2, 49.9, 47.4), strict=True)),
    "llama_block": dict(zip(_SYSTEMS, (230.9, 411.5, 336.5, 172.7, 191.5, 160.3), strict=True)),
    "llama_layer": dict(zip(_SYSTEMS, (292.6, 295.1, 231.5, 174.8, 167.0, 150.6), strict=True)),
}
"""The paper's execution times by workload and method, measured on 4 P100; `doppler_sys` is all
three stages. Ours are of other code, sizes and machines: orders and ratios compare."""

PAPER_BARRIERS = {"chainmm": 185.3 / 139.0, "ffnn": 76.9 / 50.2}
"""The paper's: bulk-synchronous over work-conserving execution of an enumerative placement."""

METHODS = (
    "critical_path", "heft", "placeto", "gdp", "enumerative", "annealing", "doppler",
    "doppler+search",
)  # fmt: skip

NUM_SHARDS = 4
"""Blocks per tensor of what is measured, as in the paper."""

LISTED, SYNCHRONOUS = "critical_path", "critical_path, bulk-synchronous"
"""Of what is measured with and without barriers."""


@dataclasses.dataclass(frozen=True)
class Asked(MethodSettings):
    """What to compare."""

    measured: tuple[str, ...] = WORKLOADS
    """Workloads that are measured on this machine's devices too."""
    measured_preset: str = "medium"
    """Sizes of what is measured."""
    measured_method: tuple[str, ...] = METHODS
    measured_evaluations: int = 400_000
    """Placements that a method simulates for what is measured."""
    num_devices: int = 2
    """Devices that are measured on."""
    rounds: int = 21
    """Runs of each placement."""
    updates: int = 20
    """Of stage 3."""
    training: SystemConfig = dataclasses.field(default_factory=SystemConfig)


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns the cells of the simulated half, then those of the measured one."""
    asked = context.settings
    found = [
        cell.then(partial(with_barriers, context, cell.key["problem"]), modes="both")
        for cell in method_cells(
            context, asked.problems, asked.method, asked.spends(), asked.seeds, asked.links
        )
    ]
    if not asked.measured:
        return found
    machine = context.stack.enter_context(Machine(asked.num_devices))
    names = ("measured_method", "measured_evaluations", "rounds", "updates", "training")
    key = {name: value for name, value in context.key().items() if name in names}
    run, cut = partial(measure, context), ("uniform", NUM_SHARDS)
    what = run, asked.measured, asked.measured_preset
    return found + measured_cells(context, machine, *what, *cut, **key)


def with_barriers(context: Context[Asked], name: str, result: Record) -> Record:
    """Returns a result with the cost of barriers: makespan with them over that without."""
    problem, placement = context.problem(name), np.array(result["placement"])
    schedule = dj.simulator.simulate_synchronous(problem.graph, problem.costs, placement)
    return result | {"barriers": dj.simulator.makespan_s(schedule) / result["makespan_s"]}


def measure(context: Context[Asked], machine: Machine, problem: Problem) -> Record:
    """Returns measured makespans of what methods place, and of DOPPLER's stage 3.

    `doppler` is the placement that stage 3, `doppler_sys`, starts from: both are of the
    same policy.
    """
    asked = context.settings
    spend, links = Spend(asked.measured_evaluations), asked.training.links
    placements = {
        method: place_cell(problem, method, spend, 0, links)["placement"]
        for method in asked.measured_method
        if method != "doppler"
    }
    folder = context.folder / "stage3" / problem.name
    effort = asked.measured_evaluations, asked.updates, asked.training
    improved = improve(problem, machine.pair_measure(problem), folder, *effort)
    plans = {"doppler": improved["stage2"], "doppler_sys": improved["stage3"]}
    listed = dj.place(problem.graph, problem.costs, method=LISTED).placement
    run = {LISTED: listed, **placements, SYNCHRONOUS: listed}
    run |= {method: dj.Plan(**plan) for method, plan in plans.items()}
    return {
        "seconds": measure_plans(machine, problem, run, asked.rounds, [SYNCHRONOUS]),
        "placements": placements | {m: plan["placement"] for m, plan in plans.items()},
    }


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns a row per workload and the paper's under it, simulated and measured."""
    halves = by(records, "workload")
    simulated = [r | {"workload": r["problem"].split(":")[0]} for r in halves.pop(None, [])]
    measured = [
        {"workload": workload, "method": method, "seed": seed, "makespan_s": seconds}
        for workload, (record,) in halves.items()
        for method, rounds in record["seconds"].items()
        for seed, seconds in enumerate(rounds)
    ]
    texts, panels = {}, []
    for title, found, budget in (
        ("Simulated on 4 P100", simulated, ("budget",)),
        ("Measured on this machine's devices, runs in turns", measured, ()),
    ):
        for workload, here in by(found, "workload").items():
            panels.append((f"{workload}: {title.lower()}", _bars(workload, here)))
        shown = with_paper(found, "workload", TABLE_2_MS)
        texts[title] = means_table(shown, ("workload", *budget), scale=1e3)
    barriers = [r | {"where": "simulated"} for r in simulated if "barriers" in r]
    for workload, (record,) in halves.items():
        with_them, without = (record["seconds"][name] for name in (SYNCHRONOUS, LISTED))
        row = {"workload": workload, "where": "measured here", "method": LISTED}
        turns = zip(with_them, without, strict=True)
        barriers += [row | {"barriers": slow_s / fast_s} for slow_s, fast_s in turns]
    row = {"where": "the paper's", "method": "enumerative"}
    barriers += [row | {"workload": w, "barriers": r} for w, r in PAPER_BARRIERS.items()]
    heading = "Makespan with barriers over that without"
    texts[heading] = means_table(barriers, ("workload", "where"), value="barriers")
    draw = partial(plot_bars, panels=panels, x_label="makespan (ms)", other_label="paper")
    return Page(texts, {"table.png": draw} if panels else {})


def _bars(workload: str, records: list[Record]) -> Bars:
    found = {
        method: 1e3 * np.array([r.get("makespan_s", np.nan) for r in runs])
        for method, runs in by(records, "method").items()
    }
    paper = TABLE_2_MS.get(workload, {})
    return Bars(
        labels=tuple(found),
        height=np.array([ms.mean() for ms in found.values()]),
        spread=np.array([ms.std() for ms in found.values()]),
        other=np.array([paper.get(method, np.nan) for method in found]),
        emphasised=("doppler", "doppler+search", "doppler_sys"),
    )


QUICK = {
    "seconds": (8.0,), "seeds": 2, "measured_method": ("critical_path", "heft", "doppler"),
    "measured_evaluations": 20_000, "updates": 4,
}  # fmt: skip

SETTINGS = Asked(problems=PAPER, method=METHODS, seconds=(120.0,))

STUDY = Study("table", SETTINGS, cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
