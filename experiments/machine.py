"""The devices that a study measures on, and the one way to measure: in turns, the first cold.

Isolated devices (a Ray process with a core each) are chosen where there is no accelerator and
the machine has as many cores: the CPU devices of this process share its cores.
"""

import contextlib
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike

import doppler_jax as dj
from doppler_jax.engine.placed import as_devices
from doppler_jax.engine.stage3 import choose_backend, open_devices
from doppler_jax.problems import Chosen
from doppler_jax.programs.workloads import Workload
from doppler_jax.training.paired import Measure
from experiments.catalogue import Problem

Measured = Problem | Chosen
"""A problem with its program and its workload."""

SHARDINGS = ("rows", "columns", "argument 0", "argument 1")
"""How arguments are sharded: all along their first, or their last, dimension that divides,
or one of them along its largest and the others replicated."""

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

    def pair_measure(self, problem: Measured, seed: int = 0) -> Measure:
        """Returns what runs two placements of a problem in alternation."""
        assert problem.sharded is not None
        args = arguments(problem, seed)
        return dj.make_paired_measure(problem.sharded, args, self.devices)


def arguments(problem: Measured, seed: int = 0) -> tuple[Any, ...]:
    """Returns random arguments of a problem's workload."""
    assert problem.workload is not None
    return dj.make_arrays(problem.workload, jax.random.key(seed))


def makespan_s(step: dj.PlacedFunction, args: Sequence[Any]) -> float:
    """Runs a placed function and returns the makespan of its trace, in seconds."""
    step(*args)
    assert step.trace is not None
    return float(step.trace.finish_s.max(initial=0.0))


def measure_placements(
    machine: Machine, problem: Measured, placements: Mapping[str, ArrayLike], rounds: int
) -> dict[str, list[float]]:
    """Returns the makespans of each placement `[N]` in warm rounds, in seconds."""
    assert problem.sharded is not None
    args = arguments(problem)
    steps = {name: machine.compile(problem.sharded, p) for name, p in placements.items()}
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


class Pinned(contextlib.AbstractContextManager["Pinned"]):
    """A process on cores of its own that times plain JAX when told to: the parent's end.

    It has those cores and no others, like an isolated device. The child reads one JSON request
    per line and answers with one line; requests to several children may overlap.
    """

    def __init__(self, cores: Sequence[int], num_devices: int = 1) -> None:
        command = [sys.executable, "-m", "experiments.machine"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment["JAX_NUM_CPU_DEVICES"] = str(num_devices)
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a first call is a cold one
        if len(cores) == 1:
            environment["NPROC"] = "1"
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # of this thread; the child begins with it
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        finally:
            os.sched_setaffinity(0, before)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: Any) -> None:
        """Sends a request, see `_make`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def answer(self) -> float:
        """Waits for the answer to the oldest request without one: seconds of a call.

        Raises:
          RuntimeError: the process ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a pinned process ended with code {self._process.wait()}")
        return float(json.loads(line))

    def seconds(self, **request: Any) -> float:
        """Sends a request and waits for its answer."""
        self.ask(**request)
        return self.answer()

    def __exit__(self, *_: object) -> None:
        """Ends the process, which may be at work."""
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Answers the requests to a pinned process until there are no more."""
    runs: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        if line not in runs:
            runs[line] = _make(**json.loads(line))
        began = time.perf_counter()
        runs[line]()
        print(json.dumps(time.perf_counter() - began), flush=True)


def _make(workload: str, preset: str, sharding: str | None = None) -> Callable[[], Any]:
    """Returns what a request times: a whole workload in one `jit`."""
    named = dj.make_workload(workload, preset)
    args = dj.make_arrays(named, jax.random.key(0))
    if sharding is not None:
        args = _shard(args, sharding)
    fn = jax.jit(named.fn)
    return lambda: jax.block_until_ready(fn(*args))


def _shard(args: tuple[Any, ...], sharding: str) -> tuple[Any, ...]:
    """Returns the arguments on all devices, see `SHARDINGS`."""
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


if __name__ == "__main__":
    main()
