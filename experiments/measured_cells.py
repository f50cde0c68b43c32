"""What methods are worth on this machine's devices: placements under calibrated costs, run."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.engine.placed import as_devices
from doppler_jax.training.paired import Measure
from doppler_jax.training.system_rl import SystemConfig
from experiments import stage3_study
from experiments.cells import Cells
from experiments.fidelity_cells import measure_rounds
from experiments.method_cells import NUM_SHARDS, Budget, MethodCells
from experiments.problems import Chosen
from experiments.stage3_study import StudySettings


@dataclasses.dataclass(frozen=True)
class MeasuredSettings:
    """How much to spend on one workload."""

    preset: str
    evaluations: int  # placements that a method simulates
    num_updates: int  # of stage 3
    rounds: int  # runs of each placement
    training: SystemConfig
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Bench:
    """A workload with calibrated costs, and what measures it."""

    workload: str
    chosen: Chosen
    backend: str
    devices: Sequence[Any]
    args: tuple[Any, ...]
    measure: Measure
    folder: pathlib.Path  # of all that is kept of it
    study: StudySettings


def make_bench(
    settings: MeasuredSettings,
    workload: str,
    backend: str,
    devices: Sequence[Any],
    folder: pathlib.Path,
) -> Bench:
    """Returns a workload, calibrated on the devices; what was calibrated before is read."""
    study = StudySettings(
        workloads=(workload,),
        preset=settings.preset,
        num_shards=NUM_SHARDS,
        evaluations=settings.evaluations,
        num_updates=settings.num_updates,
        seed=settings.seed,
        training=settings.training,
    )
    chosen = stage3_study.calibrated(study, workload, backend, devices, folder)
    assert chosen.workload is not None
    assert chosen.sharded is not None
    args = dj.make_arrays(chosen.workload, jax.random.key(settings.seed))
    measure = dj.make_paired_measure(chosen.sharded, args, devices)
    return Bench(workload, chosen, backend, devices, args, measure, folder / workload, study)


def measure_methods(
    settings: MeasuredSettings, bench: Bench, methods: Sequence[str]
) -> dict[str, Any]:
    """Returns measured makespans of what methods place, and of DOPPLER's stage 3.

    `doppler` is the placement that stage 3, `doppler_sys`, starts from: both are of the
    same policy.
    """
    links = settings.training.links
    cells = MethodCells(Cells(bench.folder / "cells"), links)
    budget = Budget(evaluations=settings.evaluations)
    placements, simulated_s, transfers = {}, {}, {}
    for method in methods:
        if method != "doppler":
            found = cells.get(bench.chosen, method, settings.seed, budget)
            placements[method] = found["placement"]
    improved = stage3_cell(settings, bench)
    placements |= {"doppler": improved["stage2"], "doppler_sys": improved["stage3"]}
    for method, placement in placements.items():
        schedule = dj.simulate_oracle(
            bench.chosen.graph, bench.chosen.costs, placement, links=links
        )
        simulated_s[method] = dj.makespan_s(schedule)
        transfers[method] = len(schedule.transfer_tensor)
    return {
        "workload": bench.workload,
        "tasks": bench.chosen.graph.num_tasks,
        "measured_s": run_in_turns(bench, placements, settings.rounds),
        "simulated_s": simulated_s,
        "transfers": transfers,
        "placements": placements,
        "stage3": {key: improved[key] for key in ("ratio", "interval", "measured_placements")},
    }


def stage3_cell(settings: MeasuredSettings, bench: Bench) -> dict[str, Any]:
    """Returns DOPPLER's placement after stages 1 and 2, and after stage 3 from there."""
    terms = dataclasses.asdict(settings) | {"rounds": None}
    return Cells(bench.folder / "cells").get(
        f"stage3-{settings.num_updates}-{settings.seed}",
        terms,
        lambda: stage3_study.improve(
            bench.study, bench.chosen, 1.0, bench.measure, bench.folder / "stage3"
        ),
    )


def run_in_turns(
    bench: Bench, placements: dict[str, Sequence[int]], rounds: int
) -> dict[str, list[float]]:
    """Returns the makespans `[rounds]` of each placement `[N]`; all take turns."""
    assert bench.chosen.sharded is not None
    found = measure_rounds(
        Cells(bench.folder / "rounds"),
        bench.chosen.sharded,
        bench.args,
        as_devices(bench.devices),
        np.array(list(placements.values()), np.int64),
        bench.chosen.costs,
        0,
        rounds,
    )
    return dict(zip(placements, found.makespan_s.T.tolist(), strict=True))
