"""Peak memory of one execution, compiled: the rule of `memory.residency`, for use in searches.

Where sizes are whole numbers below 2**53, as bytes are, sums are exact and the result is that
of `memory.peak_memory_bytes` in every bit; else they differ by rounding, for sums are made in
another order there.
"""

# NumPy scalars and Python ints are one kind to Numba.
# mypy: disable-error-code="assignment, arg-type, return-value, call-overload"

from typing import NamedTuple

import numba
import numpy as np

from doppler_jax.native import inner, jit
from doppler_jax.simulator.memory import stay_to_the_end
from doppler_jax.simulator.native_kernels import (
    NativeProblem,
    Rows,
    make_rows,
    sort_by_key,
)
from doppler_jax.types import RESIDENT, Costs, TaskGraph

Array = np.ndarray

MAKES, MADE = RESIDENT - 1, RESIDENT - 2


class MemoryProblem(NamedTuple):
    """What may lie in memory: X items as in `NativeProblem`, and who reads them."""

    item_bytes: Array  # [X]
    maker: Array  # [X] uint32 task, or NOBODY
    home: Array  # [X] int64 device of an input, or RESIDENT; MADE: its maker's; MAKES: a tensor
    stays: Array  # [X] bool, whether it stays at its home to the end, read or not
    first: Array  # [X] uint32, item x is read by reader[first[x]] to reader[end[x]]
    end: Array  # [X] uint32
    reader: Array  # [F + E + R] uint32, of the moves, then of R reads of resident inputs
    enough_bytes: Array  # [D], see `peak_bytes`
    own_first: Array  # [N + 1] uint32, where in `own` the resident inputs of each task begin
    own: Array  # [R] uint32


class MemoryWork(NamedTuple):
    """Room to work in: S stays, each of one item on one device, at most X + F + E + R."""

    device: Array  # [S] uint32
    item: Array  # [S] uint32
    time_s: Array  # [2 S] when each stay ends, then when each begins
    order: Array  # [2 S] uint32
    spare: Array  # [2 S] uint32
    last: Array  # [D] int64, the item that was last found on each device
    stay: Array  # [D] int64, and its stay
    held: Array  # [D] bytes
    peak: Array  # [D] bytes, what `peak_bytes` finds


def prepare_memory(
    graph: TaskGraph, costs: Costs, problem: NativeProblem, enough_bytes: Array
) -> MemoryProblem:
    """Returns what `peak_bytes` takes of a problem, in O(N + E).

    Args:
      graph: the task graph.
      costs: sizes, and the number of devices D.
      problem: what `native.prepare` made of them.
      enough_bytes: `[D]`, see `peak_bytes`; 0 for exact peaks.
    """
    items = graph.num_inputs + graph.num_tensors
    resident = np.flatnonzero(graph.is_resident[graph.input_edge_input])
    resident = resident[np.argsort(graph.input_edge_input[resident], kind="stable")]
    item = np.append(problem.item, graph.input_edge_input[resident].astype(np.uint32))
    first = np.zeros(items, np.uint32)
    first[item[::-1]] = np.arange(len(item), dtype=np.uint32)[::-1]
    home = np.where(graph.input_maker >= 0, MADE, graph.input_home)
    stays = np.append(graph.input_maker >= 0, stay_to_the_end(graph, costs))
    owner = graph.input_edge_reader[resident]
    by_owner = np.argsort(owner, kind="stable")
    return MemoryProblem(
        item_bytes=np.append(costs.input_bytes, costs.tensor_bytes).astype(np.float64),
        maker=np.append(graph.input_maker, graph.tensor_producer).astype(np.uint32),
        home=np.append(home, np.full(graph.num_tensors, MAKES)).astype(np.int64),
        stays=stays,
        first=first,
        end=(first + np.bincount(item, minlength=items)).astype(np.uint32),
        reader=np.append(problem.reader, owner).astype(np.uint32),
        enough_bytes=np.array(enough_bytes, np.float64),
        own_first=np.searchsorted(owner[by_owner], np.arange(graph.num_tasks + 1)).astype(
            np.uint32
        ),
        own=graph.input_edge_input[resident][by_owner].astype(np.uint32),
    )


