"""The newcomer's command, `make demo`: from a JAX function to a learned placement that runs.

Trains chainmm by imitation and in simulation for a preset cluster, then on times measured
on this machine, and compares the result with simple placements on both. Its devices are
isolated ones where Ray is installed: a process each, pinned to a core.
"""

import dataclasses
import pathlib
from typing import Any, Literal

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.files import write_json_atomic
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.problems import (
    Chosen,
    choose_workload,
    local_devices,
    saved_host,
    use_host_devices,
)
from doppler_jax.reports.tables import format_seconds, print_table
from doppler_jax.training.imitation import ImitationConfig
from doppler_jax.training.settings import check_settings
from doppler_jax.training.sim_rl import SimConfig
from doppler_jax.training.stages import StageResult, run_stage1, run_stage2, run_stage3
from doppler_jax.training.system_rl import SystemConfig
from experiments.grid import provenance
from experiments.machine import Machine, arguments, measure_placements

NUM_DEVICES = 2
"""That the CPU is made into, where there is no accelerator."""

ROUNDS = 9
"""Times that each placement of the measured table is run, all in turn."""


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """The demo's sizes; the defaults take minutes on two CPU cores."""

    workload: str = "chainmm"
    cluster: str = "p100x4"
    folder: pathlib.Path = pathlib.Path("runs/demo")
    """Where results go; an interrupted demo goes on from here."""
    seed: int = 0
    backend: Literal["auto", "local", "ray"] = "auto"
    """What runs placed programs: "ray", a process with a core of its own per device; "local",
    threads of this process; "auto", ray where there is no accelerator."""
    imitation_updates: int = 100
    simulation_updates: int = 300
    system_updates: int = 12


def main(settings: DemoSettings) -> None:
    """Trains, compares, checks and writes `settings.folder`."""
    check_settings(settings)
    use_host_devices(NUM_DEVICES)
    cluster = dj.make_cluster(settings.cluster)
    # Every tensor is cut alike, as in the paper; the planner's cut is a row of its own.
    preset = choose_workload(settings.workload, "paper", cluster, settings.cluster, "uniform")
    settings.folder.mkdir(parents=True, exist_ok=True)
    taught, simulated = train_simulated(settings, preset)
    simulated_rows = compare_simulated(settings, preset, simulated)
    report_simulated(settings, preset, simulated_rows)
    with Machine(NUM_DEVICES, settings.backend) as machine:
        if machine.backend == "local":
            machine.num_devices = len(local_devices())
        chosen = choose_here(settings, machine)
        measured, measured_rows = train_and_compare_measured(
            settings, machine, chosen, simulated
        )
        report_measured(machine, chosen, measured_rows)
        error = run_learned(settings, machine, chosen, measured)
    write_json_atomic(
        settings.folder / "summary.json",
        {
            "settings": {k: str(v) for k, v in dataclasses.asdict(settings).items()},
            "provenance": provenance(),
            "simulated": {name: makespan for name, makespan, _ in simulated_rows},
            "measured": measured_rows,
            "stage1_makespan_s": taught.seconds,
            "output_error": error,
        },
    )
    print(f"written to {settings.folder}/: summary.json, placement.json, trace.json, gantt.png")
    print(f"checkpoint: {measured.folder}/checkpoints (dj.load_policy reads it)")


def train_simulated(settings: DemoSettings, preset: Chosen) -> tuple[StageResult, StageResult]:
    """Runs stages 1 and 2 for the preset cluster."""
    taught = run_stage1(
        preset,
        settings.folder / "stage1" / preset.name,
        seed=settings.seed,
        num_updates=settings.imitation_updates,
        config=ImitationConfig(),
        policy=PolicyConfig(),
    )
    simulated = run_stage2(
        preset,
        settings.folder / "stage2" / preset.name,
        taught.policy,
        seed=settings.seed,
        num_updates=settings.simulation_updates,
        config=SimConfig(),
    )
    return taught, simulated


def finished(placed: dj.Placed) -> dj.Placed:
    """Returns a placement as it is, so that Ctrl-C ends the demo and not just a search.

    Raises:
      KeyboardInterrupt: the search was stopped.
    """
    if placed.interrupted:
        raise KeyboardInterrupt
    return placed


def place_simply(settings: DemoSettings, chosen: Chosen) -> list[tuple[str, dj.Placed]]:
    """Places by the methods that the learned policy is compared with."""
    key = jax.random.key(settings.seed)
    listed = dj.place(chosen.graph, chosen.costs, method="critical_path")
    drawn = dj.place(chosen.graph, chosen.costs, method="random", key=key, max_evaluations=1000)
    return [("critical path", listed), ("random, best of 1000", finished(drawn))]


def compare_simulated(
    settings: DemoSettings, preset: Chosen, simulated: StageResult
) -> list[tuple[str, float, dj.Schedule]]:
    """Returns name, makespan and schedule of every method on the preset cluster."""
    rows = [
        (name, placed.makespan_s, placed.schedule)
        for name, placed in place_simply(settings, preset)
    ]
    planned = choose_workload(
        settings.workload, "paper", preset.cluster, settings.cluster, "planner"
    )
    listed = dj.place(planned.graph, planned.costs, method="critical_path")
    rows.append(("critical path, cut by the planner", listed.makespan_s, listed.schedule))
    learned = dj.simulate_oracle(preset.graph, preset.costs, simulated.placement)
    return [*rows, ("learned (stages 1 and 2)", dj.makespan_s(learned), learned)]


