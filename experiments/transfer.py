"""Does a policy of one graph serve another? `python -m experiments.transfer`.

A policy is trained by stages 1 and 2 on a source, then used on a target: as it is, and after
stage 1 and some episodes of stage 2 there. Beside it stand stages 1 and 2 from scratch on the
target, in full and with as few episodes, and the paper's figures. All train with one
configuration: stage 2 as it is, local search beside the policy included. `--training.num-chains
0` with `--training.batch 64` leaves that out, so that episodes are all there is to spend.
Writes runs/transfer/transfer.json and transfer.md; every cell is kept in runs/transfer/cells/.

The policies' features are `coparent`: positions in a topological order mean nothing on
another graph.
"""

import dataclasses
import pathlib
from typing import Any

import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.files import write_json_atomic
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.reports.tables import format_table
from doppler_jax.training.sim_rl import SimConfig
from experiments import transfer_cells
from experiments.cells import Cells
from experiments.config import Strategy, check_settings
from experiments.problems import use_host_devices
from experiments.provenance import provenance
from experiments.transfer_cells import Study

PAPER_MS = {
    ("ffnn", "llama_block"): (251.0, 165.3, 159.4, 160.3),
    ("chainmm", "llama_block"): (242.3, 184.9, 174.0, 160.3),
    ("ffnn", "llama_layer"): (206.1, 158.2, 155.8, 150.6),
    ("chainmm", "llama_layer"): (338.2, 164.4, 156.4, 150.6),
}
"""The paper's makespans on 4 GPUs, ms: after 0, 2,000 and 4,000 episodes, and in full."""

PAPER_SHOTS = (0, 2000, 4000)

LISTED = ("critical_path", "heft")


@dataclasses.dataclass(frozen=True)
class TransferSettings:
    """What to train on, and what to use it for."""

    source: tuple[str, ...] = ("ffnn", "chainmm")
    """Names of the workloads to train on."""
    target: tuple[str, ...] = ("llama_block", "llama_layer")
    """Names of the workloads to place then; each source serves each target."""
    shots: tuple[int, ...] = PAPER_SHOTS
    """Episodes of stage 2 on the target."""
    full: int = 8000
    """Episodes of stage 2 on a source, and on the target from scratch."""
    cluster: str = "p100x4"
    """Name of a preset cluster, or a cluster's JSON file."""
    preset: str = "paper"
    """Sizes of the workloads."""
    strategy: Strategy = "uniform"
    """How their tensors are cut; the planner's cuts leave the sources little to learn."""
    seeds: int = 5
    quick: bool = False
    """One seed."""
    policy: PolicyConfig = dataclasses.field(
        default_factory=lambda: PolicyConfig(features="coparent")
    )
    training: SimConfig = dataclasses.field(default_factory=SimConfig)
    host_devices: int = 2
    """Devices that the CPU is split into, where there is no accelerator."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to transfer/ in there."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One pair: makespans over seeds."""

    source: str
    target: str
    listed_s: tuple[float, ...]  # of `LISTED`
    shots_s: np.ndarray  # [shots, seeds]
    greedy_s: np.ndarray  # [shots, seeds] of the policy at the end, alone
    scratch_s: np.ndarray  # [shots, seeds] without the source; nan for 0 episodes
    full_s: np.ndarray  # [seeds]
    full_greedy_s: np.ndarray  # [seeds]


def main(settings: TransferSettings) -> None:
    """Computes what is missing, prints and writes the tables."""
    _check(settings)
    use_host_devices(settings.host_devices)
    folder = settings.runs / "transfer"
    study = Study(
        cells=Cells(folder / "cells"),
        cluster=settings.cluster,
        preset=settings.preset,
        strategy=settings.strategy,
        policy=settings.policy,
        training=settings.training,
    )
    rows = []
    for target in settings.target:
        for source in settings.source:
            rows.append(measure_pair(settings, study, source, target))
            print(tabulate(settings, rows[-1:]), flush=True)
    origin = provenance()
    stated = ", ".join(f"{key} {value}" for key, value in origin.items())
    text = tabulate(settings, rows) + f"\nMade by `experiments.transfer`: {stated}.\n"
    print(text, flush=True)
    report = {
        "provenance": origin,
        "terms": study.terms,
        "shots": settings.shots,
        "rows": [_record(row) for row in rows],
    }
    write_json_atomic(folder / "transfer.json", report)
    (folder / "transfer.md").write_text(text, encoding="utf-8")


