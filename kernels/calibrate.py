"""Measures what kernels and transfers cost here, through the engine itself.

So it is what a placed program will pay, on any devices, dispatch included. The little programs
that show it are below.
"""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.costs.calibration import (
    Calibration,
    KernelTime,
    load_calibration,
    save_calibration,
)
from doppler_jax.costs.digests import kernel_digests
from doppler_jax.costs.observed import Observations, observe
from doppler_jax.programs.blocks import num_bytes, task_graph
from doppler_jax.types import (
    InputBlock,
    InputRef,
    Kernel,
    Plan,
    Ref,
    Schedule,
    ShardedProgram,
    TensorRef,
)

from .calls import WARM_UPS, measure_calls
from .devices import Devices, Options
from .placed import as_devices, load

LEAST = 3  # executions that count, where the seconds for more are not there
PATIENCE = 4  # times the repeats asked for, at most, where they differ much
TOLERANCE = 0.05  # standard error of a task's seconds, from which on they do
KERNELS_AT_ONCE = 8
SMALL_BYTES = 1 << 16  # below, to handle a transfer takes the same whatever its size
LEAST_SHARE = 0.05  # of a transfer's seconds that are left when both ends' are taken off
TRANSFER_BYTES = tuple(4**k for k in range(4, 15))
"""Sizes to choose from, 256 B to 256 MiB."""

MOST_SENT, LEAST_SENT = 16, 4
"""Tensors that each device sends in a `handling_program`, up to 1 MiB and from 4 MiB on."""

_LAG = 3  # turns from making a tensor to reading it
_FIRST_BYTES = 4
_WORK_SIZE = 320
_BYTES_PER_WORK = 1 << 20  # of a transfer, for each task of work that outlasts it

Progress = Callable[[str, int, int], None]
"""Told what is measured next, how many measurements are done, and how many there are."""