def choose_here(settings: DemoSettings, machine: Machine) -> Chosen:
    """Returns the workload at sizes for this machine, with what it costs there."""
    host = saved_host(settings.folder)
    chosen = choose_workload(settings.workload, "small", host, "host", "uniform")
    assert chosen.sharded is not None
    backend = machine.backend
    path = settings.folder / f"calibration-{backend}.json"
    calibration = dj.measure_calibration(chosen.sharded, machine.devices, path=path)
    costs = dj.make_costs(chosen.sharded, calibration)
    return dataclasses.replace(chosen, name=f"{chosen.name}-{backend}", costs=costs)


def train_and_compare_measured(
    settings: DemoSettings, machine: Machine, chosen: Chosen, simulated: StageResult
) -> tuple[StageResult, list[dict[str, Any]]]:
    """Runs stage 3 on this machine's devices; returns it and the measured comparison."""
    start = dj.place(
        chosen.graph,
        chosen.costs,
        policy=simulated.policy,
        key=jax.random.key(settings.seed),
        max_evaluations=256,
    )
    trained = run_stage3(
        chosen,
        settings.folder / "stage3" / chosen.name,
        simulated.policy,
        finished(start).placement,
        machine.pair_measure(chosen, settings.seed),
        seed=settings.seed,
        num_updates=settings.system_updates,
        config=SystemConfig(),
    )
    placements = {name: placed.placement for name, placed in place_simply(settings, chosen)}
    placements["learned (stages 1 to 3)"] = trained.placement
    seconds = measure_placements(machine, chosen, placements, ROUNDS)
    rows = []
    for name, placement in placements.items():
        schedule = dj.simulate_oracle(chosen.graph, chosen.costs, placement)
        low, median, high = np.quantile(seconds[name], (0.25, 0.5, 0.75)).tolist()
        rows.append(
            {
                "method": name,
                "simulated_s": dj.makespan_s(schedule),
                "measured_s": median,
                "quartiles_s": [low, high],
                "placement": placement.tolist(),
            }
        )
    return trained, rows


def report_simulated(
    settings: DemoSettings, preset: Chosen, rows: list[tuple[str, float, dj.Schedule]]
) -> None:
    """Prints the preset cluster's table and draws critical path beside learned."""
    assert preset.sharded is not None
    bound = dj.lower_bound_s(preset.graph, preset.costs)
    print_table(
        f"{preset.name}: {preset.graph.num_tasks} tasks on {settings.cluster}, simulated "
        f"(no placement below {format_seconds(bound)})",
        ("method", "makespan"),
        [(name, format_seconds(makespan)) for name, makespan, _ in rows],
    )
    dj.plot_gantt(
        settings.folder / "gantt.png",
        [(rows[i][0], rows[i][2], preset.sharded.names) for i in (0, -1)],
        num_devices=preset.costs.num_devices,
    )


def report_measured(machine: Machine, chosen: Chosen, rows: list[dict[str, Any]]) -> None:
    """Prints this machine's table."""
    count = machine.num_devices
    shares_cores = machine.backend == "local" and machine.devices[0].platform == "cpu"
    what = f"{count} CPU devices of a core each"
    if machine.backend == "local":
        what = f"{count} x {machine.devices[0].device_kind}"
    print_table(
        f"{chosen.name}: {chosen.graph.num_tasks} tasks on {what}, median and quartiles of "
        f"{ROUNDS} rounds",
        ("method", "simulated", "measured", "quartiles"),
        [
            (
                row["method"],
                format_seconds(row["simulated_s"]),
                format_seconds(row["measured_s"]),
                " to ".join(format_seconds(s, 3) for s in row["quartiles_s"]),
            )
            for row in rows
        ],
    )
    if shares_cores:
        print(
            "These CPU devices share the machine's cores: their times show order and\n"
            "overhead, and a placement on one device can be as fast as one on both."
        )


def run_learned(
    settings: DemoSettings, machine: Machine, chosen: Chosen, measured: StageResult
) -> float:
    """Runs the learned placement, checks its output, writes its trace and placement.

    Returns:
      The largest difference from the plain function, over the output's largest entry.

    Raises:
      RuntimeError: the difference is more than rounding explains.
    """
    assert chosen.workload is not None
    assert chosen.sharded is not None
    args = arguments(chosen, settings.seed)
    step = machine.compile(chosen.sharded, measured.placement)
    found, expected = step(*args), jax.jit(chosen.workload.fn)(*args)
    error = max(jax.tree.leaves(jax.tree.map(_difference, found, expected)))
    print(f"placed program against the plain function: largest relative difference {error:.1e}")
    if not error <= 1e-4:
        raise RuntimeError(f"the placed program's output is wrong: difference {error}")
    step.save_trace(settings.folder / "trace.json")
    write_json_atomic(
        settings.folder / "placement.json",
        {
            "program": chosen.name,
            "tasks": list(chosen.sharded.names),
            "placement": measured.placement.tolist(),
            "measured_s": measured.seconds,
        },
    )
    return error


def _difference(found: jax.Array, expected: jax.Array) -> float:
    error, scale = (
        np.abs(np.asarray(a)).max(initial=0.0) for a in (found - expected, expected)
    )
    return float(error / scale) if error else 0.0


if __name__ == "__main__":
    cli.run(main, DemoSettings, "Train chainmm through all three stages, and run the result.")
