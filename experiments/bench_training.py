"""How fast stage 2 trains: `python -m experiments.bench_training`, on CPUs and GPUs alike.

An episode counts when it went through rollout, simulation and update. Parts take turns with
the whole, so that a noisy machine is noisy for all; times are medians, compilation apart. On
CPUs give every core a device (`--host-devices`).
"""

import dataclasses
import pathlib
from functools import partial
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.files import write_json_atomic
from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import PolicyInputs, make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policies.rollout import Episode, PolicyTables
from doppler_jax.reports.tables import format_seconds, format_table
from doppler_jax.training.devices import everywhere
from doppler_jax.training.sim_rl import SimConfig, init_sim_state, sim_update
from experiments.config import StageSettings, check_settings
from experiments.problems import choose, use_host_devices
from experiments.provenance import provenance
from experiments.yardsticks.layered import layered_problem
from experiments.yardsticks.turns import Call, Timing, take_turns

WHOLE = "update"


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """How much to measure."""

    sizes: tuple[int, ...] = (256, 1024, 4096)
    """Tasks of layered graphs."""
    repeats: int = 5
    update: SimConfig = dataclasses.field(default_factory=SimConfig)


@dataclasses.dataclass(frozen=True)
class BenchTrainingSettings(StageSettings):
    """What to measure on; a workload or, with --graph, a task graph's file."""

    workload: str = "llama_layer"
    training: TrainingSettings = dataclasses.field(default_factory=TrainingSettings)


def main(settings: BenchTrainingSettings) -> None:
    """Measures, prints, and writes bench_training.json and bench_training.md."""
    check_settings(settings)
    use_host_devices(settings.host_devices)
    chosen = choose(settings, settings.runs / "bench")
    bench(chosen.name, chosen.graph, chosen.costs, settings.training, settings.runs)


def bench(
    name: str,
    graph: dj.TaskGraph,
    costs: dj.Costs,
    settings: TrainingSettings,
    runs: pathlib.Path,
) -> None:
    """Measures stage 2 on a problem, prints, and writes into the folder `runs`.

    Raises:
      ValueError: there are fewer than two `sizes`, or one is below 1.
    """
    sizes = settings.sizes
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise ValueError(f"--training.sizes are {sizes}; expected 2 or more counts")
    parts = time_parts(graph, costs, settings.update, settings.repeats)
    by_size = {}
    for size in sizes:
        calls = {WHOLE: update_call(*layered_problem(size, costs.num_devices), settings.update)}
        by_size[size] = take_turns(calls, settings.repeats)[WHOLE]
    seconds = [by_size[size].placement_s for size in sizes]
    result = {
        "problem": {"name": name, "tasks": graph.num_tasks, "edges": graph.num_edges},
        "provenance": provenance(),
        "settings": dataclasses.asdict(settings),
        "devices": settings.update.shards,
        "parts": {what: dataclasses.asdict(timing) for what, timing in parts.items()},
        "by_size": {size: dataclasses.asdict(timing) for size, timing in by_size.items()},
        "slope": np.polyfit(np.log(sizes), np.log(seconds), 1)[0].item(),
    }
    text = _text(result, parts, by_size)
    print(text)
    runs.mkdir(parents=True, exist_ok=True)
    write_json_atomic(runs / "bench_training.json", result)
    (runs / "bench_training.md").write_text(text, encoding="utf-8")


def time_parts(
    graph: dj.TaskGraph, costs: dj.Costs, config: SimConfig, repeats: int
) -> dict[str, Timing]:
    """Returns the timings of an update, of one without local search, and of sampling alone."""
    problem, policy = make_policy_inputs(graph, costs), PolicyConfig()
    params = jax.jit(partial(model.init_params, config=policy))(
        jax.random.key(0), problem=problem
    )
    tables = jax.jit(partial(model.apply, config=policy))(params, problem=problem)

    @jax.jit
    def sample(problem: PolicyInputs, tables: PolicyTables) -> Episode:
        keys = jax.random.split(jax.random.key(1), config.batch)
        return jax.vmap(rollout.sample, in_axes=(0, None, None))(keys, problem, tables)

    calls = {
        "sampling, one device": Call(
            config.batch, lambda: jax.block_until_ready(sample(problem, tables))
        ),
        "update without local search": update_call(
            graph, costs, dataclasses.replace(config, num_chains=0)
        ),
        WHOLE: update_call(graph, costs, config),
    }
    return take_turns(calls, repeats)


def update_call(graph: dj.TaskGraph, costs: dj.Costs, config: SimConfig) -> Call:
    """Returns a call of stage 2's update on fresh parameters."""
    problem, policy = make_policy_inputs(graph, costs), PolicyConfig()
    init = jax.jit(partial(model.init_params, config=policy))
    params = init(jax.random.key(0), problem=problem)
    state = init_sim_state(jax.random.key(1), params, problem, config)
    state, problem = jax.device_put((state, problem), everywhere(config.shards))
    return Call(
        config.batch,
        lambda: jax.block_until_ready(sim_update(state, problem, policy, config)),
    )


def _text(result: dict[str, Any], parts: dict[str, Timing], by_size: dict[int, Timing]) -> str:
    columns = ("what", "compilation", "per episode", "episodes per second", "share of time")

    def row(what: str, timing: Timing, share: str) -> tuple[str, ...]:
        seconds = (format_seconds(s, 3) for s in (timing.compile_s, timing.placement_s))
        return (what, *seconds, f"{1 / timing.placement_s:,.0f}", share)

    rows = [
        row(what, timing, f"{parts[WHOLE].times_as_fast_as(timing):.0%}")
        for what, timing in parts.items()
    ]
    rows += [row(f"update, {n:,} tasks in layers", timing, "") for n, timing in by_size.items()]
    problem, origin = result["problem"], result["provenance"]
    made = ", ".join(f"{key} {value}" for key, value in origin.items())
    return (
        f"Stage 2 on {problem['name']}: {problem['tasks']} tasks, {result['devices']} devices "
        f"share an update of {result['settings']['update']['batch']} episodes\n\n"
        f"{format_table(columns, rows)}\n"
        f"Slope of log time per episode over log tasks: {result['slope']:.2f}.\n\n"
        f"Made by `experiments.bench_training`: {made}.\n"
    )


if __name__ == "__main__":
    cli.run(main, BenchTrainingSettings, "How fast stage 2 trains.")
