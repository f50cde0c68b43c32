"""The devices that a study measures on, and the one way to measure: in turns, the first cold.

Isolated devices (a Ray process with a core each) are chosen where there is no accelerator and
the machine has as many cores: the CPU devices of this process share its cores.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import ArrayLike

import doppler_jax as dj
from doppler_jax.costs.calls import CallCosts
from doppler_jax.engine.calls import measure_calls
from doppler_jax.engine.devices import Devices
from doppler_jax.engine.placed import as_devices
from doppler_jax.engine.stage3 import choose_backend, open_devices
from doppler_jax.programs.workloads import Workload
from doppler_jax.training.paired import Measure
from experiments.catalogue import Problem
from experiments.grid import Cell, Context, Record, Settings, cells_of, check_names

ROOT = pathlib.Path(__file__).resolve().parents[1]
"""The checkout."""

GRACE_S = 15.0
"""That an interrupted process has to write what it did."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Machine(contextlib.ExitStack):
    """Devices, started when first asked for and closed with the context.

    Args:
      num_devices: how many.
      kind: "local" for this process's, "ray" for isolated ones, "auto" to choose; "unequal"
        for JAX's first device and the last CPU device.
    """

    def __init__(self, num_devices: int, kind: str = "auto") -> None:
        super().__init__()
        self.num_devices, self._kind = num_devices, kind

    @cached_property
    def backend(self) -> str:
        """The kind of the devices."""
        if self._kind == "unequal":
            return self._kind
        return choose_backend(self._kind, self.num_devices)

    @cached_property
    def devices(self) -> Devices:
        """The devices, `[D]`."""
        if self.backend == "unequal":
            return as_devices([jax.devices()[0], jax.devices("cpu")[-1]])
        return as_devices(self.enter_context(open_devices(self.backend, self.num_devices)))

    @cached_property
    def calls(self) -> CallCosts:
        """What calls take beyond their makespans."""
        return measure_calls(self.devices)

    @property
    def key(self) -> dict[str, Any]:
        """What belongs into the key of a record that was measured here."""
        return {"devices": self.num_devices, "backend": self.backend}

    def compile(
        self, sharded: dj.programs.ShardedProgram, plan: dj.Plan | ArrayLike, **options: Any
    ) -> dj.engine.PlacedFunction:
        """Returns the placed function; devices keep what they have compiled before."""
        return dj.compile(sharded, plan, devices=self.devices, **options)

    @staticmethod
    def makespan_s(step: dj.engine.PlacedFunction, args: Sequence[Any]) -> float:
        """Runs a placed function and returns the makespan of its trace, in seconds."""
        return dj.simulator.makespan_s(step.run_traced(*args))

    def calibrated(
        self,
        workload: Workload,
        folder: pathlib.Path,
        strategy: str = "uniform",
        num_shards: int | None = None,
        tracing: Mapping[str, Any] = types.MappingProxyType({}),
        *,
        calls: bool = False,
    ) -> Problem:
        """Returns a workload cut into blocks, with costs that are measured on the devices.

        Blocks are by default as many as the next power of two of the devices. What is measured
        is kept in the folder, calls too if asked for. `tracing` are options of `dj.trace`.
        """
        count = num_shards or 1 << (self.num_devices - 1).bit_length()
        program = dj.trace(workload.fn, *workload.args, **tracing)
        sharded = dj.partition(program, count, strategy=strategy)
        name = f"{workload.name}-{strategy}{count}-{self.backend}x{self.num_devices}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"calibration-{name}.json"
        measured = dj.engine.measure_calibration(sharded, self.devices, path=path, calls=calls)
        costs = dj.make_costs(sharded, measured)
        return Problem(name, sharded.graph, costs, workload=workload, sharded=sharded)

    def pair_measure(self, problem: Problem, seed: int = 0) -> Measure:
        """Returns what runs two plans of a problem in alternation."""
        args = arguments(problem, seed)
        return dj.engine.make_paired_measure(problem.program, args, self.devices)


@dataclasses.dataclass(frozen=True)
class MachineSettings(Settings):
    """Options of a study that measures workloads on this machine's devices."""

    workloads: tuple[str, ...] = tuple(dj.workloads.list_workloads())
    preset: str = "medium"
    """Sizes of the workloads."""
    backend: str = "auto"
    """`local` on CPU devices shows order only: they share the machine's cores."""
    num_devices: int = 2


