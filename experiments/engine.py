"""What the engine costs and what it is worth: `python -m experiments.engine`.

- `modes`: outputs and traces of every mode of the devices, all tasks on one or on both.
- `tasks`, `transfers`: a tiny task and a transfer against bare calls of JAX.
- `copies`: whether a copy waits for work on its device that was enqueued before or behind it.
- `short`: what a call of four tasks takes beyond its trace, and on what.
- `ahead`: such calls in a row that feed their state back and are not awaited.
- `carry`: a training loop that feeds 8 MiB of parameters back, against the same calls with
  arguments that stay as they are.
- `steps`: what processes hold in memory over many steps of that loop.
- `plans`: random plans of random programs on processes whose buffers hold less than a header:
  whether all of them end, with right outputs and traces. It is a test, of as many plans.
- `idle`: how long devices idle with a ready task, over random placements of workloads.

What is compared is measured in turns, so that drift hits all alike. `--backends unequal` is
an accelerator and a CPU device of this process.
"""

import dataclasses
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import doppler_jax as dj
from doppler_jax.engine.loop import Loop
from doppler_jax.engine.placed import as_devices
from doppler_jax.engine.processes import LAUNCHERS
from experiments import grid
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.machine import (
    Machine,
    arguments,
    in_turns,
    relative_error,
    run_apart,
    seconds_of,
    warm,
)
from experiments.tables import by, table

PARTS = {
    "modes": "Outputs, traces and calls in every mode",
    "tasks": "Independent tiny tasks: seconds of all over their number",
    "transfers": "One transfer at a time, beside `jax.device_put`",
    "copies": "A copy whose operand is ready, while a device is at work",
    "short": "Calls of four tasks beyond their traces (last finish - first start)",
    "ahead": "A thousand calls of four tasks in a row, which nobody awaits",
    "carry": "Steps of a loop: what is fed back, against arguments that stay",
    "steps": "Resident memory over steps of a loop, from a tenth of them on",
    "plans": "Random plans where buffers are tiny",
    "idle": "Idle with a ready task; a gap is the wait before a task",
}
"""Title of each part's table."""

TRANSFER_BYTES = (1 << 8, 1 << 20, 1 << 24)
"""Sizes that are moved."""

NUM_TRANSFERS = 50
"""Steps of the chain that moves them."""

SHORT_REPEATS = 20
"""Calls of four tasks for each round."""

NUM_AHEAD = 1000
"""Calls in a row."""

SAMPLES = 10
"""Times that memory is looked at."""

FLAT = 0.02
"""Relative change of resident memory that is none."""

COPY_WORK = {"cpu": (256, 16), "gpu": (8192, 8)}
"""Width and number of the products that a device is busy with, by platform."""

BACKENDS = ("local", *LAUNCHERS)

Rows = list[Record]
"""Of the part's table."""

Runs = dict[str, Callable[[], float]]


