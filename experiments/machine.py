"""The devices that a study measures on, and the one way to measure: in turns, the first cold.

Isolated devices (a Ray process with a core each) are chosen where there is no accelerator and
the machine has as many cores: the CPU devices of this process share its cores.
"""

import contextlib
import multiprocessing
import os
import pathlib
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike

import doppler_jax as dj
from doppler_jax.engine.placed import as_devices
from doppler_jax.engine.stage3 import choose_backend, open_devices
from doppler_jax.programs.workloads import Workload
from doppler_jax.training.paired import Measure
from experiments.catalogue import Problem
from experiments.grid import Cell, Context, Record, check_names

SHARDINGS = ("rows", "columns", "argument 0", "argument 1")
"""How arguments are sharded: all along their first, or their last, dimension that divides,
or one of them along its largest and the others replicated."""

ROOT = pathlib.Path(__file__).resolve().parents[1]
"""The checkout."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Machine(contextlib.ExitStack):
    """Devices, started when first asked for and closed with the context.

    Args:
      num_devices: how many.
      kind: "local" for this process's, "ray" for isolated ones, "auto" to choose.
    """

    def __init__(self, num_devices: int, kind: str = "auto") -> None:
        super().__init__()
        self.num_devices, self._kind = num_devices, kind

    @cached_property
    def backend(self) -> str:
        """The kind of the devices."""
        return choose_backend(self._kind, self.num_devices)

    @cached_property
    def devices(self) -> Sequence[Any]:
        """The devices, `[D]`."""
        return as_devices(self.enter_context(open_devices(self.backend, self.num_devices)))

    @property
    def key(self) -> dict[str, Any]:
        """What belongs into the key of a record that was measured here."""
        return {"devices": self.num_devices, "backend": self.backend}

    def compile(
        self, sharded: dj.ShardedProgram, placement: ArrayLike, **options: Any
    ) -> dj.PlacedFunction:
        """Returns the placed function; devices keep what they have compiled before."""
        return dj.compile(sharded, placement, devices=self.devices, **options)

    def calibrated(
        self,
        workload: Workload,
        folder: pathlib.Path,
        strategy: str = "uniform",
        num_shards: int | None = None,
    ) -> Problem:
        """Returns a workload cut into blocks, with costs that are measured on the devices.

        Blocks are by default as many as the next power of two of the devices. What is measured
        is kept in the folder.
        """
        count = num_shards or 1 << (self.num_devices - 1).bit_length()
        program = dj.trace(workload.fn, *workload.args)
        sharded = dj.partition(program, count, strategy=strategy)
        name = f"{workload.name}-{strategy}{count}-{self.backend}x{self.num_devices}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"calibration-{name}.json"
        measured = dj.measure_calibration(sharded, self.devices, path=path)
        costs = dj.make_costs(sharded, measured)
        return Problem(name, sharded.graph, costs, workload=workload, sharded=sharded)

    def pair_measure(self, problem: Problem, seed: int = 0) -> Measure:
        """Returns what runs two placements of a problem in alternation."""
        assert problem.sharded is not None
        args = arguments(problem, seed)
        return dj.make_paired_measure(problem.sharded, args, self.devices)


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
    check_names("--workloads", workloads, dj.list_workloads())

    def cell(workload: str) -> Cell:
        def make() -> Record:
            made = dj.make_workload(workload, preset)
            problem = machine.calibrated(made, context.folder, strategy, num_shards)
            return measure(machine, problem)

        return Cell({"workload": workload, "preset": preset, **machine.key, **more}, make)

    return [cell(workload) for workload in workloads]


def arguments(problem: Problem, seed: int = 0) -> tuple[Any, ...]:
    """Returns random arguments of a problem's workload."""
    assert problem.workload is not None
    return dj.make_arrays(problem.workload, jax.random.key(seed))


def relative_error(found: Any, expected: Any) -> float:
    """Returns the largest difference of an array in a tree over its largest magnitude."""

    def error(one: jax.Array, other: jax.Array) -> float:
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        return float(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(error, found, expected)))


def makespan_s(step: dj.PlacedFunction, args: Sequence[Any]) -> float:
    """Runs a placed function and returns the makespan of its trace, in seconds."""
    step(*args)
    assert step.trace is not None
    return float(step.trace.finish_s.max(initial=0.0))


