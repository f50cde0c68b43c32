"""The simulator beside yardsticks: `python -m experiments.bench_simulator`.

Competitors take turns, and ratios are medians over the rounds of one run, so that a noisy
machine is noisy for all of them; times are medians as well, compilation apart. The
yardsticks are of the same semantics: our plain-Python oracle, a SimPy model, a Numba
model. They run on the CPU, whatever device the simulator runs on.
"""

import dataclasses
import multiprocessing
import os
import pathlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import jax
import numba
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.baselines.simple import random_placements
from doppler_jax.files import write_json_atomic
from doppler_jax.graphs.padded import pad_problem
from doppler_jax.reports.tables import format_seconds, format_table
from doppler_jax.simulator.simulate import SHARD_AT, sharded
from experiments.config import StageSettings, check_settings
from experiments.problems import choose, use_host_devices
from experiments.process_memory import peak_bytes
from experiments.provenance import provenance
from experiments.yardsticks import numba_model, simpy_model
from experiments.yardsticks.layered import WIDTH, layered_problem
from experiments.yardsticks.turns import Call, Timing, take_turns

VARIANTS: dict[str, dict[str, Any]] = {
    "simulate_padded": {},
    "simulate_padded, with schedule": {"schedule": True},
    "simulate_padded, serial links": {"links": "serial"},
}
"""Options of the core that are rows of the comparison."""

NUM_SLOW = 20
"""Placements that stand for a batch where a placement takes milliseconds."""


@dataclasses.dataclass(frozen=True)
class SimulatorSettings:
    """How much to measure."""

    batch: int = 4096
    """Placements of one call in the comparison; none of the next, so that it compiles."""
    batches: tuple[int, ...] = (1, 16, 128, 1024, 8192, 65536)
    """Placements of one call; the last is that of peak memory too."""
    sizes: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Tasks of layered graphs."""
    growth_batch: int = 768
    """Placements of a layered graph."""
    repeats: int = 7


@dataclasses.dataclass(frozen=True)
class BenchSimulatorSettings(StageSettings):
    """What to measure on; a workload or, with --graph, a task graph's file."""

    workload: str = "llama_layer"
    simulator: SimulatorSettings = dataclasses.field(default_factory=SimulatorSettings)


def main(settings: BenchSimulatorSettings) -> None:
    """Measures, prints, and writes bench_simulator.json and bench_simulator.md."""
    check_settings(settings)
    use_host_devices(settings.host_devices)
    chosen = choose(settings, settings.runs / "bench")
    bench(chosen.name, chosen.graph, chosen.costs, settings.simulator, settings.runs)


def bench(
    name: str,
    graph: dj.TaskGraph,
    costs: dj.Costs,
    settings: SimulatorSettings,
    runs: pathlib.Path,
) -> None:
    """Measures the simulator on a problem, prints, and writes into the folder `runs`.

    Raises:
      ValueError: `batches` or `sizes` are too few to say anything, or below 1.
    """
    for option, counts, least in (
        ("batches", settings.batches, 1),
        ("sizes", settings.sizes, 2),
    ):
        if len(set(counts)) < least or min(counts) < 1:
            raise ValueError(
                f"--simulator.{option} are {counts}; expected {least} or more counts"
            )
    memory = peak_memory(graph, costs, settings.batches[-1])
    compared = compare(graph, costs, settings)
    by_batch = {
        batch: against_numba(graph, costs, batch, settings.repeats)
        for batch in settings.batches
    }
    by_size = {}
    for size in settings.sizes:
        layered = layered_problem(size, costs.num_devices)
        by_size[size] = against_numba(*layered, settings.growth_batch, settings.repeats)
    result = {
        "problem": {"name": name, "tasks": graph.num_tasks, "edges": graph.num_edges},
        "provenance": provenance() | {"platform": jax.devices()[0].platform},
        "settings": dataclasses.asdict(settings),
        "compared": _as_json(compared),
        "by_batch": [_as_json(timings) for timings in by_batch.values()],
        "by_size": [{"tasks": n} | _as_json(timings) for n, timings in by_size.items()],
        "slopes": slopes(by_size),
        "peak_bytes": memory,
    }
    text = "\n".join(
        (
            f"{name}: {graph.num_tasks} tasks, {costs.num_devices} devices\n",
            _comparison_table(compared),
            _pairs_table("placements in a call", by_batch),
            _pairs_table(f"tasks in layers of {WIDTH}", by_size),
            _closing_text(result),
        )
    )
    print(text)
    runs.mkdir(parents=True, exist_ok=True)
    write_json_atomic(runs / "bench_simulator.json", result)
    (runs / "bench_simulator.md").write_text(text, encoding="utf-8")


def compare(
    graph: dj.TaskGraph, costs: dj.Costs, settings: SimulatorSettings
) -> dict[str, Timing]:
    """Returns the timing of every way to simulate random placements."""
    placements = random_placements(costs, np.random.default_rng(0), settings.batch)
    few, batch = placements[:NUM_SLOW], len(placements)
    most = numba.get_num_threads()

    def plain(simulate: Callable[..., Any]) -> Call:
        return Call(len(few), lambda: [simulate(graph, costs, p) for p in few], compiles=False)

    def native(threads: int, **options: Any) -> Call:
        run = partial(numba_model.makespans_s, graph, costs, placements, threads, **options)
        return Call(batch, run)

    calls = {
        "oracle": plain(dj.simulate_oracle),
        "SimPy": plain(simpy_model.makespan_s),
    }
    for threads in sorted({1, min(2, most), most}):
        calls[_numba(threads)] = native(threads)
    calls[f"{_numba(most)}, serial links"] = native(most, links="serial")
    for what, options in VARIANTS.items():
        calls[what] = jitted(graph, costs, placements, **options)
    calls["simulate (float64, checked)"] = Call(
        batch, lambda: dj.simulate(graph, costs, placements, schedule=False)
    )
    return take_turns(calls, settings.repeats)


