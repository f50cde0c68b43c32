"""The event simulation as Numba compiles it: the rules of `oracle.py`, bit for bit, fast.

All compiled code of the simulator is in this file, because Numba's cache on disk notices a
change of the file that a function is in, and of no other. Nothing is compiled per graph: one
entry, `run_rows`, takes arrays and integer switches. There are three loops over executions:

- `_in_order`: one pass over the tasks in rank order, for links whose arrivals are known when
  a task starts (`parallel`, `serial`).
- `_by_start`: for the same links under the work-conserving queues. Starts are taken in their
  order (start, key, id). So a task's finish, and with it every arrival, is known when it
  starts, and no heap of events is needed.
- `_by_event`: `duplex` links, on which transfers of several sources compete in time.

Sums are made in the order in which the oracle makes them, without fast-math, so that results
are equal and not merely close. Indices are unsigned: they need no test for negative ones.
Functions that are called for every task are inlined: calls would count references to arrays.
"""

# NumPy scalars and Python ints are one kind to Numba.
# mypy: disable-error-code="assignment, arg-type, return-value"

import sys
from collections.abc import Callable
from typing import NamedTuple

import numba
import numpy as np

Array = np.ndarray

PARALLEL, SERIAL, DUPLEX = 0, 1, 2
"""Links, in the order of `objective.LINKS`."""

OK, TURNED = -1, -2
"""`run_rows` returns `OK`, or the row whose ranks have a reader before its producer."""

ONE = np.uint32(1)
NOBODY = np.uint32(0xFFFFFFFF)


class NativeProblem(NamedTuple):
    """Graph and costs as contiguous arrays; E edges, F reads of graph inputs with a home."""

    compute_s: Array  # [N, D]
    latency_s: Array  # [D, D]
    seconds_per_byte: Array  # [D, D]
    num_tensors: int
    # Edges by reader, then tensor.
    in_first: Array  # [N + 1] uint32, task v reads edges in_first[v] to in_first[v + 1]
    in_producer: Array  # [E] uint32
    in_tensor: Array  # [E] uint32
    in_bytes: Array  # [E]
    # The same edges by producer, then tensor.
    out_first: Array  # [N + 1] uint32
    out_reader: Array  # [E] uint32
    out_tensor: Array  # [E] uint32
    out_bytes: Array  # [E]
    # Reads of graph inputs that have a home, by input.
    home_input: Array  # [F] uint32
    home_device: Array  # [F] uint32
    home_reader: Array  # [F] uint32
    home_bytes: Array  # [F]
    handling_s: Array  # [D], or [0] where devices spend no time on transfers
    handling_s_per_byte: Array  # [D], or [0]


