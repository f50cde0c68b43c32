"""What `dj.distribute` gives beside `jax.jit`: `python -m experiments.distribute`.

Whole calls until their outputs can be used, in turns: what `distribute` returns after planning
with `--budget-s`, `jit` on JAX's first device (on CPUs that has all cores), the fastest of
`jit` over all devices with arguments sharded one way or another, and the plan by itself,
whether `distribute` chose it or not, in as many tasks or fewer (fused) as are faster. A
training step feeds its state back, which `jit` takes as a donation and a plan carries.
What `jit` reads is on its devices beforehand. `simulated` is a call of the plan, all it does.

The devices are those of this process, as by default, and isolated ones: a process and a core
each. Ratios are medians over turns, with the 95% interval; `bound` is whether `distribute`
takes at most 1.02 times the best `jit` and 20 us. It and `jit` have more turns than the plan,
`--more-s` of them.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import doppler_jax as dj
from doppler_jax.engine.loop import Loop
from doppler_jax.engine.planning import Lowered
from doppler_jax.engine.processes import LAUNCHERS
from doppler_jax.training.paired import median_interval
from experiments import grid
from experiments.functions import FUNCTIONS, Function
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.machine import Machine, calls_s, in_turns, seconds_of, warm
from experiments.tables import by, table

SHARDINGS = ("rows", "columns", "argument 0", "argument 1")
"""How arguments are sharded: all along their first, or their last, dimension that divides,
or one of them along its largest and the others replicated."""

TRIALS = 3
"""Calls of each sharding, by which the one to compare is chosen."""

MOST = 1000
"""Further turns."""

ALLOWED = 1.02, 20e-6
"""Times the best `jit`, and seconds, that `distribute` may take."""

DEVICES = {"local": "devices of this process (the default)", "ray": "isolated devices"}


@dataclasses.dataclass(frozen=True)
class Asked(Settings):
    """What to measure."""

    functions: tuple[str, ...] = tuple(FUNCTIONS)
    backends: tuple[str, ...] = ("local", "ray")
    """Kinds of devices."""
    num_devices: int = 2
    preset: str = "medium"
    """Sizes: `small` or `medium`."""
    budget_s: float = 60.0
    """Of `distribute`, for planning and comparing."""
    turn_s: float = 0.2
    """Seconds of calls in a turn, of which the median counts; one call at least."""
    rounds: int = 21
    """Turns of each, in alternation."""
    more_s: float = 45.0
    """Seconds of further turns of `distribute` and `jit`, which are to be told apart to 2%."""


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns a cell per function and kind of devices."""
    asked = context.settings
    grid.check_names("--functions", asked.functions, list(FUNCTIONS))
    grid.check_names("--backends", asked.backends, ("local", *LAUNCHERS))
    own, found = context.key("functions", "backends", "num_devices"), []
    for backend in asked.backends:
        machine = context.stack.enter_context(Machine(asked.num_devices, backend))
        run, axes = partial(measure, asked, machine), {"function": asked.functions}
        found += grid.cells_of(run, axes, **machine.key, **own)
    return found


def measure(asked: Asked, machine: Machine, function: str) -> Record:
    """Returns seconds of calls of a function by what runs them, and what became of its plan."""
    made = FUNCTIONS[function](asked.preset)
    state: dict[str, Any] = {"carry": 0, "resident": ()} if made.is_step else {}
    fast = dj.distribute(
        made.fn, devices=machine.devices, budget_s=asked.budget_s, cache=False, **state
    )
    first_s = seconds_of(lambda: fast(*_copied(made)))
    lowered = fast.lower(*made.args)
    plans = {
        name: machine.compile(lowered.sharded, lowered.placed, fuse_segments=name != "plan")
        for name in ("plan", "plan, fused")
    }
    runs = {"distribute": Loop(fast, lowered.sharded, made.args, {})}
    runs |= {n: Loop(step, lowered.sharded, made.args, {}) for n, step in plans.items()}
    runs |= jit_loops(made, lowered, asked.turn_s)
    timed = {n: partial(calls_s, run, asked.turn_s) for n, run in runs.items()}
    call_s = {name: found[1:] for name, found in in_turns(timed, asked.rounds).items()}
    close = {name: run for name, run in timed.items() if name not in plans}
    for name, found in in_turns(close, MOST, seconds=asked.more_s).items():
        call_s[name] += found[1:]
    compared = fast.compared
    return {
        "call_s": call_s,
        "first_s": first_s,
        "chosen": "jit, uncompared" if compared is None else compared.chosen,
        "compared": str(compared),
        "devices used": int(np.unique(lowered.placed.placement).size),
        "simulated_s": lowered.placed.makespan_s + machine.calls.beyond_s(lowered.sharded),
        "account": account(plans["plan"], lowered),
    }


def jit_loops(made: Function, lowered: Lowered, turn_s: float) -> dict[str, Loop]:
    """Returns calls of `jit`, and of it over all devices of this process, the fastest way."""
    taken = 0 if made.is_step else ()

    def loop(args: tuple[Any, ...]) -> Loop:
        return Loop(jax.jit(made.fn, donate_argnums=taken), lowered.sharded, args, {})

    sharded = {how: loop(shard(made.args, how)) for how in SHARDINGS[: 2 + len(made.args)]}
    tried = in_turns({n: partial(calls_s, run, turn_s) for n, run in sharded.items()}, TRIALS)
    best = min(tried, key=lambda how: warm(tried[how]))
    return {"jit": loop(made.args), f"jit, sharded by {best}": sharded[best]}


