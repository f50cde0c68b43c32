"""Cells of `experiments.engine`: what dispatch costs, and what devices idle for it."""

import time
from functools import partial
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.engine.memory import Residents
from doppler_jax.engine.ops import ExecutableKey, Executables
from doppler_jax.engine.plan import make_plan
from doppler_jax.engine.profile import Profile
from doppler_jax.programs.blocks import flatten_args
from doppler_jax.types import Schedule
from experiments.engine_programs import Program, independent_tasks, load_workload, relay
from experiments.machine import BackendName, Machine, in_turns, makespan_s, seconds_of

MODES: dict[BackendName, tuple[str, ...]] = {
    "local": ("stream", "work_conserving", "bulk_synchronous"),
    "ray": ("work_conserving", "bulk_synchronous"),
}


def task_cell(
    machine: Machine, backend: BackendName, num_tasks: int, rounds: int
) -> dict[str, Any]:
    """Measures seconds per tiny task, against calls of the same executable without us.

    Returns:
      `per_task_s`: by what ran them, the median over rounds of the seconds of all tasks over
      their number; `overhead_s`: by mode, the median over tasks of the seconds from the
      start of one to the start of the next on its device.
    """
    sharded, (argument,) = independent_tasks(num_tasks)
    places = np.arange(num_tasks) % machine.num_devices
    device = machine.devices("local")[0]
    argument = jax.device_put(argument, device)
    bare = jax.jit(sharded.kernels[0].fn).lower(argument).compile()
    calls = range(num_tasks)
    runs = {
        "bare call, awaited": lambda: seconds_of(
            lambda: [jax.block_until_ready(bare(argument)) for _ in calls]
        ),
        "bare call, awaited at the end": lambda: seconds_of(
            lambda: [bare(argument) for _ in calls]
        ),
    }
    steps = {mode: machine.compile(sharded, places, backend, mode) for mode in MODES[backend]}
    periods: dict[str, list[float]] = {mode: [] for mode in steps}

    def run(mode: str) -> float:
        seconds = makespan_s(steps[mode], (argument,))
        periods[mode].append(_period_s(_trace(steps[mode])))
        return seconds

    runs.update({f"{backend}, {mode}": partial(run, mode) for mode in steps})
    seconds = in_turns(runs, rounds)
    return {
        "per_task_s": {what: float(np.median(s)) / num_tasks for what, s in seconds.items()},
        "overhead_s": {mode: float(np.median(values)) for mode, values in periods.items()},
    }


