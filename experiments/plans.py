"""What an order adds to a placement: `python -m experiments.plans`.

Makespans of the default method from the shell, a new process each, beside the best of `fifo`
and the lower bound. `--publish` keeps plans that are better than those in
experiments/best_placements.json there.

Wrong costs: plans are made for a problem's costs and executed under others, as a share of what
the `fifo` placement takes there: by noise (lognormal, sigma of every duration, the mean of
draws that all plans share), and by errors: a device 30% slower (the mean over the devices), the
kind of task that takes most 50% dearer, transfers of twice the time. `in_order` and `priority`
execute one plan; `for the mean` is one that was searched under noise of sigma 0.1, executed by
the queue that it is for.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import numpy as np

import doppler_jax as dj
from experiments import catalogue, clock, grid
from experiments.catalogue import BEST_PLACEMENTS, Problem
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.tables import by, table

LONG = (*clock.PUBLISHED, "llama_8")

WRONG = (
    *clock.PUBLISHED, "llama_block:p100x4:uniform", "llama_layer:p100x4:uniform",
    "moe_block:p100x4:uniform",
)  # fmt: skip

SIGMAS = (0.02, 0.1, 0.3)

SEARCHED = dj.Objective(num_noise=8, noise_sigma=0.1)
"""For the mean."""


@dataclasses.dataclass(frozen=True)
class Asked(Settings):
    """What to run."""

    problems: tuple[str, ...] = LONG
    """Names as in experiments/catalogue.py; published graphs are left out where absent."""
    seconds: float = 60.0
    seeds: int = 5
    wrong: tuple[str, ...] = WRONG
    """Problems that are executed under other costs."""
    wrong_seconds: float = 20.0
    """Of the search for each of their plans."""
    draws: int = 100
    """Of noise."""


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per run from the shell, and one per problem under wrong costs."""
    asked = context.settings
    there = [clock.present(asked.shared, names) for names in (asked.problems, asked.wrong)]
    bounds = asked.wrong_seconds, asked.draws
    run = lambda wrong: under_wrong_costs(context.problem(wrong), *bounds)  # noqa: E731
    own = {"seconds": bounds[0], "draws": bounds[1]}
    shell = {"seed": range(asked.seeds), "problem": there[0], "seconds": [asked.seconds]}
    found = grid.cells_of(partial(from_the_shell, context), shell)
    return found + grid.cells_of(run, {"wrong": there[1]}, **own)


def from_the_shell(context: Context[Asked], problem: str, seconds: float, seed: int) -> Record:
    """Returns what the default method writes."""
    run = clock.WARM, problem, dj.methods.DEFAULT_METHOD, seconds, seed
    return clock.place(context, "in_order", *run, also=("placement", "priority", "queue"))


def under_wrong_costs(problem: Problem, seconds: float, draws: int) -> Record:
    """Returns the mean makespan of each plan under each error."""
    plans = make_plans(problem, seconds)
    return {name: dict(executed(problem, plan, draws)) for name, plan in plans.items()}


def make_plans(problem: Problem, seconds: float) -> dict[str, dj.Plan]:
    """Returns the best placement under `fifo`, a plan by two queues, and one for the mean."""
    graph, costs = problem.graph, problem.costs
    fifo = dj.place(graph, costs, queue="fifo", budget_s=seconds)
    kept = catalogue.best_plan(problem.name, "fifo")
    if kept and kept["makespan_s"] < fifo.makespan_s:
        fifo_plan = dj.Plan(np.array(kept["placement"]))
    else:
        fifo_plan = fifo.plan
    plan = dj.place(graph, costs, budget_s=seconds).plan
    return {
        "fifo": fifo_plan,
        "in_order": plan,
        "priority": dataclasses.replace(plan, queue="priority"),
        "for the mean": dj.place(graph, costs, objective=SEARCHED, budget_s=seconds).plan,
    }


def executed(problem: Problem, plan: dj.Plan, draws: int) -> Iterator[tuple[str, float]]:
    """Yields an error and the mean makespan of a plan under it, seconds."""
    graph, costs = problem.graph, problem.costs
    order = {} if plan.queue == "fifo" else {"priority": plan.priority}

    def mean_s(wrong: dj.Costs, factors: dj.simulator.Factors | None = None) -> float:
        options = {"queue": plan.queue, "factors": factors, **order}
        return float(dj.simulate(graph, wrong, plan.placement, **options).makespan_s.mean())

    yield "none", mean_s(costs)
    for sigma in SIGMAS:
        drawn = jax.random.key(1), graph, costs.num_devices, draws, sigma, sigma
        yield f"sigma {sigma:g}", mean_s(costs, dj.simulator.draw_factors(*drawn))
    changed = partial(dataclasses.replace, costs)
    slow = 1 + 0.3 * np.eye(costs.num_devices)
    slower = [mean_s(changed(compute_s=costs.compute_s * row)) for row in slow]
    yield "a device slower", float(np.mean(slower))
    dear = np.where(heaviest_kind(problem), 1.5, 1.0)[:, None]
    yield "a kind dearer", mean_s(changed(compute_s=costs.compute_s * dear))
    twice = changed(latency_s=2 * costs.latency_s, seconds_per_byte=2 * costs.seconds_per_byte)
    yield "transfers doubled", mean_s(twice)