def measure_calibration(
    sharded: ShardedProgram,
    devices: Sequence[Any],
    *,
    repeats: int = 9,
    budget_s: float = math.inf,
    path: str | os.PathLike[str] | None = None,
    progress: Progress = lambda what, done, total: None,
    calls: bool = False,
) -> Calibration:
    """Returns what the kernels of a program and transfers of its sizes cost on devices.

    All devices are busy while kernels are measured, as they are in a good placement. Transfers
    are measured one at a time between devices that have nothing else to do, and what both
    spend on them by how much longer devices that have are busy with them, once for all pairs
    of the same kinds. Kernels run on every device, and devices of one kind on one machine share
    the median.

    Args:
      sharded: the program.
      devices: where it is to run, as `dj.compile` takes them.
      repeats: warm executions of each measurement, of which the median counts; up to
        `PATIENCE` times as many on a machine that does other things.
      budget_s: seconds for all of it. Each measurement has its share of what is left, and is
        repeated less where that is short, `LEAST` times in any case.
      path: file to go on from, if it exists; written after every few measurements. What
        is in it is not measured again.
      progress: called before each measurement and after the last.
      calls: whether to measure, too, what calls take beyond their makespans.

    Raises:
      ValueError: `repeats` is below 1, bad devices, or the file is of others or not readable.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; expected a positive integer")
    bench = _Bench(as_devices(devices), repeats, time.monotonic() + budget_s)
    calibration = _begin(bench.devices, path)
    steps = [*_kernel_steps(sharded, calibration), *_transfer_steps(sharded, calibration)]
    if calls and calibration.calls is None:
        steps.append(("calls", _with_calls))
    for done, (what, measure) in enumerate(steps):
        progress(what, done, len(steps))
        calibration = measure(bench.share(len(steps) - done), calibration)
        if path is not None:
            save_calibration(path, calibration)
    progress("done", len(steps), len(steps))
    return calibration


def measure_kernels_again(
    calibration: Calibration,
    sharded: ShardedProgram,
    devices: Sequence[Any],
    *,
    repeats: int = 9,
) -> Calibration:
    """Returns the calibration with the seconds that a program's kernels take now.

    Arguments are those of `measure_calibration`, which gave the calibration.
    """
    bench = _Bench(as_devices(devices), repeats)
    for _, measure in _kernel_steps(sharded, dataclasses.replace(calibration, kernels={})):
        calibration = measure(bench, calibration)
    return calibration


@dataclasses.dataclass(frozen=True)
class _Bench:
    """Runs little programs on the devices."""

    devices: Devices
    repeats: int
    until_s: float = math.inf  # of `time.monotonic`

    def share(self, parts: int) -> "_Bench":
        """Returns a bench with the first of so many equal parts of the time left."""
        now_s = time.monotonic()
        until_s = now_s + max(self.until_s - now_s, 0.0) / parts
        return dataclasses.replace(self, until_s=until_s)

    def rounds(self, count: int) -> Iterator[int]:
        """Yields numbers of executions, the warm-ups first: fewer if time is over."""
        for k in range(WARM_UPS + count):
            if k >= WARM_UPS + LEAST and time.monotonic() > self.until_s:
                return
            yield k

    def finishes(
        self, sharded: ShardedProgram, placements: Sequence[np.ndarray], priority: np.ndarray
    ) -> np.ndarray:
        """Returns when each device ends `[rounds, placements, D]`; placements take turns."""
        plans = [Plan(placement, priority, "priority") for placement in placements]
        steps = [load(sharded, plan, self.devices, Options()) for plan in plans]
        arguments = random_arguments(sharded, np.random.default_rng(0))
        ends_s = []
        for _ in self.rounds(2 * self.repeats):
            turn = np.zeros((len(placements), len(self.devices)))
            for ends, step in zip(turn, steps, strict=True):
                trace = step.run_traced(*arguments)
                np.maximum.at(ends, trace.placement, trace.finish_s)
            ends_s.append(turn)
        return np.array(ends_s[WARM_UPS:])

    def observe(self, sharded: ShardedProgram, placement: np.ndarray) -> Observations:
        """Returns what warm executions of the program show, more of them on a busy machine."""
        step = load(sharded, placement, self.devices, Options())
        arguments = random_arguments(sharded, np.random.default_rng(0))

        traces: list[Schedule] = []
        for k in self.rounds(PATIENCE * self.repeats):
            traces.append(step.run_traced(*arguments))
            done = k + 1 - WARM_UPS
            if done > 0 and done % self.repeats == 0:
                seen = observe(sharded, traces[WARM_UPS:])
                if _error(seen) <= TOLERANCE:
                    return seen
        return observe(sharded, traces[WARM_UPS:])


_Step = tuple[str, Callable[[_Bench, Calibration], Calibration]]


def _begin(devices: Devices, path: str | os.PathLike[str] | None) -> Calibration:
    """Returns the calibration in the file, or an empty one."""
    backend, names = devices.backend, devices.device_names
    if path is None or not pathlib.Path(path).exists():
        return Calibration(
            backend=backend,
            device_names=names,
            capacity_bytes=devices.capacity_bytes,
            overhead_s=np.full(len(names), np.nan),
            kernels={},
            transfers={},
            transfer_noise=float("nan"),
        )
    found = load_calibration(path)
    if (found.backend, found.device_names) != (backend, names):
        raise ValueError(
            f"{path} is of {found.backend} {list(found.device_names)}, not of "
            f"{backend} {list(names)}; remove the file to measure afresh"
        )
    return found


def _kernel_steps(sharded: ShardedProgram, calibration: Calibration) -> Iterator[_Step]:
    """Yields the measurements of the kernels that the calibration lacks."""
    digests = kernel_digests(sharded.kernels)
    one_of_each = {digest: kernel for kernel, digest in digests.items()}
    missing = [k for digest, k in one_of_each.items() if digest not in calibration.kernels]
    for first in range(0, len(missing), KERNELS_AT_ONCE):
        chosen = missing[first : first + KERNELS_AT_ONCE]
        yield f"{len(chosen)} kernels", functools.partial(_with_kernels, measured=chosen)


def _with_kernels(bench: _Bench, before: Calibration, measured: list[Kernel]) -> Calibration:
    program, placement = kernel_program(measured, before.num_devices)
    seen = bench.observe(program, placement)
    kinds = bench.devices.device_kinds
    digests = kernel_digests(measured)
    kernels = {**before.kernels}
    for kernel, digest in digests.items():
        rows = [seen.tasks[digest, d] for d in range(before.num_devices)]
        kernels[digest] = KernelTime(
            name=kernel.name,
            seconds=_pooled_medians(rows, kinds),
            noise=float(np.median([_noise(row) for row in rows])),
        )
    overheads = [seen.overheads[d] for d in range(before.num_devices)]
    overhead_s = np.array(_pooled_medians(overheads, kinds))
    return dataclasses.replace(before, kernels=kernels, overhead_s=overhead_s)


def _pooled_medians(rows: Sequence[list[float]], kinds: Sequence[str]) -> tuple[float, ...]:
    """Returns the median seconds `[D]` of each device, over all devices of its kind.

    By how much two of a kind differ within a second or so is what else the machine did then; a
    placement that believed in it would load one of them more for ever.
    """
    pools: dict[str, list[float]] = {}
    for row, kind in zip(rows, kinds, strict=True):
        pools.setdefault(kind, []).extend(row)
    return tuple(float(np.median(pools[kind])) for kind in kinds)


def _transfer_steps(sharded: ShardedProgram, calibration: Calibration) -> Iterator[_Step]:
    """Yields the measurements of the transfers that the calibration lacks."""
    sizes = _sizes(sharded)
    for s, t in itertools.combinations(range(calibration.num_devices), 2):
        known = calibration.transfers.keys()
        missing = [b for b in sizes if not {(s, t, b), (t, s, b)} <= known]
        if missing:
            measure = functools.partial(_with_transfers, sizes=missing, s=s, t=t)
            yield f"transfers between {s} and {t}", measure


def _sizes(sharded: ShardedProgram) -> list[int]:
    """Returns sizes that cover those of the program's tensors and per-call arguments.

    Some there are always: costs have links, whether anything can be moved or not.
    """
    graph = sharded.graph
    moved = np.concatenate([graph.tensor_bytes, graph.input_bytes[graph.input_home >= 0]])
    moved = moved if moved.size else np.array(TRANSFER_BYTES[:1])
    last = int(np.searchsorted(TRANSFER_BYTES, moved.max()))
    first = max(int(np.searchsorted(TRANSFER_BYTES, moved.min(), side="right")) - 1, 0)
    return list(TRANSFER_BYTES[min(first, len(TRANSFER_BYTES) - 2) : max(last, first + 1) + 1])


def _with_transfers(
    bench: _Bench, before: Calibration, sizes: list[int], s: int, t: int
) -> Calibration:
    # One small size stands for all: measuring them takes long.
    chosen_sizes = sorted({sizes[0], sizes[-1], *(b for b in sizes if b >= SMALL_BYTES)})
    seen = bench.share(1 + len(chosen_sizes)).observe(*transfer_program(sizes, s, t))
    handling = _handling(bench, before, chosen_sizes, s, t)
    ends_s = np.sum([[handling[d, o, b] for b in chosen_sizes] for d, o in ((s, t), (t, s))], 0)
    chosen = {link: seconds for link, seconds in seen.transfers.items() if link[2] in sizes}
    medians = {}
    for (i, j, b), seconds in chosen.items():
        whole_s = float(np.median(seconds))
        rest_s = whole_s - float(np.interp(b, chosen_sizes, ends_s))
        medians[i, j, b] = max(rest_s, LEAST_SHARE * whole_s)
    noise = [_noise(seconds) for seconds in chosen.values()]
    known = [] if np.isnan(before.transfer_noise) else [before.transfer_noise]
    return dataclasses.replace(
        before,
        transfers={**before.transfers, **medians},
        handling={**before.handling, **handling},
        transfer_noise=float(np.median([*known, *noise])),
    )


def _handling(
    bench: _Bench, before: Calibration, sizes: list[int], s: int, t: int
) -> dict[tuple[int, int, int], float]:
    """Returns what a device spends on one end of a transfer, by device, other one and bytes.

    That is by how much later it ends its work if it sends and receives, over how often it does.
    One pair stands for all of the same kinds: like a kernel, it is the device's own work.
    """
    kinds, known = bench.devices.device_kinds, before.handling
    for i, j in sorted({(i, j) for i, j, _ in known}):
        alike = (kinds[i], kinds[j]) == (kinds[s], kinds[t])
        if alike and all((i, j, b) in known and (j, i, b) in known for b in sizes):
            there = {(s, t, b): known[i, j, b] for b in sizes}
            return there | {(t, s, b): known[j, i, b] for b in sizes}
    found = {}
    for done, size in enumerate(sizes):
        sharded, apart, home, priority = handling_program(size, s, t)
        ends_s = bench.share(len(sizes) - done).finishes(sharded, (apart, home), priority)
        apart_s, home_s = np.moveaxis(ends_s, 1, 0)
        later_s = np.median(apart_s - home_s, axis=0) / (2 * num_sent(size))
        for device, other in ((s, t), (t, s)):
            found[device, other, size] = max(float(later_s[device]), 0.0)
    return found


def _with_calls(bench: _Bench, before: Calibration) -> Calibration:
    calls = measure_calls(bench.devices, lambda: bench.rounds(bench.repeats))
    return dataclasses.replace(before, calls=calls)


def _error(seen: Observations) -> float:
    return float(np.median([_noise(row) / len(row) ** 0.5 for row in seen.tasks.values()]))


def _noise(seconds: list[float]) -> float:
    """Returns the log-standard-deviation, of which outliers are no part."""
    logs = np.log(seconds)
    return float(1.4826 * np.median(np.abs(logs - np.median(logs))))


def kernel_program(
    kernels: Sequence[Kernel], num_devices: int
) -> tuple[ShardedProgram, np.ndarray]:
    """Returns a program that runs each kernel once on each device, and its placement.

    All tasks read arguments only, so no device ever waits; every device runs the kernels
    in the given order, after a task that takes on it what the start of a call costs.
    Arguments are the operands of all kernels, flat.
    """
    avals = [aval for kernel in kernels for aval in kernel.operands]
    numbers = itertools.count()
    refs = [tuple(InputRef(next(numbers)) for _ in kernel.operands) for kernel in kernels]
    first_kernel = _fill_kernel(None, 1)
    sharded = _program([first_kernel, *kernels] * num_devices, [(), *refs] * num_devices, avals)
    return sharded, np.repeat(np.arange(num_devices), len(kernels) + 1)


def transfer_program(
    sizes: Sequence[int], source: int, destination: int
) -> tuple[ShardedProgram, np.ndarray]:
    """Returns a chain of tasks to and fro between two devices, and its placement.

    Along it each size, in bytes, is moved once each way, one transfer at a time, after 4
    bytes that take on them what the start of a call costs.
    """
    lengths = [_FIRST_BYTES // 4] * 2 + [size // 4 for size in sizes for _ in range(2)]
    chain = [
        _fill_kernel(read, made)
        for read, made in zip([None, *lengths], [*lengths, 1], strict=True)
    ]
    refs: list[tuple[Ref, ...]] = [(), *((TensorRef(x),) for x in range(len(lengths)))]
    sharded = _program(chain, refs, ())
    return sharded, np.where(np.arange(len(chain)) % 2, destination, source)


def num_sent(size: int) -> int:
    """Returns how many tensors of so many bytes each device sends in a `handling_program`."""
    return min(max((MOST_SENT << 20) // size, LEAST_SENT), MOST_SENT)


def handling_program(
    size: int, first: int, second: int
) -> tuple[ShardedProgram, np.ndarray, np.ndarray, np.ndarray]:
    """Returns a program in which two devices make and read `num_sent` tensors of `size` bytes.

    Between one tensor and the next there is other work, enough for a transfer to end in.

    Returns:
      The program, two placements and a priority: by the first placement each device reads what
      the other made, by the second its own. Each runs as many tasks of a kind by either.
    """
    work, make = _work_kernel(), _fill_kernel(None, size // 4)
    read = _total_kernel(size // 4)
    rows: list[tuple[Kernel, tuple[Ref, ...], tuple[int, int], int]] = []
    made: dict[tuple[int, int], int] = {}
    sent = num_sent(size)
    for turn in range(sent + _LAG):
        for device, other in ((first, second), (second, first)):
            if turn < sent:
                made[device, turn] = len(rows)  # every kernel has one result
                rows.append((make, (), (device, device), turn))
            for _ in range(1 + size // _BYTES_PER_WORK):
                rows.append((work, (InputRef(0),), (device, device), turn))
            if turn >= _LAG:
                operand = TensorRef(made[device, turn - _LAG])
                rows.append((read, (operand,), (other, device), turn))
    kernels, refs, places, rank = zip(*rows, strict=True)
    apart, home = np.array(places).T
    return _program(kernels, refs, work.operands), apart, home, np.array(rank, np.float64)


def random_arguments(sharded: ShardedProgram, rng: np.random.Generator) -> list[jax.Array]:
    """Returns flat arguments that any kernel can take: indices 0, positive numbers."""

    def draw(aval: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(aval.dtype, jnp.floating):
            return jnp.asarray(rng.uniform(0.5, 1.5, aval.shape), aval.dtype)
        return jnp.zeros(aval.shape, aval.dtype)

    return [draw(aval) for aval in sharded.arg_avals]


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@functools.cache
def _work_kernel() -> Kernel:
    """Returns a kernel that takes a CPU core about a millisecond."""
    square = _floats(_WORK_SIZE, _WORK_SIZE)
    return Kernel("work", lambda a: (a @ a,), (square,), (square,))


@functools.cache
def _total_kernel(length: int) -> Kernel:
    """Returns a kernel that reads all of a float32 `[length]`."""
    return Kernel("total", lambda x: (x.sum(keepdims=True),), (_floats(length),), (_floats(1),))


@functools.cache
def _fill_kernel(read: int | None, made: int) -> Kernel:
    """Returns a kernel that makes float32 `[made]` from the first of `[read]`, or of 1."""

    def fn(*operands: jax.Array) -> tuple[jax.Array]:
        first = operands[0][0] if operands else jnp.float32(1.0)
        return (jnp.full((made,), first),)

    operands = () if read is None else (_floats(read),)
    return Kernel(f"fill {made}", fn, operands, (_floats(made),))


def _program(
    kernels: Sequence[Kernel],
    refs: Sequence[tuple[Ref, ...]],
    avals: Sequence[jax.ShapeDtypeStruct],
) -> ShardedProgram:
    """Returns a program without outputs whose graph inputs are its arguments."""
    return ShardedProgram(
        graph=task_graph(kernels, refs, np.zeros(len(kernels)), list(map(num_bytes, avals))),
        names=tuple(f"{kernel.name} #{v}" for v, kernel in enumerate(kernels)),
        kernels=tuple(kernels),
        operands=tuple(refs),
        inputs=tuple(
            InputBlock(i, (0,) * len(aval.shape), aval.shape) for i, aval in enumerate(avals)
        ),
        outputs=(),
        arg_avals=tuple(avals),
        consts=(),
        in_tree=jax.tree.structure((tuple(avals), {})),
        out_tree=jax.tree.structure(()),
    )