def _jit(function: Callable[..., int]) -> Callable[..., int]:
    """Compiles at the first call, once a machine where a cache can be written."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError as error:  # no folder to keep it in
        print(f"doppler_jax compiles its simulator in every process: {error}", file=sys.stderr)
        return numba.njit(nogil=True)(function)


_inlined = numba.njit(inline="always")


@_inlined
def _order_of(ranks: Array, order: Array) -> None:
    """Writes the tasks by (rank, id): scattered if ranks are a permutation, else sorted."""
    n = len(order)
    is_permutation = True
    for k in range(n):
        order[k] = NOBODY
    for v in range(n):
        rank = ranks[v]
        k = np.uint32(rank) if 0.0 <= rank < n else np.uint32(n)
        if k >= n or k != rank or order[k] != NOBODY:
            is_permutation = False
            break
        order[k] = v
    if not is_permutation:
        order[:] = np.argsort(ranks, kind="mergesort")


@_inlined
def _add_handling(
    problem: NativeProblem, placement: Array, count: Array, size: Array, seen: Array, row: int
) -> None:
    """Adds up transfers and their bytes per task, in the order (reader, tensor).

    `seen` `[T * D]` holds `row` where a tensor's transfer to a device has been counted.
    """
    devices = problem.compute_s.shape[1]
    for v in range(len(count)):
        count[v] = size[v] = 0.0
    for v in range(len(count)):
        here = placement[v]
        for e in range(problem.in_first[v], problem.in_first[v + ONE]):
            u = problem.in_producer[e]
            at = np.uint64(problem.in_tensor[e]) * np.uint64(devices) + np.uint64(here)
            if placement[u] != here and seen[at] != row:
                seen[at] = row
                count[u] += 1.0
                size[u] += problem.in_bytes[e]
                count[v] += 1.0
                size[v] += problem.in_bytes[e]


@_inlined
def _seconds(
    problem: NativeProblem,
    placement: Array,
    compute_factor: Array,
    count: Array,
    size: Array,
    seen: Array,
    row: int,
    seconds: Array,
) -> None:
    """Writes how long every task takes where it is, with noise and handling."""
    for v in range(len(seconds)):
        seconds[v] = problem.compute_s[v, placement[v]]
    if len(compute_factor):
        for v in range(len(seconds)):
            seconds[v] *= compute_factor[v]
    if len(problem.handling_s):
        _add_handling(problem, placement, count, size, seen, row)
        for v in range(len(seconds)):
            each_s = problem.handling_s[placement[v]]
            per_byte = problem.handling_s_per_byte[placement[v]]
            seconds[v] += count[v] * each_s + size[v] * per_byte


@_inlined
def _carry_inputs(
    problem: NativeProblem,
    placement: Array,
    serial: bool,
    link_free_s: Array,
    sent: Array,
    sent_s: Array,
    ready_s: Array,
) -> None:
    """Writes when each task's graph inputs are there; links carry them first, by id."""
    for v in range(len(ready_s)):
        ready_s[v] = 0.0
    for f in range(len(problem.home_input)):
        v, here = problem.home_reader[f], problem.home_device[f]
        there = placement[v]
        wire_s = (
            problem.latency_s[here, there]
            + problem.home_bytes[f] * problem.seconds_per_byte[here, there]
        )
        arrival_s = wire_s
        if serial and here != there:
            # Reads of an input are neighbours, so the last one sent is remembered.
            if sent[there] != problem.home_input[f]:
                sent[there] = problem.home_input[f]
                sent_s[there] = link_free_s[here, there] + wire_s
                link_free_s[here, there] = sent_s[there]
            arrival_s = sent_s[there]
        ready_s[v] = max(ready_s[v], arrival_s)


