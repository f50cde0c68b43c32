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
    rows = compare_simulated(settings, preset, simulated.placement)
    with Machine(NUM_DEVICES, settings.backend) as machine:
        if machine.backend == "local":
            machine.num_devices = len(local_devices())
        here = choose_here(settings, machine)
        measured = train_measured(settings, machine, here, simulated.policy)
        measured_rows = compare_measured(settings, machine, here, measured.placement)
        error = run_learned(settings, machine, here, measured)
    summary = {
        "settings": {k: str(v) for k, v in dataclasses.asdict(settings).items()},
        "provenance": provenance(),
        "simulated": rows,
        "measured": measured_rows,
        "stage1_makespan_s": taught.seconds,
        "output_error": error,
    }
    write_json_atomic(settings.folder / "summary.json", summary)
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
    return taught, run_stage2(
        preset,
        settings.folder / "stage2" / preset.name,
        taught.policy,
        seed=settings.seed,
        num_updates=settings.simulation_updates,
        config=SimConfig(),
    )


def finished(placed: dj.Placed) -> dj.Placed:
    """Returns a placement as it is, so that Ctrl-C ends the demo and not just a search.

    Raises:
      KeyboardInterrupt: the search was stopped.
    """
    if placed.interrupted:
        raise KeyboardInterrupt
    return placed


def place_simply(settings: DemoSettings, chosen: Chosen) -> dict[str, dj.Placed]:
    """Places by the methods that the learned policy is compared with."""
    problem, key = (chosen.graph, chosen.costs), jax.random.key(settings.seed)
    drawn = dj.place(*problem, method="random", key=key, max_evaluations=1000)
    listed = dj.place(*problem, method="critical_path")
    return {"critical path": listed, "random, best of 1000": finished(drawn)}


def compare_simulated(
    settings: DemoSettings, preset: Chosen, learned: np.ndarray
) -> dict[str, float]:
    """Prints every method's makespan on the preset cluster, and draws the first and last."""
    assert preset.sharded is not None
    planned = choose_workload(
        settings.workload, "paper", preset.cluster, settings.cluster, "planner"
    )
    schedules = {name: p.schedule for name, p in place_simply(settings, preset).items()}
    listed = dj.place(planned.graph, planned.costs, method="critical_path")
    schedules["critical path, cut by the planner"] = listed.schedule
    ours = dj.simulate_oracle(preset.graph, preset.costs, learned)
    schedules["learned (stages 1 and 2)"] = ours
    makespans = {name: dj.makespan_s(schedule) for name, schedule in schedules.items()}
    bound = format_seconds(dj.lower_bound_s(preset.graph, preset.costs))
    print_table(
        f"{preset.name}: {preset.graph.num_tasks} tasks on {settings.cluster}, simulated "
        f"(no placement below {bound})",
        ("method", "makespan"),
        [(name, format_seconds(s)) for name, s in makespans.items()],
    )
    drawn = [(name, schedules[name], preset.sharded.names) for name in [*schedules][::3]]
    dj.plot_gantt(settings.folder / "gantt.png", drawn, num_devices=preset.costs.num_devices)
    return makespans


def choose_here(settings: DemoSettings, machine: Machine) -> Chosen:
    """Returns the workload at sizes for this machine, with what it costs there."""
    host = saved_host(settings.folder)
    chosen = choose_workload(settings.workload, "small", host, "host", "uniform")
    assert chosen.sharded is not None
    path = settings.folder / f"calibration-{machine.backend}.json"
    calibration = dj.measure_calibration(chosen.sharded, machine.devices, path=path)
    costs = dj.make_costs(chosen.sharded, calibration)
    return dataclasses.replace(chosen, name=f"{chosen.name}-{machine.backend}", costs=costs)


def train_measured(
    settings: DemoSettings, machine: Machine, here: Chosen, policy: dj.Policy
) -> StageResult:
    """Runs stage 3 on this machine's devices, from the best of 256 placements of stage 2's."""
    key = jax.random.key(settings.seed)
    start = dj.place(here.graph, here.costs, policy=policy, key=key, max_evaluations=256)
    return run_stage3(
        here,
        settings.folder / "stage3" / here.name,
        policy,
        finished(start).placement,
        machine.pair_measure(here, settings.seed),
        seed=settings.seed,
        num_updates=settings.system_updates,
        config=SystemConfig(),
    )


def compare_measured(
    settings: DemoSettings, machine: Machine, here: Chosen, learned: np.ndarray
) -> list[dict[str, Any]]:
    """Prints and returns every method's makespan here, simulated and measured."""
    placements = {name: p.placement for name, p in place_simply(settings, here).items()}
    placements["learned (stages 1 to 3)"] = learned
    rows = []
    for name, seconds in measure_placements(machine, here, placements, ROUNDS).items():
        schedule = dj.simulate_oracle(here.graph, here.costs, placements[name])
        low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
        row = {"method": name, "simulated_s": dj.makespan_s(schedule), "measured_s": median}
        where = placements[name].tolist()
        rows.append(row | {"quartiles_s": [low, high], "placement": where})
    what = "CPU devices of a core each"
    if machine.backend == "local":
        what = f"x {machine.devices[0].device_kind}"
    print_table(
        f"{here.name}: {here.graph.num_tasks} tasks on {machine.num_devices} {what}, "
        f"median and quartiles of {ROUNDS} rounds",
        ("method", "simulated", "measured", "quartiles"),
        [
            (
                row["method"],
                *(format_seconds(row[kind]) for kind in ("simulated_s", "measured_s")),
                " to ".join(format_seconds(s, 3) for s in row["quartiles_s"]),
            )
            for row in rows
        ],
    )
    if machine.backend == "local" and machine.devices[0].platform == "cpu":
        print(
            "These CPU devices share the machine's cores: their times show order and\n"
            "overhead, and a placement on one device can be as fast as one on both."
        )
    return rows


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
