"""The command that measures this machine.

`python -m doppler_jax.engine --workload ffnn --preset small --num-devices 2 --out host.json`

A calibration that was stopped goes on from its file; one of another program adds to it.
"""

import contextlib
import dataclasses
import pathlib
from typing import Literal

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.costs.calibration import Calibration
from doppler_jax.reports.tables import format_seconds, print_table

from .calibrate import measure_calibration
from .stage3 import open_devices


@dataclasses.dataclass(frozen=True)
class CalibrateSettings:
    """Measure a workload's kernels and transfers here."""

    out: pathlib.Path
    """The file; if it exists, only what it lacks is measured."""
    workload: str = "chainmm"
    """Name of the workload whose kernels are measured."""
    preset: str = "small"
    """Its sizes."""
    num_devices: int = 2
    num_shards: int = 0
    """Blocks per tensor; 0 means as many as devices, rounded up to a power of two."""
    strategy: Literal["planner", "uniform"] = "planner"
    """How tensors are cut."""
    backend: str = "local"
    """`local`: this process's devices (accelerators, or CPU devices that share its cores).
    A launcher's name, such as `ray`: a process per device, pinned to a core or GPU."""
    repeats: int = 9
    """Executions of each measurement, of which the median counts."""


def main(settings: CalibrateSettings) -> None:
    """Measures with a progress bar, writes the file and prints what is in it."""
    if settings.num_devices < 1:
        raise ValueError(f"--num-devices is {settings.num_devices}; expected at least 1")
    workload = dj.workloads.make_workload(settings.workload, settings.preset)
    jax.config.update("jax_num_cpu_devices", settings.num_devices)
    num_shards = settings.num_shards or 1 << (settings.num_devices - 1).bit_length()
    program = dj.trace(workload.fn, *workload.args)
    sharded = dj.partition(program, num_shards, strategy=settings.strategy)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with contextlib.ExitStack() as stack:
        devices = stack.enter_context(open_devices(settings.backend, settings.num_devices))
        shown = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        bar = shown.add_task("calibrating")
        calibration = measure_calibration(
            sharded,
            devices,
            repeats=settings.repeats,
            path=settings.out,
            progress=lambda what, done, total: shown.update(
                bar, description=what, completed=done, total=total
            ),
        )
    _print(calibration)


def _print(calibration: Calibration) -> None:
    names, noise = calibration.device_names, calibration.compute_noise
    kernels = [(kernel.name, kernel.seconds) for kernel in calibration.kernels.values()]
    rows = [("dispatch of a task", tuple(calibration.overhead_s.tolist())), *kernels]
    print_table(
        f"{calibration.backend}: median seconds, noise {noise:.0%} of a task's, "
        f"{calibration.transfer_noise:.0%} of a transfer's",
        ("kernel", *names),
        [(name, *map(format_seconds, seconds)) for name, seconds in rows],
    )
    links = sorted({link[:2] for link in calibration.transfers})
    rates = np.stack(calibration.links(), axis=-1) * (1.0, 1e6)
    print_table(
        "transfers",
        ("from", "to", "latency", "seconds per MB"),
        [(names[s], names[t], *map(format_seconds, rates[s, t])) for s, t in links],
    )
    handling_s, per_byte = calibration.handling_rates()
    if handling_s is not None and per_byte is not None:
        own = zip(names, handling_s, per_byte * 1e6, strict=True)
        print_table(
            "what a device itself spends on one end of a transfer",
            ("device", "each", "seconds per MB"),
            [(name, *map(format_seconds, seconds)) for name, *seconds in own],
        )


if __name__ == "__main__":
    cli.run(main, CalibrateSettings, "Measure what kernels and transfers cost here.")
