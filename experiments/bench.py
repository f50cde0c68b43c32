"""How fast simulation is: `python -m experiments.bench`; `make bench` adds training and engine.

`dj.simulate` beside yardsticks of the same semantics (our plain-Python oracle and a Numba
model), and the float32 core that training runs, with how far its makespans lie from float64
ones: rounding itself is small, but it can swap two events that are close, after which the
executions differ. Competitors take turns; first the cold call of each, then warm ones.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numba
import numpy as np

import doppler_jax as dj
from doppler_jax.baselines.simple import random_placements
from doppler_jax.graphs.padded import pad_problem
from doppler_jax.simulator.simulate import simulate_padded
from experiments import grid
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.machine import in_turns, seconds_of, warm
from experiments.yardsticks import numba_model

NUM_SLOW = 20
"""Placements that stand for a batch where a placement takes milliseconds."""


@dataclasses.dataclass(frozen=True)
class BenchSettings(Settings):
    """How much to measure."""

    problems: tuple[str, ...] = (
        "llama_layer:p100x4", "layers-256@4", "layers-1024@4", "layers-4096@4",
    )  # fmt: skip
    """Names as in experiments/catalogue.py."""
    batches: tuple[int, ...] = (128, 4096)
    """Placements of a call."""
    rounds: int = 7


def cells(context: Context[BenchSettings]) -> list[Cell]:
    """Returns a cell per problem and batch."""
    asked = context.settings
    terms = {"rounds": asked.rounds, "devices": asked.host_devices}
    return [
        Cell(
            {"problem": problem, "batch": batch, **terms},
            partial(time_simulators, context, problem, batch),
        )
        for problem in asked.problems
        for batch in asked.batches
    ]


def time_simulators(context: Context[BenchSettings], name: str, batch: int) -> Record:
    """Returns seconds per placement of every way to simulate random ones."""
    problem = context.problem(name)
    graph, costs = problem.graph, problem.costs
    placements = random_placements(costs, np.random.default_rng(0), batch)
    few, most = placements[:NUM_SLOW], numba.get_num_threads()

    def one_by_one(simulate: Callable[..., object]) -> tuple[int, Callable[[], object]]:
        return len(few), lambda: [simulate(graph, costs, p) for p in few]

    def native(threads: int, links: str = "parallel") -> tuple[int, Callable[[], object]]:
        args = graph, costs, placements, threads
        return batch, partial(numba_model.makespans_s, *args, links=links)

    def ours(links: str) -> tuple[int, Callable[[], object]]:
        run = partial(dj.simulate, graph, costs, placements, objective=dj.Objective(links))
        return batch, run

    calls = {
        "simulate": ours("parallel"),
        "simulate, serial links": ours("serial"),
        "float32 core": (batch, _float32_core(graph, costs, placements)),
        "Numba, 1 thread": native(1),
        f"Numba, {most} threads": native(most),
        f"Numba, {most} threads, serial links": native(most, links="serial"),
        "oracle": one_by_one(dj.simulate_oracle),
    }
    with grid.cold():
        runs = {what: partial(seconds_of, run) for what, (_, run) in calls.items()}
        seconds = in_turns(runs, context.settings.rounds)
    return {
        "cold_s": {what: found[0] for what, found in seconds.items()},
        "placement_s": {what: warm(s) / calls[what][0] for what, s in seconds.items()},
        "tasks": graph.num_tasks,
        "error": _rounding(graph, costs, placements).tolist(),
    }


def _rounding(graph: dj.TaskGraph, costs: dj.Costs, placements: np.ndarray) -> np.ndarray:
    """Returns share beyond 1e-5, median and largest relative error of the float32 core."""
    rough_s = np.asarray(_float32_core(graph, costs, placements)(), np.float64)
    exact_s = dj.simulate(graph, costs, placements).makespan_s
    error = np.abs(rough_s / exact_s - 1)
    return np.array([(error > 1e-5).mean(), np.median(error), error.max()])


def _float32_core(
    graph: dj.TaskGraph, costs: dj.Costs, placements: np.ndarray
) -> Callable[[], jax.Array]:
    padded = pad_problem(graph, costs)
    spare = padded.padded_tasks - graph.num_tasks
    rows = jnp.asarray(np.pad(placements, ((0, 0), (0, spare))), jnp.int32)
    core = jax.jit(lambda padded, rows: simulate_padded(padded, rows).makespan_s)
    return partial(core, padded, rows)


def report(context: Context[BenchSettings], records: list[Record]) -> Page:
    """Returns a row per competitor, and how exact the float32 core is."""
    rows = [
        {"problem": r["problem"], "tasks": r["tasks"], "placements in a call": r["batch"]}
        | {"what": what, "cold call_s": r["cold_s"][what], "per placement, warm_s": each_s}
        | {"per second": round(1 / each_s)}
        for r in records
        for what, each_s in r["placement_s"].items()
    ]
    errors = [
        {"problem": r["problem"], "placements": r["batch"], "beyond 1e-5": f"{beyond:.1%}"}
        | {"median": f"{median:.1e}", "largest": f"{largest:.1e}"}
        for r in records
        for beyond, median, largest in [r["error"]]
    ]
    return Page(
        f"Simulating random placements.\n\n{grid.table(rows)}\n"
        "float32 against float64: relative difference of makespans.\n\n"
        f"{grid.table(errors)}"
    )


QUICK = {"problems": ("layers-256@4",), "batches": (128,), "rounds": 3}

STUDY = Study("bench", BenchSettings(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