def make_memory_work(memory: MemoryProblem) -> MemoryWork:
    """Returns the room that `peak_bytes` needs; one for each thread."""
    most, devices = len(memory.item_bytes) + len(memory.reader), len(memory.enough_bytes)
    device, item, order, spare = (np.empty(k * most, np.uint32) for k in (1, 1, 2, 2))
    last, stay = np.empty((2, devices), np.int64)
    held, peak = np.empty((2, devices))
    return MemoryWork(device, item, np.empty(2 * most), order, spare, last, stay, held, peak)


@inner
def _write_stays(memory: MemoryProblem, work: MemoryWork, rows: Rows) -> int:
    """Writes what lies on which device when; returns how many stays there are."""
    stays, most = np.uint32(0), np.uint32(len(work.device))
    begin_s, end_s = work.time_s[most:], work.time_s[:most]
    placement, sent_s = rows.placements[0], rows.sent_s[0]
    for d in range(len(work.last)):
        work.last[d] = -1
    for x in range(len(memory.item_bytes)):
        first, end, home = memory.first[x], memory.end[x], memory.home[x]
        if first == end and not memory.stays[x]:
            continue  # an input that nobody reads lies nowhere
        own = stays
        if home != RESIDENT:
            here = placement[memory.maker[x]] if home < RESIDENT else np.uint32(home)
            work.device[own], work.item[own] = here, x
            begin_s[own] = rows.start_s[0, memory.maker[x]] if home == MAKES else 0.0
            end_s[own] = np.inf if memory.stays[x] else 0.0
            work.last[here], work.stay[here] = x, own
            stays += np.uint32(1)
        for k in range(first, end):
            v = memory.reader[k]
            there = placement[v]
            if work.last[there] != x:
                work.last[there], work.stay[there] = x, stays
                work.device[stays], work.item[stays] = there, x
                begin_s[stays] = 0.0 if home == RESIDENT else sent_s[k]
                end_s[stays] = np.inf if home == RESIDENT else 0.0
                stays += np.uint32(1)
            stay = work.stay[there]
            end_s[stay] = max(end_s[stay], rows.finish_s[0, v])
            if stay != own and home != RESIDENT:
                end_s[own] = max(end_s[own], rows.arrival_s[0, k])
    return stays


@jit
def peak_bytes(memory: MemoryProblem, work: MemoryWork, rows: Rows) -> None:
    """Writes the most memory that each device holds at any time, in O((N + E) log N).

    At one instant memory is freed before it is allocated. A device on which all that ever lies
    there sums up to at most its `enough_bytes` is not looked at closer: the sum is written,
    which is an upper bound. A search that asks whether a placement fits gives the capacities.

    Args:
      memory: what `prepare_memory` returns.
      work: what `make_memory_work` returns; its `peak` is what is found.
      rows: an execution of one row with all its times, as `run_rows` writes them.
    """
    stays = _write_stays(memory, work, rows)
    most, time_s, peak = np.uint32(len(work.device)), work.time_s, work.peak
    for d in range(len(peak)):
        peak[d] = work.held[d] = 0.0
    for j in range(stays):
        if time_s[most + j] < time_s[j]:
            peak[work.device[j]] += memory.item_bytes[work.item[j]]
    for d in range(len(peak)):
        work.last[d] = peak[d] > memory.enough_bytes[d]  # whether to look closer
        if work.last[d]:
            peak[d] = 0.0
    events = 0
    for part in range(2):  # ends before beginnings
        for j in range(stays):
            event = np.uint32(part * most + j)
            lies = time_s[most + j] < time_s[j] and time_s[event] < np.inf
            if lies and work.last[work.device[j]]:
                work.order[events] = event
                events += 1
    sort_by_key(time_s, work.order[:events], work.spare[:events])
    for i in range(events):
        event = work.order[i]
        j = event % most
        d, size = work.device[j], memory.item_bytes[work.item[j]]
        work.held[d] += size if event >= most else -size
        peak[d] = max(peak[d], work.held[d])


def warm() -> None:
    """Compiles `peak_bytes`."""
    from doppler_jax.costs.build import from_edge_delays
    from doppler_jax.simulator.native import prepare

    graph, costs = from_edge_delays([1.0], [], num_devices=1)
    problem = prepare(graph, costs)
    memory = prepare_memory(graph, costs, problem, np.zeros(1))
    rows = make_rows(problem, np.zeros((1, 1), np.uint32))
    peak_bytes.compile(tuple(map(numba.typeof, (memory, make_memory_work(memory), rows))))
