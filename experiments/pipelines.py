"""Training steps in a pipeline beside schedules by hand: `python -m experiments.pipelines`.

P stages, each on a device of its own, and M micro-batches; forwards and both halves of a
backward take 1 s each, a whole backward 2 s. A forward leaves an activation of one byte to the
backward of its stage, and stage i has room for `room` of them; transfers are the seconds that
anything takes from stage to stage. Every run is one `dj.place` with the default method.

Makespans are in seconds. `gpipe`, `1f1b` and `zb_h1` (zero bubble) are written by hand,
executed by `in_order`, and `fifo` executes the tasks as they become ready; `-` stands for what
there is no room for, or what is of backwards in halves alone. `found` is the best of the seeds,
the lower bound the highest that a run gives; `proven` counts the runs that say themselves that
nothing is shorter. In the picture `found` is of backwards in halves and room for P activations,
for which `gpipe` has too many.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from functools import partial

import numpy as np

import doppler_jax as dj
from doppler_jax.graphs.pipelines import (
    LIMITS,
    SCHEDULES,
    Pipeline,
    hand_written,
    make_pipeline,
)
from experiments.grid import Cell, Context, Page, Record, Settings, Study, cells_of
from experiments.tables import by, table

CASE = ("size", "backward", "room", "transfer")
"""Fields of a record that say which pipeline."""

BACKWARDS = ("halves", "whole")

TRANSFERS = (0.0, 0.1)
"""Seconds."""

PICTURE = "pipelines.png"


@dataclasses.dataclass(frozen=True)
class Asked(Settings):
    """What is placed, and how long it may take."""

    sizes: tuple[tuple[int, int], ...] = ((4, 8), (8, 16))
    """Stages and micro-batches; the first is drawn."""
    seconds: float = 60.0
    seeds: int = 1


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per pipeline and seed."""
    asked = context.settings
    axes = {
        "size": [list(size) for size in asked.sizes],
        "backward": BACKWARDS,
        "room": LIMITS,
        "transfer": TRANSFERS,
        "seed": range(asked.seeds),
    }
    return cells_of(partial(place, asked.seconds), axes, seconds=asked.seconds)


def pipeline_of(
    size: Sequence[int], backward: str = "halves", room: str = "none", transfer: float = 0.0
) -> Pipeline:
    """Returns the pipeline of a case."""
    whole = backward == "whole"
    return make_pipeline(*size, whole_backward=whole, limit=room, latency_s=transfer)


def place(seconds: float, seed: int, **case: object) -> Record:
    """Returns what the default method finds, or why it refuses."""
    pipeline = pipeline_of(**case)  # type: ignore[arg-type]
    try:
        placed = dj.place(pipeline.graph, pipeline.costs, budget_s=seconds, key=seed)
    except ValueError as error:
        return {"refused": str(error)}
    found = {"makespan_s": placed.makespan_s, "lower_bound_s": placed.lower_bound_s}
    found |= {"proven": placed.proven, "took_s": placed.seconds}
    plan = {"placement": placed.placement.tolist(), "priority": placed.priority.tolist()}
    return found | plan


def yardsticks(pipeline: Pipeline) -> dict[str, dj.simulator.Schedule]:
    """Returns the schedules by hand that there are of such backwards, and that of `fifo`."""
    whole = any(kind == "BW" for kind, _, _ in pipeline.tasks)
    names = [name for name in SCHEDULES if not (whole and name == "zb_h1")]
    found = {name: executed(pipeline, *hand_written(name, pipeline)) for name in names}
    stages = np.array([stage for _, stage, _ in pipeline.tasks])
    return found | {
        "fifo": dj.simulator.simulate_oracle(pipeline.graph, pipeline.costs, stages)
    }


def executed(
    pipeline: Pipeline, placement: np.ndarray, priority: np.ndarray
) -> dj.simulator.Schedule:
    """Returns the schedule of a plan."""
    graph, costs = pipeline.graph, pipeline.costs
    return dj.simulator.simulate_oracle(
        graph, costs, placement, queue="in_order", priority=priority
    )


def fits(pipeline: Pipeline, schedule: dj.simulator.Schedule) -> bool:
    """Returns whether every stage has room for its activations."""
    peak = dj.simulator.peak_memory_bytes(pipeline.graph, pipeline.costs, schedule)
    return bool((peak <= pipeline.costs.capacity_bytes).all())


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns a table per size and transfer, and the picture."""
    sized = [r | {"size": tuple(r["size"])} for r in records]
    texts = {}
    for (size, transfer), runs in by(sized, "size", "transfer").items():
        cases = by(runs, *CASE)
        title = f"{size[0]} stages, {size[1]} micro-batches, transfers of {transfer:g} s"
        texts[title] = table([row(dict(zip(CASE, c, strict=True)), cases[c]) for c in cases])
    drawn = [r for r in sized if is_drawn(r, context.settings.sizes[0])]
    return Page(texts, {PICTURE: partial(draw, drawn)} if drawn else {})


def row(case: Record, runs: Sequence[Record]) -> Record:
    """Returns the makespans of one pipeline."""
    pipeline = pipeline_of(**case)
    there = {name: s for name, s in yardsticks(pipeline).items() if fits(pipeline, s)}
    shown: Record = {name: case[name] for name in ("backward", "room")}
    for name in (*SCHEDULES, "fifo"):
        shown[name] = f"{dj.simulator.makespan_s(there[name]):.6g}" if name in there else None
    done = [run for run in runs if "makespan_s" in run]
    for heading, field, pick in (
        ("found", "makespan_s", min),
        ("mean", "makespan_s", np.mean),
        ("lower bound", "lower_bound_s", max),
    ):
        shown[heading] = f"{pick([run[field] for run in done]):.6g}" if done else None
    return shown | {"proven": sum(run["proven"] for run in done), "runs": len(runs)}


def is_drawn(run: Record, size: tuple[int, int]) -> bool:
    """Returns whether a run is of the pipeline that is drawn."""
    case = {"size": tuple(size), "backward": "halves", "room": "P", "transfer": 0.0}
    return "makespan_s" in run and all(run[field] == value for field, value in case.items())


def draw(runs: Sequence[Record], path: pathlib.Path) -> None:
    """Writes the picture of the schedules by hand above the best that was found."""
    best = min(runs, key=lambda run: run["makespan_s"])
    pipeline = pipeline_of(**{field: best[field] for field in CASE})
    names = [name.partition(".")[2] for name in pipeline.names]  # the row says which stage
    plan = np.array(best["placement"]), np.array(best["priority"])
    schedules = yardsticks(pipeline) | {"found": executed(pipeline, *plan)}
    panels = [(name, schedules[name], names) for name in (*SCHEDULES, "found")]
    dj.reports.plot_gantt(path, panels, num_devices=best["size"][0])


QUICK = {"sizes": ((4, 8),), "seconds": 2.0}

STUDY = Study("pipelines", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