@_jit
def _in_order(
    problem: NativeProblem,
    placements: Array,
    ranks: Array,
    shared_order: Array,
    compute_factor: Array,
    transfer_factor: Array,
    serial: bool,
    makespan_s: Array,
    start_s: Array,
    finish_s: Array,
) -> int:
    n, devices = problem.compute_s.shape
    noisy, keeps = len(transfer_factor) > 0, len(start_s) > 0
    shared = len(shared_order) > 0
    plain = not noisy and len(compute_factor) == 0 and len(problem.handling_s) == 0
    order = shared_order.copy() if shared else np.empty(n, np.uint32)
    done_s, seconds, free_s = np.empty(n), np.empty(n), np.empty(devices)
    count, size = np.empty(n), np.empty(n)
    seen = np.full(problem.num_tensors * devices * (len(problem.handling_s) > 0), -1)
    ready_s, has_inputs = np.zeros(n), len(problem.home_input) > 0
    link_free_s = np.empty((devices, devices))
    sent, sent_s = np.empty(devices, np.int64), np.empty(devices)
    for b in range(len(placements)):
        placement = placements[b]
        if not shared:
            _order_of(ranks[b], order)
        if not plain:
            _seconds(problem, placement, compute_factor, count, size, seen, b, seconds)
        for k in range(devices):
            free_s[k] = 0.0
        for v in range(n):
            done_s[v] = -1.0
        if serial:
            for k in range(devices):
                sent[k] = -1
                for j in range(devices):
                    link_free_s[k, j] = 0.0
        if has_inputs or serial:
            _carry_inputs(problem, placement, serial, link_free_s, sent, sent_s, ready_s)
            for k in range(devices):
                sent[k] = -1
        latest_s, least_s = 0.0, 0.0
        for k in range(n):
            v = order[k]
            here = placement[v]
            start = max(free_s[here], ready_s[v])
            for e in range(problem.in_first[v], problem.in_first[v + ONE]):
                u = problem.in_producer[e]
                least_s = min(least_s, done_s[u])
                if not serial:
                    source = placement[u]
                    wire_s = (
                        problem.latency_s[source, here]
                        + problem.in_bytes[e] * problem.seconds_per_byte[source, here]
                    )
                    if noisy:
                        wire_s *= transfer_factor[problem.in_tensor[e], here]
                    start = max(start, done_s[u] + wire_s)
            finish = start + (problem.compute_s[v, here] if plain else seconds[v])
            done_s[v] = free_s[here] = finish
            latest_s = max(latest_s, finish)
            if keeps:
                start_s[b, v], finish_s[b, v] = start, finish
            if serial:
                for e in range(problem.out_first[v], problem.out_first[v + ONE]):
                    reader = problem.out_reader[e]
                    there = placement[reader]
                    arrival_s = finish
                    if there != here:
                        x = problem.out_tensor[e]
                        if sent[there] != x:
                            wire_s = (
                                problem.latency_s[here, there]
                                + problem.out_bytes[e] * problem.seconds_per_byte[here, there]
                            )
                            if noisy:
                                wire_s *= transfer_factor[x, there]
                            sent[there] = x
                            sent_s[there] = max(finish, link_free_s[here, there]) + wire_s
                            link_free_s[here, there] = sent_s[there]
                        arrival_s = sent_s[there]
                    ready_s[reader] = max(ready_s[reader], arrival_s)
        if least_s < 0.0:
            return b
        makespan_s[b] = latest_s
    return OK


@_inlined
def _is_before(key: Array, u: np.uint32, v: np.uint32) -> bool:
    return key[u] < key[v] or (key[u] == key[v] and u < v)


@_inlined
def _push_heap(heap: Array, base: int, length: int, key: Array, task: np.uint32) -> None:
    """Adds a task to the binary heap by (key, id) at heap[base : base + length]."""
    i = np.uint32(length)
    while i > 0:
        parent = (i - ONE) >> ONE
        above = heap[base + parent]
        if _is_before(key, above, task):
            break
        heap[base + i] = above
        i = np.uint32(parent)
    heap[base + i] = task


@_inlined
def _pop_heap(heap: Array, base: int, length: int, key: Array) -> np.uint32:
    """Removes and returns the least task of a heap of that length."""
    least, last = heap[base], heap[base + length - ONE]
    end, i = np.uint32(length - ONE), np.uint32(0)
    while True:
        child = np.uint32(2 * i + ONE)
        if child >= end:
            break
        other = np.uint32(child + ONE)
        if other < end and _is_before(key, heap[base + other], heap[base + child]):
            child = other
        if not _is_before(key, heap[base + child], last):
            break
        heap[base + i] = heap[base + child]
        i = child
    if end > 0:
        heap[base + i] = last
    return least


@_inlined
def _segments(placement: Array, stride: int, base: Array) -> None:
    """Writes where each device's part of flat tables begins: its tasks, and one entry more."""
    if stride > 0:
        for d in range(len(base)):
            base[d] = d * stride
        return
    for d in range(len(base)):
        base[d] = 0
    for v in range(len(placement)):
        base[placement[v]] += ONE
    total = np.uint32(0)
    for d in range(len(base)):
        length = base[d]
        base[d] = total
        total = np.uint32(total + length + ONE)


