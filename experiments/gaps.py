"""How far from optimal is every method, where the optimum is known or memory is short?

`python -m experiments.gaps` writes runs/gaps/gaps.json and gaps.md:

- random graphs of at most 10 tasks, against the proven optimum (`exact`) and against the
  best of all placements under the queue `fifo` (`brute_force`);
- the Standard Task Graph set, 50 tasks, `priority` queues, against the published optima;
- four profiled networks on accelerators with little memory, beside the human experts'.

Each cell is kept under runs/gaps/cells/ and not computed again on the same terms.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.files import write_json_atomic
from doppler_jax.methods import policy_of
from doppler_jax.reports.tables import format_table
from experiments import gap_cells
from experiments.cells import Cells
from experiments.gap_cells import Budget
from experiments.neutral import DEVICES
from experiments.provenance import provenance

Part = Literal["small", "stg", "dnn"]

TRAINED = tuple(m for m in dj.list_methods() if policy_of(m) and m != "doppler+search")
"""Methods that train a policy for each problem: left out of quick runs unless asked for."""

NETWORKS = ("bert24", "gnmt", "inceptionv3", "resnet50")
SMALL_COLUMNS = (
    "method",
    "graphs",
    "mean above optimum (%)",
    "worst (%)",
    "optimum met",
    "mean above fifo best (%)",
    "worst (%)",
    "fifo best met",
)
STG_COLUMNS = (
    "method",
    "graphs",
    *(f"mean gap, {d} devices (%)" for d in DEVICES),
    "worst (%)",
    "best known met",
    "b-level chosen",
)
DNN_COLUMNS = (
    "network",
    "method",
    "makespan (ms)",
    "above bound (%)",
    "accelerators",
    "tasks on CPU",
    "fullest accelerator (%)",
    "fits",
)


@dataclasses.dataclass(frozen=True)
class GapSettings:
    """What is compared, and what each method may spend on each problem."""

    methods: tuple[str, ...] = ()
    """Names of methods; none means all, in quick runs all that train no policy."""
    parts: tuple[Part, ...] = ("small", "stg", "dnn")
    """Which of the three comparisons."""
    evaluations: int = 2000
    """Placements that a method may simulate for one problem."""
    budget_s: float | None = None
    """Seconds that it may take, compilation included; none is no bound but for `exact`."""
    exact_s: float = 30.0
    """Seconds for `exact` on one problem."""
    num_small: int = 40
    """Number of random graphs."""
    seed: int = 0
    """Of the methods; the random graphs are always the same."""
    quick: bool = False
    """A tenth of the random graphs, two others on 2 and 8 devices, the smallest network."""
    graphs: pathlib.Path = pathlib.Path("../shared/neutral_graphs")
    """Folder with `stg50/` and `dnn_partitioning/`."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to gaps/ in there."""


def main(settings: GapSettings) -> None:
    """Computes what is missing, prints and writes the tables."""
    methods = choose_methods(settings)
    cli.check_seed(settings.seed)
    if settings.num_small < 1 or settings.evaluations < 1:
        raise ValueError("--num-small and --evaluations must be at least 1")
    folder = settings.runs / "gaps"
    cells = Cells(folder / "cells")
    makers = {"small": small, "stg": stg, "dnn": dnn}
    results: dict[str, list[dict[str, Any]]] = {}
    texts = []
    for part in settings.parts:
        results[part], text = makers[part](settings, cells, methods)
        print(text, flush=True)
        texts.append(text)
    origin = provenance()
    stated = ", ".join(f"{key} {value}" for key, value in origin.items())
    texts.append(
        f"At most {settings.evaluations} evaluations"
        + (f" and {settings.budget_s:g} s" if settings.budget_s else "")
        + f" for each problem, seed {settings.seed}. Made by `experiments.gaps`: {stated}.\n"
    )
    write_json_atomic(folder / "gaps.json", {"provenance": origin, "results": results})
    (folder / "gaps.md").write_text("\n".join(texts), encoding="utf-8")
    print(f"written to {folder}/: gaps.json, gaps.md")


def choose_methods(settings: GapSettings) -> list[str]:
    """Returns the methods to compare.

    Raises:
      ValueError: one is unknown.
    """
    known = dj.list_methods()
    for method in settings.methods:
        if method not in known:
            raise ValueError(f"unknown method {method!r}; known: {', '.join(known)}")
    if settings.methods:
        return list(settings.methods)
    return [m for m in known if not (settings.quick and m in TRAINED)]


