"""The native simulator's own door: arrays in, makespans out, on all cores of the process.

Results equal those of `oracle.py` in every bit. The compiled loops are in
`native_kernels.py`, which is imported at the first call: Numba takes a while to load.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import task_edges
from doppler_jax.objective import LINKS
from doppler_jax.simulator.disciplines import check_ranks, find_discipline, rank_order
from doppler_jax.simulator.durations import check_placement, check_placements
from doppler_jax.types import Costs, Schedule, TaskGraph

if TYPE_CHECKING:
    from doppler_jax.simulator.native_kernels import NativeProblem

SHARE = 1 << 17
"""Tasks to simulate that are worth a thread: about a millisecond."""

PART = 1 << 18
"""Tasks of a part."""


def prepare(graph: TaskGraph, costs: Costs) -> "NativeProblem":
    """Returns graph and costs as the compiled code takes them, in O(N + E)."""
    from doppler_jax.simulator.native_kernels import NativeProblem

    n = graph.num_tasks
    senders, readers = task_edges(graph)
    tensor_bytes = np.asarray(costs.tensor_bytes, np.float64)
    by_reader = np.lexsort((graph.edge_tensor, readers))
    by_producer = np.lexsort((readers, graph.edge_tensor, senders))
    reads = np.flatnonzero(~graph.is_resident[graph.input_edge_input])
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
        maker=graph.input_maker[inputs].astype(np.uint32),
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


class Plans:
    """B placements of a problem, and ranks of each if they differ, as a caller gave them.

    The threads that first simulate them check and copy them: a pass of its own would take a
    tenth of that time.
    """

    def __init__(self, graph: TaskGraph, costs: Costs, placements: ArrayLike) -> None:
        """Takes placements `[B, N]` or `[N]`, or raises a `ValueError` if they are others."""
        given = np.atleast_2d(np.asarray(placements))
        if given.shape[1:] != (graph.num_tasks,) or not np.issubdtype(given.dtype, np.integer):
            given = check_placements(graph, costs, placements)
        self.graph, self.costs, self.problem = graph, costs, prepare(graph, costs)
        self.given: np.ndarray | None = given  # until it is copied
        self.placements = np.empty(given.shape, np.uint32)
        self.ranks: np.ndarray | None = None  # `[B, N]`
        self.order: np.ndarray | None = None  # `[B, N]`, in place of ranks once it is known

    def begin(self, ranks: np.ndarray | None, *, waits: bool) -> None:
        """Takes ranks `[B, N]`, under `in_order` or not."""
        self.ranks = ranks if ranks is None or waits else ranks.copy()
        if ranks is not None and waits:
            self.order = np.empty(ranks.shape, np.uint32)

    def read(self, part: slice) -> dict[str, np.ndarray] | None:
        """Returns fields of `Rows` of a part; None if a device or a rank is invalid."""
        found = {"placements": self.placements[part]}
        if self.given is not None:
            given = self.given[part]
            unsigned = given.view(given.dtype.str.replace("i", "u"))  # negative ones are large
            if unsigned.max() >= self.costs.num_devices:
                return None
            found["placements"][:] = given
        if self.ranks is not None:
            found["ranks"] = self.ranks[part].astype(np.float64)
            if self.ranks.dtype.kind not in "iu" and not np.isfinite(found["ranks"]).all():
                return None
        if self.order is not None:
            found["order"] = self.order[part]
        return found

    def settle(self) -> None:
        """Goes over to the copies, once all parts are there."""
        self.given = None
        if self.order is not None:
            self.ranks = None


def simulate_native(
    plans: Plans,
    *,
    links: str = "parallel",
    queue: str = "fifo",
    ranks: np.ndarray | None = None,
    compute_factor: np.ndarray | None = None,
    transfer_factor: np.ndarray | None = None,
    input_factor: np.ndarray | None = None,
    schedule: bool = False,
    transfers: bool = False,
) -> tuple[np.ndarray, ...]:
    """Simulates plans under one draw of noise, if any.

    Args:
      plans: B placements of N tasks.
      links: one of `LINKS`.
      queue: one of `QUEUES`.
      ranks: `[N]` of all placements, or `[B, N]`, of which plans keep those of the first call;
        None under `fifo`.
      compute_factor: `[N]` multiplies the seconds of each task; given with the others, or not.
      transfer_factor: `[T, D]` multiplies those of each tensor's transfer to each device.
      input_factor: `[I, D]` multiplies those of each graph input's.
      schedule: whether starts and finishes are wanted.
      transfers: whether those of transfers are wanted, too.

    Returns:
      Makespans `[B]`, with `schedule` starts and finishes `[B, N]`, and with `transfers` those
      of the transfer of each move, `[B, F + E]` (see `NativeProblem`; moves that bring one
      tensor to one device share it, and where nothing moves they say nothing); float64
      seconds, inf for what never starts or never ends.

    Raises:
      ValueError: a placement names a device that does not exist, or ranks are invalid under
        the queue.
    """
    from doppler_jax.simulator import native_kernels

    discipline, problem, shared = find_discipline(queue), plans.problem, dict[str, Any]()
    if ranks is None or ranks.ndim == 1:
        ranks, each = check_ranks(plans.graph, queue, ranks), None
        if ranks is not None and discipline.waits:
            shared["order"] = rank_order(ranks)[None].astype(np.uint32)
        elif ranks is not None:
            shared["ranks"] = _floats(ranks[None])
    else:
        each = ranks
    if compute_factor is not None and transfer_factor is not None and input_factor is not None:
        items = np.concatenate([input_factor, transfer_factor])
        shared["factors"] = _floats(compute_factor[None]), _floats(items[None])
    rows = native_kernels.make_rows(
        problem, plans.placements, **shared, schedule=schedule, transfers=transfers
    )
    names, times = rows._fields[-5:], rows[-5:]
    switches = (-1 + ("factors" in shared), discipline.switches, LINKS.index(links))

    def run(parts: Iterator[slice]) -> bool:
        work = native_kernels.make_work(problem)
        for part in parts:
            found = plans.read(part)
            if found is None:
                return False
            found |= {name: array[part] for name, array in zip(names, times, strict=True)}
            mine = rows._replace(**found)
            if native_kernels.run_rows(problem, mine, work, *switches) != native_kernels.OK:
                return False
        return True

    if plans.given is not None:
        plans.begin(each, waits=discipline.waits)
    if plans.placements.size and not in_threads(
        run, len(plans.placements), plans.graph.num_tasks
    ):
        if plans.given is not None:
            check_placements(plans.graph, plans.costs, plans.given)  # says which is invalid
        for row in () if plans.ranks is None else plans.ranks:
            check_ranks(plans.graph, queue, row)  # says which task, and why
    plans.settle()
    return times[: 1 + 2 * (schedule + transfers)]


def simulate_one(
    graph: TaskGraph,
    costs: Costs,
    placement: ArrayLike,
    *,
    priority: ArrayLike | None = None,
    queue: str = "fifo",
    **options: Any,
) -> Schedule:
    """Returns what `simulate_oracle` does, from compiled code: the same in every bit.

    Args:
      graph: the task graph, N tasks.
      costs: its costs on D devices, seconds.
      placement: `[N]` device of each task.
      priority: `[N]` ranks; None under `fifo`.
      queue: one of `QUEUES`.
      **options: links and factors, as `simulate_native` takes them.

    Raises:
      ValueError: as `simulate_oracle` does.
    """
    device = check_placement(graph, costs.num_devices, placement)
    plans, ranks = Plans(graph, costs, device), check_ranks(graph, queue, priority)
    options |= {"queue": queue, "ranks": ranks, "schedule": True, "transfers": True}
    _, *times = simulate_native(plans, **options)
    start_s, finish_s, sent_s, arrival_s = (array[0] for array in times)
    problem = plans.problem
    homes = graph.homes(device)[problem.item[: len(problem.home)]]
    source = np.append(homes, device[problem.producer])
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


def in_threads(run: Callable[[Iterator[slice]], bool], batch: int, n: int) -> bool:
    """Runs parts of the batch in threads of our own; returns whether all went well.

    Numba's own threads abort or hang where two Python threads use them, or after a fork.
    """
    threads = min(num_cores(), batch * n // SHARE, batch)
    if threads <= 1:
        return run(iter([slice(0, batch)]))
    # Each thread takes the next part. Parts become smaller, so that threads end together.
    least, most = max(SHARE // 4 // n, 1), max(PART // n, 1)
    bounds = [0]
    while (left := batch - bounds[-1]) > 0:
        size = min(max(left // (2 * threads), least), most, left)
        bounds.append(bounds[-1] + size)
    parts = map(slice, bounds, bounds[1:])
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(run, parts) for _ in range(threads - 1)]
        try:
            is_good = run(parts)
        finally:
            for _ in parts:  # where this one is stopped the others end, too
                pass
        return all(other.result() for other in others) and is_good


def num_cores() -> int:
    """Returns on how many cores this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