@_inlined
def _release(
    task: np.uint32,
    device: np.uint32,
    ready_s: float,
    ranked: bool,
    key: Array,
    queue_s: Array,
    queue: Array,
    head: Array,
    tail: Array,
    heap: Array,
    base: Array,
    waiting: Array,
    free_s: Array,
    next_s: Array,
) -> None:
    """Lets a task wait for its device; `_by_start` says for what the tables stand."""
    if ranked and ready_s <= free_s[device]:
        _push_heap(heap, base[device], waiting[device], key, task)
        waiting[device] += ONE
        next_s[device] = free_s[device]
        return
    # Sorted in from the end, where what became ready last belongs.
    i, front = tail[device], head[device]
    tail[device] = i + ONE
    queue_s[i + ONE] = np.inf
    while i > front:
        j = i - ONE
        ahead_s, ahead = queue_s[j], queue[j]
        if ahead_s < ready_s or (ahead_s == ready_s and _is_before(key, ahead, task)):
            break
        queue_s[i] = ahead_s
        queue[i] = ahead
        i = j
    queue_s[i] = ready_s
    queue[i] = task
    if not ranked or waiting[device] == 0:
        next_s[device] = max(free_s[device], queue_s[front])


@_inlined
def _first(
    next_s: Array,
    ranked: bool,
    key: Array,
    queue: Array,
    head: Array,
    heap: Array,
    base: Array,
    waiting: Array,
) -> np.uint32:
    """Returns the device whose next task is first by (start, key, id) of all."""
    here, ties = np.uint32(0), 0
    start_s = next_s[0]
    for d in range(1, len(next_s)):
        earlier = next_s[d] < start_s  # selections, since a branch could not be predicted
        ties = 0 if earlier else ties + (next_s[d] == start_s)
        here = np.uint32(d) if earlier else here
        start_s = next_s[d] if earlier else start_s
    if ties > 0 and start_s < np.inf:
        best = heap[base[here]] if ranked and waiting[here] else queue[head[here]]
        for d in range(here + ONE, len(next_s)):
            if next_s[d] == start_s:
                other = heap[base[d]] if ranked and waiting[d] else queue[head[d]]
                if _is_before(key, other, best):
                    here, best = np.uint32(d), other
    return here


WIDE_TABLES = 1 << 20
"""Entries above which tables hold N + D in all instead of N + 1 per device."""


