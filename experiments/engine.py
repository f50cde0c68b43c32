"""What the engine costs and what it is worth: `python -m experiments.engine`.

- `calls`: whole calls of placed workloads against one `jax.jit` on the same cores, sharded or
  not; first cold, then warm. Plain `jit` runs in processes pinned to their cores.
- `tasks`, `transfers`: a tiny task and a transfer against bare calls of JAX.
- `idle`: how long devices idle with a ready task, over random placements of each workload.

What is compared is measured in turns, so that drift hits all alike.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import doppler_jax as dj
from doppler_jax.engine.placed import as_devices
from doppler_jax.engine.processes import LAUNCHERS
from experiments import grid
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.machine import (
    SHARDINGS,
    Machine,
    arguments,
    available_cores,
    in_turns,
    makespan_s,
    pinned,
    seconds_of,
    warm,
)
from experiments.tables import by, table

PARTS = ("calls", "tasks", "transfers", "idle")

TRANSFER_BYTES = (1 << 8, 1 << 20, 1 << 24)
"""Sizes that are moved."""

NUM_TRANSFERS = 50
"""Steps of the chain that moves them."""

BACKENDS = ("local", *LAUNCHERS)

Runs = dict[str, Callable[[], float]]


@dataclasses.dataclass(frozen=True)
class EngineSettings(Settings):
    """What to measure."""

    parts: tuple[str, ...] = PARTS
    backends: tuple[str, ...] = BACKENDS
    """Kinds of devices; of `calls` the last one."""
    num_devices: int = 2
    workloads: tuple[str, ...] = ("chainmm", "ffnn", "llama_block", "moe_block")
    """What `calls` runs."""
    preset: str = "medium"
    """Its sizes."""
    tasks: int = 1000
    """Tiny tasks."""
    placements: int = 20
    """Random placements of each workload in `idle`."""
    rounds: int = 15
    """Warm measurements of each kind, of which the median counts."""


def cells(context: Context[EngineSettings]) -> list[Cell]:
    """Returns the cells of the parts asked for."""
    asked = context.settings
    grid.check_names("--parts", asked.parts, PARTS)
    grid.check_names("--backends", asked.backends, BACKENDS)
    if asked.num_devices < 2:
        raise ValueError(f"--num-devices is {asked.num_devices}; expected at least 2")
    machines = [
        context.stack.enter_context(Machine(asked.num_devices, backend))
        for backend in asked.backends
    ]
    found = []

    def add(part: str, machine: Machine, run: Callable[..., Record], **key: Any) -> None:
        if part in asked.parts:
            whole = {"part": part, **machine.key, "rounds": asked.rounds, **key}
            found.append(Cell(whole, partial(run, machine, asked.rounds, **key)))

    for workload in asked.workloads:
        run = partial(time_calls, context)
        add("calls", machines[-1], run, workload=workload, preset=asked.preset)
    for machine in machines:
        add("tasks", machine, time_tasks, tasks=asked.tasks)
        for size in TRANSFER_BYTES:
            add("transfers", machine, time_transfers, num_bytes=size)
        for workload in dj.list_workloads():
            run = partial(time_idle, context)
            add("idle", machine, run, workload=workload, placements=asked.placements)
    return found


def time_calls(
    context: Context[EngineSettings], machine: Machine, rounds: int, workload: str, preset: str
) -> Record:
    """Measures a workload by the engine and by one `jax.jit`, on the same cores.

    Returns:
      By what ran it, seconds of the cold call and the median of warm ones. A call includes
      what its makespan leaves out: putting arguments on devices, and assembling outputs.
    """
    made = dj.make_workload(workload, preset)
    problem = machine.calibrated(made, context.folder, "planner")
    assert problem.sharded is not None
    sharded, args = problem.sharded, arguments(problem)
    placed = dj.place(problem.graph, problem.costs, method="critical_path")
    steps: dict[str, dj.PlacedFunction] = {}
    makespans: dict[str, list[float]] = {}

    def run(what: str, where: np.ndarray, fuse: bool) -> Any:
        if what not in steps:  # a cold call compiles
            steps[what] = machine.compile(
                sharded, where, priority=placed.priority, fuse_segments=fuse
            )
        return steps[what](*args)

    def call(what: str, *how: Any) -> float:
        call_s = seconds_of(lambda: run(what, *how))
        trace = steps[what].trace
        assert trace is not None
        makespans.setdefault(what, []).append(float(trace.finish_s.max(initial=0.0)))
        return call_s

    kinds = {"engine": (placed.placement, False), "engine, fused": (placed.placement, True)}
    kinds["engine, one device"] = placed.placement * 0, False
    runs: Runs = {what: partial(call, what, *how) for what, how in kinds.items()}
    cores = available_cores()[: machine.num_devices]
    with contextlib.ExitStack() as stack:
        one, many, several = (
            stack.enter_context(pinned(*on))
            for on in ((cores[:1],), (cores,), (cores, machine.num_devices))
        )
        runs["jit, 1 core"] = partial(one, workload, preset)
        runs[f"jit, {len(cores)} cores"] = partial(many, workload, preset)
        for sharding in SHARDINGS[: 2 + len(args)]:
            runs[f"jit sharded, {sharding}"] = partial(several, workload, preset, sharding)
        seconds = in_turns(runs, rounds)
    return {
        "cold_s": {what: found[0] for what, found in seconds.items()},
        "warm_s": {what: warm(found) for what, found in seconds.items()},
        "makespans_s": {what: warm(found) for what, found in makespans.items()},
    }


def time_tasks(machine: Machine, rounds: int, tasks: int) -> Record:
    """Measures seconds per tiny task, against calls of the same executable without us."""
    sharded, args = tiny_program(tasks, 64, is_chain=False)
    where = np.arange(tasks) % machine.num_devices
    on_device = jax.device_put(args, jax.devices("cpu")[0])
    bare = partial(jax.jit(sharded.kernels[0].fn).lower(*on_device).compile(), *on_device)
    runs: Runs = {
        "bare call, awaited": lambda: seconds_of(
            lambda: [jax.block_until_ready(bare()) for _ in range(tasks)]
        ),
        "bare call, awaited at the end": lambda: seconds_of(
            lambda: [bare() for _ in range(tasks)]
        ),
    }
    for mode in as_devices(machine.devices).modes:
        step = machine.compile(sharded, where, mode=mode)
        runs[mode] = partial(makespan_s, step, args)
    seconds = in_turns(runs, rounds)
    return {"per_task_s": {what: warm(found) / tasks for what, found in seconds.items()}}


def time_transfers(machine: Machine, rounds: int, num_bytes: int) -> Record:
    """Measures seconds of a transfer that nothing overlaps, against `jax.device_put`.

    A chain of tasks changes device at every step; a transfer counts from its start in the
    trace until its finish. The bare copies are between host devices of this process.
    """
    count = NUM_TRANSFERS + 1
    sharded, args = tiny_program(count, num_bytes // 4, is_chain=True)
    step = machine.compile(sharded, np.arange(count) % machine.num_devices)
    ends = jax.devices("cpu")[:2]

    def bare() -> float:
        moved, seconds = jax.device_put(args[0], ends[0]).block_until_ready(), []
        for k in range(NUM_TRANSFERS):
            fresh = (moved + 1.0).block_until_ready()
            began = time.perf_counter()
            moved = jax.device_put(fresh, ends[(k + 1) % 2]).block_until_ready()
            seconds.append(time.perf_counter() - began)
        return float(np.median(seconds))

    def ours() -> float:
        step(*args)
        trace = step.trace
        assert trace is not None
        return float(np.median(trace.transfer_finish_s - trace.transfer_start_s))

    seconds = in_turns({"bare": bare, "ours": ours}, rounds)
    return {"bare_s": warm(seconds["bare"]), "transfer_s": warm(seconds["ours"])}


def time_idle(
    context: Context[EngineSettings],
    machine: Machine,
    rounds: int,
    workload: str,
    placements: int,
) -> Record:
    """Measures what devices idle with a ready task, over random placements of a workload.

    Every trace is checked by the simulator's validator (`profile` does that).

    Returns:
      The dispatch gaps' median and 99th percentile; the 99th percentile of a task's median gap,
      which is the engine's own, since an interruption hits another gap in every round; mean and
      largest share of the devices' time that they idled though a task was ready.
    """
    problem = machine.calibrated(dj.make_workload(workload, "small"), context.folder, "planner")
    assert problem.sharded is not None
    args, rng = arguments(problem), np.random.default_rng(0)
    gaps, task_gaps, shares = [], [], []
    for _ in range(placements):
        where = rng.integers(machine.num_devices, size=problem.graph.num_tasks)
        step = machine.compile(problem.sharded, where)
        step(*args)
        profiles = [(step(*args), step.profile())[1] for _ in range(rounds)]
        gaps += [found.dispatch_gap_s for found in profiles]
        task_gaps.append(np.median(gaps[-rounds:], axis=0))
        shares += [found.idle_ready_share for found in profiles]
    return {
        "tasks": problem.graph.num_tasks,
        "gap_median_s": float(np.median(gaps)),
        "gap_p99_s": float(np.quantile(gaps, 0.99)),
        "task_gap_p99_s": float(np.quantile(task_gaps, 0.99)),
        "idle_mean": float(np.mean(shares)),
        "idle_largest": float(np.max(shares)),
    }


def tiny_program(
    num_tasks: int, length: int, is_chain: bool
) -> tuple[dj.ShardedProgram, tuple[jax.Array, ...]]:
    """Returns tasks on vectors, each of the argument or of the task before, and arguments."""

    def fn(x: jax.Array, one: jax.Array) -> list[jax.Array]:
        made = [x]
        for _ in range(num_tasks):  # products are tasks; what is element-wise would be fused
            made.append((made[-1] if is_chain else x) @ one)
        return made[-1:] if is_chain else made[1:]

    args = jnp.zeros((length, 1), jnp.float32), jnp.ones((1, 1), jnp.float32)
    return dj.partition(dj.trace(fn, *args), num_shards=1), args


def report(context: Context[EngineSettings], records: list[Record]) -> Page:
    """Returns a table per part."""
    parts = by(records, "part")
    texts = [
        f"{title}\n\n{table([row for r in parts[part] for row in rows_of(r)])}"
        for part, (title, rows_of) in REPORTS.items()
        if part in parts
    ]
    return Page("\n".join(texts))


def _call_rows(r: Record) -> list[Record]:
    return [
        {"workload": r["workload"], "what": what, "cold call_s": r["cold_s"][what]}
        | {"warm call_s": warm_s, "warm makespan_s": r["makespans_s"].get(what)}
        for what, warm_s in r["warm_s"].items()
    ]


def _task_rows(r: Record) -> list[Record]:
    bare_s = r["per_task_s"]["bare call, awaited"]
    return [
        {"backend": r["backend"], "what": what, "per task_s": s, "over a bare call": s / bare_s}
        for what, s in r["per_task_s"].items()
    ]


def _transfer_rows(r: Record) -> list[Record]:
    names = ("backend", "num_bytes", "bare_s", "transfer_s")
    return [{name: r[name] for name in names} | {"ratio": r["transfer_s"] / r["bare_s"]}]


def _idle_rows(r: Record) -> list[Record]:
    shares = {f"idle, {k}": f"{r[f'idle_{k}']:.2%}" for k in ("mean", "largest")}
    gaps = {"gap, median_s": r["gap_median_s"], "99th percentile_s": r["gap_p99_s"]}
    row = {name: r[name] for name in ("backend", "workload", "tasks")} | gaps
    return [row | {"99th percentile of tasks' medians_s": r["task_gap_p99_s"]} | shares]


REPORTS = {
    "calls": ("Whole calls: the cold one, then warm ones", _call_rows),
    "tasks": ("Independent tiny tasks: seconds of all over their number", _task_rows),
    "transfers": ("One transfer at a time, beside `jax.device_put`", _transfer_rows),
    "idle": ("Idle with a ready task; a gap is the wait before a task", _idle_rows),
}
"""Title and rows of each part."""

QUICK = {
    "preset": "small", "placements": 3, "rounds": 3,
}  # fmt: skip

STUDY = Study("engine", EngineSettings(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
