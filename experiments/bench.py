"""How fast simulation is: `python -m experiments.bench`; `make bench` adds training and engine.

Random placements by `dj.simulate` as a user calls it, in float64, under `fifo` and `in_order`
(of one order for all rows, or one a row, which is checked), beside yardsticks of the same
semantics under `fifo`: our plain-Python oracle, and a Numba model with two threads or one.
`serial` are links; times the yardstick: of the same links. `float32` is the lock-step core that
training runs: rounding itself is small, but it can swap two events that are close, after which
the executions differ; beyond 1e-5 are the makespans that differ by more from float64.

Competitors take turns; first the cold call of each, then warm ones, of which the median counts.
Annealing makes the same moves from the first position that each changes and as a whole. Slopes
are of log time over log tasks, of `fifo` on layered graphs.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numba
import numpy as np

import doppler_jax as dj
from doppler_jax.baselines.simple import random_placements
from doppler_jax.graphs.padded import pad_problem
from doppler_jax.search.kernels import BEST, Aim, walk
from doppler_jax.search.problem import make_search_problem
from doppler_jax.search.walks import Annealing, make_walker
from doppler_jax.simulator.batches import PaddedResult, simulate_padded
from doppler_jax.simulator.native_kernels import make_rows
from experiments import grid
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

NUM_MOVES = 100_000
"""Of annealing."""

NEW_GRAPHS = range(225, 240)
"""Tasks of the graphs whose first call is timed."""


@dataclasses.dataclass(frozen=True)
class Asked(Settings):
    """How much to measure."""

    problems: tuple[str, ...] = (
        "full_transformer_layer_261nodes", "llama_32", "layers-256@4", "layers-1024@4",
        "layers-4096@4",
    )  # fmt: skip
    """Names as in experiments/catalogue.py."""
    batches: tuple[int, ...] = (8192,)
    """Placements of a call."""
    calls: tuple[str, ...] = (
        "fifo", "fifo-serial", "in_order", "in_order-rows",
        "yardstick", "yardstick-serial", "yardstick-1", "float32", "oracle", "annealing",
    )  # fmt: skip
    """What is timed."""
    rounds: int = 15


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per problem and batch, and one of graphs that are new."""
    asked = context.settings
    terms = {"rounds": asked.rounds, "calls": asked.calls, "devices": asked.host_devices}
    for name in asked.problems:
        context.problem(name)  # unknown names end here
    axes = {"problem": asked.problems, "batch": asked.batches}
    found = [Cell({"new graphs": len(NEW_GRAPHS)}, time_new_graphs)]
    annealed = {"annealed": asked.problems[:1] if "annealing" in asked.calls else ()}
    found += grid.cells_of(partial(time_annealing, context), annealed, rounds=asked.rounds)
    return found + grid.cells_of(partial(time_simulators, context), axes, **terms)