@_inlined
def _by_start(
    problem: NativeProblem,
    placements: Array,
    ranks: Array,
    compute_factor: Array,
    transfer_factor: Array,
    ranked: bool,
    serial: bool,
    makespan_s: Array,
    start_s: Array,
    finish_s: Array,
) -> int:
    # Taken out of the tuple once: each look into it would count references.
    compute_s = problem.compute_s
    latency_s = problem.latency_s
    seconds_per_byte = problem.seconds_per_byte
    in_first = problem.in_first
    out_first = problem.out_first
    out_reader = problem.out_reader
    out_tensor = problem.out_tensor
    out_bytes = problem.out_bytes
    n, devices = compute_s.shape
    noisy, keeps = len(transfer_factor) > 0, len(start_s) > 0
    plain = not noisy and len(compute_factor) == 0 and len(problem.handling_s) == 0
    seconds, count, size = np.empty(n), np.empty(n), np.empty(n)
    seen = np.full(problem.num_tensors * devices * (len(problem.handling_s) > 0), -1)
    ready_s, missing = np.empty(n), np.empty(n, np.int32)  # latest arrival, edges to come
    # Per device, in a part of flat tables from `base` on: tasks that are to become ready
    # later than it is free, sorted by (ready, key, id) from head to tail, inf behind; and, if
    # tasks are ranked, a heap of those that are ready by then.
    stride = n + 1 if (n + 1) * devices <= WIDE_TABLES else 0
    entries = (n + 1) * devices if stride else n + devices
    queue_s, queue = np.empty(entries), np.empty(entries, np.uint32)
    heap = np.empty(entries if ranked else 0, np.uint32)
    base, head = np.empty(devices, np.uint32), np.empty(devices, np.uint32)
    tail = np.empty(devices, np.uint32)
    waiting = np.zeros(devices, np.uint32)  # tasks in the heap
    free_s, next_s = np.empty(devices), np.empty(devices)
    link_free_s = np.empty((devices, devices))
    sent, sent_s = np.empty(devices, np.int64), np.empty(devices)
    key = ready_s
    num_reads = np.empty(n, np.int32)
    for v in range(n):
        num_reads[v] = in_first[v + ONE] - in_first[v]
    entry = np.flatnonzero(num_reads == 0).astype(np.uint32)
    for b in range(len(placements)):
        placement = placements[b]
        if ranked:
            key = ranks[b if len(ranks) > 1 else 0]
        if not plain:
            _seconds(problem, placement, compute_factor, count, size, seen, b, seconds)
        if keeps:
            for v in range(n):
                start_s[b, v] = finish_s[b, v] = np.inf
        _segments(placement, stride, base)
        for k in range(devices):
            head[k] = tail[k] = base[k]
            waiting[k] = 0
            free_s[k] = 0.0
            next_s[k] = queue_s[base[k]] = np.inf
            sent[k] = -1
            for j in range(devices):
                link_free_s[k, j] = 0.0
        _carry_inputs(problem, placement, serial, link_free_s, sent, sent_s, ready_s)
        for k in range(devices):
            sent[k] = -1
        for v in range(n):
            missing[v] = num_reads[v]
        for v in entry:
            _release(
                v, placement[v], ready_s[v], ranked, key, queue_s, queue,
                head, tail, heap, base, waiting, free_s, next_s,
            )  # fmt: skip
        latest_s = 0.0
        for _ in range(n):
            here = _first(next_s, ranked, key, queue, head, heap, base, waiting)
            start = next_s[here]
            if start == np.inf:  # a task that cannot run, and what waits for it
                latest_s = np.inf
                break
            if ranked and waiting[here]:
                u = _pop_heap(heap, base[here], waiting[here], key)
                waiting[here] -= ONE
            else:
                u = queue[head[here]]
                head[here] += ONE
            finish = start + (compute_s[u, here] if plain else seconds[u])
            latest_s = max(latest_s, finish)
            free_s[here] = finish
            if keeps:
                start_s[b, u], finish_s[b, u] = start, finish
            if ranked:
                i = head[here]
                while queue_s[i] <= finish and queue_s[i] < np.inf:
                    _push_heap(heap, base[here], waiting[here], key, queue[i])
                    waiting[here] += ONE
                    i = np.uint32(i + ONE)
                head[here] = i
                next_s[here] = finish if waiting[here] else queue_s[i]
            else:
                next_s[here] = max(finish, queue_s[head[here]])
            for e in range(out_first[u], out_first[u + ONE]):
                v = out_reader[e]
                there = placement[v]
                arrival_s = finish
                if not serial or there != here:
                    x = out_tensor[e]
                    wire_s = (
                        latency_s[here, there] + out_bytes[e] * seconds_per_byte[here, there]
                    )
                    if noisy:
                        wire_s *= transfer_factor[x, there]
                    arrival_s = finish + wire_s
                    if serial:
                        if sent[there] != x:
                            sent[there] = x
                            sent_s[there] = max(finish, link_free_s[here, there]) + wire_s
                            link_free_s[here, there] = sent_s[there]
                        arrival_s = sent_s[there]
                latest = max(ready_s[v], arrival_s)
                ready_s[v] = latest
                left = missing[v] - np.int32(1)
                missing[v] = left
                if left == 0:
                    _release(
                        v, there, latest, ranked, key, queue_s, queue,
                        head, tail, heap, base, waiting, free_s, next_s,
                    )  # fmt: skip
        makespan_s[b] = latest_s
    return OK