def heaviest_kind(problem: Problem) -> np.ndarray:
    """Returns which tasks `[N]` are of the kind that takes most time: those of equal cost."""
    least_s = problem.costs.compute_s.min(axis=1)
    kinds, kind = np.unique(least_s, return_inverse=True)
    return kind == np.bincount(kind, least_s, len(kinds)).argmax()


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns makespans by problem, and shares by error."""
    long = [r for r in records if "makespan_s" in r]
    if context.settings.publish:
        keep_best(context, long)
    makespans = [long_row(context, name, runs) for name, runs in by(long, "problem").items()]
    wrong = {r["wrong"]: r for r in records if "wrong" in r}
    title = f"From the shell, {context.settings.seconds:g} s"
    texts = {title: table(makespans), "Wrong costs, over `fifo`": table(wrong_rows(wrong))}
    return Page(texts)


def long_row(context: Context[Asked], name: str, runs: Sequence[Record]) -> Record:
    """Returns the makespans of one problem over seeds."""
    kept = {queue: catalogue.best_plan(name, queue) for queue in ("fifo", "in_order")}
    known = {queue: entry["makespan_s"] if entry else None for queue, entry in kept.items()}
    found = np.array([run["makespan_s"] for run in runs])
    best = min(float(found.min()), known["in_order"] or np.inf)
    return {
        "problem": name,
        "best of `fifo`": f"{known['fifo']:.6g}" if known["fifo"] else None,
        "best known": f"{best:.6g}",
        "best": f"{found.min():.6g}",
        "mean": f"{found.mean():.6g}",
        "mean over best known": f"{found.mean() / best:.4f}",
        "lower bound": f"{max(run['lower_bound_s'] for run in runs):.6g}",
        "runs": len(runs),
    }


def wrong_rows(found: dict[str, Record]) -> list[Record]:
    """Returns a row per error and plan: the geometric mean of all problems, and each one."""
    rows = []
    errors = next(iter(found.values()))["fifo"] if found else {}
    for what in errors:
        for plan in ("in_order", "priority", "for the mean"):
            shares = {name: r[plan][what] / r["fifo"][what] for name, r in found.items()}
            values = np.array([*shares.values()])
            row: Record = {"error": what, "plan": plan}
            row |= {"geometric mean": float(np.exp(np.log(values).mean()))}
            rows.append(row | {name.partition(":")[0]: v for name, v in shares.items()})
    return rows


def keep_best(context: Context[Asked], runs: Sequence[Record]) -> None:
    """Writes the plans that are better than those that are kept."""
    kept = json.loads(BEST_PLACEMENTS.read_text())
    for run in runs:
        name, before = run["problem"], kept["in_order"].get(run["problem"])
        if before is not None and before["makespan_s"] <= run["makespan_s"]:
            continue
        problem = context.problem(name)
        kept["in_order"][name] = {
            "num_devices": problem.costs.num_devices,
            "links": "parallel",
            "makespan_s": run["makespan_s"],
            "command": f"python -m experiments.plans --seconds {run['seconds']:g}",
            "seed": run["seed"],
            **{key: run["made"][key] for key in ("commit", "date")},
            "placement": run["placement"],
            "priority": run["priority"],
        }
    BEST_PLACEMENTS.write_text(dumped(kept) + "\n")


def dumped(kept: Record) -> str:
    """Returns JSON with a plan's arrays in a line each."""

    def entry(fields: Record) -> str:
        lines = ",\n   ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in fields.items())
        return "{\n   " + lines + "\n  }"

    queues = (
        f" {json.dumps(queue)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {entry(e)}" for name, e in sorted(plans.items()))
        + "\n }"
        for queue, plans in kept.items()
    )
    return "{\n" + ",\n".join(queues) + "\n}"


QUICK = {
    "problems": ("tree-9~10",), "seconds": 2.0, "seeds": 1, "wrong": ("tree-9~10",),
    "wrong_seconds": 1.0, "draws": 10,
}  # fmt: skip

STUDY = Study("plans", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
