"""What stage 3 is worth: `python -m experiments.stage3_study --quick`.

For each workload, on isolated devices where this machine has any: stage 3 goes on from the
policy of stage 2, which learned in the simulator at costs as calibrated, and its placement is
measured against stage 2's. Then again with a stage 2 that was told transfers cost ten times
as much as they do, and a tenth: what that lost, and how much of it stage 3 wins back. The
folder runs/stage3_study/BACKENDxDEVICES/ gets study.md, study.json, and all that is needed to
go on where a run was stopped.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.budget import Budget
from doppler_jax.engine.calibrate import measure_calibration
from doppler_jax.files import write_json_atomic
from doppler_jax.learners.doppler import Doppler, policy_candidates
from doppler_jax.learners.learner import train_learner
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.problems import Chosen, choose_workload, saved_host, use_host_devices
from doppler_jax.reports.tables import format_seconds, format_table
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.training.paired import Measure, Paired
from doppler_jax.training.stages import run_stage3
from doppler_jax.training.system_rl import SystemConfig
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.isolation import BackendChoice, choose_backend
from experiments.machine import Machine
from experiments.provenance import provenance

FACTORS = {"calibrated": 1.0, "ten times": 10.0, "a tenth": 0.1}
"""What stage 2 believed of transfers, over what they cost."""

MOST_EPISODES = 300
"""Placements that stage 3 may measure."""

COLUMNS = (
    "workload",
    "believed of transfers",
    "stage 2",
    "stage 3",
    "stage 3 / stage 2",
    "measured placements",
    "stage 2 lost",
    "stage 3 lost",
    "won back",
)


@dataclasses.dataclass(frozen=True)
class StudySettings:
    """What to compare."""

    workloads: tuple[str, ...] = dataclasses.field(
        default_factory=lambda: tuple(dj.list_workloads())
    )
    preset: str = "medium"
    """Sizes of the workloads."""
    backend: BackendChoice = "auto"
    """Of the engine, as for stage 3."""
    num_devices: int = 2
    num_shards: int = 4
    """Blocks per tensor of the uniform cut: the planner's leaves little to transfer, and so
    little that false costs could spoil."""
    evaluations: int = 200_000
    """Placements that stages 1 and 2 simulate."""
    num_updates: int = 20
    """Of stage 3."""
    compare_pairs: int = 15
    """Runs of each placement in what the table says was lost."""
    seed: int = 0
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to stage3_study/ in there."""
    quick: bool = False
    """Two small workloads, little training: a check that it runs."""
    training: SystemConfig = dataclasses.field(default_factory=SystemConfig)


def main(settings: StudySettings) -> None:
    """Measures what is missing, prints and writes the results."""
    if settings.quick:
        settings = dataclasses.replace(
            settings,
            workloads=settings.workloads[:2],
            preset="small",
            evaluations=3_000,
            num_updates=1,
            compare_pairs=9,
        )
    check_settings(settings)
    training = settings.training
    episodes = settings.num_updates * (training.batch + training.proposals + 1) + 2
    if episodes > MOST_EPISODES:
        raise ValueError(
            f"stage 3 would measure up to {episodes} placements; expected at most "
            f"{MOST_EPISODES}: lower --num-updates, --training.batch or --training.proposals"
        )
    for name in settings.workloads:
        dj.make_workload(name, settings.preset)
    use_host_devices(settings.num_devices)
    backend = choose_backend(settings.backend, settings.num_devices)
    folder = settings.runs / "stage3_study" / f"{backend}x{settings.num_devices}"
    folder = folder / settings.preset
    with Machine(settings.num_devices) as machine:
        devices = machine.devices(backend)
        records = [
            record
            for name in settings.workloads
            for record in study(settings, name, backend, devices, folder)
        ]
    write(records, folder)


def study(
    settings: StudySettings,
    name: str,
    backend: str,
    devices: Sequence[Any],
    folder: pathlib.Path,
) -> list[dict[str, Any]]:
    """Returns the records of one workload, one for each of `FACTORS`."""
    here = folder / name
    chosen = calibrated(settings, name, backend, devices, folder)
    assert chosen.workload is not None
    assert chosen.sharded is not None
    measure = dj.make_paired_measure(
        chosen.sharded,
        dj.make_arrays(chosen.workload, jax.random.key(settings.seed)),
        devices,
    )
    options = {"runs": None, "quick": None, "workloads": None, "backend": backend}
    terms = {**dataclasses.asdict(settings), **options}
    cells = Cells(here / "cells")
    records: list[dict[str, Any]] = []
    for believed, factor in FACTORS.items():

        def make(believed: str = believed, factor: float = factor) -> dict[str, Any]:
            record = improve(settings, chosen, factor, measure, here / believed)
            if records:  # the first is of true costs
                best = np.array(records[0]["stage2"])
                for stage in ("stage2", "stage3"):
                    found = np.array(record[stage])
                    pairs = measure(found, best, settings.compare_pairs)
                    record[f"{stage}_against_calibrated"] = as_json(pairs)
            return {"workload": name, "believed": believed, **record}

        records.append(cells.get(believed.replace(" ", "_"), terms, make))
    return records