def time_simulators(context: Context[Asked], problem: str, batch: int) -> Record:
    """Returns rows: seconds per placement of ways to simulate random ones."""
    asked, loaded = context.settings, context.problem(problem)
    graph, costs, rng = loaded.graph, loaded.costs, np.random.default_rng(0)
    placements = random_placements(costs, rng, batch).astype(np.int32)
    orders = random_orders(loaded, rng, batch)
    few = placements[: max(ORACLE_TASKS // graph.num_tasks, 1)]
    is_cpu = jax.default_backend() == "cpu"
    most = placements[: CORE_TASKS // graph.num_tasks] if is_cpu else placements

    def ours(links: str = "parallel", **options: Any) -> Callable[[], object]:
        objective = dj.Objective(links)
        return partial(dj.simulate, graph, costs, placements, objective=objective, **options)

    def yardstick(threads: int = THREADS, links: str = "parallel") -> Callable[[], object]:
        args = graph, costs, placements, threads
        return partial(numba_model.makespans_s, *args, links=links)

    core = _float32_core(loaded, most)
    known: dict[str, tuple[Callable[[], object], int]] = {
        "fifo": (ours(), batch),
        "fifo-serial": (ours("serial"), batch),
        "in_order": (ours(queue="in_order", priority=orders[0]), batch),
        "in_order-rows": (ours(queue="in_order", priority=orders), batch),
        "yardstick": (yardstick(), batch),
        "yardstick-serial": (yardstick(links="serial"), batch),
        "yardstick-1": (yardstick(1), batch),
        "float32": (core, len(most)),
        "oracle": (
            lambda: [dj.simulator.simulate_oracle(graph, costs, p) for p in few],
            len(few),
        ),
    }
    grid.check_names("--calls", asked.calls, [*known, "annealing"])
    with cold():
        runs = {
            what: partial(seconds_of, known[what][0]) for what in asked.calls if what in known
        }
        seconds = in_turns(runs, asked.rounds)
    rows = []
    for what, found in seconds.items():
        count, beside = known[what][1], "yardstick-serial" if "serial" in what else "yardstick"
        each_s, ratio, beyond = warm(found) / count, None, None
        if beside in seconds:
            ratio = warm_ratio(seconds[beside], found) * count / batch
        if what == "float32":
            exact_s = dj.simulate(graph, costs, most).makespan_s
            error = np.abs(np.asarray(core().makespan_s, np.float64) / exact_s - 1)
            beyond = f"{(error > 1e-5).mean():.1%}"
        row = {"tasks": graph.num_tasks, "what": what, "cold call_s": found[0]}
        row |= {"per placement, warm_s": each_s, "per second": round(1 / each_s)}
        rows.append(row | {"times the yardstick": ratio, "beyond 1e-5": beyond})
    return {"rows": rows}


def time_annealing(context: Context[Asked], annealed: str) -> Record:
    """Returns rows: moves a second on one core, by how a move is evaluated."""
    problem, usual = context.problem(annealed), Annealing()
    search = make_search_problem(problem.graph, problem.costs, dj.Objective(), queue="in_order")
    drawn = random_placements(problem.costs, np.random.default_rng(0), 1)
    (start,), (rank,) = search.ordered(drawn)
    # What is not plain is evaluated as a whole, by the simulator.
    whole = search.aim._replace(is_plain=False)
    ended: set[float] = set()

    def anneal(aim: Aim) -> None:
        walker = make_walker(search, start, rank, 0)
        plan = walker.placement[None], None, walker.order[None]
        # With finishes the whole evaluation knows the critical chain, too: both walk alike.
        rows = make_rows(aim.problem, *plan, schedule=not aim.is_plain)
        walker = walker._replace(trial=walker.trial._replace(rows=rows))
        walk(aim, walker, NUM_MOVES, usual.hot, usual.cold, np.zeros(1))
        ended.add(float(walker.worth[BEST]))

    aims = {"from what a move changes": search.aim, "as a whole": whole}
    runs = {what: partial(seconds_of, partial(anneal, aim)) for what, aim in aims.items()}
    seconds = in_turns(runs, context.settings.rounds)
    if len(ended) > 1:
        raise RuntimeError(f"walks that should be alike ended at {sorted(ended)}")
    rows = []
    for what, found in seconds.items():
        row: Record = {"problem": annealed, "evaluated": what}
        row["moves a second"] = round(NUM_MOVES / warm(found))
        rows.append(row | {"times as a whole": warm_ratio(seconds["as a whole"], found)})
    return {"moves": rows}


def random_orders(problem: Problem, rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns each task's position in random orders of tasks level by level, `[count, N]`."""
    costs, n = problem.costs, problem.graph.num_tasks
    free = {name: 0 * getattr(costs, name) for name in ("latency_s", "seconds_per_byte")}
    unit = dataclasses.replace(costs, compute_s=np.ones_like(costs.compute_s), **free)
    level, orders = dj.graphs.t_level(problem.graph, unit), np.empty((count, n), np.int32)
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


def _float32_core(problem: Problem, placements: np.ndarray) -> Callable[[], PaddedResult]:
    padded = pad_problem(problem.graph, problem.costs)
    spare = padded.padded_tasks - problem.graph.num_tasks
    rows = np.pad(placements, ((0, 0), (0, spare)))
    return partial(simulate_padded, *jax.device_put((padded, rows)))


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns a row per competitor, how time grows with graphs, and what a new one costs."""
    rows = [
        {"problem": r["problem"], "placements in a call": r["batch"]} | row
        for r in records
        for row in r.get("rows", [])
    ]
    moves = [row for r in records for row in r.get("moves", [])]
    texts = {"": table(rows), "Annealing under `in_order`, one core": table(moves)}
    layers = [r for r in rows if r["what"] == "fifo" and r["problem"].startswith("layers-")]
    for batch, found in by(layers, "placements in a call").items():
        if len(found) > 1:
            slope = growth(found, "per placement, warm_s")
            texts[f"Slope, {batch:,} placements"] = f"{slope:.2f}"
    for beyond_s in (r["beyond_s"] for r in records if "beyond_s" in r):
        median_ms, most_ms = 1e3 * np.median(beyond_s), 1e3 * max(beyond_s)
        said = f"{median_ms:.1f} ms, the median of {len(beyond_s)}; at most {most_ms:.1f} ms"
        texts["First call on a new graph beyond a later one"] = said
    return Page(texts)


QUICK = {"problems": ("layers-256@4", "layers-1024@4"), "batches": (128,), "rounds": 3}

STUDY = Study("bench", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
