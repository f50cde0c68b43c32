"""How true the simulator is to the engine: `python -m experiments.fidelity`.

For each workload: `dj.measure_calibration` calibrates this machine, placements of every
quality are chosen at even quantiles of simulated makespan and measured in turns, several
rounds, as is each kernel by itself, since the machine's speed drifts. They are simulated with
the costs of those rounds under each kind of link. The folder
runs/fidelity/BACKENDxDEVICES/ gets fidelity.md, fidelity.json, fidelity.png, and all that is
needed to go on where a run was stopped.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.engine.calibrate import measure_calibration, measure_kernels_again
from doppler_jax.engine.placed import as_devices
from doppler_jax.files import write_json_atomic
from doppler_jax.programs.workloads import Workload
from doppler_jax.reports.scatter import Panel, plot_scatter
from doppler_jax.reports.tables import format_seconds, format_table
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.fidelity_cells import (
    TELLING,
    Agreement,
    agree,
    choose_placements,
    measure_rounds,
    simulate_all,
    steady_medians,
    with_medians,
)
from experiments.machine import BackendName, Machine
from experiments.problems import use_host_devices
from experiments.provenance import provenance

KERNEL_REPEATS = 3
"""Executions of each kernel by itself in a round, of which the median counts."""

COLUMNS = (
    "workload",
    "costs",
    "links",
    "measured",
    "Pearson",
    "Spearman",
    "Kendall",
    "error",
    "bias",
    f"pairs {TELLING:.0%} apart",
    "in order",
)
NOTE = """Makespans of placements spread evenly over what the simulator gives, against medians
of {rounds} measured rounds, each scaled to the median round, since the machine's speed drifts.
Costs as calibrated kernel by kernel in the same rounds, and refitted to what {teaching} other
placements showed of their tasks in them. * marks the links of least error.
"""


@dataclasses.dataclass(frozen=True)
class FidelitySettings:
    """What to compare."""

    workloads: tuple[str, ...] = dataclasses.field(
        default_factory=lambda: tuple(dj.list_workloads())
    )
    preset: str = "medium"
    """Sizes of the workloads."""
    backend: BackendName = "ray"
    """`local` on CPU devices shows order only: they share the machine's cores."""
    num_devices: int = 2
    num_shards: int = 4
    """Blocks per tensor."""
    placements: int = 40
    """Of each workload."""
    teaching: int = 8
    """Placements besides, whose executions refit the costs."""
    rounds: int = 21
    """Executions of each placement, of which the median counts."""
    seed: int = 0
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to fidelity/ in there."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """One workload's placements, `[B]`."""

    workload: str
    num_tasks: int
    measured_s: np.ndarray  # [rounds, B]
    simulated_s: dict[tuple[str, str], np.ndarray]  # [B] by costs and kind of link

    @property
    def median_s(self) -> np.ndarray:
        """Measured makespans `[B]`."""
        return steady_medians(self.measured_s)

    def agreement(self, costs: str) -> dict[str, Agreement]:
        """Returns how well makespans of these costs agree, by kind of link, the best first."""
        found = {
            links: agree(simulated_s, self.median_s)
            for (kind, links), simulated_s in self.simulated_s.items()
            if kind == costs
        }
        return dict(sorted(found.items(), key=lambda item: item[1].mean_relative_error))


def main(settings: FidelitySettings) -> None:
    """Measures what is missing, prints and writes the results."""
    check_settings(settings)
    if settings.placements < 2:
        raise ValueError("--placements is 1; expected at least 2, to compare")
    workloads = [dj.make_workload(name, settings.preset) for name in settings.workloads]
    use_host_devices(settings.num_devices)
    folder = settings.runs / "fidelity" / f"{settings.backend}x{settings.num_devices}"
    with Machine(settings.num_devices) as machine:
        compared = [compare(settings, machine, workload, folder) for workload in workloads]
    text = format_table(COLUMNS, [row for one in compared for row in _rows(one)])
    text += "\n" + NOTE.format(rounds=settings.rounds, teaching=settings.teaching)
    print(text)
    origin = provenance()
    stated = ", ".join(f"{key} {value}" for key, value in origin.items())
    (folder / "fidelity.md").write_text(
        f"{text}\nMade by `experiments.fidelity`: {stated}.\n", encoding="utf-8"
    )
    write_json_atomic(
        folder / "fidelity.json",
        {"provenance": origin, "workloads": [_record(one) for one in compared]},
    )
    plot_scatter(folder / "fidelity.png", [_panel(one) for one in compared])