def measure_placements(
    machine: Machine,
    problem: Problem,
    placements: Mapping[str, ArrayLike],
    rounds: int,
    modes: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Returns makespans of each placement `[N]` in warm rounds, in seconds.

    `modes` are of those that are not run work-conserving.
    """
    assert problem.sharded is not None
    args, steps = arguments(problem), {}
    for name, placement in placements.items():
        mode = modes.get(name, "work_conserving")
        steps[name] = machine.compile(problem.sharded, placement, mode=mode)
    runs = {name: partial(makespan_s, step, args) for name, step in steps.items()}
    return {name: found[1:] for name, found in in_turns(runs, rounds).items()}


def in_turns(runs: Mapping[Key, Callable[[], Value]], rounds: int) -> dict[Key, list[Value]]:
    """Returns what each run gave, `[1 + rounds]`: first cold, in their order, then warm.

    The runs take turns, each round in an order of its own, so that a machine's drift and what
    one run leaves to the next hit all alike.
    """
    found: dict[Key, list[Value]] = {what: [run()] for what, run in runs.items()}
    names = list(runs)
    for turn in range(rounds):
        for k in np.random.default_rng(turn).permutation(len(names)).tolist():
            time.sleep(0.01)  # threads of the call before may spin for a while
            found[names[k]].append(runs[names[k]]())
    return found


def seconds_of(run: Callable[[], Any]) -> float:
    """Runs something, waits for its arrays, and returns the seconds that took."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def warm(found: Sequence[float]) -> float:
    """Returns the median of what `in_turns` gave, the cold one left out."""
    return float(np.median(found[1:]))


def warm_ratio(found: Sequence[float], other: Sequence[float]) -> float:
    """Returns the median over warm rounds of one over another of the same round."""
    return float(np.median(np.array(found[1:]) / np.array(other[1:])))


def available_cores() -> list[int]:
    """Returns the cores that this process may use.

    Raises:
      ValueError: the system does not tell.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise ValueError("processes cannot be pinned to cores on this system; Linux can")
    return sorted(os.sched_getaffinity(0))


def peak_bytes() -> float:
    """Returns the peak of this process's resident memory, Python and JAX included."""
    status = pathlib.Path("/proc/self/status")
    if not status.exists():  # macOS, where it is in bytes
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    # On Linux the ru_maxrss of a new process starts at what its parent held.
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return 1024.0 * int(fields["VmHWM"].split()[0])


@contextlib.contextmanager
def pinned(cores: Sequence[int], num_devices: int = 1) -> Iterator[Callable[..., float]]:
    """A process on cores of its own, like an isolated device, that times plain JAX.

    What it gives takes the arguments of `time_jit` and returns seconds of a call there.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _pin, (cores, num_devices)) as pool:
        yield lambda *args: pool.submit(time_jit, *args).result()


def _pin(cores: Sequence[int], num_devices: int) -> None:
    """Settles a new process before JAX's backend starts."""
    os.sched_setaffinity(0, cores)
    os.environ["NPROC"] = str(len(cores))  # threads of XLA
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_enable_compilation_cache", False)  # a first call is a cold one


def time_jit(name: str, preset: str, sharding: str | None = None) -> float:
    """Returns seconds of a call of a whole workload in one `jit`; the first compiles it."""
    fn, args = _jitted(name, preset, sharding)
    return seconds_of(lambda: fn(*args))


@cache
def _jitted(name: str, preset: str, sharding: str | None) -> tuple[Callable[..., Any], Any]:
    """Returns a workload in one `jit` and its arguments, on all devices if sharded."""
    workload = dj.make_workload(name, preset)
    args = dj.make_arrays(workload, jax.random.key(0))
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def put(number: int, array: jax.Array) -> jax.Array:
        divisible = [i for i, n in enumerate(array.shape) if n % mesh.size == 0]
        names: list[str | None] = [None] * array.ndim
        if divisible and sharding in ("rows", "columns"):
            names[divisible[0 if sharding == "rows" else -1]] = "x"
        elif divisible and sharding == f"argument {number}":
            names[max(divisible, key=lambda i: array.shape[i])] = "x"
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*names)))

    if sharding is not None:
        args = tuple(jax.tree.map(partial(put, k), arg) for k, arg in enumerate(args))
    return jax.jit(workload.fn), args


def run_apart(
    command: Sequence[str], bound_s: float, log: pathlib.Path, environment: Mapping[str, str]
) -> tuple[int | None, float]:
    """Runs a command in the checkout, in a session that is killed whole at the bound.

    Returns:
      Exit status, None where it was killed, and seconds from before it was started to its end.
    """
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            return child.wait(bound_s), time.perf_counter() - began
        except subprocess.TimeoutExpired:
            return None, time.perf_counter() - began
        finally:
            with contextlib.suppress(ProcessLookupError):  # it and all that it started ended
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