@_jit
def _fifo(
    problem: NativeProblem,
    placements: Array,
    compute_factor: Array,
    transfer_factor: Array,
    serial: bool,
    makespan_s: Array,
    start_s: Array,
    finish_s: Array,
) -> int:
    # A copy of its own, without what ranks need: a quarter faster.
    return _by_start(
        problem, placements, np.empty((0, 0)), compute_factor, transfer_factor,
        False, serial, makespan_s, start_s, finish_s,
    )  # fmt: skip


@_jit
def _ranked(
    problem: NativeProblem,
    placements: Array,
    ranks: Array,
    compute_factor: Array,
    transfer_factor: Array,
    serial: bool,
    makespan_s: Array,
    start_s: Array,
    finish_s: Array,
) -> int:
    return _by_start(
        problem, placements, ranks, compute_factor, transfer_factor,
        True, serial, makespan_s, start_s, finish_s,
    )  # fmt: skip


@_inlined
def _is_first(request_s: Array, tensor: Array, item: Array, other: int, best: int) -> bool:
    """Whether waiting transfer `other` goes before `best` by (request, input first, id)."""
    if request_s[other] != request_s[best]:
        return request_s[other] < request_s[best]
    if tensor[other] != tensor[best]:
        return tensor[other] < tensor[best]
    return item[other] < item[best]