def small(
    settings: GapSettings, cells: Cells, methods: Sequence[str]
) -> tuple[list[dict[str, Any]], str]:
    """Returns the cells of the random graphs, and their table."""
    count = max(1, settings.num_small // 10) if settings.quick else settings.num_small
    references = [
        gap_cells.small_reference(cells, seed, settings.exact_s) for seed in range(count)
    ]
    results = list(references)
    best = np.array([r["fifo_best_s"] for r in references])
    optimum = np.array([r["optimum_s"] for r in references])
    rows = [_small_row("best placement, fifo", best, optimum, best)]
    for method in methods:
        budget = _budget(settings, method)
        found = [gap_cells.small_cell(cells, seed, method, budget) for seed in range(count)]
        results += found
        keep = [i for i, r in enumerate(found) if "makespan_s" in r]
        makespans = np.array([found[i]["makespan_s"] for i in keep])
        rows.append(_small_row(method, makespans, optimum[keep], best[keep]))
    proven = sum(r["proven"] for r in references)
    title = (
        f"Random graphs of 5 to 10 tasks on 2 and 3 devices, queue fifo; {proven} of {count} "
        "optima proven. The optimum may idle and reorder, a placement under fifo may not.\n\n"
    )
    return results, title + format_table(SMALL_COLUMNS, rows)


def stg(
    settings: GapSettings, cells: Cells, methods: Sequence[str]
) -> tuple[list[dict[str, Any]], str]:
    """Returns the cells of the Standard Task Graph set, and their table.

    Raises:
      ValueError: there is no graph.
    """
    folder = settings.graphs / "stg50"
    names = sorted(path.stem for path in folder.glob("*.stg"))
    if not names:
        raise ValueError(f"{folder}: there is no .stg file")
    devices = DEVICES[::2] if settings.quick else DEVICES
    names = names[::20] if settings.quick else names
    results, rows = [], []
    for method in methods:
        found = [
            gap_cells.stg_cell(cells, folder, name, d, method, _budget(settings, method))
            | {"graph": name, "devices": d}
            for d in devices
            for name in names
        ]
        results += found
        rows.append(_stg_row(method, [r for r in found if "makespan_s" in r]))
    title = (
        "Standard Task Graph set, 50 tasks, queue priority, above the best known makespan. "
        "Priorities are the start order of the method's own schedule, or the b-level where "
        "that is shorter.\n\n"
    )
    return results, title + format_table(STG_COLUMNS, rows)


def dnn(
    settings: GapSettings, cells: Cells, methods: Sequence[str]
) -> tuple[list[dict[str, Any]], str]:
    """Returns the cells of the networks with memory limits, and their table."""
    folder = settings.graphs / "dnn_partitioning"
    results, rows = [], []
    for network in NETWORKS[:1] if settings.quick else NETWORKS:
        name = f"{network}_inference"
        found = {"human expert": gap_cells.expert_cell(cells, folder, name)}
        for method in methods:
            budget = _budget(settings, method)
            found[method] = gap_cells.dnn_cell(cells, folder, name, method, budget)
        results += [{"network": network, **record} for record in found.values()]
        bound_s = max(r.get("lower_bound_s", 0.0) for r in found.values())
        rows += [_dnn_row(network, m, bound_s, record) for m, record in found.items()]
    title = (
        "Networks of msr-fiddle/dnn-partitioning (inference, by layers), queue fifo. The "
        "experts' splits use 6 accelerators and were made for larger memories. The bound is "
        "that of `exact` where it ran and found one, or the longest path or mean load.\n\n"
    )
    return results, title + format_table(DNN_COLUMNS, rows)


def _budget(settings: GapSettings, method: str) -> Budget:
    seconds = settings.exact_s if method == "exact" else settings.budget_s
    return Budget(settings.evaluations, seconds, settings.seed)


def _small_row(
    method: str, makespans: np.ndarray, optimum: np.ndarray, best: np.ndarray
) -> tuple[str, ...]:
    cells = [method, str(len(makespans))]
    for reference in (optimum, best):
        cells += [*_mean_worst(makespans, reference), str((makespans <= reference).sum())]
    return tuple(cells)


def _stg_row(method: str, found: list[dict[str, Any]]) -> tuple[str, ...]:
    makespans, best, devices = (
        np.array([r[field] for r in found]) for field in ("makespan_s", "best", "devices")
    )
    means = [_mean_worst(makespans[devices == d], best[devices == d])[0] for d in DEVICES]
    return (
        method,
        str(len(found)),
        *means,
        _mean_worst(makespans, best)[1],
        str((makespans <= best).sum()),
        str(sum(r["priority"] == "b-level" for r in found)),
    )


def _dnn_row(
    network: str, method: str, bound_s: float, record: dict[str, Any]
) -> tuple[str, ...]:
    if "makespan_s" not in record:
        return (network, method, *["-"] * 5, "none found")
    return (
        network,
        method,
        f"{1e3 * record['makespan_s']:.2f}",
        f"{100 * (record['makespan_s'] / bound_s - 1):.1f}",
        str(record["accelerators"]),
        str(record["tasks_elsewhere"]),
        f"{100 * record['filled']:.1f}",
        "yes" if record["filled"] <= 1 else "NO",
    )


def _mean_worst(makespans: np.ndarray, reference: np.ndarray) -> tuple[str, str]:
    if not len(makespans):
        return "-", "-"
    gaps = 100 * (makespans / reference - 1)
    return f"{gaps.mean():.2f}", f"{gaps.max():.2f}"


if __name__ == "__main__":
    cli.run(main, GapSettings, "Every method's gap to known optima, and under memory limits.")
