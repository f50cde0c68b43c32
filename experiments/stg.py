"""The Standard Task Graph set within a second: `python -m experiments.stg`.

40 graphs of 50 tasks, and a first and a last one of no length, on 2 to 16 equal devices;
nothing takes time to move. Each run is one `dj.place` in a process that has loaded everything
and placed before. Gaps are in percent above the published optimum; where none is proven, above
the best known makespan. Proven are those of which the run itself says so.

The yardstick is `critical_path` under `fifo`, the list scheduler that DOPPLER starts from.
"""

import dataclasses
import time
from functools import cache, partial

import numpy as np

import doppler_jax as dj
from doppler_jax.methods import DEFAULT_METHOD
from experiments.grid import Cell, Context, Page, Record, Settings, Study, cells_of, check_names
from experiments.tables import EQUAL, by, table

ALL = "all"

YARDSTICK = "critical_path"


@dataclasses.dataclass(frozen=True)
class Asked(Settings):
    """What is placed, and how long it may take."""

    devices: tuple[int, ...] = (2, 4, 8, 16)
    graphs: int = 40
    method: tuple[str, ...] = (YARDSTICK, DEFAULT_METHOD, "lns")
    """The yardstick under `fifo`, all others under `in_order`."""
    seconds: float = 1.0


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per method, number of devices and graph; none where the set is absent."""
    asked = context.settings
    check_names("--method", asked.method, dj.list_methods())
    if not (asked.shared / "neutral_graphs" / "stg50").is_dir():
        return []
    axes = {
        "method": asked.method,
        "devices": asked.devices,
        "graph": [f"rand{k:04}" for k in range(asked.graphs)],
    }
    run = partial(place, context, seconds=asked.seconds)
    return cells_of(run, axes, seconds=asked.seconds)


def place(
    context: Context[Asked], method: str, devices: int, graph: str, seconds: float
) -> Record:
    """Returns what a method finds."""
    load_all()
    problem = context.problem(f"stg50/{graph}@{devices}")
    queue, began = "fifo" if method == YARDSTICK else "in_order", time.monotonic()
    placed = dj.place(
        problem.graph, problem.costs, method=method, budget_s=seconds, queue=queue
    )
    took_s, best_s = time.monotonic() - began, problem.best_known_s
    found = {"makespan_s": placed.makespan_s, "best_s": best_s, "proven": placed.proven}
    return found | {"queue": queue, "took_s": took_s, "evaluations": placed.evaluations}


@cache
def load_all() -> None:
    """Loads the solver and what is compiled, and places once."""
    graph, costs = dj.from_edge_delays([3, 3, 2, 2, 2], [(0, 1, 2.0)], num_devices=2)
    for method in (YARDSTICK, "exact", "lns", DEFAULT_METHOD):
        dj.place(graph, costs, method=method, budget_s=60.0, queue="in_order")


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns a row per method and number of devices."""
    rows = []
    for (method, queue), found in by(records, "method", "queue").items():
        for devices, here in {**by(found, "devices"), ALL: found}.items():
            gap = np.array([100 * (r["makespan_s"] / r["best_s"] - 1) for r in here])
            row = {"method": method, "queue": queue, "devices": str(devices)}
            row |= {"mean gap (%)": float(gap.mean()), "worst (%)": float(gap.max())}
            row |= {"no gap": int((gap < 100 * EQUAL).sum())}
            row |= {"proven": sum(r["proven"] for r in here), "graphs": len(here)}
            took_s = [r["took_s"] for r in here]
            row |= {"mean time_s": float(np.mean(took_s)), "longest_s": max(took_s)}
            rows.append(row)
    return Page({f"Within {context.settings.seconds:g} s": table(rows)})


QUICK = {"devices": (2, 8), "graphs": 2, "method": (YARDSTICK, DEFAULT_METHOD)}

STUDY = Study("stg", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
