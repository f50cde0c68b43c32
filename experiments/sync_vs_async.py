"""What barriers cost: `python -m experiments.sync_vs_async`.

The same placements run work-conserving and bulk-synchronous: simulated on 4 P100, and
critical path's by the engine on this machine's devices. The paper's ratios stand beside.
"""

import dataclasses
from functools import partial
from typing import Any

import numpy as np

import doppler_jax as dj
from experiments import grid
from experiments.catalogue import PAPER, WORKLOADS
from experiments.grid import Cell, Context, MethodSettings, Page, Record, Study
from experiments.machine import Machine, arguments, in_turns, makespan_s, warm, warm_ratio

PAPER_RATIO = {"chainmm": 185.3 / 139.0, "ffnn": 76.9 / 50.2}
"""The paper's: bulk-synchronous over work-conserving execution of the same placement."""

MODES = ("work_conserving", "bulk_synchronous")

NUM_SHARDS = 4
"""Blocks per tensor of what is measured: where blocks depend on each other across devices,
barriers cost something."""


@dataclasses.dataclass(frozen=True)
class SyncSettings(MethodSettings):
    """What to compare."""

    measured: tuple[str, ...] = WORKLOADS
    """Workloads that are measured on this machine's devices too."""
    measured_preset: str = "medium"
    num_devices: int = 2
    """Devices that are measured on."""
    rounds: int = 15
    """Measured runs of either kind."""


def cells(context: Context[SyncSettings]) -> list[Cell]:
    """Returns the cells of simulated placements, then the measured ones."""
    asked = context.settings
    found = [
        cell.then(partial(simulate, context, cell.key["problem"]), modes="both")
        for cell in grid.method_cells(
            context, asked.problems, asked.method, asked.spends(), asked.seeds
        )
    ]
    if asked.measured:
        machine = context.stack.enter_context(Machine(asked.num_devices))
        key = {"preset": asked.measured_preset, "rounds": asked.rounds, **machine.key}
        for workload in asked.measured:
            run = partial(measure, context, machine, workload)
            found.append(Cell({"measured": workload, **key}, run))
    return found


def both(problem: Any, placement: np.ndarray) -> dict[str, dj.Schedule]:
    """Returns the schedules of a placement `[N]` in both modes."""
    return {
        "work_conserving": dj.simulate_oracle(problem.graph, problem.costs, placement),
        "bulk_synchronous": dj.simulate_synchronous(problem.graph, problem.costs, placement),
    }


def simulate(context: Context[SyncSettings], name: str, result: Record) -> Record:
    """Returns a method's result with the makespans of both modes."""
    schedules = both(context.problem(name), np.array(result["placement"]))
    return result | {mode: dj.makespan_s(schedule) for mode, schedule in schedules.items()}


def measure(context: Context[SyncSettings], machine: Machine, workload: str) -> Record:
    """Returns seconds of both modes, measured and simulated at calibrated costs."""
    made = dj.make_workload(workload, context.settings.measured_preset)
    problem = machine.calibrated(made, context.folder, "uniform", NUM_SHARDS)
    placed = dj.place(problem.graph, problem.costs, method="critical_path")
    args, where = arguments(problem), placed.placement
    assert problem.sharded is not None
    steps = {
        MODES[0]: machine.compile(problem.sharded, where, priority=placed.priority),
        MODES[1]: machine.compile(problem.sharded, where, mode=MODES[1]),
    }
    runs = {mode: partial(makespan_s, step, args) for mode, step in steps.items()}
    seconds = in_turns(runs, context.settings.rounds)
    simulated_s = {m: dj.makespan_s(s) for m, s in both(problem, where).items()}
    return {
        **{mode: warm(found) for mode, found in seconds.items()},
        "ratio": warm_ratio(seconds[MODES[1]], seconds[MODES[0]]),
        "simulated_ratio": simulated_s[MODES[1]] / simulated_s[MODES[0]],
    }


def report(context: Context[SyncSettings], records: list[Record]) -> Page:
    """Returns a row per placement."""
    rows = []
    for record in (r for r in records if "refused" not in r):
        workload = record.get("measured") or record["problem"].split(":")[0]
        conserving_s, synchronous_s = (record[mode] for mode in MODES)
        rows.append(
            {
                "workload": workload,
                "placement of": record.get("method", "critical_path"),
                "where": "measured here" if "measured" in record else "simulated",
                "work-conserving_s": conserving_s,
                "bulk-synchronous_s": synchronous_s,
                "ratio": record.get("ratio", synchronous_s / conserving_s),
                "simulated": record.get("simulated_ratio"),
                "paper": PAPER_RATIO.get(workload),
            }
        )
    return Page(
        "The same placement work-conserving and level by level with barriers: simulated on 4 "
        "P100, measured on this machine's devices. The paper measured its enumerative "
        f"placements on 4 P100.\n\n{grid.table(rows)}"
    )


SETTINGS = SyncSettings(
    problems=PAPER, method=("critical_path", "heft", "enumerative", "doppler"),
    evaluations=(100_000,), seeds=1,
)  # fmt: skip

QUICK = {
    "evaluations": (1000,), "problems": PAPER[:2], "measured": WORKLOADS[:2],
    "measured_preset": "small", "rounds": 5,
}  # fmt: skip

STUDY = Study("sync_vs_async", SETTINGS, cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