@_jit
def _by_event(
    problem: NativeProblem,
    placements: Array,
    ranks: Array,
    shared_order: Array,
    compute_factor: Array,
    transfer_factor: Array,
    ranked: bool,
    waits: bool,
    makespan_s: Array,
    start_s: Array,
    finish_s: Array,
) -> int:
    n, devices = problem.compute_s.shape
    edges, reads = len(problem.out_reader), len(problem.home_reader)
    noisy, keeps = len(transfer_factor) > 0, len(start_s) > 0
    order = shared_order.copy()
    seconds, count, size = np.empty(n), np.empty(n), np.empty(n)
    seen = np.full(problem.num_tensors * devices * (len(problem.handling_s) > 0), -1)
    ready_s, missing = np.empty(n), np.empty(n, np.int32)  # when ready, inputs to come
    done = np.empty(n, np.bool_)
    # Per device, in a part of `table` from `base` on: a heap of its ready tasks, or under
    # `in_order` the tasks that it has still to start.
    table = np.empty(n + devices, np.uint32)
    base, head = np.empty(devices, np.uint32), np.empty(devices, np.uint32)
    length = np.empty(devices, np.uint32)
    running = np.empty(devices, np.uint32)
    end_s, busy = np.empty(devices), np.empty(devices, np.bool_)
    # Transfers, numbered as they are requested; those of a pair of devices wait in a list.
    item, first = np.empty(edges + reads, np.uint32), np.empty(edges + reads, np.uint32)
    is_tensor = np.empty(edges + reads, np.bool_)
    request_s, wire_s = np.empty(edges + reads), np.empty(edges + reads)
    before, behind = np.empty(edges + reads, np.int64), np.empty(edges + reads, np.int64)
    front, back = np.empty((devices, devices), np.int64), np.empty((devices, devices), np.int64)
    to_send = np.empty(devices, np.int64)  # transfers that wait at each source
    sending, goal = np.empty(devices, np.int64), np.empty(devices, np.int64)
    sent_s, receives = np.empty(devices), np.empty(devices, np.bool_)
    mark = np.empty(devices, np.int64)
    for b in range(len(placements)):
        placement = placements[b]
        key = ranks[b if len(ranks) > 1 else 0] if ranked else ready_s
        if waits and len(shared_order) == 0:
            if len(order) == 0:
                order = np.empty(n, np.uint32)
            _order_of(key, order)
            for v in range(n):
                done[v] = False
            for k in range(n):
                v = order[k]
                done[v] = True
                for e in range(problem.in_first[v], problem.in_first[v + ONE]):
                    if not done[problem.in_producer[e]]:
                        return b
        _seconds(problem, placement, compute_factor, count, size, seen, b, seconds)
        if keeps:
            for v in range(n):
                start_s[b, v] = finish_s[b, v] = np.inf
        _segments(placement, 0, base)
        for d in range(devices):
            head[d] = base[d]
            length[d] = 0
            end_s[d] = sent_s[d] = np.inf
            busy[d] = receives[d] = False
            sending[d] = mark[d] = -1
            to_send[d] = 0
            for j in range(devices):
                front[d, j] = back[d, j] = -1
        if waits:
            for k in range(n):
                d = placement[order[k]]
                table[base[d] + length[d]] = order[k]
                length[d] += ONE
        for v in range(n):
            done[v] = False
            missing[v] = problem.in_first[v + ONE] - problem.in_first[v]
        requests = 0
        for f in range(reads):
            here, v = problem.home_device[f], problem.home_reader[f]
            there, i = placement[v], problem.home_input[f]
            if f == 0 or problem.home_input[f - 1] != i:
                for d in range(devices):
                    mark[d] = -1
            if there == here:
                continue
            missing[v] += np.int32(1)
            if mark[there] != i:
                mark[there] = i
                k = requests
                requests += 1
                item[k], first[k], is_tensor[k], request_s[k] = i, f, False, 0.0
                wire_s[k] = (
                    problem.latency_s[here, there]
                    + problem.home_bytes[f] * problem.seconds_per_byte[here, there]
                )
                before[k], behind[k] = back[here, there], -1
                if back[here, there] >= 0:
                    behind[back[here, there]] = k
                else:
                    front[here, there] = k
                back[here, there] = k
                to_send[here] += 1
        for d in range(devices):
            mark[d] = -1
        for v in range(n):
            if missing[v] == 0:
                ready_s[v] = 0.0
                if not waits:
                    d = placement[v]
                    _push_heap(table, base[d], length[d], key, np.uint32(v))
                    length[d] += ONE
        now, latest_s, started = 0.0, 0.0, 0
        while now < np.inf:
            # Completions and arrivals of this instant, and the start of one transfer, until
            # there are none left.
            while True:
                for here in range(devices):
                    if end_s[here] != now:
                        continue
                    u = running[here]
                    end_s[here], busy[here], done[u] = np.inf, False, True
                    for e in range(problem.out_first[u], problem.out_first[u + ONE]):
                        v, x = problem.out_reader[e], problem.out_tensor[e]
                        there = placement[v]
                        if there == here:
                            missing[v] -= np.int32(1)
                            if missing[v] == 0:
                                ready_s[v] = now
                                if not waits:
                                    _push_heap(table, base[there], length[there], key, v)
                                    length[there] += ONE
                        elif mark[there] != x:
                            mark[there] = x
                            k = requests
                            requests += 1
                            item[k], first[k], is_tensor[k], request_s[k] = x, e, True, now
                            wire_s[k] = (
                                problem.latency_s[here, there]
                                + problem.out_bytes[e] * problem.seconds_per_byte[here, there]
                            )
                            if noisy:
                                wire_s[k] *= transfer_factor[x, there]
                            j = back[here, there]
                            while j >= 0 and _is_first(request_s, is_tensor, item, k, j):
                                j = before[j]
                            before[k] = j
                            behind[k] = front[here, there] if j < 0 else behind[j]
                            if j < 0:
                                front[here, there] = k
                            else:
                                behind[j] = k
                            if behind[k] < 0:
                                back[here, there] = k
                            else:
                                before[behind[k]] = k
                            to_send[here] += 1
                for source in range(devices):
                    if sent_s[source] != now:
                        continue
                    k, there = sending[source], goal[source]
                    sent_s[source], sending[source], receives[there] = np.inf, -1, False
                    e, end = first[k], np.uint32(edges if is_tensor[k] else reads)
                    while e < end:
                        x = problem.out_tensor[e] if is_tensor[k] else problem.home_input[e]
                        if x != item[k]:
                            break
                        v = problem.out_reader[e] if is_tensor[k] else problem.home_reader[e]
                        if placement[v] == there:
                            missing[v] -= np.int32(1)
                            if missing[v] == 0:
                                ready_s[v] = now
                                if not waits:
                                    _push_heap(table, base[there], length[there], key, v)
                                    length[there] += ONE
                        e = np.uint32(e + ONE)
                best, source, there = -1, 0, 0
                for s in range(devices):
                    if to_send[s] == 0 or sending[s] >= 0:
                        continue
                    for d in range(devices):
                        k = front[s, d]
                        if k < 0 or receives[d]:
                            continue
                        # Of equal requests of one tensor the smaller destination goes first.
                        if best < 0 or _is_first(request_s, is_tensor, item, k, best):
                            best, source, there = k, s, d
                if best < 0:
                    break
                front[source, there] = behind[best]
                if behind[best] < 0:
                    back[source, there] = -1
                else:
                    before[behind[best]] = -1
                to_send[source] -= 1
                sending[source], goal[source], receives[there] = best, there, True
                sent_s[source] = now + wire_s[best]
            best_task, here = NOBODY, 0
            for d in range(devices):
                if busy[d] or length[d] == 0:
                    continue
                v = table[head[d]]
                if waits and missing[v] > 0:
                    continue
                if best_task == NOBODY or _is_before(key, v, best_task):
                    best_task, here = v, d
            if best_task != NOBODY:
                if waits:
                    head[here] += ONE
                else:
                    _pop_heap(table, base[here], length[here], key)
                length[here] -= ONE
                started += 1
                running[here], busy[here] = best_task, True
                end_s[here] = now + seconds[best_task]
                latest_s = max(latest_s, end_s[here])
                if keeps:
                    start_s[b, best_task], finish_s[b, best_task] = now, end_s[here]
                continue
            now = np.inf
            for d in range(devices):
                now = min(now, end_s[d], sent_s[d])
        makespan_s[b] = latest_s if started == n else np.inf
    return OK


