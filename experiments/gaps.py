"""How far from optimal is every method? `python -m experiments.gaps`.

Gaps are in percent: the mean, the largest, and in how many there is none.

- Random graphs of 5 to 10 tasks on 2 and 3 devices, above the optimum of `exact`, which may
  idle and reorder, and above the best of all placements under the queue `fifo`, of
  `brute_force`.
- Networks of msr-fiddle/dnn-partitioning (inference, by layers) on accelerators with little
  memory, beside the human experts' splits, which use 6 accelerators and were made for larger
  memories.
"""

import dataclasses
import itertools
from functools import partial

import numpy as np

import doppler_jax as dj
from doppler_jax.baselines.simple import brute_force
from doppler_jax.costs.dnn_partitioning import load_dnn_partitioning, load_split
from doppler_jax.files import parse_json_object, read_text
from doppler_jax.learners.registry import LEARNERS
from experiments import grid
from experiments.grid import Cell, Context, Page, Record, Study
from experiments.methods import MethodSettings, Spend, method_cells, place_cell
from experiments.tables import EQUAL, by, means_table, table

NETWORKS = tuple(f"dnn/{n}_inference" for n in ("bert24", "gnmt", "inceptionv3", "resnet50"))


@dataclasses.dataclass(frozen=True)
class Asked(MethodSettings):
    """What is compared; `--evaluations` bounds all but `exact`."""

    exact_s: float = 30.0
    """Seconds for `exact` on one problem."""


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns the cells of all methods, the two references' first."""
    asked = context.settings
    tiny = [name for name in asked.problems if name.startswith("tiny-")]
    networks = [name for name in asked.problems if name.startswith("dnn/")]
    exact = [Spend(seconds=asked.exact_s)]
    found = grid.cells_of(
        partial(all_placements, context), {"problem": tiny}, method="brute_force"
    )
    experts = partial(expert, context)
    found += grid.cells_of(experts, {"problem": networks}, method="human expert")
    if "exact" not in asked.method:
        found += method_cells(context, tiny, ["exact"], exact)
    for problem, method in itertools.product(asked.problems, asked.method):
        spends = exact if method == "exact" else asked.spends()
        for cell in method_cells(
            context, [problem], [method], spends, asked.seeds, queue=asked.queue
        ):
            is_network = problem in networks
            found.append(
                cell.then(partial(with_memory, context, problem)) if is_network else cell
            )
    return found


def all_placements(context: Context[Asked], problem: str) -> Record:
    """Returns the best of all placements under queue `fifo`."""
    run = lambda graph, costs, budget, key: brute_force(graph, costs)  # noqa: E731
    return place_cell(context.problem(problem), "brute_force", Spend(), 0, own=run)


def with_memory(context: Context[Asked], name: str, result: Record) -> Record:
    """Returns a result with how its schedule uses the accelerators."""
    problem = context.problem(name)
    return result | _memory(problem.graph, problem.costs, np.array(result["placement"]))


def expert(context: Context[Asked], problem: str) -> Record:
    """Returns what the human expert's split of a network is worth, if there is one.

    The published splits use six accelerators and were made for larger memories: a network
    with fewer gets six here, and the limits may be exceeded.
    """
    folder = context.settings.shared / "neutral_graphs" / "dnn_partitioning"
    stem = problem.removeprefix("dnn/")
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


def _memory(graph: dj.graphs.TaskGraph, costs: dj.Costs, placement: np.ndarray) -> Record:
    schedule = dj.simulator.simulate_oracle(graph, costs, placement)
    limited = np.isfinite(costs.capacity_bytes)
    peak = dj.simulator.peak_memory_bytes(graph, costs, schedule)[limited]
    return {
        "makespan_s": dj.simulator.makespan_s(schedule),
        "filled": float((peak / costs.capacity_bytes[limited]).max(initial=0.0)),
        "accelerators": int(np.isin(np.flatnonzero(limited), placement).sum()),
        "tasks_elsewhere": int((~limited[placement]).sum()),
    }


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns the two tables, those of problems that were asked for."""
    shown = {
        "tiny": ("Random graphs", _tiny_table),
        "dnn": ("Networks", _dnn_table),
    }
    texts = {}
    for kind, (heading, make) in shown.items():
        found = [r for r in records if r["problem"].startswith(kind) and "makespan_s" in r]
        texts[heading] = make(found)
    return Page(texts)


def _tiny_table(records: list[Record]) -> str:
    by_method, gaps = by(records, "method"), []
    for what, reference in (("the optimum", "exact"), ("fifo's best", "brute_force")):
        known_s = {r["problem"]: r["makespan_s"] for r in by_method.get(reference, [])}
        here = [r for r in records if r["problem"] in known_s]
        gaps += [_gap(r, what, r["makespan_s"] / known_s[r["problem"]]) for r in here]
    return _gap_table(gaps)


def _gap(record: Record, what: str, ratio: float) -> Record:
    return {"method": record["method"], "above": what, "gap": 100 * (ratio - 1)}


def _gap_table(gaps: list[Record]) -> str:
    """Returns mean and worst gap in percent, and in how many there is none."""

    def show(gap: np.ndarray) -> str:
        met = int((gap < 100 * EQUAL).sum())
        return f"{gap.mean():.2f}%, at most {gap.max():.2f}%, none in {met} of {len(gap)}"

    return means_table(gaps, ("method",), "above", "gap", show=show)


def _dnn_table(records: list[Record]) -> str:
    rows = []
    for network, found in by(records, "problem").items():
        bound_s = max(r.get("lower_bound_s", 0.0) for r in found)
        for r in found:
            row = {"network": network.removeprefix("dnn/"), "method": r["method"]}
            row |= {"makespan_s": r["makespan_s"], "over bound": r["makespan_s"] / bound_s}
            row |= {"accelerators": r["accelerators"], "tasks on CPU": r["tasks_elsewhere"]}
            full = f"{r['filled']:.1%}{' (NO)' if r['filled'] > 1 else ''}"
            rows.append(row | {"fullest accelerator": full})
    return table(rows)


SETTINGS = Asked(
    problems=(*(f"tiny-{k}" for k in range(40)), *NETWORKS),
    method=tuple(m for m in dj.list_methods() if m not in LEARNERS), evaluations=(2000,),
    seeds=1,
)  # fmt: skip

QUICK = {
    "problems": (*(f"tiny-{k}" for k in range(4)), NETWORKS[0]),
    "exact_s": 3.0,
}  # fmt: skip

STUDY = Study("gaps", SETTINGS, cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
