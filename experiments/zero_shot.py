"""How good is the base policy where it was never trained? `python -m experiments.zero_shot`.

Three parts, written to runs/zero_shot/zero_shot.json and zero_shot.md:

- `quality`: held-out families and the published graphs; the policy alone, its samples, a
  search from them and its rivals at equal seconds and evaluations, as ratios to the best
  makespan known: the least of all runs, those at `--reference-evaluations` included, and of
  experiments/best_placements.json;
- `clusters`: greedy placements in one order and in two, and the best of samples, against HEFT
  on generated clusters of 8 unequal devices in two islands; clusters.png shows all ratios;
- `times`: how long the two greedy placements take on one core, compiled.

Cells are kept in runs/zero_shot/cells/; another policy makes its own afresh.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.files import parse_json_object, read_text, write_json_atomic
from doppler_jax.graphs.families import HELD_OUT
from doppler_jax.policy_files import FOLDERS
from experiments import zero_shot_cells, zero_shot_tables
from experiments.catalogue import BEST_KNOWN_S, BEST_PLACEMENTS
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.problems import use_host_devices
from experiments.provenance import provenance
from experiments.zero_shot_cells import Run, Study

Part = Literal["quality", "clusters", "times"]

SEARCHES = ("doppler+search", "annealing", "local_search")

SECONDS = 5

BUDGETS = (1_000, 10_000)

RUNS = (
    Run("critical_path"),
    Run("heft"),
    *(Run(method) for method in zero_shot_cells.GREEDY),
    Run("doppler", 256),
    *(Run(method, seconds=SECONDS) for method in SEARCHES),
    *(Run(method, evaluations) for evaluations in BUDGETS for method in SEARCHES),
)
"""The rows of the part `quality`; methods that learn start from the base policy."""

REFERENCES = ("doppler+search", "evolution", "annealing", "local_search")
"""The best of these at `--reference-evaluations` counts as known."""


TIMED_GRAPH = "full_transformer_layer_261nodes"
"""Of 229 tasks."""


@dataclasses.dataclass(frozen=True)
class ZeroShotSettings:
    """What to measure."""

    parts: tuple[Part, ...] = ("quality", "clusters", "times")
    policy: pathlib.Path | None = None
    """Checkpoint or run folder of the policy; by default the base policy that ships."""
    instances: int = 16
    """Graphs of each held-out family."""
    reference_evaluations: int = 1_000_000
    """Of each method that seeks the best known placement."""
    num_clusters: int = 200
    """Instances of the part `clusters`."""
    seed: int = 0
    """Of the methods; the instances are always the same."""
    quick: bool = False
    """Two graphs of each family, 50,000 evaluations for the best known, 24 clusters."""
    host_devices: int = os.cpu_count() or 1
    """Devices that the CPU is split into; searches use all."""
    reference: pathlib.Path = pathlib.Path("../shared/reference_graphs")
    """Folder with the published graphs."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to zero_shot/ in there."""


def main(settings: ZeroShotSettings) -> None:
    """Computes what is missing, prints and writes the tables."""
    check_settings(settings)
    if settings.quick:
        settings = dataclasses.replace(
            settings, instances=2, reference_evaluations=50_000, num_clusters=24
        )
    path = policy_path(settings)
    use_host_devices(settings.host_devices)  # before the policy's arrays start the backend
    policy = dj.load_policy(path)
    folder = settings.runs / "zero_shot"
    study = Study(Cells(folder / "cells"), policy, settings.reference)
    makers: dict[str, Callable[[], tuple[Any, str]]] = {
        "quality": lambda: quality(settings, study),
        "clusters": lambda: clusters(settings, study, folder),
        "times": lambda: times(settings, path),
    }
    results, texts = {}, []
    for part in settings.parts:
        results[part], text = makers[part]()
        print(text, flush=True)
        texts.append(text)
    origin = provenance()
    stated = ", ".join(f"{key} {value}" for key, value in origin.items())
    texts.append(f"Policy {path.name}. Made by `experiments.zero_shot`: {stated}.\n")
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomic(folder / "zero_shot.json", {"provenance": origin, "results": results})
    (folder / "zero_shot.md").write_text("\n".join(texts), encoding="utf-8")


