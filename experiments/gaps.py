"""How far from optimal is every method, where the optimum is known or memory is short?

`python -m experiments.gaps`, three tables:

- random graphs of at most 10 tasks, against the optimum of `exact` and against the best of all
  placements under the queue `fifo`, of `brute_force`;
- the Standard Task Graph set, 50 tasks, against the published optima;
- profiled networks on accelerators with little memory, beside the human experts'.
"""

import dataclasses
import itertools
from functools import partial

import numpy as np

import doppler_jax as dj
from doppler_jax.baselines.brute_force import brute_force
from doppler_jax.costs.dnn_partitioning import load_dnn_partitioning, load_split
from doppler_jax.files import parse_json_object, read_text
from doppler_jax.learners.registry import LEARNERS
from experiments.grid import Cell, Context, Page, Record, Study
from experiments.methods import MethodSettings, Spend, method_cells, place_cell
from experiments.tables import by, table

DEVICES = (2, 4, 8, 16)
"""For which makespans of the Standard Task Graph set are published."""

NETWORKS = tuple(f"dnn/{n}_inference" for n in ("bert24", "gnmt", "inceptionv3", "resnet50"))

STG = tuple(f"stg50/rand{k:04}@{d}" for d in DEVICES for k in range(40))


@dataclasses.dataclass(frozen=True)
class GapSettings(MethodSettings):
    """What is compared; `--evaluations` bounds all but `exact`."""

    exact_s: float = 30.0
    """Seconds for `exact` on one problem."""


def cells(context: Context[GapSettings]) -> list[Cell]:
    """Returns the cells of all methods, the two references' first."""
    asked, change = context.settings, {"stg50": by_priority, "dnn": with_memory}
    tiny = [name for name in asked.problems if name.startswith("tiny-")]
    networks = [name for name in asked.problems if name.startswith("dnn/")]
    exact = [Spend(seconds=asked.exact_s)]
    found = [
        Cell({"problem": name, "method": what}, partial(run, context, name))
        for names, what, run in (
            (tiny, "brute_force", all_placements),
            (networks, "human expert", expert),
        )
        for name in names
    ]
    if "exact" not in asked.method:
        found += method_cells(context, tiny, ["exact"], exact)
    for problem, method in itertools.product(asked.problems, asked.method):
        spends = exact if method == "exact" else asked.spends()
        run = change.get(problem.partition("/")[0])
        for cell in method_cells(context, [problem], [method], spends, asked.seeds):
            found.append(cell.then(partial(run, context, problem)) if run else cell)
    return found


def all_placements(context: Context[GapSettings], name: str) -> Record:
    """Returns the best of all placements under queue `fifo`."""
    run = lambda graph, costs, budget, key: brute_force(graph, costs)  # noqa: E731
    return place_cell(context.problem(name), "brute_force", Spend(), 0, own=run)


def by_priority(context: Context[GapSettings], name: str, result: Record) -> Record:
    """Returns a result with its makespan by `priority`, the better of two ranks.

    They are the start order of the method's own schedule, and the b-level, largest first.
    """
    problem = context.problem(name)
    graph, costs, placement = problem.graph, problem.costs, np.array(result["placement"])
    ranks = {"start order": result["priority"], "b-level": -dj.b_level(graph, costs)}
    by_rank = {
        rank: dj.makespan_s(
            dj.simulate_oracle(graph, costs, placement, queue="priority", priority=priority)
        )
        for rank, priority in ranks.items()
    }
    rank = min(by_rank, key=by_rank.__getitem__)
    changed = {"fifo_s": result["makespan_s"], "makespan_s": by_rank[rank], "rank": rank}
    return result | changed | {"best_s": problem.best_known_s}


def with_memory(context: Context[GapSettings], name: str, result: Record) -> Record:
    """Returns a result with how its schedule uses the accelerators."""
    problem = context.problem(name)
    return result | _memory(problem.graph, problem.costs, np.array(result["placement"]))


def expert(context: Context[GapSettings], name: str) -> Record:
    """Returns what the human expert's split of a network is worth, if there is one.

    The published splits use six accelerators and were made for larger memories: a network
    with fewer gets six here, and the limits may be exceeded.
    """
    folder = context.settings.shared / "neutral_graphs" / "dnn_partitioning"
    stem = name.removeprefix("dnn/")
    path = folder / "human-experts" / f"{stem}_expert.json"
    if not path.exists():
        return {"refused": "no split is published"}
    network = folder / "LayerGraphs" / f"{stem}.json"
    num_used = len(parse_json_object(path, read_text(path))["fpgas"])
    named = np.isfinite(load_dnn_partitioning(network)[1].capacity_bytes).sum()
    count = max(num_used, int(named))
    graph, costs = load_dnn_partitioning(network, num_accelerators=count)
    found = _memory(graph, costs, load_split(path, count))
    return found | {"lower_bound_s": dj.lower_bound_s(graph, costs)}


