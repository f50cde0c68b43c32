"""What an order is worth, measured: `python -m experiments.orders`.

Whole calls of the best plan found under `in_order`, in pairs with those of the best placement
found under `fifo`, each searched for as long, by costs measured on the devices. Problems are

- a training step of two stages and eight micro-batches, held to their devices;
- blocks of 8 MiB, sixteen in groups of four that are summed, on devices with room for 4.4:
  group by group they fit, first come, first served only where one device makes most of them;
- every workload whose order is simulated to save 5% at least.

Asked is a ratio of at most 0.97, and all of its 95% interval below 1. Peaks are what calls
held at once, over what a device has room for.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import doppler_jax as dj
from doppler_jax.programs.workloads.workload import Definition, normal
from experiments.catalogue import Problem
from experiments.fidelity import ARGUMENTS, NUM_SHARDS
from experiments.grid import Cell, Context, Page, Record, Study, cells_of, check_names
from experiments.machine import Machine, MachineSettings, arguments
from experiments.tables import table

STAGES, BLOCKS = "two stages", "blocks of 8 MiB"

PROBLEMS = (STAGES, BLOCKS, *dj.workloads.list_workloads())

GROUPS, GROUP = 4, 4
"""Groups, and blocks in each."""

DEPTH = 16
"""Times that each number of a block goes through `tanh`: long beside what moving one takes."""

ROOM = 4.4
"""Blocks that a device has room for."""

SAVED = 0.95
"""Simulated ratio up to which an order is measured; of the first two problems always."""

ASKED = 0.97
"""Measured ratio."""


@dataclasses.dataclass(frozen=True)
class Asked(MachineSettings):
    """What to measure."""

    workloads: tuple[str, ...] = PROBLEMS
    """Problems; see above."""
    seconds: float = 20.0
    """Of the search for each plan."""
    pairs: int = 31
    """Calls of either plan."""


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per problem."""
    asked = context.settings
    check_names("--workloads", asked.workloads, PROBLEMS)
    machine = context.stack.enter_context(Machine(asked.num_devices, asked.backend))
    own = machine.key | context.key("workloads", "backend", "num_devices")
    return cells_of(partial(measure, context, machine), {"workload": asked.workloads}, **own)


def measure(context: Context[Asked], machine: Machine, workload: str) -> Record:
    """Returns simulated seconds of both plans, and measured ones if they differ."""
    asked = context.settings
    problem = make_problem(context, machine, workload)
    placed = {queue: place(problem, queue, asked.seconds) for queue in ("in_order", "fifo")}
    simulated = {queue: found and found.makespan_s for queue, found in placed.items()}
    record: Record = {"tasks": problem.graph.num_tasks, "simulated_s": simulated}
    ratio = simulated_ratio(record)
    if ratio is None or (workload not in (STAGES, BLOCKS) and ratio > SAVED):
        return record
    plans = {queue: found.plan for queue, found in placed.items() if found}
    measured = machine.pair_measure(problem)(plans["in_order"], plans["fifo"], asked.pairs)
    peaks = {}
    for queue, plan in plans.items():
        step = machine.compile(problem.program, plan)
        jax.block_until_ready(step(*arguments(problem)))
        peaks[queue] = float((step.peak_bytes / problem.costs.capacity_bytes).max())
    return record | {
        "in_order_s": measured.candidate_s,
        "fifo_s": measured.incumbent_s,
        "interval": measured.interval(),
        "ratio": measured.ratio,
        "peaks": peaks,
    }


def place(problem: Problem, queue: str, seconds: float) -> dj.Placed | None:
    """Returns the best plan found under a queue, None if none fits into memory."""
    links, given = dj.Objective("serial"), (problem.program, problem.costs)
    try:
        return dj.place(*given, queue=queue, budget_s=seconds, objective=links)
    except ValueError as error:
        if "fits" not in str(error):
            raise
        return None