def transfer_cell(
    machine: Machine, backend: BackendName, num_bytes: int, num_transfers: int, rounds: int
) -> dict[str, Any]:
    """Measures seconds of a transfer that nothing overlaps, against `jax.device_put`.

    A chain of tasks changes device at every step; a transfer counts from its start in the
    trace until its finish. The bare copies are in the same chain run by a plain loop, on
    host devices of this process whatever the backend.

    Returns:
      `transfer_s`: by what moved it, the median over rounds of each round's median.
    """
    sharded, (argument,) = relay(num_transfers + 1, num_bytes // 4)
    places = np.arange(num_transfers + 1) % machine.num_devices
    step = machine.compile(sharded, places, backend)
    devices = machine.devices("local")[:2]
    task = jax.jit(sharded.kernels[0].fn)
    tasks = [task.lower(jax.device_put(argument, device)).compile() for device in devices]

    def bare() -> float:
        moved, seconds = jax.device_put(argument, devices[0]), []
        for k in range(num_transfers):
            (made,) = jax.block_until_ready(tasks[k % 2](moved))
            began = time.perf_counter()
            moved = jax.device_put(made, devices[(k + 1) % 2]).block_until_ready()
            seconds.append(time.perf_counter() - began)
        return float(np.median(seconds))

    def run() -> float:
        step(argument)
        trace = _trace(step)
        return float(np.median(trace.transfer_finish_s - trace.transfer_start_s))

    seconds = in_turns({"bare device_put, awaited": bare, backend: run}, rounds)
    return {"transfer_s": {what: float(np.median(s)) for what, s in seconds.items()}}


def idle_cell(
    machine: Machine,
    backend: BackendName,
    workload: str,
    num_placements: int,
    rounds: int,
    seed: int,
) -> dict[str, Any]:
    """Measures what devices idle with a ready task, over random placements of a workload.

    Every trace is checked by the simulator's validator (`profile` does that).

    Returns:
      Over all placements and rounds: the dispatch gaps' median and 99th percentile, the mean
      and largest share of the devices' time that they idled though a task was ready, and the
      median makespan. Over all tasks of all placements, the 99th percentile of a task's median
      gap: what belongs to the engine, since an interruption hits another gap in every round.
      Of a loop that does without an engine: the gaps' median, mean and 99th percentile.
    """
    program = load_workload(workload, machine.num_devices, small=True)
    num_tasks = program[0].graph.num_tasks
    rng = np.random.default_rng(seed)
    gaps, task_gaps, shares, makespans = [], [], [], []
    for _ in range(num_placements):
        places = rng.integers(machine.num_devices, size=num_tasks)
        profiles = _profiles(machine, backend, program, places, rounds)
        gaps += [found.dispatch_gap_s for found in profiles]
        task_gaps.append(np.median(gaps[-rounds:], axis=0))
        shares += [found.idle_ready_share for found in profiles]
        makespans += [found.makespan_s for found in profiles]
    bare = _bare_gaps(machine, program, num_placements * rounds)
    return {
        "num_tasks": num_tasks,
        "gap_median_s": float(np.median(gaps)),
        "gap_p99_s": float(np.quantile(gaps, 0.99)),
        "task_gap_p99_s": float(np.quantile(task_gaps, 0.99)),
        "bare_gap_median_s": float(np.median(bare)),
        "bare_gap_mean_s": float(np.mean(bare)),
        "bare_gap_p99_s": float(np.quantile(bare, 0.99)),
        "idle_share_mean": float(np.mean(shares)),
        "idle_share_max": float(np.max(shares)),
        "makespan_s": float(np.median(makespans)),
    }


def _profiles(
    machine: Machine, backend: BackendName, program: Program, places: np.ndarray, rounds: int
) -> list[Profile]:
    sharded, args = program
    step = machine.compile(sharded, places, backend)
    step(*args)
    found = []
    for _ in range(rounds):
        step(*args)
        found.append(step.profile())
    return found


def _bare_gaps(machine: Machine, program: Program, rounds: int) -> list[float]:
    """Returns the seconds between two tasks of a plain loop over all tasks on one device.

    It only stamps, looks up operands, keeps results and drops what was read for the last
    time: what a device must do between tasks in Python if it serves nobody else.
    """
    sharded, args = program
    devices = machine.devices("local")[:1]
    plan = make_plan(sharded, np.zeros(sharded.graph.num_tasks, np.int64), None)
    executables = Executables()
    keys = [ExecutableKey(kernel, devices[0]) for kernel in sharded.kernels]
    executables.prepare(keys)
    tasks = [
        (executables[keys[v]], plan.operands[v], plan.results[v], set(plan.operands[v]))
        for v in plan.order
    ]
    values = flatten_args(sharded, args, {})
    residents, gaps = Residents(sharded, devices), []
    for _ in range(rounds):
        slots, reads_left = residents.lay(plan, values), list(plan.num_reads)
        finish_s = None
        for task, operands, made, read in tasks:
            taken = [slots[s] for s in operands]
            start_s = time.perf_counter()
            if finish_s is not None:
                gaps.append(start_s - finish_s)
            results = jax.block_until_ready(task(*taken))
            finish_s = time.perf_counter()
            for slot, result in zip(made, results, strict=True):
                slots[slot] = result
            del taken, results
            for slot in read:
                reads_left[slot] -= 1
                if not reads_left[slot]:
                    slots[slot] = None
    return gaps


def _period_s(trace: Schedule) -> float:
    """Returns the median seconds from one start on a device to the next."""
    order = np.lexsort((trace.start_s, trace.placement))
    same = np.diff(trace.placement[order]) == 0
    return float(np.median(np.diff(trace.start_s[order])[same]))


def _trace(step: dj.PlacedFunction) -> Schedule:
    assert step.trace is not None
    return step.trace
