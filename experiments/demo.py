"""The newcomer's command, `make demo`: from a JAX function to a learned plan that runs.

Trains chainmm by imitation and in simulation for a preset cluster, then on times measured
on this machine, and compares the result with the plans of `dj.place` on both. Its devices are
isolated ones where Ray is installed: a process each, pinned to a core.
"""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.engine.processes import LAUNCHERS
from doppler_jax.files import write_json_atomic
from doppler_jax.native import wait_until_compiled
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.problems import local_devices, use_host_devices
from doppler_jax.reports.page import write_report
from doppler_jax.reports.tables import format_seconds, print_table
from doppler_jax.simulator.oracle import simulate_plan
from doppler_jax.training.imitation import ImitationConfig
from doppler_jax.training.settings import check_settings
from doppler_jax.training.sim_rl import SimConfig
from doppler_jax.training.stages import (
    StageResult,
    plan_record,
    run_stage1,
    run_stage2,
    run_stage3,
)
from doppler_jax.training.system_rl import SystemConfig
from experiments.catalogue import Problem, load_problem
from experiments.grid import check_names, provenance
from experiments.machine import Machine, arguments, measure_plans, relative_error

NUM_DEVICES = 2
"""That the CPU is made into, where there is no accelerator."""

ROUNDS = 9
"""Times that each plan of the measured table is run, all in turn."""

DEFAULT_S = 4.0
"""Seconds of `dj.place` as it is by default."""


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """The demo's sizes; the defaults take minutes on two CPU cores."""

    workload: str = "chainmm"
    cluster: str = "p100x4"
    folder: pathlib.Path = pathlib.Path("runs/demo")
    """Where results go; an interrupted demo goes on from here."""
    seed: int = 0
    backend: str = "auto"
    """What runs placed programs: "ray", a process with a core of its own per device; "local",
    threads of this process; "auto", ray where there is no accelerator."""
    imitation_updates: int = 60
    simulation_updates: int = 200
    system_updates: int = 8


def main(settings: DemoSettings) -> None:
    """Trains, compares, checks and writes `settings.folder`."""
    check_settings(settings)
    check_names("--backend", [settings.backend], ("auto", "local", *LAUNCHERS))
    use_host_devices(NUM_DEVICES)
    # Beside training, so that `dj.place` has its 5 s to search in a fresh clone, too.
    wait_until_compiled(time.monotonic())
    # Every tensor is cut alike, as in the paper; the planner's cut is a row of its own.
    preset, planned = (
        load_problem(f"{settings.workload}:{settings.cluster}:{cut}")
        for cut in ("uniform", "planner")
    )
    settings.folder.mkdir(parents=True, exist_ok=True)
    taught, simulated = train_simulated(settings, preset)
    rows = compare_simulated(settings, preset, planned, simulated.plan)
    with Machine(NUM_DEVICES, settings.backend) as machine:
        if machine.backend == "local":
            machine.num_devices = len(local_devices())
        here = machine.calibrated(
            dj.workloads.make_workload(settings.workload, "small"), settings.folder
        )
        measured = train_measured(settings, machine, here, simulated.policy)
        measured_rows = compare_measured(settings, machine, here, measured.plan)
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
    print(f"open in a browser: {settings.folder}/report.html")
    print(f"checkpoint: {measured.folder}/checkpoints (dj.load_policy reads it)")


def train_simulated(settings: DemoSettings, preset: Problem) -> tuple[StageResult, StageResult]:
    """Runs stages 1 and 2 for the preset cluster."""
    chosen, seed, name = preset.chosen(), settings.seed, preset.name.replace(":", "-")
    first, second = settings.imitation_updates, settings.simulation_updates
    folder, policy, config = settings.folder, PolicyConfig(), ImitationConfig()
    taught = run_stage1(
        chosen,
        folder / "stage1" / name,
        seed=seed,
        num_updates=first,
        config=config,
        policy=policy,
    )
    start = chosen, folder / "stage2" / name, taught.policy
    return taught, run_stage2(*start, seed=seed, num_updates=second, config=SimConfig())


def finished(placed: dj.Placed) -> dj.Placed:
    """Returns what was found; Ctrl-C ends the demo and not just a search.

    Raises:
      KeyboardInterrupt: the search was stopped.
    """
    if placed.interrupted:
        raise KeyboardInterrupt
    return placed


def place_simply(settings: DemoSettings, problem: Problem) -> dict[str, dj.Plan]:
    """Plans by the methods that the learned policy is compared with, the default first."""
    args, key = (problem.graph, problem.costs), settings.seed
    default = dj.place(*args, key=key, budget_s=DEFAULT_S)
    drawn = dj.place(*args, method="random", key=key, max_evaluations=1000)
    listed = dj.place(*args, method="critical_path")
    found = {
        f"dj.place, {DEFAULT_S:g} s": finished(default),
        "critical path": listed,
        "random, best of 1000": finished(drawn),
    }
    return {name: placed.plan for name, placed in found.items()}