def calibrated(
    settings: StudySettings,
    name: str,
    backend: str,
    devices: Sequence[Any],
    folder: pathlib.Path,
) -> Chosen:
    """Returns a workload with what its kernels and transfers cost on the devices."""
    chosen = choose_workload(
        name, settings.preset, saved_host(folder), "host", "uniform", settings.num_shards
    )
    assert chosen.sharded is not None
    (folder / name).mkdir(parents=True, exist_ok=True)
    path = folder / name / "calibration.json"
    calibration = measure_calibration(chosen.sharded, devices, path=path)
    return dataclasses.replace(chosen, costs=dj.make_costs(chosen.sharded, calibration))


def improve(
    settings: StudySettings,
    chosen: Chosen,
    factor: float,
    measure: Measure,
    folder: pathlib.Path,
) -> dict[str, Any]:
    """Trains by stages 1 and 2 at falsified costs, and by stage 3 from there."""
    costs = falsified(chosen.costs, factor)
    chosen = dataclasses.replace(chosen, costs=costs)
    key, draw_key = jax.random.split(jax.random.key(settings.seed))
    problem = make_policy_inputs(chosen.graph, costs)
    links = settings.training.links
    trained = train_learner(
        Doppler(), problem, key, Budget(evaluations=settings.evaluations), links=links
    )
    policy = trained.policy
    candidates = np.concatenate(
        [
            trained.placements,
            policy_candidates(problem, policy, draw_key, 64),
        ]
    )
    placement, _ = best_placement(chosen.graph, costs, candidates, links)
    after = run_stage3(
        chosen,
        folder,
        policy,
        placement,
        measure,
        seed=settings.seed,
        num_updates=settings.num_updates,
        config=settings.training,
    )
    found = after.comparison
    assert found is not None
    log = (folder / "measurements.jsonl").read_text()
    return {
        "tasks": chosen.graph.num_tasks,
        "stage2": placement.tolist(),
        "stage3": after.placement.tolist(),
        "stage2_s": found.first_s,
        "stage3_s": found.seconds,
        "ratio": found.ratio,
        "interval": bounds(found.interval),
        "measured_placements": log.count("\n"),
    }


def falsified(costs: dj.Costs, factor: float) -> dj.Costs:
    """Returns the costs with all that transfers take, devices' own time too, times a factor."""
    names = ("latency_s", "seconds_per_byte", "handling_s", "handling_s_per_byte")
    found = {name: getattr(costs, name) for name in names}
    return dataclasses.replace(
        costs, **{name: y * factor for name, y in found.items() if y is not None}
    )


def as_json(pairs: Paired) -> dict[str, Any]:
    """Returns the median ratio of pairs, with its confidence interval."""
    return {
        "ratio": pairs.ratio,
        "interval": bounds(pairs.interval()),
        "is_aborted": pairs.is_aborted,
    }


def bounds(interval: tuple[float, float]) -> list[float] | None:
    """Returns an interval for JSON, None where there were too few pairs for one."""
    return list(interval) if np.isfinite(interval).all() else None


def write(records: list[dict[str, Any]], folder: pathlib.Path) -> None:
    """Prints and writes the table."""
    origin = provenance()
    text = format_table(COLUMNS, [table_row(record) for record in records])
    stated = ", ".join(f"{key} {value}" for key, value in origin.items())
    text += (
        "\nMedian ratios of paired runs, with 95% confidence intervals. Lost: time beyond "
        "that of stage 2's placement at calibrated costs. `>`: runs that were cut short. "
        "Dropped: a last incumbent that was slower in the final pairs."
        f"\n\nMade by `experiments.stage3_study`: {stated}.\n"
    )
    print(text)
    (folder / "study.md").write_text(text, encoding="utf-8")
    write_json_atomic(folder / "study.json", {"provenance": origin, "records": records})


def table_row(record: dict[str, Any]) -> tuple[str, ...]:
    """Returns the row of one record."""
    interval = record["interval"]
    spread = "" if interval is None else f" ({interval[0]:.3f} to {interval[1]:.3f})"
    ratio = f"{record['ratio']:.3f}{spread}"
    if record["stage3"] == record["stage2"] and record["ratio"] != 1:
        ratio = f"1.000; dropped {ratio}"
    row = (
        f"{record['workload']}, {record['tasks']} tasks",
        record["believed"],
        format_seconds(record["stage2_s"]),
        format_seconds(record["stage3_s"]),
        ratio,
        str(record["measured_placements"]),
    )
    if "stage2_against_calibrated" not in record:
        return (*row, "", "", "")
    stages = [record[f"{stage}_against_calibrated"] for stage in ("stage2", "stage3")]
    lost, left = (stage["ratio"] - 1 for stage in stages)
    shown = [">" * stage["is_aborted"] + f"{stage['ratio'] - 1:+.1%}" for stage in stages]
    # Where nothing to speak of was lost, there is no share of it.
    is_lost = stages[0]["is_aborted"] or stages[0]["interval"][0] > 1
    return (*row, *shown, f"{1 - left / lost:.0%}" if is_lost else "")


if __name__ == "__main__":
    cli.run(main, StudySettings, "What stage 3 is worth, on devices that are measured.")