@dataclasses.dataclass(frozen=True)
class Asked(Settings):
    """What to measure."""

    parts: tuple[str, ...] = tuple(PARTS)
    backends: tuple[str, ...] = BACKENDS
    """Kinds of devices."""
    num_devices: int = 2
    workloads: tuple[str, ...] = ("chainmm", "ffnn", "llama_block", "moe_block")
    """What `modes` runs."""
    preset: str = "medium"
    """Its sizes."""
    tasks: int = 1000
    """Tiny tasks."""
    idle: tuple[str, ...] = tuple(dj.workloads.list_workloads())
    """What `idle` runs, small."""
    placements: int = 20
    """Random placements of each of these."""
    steps: int = 10_000
    """Steps of the loop whose memory is watched."""
    plans: int = 10_000
    """Random plans."""
    rounds: int = 15
    """Warm measurements of each kind, of which the median counts."""


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns the cells of the parts asked for."""
    asked = context.settings
    grid.check_names("--parts", asked.parts, list(PARTS))
    grid.check_names("--backends", asked.backends, (*BACKENDS, "unequal"))
    if asked.num_devices < 2:
        raise ValueError(f"--num-devices is {asked.num_devices}; expected at least 2")
    machines = [
        context.stack.enter_context(Machine(asked.num_devices, backend))
        for backend in asked.backends
    ]
    found = []

    def add(part: str, machine: Machine, run: Callable[..., Rows], **key: Any) -> None:
        if part in asked.parts:
            whole = {"part": part, **machine.key, "rounds": asked.rounds, **key}
            found.append(Cell(whole, lambda: {"rows": run(machine, asked.rounds, **key)}))

    for workload in asked.workloads:
        made = {"workload": workload, "preset": asked.preset}
        for machine in machines:
            for where in WHERE:
                add("modes", machine, time_modes, where=where, **made)
    for machine in machines:
        add("tasks", machine, time_tasks, tasks=asked.tasks)
        add("short", machine, time_short, repeats=SHORT_REPEATS)
        add("ahead", machine, time_ahead, calls=NUM_AHEAD)
        add("carry", machine, time_loops, layers=8, width=512)
        add("steps", machine, watch_memory, layers=8, width=512, steps=asked.steps)
        for size in TRANSFER_BYTES:
            add("transfers", machine, time_transfers, num_bytes=size)
        if machine.backend not in LAUNCHERS:
            add("copies", machine, time_copies)
        for workload in asked.idle:
            run = partial(time_idle, context)
            add("idle", machine, run, workload=workload, placements=asked.placements)
    add("plans", machines[-1], partial(run_plans, context), plans=asked.plans)
    return found


WHERE = ("all on the first", "random on all", "calibrated and placed")
"""Placements that `modes` runs."""


def time_modes(machine: Machine, rounds: int, workload: str, preset: str, where: str) -> Rows:
    """Returns whether a workload's outputs and traces are right in each mode, and seconds."""
    made, devices = dj.workloads.make_workload(workload, preset), as_devices(machine.devices)
    args = jax.device_put(dj.workloads.make_arrays(made, jax.random.key(1)), jax.devices()[0])
    plain = jax.jit(made.fn)
    expected = jax.device_get(plain(*args))
    jit_s = warm([seconds_of(lambda: plain(*args)) for _ in range(1 + rounds)])
    sharded = dj.partition(dj.trace(made.fn, *args), machine.num_devices)
    shape = sharded.graph.num_tasks
    random = np.random.default_rng(0).integers(machine.num_devices, size=shape)

    def compiled(mode: str) -> Any:
        if where == WHERE[-1]:
            costs = dj.make_costs(sharded, dj.engine.measure_calibration(sharded, devices))
            placed = dj.place(sharded, costs, method="lns", budget_s=3.0)
            return machine.compile(sharded, placed.plan, mode=mode)
        return machine.compile(sharded, random * (where == "random on all"), mode=mode)

    def judge(mode: str) -> Record:
        step = compiled(mode)
        error = relative_error(step(*args), expected)
        calls = [seconds_of(lambda: step(*args)) for _ in range(rounds)]
        makespans = [machine.makespan_s(step, args) for _ in range(rounds)]
        dj.simulator.validate(step.graph, step.schedule)
        same = f"{'equal' if error < 1e-4 else 'DIFFERENT'} ({error:.0e})"
        found = {"outputs": same, "traces": f"valid, {step.graph.num_tasks} tasks"}
        medians = {"makespan_s": np.median(makespans), "call_s": np.median(calls)}
        return found | {name: float(median) for name, median in medians.items()}

    rows = []
    for mode in devices.modes if where != WHERE[-1] else ("work_conserving",):
        try:
            found = judge(mode)
        except Exception as error:  # whatever it is, the page says it, and the rest is run
            said = f"FAILED, {type(error).__name__}: {error}"[:300]
            found = {"outputs": said, "traces": None, "makespan_s": None, "call_s": None}
        rows.append({"placement": where, "mode": mode, **found, "one jit, call_s": jit_s})
    return rows


def time_tasks(machine: Machine, rounds: int, tasks: int) -> Rows:
    """Measures seconds per tiny task, against calls of the same executable without us."""
    sharded, args = tiny_program(tasks, 64, is_chain=False)
    on_device = jax.device_put(args, ends(machine)[0])
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
        for where, count in (("", machine.num_devices), (", one device", 1)):
            step = machine.compile(sharded, np.arange(tasks) % count, mode=mode)
            runs[mode + where] = partial(machine.makespan_s, step, args)
    seconds = in_turns(runs, rounds)
    bare_s = warm(seconds["bare call, awaited"])
    return [
        {"what": what, "per task_s": warm(s) / tasks, "over a bare call": warm(s) / bare_s}
        for what, s in seconds.items()
    ]


