"""The paper's Table 2: `python -m experiments.table`.

Simulated: every method places the four workloads on 4 P100 within the same seconds of a cold
call. Measured: every method places them under this machine's calibrated costs, and its
placements run here, on isolated devices, in turns; `doppler_sys` is stage 3, which goes on
from DOPPLER's policy by measuring. The paper's own figures stand beside.
"""

import dataclasses
from functools import partial

import numpy as np

import doppler_jax as dj
from doppler_jax.reports.pictures import Bars, plot_bars
from doppler_jax.training.system_rl import SystemConfig
from experiments import grid
from experiments.catalogue import PAPER, WORKLOADS
from experiments.grid import Cell, Context, MethodSettings, Page, Record, Study
from experiments.machine import Machine, measure_placements
from experiments.stage3_study import improve

_SYSTEMS = ("critical_path", "placeto", "gdp", "enumerative", "doppler", "doppler_sys")

TABLE_2_MS = {
    "chainmm": dict(zip(_SYSTEMS, (230.4, 137.1, 198.0, 139.0, 122.5, 123.4), strict=True)),
    "ffnn": dict(zip(_SYSTEMS, (217.8, 126.3, 100.3, 50.2, 49.9, 47.4), strict=True)),
    "llama_block": dict(zip(_SYSTEMS, (230.9, 411.5, 336.5, 172.7, 191.5, 160.3), strict=True)),
    "llama_layer": dict(zip(_SYSTEMS, (292.6, 295.1, 231.5, 174.8, 167.0, 150.6), strict=True)),
}
"""The paper's execution times by workload and method, measured on 4 P100; `doppler_sys` is all
three stages. Ours are of other code, sizes and machines: orders and ratios compare."""

METHODS = (
    "critical_path", "heft", "placeto", "gdp", "enumerative", "annealing", "doppler",
    "doppler+search",
)  # fmt: skip

NUM_SHARDS = 4
"""Blocks per tensor of what is measured, as in the paper."""


@dataclasses.dataclass(frozen=True)
class TableSettings(MethodSettings):
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


def cells(context: Context[TableSettings]) -> list[Cell]:
    """Returns the cells of the simulated half, then those of the measured one."""
    asked = context.settings
    found = grid.method_cells(
        context, asked.problems, asked.method, asked.spends(), asked.seeds, asked.links
    )
    if asked.measured:
        machine = context.stack.enter_context(Machine(asked.num_devices))
        names = ("measured_preset", "measured_method", "measured_evaluations", "rounds")
        key = {name: getattr(asked, name) for name in (*names, "updates")}
        key |= {"training": dataclasses.asdict(asked.training), **machine.key}
        for workload in asked.measured:
            run = partial(measure, context, machine, workload)
            found.append(Cell({"measured": workload, **key}, run))
    return found


def measure(context: Context[TableSettings], machine: Machine, workload: str) -> Record:
    """Returns measured makespans of what methods place, and of DOPPLER's stage 3.

    `doppler` is the placement that stage 3, `doppler_sys`, starts from: both are of the
    same policy.
    """
    asked = context.settings
    made = dj.make_workload(workload, asked.measured_preset)
    problem = machine.calibrated(made, context.folder, "uniform", NUM_SHARDS)
    spend, links = grid.Spend(asked.measured_evaluations), asked.training.links
    placements = {
        method: grid.place_cell(problem, method, spend, 0, links)["placement"]
        for method in asked.measured_method
        if method != "doppler"
    }
    improved = improve(
        problem,
        machine.pair_measure(problem),
        context.folder / "stage3" / problem.name,
        evaluations=asked.measured_evaluations,
        num_updates=asked.updates,
        config=asked.training,
    )
    placements |= {"doppler": improved["stage2"], "doppler_sys": improved["stage3"]}
    return {
        "seconds": measure_placements(machine, problem, placements, asked.rounds),
        "simulated_s": {
            name: dj.makespan_s(
                dj.simulate_oracle(problem.graph, problem.costs, p, links=links)
            )
            for name, p in placements.items()
        },
        "placements": placements,
    }


def report(context: Context[TableSettings], records: list[Record]) -> Page:
    """Returns a row per workload and the paper's under it, simulated and measured."""
    simulated = [
        r | {"workload": r["problem"].split(":")[0]} for r in records if "problem" in r
    ]
    measured = [
        {"workload": r["measured"], "method": method, "seed": seed, "makespan_s": seconds}
        for r in records
        if "measured" in r
        for method, rounds in r["seconds"].items()
        for seed, seconds in enumerate(rounds)
    ]
    text, panels = "", []
    for title, found, budget in (
        ("Simulated on 4 P100", simulated, ("budget",)),
        ("Measured on this machine's devices, runs in turns", measured, ()),
    ):
        if not found:
            continue
        with_paper = []
        for workload in dict.fromkeys(r["workload"] for r in found):
            here = [r for r in found if r["workload"] == workload]
            with_paper += here + _paper_rows(workload, {r["method"] for r in here})
            panels.append(_panel(f"{workload}: {title.lower()}", workload, here))
        table = grid.means_table(with_paper, ("workload", *budget), scale=1e3)
        text += f"{title} (ms), mean and deviation; * is the least of a row.\n\n{table}\n"
    draw = partial(plot_bars, panels=panels, x_label="makespan (ms)", other_label="paper")
    return Page(text, {"table.png": draw} if panels else {})


def _paper_rows(workload: str, methods: set[str]) -> list[Record]:
    return [
        {"workload": f"{workload}, paper", "method": method, "makespan_s": 1e-3 * ms}
        for method, ms in TABLE_2_MS.get(workload, {}).items()
        if method in methods
    ]


def _panel(title: str, workload: str, records: list[Record]) -> Bars:
    by_method: dict[str, list[float]] = {}
    for record in records:
        by_method.setdefault(record["method"], []).append(record.get("makespan_s", np.nan))
    paper = TABLE_2_MS.get(workload, {})
    return Bars(
        title=title,
        labels=tuple(by_method),
        height=np.array([1e3 * np.mean(s) for s in by_method.values()]),
        spread=np.array([1e3 * np.std(s) for s in by_method.values()]),
        other=np.array([paper.get(method, np.nan) for method in by_method]),
        emphasised=("doppler", "doppler+search", "doppler_sys"),
    )


QUICK = {
    "seconds": (8.0,), "seeds": 2, "measured_method": ("critical_path", "heft", "doppler"),
    "measured_evaluations": 20_000, "updates": 4,
}  # fmt: skip

STUDY = Study(
    "table",
    TableSettings(problems=PAPER, method=METHODS, seconds=(120.0,)),
    cells,
    report,
    QUICK,
)

if __name__ == "__main__":
    STUDY.command()
