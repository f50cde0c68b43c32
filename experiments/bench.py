"""Benchmarks, as ratios within one run: `make bench`.

Compilation and steady state are timed apart; every figure is the median of repeats.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
import kernels
from doppler_jax import cli
from doppler_jax.files import write_json_atomic
from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import make_problem
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.reports.tables import format_seconds, format_table, print_table
from doppler_jax.simulator.simulate import simulate_instance
from doppler_jax.training.sim_rl import SimConfig, sim_update
from doppler_jax.training.state import init_state, make_optimizer
from experiments import bench_simulator
from experiments.bench_simulator import SimulatorSettings
from experiments.config import StageSettings, check_settings
from experiments.problems import choose, local_devices, use_host_devices
from experiments.provenance import provenance


@dataclasses.dataclass(frozen=True)
class BenchSettings(StageSettings):
    """What to measure on; a workload or, with --graph, a task graph's file."""

    workload: str = "llama_layer"
    repeats: int = 5
    simulator: SimulatorSettings = dataclasses.field(default_factory=SimulatorSettings)


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of the result."""

    what: str
    compile_s: float
    steady_s: float  # per item
    ratio: float  # of the yardstick's time per item to this one's
    yardstick: str


def main(settings: BenchSettings) -> None:
    """Measures, prints, and writes bench.json and bench.md; the simulator's part besides."""
    check_settings(settings)
    use_host_devices(settings.host_devices)
    chosen = choose(settings, settings.runs / "bench")
    bench_simulator.bench(
        chosen.name, chosen.graph, chosen.costs, settings.simulator, settings.runs
    )
    figures = bench_training(settings, chosen.graph, chosen.costs)
    if chosen.workload is not None:
        figures += bench_engine(settings)
    columns = ("what", "compilation", "per item", "items per second", "ratio", "yardstick")
    rows = [
        (
            figure.what,
            format_seconds(figure.compile_s, 3),
            format_seconds(figure.steady_s, 3),
            f"{1 / figure.steady_s:,.0f}",
            f"{figure.ratio:.3g}",
            figure.yardstick,
        )
        for figure in figures
    ]
    print_table(f"{chosen.name}: {chosen.graph.num_tasks} tasks", columns, rows)
    settings.runs.mkdir(parents=True, exist_ok=True)
    result = {
        "problem": chosen.name,
        "provenance": provenance(),
        "figures": [dataclasses.asdict(figure) for figure in figures],
    }
    write_json_atomic(settings.runs / "bench.json", result)
    (settings.runs / "bench.md").write_text(format_table(columns, rows))


def bench_training(
    settings: BenchSettings, graph: dj.TaskGraph, costs: dj.Costs
) -> list[Figure]:
    """Sampling an episode, and a whole update of stage 2, against simulating it alone."""
    problem, policy, config = make_problem(graph, costs), PolicyConfig(), SimConfig()
    params = model.init_params(jax.random.key(0), policy, problem)
    tables = jax.jit(partial(model.apply, config=policy))(params, problem=problem)
    keys = jax.random.split(jax.random.key(1), config.batch)
    sample = jax.vmap(rollout.sample, in_axes=(0, None, None))
    episodes = jax.jit(sample)(keys, problem, tables)
    _, alone_s = time_jitted(
        lambda: simulate_instance(problem.instance, episodes.placement), settings.repeats
    )
    optimizer = make_optimizer(config.learning_rate)
    state = init_state(jax.random.key(2), params, optimizer, problem, config.num_elites)
    sample_again = jax.jit(lambda *args: sample(*args))  # compiled afresh, to time that too
    runs = {
        "episode, sampled": lambda: sample_again(keys, problem, tables),
        "episode, sampled, simulated, learned from": lambda: sim_update(
            state, problem, policy, config
        ),
    }
    figures = []
    for what, run in runs.items():
        compile_s, steady_s = time_jitted(run, settings.repeats)
        item_s = steady_s / config.batch
        figures.append(Figure(what, compile_s, item_s, alone_s / steady_s, "simulating it"))
    return figures


def bench_engine(settings: BenchSettings) -> list[Figure]:
    """Tasks of the placed program against bare calls of the same executables."""
    devices = local_devices()
    workload = dj.make_workload("ffnn", batch=8, features=8, hidden=8, classes=8)
    sharded = dj.partition(dj.trace(workload.fn, *workload.args), 2)
    args = dj.make_arrays(workload, jax.random.key(0))
    n = sharded.graph.num_tasks
    placement = np.arange(n) % len(devices)
    bare = jax.jit(lambda x: x + 1.0).lower(args[0]).compile()
    bare_s = median_s(
        lambda: [jax.block_until_ready(bare(args[0])) for _ in range(n)], settings.repeats
    )
    figures = [Figure("bare compiled call, awaited", 0.0, bare_s / n, 1.0, "itself")]
    for mode in ("stream", "work_conserving"):
        step = kernels.compile(sharded, placement, devices=devices, mode=mode)
        task_s = kernels.measure_s(step, *args, repeats=5 * settings.repeats) / n
        what = f"engine, tiny task, {mode}"
        ratio = bare_s / n / task_s
        figures.append(Figure(what, step.compile_s, task_s, ratio, "bare call"))
    return figures


def time_jitted(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Returns seconds of compilation (first call less a later one) and of a later call."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    first_s = time.perf_counter() - began
    steady_s = median_s(lambda: jax.block_until_ready(run()), repeats)
    return max(first_s - steady_s, 0.0), steady_s


def median_s(run: Callable[[], Any], repeats: int) -> float:
    """Returns the median seconds of `repeats` calls."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


if __name__ == "__main__":
    cli.run(main, BenchSettings, "Benchmarks of simulator, training and engine.")
