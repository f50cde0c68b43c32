"""The native simulator's own door: arrays in, makespans out, on all cores of the process.

Results equal those of `oracle.py` in every bit. The compiled loops are in
`native_kernels.py`, which is imported at the first call: Numba takes a while to load.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import task_edges
from doppler_jax.objective import LINKS
from doppler_jax.simulator.disciplines import check_ranks, find_discipline, rank_order
from doppler_jax.simulator.durations import check_placement, check_placements
from doppler_jax.types import RESIDENT, Costs, Schedule, TaskGraph

if TYPE_CHECKING:
    from doppler_jax.simulator.native_kernels import NativeProblem

SHARE = 1 << 17
"""Tasks to simulate that are worth a thread: about a millisecond."""


def prepare(graph: TaskGraph, costs: Costs) -> "NativeProblem":
    """Returns graph and costs as the compiled code takes them, in O(N + E)."""
    from doppler_jax.simulator.native_kernels import NativeProblem

    n = graph.num_tasks
    senders, readers = task_edges(graph)
    tensor_bytes = np.asarray(costs.tensor_bytes, np.float64)
    by_reader = np.lexsort((graph.edge_tensor, readers))
    by_producer = np.lexsort((readers, graph.edge_tensor, senders))
    # A carried input's home is where its maker runs: such inputs would get a maker beside
    # their home here, and kernels would look the device up in each placement.
    reads = np.flatnonzero(graph.input_home[graph.input_edge_input] != RESIDENT)
    reads = reads[np.lexsort((graph.input_edge_reader[reads], graph.input_edge_input[reads]))]
    inputs, tensors = graph.input_edge_input[reads], graph.edge_tensor[by_producer]
    handling_s = per_byte = np.empty(0)
    if costs.handling_s is not None and costs.handling_s_per_byte is not None:
        handling_s, per_byte = costs.handling_s, costs.handling_s_per_byte
    return NativeProblem(
        compute_s=_floats(costs.compute_s),
        latency_s=_floats(costs.latency_s),
        seconds_per_byte=_floats(costs.seconds_per_byte),
        num_inputs=graph.num_inputs,
        num_tensors=graph.num_tensors,
        home=graph.input_home[inputs].astype(np.uint32),
        producer=senders[by_producer].astype(np.uint32),
        first_move=(len(reads) + _bounds(senders, n)).astype(np.uint32),
        item=np.append(inputs, graph.num_inputs + tensors).astype(np.uint32),
        reader=np.append(graph.input_edge_reader[reads], readers[by_producer]).astype(
            np.uint32
        ),
        num_bytes=np.append(
            np.asarray(costs.input_bytes, np.float64)[inputs], tensor_bytes[tensors]
        ),
        in_first=_bounds(readers, n),
        in_producer=senders[by_reader].astype(np.uint32),
        in_tensor=graph.edge_tensor[by_reader].astype(np.uint32),
        in_bytes=tensor_bytes[graph.edge_tensor[by_reader]],
        handling_s=_floats(handling_s),
        handling_s_per_byte=_floats(per_byte),
    )


def _bounds(rows: np.ndarray, n: int) -> np.ndarray:
    """Returns where the entries of each of n rows begin in a table sorted by row, `[n + 1]`."""
    return np.append(0, np.cumsum(np.bincount(rows, minlength=n))).astype(np.uint32)


def as_devices(graph: TaskGraph, costs: Costs, given: ArrayLike) -> np.ndarray:
    """Returns placements `[B, N]` or `[N]` as uint32 `[B, N]`, or raises a `ValueError`."""
    placements = np.atleast_2d(np.asarray(given))
    if placements.shape[1:] != (graph.num_tasks,) or (
        placements.size and not np.issubdtype(placements.dtype, np.integer)
    ):
        return check_placements(graph, costs, given).astype(np.uint32)
    devices = np.empty(placements.shape, np.uint32)

    def convert(rows: slice) -> bool:
        devices[rows] = placements[rows]
        return bool(0 <= placements[rows].min() <= placements[rows].max() < costs.num_devices)

    if devices.size and not in_threads(convert, len(devices), graph.num_tasks):
        check_placements(graph, costs, placements)  # says which
    return devices


def as_ranks(ranks: np.ndarray) -> np.ndarray:
    """Returns a copy of ranks `[B, N]` in float64."""
    copy = np.empty(ranks.shape)

    def convert(rows: slice) -> bool:
        copy[rows] = ranks[rows]
        return True

    in_threads(convert, len(copy), copy[:1].size)
    return copy


def simulate_native(
    graph: TaskGraph,
    problem: "NativeProblem",
    placements: np.ndarray,
    *,
    links: str = "parallel",
    queue: str = "fifo",
    ranks: np.ndarray | None = None,
    compute_factor: np.ndarray | None = None,
    transfer_factor: np.ndarray | None = None,
    schedule: bool = False,
    transfers: bool = False,
) -> tuple[np.ndarray, ...]:
    """Simulates placements under one draw of noise, if any.

    Args:
      graph: the task graph, N tasks and T tensors.
      problem: what `prepare` made of it and of costs on D devices.
      placements: `[B, N]` uint32 devices, all of which exist (`as_devices`).
      links: one of `LINKS`.
      queue: one of `QUEUES`.
      ranks: `[N]` of all placements or `[B, N]`; None under `fifo`.
      compute_factor: `[N]` multiplies the seconds of each task.
      transfer_factor: `[T, D]` multiplies those of each tensor's transfer to each device.
      schedule: whether starts and finishes are wanted.
      transfers: whether those of transfers are wanted, too.

    Returns:
      Makespans `[B]`, with `schedule` starts and finishes `[B, N]`, and with `transfers` those
      of the transfer of each move, `[B, F + E]` (see `NativeProblem`; moves that bring one
      tensor to one device share it, and where nothing moves they say nothing); float64
      seconds, inf for what never starts or never ends.

    Raises:
      ValueError: ranks are invalid under the queue.
    """
    from doppler_jax.simulator import native_kernels

    discipline = find_discipline(queue)
    batch, n = placements.shape
    order, none = np.empty(0, np.uint32), np.empty((0, 0))
    shared = ranks is None or ranks.ndim == 1
    if shared:
        ranks = check_ranks(graph, queue, ranks)
    keys = none if ranks is None else np.atleast_2d(_floats(ranks))
    if discipline.waits and shared:
        order = rank_order(keys[0]).astype(np.uint32)
    makespan_s = np.zeros(batch)
    times = start_s, finish_s, sent_s, arrival_s = [
        np.empty((batch, size) if wanted else (0, 0))
        for wanted, size in ((schedule, n), (transfers, len(problem.reader)))
        for _ in range(2)
    ]

    def run(rows: slice) -> bool:
        mine = keys if shared else keys[rows]
        share = native_kernels.Rows(
            placements=placements[rows],
            ranks=mine,
            order=order,
            compute_factor=np.empty(0) if compute_factor is None else _floats(compute_factor),
            transfer_factor=none if transfer_factor is None else _floats(transfer_factor),
            makespan_s=makespan_s[rows],
            start_s=start_s[rows],
            finish_s=finish_s[rows],
            sent_s=sent_s[rows],
            arrival_s=arrival_s[rows],
        )
        code = native_kernels.run_rows(
            problem, share, discipline.ranked, discipline.waits, LINKS.index(links)
        )
        return code == native_kernels.OK and (shared or bool(np.isfinite(mine).all()))

    if batch and n and not in_threads(run, batch, n):
        for row in keys:
            check_ranks(graph, queue, row)  # says which task, and why
    return makespan_s, *times[: 2 * (schedule + transfers)]


def simulate_one(
    graph: TaskGraph,
    costs: Costs,
    placement: ArrayLike,
    *,
    links: str = "parallel",
    queue: str = "fifo",
    priority: ArrayLike | None = None,
) -> Schedule:
    """Returns what `simulate_oracle` does, from compiled code: the same in every bit.

    Args:
      graph: the task graph, N tasks.
      costs: its costs on D devices, seconds.
      placement: `[N]` device of each task.
      links: one of `LINKS`.
      queue: one of `QUEUES`.
      priority: `[N]` ranks; None under `fifo`.

    Raises:
      ValueError: as `simulate_oracle` does.
    """
    device, ranks = (
        check_placement(graph, costs.num_devices, placement),
        check_ranks(graph, queue, priority),
    )
    problem = prepare(graph, costs)
    options: dict[str, Any] = {"links": links, "queue": queue, "ranks": ranks}
    _, start_s, finish_s, sent_s, arrival_s = (
        array[0]
        for array in simulate_native(
            graph,
            problem,
            device[None].astype(np.uint32),
            **options,
            schedule=True,
            transfers=True,
        )
    )
    source = np.append(problem.home, device[problem.producer]).astype(np.int64)
    destination, item = device[problem.reader], problem.item.astype(np.int64)
    item = np.where(item < problem.num_inputs, ~item, item - problem.num_inputs)
    # One of all moves that bring an item to a device.
    moved = np.flatnonzero((source != destination) & np.isfinite(sent_s))
    order = np.lexsort((destination[moved], item[moved], sent_s[moved]))
    moved = moved[order]
    pairs = np.stack([item[moved], destination[moved]])
    moved = moved[np.append(True, (pairs[:, 1:] != pairs[:, :-1]).any(0))[: len(moved)]]
    return Schedule(
        placement=device,
        start_s=start_s,
        finish_s=finish_s,
        transfer_tensor=item[moved],
        transfer_source=source[moved],
        transfer_destination=destination[moved],
        transfer_start_s=sent_s[moved],
        transfer_finish_s=arrival_s[moved],
    )


def _floats(array: np.ndarray) -> np.ndarray:
    """Returns the array contiguous, in float64 and writable: of one type to the compiler."""
    return np.require(array, np.float64, ["C_CONTIGUOUS", "WRITEABLE"])


def in_threads(run: Callable[[slice], bool], batch: int, n: int) -> bool:
    """Runs slices of the batch in threads of our own; returns whether all went well.

    Numba's own threads abort or hang where two Python threads use them, or after a fork.
    """
    threads = min(num_cores(), batch * n // SHARE, batch)
    if threads <= 1:
        return run(slice(0, batch))
    # More slices than threads, since another process may take part of a core.
    bounds = np.linspace(0, batch, min(4 * threads, batch) + 1).astype(int).tolist()
    with ThreadPoolExecutor(threads) as pool:
        return all(pool.map(run, map(slice, bounds, bounds[1:])))


def num_cores() -> int:
    """Returns on how many cores this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
