"""How fast simulation is: `python -m experiments.bench`; `make bench` adds training and engine.

`dj.simulate` as a user calls it, under `fifo` and `in_order` (one order for all rows, or one a
row, which is checked), beside yardsticks of the same semantics under `fifo`: our plain-Python
oracle and a Numba model. The float32 core is what training runs; rounding itself is small, but
it can swap two events that are close, after which the executions differ. Competitors take
turns; first the cold call of each, then warm ones, of which the median counts.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np

import doppler_jax as dj
from doppler_jax.baselines.simple import random_placements
from doppler_jax.graphs.padded import pad_problem
from doppler_jax.simulator.simulate import simulate_padded
from experiments.catalogue import Problem, layered_problem
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.machine import in_turns, seconds_of, warm, warm_ratio
from experiments.methods import cold
from experiments.tables import by, growth, table
from experiments.yardsticks import numba_model

THREADS = min(2, numba.get_num_threads())
"""Of the yardstick."""

ORACLE_TASKS = 5000
"""Executions of tasks that stand for a batch where each takes microseconds."""

CORE_TASKS = 1 << 22
"""The same of the float32 core on CPUs, which the larger graphs would keep busy for minutes."""

NEW_GRAPHS = range(225, 240)
"""Tasks of the graphs whose first call is timed."""


@dataclasses.dataclass(frozen=True)
class BenchSettings(Settings):
    """How much to measure."""

    problems: tuple[str, ...] = (
        "full_transformer_layer_261nodes", "llama_32", "layers-256@4", "layers-1024@4",
        "layers-4096@4",
    )  # fmt: skip
    """Names as in experiments/catalogue.py."""
    batches: tuple[int, ...] = (8192,)
    """Placements of a call."""
    rounds: int = 15


def cells(context: Context[BenchSettings]) -> list[Cell]:
    """Returns a cell per problem and batch, and one of graphs that are new."""
    asked = context.settings
    terms = {"rounds": asked.rounds, "devices": asked.host_devices}
    found = [Cell({"new graphs": len(NEW_GRAPHS)}, time_new_graphs)]
    for name in asked.problems:
        context.problem(name)  # unknown names end here
        for batch in asked.batches:
            run = partial(time_simulators, context, name, batch)
            found.append(Cell({"problem": name, "batch": batch, **terms}, run))
    return found


def time_simulators(context: Context[BenchSettings], name: str, batch: int) -> Record:
    """Returns seconds per placement of every way to simulate random ones."""
    problem = context.problem(name)
    graph, costs, rng = problem.graph, problem.costs, np.random.default_rng(0)
    placements = random_placements(costs, rng, batch).astype(np.int32)
    orders = random_orders(problem, rng, batch)
    few = placements[: max(ORACLE_TASKS // graph.num_tasks, 1)]
    most = CORE_TASKS // graph.num_tasks if jax.default_backend() == "cpu" else batch

    def ours(links: str = "parallel", **options: Any) -> Callable[[], object]:
        objective = dj.Objective(links)
        return partial(dj.simulate, graph, costs, placements, objective=objective, **options)

    def yardstick(threads: int = THREADS, links: str = "parallel") -> Callable[[], object]:
        args = graph, costs, placements, threads
        return partial(numba_model.makespans_s, *args, links=links)

    calls = {
        "simulate": ours(),
        "simulate, serial links": ours("serial"),
        "simulate, in_order, one order": ours(queue="in_order", priority=orders[0]),
        "simulate, in_order, an order a row": ours(queue="in_order", priority=orders),
        "yardstick, 1 thread": yardstick(1),
        "yardstick": yardstick(),
        "yardstick, serial links": yardstick(links="serial"),
        "float32 core": _float32_core(problem, placements[:most]),
        "oracle": lambda: [dj.simulate_oracle(graph, costs, p) for p in few],
    }
    rows = dict.fromkeys(calls, batch) | {"float32 core": min(most, batch), "oracle": len(few)}
    with cold():
        runs = {what: partial(seconds_of, run) for what, run in calls.items()}
        seconds = in_turns(runs, context.settings.rounds)
    against = {
        what: seconds["yardstick, serial links" if "serial" in what else "yardstick"]
        for what in calls
    }
    return {
        "cold_s": {what: found[0] for what, found in seconds.items()},
        "placement_s": {what: warm(found) / rows[what] for what, found in seconds.items()},
        "ratio": {
            what: warm_ratio(against[what], found) * rows[what] / batch
            for what, found in seconds.items()
        },
        "tasks": graph.num_tasks,
        "error": _rounding(problem, placements[:most]).tolist(),
    }


def random_orders(problem: Problem, rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns each task's position in random orders of tasks level by level, `[count, N]`."""
    costs, n = problem.costs, problem.graph.num_tasks
    free = {name: 0 * getattr(costs, name) for name in ("latency_s", "seconds_per_byte")}
    unit = dataclasses.replace(costs, compute_s=np.ones_like(costs.compute_s), **free)
    level, orders = dj.t_level(problem.graph, unit), np.empty((count, n), np.int32)
    for order in orders:
        order[np.argsort(level + rng.random(n))] = np.arange(n)
    return orders