def make_problem(context: Context[Asked], machine: Machine, workload: str) -> Problem:
    """Returns a problem with costs as measured on the machine."""
    preset, small = context.settings.preset, context.settings.preset == "small"
    if workload == BLOCKS:
        side = 64 if small else 1024
        fn, arguments = grouped_blocks(2 * side, side)
        made = dj.workloads.Workload("blocks", {"side": side}, fn, arguments)
        problem = machine.calibrated(made, context.folder, "planner", 1)
        arguments_bytes = problem.graph.input_bytes.sum()
        room = np.full(machine.num_devices, ROOM * 8 * side**2 + arguments_bytes)
        return dataclasses.replace(
            problem, costs=dataclasses.replace(problem.costs, capacity_bytes=room)
        )
    if workload == STAGES:
        made = dj.workloads.make_workload("pipeline", preset, stages=2, micro_batches=8)
        state = ARGUMENTS["pipeline"]
        problem = machine.calibrated(made, context.folder, "planner", 1, state)
        pins = {f"*stage{i}*": i for i in range(2)}
        costs = dj.pin(problem.program, problem.costs, pins)
        return dataclasses.replace(problem, costs=costs)
    made = dj.workloads.make_workload(workload, preset)
    return machine.calibrated(made, context.folder, "planner", NUM_SHARDS)


def grouped_blocks(rows: int, columns: int) -> Definition:
    """Returns sixteen large blocks, made of little, whose groups of four give a number each."""

    def fn(left: jax.Array, rights: list[jax.Array]) -> jax.Array:
        totals = []
        for g in range(GROUPS):
            blocks = []
            for k in range(GROUP):
                with jax.named_scope(f"group{g}/block{k}"):
                    block = left @ rights[g * GROUP + k]
                    for _ in range(DEPTH):
                        block = jnp.tanh(block)
                    blocks.append(block)
            with jax.named_scope(f"group{g}"):
                totals.append(_total(blocks))
        return sum(totals[1:], totals[0])

    return fn, (normal(rows, 8), [normal(8, columns)] * (GROUPS * GROUP))


def _total(blocks: list[jax.Array]) -> jax.Array:
    """Returns the sum of all numbers, by one task that has all blocks before it begins."""

    def add(total: jax.Array, _: None) -> tuple[jax.Array, None]:
        return total + jnp.sum(blocks[0] + blocks[1] + blocks[2] + blocks[3]), None

    return jax.lax.scan(add, jnp.zeros(()), length=1)[0]  # tasks never begin inside a loop


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns what was measured, and what an order is simulated to be worth elsewhere."""
    measured = [row(record) for record in records if "ratio" in record]
    rest = [_simulated(record) for record in records if "ratio" not in record]
    return Page({"": table(measured), "Simulated to save less, or none fits": table(rest)})


def row(record: Record) -> Record:
    """Returns a record as a row."""
    low, high = record["interval"]
    kept = record["ratio"] <= ASKED and high < 1
    return {
        "problem": record["workload"],
        "in_order_s": float(np.median(record["in_order_s"])),
        "fifo_s": float(np.median(record["fifo_s"])),
        "ratio": record["ratio"],
        "95%": f"{low:.3f} to {high:.3f}",
        "asked": "kept" if kept else "BROKEN",
        "peak, in_order": record["peaks"]["in_order"],
        "peak, fifo": record["peaks"]["fifo"],
        **_simulated(record),
    }


def _simulated(record: Record) -> Record:
    seconds = record["simulated_s"]
    return {
        "problem": record["workload"],
        "tasks": record["tasks"],
        "simulated in_order_s": seconds["in_order"],
        "simulated fifo_s": seconds["fifo"],
        "simulated ratio": simulated_ratio(record),
    }


def simulated_ratio(record: Record) -> float | None:
    """Returns what an order is simulated to take over `fifo`, None where none fits."""
    kept, served = (record["simulated_s"][queue] for queue in ("in_order", "fifo"))
    return None if kept is None or served is None else kept / served


QUICK = {"workloads": (BLOCKS, "chainmm"), "preset": "small", "seconds": 1.0, "pairs": 7}

STUDY = Study("orders", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