def compare(
    settings: FidelitySettings, machine: Machine, workload: Workload, folder: pathlib.Path
) -> Compared:
    """Returns one workload's placements, simulated and measured."""
    folder = folder / f"{workload.name}-{settings.preset}-{settings.num_shards}"
    folder.mkdir(parents=True, exist_ok=True)
    program = dj.trace(workload.fn, *workload.args)
    sharded = dj.partition(program, settings.num_shards)
    devices = machine.devices(settings.backend)
    path = folder / "calibration.json"
    calibration = measure_calibration(sharded, devices, path=path)
    costs = dj.make_costs(sharded, calibration)
    placements = choose_placements(
        sharded.graph, costs, settings.placements + settings.teaching, settings.seed
    )
    is_teaching = np.zeros(len(placements), bool)
    is_teaching[np.linspace(0, len(placements) - 1, settings.teaching).astype(int)] = True

    def kernel_seconds() -> dict[str, list[float]]:
        again = measure_kernels_again(calibration, sharded, devices, repeats=KERNEL_REPEATS)
        return {digest: list(kernel.seconds) for digest, kernel in again.kernels.items()}

    measured = measure_rounds(
        Cells(folder / "cells"),
        sharded,
        dj.make_arrays(workload, jax.random.key(settings.seed)),
        as_devices(devices),
        np.concatenate([placements[is_teaching], placements[~is_teaching]]),
        costs,
        settings.teaching,
        settings.rounds,
        kernel_seconds,
    )
    steady = with_medians(calibration, measured.kernel_s)
    calibrated = dj.make_costs(sharded, steady)
    refitted = dj.make_costs(sharded, steady.updated(measured.seen))
    return Compared(
        workload=workload.name,
        num_tasks=sharded.graph.num_tasks,
        measured_s=measured.makespan_s[:, settings.teaching :],
        simulated_s={
            (kind, links): makespan_s
            for kind, believed in (("calibrated", calibrated), ("refitted", refitted))
            for links, makespan_s in simulate_all(
                sharded.graph, believed, placements[~is_teaching]
            ).items()
        },
    )


def _rows(compared: Compared) -> list[tuple[str, ...]]:
    low_s, high_s = compared.median_s.min(), compared.median_s.max()
    return [
        (
            compared.workload,
            costs,
            links if rank else f"{links}*",
            f"{format_seconds(low_s, 3)} to {format_seconds(high_s, 3)}",
            f"{found.pearson:.3f}",
            f"{found.spearman:.3f}",
            f"{found.kendall:.3f}",
            f"{found.mean_relative_error:.1%}",
            f"{found.bias:+.1%}",
            str(found.telling_pairs),
            "-" if found.ordered_share is None else f"{found.ordered_share:.3f}",
        )
        for costs in ("calibrated", "refitted")
        for rank, (links, found) in enumerate(compared.agreement(costs).items())
    ]


def _panel(compared: Compared) -> Panel:
    links = next(iter(compared.agreement("refitted")))
    return Panel(
        f"{compared.workload}, {compared.num_tasks} tasks, {links} links",
        compared.simulated_s["refitted", links],
        compared.median_s,
    )


def _record(compared: Compared) -> dict[str, Any]:
    agreement = {costs: compared.agreement(costs) for costs in ("calibrated", "refitted")}
    return {
        "workload": compared.workload,
        "num_tasks": compared.num_tasks,
        "measured_s": compared.measured_s.tolist(),
        "simulated_s": {
            costs: {
                links: compared.simulated_s[costs, links].tolist() for links in agreement[costs]
            }
            for costs in agreement
        },
        "agreement": {
            costs: {links: dataclasses.asdict(one) for links, one in found.items()}
            for costs, found in agreement.items()
        },
    }


if __name__ == "__main__":
    cli.run(main, FidelitySettings, "Simulated against measured makespans.")