def _memory(graph: dj.TaskGraph, costs: dj.Costs, placement: np.ndarray) -> Record:
    schedule = dj.simulate_oracle(graph, costs, placement)
    limited = np.isfinite(costs.capacity_bytes)
    peak = dj.peak_memory_bytes(graph, costs, schedule)[limited]
    return {
        "makespan_s": dj.makespan_s(schedule),
        "filled": float((peak / costs.capacity_bytes[limited]).max(initial=0.0)),
        "accelerators": int(np.isin(np.flatnonzero(limited), placement).sum()),
        "tasks_elsewhere": int((~limited[placement]).sum()),
    }


def report(context: Context[GapSettings], records: list[Record]) -> Page:
    """Returns the three tables, those of problems that were asked for."""
    kinds = by([r | {"kind": _kind(r)} for r in records if "makespan_s" in r], "kind")
    texts = {
        "tiny": "Random graphs of 5 to 10 tasks on 2 and 3 devices. The optimum, by `exact`, "
        "may idle and reorder; `brute_force` is the best of all placements under fifo.",
        "stg50": "Standard Task Graph set, 50 tasks, queue priority, above the best known "
        "makespan; priorities are the start order of the method's own schedule, or the b-level "
        "where that is shorter.",
        "dnn": "Networks of msr-fiddle/dnn-partitioning (inference, by layers), queue fifo. "
        "The experts' splits use 6 accelerators and were made for larger memories.",
    }
    rows = {"tiny": _tiny_rows, "stg50": _stg_rows, "dnn": _dnn_rows}
    parts = [f"{texts[k]}\n\n{table(rows[k](kinds[k]))}" for k in texts if k in kinds]
    return Page("\n".join(parts))


def _kind(record: Record) -> str:
    return record["problem"].partition("/")[0].partition("-")[0]


def _tiny_rows(records: list[Record]) -> list[Record]:
    rows, by_method = [], by(records, "method")
    for method, found in by_method.items():
        row = {"method": method, "graphs": len(found)}
        for what, reference in (("optimum", "exact"), ("fifo best", "brute_force")):
            known = {r["problem"]: r["makespan_s"] for r in by_method.get(reference, [])}
            here = [r for r in found if r["problem"] in known]
            row |= _gap(what, [r["makespan_s"] / known[r["problem"]] for r in here])
        rows.append(row)
    return rows


def _stg_rows(records: list[Record]) -> list[Record]:
    rows = []
    for method, found in by(records, "method").items():
        row = {"method": method, "graphs": len(found)}
        for count in DEVICES:
            here = [r for r in found if r["problem"].endswith(f"@{count}")]
            row |= {f"{count} devices (%)": _mean_gap(here, "makespan_s")}
        row |= _gap("best known", [r["makespan_s"] / r["best_s"] for r in found])
        rows.append(row | {"by fifo (%)": _mean_gap(found, "fifo_s")})
    return rows


def _mean_gap(records: list[Record], value: str) -> str | None:
    gaps = [r[value] / r["best_s"] - 1 for r in records]
    return f"{100 * np.mean(gaps):.2f}" if gaps else None


def _gap(what: str, ratios: list[float]) -> Record:
    """Returns mean and worst gap in percent, and in how many there is none."""
    gaps = 100 * (np.array(ratios or [np.nan]) - 1)
    row = {
        f"above {what} (%)": f"{gaps.mean():.2f}",
        f"worst above {what} (%)": f"{gaps.max():.2f}",
    }
    return row | {f"{what} met": int((gaps <= 0).sum())}


def _dnn_rows(records: list[Record]) -> list[Record]:
    bounds: dict[str, float] = {}
    for r in records:
        bounds[r["problem"]] = max(bounds.get(r["problem"], 0.0), r.get("lower_bound_s", 0.0))
    return [
        {"network": r["problem"].removeprefix("dnn/"), "method": r["method"]}
        | {"makespan_s": r["makespan_s"], "over bound": r["makespan_s"] / bounds[r["problem"]]}
        | {"accelerators": r["accelerators"], "tasks on CPU": r["tasks_elsewhere"]}
        | {"fullest accelerator": f"{r['filled']:.1%}{' (NO)' if r['filled'] > 1 else ''}"}
        for r in sorted(records, key=lambda r: str(r["problem"]))
    ]


SETTINGS = GapSettings(
    problems=(*(f"tiny-{k}" for k in range(40)), *STG, *NETWORKS),
    method=tuple(m for m in dj.list_methods() if m not in LEARNERS), evaluations=(2000,),
    seeds=1,
)  # fmt: skip

QUICK = {
    "problems": (*(f"tiny-{k}" for k in range(4)), "stg50/rand0000@2", NETWORKS[0]),
    "exact_s": 3.0,
}  # fmt: skip

STUDY = Study("gaps", SETTINGS, cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