def measured_cells(
    context: Context[Any],
    machine: Machine,
    measure: Callable[[Machine, Problem], Record],
    workloads: Sequence[str],
    preset: str,
    strategy: str,
    num_shards: int,
    **more: Any,
) -> list[Cell]:
    """Returns a cell per workload, of what is measured of it, cut and calibrated, on a machine.

    `more` joins the keys of the records.

    Raises:
      ValueError: there is no such workload.
    """
    check_names("--workloads", workloads, dj.workloads.list_workloads())

    def run(workload: str) -> Record:
        made = dj.workloads.make_workload(workload, preset)
        return measure(machine, machine.calibrated(made, context.folder, strategy, num_shards))

    return cells_of(run, {"workload": workloads}, preset=preset, **machine.key, **more)


def arguments(problem: Problem, seed: int = 0) -> tuple[Any, ...]:
    """Returns random arguments of a problem's workload."""
    assert problem.workload is not None
    return dj.workloads.make_arrays(problem.workload, jax.random.key(seed))


def relative_error(found: Any, expected: Any) -> float:
    """Returns the largest difference of an array in a tree over its largest magnitude."""

    def error(one: jax.Array, other: jax.Array) -> float:
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        return float(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(error, found, expected)))


def measure_plans(
    machine: Machine,
    problem: Problem,
    plans: Mapping[str, dj.Plan | ArrayLike],
    rounds: int,
    synchronous: Sequence[str] = (),
) -> dict[str, list[float]]:
    """Returns makespans of each plan or placement `[N]` in warm rounds, in seconds.

    Those named `synchronous` are run with barriers.
    """
    args, runs = arguments(problem), {}
    for name, plan in plans.items():
        mode = "bulk_synchronous" if name in synchronous else None
        step = machine.compile(problem.program, plan, mode=mode)
        runs[name] = partial(machine.makespan_s, step, args)
    return {name: found[1:] for name, found in in_turns(runs, rounds).items()}


def in_turns(
    runs: Mapping[Key, Callable[[], Value]],
    rounds: int,
    *,
    seconds: float = math.inf,
    least: int = 5,
) -> dict[Key, list[Value]]:
    """Returns what each run gave, `[1 + rounds]`: first cold, in their order, then warm.

    The runs take turns, each round in an order of its own, so that a machine's drift and what
    one run leaves to the next hit all alike. After `least` warm rounds none begins later than
    `seconds` from the first.
    """
    found: dict[Key, list[Value]] = {what: [run()] for what, run in runs.items()}
    names, began = list(runs), time.monotonic()
    for turn in range(rounds):
        if turn >= least and time.monotonic() > began + seconds:
            break
        for k in np.random.default_rng(turn).permutation(len(names)).tolist():
            time.sleep(0.01)  # threads of the call before may spin for a while
            found[names[k]].append(runs[names[k]]())
    return found


def seconds_of(run: Callable[[], Any]) -> float:
    """Runs something, waits for its arrays, and returns the seconds that took."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def calls_s(run: Callable[[], Any], least_s: float, least: int = 1) -> float:
    """Returns the median seconds of `least` calls in a row, or more that take `least_s`."""
    spent: list[float] = []
    while sum(spent) < least_s or len(spent) < least:
        spent.append(seconds_of(run))
    return float(np.median(spent))


def warm(found: Sequence[float]) -> float:
    """Returns the median of what `in_turns` gave, the cold one left out."""
    return float(np.median(found[1:]))


def warm_ratio(found: Sequence[float], other: Sequence[float]) -> float:
    """Returns the median over warm rounds of one over another of the same round."""
    return float(np.median(np.array(found[1:]) / np.array(other[1:])))


def peak_bytes() -> int:
    """Returns the peak of this process's resident memory, Python and JAX included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_apart(
    command: Sequence[str], bound_s: float, log: pathlib.Path, environment: Mapping[str, str]
) -> tuple[int | None, float]:
    """Runs a command in the checkout, in a session that is ended whole at the bound.

    There it is interrupted, as by Ctrl-C, and killed if that is not enough.

    Returns:
      Exit status, None where it was ended, and seconds from before it was started to its end.
    """
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            return child.wait(bound_s), time.perf_counter() - began
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
            return None, time.perf_counter() - began
        finally:
            with contextlib.suppress(ProcessLookupError):  # it and all that it started ended
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