def against_numba(
    graph: dj.TaskGraph, costs: dj.Costs, batch: int, repeats: int
) -> dict[str, Timing]:
    """Returns timings of the simulator and of Numba on all cores, makespans only."""
    placements = random_placements(costs, np.random.default_rng(0), batch)
    threads = numba.get_num_threads()
    native = partial(numba_model.makespans_s, graph, costs, placements, threads)
    ours = jitted(graph, costs, placements)
    return take_turns({"simulate_padded": ours, "numba": Call(batch, native)}, repeats)


def jitted(
    graph: dj.TaskGraph, costs: dj.Costs, placements: np.ndarray, **options: Any
) -> Call:
    """Returns a call of the float32 core on all local devices, everything already on them."""
    batch, devices = len(placements), jax.local_device_count()
    shards = devices if batch % devices == 0 and batch >= devices * SHARD_AT else 1
    run = sharded(shards, **options)
    padded = pad_problem(graph, costs)
    spare = padded.padded_tasks - graph.num_tasks
    rows = np.pad(placements, ((0, 0), (0, spare))).astype(np.int32)
    mesh = Mesh(np.array(jax.local_devices()[:shards]), ("batch",))
    padded = jax.device_put(padded, NamedSharding(mesh, PartitionSpec()))
    rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("batch")))
    return Call(batch, lambda: jax.block_until_ready(run(padded, rows, None, None)))


def slopes(by_size: dict[int, dict[str, Timing]]) -> dict[str, float]:
    """Returns, per competitor, the slope of log seconds per placement over log tasks."""
    sizes, timings = np.log(list(by_size)), list(by_size.values())
    return {
        what: np.polyfit(sizes, np.log([t[what].placement_s for t in timings]), 1)[0].item()
        for what in timings[0]
    }


def peak_memory(graph: dj.TaskGraph, costs: dj.Costs, batch: int) -> dict[str, float]:
    """Returns peak resident bytes of a fresh process that simulates a batch on the CPU."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as pool:  # raises if the process dies
        return pool.submit(_measure_memory, graph, costs, batch).result()


def _measure_memory(graph: dj.TaskGraph, costs: dj.Costs, batch: int) -> dict[str, float]:
    jax.config.update("jax_platforms", "cpu")
    use_host_devices(os.cpu_count() or 1)
    shape = (batch, graph.num_tasks)
    placements = np.random.default_rng(0).integers(0, costs.num_devices, shape, np.int32)
    peaks = {"before": peak_bytes()}
    for what, schedule in (("makespans", False), ("schedules", True)):
        dj.simulate(graph, costs, placements, schedule=schedule)
        peaks[what] = peak_bytes()
    return peaks


def _numba(threads: int) -> str:
    return f"numba, {threads} thread{'s' * (threads > 1)}"


def _as_json(timings: dict[str, Timing]) -> dict[str, Any]:
    return {
        what: dataclasses.asdict(timing) | {"placement_s": timing.placement_s}
        for what, timing in timings.items()
    }


def _comparison_table(compared: dict[str, Timing]) -> str:
    most = _numba(numba.get_num_threads())
    columns = (
        "what",
        "placements in a call",
        "compilation",
        "per placement",
        "placements per second",
        "times oracle",
        f"times {most}",
    )
    rows = [
        (
            what,
            f"{timing.batch:,}",
            format_seconds(timing.compile_s, 3),
            format_seconds(timing.placement_s, 3),
            f"{1 / timing.placement_s:,.0f}",
            f"{timing.times_as_fast_as(compared['oracle']):.3g}",
            f"{timing.times_as_fast_as(compared[most]):.3g}",
        )
        for what, timing in compared.items()
    ]
    return format_table(columns, rows)


def _pairs_table(what: str, pairs: dict[int, dict[str, Timing]]) -> str:
    columns = (
        what,
        "compilation",
        "per placement",
        "placements per second",
        f"{_numba(numba.get_num_threads())}, placements per second",
        "times that",
    )
    rows = []
    for size, timings in pairs.items():
        ours, native = timings["simulate_padded"], timings["numba"]
        rates = [f"{1 / timing.placement_s:,.0f}" for timing in (ours, native)]
        times = [format_seconds(s, 3) for s in (ours.compile_s, ours.placement_s)]
        rows.append((f"{size:,}", *times, *rates, f"{ours.times_as_fast_as(native):.3g}"))
    return format_table(columns, rows)


def _closing_text(result: dict[str, Any]) -> str:
    peaks = {what: f"{peak / 2**30:.2f} GiB" for what, peak in result["peak_bytes"].items()}
    growth = ", ".join(f"{slope:.2f} ({what})" for what, slope in result["slopes"].items())
    origin = ", ".join(f"{key} {value}" for key, value in result["provenance"].items())
    return (
        f"Slope of log time per placement over log tasks: {growth}.\n\n"
        f"Peak host memory of `simulate` on the CPU, {result['settings']['batches'][-1]:,} "
        f"placements: {peaks['makespans']}, with schedules {peaks['schedules']}; before it "
        f"{peaks['before']}.\n\n"
        f"Made by `experiments.bench_simulator`: {origin}.\n"
    )


if __name__ == "__main__":
    cli.run(main, BenchSimulatorSettings, "The simulator beside its yardsticks.")