def compare_simulated(
    settings: DemoSettings, preset: Problem, planned: Problem, learned: dj.Plan
) -> dict[str, float]:
    """Prints every method's makespan on the preset cluster, and draws the first and last."""
    args = preset.graph, preset.costs
    plans = place_simply(settings, preset)
    schedules = {name: simulate_plan(*args, plan) for name, plan in plans.items()}
    listed = dj.place(planned.graph, planned.costs, method="critical_path")
    schedules["critical path, cut by the planner"] = listed.schedule
    schedules["learned (stages 1 and 2)"] = simulate_plan(*args, learned)
    makespans = {
        name: dj.simulator.makespan_s(schedule) for name, schedule in schedules.items()
    }
    bound = format_seconds(dj.lower_bound_s(*args))
    title = f"{preset.name}: {preset.graph.num_tasks} tasks, simulated"
    lines = [(name, format_seconds(s)) for name, s in makespans.items()]
    print_table(f"{title} (no plan below {bound})", ("method", "makespan"), lines)
    drawn = [(name, schedules[name], preset.program.names) for name in [*schedules][::4]]
    dj.reports.plot_gantt(
        settings.folder / "gantt.png", drawn, num_devices=preset.costs.num_devices
    )
    return makespans


def train_measured(
    settings: DemoSettings, machine: Machine, here: Problem, policy: dj.policies.Policy
) -> StageResult:
    """Runs stage 3 on this machine's devices, from a search that stage 2's policy begins."""
    key = settings.seed
    start = dj.place(here.graph, here.costs, policy=policy, key=key, max_evaluations=256)
    return run_stage3(
        here.chosen(),
        settings.folder / "stage3" / here.name,
        policy,
        finished(start).plan,
        machine.pair_measure(here, settings.seed),
        seed=settings.seed,
        num_updates=settings.system_updates,
        config=SystemConfig(),
    )


def compare_measured(
    settings: DemoSettings, machine: Machine, here: Problem, learned: dj.Plan
) -> list[dict[str, Any]]:
    """Prints and returns every method's makespan here, simulated and measured."""
    plans = place_simply(settings, here) | {"learned (stages 1 to 3)": learned}
    rows, lines = [], []
    for name, seconds in measure_plans(machine, here, plans, ROUNDS).items():
        simulated_s = dj.simulator.makespan_s(
            simulate_plan(here.graph, here.costs, plans[name])
        )
        low_s, median_s, high_s = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
        row = {"method": name, "simulated_s": simulated_s, "measured_s": median_s}
        rows.append(row | {"quartiles_s": [low_s, high_s], **plan_record(plans[name])})
        quartiles = f"{format_seconds(low_s, 3)} to {format_seconds(high_s, 3)}"
        lines.append((name, format_seconds(simulated_s), format_seconds(median_s), quartiles))
    what = "CPU devices of a core each"
    if machine.backend == "local":
        what = f"x {machine.devices[0].device_kind}"
    title = f"{here.name}: {here.graph.num_tasks} tasks on {machine.num_devices} {what}"
    columns = ("method", "simulated", "measured", "quartiles")
    print_table(f"{title}, median and quartiles of {ROUNDS} rounds", columns, lines)
    if machine.backend == "local" and machine.devices[0].platform == "cpu":
        print(
            "These CPU devices share the machine's cores: their times show order and\n"
            "overhead, and a placement on one device can be as fast as one on both."
        )
    return rows


def run_learned(
    settings: DemoSettings, machine: Machine, here: Problem, measured: StageResult
) -> float:
    """Runs the learned plan, checks its output, and writes the plan, its trace and a page.

    Returns:
      The largest difference from the plain function, over the output's largest entry.

    Raises:
      RuntimeError: the difference is more than rounding explains.
    """
    assert here.workload is not None
    args = arguments(here, settings.seed)
    step = machine.compile(here.program, measured.plan)
    error = relative_error(step(*args), jax.jit(here.workload.fn)(*args))
    print(f"placed program against the plain function: largest relative difference {error:.1e}")
    if not error <= 1e-4:
        raise RuntimeError(f"the placed program's output is wrong: difference {error}")
    step.save_trace(settings.folder / "trace.json")
    plan = simulate_plan(here.graph, here.costs, measured.plan)
    assert step.schedule is not None
    panels = [("simulated", plan), ("measured", step.schedule)]
    write_report(
        settings.folder / "report.html", here.graph, here.costs, panels,
        title=f"{here.name}, learned", names=here.program.names,
    )  # fmt: skip
    where = {**plan_record(measured.plan), "measured_s": measured.seconds}
    written = {"program": here.name, "tasks": list(here.program.names), **where}
    write_json_atomic(settings.folder / "placement.json", written)
    return error


if __name__ == "__main__":
    cli.run(main, DemoSettings, "Train chainmm through all three stages, and run the result.")
