"""What the engine costs and what it is worth: `python -m experiments.engine`.

Five parts, each a table or two of runs/engine/engine.md:

- `overhead`: a tiny task and a transfer against bare calls of JAX.
- `idle`: how long devices idle with a ready task, over random placements of each workload.
- `halving`: ffnn on two isolated devices against one, beside two pinned processes.
- `sync`: one placement run work-conserving and bulk-synchronous, beside the simulation.
- `jit`: the engine against one `jax.jit` on the same cores, sharded or not.

What is compared is measured in turns, so that drift hits all alike; ratios are medians over
rounds. Backend `ray` has isolated devices, one core each; the devices of `local` share the
cores where there is no accelerator. Each cell is kept under runs/engine/cells/ and not
repeated on the same terms.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from doppler_jax import cli
from doppler_jax.files import write_json_atomic
from doppler_jax.programs.workloads import list_workloads
from experiments import engine_comparisons, engine_overhead, engine_tables
from experiments.cells import Cells
from experiments.config import check_settings
from experiments.machine import BackendName, Machine
from experiments.problems import use_host_devices
from experiments.provenance import provenance

Part = Literal["overhead", "idle", "halving", "sync", "jit"]
Record = dict[str, Any]
Table = tuple[dict[str, Record], str]
"""The records of a part by cell, and its tables."""

TRANSFER_BYTES = (1 << 8, 1 << 20, 1 << 24)
"""Sizes that are moved."""

NUM_TRANSFERS = 50
"""Steps of the chain that moves them."""


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """What to measure."""

    parts: tuple[Part, ...] = ("overhead", "idle", "halving", "sync", "jit")
    backend: BackendName = "ray"
    """Of the comparisons; `overhead` and `idle` measure `local` as well."""
    devices: int = 2
    """Devices to place on."""
    workloads: tuple[str, ...] = ("chainmm", "ffnn", "llama_block", "moe_block")
    """What `sync` and `jit` run."""
    tasks: int = 1000
    """Tiny tasks of `overhead`."""
    placements: int = 20
    """Random placements of each workload in `idle`."""
    rounds: int = 15
    """Measurements of each kind, of which the median counts."""
    quick: bool = False
    """A minute a part: small presets, three placements, three rounds."""
    again: bool = False
    """Measures afresh what is kept from an earlier run."""
    seed: int = 0
    """Of the random placements."""
    runs: pathlib.Path = pathlib.Path("runs")
    """Results go to engine/ in there."""


def main(settings: EngineSettings) -> None:
    """Splits the CPU into devices, where there is no accelerator, and runs the parts."""
    check_settings(settings)
    use_host_devices(settings.devices)
    run(settings)


def run(settings: EngineSettings) -> None:
    """Measures what is missing, prints and writes the tables.

    Raises:
      ValueError: a setting is out of range, or the backend cannot be used here.
    """
    if settings.devices < 2:
        raise ValueError(f"--devices is {settings.devices}; expected at least 2")
    if settings.quick:
        settings = dataclasses.replace(
            settings,
            placements=min(settings.placements, 3),
            rounds=min(settings.rounds, 3),
        )
    folder = settings.runs / "engine"
    makers: dict[Part, Callable[[_Bench], Table]] = {
        "overhead": overhead,
        "idle": idle,
        "halving": halving,
        "sync": sync,
        "jit": jit,
    }
    results, texts = {}, []
    with Machine(settings.devices) as machine:
        bench = _Bench(settings, Cells(folder / "cells"), machine)
        if settings.again:
            bench.calibration.unlink(missing_ok=True)
        for part in settings.parts:
            results[part], text = makers[part](bench)
            print(text, flush=True)
            texts.append(text)
    origin = provenance()
    stated = ", ".join(f"{key} {value}" for key, value in origin.items())
    texts.append(f"Made by `experiments.engine`: {stated}.\n")
    write_json_atomic(folder / "engine.json", {"provenance": origin, "results": results})
    (folder / "engine.md").write_text("\n".join(texts), encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class _Bench:
    """What every part needs."""

    settings: EngineSettings
    cells: Cells
    machine: Machine

    @property
    def backends(self) -> tuple[BackendName, ...]:
        return ("local",) if self.settings.backend == "local" else ("local", "ray")

    @property
    def calibration(self) -> pathlib.Path:
        """File of the measured costs by which programs are placed and simulated."""
        return self.cells.folder / f"calibration-{self.settings.backend}.json"

    def get(self, name: str, make: Callable[[], Record], **terms: Any) -> Record:
        """Returns a cell, computed on these terms if it is not there."""
        terms = {
            "devices": self.settings.devices,
            "rounds": self.settings.rounds,
            "quick": self.settings.quick,
            **terms,
        }
        if self.settings.again:
            (self.cells.folder / f"{name}.json").unlink(missing_ok=True)
        return self.cells.get(name, terms, make)


def overhead(bench: _Bench) -> Table:
    """Returns what tiny tasks and transfers cost by each backend, beside bare calls."""
    records, texts = {}, []
    num_tasks, rounds = bench.settings.tasks, bench.settings.rounds
    for backend in bench.backends:
        name = f"tasks-{backend}"
        records[name] = bench.get(
            name,
            partial(engine_overhead.task_cell, bench.machine, backend, num_tasks, rounds),
            tasks=num_tasks,
        )
        texts.append(engine_tables.task_table(backend, num_tasks, records[name]))
    moved: dict[tuple[str, int], Record] = {}
    for backend in bench.backends:
        for num_bytes in TRANSFER_BYTES:
            name = f"transfer-{backend}-{num_bytes}"
            records[name] = moved[backend, num_bytes] = bench.get(
                name,
                partial(
                    engine_overhead.transfer_cell,
                    bench.machine,
                    backend,
                    num_bytes,
                    NUM_TRANSFERS,
                    rounds,
                ),
            )
    texts.append(engine_tables.transfer_table(moved))
    return records, "\n".join(texts)


def idle(bench: _Bench) -> Table:
    """Returns what devices idle with a ready task, for every workload's small preset."""
    settings = bench.settings
    found: dict[tuple[str, str], Record] = {}
    for backend in bench.backends:
        for workload in list_workloads():
            found[backend, workload] = bench.get(
                f"idle-medians-{backend}-{workload}",
                partial(
                    engine_overhead.idle_cell,
                    bench.machine,
                    backend,
                    workload,
                    settings.placements,
                    settings.rounds,
                    settings.seed,
                ),
                placements=settings.placements,
                seed=settings.seed,
            )
    text = engine_tables.idle_table(found, settings.placements, settings.devices)
    return {"-".join(key): record for key, record in found.items()}, text