@_jit
def run_rows(
    problem: NativeProblem,
    placements: Array,
    ranks: Array,
    shared_order: Array,
    compute_factor: Array,
    transfer_factor: Array,
    ranked: bool,
    waits: bool,
    links: int,
    makespan_s: Array,
    start_s: Array,
    finish_s: Array,
) -> int:
    """Simulates executions one after another.

    Args:
      problem: graph and costs.
      placements: `[B, N]` uint32.
      ranks: `[B, N]` float64, `[1, N]` for all rows, or `[0, 0]` under `fifo`.
      shared_order: `[N]` uint32, the tasks by (rank, id) where that is one order for all
        rows; else `[0]`.
      compute_factor: `[N]` noise of tasks, or `[0]`.
      transfer_factor: `[T, D]` noise of transfers, or `[0, 0]`.
      ranked: see `disciplines.Discipline`.
      waits: likewise.
      links: `PARALLEL`, `SERIAL` or `DUPLEX`.
      makespan_s: `[B]`, to be written.
      start_s: `[B, N]`, to be written; `[0, 0]` where it is not wanted.
      finish_s: likewise.

    Returns:
      `OK`, or the first row whose `in_order` ranks turn a precedence round.
    """
    if links == DUPLEX:
        return _by_event(
            problem, placements, ranks, shared_order, compute_factor, transfer_factor,
            ranked, waits, makespan_s, start_s, finish_s,
        )  # fmt: skip
    if waits:
        return _in_order(
            problem, placements, ranks, shared_order, compute_factor, transfer_factor,
            links == SERIAL, makespan_s, start_s, finish_s,
        )  # fmt: skip
    if ranked:
        return _ranked(
            problem, placements, ranks, compute_factor, transfer_factor,
            links == SERIAL, makespan_s, start_s, finish_s,
        )  # fmt: skip
    return _fifo(
        problem, placements, compute_factor, transfer_factor,
        links == SERIAL, makespan_s, start_s, finish_s,
    )  # fmt: skip
