"""The event simulation compiled by Numba: how fast native cores can be.

The rules of `simulator/oracle.py` in float64, one placement at a time, threads over the
batch. What makes it faster than a translation: starts are taken in their order (start,
ready, id), so that a task's finish, and with it every arrival, is known when it starts
and no heap of events is needed; and a device's ready queue is kept sorted by insertion
from its end, where a task that became ready last belongs, so that the next to start is at
its front. (An insertion costs what the queue is long; on the graph of 229 tasks binary
heaps were a tenth slower.) Branches that cannot be predicted are avoided, and functions
are inlined in Numba's own code: calls would count references to every array.
"""

from collections.abc import Callable
from typing import NamedTuple

import numba
import numpy as np

from doppler_jax.types import RESIDENT, Costs, TaskGraph

Array = np.ndarray
MIN_SHARE = 32
"""Placements that are worth waking a thread for."""

ONE = np.uint32(1)  # unsigned indices need no test for negative ones


class _Problem(NamedTuple):
    """Graph and costs for the compiled loop; edges are grouped by the task that sends them."""

    compute_s: Array  # [N, D]
    latency_s: Array  # [D, D]
    seconds_per_byte: Array  # [D, D]
    entry: Array  # [...] uint32, tasks that read no tensor
    num_reads: Array  # [N] int32, edges into each task
    first_edge: Array  # [N + 1] uint32, task u sends from first_edge[u] on
    edge_tensor: Array  # [E] int64, ascending within a task
    edge_reader: Array  # [E] uint32
    edge_bytes: Array  # [E]
    input_tensor: Array  # [F] int64, graph inputs with a home, numbered after tensors
    input_home: Array  # [F] uint32
    input_reader: Array  # [F] uint32
    input_bytes: Array  # [F]