def halving(bench: _Bench) -> Table:
    """Returns what two devices make of work that can be halved."""
    settings = bench.settings
    record = bench.get(
        f"halving-{settings.backend}",
        partial(
            engine_comparisons.halving_cell,
            bench.machine,
            settings.backend,
            bench.calibration,
            settings.rounds,
            settings.quick,
        ),
    )
    return {"ffnn": record}, engine_tables.halving_table(settings.backend, record)


def sync(bench: _Bench) -> Table:
    """Returns work-conserving against bulk-synchronous execution."""
    found = _compare(bench, "sync", engine_comparisons.sync_cell)
    return found, engine_tables.sync_table(bench.settings.backend, found)


def jit(bench: _Bench) -> Table:
    """Returns the engine against one `jax.jit`."""
    found = _compare(bench, "jit", engine_comparisons.jit_cell)
    return found, engine_tables.jit_table(bench.settings.backend, found)


def _compare(bench: _Bench, part: str, make: Callable[..., Record]) -> dict[str, Record]:
    settings = bench.settings
    return {
        workload: bench.get(
            f"{part}-{settings.backend}-{workload}",
            partial(
                make,
                bench.machine,
                settings.backend,
                bench.calibration,
                workload,
                settings.rounds,
                settings.quick,
            ),
        )
        for workload in settings.workloads
    }


if __name__ == "__main__":
    cli.run(main, EngineSettings, "What the engine costs and what it is worth.")
