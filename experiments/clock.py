"""Seconds from the shell: `python -m experiments.clock`.

Every run is a new process `python -m doppler_jax place`, timed from before it is started to its
end. Caches on disk are warm: native code is compiled, and methods that use XLA, for a policy,
have placed each problem once, which does not count. `--empty-caches` adds rows in which every
process begins with none. `--many 200` adds runs with bounds drawn evenly from 0.1 to 5 s, of
which only the end counts.

Past the bound are seconds, at most. The best known makespan of a problem is the least of all
runs here, of those of `--reference-s` seconds, and of experiments/best_makespans.json, to which
`--publish` writes it. `--queue fifo` compares placements in the paper's runtime.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import doppler_jax as dj
from doppler_jax import native
from doppler_jax.files import parse_json_object, read_text
from doppler_jax.graphs.families import list_families
from doppler_jax.methods import DEFAULT_METHOD
from doppler_jax.methods.registry import policy_of
from experiments import catalogue, grid
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.machine import run_apart
from experiments.tables import by, table

PUBLISHED = (*catalogue.PUBLISHED, "8gpu_transformer_block@8")

FAMILIES = tuple(f"{family}-{5 * k + 2}" for k, family in enumerate(list_families()))

SMALL = [f"{family}-{k}~{26 - 2 * k + k // 4}" for k, family in enumerate(list_families())]
"""Ten of 10 to 30 tasks."""

BEST = pathlib.Path(__file__).with_name("best_makespans.json")
"""Best known makespans of the problems, in seconds."""

LATE_S = 120.0
"""Past its bound a process is killed."""

COMPILING_S = 30.0
"""So long may a process take that compiles what a run left behind."""

WARM, EMPTY, FIRST, LONG, DRAWN = "warm", "empty", "first", "long", "drawn"
"""What a run is for: the rows, what makes caches warm, the best known, and `--many`."""


@dataclasses.dataclass(frozen=True)
class Asked(Settings):
    """What to run."""

    problems: tuple[str, ...] = (*PUBLISHED, *FAMILIES, *SMALL)
    """Names as in experiments/catalogue.py; published graphs are left out where absent."""
    method: tuple[str, ...] = tuple(dj.list_methods())
    seconds: tuple[float, ...] = (5.0,)
    """Bounds of all methods."""
    more_method: tuple[str, ...] = (DEFAULT_METHOD, "annealing")
    more_seconds: tuple[float, ...] = (2.0, 10.0)
    """Bounds of these methods besides."""
    queue: str = "in_order"
    """That plans are for."""
    seeds: int = 3
    empty_caches: bool = False
    """Also runs the default method with a fresh, empty folder for all caches."""
    many: int | None = None
    """Runs on small graphs besides."""
    reference_s: float | None = None
    """Also runs the default method for so long on each problem, for the best known."""


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per run."""
    asked = context.settings
    grid.check_names("--method", asked.method, dj.list_methods())
    problems = present(asked.shared, asked.problems)
    native.compile_all()
    spends = {*itertools.product(asked.method, asked.seconds)}
    spends |= {*itertools.product(asked.more_method, asked.more_seconds)}
    runs: list[tuple[str, str, str, float, int]] = []
    for p in problems:
        runs += [(LONG, p, DEFAULT_METHOD, asked.reference_s, 0)] if asked.reference_s else []
        longest = dict(sorted(spends))
        runs += [(FIRST, p, m, s, 0) for m, s in longest.items() if policy_of(m)]
        for seed in range(asked.seeds):
            runs += [(WARM, p, *spend, seed) for spend in sorted(spends)]
            empty = asked.seconds if asked.empty_caches else ()
            runs += [(EMPTY, p, DEFAULT_METHOD, s, seed) for s in empty]
    bounds = np.random.default_rng(0).uniform(0.1, 5.0, asked.many or 0).round(3).tolist()
    small = itertools.cycle(SMALL)
    runs += [(DRAWN, next(small), DEFAULT_METHOD, s, seed) for seed, s in enumerate(bounds)]
    names = ("run", "problem", "method", "seconds", "seed")
    keys: list[Record] = [
        {"queue": asked.queue, **dict(zip(names, each, strict=True))} for each in runs
    ]
    return [Cell(key, partial(place, context, **key)) for key in keys]


def present(shared: pathlib.Path, problems: Sequence[str]) -> list[str]:
    """Returns the problems without published graphs that are absent."""
    graphs = {p: shared / "reference_graphs" / f"{p.partition('@')[0]}.txt" for p in PUBLISHED}
    return [p for p in problems if p not in graphs or graphs[p].exists()]


