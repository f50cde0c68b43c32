"""The simulator's formulations against each other: `python -m experiments.bench_formulations`.

What `simulate.py` chooses by rests on these figures: slots or queues by the width of the
graph, how many lanes a kernel of each wants, and what `duplex` links cost as graphs grow.
One device, and one thread of Numba beside it; competitors take turns, and times are medians
over the rounds.
"""

import dataclasses
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.baselines.simple import random_placements
from doppler_jax.files import write_json_atomic
from doppler_jax.graphs.padded import PaddedProblem, pad_problem
from doppler_jax.reports.tables import format_table
from doppler_jax.simulator.chain_slots import run_chain_slots
from doppler_jax.simulator.duplex_links import run_duplex_links
from doppler_jax.simulator.lockstep import LANES, Run, run_batch
from doppler_jax.simulator.queue_trees import queue_order
from doppler_jax.simulator.ready_queues import run_ready_queues
from experiments.config import check_settings
from experiments.provenance import provenance
from experiments.yardsticks import numba_model
from experiments.yardsticks.layered import layered_problem
from experiments.yardsticks.turns import Call, take_turns

SLOTS = partial(run_chain_slots, serial=False, schedule=False)
QUEUES = partial(run_ready_queues, serial=False, schedule=False)
ENGINE = partial(run_duplex_links, schedule=False)


@dataclasses.dataclass(frozen=True)
class FormulationSettings:
    """How much to measure; layered graphs with lognormal costs, random placements."""

    widths: tuple[int, ...] = (16, 32, 48, 64, 104, 224, 320, 1024)
    """Chains, for slots against queues."""
    lanes: tuple[int, ...] = (16, 32, 64, 128)
    """Placements of one kernel."""
    engine_sizes: tuple[int, ...] = (256, 1024, 4096)
    """Tasks, in layers of 16, under `duplex` links."""
    num_tasks: int = 1280
    """Tasks of the graphs of every width."""
    num_devices: int = 4
    batch: int = 256
    """Placements in a call."""
    repeats: int = 5
    runs: pathlib.Path = pathlib.Path("runs")
    """Folder of the results."""


def main(settings: FormulationSettings) -> None:
    """Measures, prints, and writes bench_formulations.json and bench_formulations.md."""
    check_settings(settings)
    tables = {
        "Nanoseconds per task by width": by_width(settings),
        "Nanoseconds per task by lanes of a kernel": by_lanes(settings),
        "Engine links, microseconds per placement": engine_growth(settings),
    }
    origin = ", ".join(f"{key} {value}" for key, value in provenance().items())
    parts = [f"{title}:\n\n{format_table(*table)}" for title, table in tables.items()]
    text = "\n".join([*parts, f"Made by `experiments.bench_formulations`: {origin}.\n"])
    print(text)
    settings.runs.mkdir(parents=True, exist_ok=True)
    result = {
        "provenance": provenance(),
        "settings": dataclasses.asdict(settings) | {"runs": str(settings.runs)},
        "tables": {title: {"columns": c, "rows": r} for title, (c, r) in tables.items()},
    }
    write_json_atomic(settings.runs / "bench_formulations.json", result)
    (settings.runs / "bench_formulations.md").write_text(text, encoding="utf-8")


Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def by_width(settings: FormulationSettings) -> Table:
    """Returns slots against queues and Numba, under both disciplines, for each width."""
    columns = ("chains", "slots", "queues", "numba", "slots, priority", "queues, priority")
    rows = []
    for width in settings.widths:
        problem = layered_problem(settings.num_tasks, settings.num_devices, width)
        calls = {
            "slots": simulation(problem, SLOTS, LANES, settings.batch),
            "queues": simulation(problem, QUEUES, LANES, settings.batch),
            "numba": native(problem, settings.batch),
            "slots, priority": simulation(problem, SLOTS, LANES, settings.batch, True),
            "queues, priority": simulation(problem, QUEUES, LANES, settings.batch, True),
        }
        rows.append((str(width), *_nanoseconds(calls, settings).values()))
    return columns, rows


def by_lanes(settings: FormulationSettings) -> Table:
    """Returns both formulations at each number of lanes, on a narrow and a wide graph."""
    narrow, wide = min(settings.widths), max(settings.widths)
    graphs = {
        f"slots, {narrow} chains": (SLOTS, narrow),
        f"queues, {wide} chains": (QUEUES, wide),
    }
    calls = {
        f"{what}, {lanes}": simulation(
            layered_problem(settings.num_tasks, settings.num_devices, width),
            run,
            lanes,
            settings.batch,
        )
        for what, (run, width) in graphs.items()
        for lanes in settings.lanes
    }
    cost = _nanoseconds(calls, settings)
    rows = [(w, *(cost[f"{w}, {lanes}"] for lanes in settings.lanes)) for w in graphs]
    return ("formulation", *map(str, settings.lanes)), rows


def engine_growth(settings: FormulationSettings) -> Table:
    """Returns what `duplex` links cost beside the oracle, for each number of tasks."""
    rows = []
    for size in settings.engine_sizes:
        problem = layered_problem(size, settings.num_devices)
        placement = random_placements(problem[1], np.random.default_rng(0), 1)[0]
        judge = partial(dj.simulate_oracle, *problem, placement, links="duplex")
        calls = {
            "ours": simulation(problem, ENGINE, LANES, settings.batch),
            "oracle": Call(1, judge, compiles=False),
        }
        timings = take_turns(calls, settings.repeats)
        rows.append((f"{size:,}", *(f"{t.placement_s * 1e6:,.0f}" for t in timings.values())))
    return ("tasks", "vectorised", "oracle"), rows


def simulation(
    problem: tuple[dj.TaskGraph, dj.Costs],
    run: Run,
    lanes: int,
    batch: int,
    has_rank: bool = False,
) -> Call:
    """Returns a call of one formulation, in float32, everything already on the device."""
    graph, costs = problem
    padded = pad_problem(graph, costs)
    placements = random_placements(costs, np.random.default_rng(0), batch)
    spare = padded.padded_tasks + 1 - graph.num_tasks
    rows = jnp.pad(jnp.asarray(placements, jnp.int32), ((0, 0), (0, spare)))
    rank = None
    if has_rank:
        order = jax.vmap(lambda key: jax.random.permutation(key, padded.padded_tasks + 1))
        rank = order(jax.random.split(jax.random.key(0), batch)).astype(jnp.float32)

    @jax.jit
    def simulate(
        padded: PaddedProblem, placements: jax.Array, rank: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        if rank is not None and run is QUEUES:
            rank = queue_order(rank)  # part of what queues cost
        return run_batch(run, (padded, None), placements, rank, lanes=lanes)

    return Call(batch, lambda: jax.block_until_ready(simulate(padded, rows, rank)))


def native(problem: tuple[dj.TaskGraph, dj.Costs], batch: int) -> Call:
    """Returns the call of Numba's model on one thread, with the placements of `simulation`."""
    placements = random_placements(problem[1], np.random.default_rng(0), batch)
    return Call(batch, partial(numba_model.makespans_s, *problem, placements))


def _nanoseconds(calls: dict[str, Call], settings: FormulationSettings) -> dict[str, str]:
    timings = take_turns(calls, settings.repeats)
    return {
        what: f"{timing.placement_s / settings.num_tasks * 1e9:.0f}"
        for what, timing in timings.items()
    }


if __name__ == "__main__":
    cli.run(main, FormulationSettings, "Formulations of the simulator against each other.")