def makespans_s(
    graph: TaskGraph,
    costs: Costs,
    placements: np.ndarray,
    threads: int = 1,
    *,
    links: str = "parallel",
) -> np.ndarray:
    """Returns the makespans `[B]` of placements under the `fifo` queue, float64 seconds.

    Args:
      graph: the task graph.
      costs: its costs, seconds.
      placements: `[B, N]` int, device of each task.
      threads: native threads that share the batch, fewer where it is small.
      links: `parallel`, or `serial`: an ordered pair of devices carries one transfer at a
        time, graph inputs first, then in the order of the producers' finishes and of ids.

    Raises:
      ValueError: a placement names no device, `links` is unknown, or there are not that
        many threads.
    """
    if links not in _SENDERS:
        raise ValueError(f"unknown links {links!r}; known: {', '.join(_SENDERS)}")
    rows = np.ascontiguousarray(placements, np.int32)
    if rows.ndim != 2 or rows.shape[1] != graph.num_tasks:
        raise ValueError(f"placements have shape {rows.shape}, not [B, {graph.num_tasks}]")
    if rows.size and (rows.min() < 0 or rows.max() >= costs.num_devices):
        raise ValueError(f"a placement names a device outside 0 to {costs.num_devices - 1}")
    job = (_make_problem(graph, costs), _SENDERS[links], rows.view(np.uint32))
    makespans = np.empty(len(rows))
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        threads = min(threads, 1 + len(rows) // MIN_SHARE)
        if threads == 1:
            _simulate_rows(*job, makespans)
        else:
            _simulate_batch(*job, makespans, threads)
    finally:
        numba.set_num_threads(before)
    return makespans


def _make_problem(graph: TaskGraph, costs: Costs) -> _Problem:
    n = graph.num_tasks
    producer = graph.tensor_producer[graph.edge_tensor]
    order = np.lexsort((graph.edge_tensor, producer))
    num_reads = np.bincount(graph.edge_reader, minlength=n)
    home = graph.input_home[graph.input_edge_input]
    moved = np.flatnonzero(home != RESIDENT)
    moved = moved[np.argsort(graph.input_edge_input[moved], kind="stable")]
    inputs = graph.input_edge_input[moved]
    return _Problem(
        compute_s=np.ascontiguousarray(costs.compute_s, np.float64),
        latency_s=np.ascontiguousarray(costs.latency_s, np.float64),
        seconds_per_byte=np.ascontiguousarray(costs.seconds_per_byte, np.float64),
        entry=np.flatnonzero(num_reads == 0).astype(np.uint32),
        num_reads=num_reads.astype(np.int32),
        first_edge=np.searchsorted(producer[order], np.arange(n + 1)).astype(np.uint32),
        edge_tensor=graph.edge_tensor[order].astype(np.int64),
        edge_reader=graph.edge_reader[order].astype(np.uint32),
        edge_bytes=np.asarray(costs.tensor_bytes, np.float64)[graph.edge_tensor[order]],
        input_tensor=(graph.num_tensors + inputs).astype(np.int64),
        input_home=home[moved].astype(np.uint32),
        input_reader=graph.input_edge_reader[moved].astype(np.uint32),
        input_bytes=np.asarray(costs.input_bytes, np.float64)[inputs],
    )


@numba.njit(inline="always")
def _send_parallel(
    made_s: float,
    wire_s: float,
    tensor: int,
    here: int,
    there: int,
    link_free_s: Array,
    sent: Array,
    sent_s: Array,
) -> float:
    """Returns when a tensor made at `made_s` on `here` is on device `there`."""
    return made_s + wire_s


@numba.njit(inline="always")
def _send_serial(
    made_s: float,
    wire_s: float,
    tensor: int,
    here: int,
    there: int,
    link_free_s: Array,
    sent: Array,
    sent_s: Array,
) -> float:
    """As `_send_parallel`, after what the link was given before; once per destination."""
    if here == there:
        arrival_s = made_s
    else:
        if sent[there] != tensor:
            sent[there] = tensor
            sent_s[there] = max(made_s, link_free_s[here, there]) + wire_s
            link_free_s[here, there] = sent_s[there]
        arrival_s = sent_s[there]
    return arrival_s


_SENDERS = {"parallel": _send_parallel, "serial": _send_serial}


@numba.njit(inline="always")
def _first(next_s: Array, queue_s: Array, queue: Array, head: Array) -> np.uint32:
    """Returns the device whose first task is first by (start, ready, id) of all."""
    best, ties = np.uint32(0), 0
    start_s = next_s[0]
    for d in range(1, len(next_s)):
        earlier = next_s[d] < start_s
        ties = 0 if earlier else ties + (next_s[d] == start_s)
        best = np.uint32(d) if earlier else best
        start_s = next_s[d] if earlier else start_s
    if ties > 0 and start_s < np.inf:
        for d in range(best + ONE, len(next_s)):
            if next_s[d] == start_s:
                i, j = head[d], head[best]
                ready_s, least_s = queue_s[d, i], queue_s[best, j]
                if ready_s < least_s or (ready_s == least_s and queue[d, i] < queue[best, j]):
                    best = np.uint32(d)
    return best


@numba.njit(inline="always")
def _push(
    task: int,
    device: int,
    ready_s: float,
    queue_s: Array,
    queue: Array,
    head: Array,
    tail: Array,
    free_s: Array,
    next_s: Array,
) -> None:
    """Queues a task on its device by (ready, id)."""
    i, front = tail[device], head[device]
    tail[device] = i + ONE
    queue_s[device, i + ONE] = np.inf
    while i > front:
        j = i - ONE
        ahead_s = queue_s[device, j]
        if ahead_s < ready_s or (ahead_s == ready_s and queue[device, j] < task):
            break
        queue_s[device, i] = ahead_s
        queue[device, i] = queue[device, j]
        i = j
    queue_s[device, i] = ready_s
    queue[device, i] = task
    next_s[device] = max(free_s[device], queue_s[device, front])


@numba.njit
def _simulate_rows(
    problem: _Problem, send: Callable[..., float], placements: Array, makespans: Array
) -> None:
    """Simulates placements `[B, N]` one after another; `send` is one of `_SENDERS`."""
    (compute_s, latency_s, seconds_per_byte, entry, num_reads, first_edge) = problem[:6]
    (edge_tensor, edge_reader, edge_bytes) = problem[6:9]
    (input_tensor, input_home, input_reader, input_bytes) = problem[9:]
    n, d = compute_s.shape
    ready_s, missing = np.empty(n), np.empty(n, np.int32)  # latest arrival, reads to come
    # Per device: its queue from head to tail, inf behind; when it is idle, when next busy.
    queue_s, queue = np.empty((d, n + 1)), np.empty((d, n + 1), np.uint32)
    head, tail = np.empty(d, np.uint32), np.empty(d, np.uint32)
    free_s, next_s = np.empty(d), np.empty(d)
    link_free_s, sent, sent_s = np.empty((d, d)), np.empty(d, np.int64), np.empty(d)
    for b in range(len(placements)):
        placement = placements[b]
        for v in range(n):  # loops: assignments to slices are slower here
            ready_s[v] = 0.0
            missing[v] = num_reads[v]
        for k in range(d):
            head[k] = tail[k] = 0
            free_s[k] = 0.0
            next_s[k] = queue_s[k, 0] = np.inf
            sent[k] = -1
            for j in range(d):
                link_free_s[k, j] = 0.0
        for f in range(len(input_tensor)):
            v, here = input_reader[f], input_home[f]
            there = placement[v]
            wire_s = latency_s[here, there] + input_bytes[f] * seconds_per_byte[here, there]
            arrival_s = send(
                0.0, wire_s, input_tensor[f], here, there, link_free_s, sent, sent_s
            )
            ready_s[v] = max(arrival_s, ready_s[v])
        for v in entry:
            _push(v, placement[v], ready_s[v], queue_s, queue, head, tail, free_s, next_s)
        makespan_s = 0.0
        for _ in range(n):
            here = _first(next_s, queue_s, queue, head)
            if next_s[here] == np.inf:  # a task that cannot run, or waits for such a one
                makespan_s = np.inf
                break
            i = head[here]
            u = queue[here, i]
            finish_s = next_s[here] + compute_s[u, here]
            makespan_s = max(makespan_s, finish_s)
            head[here] = i + ONE
            free_s[here] = finish_s
            next_s[here] = max(finish_s, queue_s[here, i + ONE])
            for e in range(first_edge[u], first_edge[u + ONE]):
                v = edge_reader[e]
                there = placement[v]
                wire_s = latency_s[here, there] + edge_bytes[e] * seconds_per_byte[here, there]
                arrival_s = send(
                    finish_s, wire_s, edge_tensor[e], here, there, link_free_s, sent, sent_s
                )
                latest_s = max(arrival_s, ready_s[v])
                ready_s[v] = latest_s
                left = missing[v] - np.int32(1)
                missing[v] = left
                if left == 0:
                    _push(v, there, latest_s, queue_s, queue, head, tail, free_s, next_s)
        makespans[b] = makespan_s


@numba.njit(parallel=True)
def _simulate_batch(
    problem: _Problem,
    send: Callable[..., float],
    placements: Array,
    makespans: Array,
    threads: int,
) -> None:
    """Gives every thread its share of the placements."""
    batch = len(placements)
    for i in numba.prange(threads):
        share = slice(i * batch // threads, (i + 1) * batch // threads)
        _simulate_rows(problem, send, placements[share], makespans[share])
