"""Cells of `experiments.engine`: what two devices, and not waiting at barriers, are worth."""

import contextlib
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import doppler_jax as dj
from doppler_jax.engine.calibrate import measure_calibration
from experiments.engine_programs import Program, load_workload
from experiments.machine import (
    BackendName,
    Machine,
    cores,
    in_turns,
    makespan_s,
    seconds_of,
)
from experiments.pinned import SHARDINGS, Pinned

MATMUL = 1024
"""Rows of the squares whose product the pinned processes compute."""

SYNC_SHARDS = 4
"""Blocks per tensor where work-conserving is compared with bulk-synchronous."""

LONG_S = 0.010
"""Seconds from which on a task of `halving` is long."""

MATMULS = 8
"""Products in one measurement of a pinned process, of which the median counts."""


def halving_cell(
    machine: Machine, backend: BackendName, calibration: pathlib.Path, rounds: int, small: bool
) -> dict[str, Any]:
    """Measures ffnn on one device and on all, beside pinned processes that share nothing.

    Returns:
      `speed_up` of the devices over the first alone, and `ceiling`, that of one pinned
      process per device with matrix products of its own, medians over rounds; `long_share`,
      the part of the compute that long tasks are.
    """
    program = load_workload("ffnn", machine.num_devices, small)
    sharded, args = program
    _, placed = _place(machine, backend, program, calibration)
    one = machine.compile(sharded, np.zeros_like(placed.placement), backend)
    all_ = machine.compile(sharded, placed.placement, backend, priority=placed.priority)
    count = machine.num_devices
    with contextlib.ExitStack() as stack:
        pinned = [stack.enter_context(Pinned([core])) for core in _cores(count)]

        def products(which: range) -> float:
            for k in which:
                pinned[k].ask(matmul=MATMUL, repeats=MATMULS)
            return max(pinned[k].answer() for k in which)

        seconds = in_turns(
            {
                "one process": lambda: products(range(1)),
                "all processes": lambda: products(range(count)),
                "one device": lambda: makespan_s(one, args),
                "all devices": lambda: makespan_s(all_, args),
            },
            rounds,
        )
    assert one.trace is not None
    task_s = one.trace.finish_s - one.trace.start_s
    return {
        **{what: float(np.median(values)) for what, values in seconds.items()},
        "speed_up": float(np.median(seconds["one device"] / seconds["all devices"])),
        "ceiling": float(count * np.median(seconds["one process"] / seconds["all processes"])),
        "long_share": float(task_s[task_s >= LONG_S].sum() / task_s.sum()),
        "simulated_s": placed.makespan_s,
    }


def sync_cell(
    machine: Machine,
    backend: BackendName,
    calibration: pathlib.Path,
    workload: str,
    rounds: int,
    small: bool,
) -> dict[str, Any]:
    """Measures one placement run work-conserving and bulk-synchronous, and simulates both.

    The workload is cut uniformly, as the published graphs are: where blocks depend on each
    other across devices, barriers cost something.

    Returns:
      Seconds of both, measured and simulated with calibrated costs, and the ratios of
      bulk-synchronous to work-conserving.
    """
    program = load_workload(workload, SYNC_SHARDS, small, "uniform")
    sharded, args = program
    costs, placed = _place(machine, backend, program, calibration)
    places, priority = placed.placement, placed.priority
    steps = {
        "work_conserving": machine.compile(sharded, places, backend, priority=priority),
        "bulk_synchronous": machine.compile(sharded, places, backend, "bulk_synchronous"),
    }
    seconds = in_turns(
        {mode: partial(makespan_s, step, args) for mode, step in steps.items()}, rounds
    )
    simulated = {
        "work_conserving": placed.schedule,
        "bulk_synchronous": dj.simulate_synchronous(sharded.graph, costs, places),
    }
    simulated_s = {mode: dj.makespan_s(schedule) for mode, schedule in simulated.items()}
    ratios = seconds["bulk_synchronous"] / seconds["work_conserving"]
    return {
        "num_tasks": sharded.graph.num_tasks,
        "num_used": int(np.unique(places).size),
        "measured_s": {mode: float(np.median(values)) for mode, values in seconds.items()},
        "simulated_s": simulated_s,
        "measured_ratio": float(np.median(ratios)),
        "quartiles": np.quantile(ratios, (0.25, 0.75)).tolist(),
        "simulated_ratio": simulated_s["bulk_synchronous"] / simulated_s["work_conserving"],
    }


def jit_cell(
    machine: Machine,
    backend: BackendName,
    calibration: pathlib.Path,
    workload: str,
    rounds: int,
    small: bool,
) -> dict[str, Any]:
    """Measures a workload by the engine and by one `jax.jit`, on the same cores.

    Plain `jit` runs in processes of its own: on one core, on as many cores as there are
    devices, and there with the arguments sharded over as many host devices, in several ways.

    Returns:
      `seconds`: by what ran it, medians over rounds. The engine's "call" includes what its
      "makespan" leaves out: laying arguments, and assembling outputs.
    """
    program = load_workload(workload, machine.num_devices, small)
    sharded, args = program
    _, placed = _place(machine, backend, program, calibration)
    steps = {
        what: machine.compile(
            sharded, placed.placement, backend, priority=placed.priority, fuse_segments=fused
        )
        for what, fused in (("engine", False), ("engine, fused", True))
    }
    makespans: dict[str, list[float]] = {what: [] for what in steps}

    def call(what: str) -> float:
        step = steps[what]
        call_s = seconds_of(lambda: step(*args))
        assert step.trace is not None
        makespans[what].append(float(step.trace.finish_s.max()))
        return call_s

    with contextlib.ExitStack() as stack:
        runs = _jit_runs(stack, workload, small, machine.num_devices, len(args))
        runs.update({f"{what}, call": partial(call, what) for what in steps})
        seconds = in_turns(runs, rounds)
    seconds.update(
        {f"{what}, makespan": np.array(found[1:]) for what, found in makespans.items()}
    )
    return {"seconds": {what: float(np.median(values)) for what, values in seconds.items()}}


def _jit_runs(
    stack: contextlib.ExitStack, workload: str, small: bool, count: int, num_args: int
) -> dict[str, Callable[[], float]]:
    """Returns what times a workload in one `jax.jit`, on one core and on `count`."""
    every = _cores(count)
    one, many, sharded = (
        stack.enter_context(Pinned(*where))
        for where in ((every[:1],), (every,), (every, count))
    )
    request = {"workload": workload, "small": small, "repeats": 3}
    return {
        "jit, 1 core": partial(one.seconds, **request),
        f"jit, {count} cores": partial(many.seconds, **request),
        **{
            f"jit sharded, {sharding}": partial(sharded.seconds, **request, sharding=sharding)
            for sharding in SHARDINGS[: 2 + num_args]
        },
    }


def _place(
    machine: Machine, backend: BackendName, program: Program, calibration: pathlib.Path
) -> tuple[dj.Costs, dj.Placed]:
    """Returns measured costs, and the placement by critical-path list scheduling at them."""
    sharded, _ = program
    calibration.parent.mkdir(parents=True, exist_ok=True)
    measured = measure_calibration(sharded, machine.devices(backend), path=calibration)
    costs = dj.make_costs(sharded, measured)
    return costs, dj.place(sharded.graph, costs, method="critical_path")


def _cores(count: int) -> list[int]:
    """Returns `count` cores.

    Raises:
      ValueError: there are fewer.
    """
    found = cores()
    if len(found) < count:
        raise ValueError(f"{count} devices need as many cores; there are {len(found)}")
    return found[:count]