def time_new_graphs() -> Record:
    """Returns what first calls on new graphs take beyond later ones, each in seconds."""
    found = []
    for tasks in NEW_GRAPHS:
        graph, costs = layered_problem(tasks, 4)
        placements = random_placements(costs, np.random.default_rng(0), 128)
        call = partial(seconds_of, partial(dj.simulate, graph, costs, placements))
        first_s, *later_s = (call() for _ in range(6))
        found.append(first_s - float(np.median(later_s)))
    return {"beyond_s": found[1:]}  # the first one compiled, or loaded what is compiled


def _rounding(problem: Problem, placements: np.ndarray) -> np.ndarray:
    """Returns share beyond 1e-5, median and largest relative error of the float32 core."""
    rough_s = np.asarray(_float32_core(problem, placements)(), np.float64)
    exact_s = dj.simulate(problem.graph, problem.costs, placements).makespan_s
    error = np.abs(rough_s / exact_s - 1)
    return np.array([(error > 1e-5).mean(), np.median(error), error.max()])


def _float32_core(problem: Problem, placements: np.ndarray) -> Callable[[], jax.Array]:
    padded = pad_problem(problem.graph, problem.costs)
    spare = padded.padded_tasks - problem.graph.num_tasks
    rows = jnp.asarray(np.pad(placements, ((0, 0), (0, spare))), jnp.int32)
    core = jax.jit(lambda padded, rows: simulate_padded(padded, rows).makespan_s)
    return partial(core, padded, rows)


def report(context: Context[BenchSettings], records: list[Record]) -> Page:
    """Returns a row per competitor, and how exact the float32 core is."""
    new = [record for record in records if "new graphs" in record]
    done = [record for record in records if "problem" in record]
    rows = [
        {"problem": r["problem"], "tasks": r["tasks"], "placements in a call": r["batch"]}
        | {"what": what, "cold call_s": r["cold_s"][what], "per placement, warm_s": each_s}
        | {"per second": round(1 / each_s), "times the yardstick": r["ratio"][what]}
        for r in done
        for what, each_s in r["placement_s"].items()
    ]
    text = (
        f"Simulating random placements; the yardstick has {THREADS} threads, and with serial "
        f"links it is the serial one.\n\n{table(rows) if rows else ''}\n"
    )
    layers = [r | r["placement_s"] for r in done if r["problem"].startswith("layers-")]
    for batch, found in by(layers, "batch").items():
        if len(found) > 1:
            text += (
                f"Slope of log time over log tasks of `simulate`, {batch:,} placements of "
                f"{found[0]['tasks']:,} to {found[-1]['tasks']:,} tasks: "
                f"{growth(found, 'simulate'):.2f}.\n\n"
            )
    for record in new:
        beyond_ms = 1e3 * np.array(record["beyond_s"])
        text += (
            f"The first call on a new graph takes {np.median(beyond_ms):.1f} ms beyond a later "
            f"one, the median of {len(beyond_ms)} graphs; {beyond_ms.max():.1f} ms at most.\n\n"
        )
    errors = [
        {"problem": r["problem"], "placements": r["batch"], "beyond 1e-5": f"{beyond:.1%}"}
        | {"median": f"{median:.1e}", "largest": f"{largest:.1e}"}
        for r in done
        for beyond, median, largest in [r["error"]]
    ]
    if errors:
        text += f"float32 against float64, relative difference:\n\n{table(errors)}"
    return Page(text)


QUICK = {"problems": ("layers-256@4", "layers-1024@4"), "batches": (128,), "rounds": 3}

STUDY = Study("bench", BenchSettings(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