def _copied(made: Function) -> tuple[Any, ...]:
    """Returns arguments whose state may be taken."""
    kept = slice(1 if made.is_step else 0, None)
    return (*jax.tree.map(jax.numpy.copy, made.args[: kept.start]), *made.args[kept])


def shard(args: tuple[Any, ...], sharding: str) -> tuple[Any, ...]:
    """Returns the arguments on all devices of this process, see `SHARDINGS`."""
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def put(number: int, array: jax.Array) -> jax.Array:
        divisible = [i for i, n in enumerate(array.shape) if n % mesh.size == 0]
        names: list[str | None] = [None] * array.ndim
        if divisible and sharding in ("rows", "columns"):
            names[divisible[0 if sharding == "rows" else -1]] = "x"
        elif divisible and sharding == f"argument {number}":
            names[max(divisible, key=lambda i: array.shape[i])] = "x"
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*names)))

    return tuple(jax.tree.map(partial(put, k), arg) for k, arg in enumerate(args))


def account(step: dj.engine.PlacedFunction, lowered: Lowered) -> Record:
    """Returns what the latest call of a plan went on."""
    profile, whole = step.profile(), step.whole_call
    busy_s = profile.explanation.busy_s
    chores: dict[str, float] = {}
    for name, _, start_s, finish_s in whole.chores:
        chores[name] = chores.get(name, 0.0) + finish_s - start_s
    return {
        "tasks": lowered.sharded.graph.num_tasks,
        "call_s": whole.seconds,
        "makespan_s": profile.makespan_s,
        "no plan below_s": profile.lower_bound_s,
        "tasks together_s": float(busy_s.sum()),
        "transfers_s": profile.transfer_s,
        "devices on transfers_s": float(profile.handling_s.sum()),
        "idle though ready_s": float(profile.idle_ready_s.sum()),
        "chores_s": sum(chores.values()),
        "rest_s": profile.rest_s,
    }


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns whole calls by kind of devices, what was asked for, and where plans' calls go."""
    texts, claims = {}, []
    for backend, here in by(records, "backend").items():
        where = DEVICES.get(backend, backend)
        texts[f"Calls, {where}"] = table([row(record) for record in here])
        claims.append({"devices": where, **asked_for(here)})
    texts["What was asked for"] = table(claims)
    gone = [
        {"function": r["function"], "devices": r["backend"], **r["account"]} for r in records
    ]
    texts["Where a call of the plan goes"] = table(gone)
    return Page(texts)


def row(record: Record) -> Record:
    """Returns a record as a row."""
    seconds = {name: np.array(found) for name, found in record["call_s"].items()}
    sharded = next(name for name in seconds if name.startswith("jit, sharded"))
    plan = best_plan(record)
    return {
        "function": record["function"],
        "distribute_s": float(np.median(seconds["distribute"])),
        "jit_s": float(np.median(seconds["jit"])),
        "jit, sharded_s": float(np.median(seconds[sharded])),
        "by": sharded.removeprefix("jit, sharded by "),
        "plan_s": float(np.median(seconds[plan])),
        "simulated_s": record["simulated_s"],
        "chosen": record["chosen"],
        "distribute / best jit": _told(ratios(record, "distribute")),
        "plan / best jit": _told(ratios(record, plan)),
        "bound": "kept" if is_kept(record) else "BROKEN",
        "first call_s": record["first_s"],
    }


def best_jit(record: Record) -> str:
    """Returns which `jit` takes least."""
    return _least(record, "jit")


def best_plan(record: Record) -> str:
    """Returns whether the plan takes least as it is or fused."""
    return _least(record, "plan")


def _least(record: Record, prefix: str) -> str:
    found = {n: s for n, s in record["call_s"].items() if n.startswith(prefix)}
    return min(found, key=lambda name: float(np.median(found[name])))


def is_kept(record: Record) -> bool:
    """Returns whether `distribute` takes no more than is allowed."""
    times, more_s = ALLOWED
    return bool(np.median(ratios(record, "distribute", more_s)) <= times)


def ratios(
    record: Record, name: str, less_s: float = 0.0, rival: str | None = None
) -> np.ndarray:
    """Returns calls, less so many seconds, over those of the best `jit` or of a rival."""
    found, other = (np.array(record["call_s"][n]) for n in (name, rival or best_jit(record)))
    return (found - less_s) / other[: len(found)]


def asked_for(records: list[Record]) -> Record:
    """Returns what holds of all functions on one kind of devices."""

    def over(record: Record, name: str, rival: str | None = None) -> float:
        return float(np.median(ratios(record, name, rival=rival)))

    plans = [r for r in records if r["chosen"].startswith("plan") and r["devices used"] > 1]
    step = next((r for r in records if r["function"].startswith("training")), None)
    odd = [1 / over(r, "distribute") for r in records if "irregular" in r["function"]]
    kept = f"{sum(map(is_kept, records))} of {len(records)}"
    return {
        "at most 1.02 times the best jit and 20 us": kept,
        "a plan on several devices (asked: 2)": len(plans),
        "training step, plan / jit (asked: 1.2)": step and over(step, best_plan(step), "jit"),
        "training step, plan / best jit": step and over(step, best_plan(step)),
        "irregular function, times faster (asked: 1.3)": odd[0] if odd else None,
    }


def _told(found: np.ndarray) -> str:
    low, high = median_interval(found)
    interval = f" ({low:.3f} to {high:.3f})" if np.isfinite(low) else ""
    return f"{float(np.median(found)):.3f}{interval}"


QUICK = {"preset": "small", "budget_s": 4.0, "turn_s": 0.02, "rounds": 6, "more_s": 1.0}

STUDY = Study("distribute", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
