"""What stage 3 is worth: `python -m experiments.stage3_study`.

For each workload, on isolated devices where this machine has any: stage 3 goes on from the
policy of stage 2, which learned in the simulator at costs as calibrated, and its placement is
measured against stage 2's. Then again with a stage 2 that was told transfers cost ten times
as much as they do, and a tenth: what that lost, and how much of it stage 3 wins back.

Median ratios of paired runs, with 95% confidence intervals. Believed: of transfers. Lost: time
beyond that of stage 2's placement at calibrated costs. `>`: runs cut short. Dropped: a last
incumbent that was slower in the final pairs.
"""

import dataclasses
import pathlib
from functools import partial

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.learners.doppler import Doppler
from doppler_jax.training.paired import Measure
from doppler_jax.training.stages import plan_record, run_stage3
from doppler_jax.training.system_rl import SystemConfig
from experiments.catalogue import Problem
from experiments.grid import Cell, Context, Page, Record, Study
from experiments.learning import learn
from experiments.machine import Machine, MachineSettings, measured_cells
from experiments.tables import table

FACTORS = {"calibrated": 1.0, "ten times": 10.0, "a tenth": 0.1}
"""What stage 2 believed of transfers, over what they cost."""

NUM_SHARDS = 4
"""Blocks per tensor of the uniform cut: the planner's leaves little to transfer, and so little
that false costs could spoil."""

NUM_SAMPLES = 64
"""Of stage 2's policy, candidates for the first incumbent."""


@dataclasses.dataclass(frozen=True)
class Asked(MachineSettings):
    """What to compare."""

    evaluations: int = 200_000
    """Placements that stages 1 and 2 simulate."""
    updates: int = 20
    """Of stage 3."""
    pairs: int = 15
    """Runs of each placement in what the table says was lost."""
    training: SystemConfig = dataclasses.field(default_factory=SystemConfig)


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per workload: one run of all beliefs."""
    asked = context.settings
    machine = context.stack.enter_context(Machine(asked.num_devices, asked.backend))
    cut, key = ("uniform", NUM_SHARDS), context.key("workloads", "preset", "backend")
    run = partial(compare, context)
    return measured_cells(context, machine, run, asked.workloads, asked.preset, *cut, **key)


def compare(context: Context[Asked], machine: Machine, problem: Problem) -> Record:
    """Returns, by belief, what stages 2 and 3 made of a workload, measured in pairs."""
    asked, measure = context.settings, machine.pair_measure(problem)
    found: dict[str, Record] = {}
    for believed, factor in FACTORS.items():
        wrong = dataclasses.replace(problem, costs=falsified(problem.costs, factor))
        folder = context.folder / asked.preset / problem.name / believed.replace(" ", "_")
        record = improve(
            wrong, measure, folder, asked.evaluations, asked.updates, asked.training
        )
        if found:  # the first is of true costs
            best = dj.Plan(**found["calibrated"]["stage2"])
            for stage in ("stage2", "stage3"):
                pairs = measure(dj.Plan(**record[stage]), best, asked.pairs)
                lost = {"ratio": pairs.ratio, "interval": _finite(pairs.interval())}
                record[f"{stage}_lost"] = lost | {"is_aborted": pairs.is_aborted}
        found[believed] = record
    return {"tasks": problem.graph.num_tasks, "by_belief": found}


def improve(
    problem: Problem,
    measure: Measure,
    folder: pathlib.Path,
    evaluations: int,
    num_updates: int,
    config: SystemConfig,
) -> Record:
    """Trains by stages 1 and 2 at a problem's costs, and by stage 3 from there."""
    graph, costs, budget = (
        problem.graph,
        problem.costs,
        dj.search.Budget(evaluations=evaluations),
    )
    key, links = jax.random.key(0), config.links
    before = learn(Doppler(), graph, costs, budget, key, samples=NUM_SAMPLES, links=links)
    first = dj.Plan(before.placement)
    chosen, start = problem.chosen(), (before.trained.policy, first, measure)
    after = run_stage3(chosen, folder, *start, seed=0, num_updates=num_updates, config=config)
    pairs, log = after.comparison, folder / "measurements.jsonl"
    assert pairs is not None
    return {
        "stage2": plan_record(first),
        "stage3": plan_record(after.plan),
        "stage2_s": pairs.first_s,
        "stage3_s": pairs.seconds,
        "ratio": pairs.ratio,
        "interval": _finite(pairs.interval),
        "measured placements": log.read_text().count("\n"),
    }


def falsified(costs: dj.Costs, factor: float) -> dj.Costs:
    """Returns the costs with all that transfers take, devices' own time too, times a factor."""
    names = ("latency_s", "seconds_per_byte", "handling_s", "handling_s_per_byte")
    found = {name: getattr(costs, name) for name in names}
    changes = {name: y * factor for name, y in found.items() if y is not None}
    return dataclasses.replace(costs, **changes)


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns a row per workload and belief."""
    rows = [
        {"workload": f"{r['workload']}, {r['tasks']} tasks", "believed": believed, **row(found)}
        for r in records
        for believed, found in r["by_belief"].items()
    ]
    return Page({"": table(rows)})


def row(found: Record) -> Record:
    """Returns the columns of one belief."""
    interval = found["interval"]
    spread = "" if interval is None else f" ({interval[0]:.3f} to {interval[1]:.3f})"
    ratio = f"{found['ratio']:.3f}{spread}"
    if found["stage3"] == found["stage2"] and found["ratio"] != 1:
        ratio = f"1.000; dropped {ratio}"
    row = {"stage 2_s": found["stage2_s"], "stage 3_s": found["stage3_s"]}
    row |= {"stage 3 / stage 2": ratio, "measured placements": found["measured placements"]}
    for stage in (2, 3):
        lost = found.get(f"stage{stage}_lost")
        text = lost and f"{'>' * lost['is_aborted']}{lost['ratio'] - 1:+.1%}"
        row[f"stage {stage} lost"] = text
    return row


def _finite(interval: tuple[float, float]) -> list[float] | None:
    """Returns an interval for JSON, None where there were too few pairs for one."""
    return list(interval) if np.isfinite(interval).all() else None


QUICK = {
    "workloads": ("chainmm", "ffnn"), "preset": "small", "evaluations": 3000, "updates": 1,
    "pairs": 9,
}  # fmt: skip

STUDY = Study("stage3_study", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