def place(
    context: Context[Any],
    queue: str,
    run: str,
    problem: str,
    method: str,
    seconds: float,
    seed: int,
    also: Sequence[str] = (),
) -> Record:
    """Returns exit status and seconds of a process that places, and what it wrote.

    Of the latter makespan, lower bound, evaluations, and `also` other fields.
    """
    loaded = context.problem(problem)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        graph, cluster, output, log = (
            pathlib.Path(made, name)
            for name in ("graph.json", "cluster.json", "out.json", "log")
        )
        dj.graphs.save_graph(graph, loaded.graph)
        reference = f"reference_x{loaded.costs.num_devices}"
        dj.clusters.save_cluster(cluster, loaded.cluster or dj.make_cluster(reference))
        options = {"cluster": cluster, "output": output, "method": method, "seed": seed}
        options |= {"budget-s": seconds, "queue": queue}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "doppler_jax", "place", str(graph), *words]
        caches = ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR")
        empty = {name: str(pathlib.Path(made, name)) for name in caches if run == EMPTY}
        status, spent_s = run_apart(command, seconds + LATE_S, log, {**os.environ, **empty})
        if run == EMPTY:  # what it left compiling would take a core from the next run
            wait_for(pathlib.Path(made), "*/doppler_jax/native-*/complete")
        result: Record = {"exit": status, "past_s": spent_s - seconds}
        if status != 0:
            return result | {"said": log.read_text(errors="replace").strip()[-300:]}
        placed = parse_json_object(output, read_text(output))
    kept = ("makespan_s", "lower_bound_s", "evaluations", *also)
    return result | {name: placed[name] for name in kept}


def wait_for(folder: pathlib.Path, pattern: str) -> None:
    """Waits until there is such a file in a folder, or nobody can be making it any more."""
    until_s = time.monotonic() + COMPILING_S
    while not any(folder.glob(pattern)) and time.monotonic() < until_s:
        time.sleep(0.1)


def best_known_s(records: Sequence[Record], queue: str) -> dict[str, float]:
    """Returns the least makespan of each problem under a queue, never below its lower bound.

    Under `fifo` those of `exact` do not count: its plans are for other queues, too.
    """
    best = _kept().get(queue, {})
    left_out = "exact" if queue == "fifo" else ""
    ended = [r for r in records if "makespan_s" in r and r["method"] != left_out]
    for problem, found in by(ended, "problem").items():
        least = min([best.get(problem, np.inf), *(r["makespan_s"] for r in found)])
        best[problem] = max([least, *(r["lower_bound_s"] for r in found)])
    return best


def _kept() -> dict[str, dict[str, float]]:
    """Returns the makespans that are kept, by queue and problem."""
    return json.loads(BEST.read_text()) if BEST.exists() else {}


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns a row per method and bound, and how many of the drawn runs ended well."""
    queue = context.settings.queue
    best, used = best_known_s(records, queue), by(records, "run")
    if context.settings.publish and LONG in used:
        kept = json.dumps(_kept() | {queue: best}, indent=0, sort_keys=True)
        BEST.write_text(kept + "\n")
    shown = {use: table(_rows(used.get(use, []), best)) for use in (WARM, EMPTY)}
    known = "long runs, too" if LONG in used or BEST.exists() else "no long run is kept"
    title = f"Makespans under `{queue}` over the best known ({known})"
    texts = {title: "\n".join(shown.values())}
    if drawn := used.get(DRAWN, []):
        ended, late_s = sum(r["exit"] == 0 for r in drawn), max(r["past_s"] for r in drawn)
        said = f"exit status 0 in {ended} of {len(drawn)} runs, at most {late_s:.2f} s past"
        texts["Bounds drawn from 0.1 to 5 s"] = said
    return Page(texts)


def _rows(records: Sequence[Record], best: dict[str, float]) -> list[Record]:
    """Returns the rows of runs that began with caches in one state."""
    runs = by(records, "seconds", "method")
    scores = {
        spend: {
            problem: _mean([r["makespan_s"] / best[problem] for r in ended])
            for problem, ended in by([r for r in found if "makespan_s" in r], "problem").items()
        }
        for spend, found in runs.items()
    }
    rows = []
    for (seconds, method), found in runs.items():
        mine = scores[seconds, method]
        rivals = [found for (s, m), found in scores.items() if s == seconds and m != "exact"]
        least = {problem: min(r.get(problem, np.inf) for r in rivals) for problem in mine}
        row = {"method": method, "bound (s)": f"{seconds:g}", "caches": found[0]["run"]}
        row |= {"geometric mean": f"{_mean([*mine.values()]):.4f}" if mine else None}
        row |= {"worst problem": _worst(mine)}
        row |= {"worst over the best method": _worst({p: mine[p] / least[p] for p in mine})}
        row |= {"past the bound (s)": f"{max(r['past_s'] for r in found):.2f}"}
        statuses = (f"{s}: {len(ended)}" for s, ended in by(found, "exit").items())
        rows.append(row | {"exit statuses": ", ".join(statuses)})

    def first(row: Record) -> tuple[bool, float, str]:
        bound_s, mean = float(row["bound (s)"]), row["geometric mean"] or ""
        return row["method"] != DEFAULT_METHOD, bound_s, mean

    return sorted(rows, key=first)


def _mean(ratios: Sequence[float]) -> float:
    """Returns the geometric mean."""
    return float(np.exp(np.log(ratios).mean()))


def _worst(scores: dict[str, float]) -> str | None:
    worst = max(scores, key=scores.__getitem__, default=None)
    return f"{scores[worst]:.4f} {worst}" if worst else None


QUICK = {
    "problems": tuple(SMALL[-2:]), "method": ("heft",), "more_method": (DEFAULT_METHOD,),
    "more_seconds": (2.0,), "seeds": 1, "many": 2,
}  # fmt: skip

STUDY = Study("clock", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