def time_short(machine: Machine, rounds: int, repeats: int) -> Rows:
    """Measures calls of four tasks: their own time, the time beyond it, and its chores.

    The smallest of many is what the engine takes where nothing else runs.
    """
    rows = []
    sharded, args = tiny_program(4, 1 << 14, is_chain=True)
    for where, placement in (
        ("one device", np.zeros(4, int)),
        ("two devices", np.arange(4) // 2),
    ):
        step = machine.compile(sharded, placement)
        step(*args)
        beyond, found = [], []
        for _ in range(rounds * repeats):
            call_s = seconds_of(partial(step, *args))
            found.append(step.profile())
            beyond.append(call_s - found[-1].traced_s)
        best = found[int(np.argmin(beyond))]
        assert best.whole_call is not None
        spent: dict[str, float] = {}
        for name, device, begun_s, ended_s in best.whole_call.chores:
            key = f"{name} ({'caller' if device < 0 else device})"
            spent[key] = spent.get(key, 0.0) + ended_s - begun_s
        spent["rest"] = best.rest_s
        row = {
            "tasks on": where,
            "smallest_s": min(beyond),
            "median_s": float(np.median(beyond)),
        }
        on_what = ", ".join(f"{key} {seconds * 1e6:.0f} us" for key, seconds in spent.items())
        rows.append(row | {"of the smallest": on_what})
    return rows


def time_ahead(machine: Machine, rounds: int, calls: int) -> Rows:
    """Measures calls of four tasks that run one behind another, against awaited ones.

    They are to take at most 1.2 times what the tasks of a call take, and 0.3 ms.
    """
    rows = []
    for where, num_devices in (("one device", 1), ("two devices", 2)):
        sharded, (x, one) = tiny_program(4, 1 << 14, is_chain=True, carry="x")
        step = machine.compile(sharded, np.arange(4) * num_devices // 4)
        loop = Loop(step, sharded, (x, one), {})

        def run(count: int, loop: Loop = loop) -> float:
            return seconds_of(lambda: [loop() for _ in range(count)][-1]) / count

        runs: Runs = {"awaited": partial(run, 1), "ahead": partial(run, calls)}
        runs["tasks"] = partial(traced_s, step, loop)
        found = {what: warm(seconds) for what, seconds in in_turns(runs, rounds).items()}
        asked_s = 1.2 * found["tasks"] + 3e-4
        rows.append({"tasks on": where} | {f"{what}_s": s for what, s in found.items()})
        rows[-1]["of what is asked"] = found["ahead"] / asked_s
    return rows


def traced_s(step: dj.engine.PlacedFunction, loop: Loop) -> float:
    """Runs the next call, and returns the seconds from its first start to its last finish."""
    loop()
    trace = step.schedule
    assert trace is not None
    return float(trace.finish_s.max() - trace.start_s.min())


def ends(machine: Machine) -> list[jax.Device]:
    """Returns devices of this process, `[2]`: the machine's, or such as stand for them."""
    here = machine.backend not in LAUNCHERS
    return list(machine.devices[:2]) if here else jax.devices("cpu")[:2]


def time_transfers(machine: Machine, rounds: int, num_bytes: int) -> Rows:
    """Measures seconds of a transfer that nothing overlaps, against `jax.device_put`.

    A chain of tasks changes device at every step; a transfer counts from its start in the
    trace until its finish. The bare copies are between devices of this process.
    """
    count = NUM_TRANSFERS + 1
    sharded, args = tiny_program(count, num_bytes // 4, is_chain=True)
    step = machine.compile(sharded, np.arange(count) % machine.num_devices)
    devices = ends(machine)

    def bare() -> list[float]:
        moved, seconds = jax.device_put(args[0], devices[0]).block_until_ready(), []
        for k in range(NUM_TRANSFERS):
            fresh = (moved + 1.0).block_until_ready()
            began = time.perf_counter()
            moved = jax.device_put(fresh, devices[(k + 1) % 2]).block_until_ready()
            seconds.append(time.perf_counter() - began)
        return [float(np.median(seconds[source::2])) for source in (0, 1)]

    def ours() -> list[float]:
        trace = step.run_traced(*args)
        spent_s = trace.transfer_finish_s - trace.transfer_start_s
        return [float(np.median(spent_s[trace.transfer_source == s])) for s in (0, 1)]

    found = in_turns({"bare_s": bare, "transfer_s": ours}, rounds)
    medians = (np.median(each[1:], axis=0).tolist() for each in found.values())
    return [
        {"from device": source, "num_bytes": num_bytes, "bare_s": bare_s, "transfer_s": ours_s}
        | {"ratio": ours_s / bare_s, "bare (GB/s)": num_bytes / bare_s / 1e9}
        for source, (bare_s, ours_s) in enumerate(zip(*medians, strict=True))
    ]


def time_copies(machine: Machine, rounds: int) -> Rows:
    """Measures when a copy is there whose operand was ready while a device is at work.

    A chain of products is enqueued on the first device and the copy behind it, or the other
    way round. An engine that enqueues far ahead depends on whether the copy waits.
    """
    devices, rows = ends(machine), []
    size, depth = COPY_WORK["cpu" if devices[0].platform == "cpu" else "gpu"]

    @jax.jit
    def products(x: jax.Array) -> jax.Array:
        for _ in range(depth):
            x = (x @ x) / size
        return x

    x = jax.device_put(np.ones((size, size), np.float32), devices[0])
    for source, target in (devices, devices[::-1]):
        array = jax.device_put(np.ones(size * 512, np.float32), source)
        copy = partial(jax.device_put, array, target)
        alone = {"alone_s": partial(seconds_of, copy)}
        alone |= {"work_s": partial(seconds_of, partial(products, x))}
        seconds = {what: warm(each) for what, each in in_turns(alone, rounds).items()}
        for order in ("behind", "before"):
            began = time.perf_counter()
            calls = [partial(products, x), copy]
            made = [call() for call in (calls if order == "behind" else calls[::-1])]
            enqueued_s = time.perf_counter() - began
            jax.block_until_ready(made[order == "behind"])
            copied_s = time.perf_counter() - began
            jax.block_until_ready(made)
            waits = copied_s > seconds["alone_s"] + seconds["work_s"] / 2
            row = {"copy": f"{source} to {target}, {order} work on {devices[0]}", **seconds}
            row |= {"copied_s": copied_s, "host free_s": enqueued_s}
            rows.append(row | {"it": "WAITS" if waits else "does not wait"})
    return rows


def descent(layers: int, width: int) -> tuple[Callable[..., Any], list[jax.Array], jax.Array]:
    """Returns a step of plain gradient descent, its parameters and its batch."""

    def train(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(params: list[jax.Array]) -> jax.Array:
            made = x
            for w in params:
                made = jnp.tanh(made @ w)
            return (made**2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return [w - 0.01 * g for w, g in zip(params, grads, strict=True)], value

    keys = jax.random.split(jax.random.key(0), layers + 1)
    params = [0.05 * jax.random.normal(k, (width, width)) for k in keys[1:]]
    x = jax.random.normal(keys[0], (16, width))
    return train, params, x


def time_loops(machine: Machine, rounds: int, layers: int, width: int) -> Rows:
    """Measures steps of plain gradient descent, whose parameters are fed back or stay.

    What stays has the outputs put together in this process at each call; what is carried has
    not, and its makespan is of the program that reads parameters where they were made.
    """
    train, params, x = descent(layers, width)
    steps: dict[str, dj.engine.PlacedFunction] = {}
    runs: Runs = {}
    for what, keeps in (
        ("stay", {"resident": 0}),
        ("fed back", {"resident": 0}),
        ("fed back, carried", {"resident": (), "carry": 0}),
    ):
        sharded = dj.partition(dj.trace(train, params, x, **keeps), machine.num_devices)
        costs = dj.make_costs(sharded, dj.make_cluster("p100x4"))
        placed = dj.place(sharded, costs, method="heft")
        steps[what] = machine.compile(sharded, placed.placement % machine.num_devices)
        state = jax.tree.map(jnp.copy, params)
        runs[what] = step_timer(steps[what], state, x, feeds=what != "stay")
    seconds = in_turns(runs, rounds)
    stays_s, rows = warm(seconds["stay"]), []
    for what, found in seconds.items():
        trace = steps[what].schedule
        assert trace is not None
        row = {"parameters": what, "call_s": warm(found), "ratio": warm(found) / stays_s}
        row |= {"more than where they stay_s": warm(found) - stays_s}
        rows.append(row | {"makespan_s": dj.simulator.makespan_s(trace)})
    return rows


def watch_memory(machine: Machine, rounds: int, layers: int, width: int, steps: int) -> Rows:
    """Returns what this process and those of devices hold over steps of a loop."""
    train, params, x = descent(layers, width)
    program = dj.trace(train, params, x, resident=(), carry=0)
    sharded = dj.partition(program, machine.num_devices)
    loop = Loop(
        machine.compile(sharded, np.arange(sharded.graph.num_tasks) % machine.num_devices),
        sharded, (params, x), {},
    )  # fmt: skip
    processes = {"this one": os.getpid()}
    if machine.backend in LAUNCHERS:
        asked = [
            device.session.outcome(device.call("process_id"), 60) for device in machine.devices
        ]
        processes |= {f"device {d}": pid for d, pid in enumerate(asked)}
    samples = []
    for _ in range(SAMPLES):
        for _ in range(-(-steps // SAMPLES)):
            outputs = loop()
        jax.block_until_ready(outputs)
        samples.append([resident_bytes(pid) / 1e6 for pid in processes.values()])
    rows = []
    for name, sizes in zip(processes, np.transpose(samples), strict=True):
        change = float(np.abs(sizes / sizes[0] - 1).max())
        held = {"first (MB)": sizes[0], "least (MB)": sizes.min(), "most (MB)": sizes.max()}
        flat = "flat" if change <= FLAT else "NOT FLAT"
        rows.append({"process": name, "steps": steps, **held, "change": change, "it is": flat})
    return rows


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    pages = pathlib.Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * resource.getpagesize()


def run_plans(context: Context[Asked], machine: Machine, rounds: int, plans: int) -> Rows:
    """Runs the test of random plans with tiny buffers, of so many."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/kernels/test_orders.py",
        "-k",
        "tiny",
    ]
    environment = {**os.environ, "DOPPLER_JAX_PLANS": str(plans)}
    bound_s, log = 60 + 2.0 * plans, context.folder / "plans.txt"
    status, seconds = run_apart(command, bound_s, log, environment)
    ended = "all ended, outputs and traces right" if status == 0 else f"FAILED, see {log}"
    return [{"plans": plans, "they": ended, "seconds_s": seconds}]


def step_timer(
    step: Callable[..., Any], state: Any, x: jax.Array, feeds: bool
) -> Callable[[], float]:
    """Returns what runs the next step and returns its seconds; it may feed the state back."""

    def run() -> float:
        nonlocal state
        began = time.perf_counter()
        made, _ = jax.block_until_ready(step(state, x))
        took_s = time.perf_counter() - began
        state = made if feeds else state
        return took_s

    return run


def time_idle(
    context: Context[Asked], machine: Machine, rounds: int, workload: str, placements: int
) -> Rows:
    """Measures what devices idle with a ready task, over random placements of a workload.

    Every trace is checked by the simulator's validator (`profile` does that). The 99th
    percentile of a task's median gap is the engine's own, since an interruption hits another
    gap in every round; idle is the share of a device's time, though a task was ready.
    """
    problem = machine.calibrated(
        dj.workloads.make_workload(workload, "small"), context.folder, "planner"
    )
    args, rng = arguments(problem), np.random.default_rng(0)
    gaps, task_gaps, shares = [], [], []
    for _ in range(placements):
        where = rng.integers(machine.num_devices, size=problem.graph.num_tasks)
        step = machine.compile(problem.program, where)
        step(*args)
        profiles = [(step(*args), step.profile())[1] for _ in range(rounds)]
        gaps += [found.dispatch_gap_s for found in profiles]
        task_gaps.append(np.median(gaps[-rounds:], axis=0))
        shares += [found.idle_ready_share for found in profiles]
    row = {"tasks": problem.graph.num_tasks, "gap, median_s": float(np.median(gaps))}
    row |= {"99th percentile_s": float(np.quantile(gaps, 0.99))}
    row |= {"99th percentile of tasks' medians_s": float(np.quantile(task_gaps, 0.99))}
    idle = {"idle, mean": f"{np.mean(shares):.2%}", "idle, largest": f"{np.max(shares):.2%}"}
    return [row | idle]


def tiny_program(
    num_tasks: int, length: int, is_chain: bool, carry: str | None = None
) -> tuple[dj.programs.ShardedProgram, tuple[jax.Array, ...]]:
    """Returns tasks on vectors, each of the argument or of the task before, and arguments."""

    def fn(x: jax.Array, one: jax.Array) -> list[jax.Array]:
        made = [x]
        for _ in range(num_tasks):  # products are tasks; what is element-wise would be fused
            made.append((made[-1] if is_chain else x) @ one)
        return made[-1:] if is_chain else made[1:]

    args = jnp.zeros((length, 1), jnp.float32), jnp.ones((1, 1), jnp.float32)
    return dj.partition(dj.trace(fn, *args, carry=carry), num_shards=1), args


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns a table per part."""
    texts = {}
    for part, found in by(records, "part").items():
        of = ("backend", "workload") if "workload" in found[0] else ("backend",)
        rows = [{name: r[name] for name in of} | row for r in found for row in r["rows"]]
        texts[PARTS[part]] = table(rows)
    return Page(texts)


QUICK = {"preset": "small", "placements": 3, "steps": 300, "plans": 50, "rounds": 3}

STUDY = Study("engine", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