def measure_pair(settings: TransferSettings, study: Study, source: str, target: str) -> Row:
    """Returns the makespans of a pair, computing what was not kept."""
    seeds = range(1 if settings.quick else settings.seeds)
    listed = [transfer_cells.listed_cell(study, target, method) for method in LISTED]
    full = [transfer_cells.scratch_cell(study, target, settings.full, seed) for seed in seeds]
    scratch_s = [
        [_scratch_s(study, target, shots, seed) for seed in seeds] for shots in settings.shots
    ]
    found = [
        [
            transfer_cells.shot_cell(study, source, target, shots, settings.full, seed)
            for seed in seeds
        ]
        for shots in settings.shots
    ]
    return Row(
        source=source,
        target=target,
        listed_s=tuple(cell["makespan_s"] for cell in listed),
        shots_s=np.array([[cell["makespan_s"] for cell in cells] for cells in found]),
        greedy_s=np.array([[cell["greedy_s"] for cell in cells] for cells in found]),
        scratch_s=np.array(scratch_s),
        full_s=np.array([cell["makespan_s"] for cell in full]),
        full_greedy_s=np.array([cell["greedy_s"] for cell in full]),
    )


def _scratch_s(study: Study, target: str, shots: int, seed: int) -> float:
    if not shots:
        return np.nan
    cell = transfer_cells.scratch_cell(study, target, shots, seed)
    return float(cell["makespan_s"])


def tabulate(settings: TransferSettings, rows: list[Row]) -> str:
    """Returns the rows as tables, the paper's figures beside them."""
    heads = (*(f"{shots:,} episodes" for shots in settings.shots), f"full, {settings.full:,}")
    best, greedy = [], []
    for row in rows:
        pair = f"{row.source} to {row.target}"
        spread = [*row.shots_s, row.full_s]
        listed = [f"{1e3 * seconds:.1f}" for seconds in row.listed_s]
        over = [f"{100 * (s.mean() / row.full_s.mean() - 1):+.1f}" for s in row.shots_s]
        best.append((pair, "ours", *map(_spread, spread), *over, *listed))
        alone = [_spread(s) if np.isfinite(s).all() else "-" for s in row.scratch_s]
        best.append((pair, "without transfer", *alone, *["-"] * (1 + len(over) + len(LISTED))))
        paper = PAPER_MS.get((row.source, row.target))
        if paper is not None and settings.shots == PAPER_SHOTS:
            figures = [f"{figure:.1f}" for figure in paper]
            over = [f"{100 * (figure / paper[-1] - 1):+.1f}" for figure in paper[:-1]]
            best.append((pair, "paper", *figures, *over, *["-"] * len(LISTED)))
        greedy.append((pair, *map(_spread, [*row.greedy_s, row.full_greedy_s])))
    over_heads = [f"{shots:,} over full (%)" for shots in settings.shots]
    columns = ("transfer", "whose", *heads, *over_heads, *LISTED)
    return (
        f"Makespans in ms on {settings.cluster}, {settings.preset} sizes, {settings.strategy} "
        "cut, simulated (the paper's: measured on its machine): the best placement met in "
        "training and the policy's greedy one, whichever is shorter; after 0 episodes the "
        "greedy one. Mean and standard deviation over "
        f"{rows[0].full_s.size} seeds.\n\n{format_table(columns, best)}\n"
        "The policies' greedy placements at the end, ms:\n\n"
        f"{format_table(('transfer', *heads), greedy)}"
    )


def _spread(seconds: np.ndarray) -> str:
    return f"{1e3 * seconds.mean():.1f} ± {1e3 * seconds.std():.1f}"


def _record(row: Row) -> dict[str, Any]:
    fields = dataclasses.asdict(row)
    arrays = {k: v for k, v in fields.items() if isinstance(v, np.ndarray)}
    # JSON has no nan.
    lists = {k: np.where(np.isfinite(v), v, np.array(None)).tolist() for k, v in arrays.items()}
    return fields | lists


def _check(settings: TransferSettings) -> None:
    """Raises `ValueError` where an option cannot be, before anything is trained."""
    check_settings(settings)
    for option, names in (("--source", settings.source), ("--target", settings.target)):
        if not names:
            raise ValueError(f"{option} names no workload")
        for name in names:
            if name not in dj.list_workloads():
                raise ValueError(
                    f"{option}: unknown {name!r}; known: {', '.join(dj.list_workloads())}"
                )
    if not settings.shots or min(settings.shots) < 0:
        raise ValueError(f"--shots are {settings.shots}; expected counts of episodes")
    batch = settings.training.batch
    fewest = min([settings.full, *(shots for shots in settings.shots if shots)])
    if fewest < batch:
        raise ValueError(f"{fewest} episodes are fewer than a batch of {batch}")


if __name__ == "__main__":
    cli.run(main, TransferSettings, "Does a policy of one graph serve another?")