def policy_path(settings: ZeroShotSettings) -> pathlib.Path:
    """Returns where the policy lies.

    Raises:
      ValueError: none was given, and none ships.
    """
    if settings.policy is not None:
        return settings.policy
    for folder in FOLDERS:
        if folder.is_dir():
            return folder
    raise ValueError(f"no base policy at {FOLDERS[0]}; give --policy")


def quality(settings: ZeroShotSettings, study: Study) -> tuple[dict[str, Any], str]:
    """Returns the makespans of all runs on all problems, and the tables of their ratios."""
    groups = {"published": tuple(n for n in BEST_KNOWN_S if _is_there(settings, n))}
    for family in HELD_OUT:
        groups[family] = tuple(f"{family}-{k}" for k in range(settings.instances))
    found = {}
    for name in (name for names in groups.values() for name in names):
        jax.clear_caches()  # or `place` may, while seconds count
        cells = {
            run.label: zero_shot_cells.method_cell(study, name, run, settings.seed)
            for run in RUNS
        }
        known = [
            zero_shot_cells.method_cell(
                study, name, Run(method, settings.reference_evaluations), settings.seed
            )
            for method in REFERENCES
        ]
        makespans = {label: cell["makespan_s"] for label, cell in cells.items()}
        best_s = min([*makespans.values(), *(cell["makespan_s"] for cell in known)])
        found[name] = {"best_s": min(best_s, _known_s(name)), "makespan_s": makespans}
        print(f"{name}: best known {found[name]['best_s']:.6g}", flush=True)
    placed_on: dict[str, list[str]] = {}
    for family in HELD_OUT:
        for number, name in enumerate(groups[family]):
            placed_on.setdefault(zero_shot_cells.cluster_name(number), []).append(name)
    return found, zero_shot_tables.tabulate_quality(groups, placed_on, found)


def clusters(
    settings: ZeroShotSettings, study: Study, folder: pathlib.Path
) -> tuple[dict[str, Any], str]:
    """Returns the policy's makespans and HEFT's on generated clusters, and how they compare."""
    found = zero_shot_cells.island_cell(study, settings.num_clusters)
    kinds = {
        "greedy": "greedy_s",
        "two greedy": "two_greedy_s",
        f"best of {zero_shot_cells.SAMPLES} samples": "best_s",
    }
    heft_s = np.array(found["heft_s"])
    ratios = {kind: np.array(found[name]) / heft_s for kind, name in kinds.items()}
    zero_shot_tables.plot_ratios(folder / "clusters.png", ratios)
    return found, zero_shot_tables.tabulate_clusters(ratios, found["families"])


def times(settings: ZeroShotSettings, path: pathlib.Path) -> tuple[dict[str, Any], str]:
    """Returns the seconds of greedy placements in a process on one core, and their table.

    Raises:
      ValueError: the published graph is not there, or the process failed.
    """
    if not _is_there(settings, TIMED_GRAPH):
        raise ValueError(f"{settings.reference}: there is no {TIMED_GRAPH}.txt")
    core = min(os.sched_getaffinity(0))
    graph = settings.reference / f"{TIMED_GRAPH}.txt"
    command = [sys.executable, "-m", "experiments.zero_shot_times", core, path, graph]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "1"}
    done = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"the timed process failed: {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found, zero_shot_tables.tabulate_times(found)


def _is_there(settings: ZeroShotSettings, name: str) -> bool:
    return (settings.reference / f"{name}.txt").exists()


def _known_s(name: str) -> float:
    """Returns the best makespan known of a published graph, inf of others."""
    kept = parse_json_object(BEST_PLACEMENTS, read_text(BEST_PLACEMENTS))
    return min(BEST_KNOWN_S.get(name, np.inf), kept.get(name, {}).get("makespan_s", np.inf))


if __name__ == "__main__":
    cli.run(main, ZeroShotSettings, "How good is the base policy where it was never trained?")
