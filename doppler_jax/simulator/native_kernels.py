"""The event simulation as Numba compiles it: the rules of `oracle.py`, bit for bit, fast.

Nothing is compiled per graph: one entry, `run_rows`, takes arrays and integer switches. There
are three loops over executions:

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
# mypy: disable-error-code="assignment, arg-type, return-value, call-overload"

from typing import NamedTuple

import numpy as np

from doppler_jax.native import inlined, jit

Array = np.ndarray

PARALLEL, SERIAL, DUPLEX = 0, 1, 2
"""Links, in the order of `objective.LINKS`."""

OK = -1
"""What `run_rows` returns if no row's ranks have a reader before its producer."""

ONE = np.uint32(1)
NOBODY = np.uint32(0xFFFFFFFF)

WIDE_TABLES = 1 << 20
"""Entries above which tables hold N + D in all instead of N + 1 per device."""


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


class Rows(NamedTuple):
    """B executions: what they are of, and where their times are written."""

    placements: Array  # [B, N] uint32
    ranks: Array  # [B, N] float64, [1, N] for all rows, or [0, 0] under `fifo`
    order: Array  # [N] uint32, the tasks by (rank, id) if that is one for all rows; else [0]
    compute_factor: Array  # [N] noise of tasks, or [0]
    transfer_factor: Array  # [T, D] noise of transfers, or [0, 0]
    makespan_s: Array  # [B], to be written
    start_s: Array  # [B, N], to be written; [0, 0] where it is not wanted
    finish_s: Array  # likewise


class Links(NamedTuple):
    """Serial links, and what of the tensor in hand has been sent."""

    free_s: Array  # [D, D] when a link has carried all that was requested
    sent: Array  # [D] int64, the tensor that was last sent to each device
    sent_s: Array  # [D] when it is there


@jit
def _write_order(ranks: Array, order: Array) -> None:
    """Writes the tasks by (rank, id): scattered if ranks are a permutation, else sorted."""
    n = len(order)
    order[:] = NOBODY
    for v in range(n):
        rank = ranks[v]
        k = np.uint32(rank) if 0.0 <= rank < n else np.uint32(n)
        if k >= n or k != rank or order[k] != NOBODY:
            order[:] = np.argsort(ranks, kind="mergesort")
            return
        order[k] = v


@jit
def _write_seconds(
    problem: NativeProblem, rows: Rows, b: int, seen: Array, seconds: Array
) -> None:
    """Writes how long every task takes where it is, with noise and handling.

    `seen` `[T, D]` holds the row for which a tensor's transfer to a device was last counted;
    transfers and their bytes are added up in the order (reader, tensor).
    """
    placement, noisy = rows.placements[b], len(rows.compute_factor) > 0
    for v in range(len(seconds)):
        factor = rows.compute_factor[v] if noisy else 1.0
        seconds[v] = problem.compute_s[v, placement[v]] * factor
    if len(problem.handling_s) == 0:
        return
    count, size = np.zeros(len(seconds)), np.zeros(len(seconds))
    for v in range(len(seconds)):
        here = placement[v]
        for e in range(problem.in_first[v], problem.in_first[v + 1]):
            u, x = problem.in_producer[e], problem.in_tensor[e]
            if placement[u] != here and seen[x, here] != b:
                seen[x, here] = b
                count[u] += 1.0
                size[u] += problem.in_bytes[e]
                count[v] += 1.0
                size[v] += problem.in_bytes[e]
    for v in range(len(seconds)):
        each_s = problem.handling_s[placement[v]]
        per_byte = problem.handling_s_per_byte[placement[v]]
        seconds[v] += count[v] * each_s + size[v] * per_byte


@inlined
def _move_s(problem: NativeProblem, here: int, there: int, size: float) -> float:
    return problem.latency_s[here, there] + size * problem.seconds_per_byte[here, there]


@inlined
def _arrival_s(
    links: Links, serial: bool, here: int, there: int, item: int, made_s: float, move_s: float
) -> float:
    """Returns when what was made at `made_s` on `here` is on `there`; once per destination."""
    arrival_s = made_s + move_s
    if serial:
        arrival_s = made_s
        if here != there:
            if links.sent[there] != item:
                links.sent[there] = item
                links.sent_s[there] = max(made_s, links.free_s[here, there]) + move_s
                links.free_s[here, there] = links.sent_s[there]
            arrival_s = links.sent_s[there]
    return arrival_s


@jit
def _make_links(devices: int) -> Links:
    square = np.empty((devices, devices))
    return Links(square, np.empty(devices, np.int64), np.empty(devices))


@inlined
def _carry_inputs(
    problem: NativeProblem, placement: Array, links: Links, serial: bool, ready_s: Array
) -> None:
    """Frees the links; writes when graph inputs are there, which they carry first, by id."""
    for k in range(len(links.sent)):
        links.sent[k] = -1
        for j in range(len(links.sent)):
            links.free_s[k, j] = 0.0
    for v in range(len(ready_s)):
        ready_s[v] = 0.0
    for f in range(len(problem.home_input)):
        v, here, i = problem.home_reader[f], problem.home_device[f], problem.home_input[f]
        move_s = _move_s(problem, here, placement[v], problem.home_bytes[f])
        arrival_s = _arrival_s(links, serial, here, placement[v], i, 0.0, move_s)
        ready_s[v] = max(ready_s[v], arrival_s)
    for k in range(len(links.sent)):
        links.sent[k] = -1


@jit
def _in_order(problem: NativeProblem, rows: Rows, serial: bool) -> int:
    n, devices = problem.compute_s.shape
    noisy, keeps, shared = (
        len(rows.transfer_factor) > 0,
        len(rows.start_s) > 0,
        len(rows.order) > 0,
    )
    handles = len(problem.handling_s) > 0
    plain = len(rows.compute_factor) == 0 and not handles
    order = rows.order.copy() if shared else np.empty(n, np.uint32)
    done_s, seconds, free_s, ready_s = np.empty(n), np.empty(n), np.empty(devices), np.zeros(n)
    seen = np.full((problem.num_tensors * handles, devices), -1)
    links, has_inputs = _make_links(devices), len(problem.home_input) > 0
    for b in range(len(rows.placements)):
        placement = rows.placements[b]
        if not shared:
            _write_order(rows.ranks[b], order)
        if not plain:
            _write_seconds(problem, rows, b, seen, seconds)
        if serial or has_inputs:
            _carry_inputs(problem, placement, links, serial, ready_s)
        for k in range(devices):
            free_s[k] = 0.0
        for v in range(n):
            done_s[v] = -1.0
        latest_s, least_s = 0.0, 0.0
        for k in range(n):
            v = order[k]
            here = placement[v]
            start = max(free_s[here], ready_s[v])
            for e in range(problem.in_first[v], problem.in_first[v + ONE]):
                u = problem.in_producer[e]
                least_s = min(least_s, done_s[u])  # -1 if the producer is still to come
                if not serial:
                    move_s = _move_s(problem, placement[u], here, problem.in_bytes[e])
                    if noisy:
                        move_s *= rows.transfer_factor[problem.in_tensor[e], here]
                    start = max(start, done_s[u] + move_s)
            finish = start + (problem.compute_s[v, here] if plain else seconds[v])
            done_s[v] = free_s[here] = finish
            latest_s = max(latest_s, finish)
            if keeps:
                rows.start_s[b, v], rows.finish_s[b, v] = start, finish
            if serial:
                # In the order of their source's finishes: links know no other.
                for e in range(problem.out_first[v], problem.out_first[v + ONE]):
                    reader, x = problem.out_reader[e], problem.out_tensor[e]
                    there = placement[reader]
                    move_s = _move_s(problem, here, there, problem.out_bytes[e])
                    if noisy:
                        move_s *= rows.transfer_factor[x, there]
                    arrival_s = _arrival_s(links, True, here, there, x, finish, move_s)
                    ready_s[reader] = max(ready_s[reader], arrival_s)
        if least_s < 0.0:
            return b
        rows.makespan_s[b] = latest_s
    return OK


@inlined
def _is_before(key: Array, u: np.uint32, v: np.uint32) -> bool:
    return key[u] < key[v] or (key[u] == key[v] and u < v)


@inlined
def _push_heap(heap: Array, base: int, length: Array, d: int, key: Array, task: int) -> None:
    """Adds a task to device d's binary heap by (key, id)."""
    i = np.uint32(length[d])
    length[d] = i + ONE
    while i > 0:
        parent = (i - ONE) >> ONE
        above = heap[base + parent]
        if _is_before(key, above, task):
            break
        heap[base + i] = above
        i = np.uint32(parent)
    heap[base + i] = task


@inlined
def _pop_heap(heap: Array, base: int, length: Array, d: int, key: Array) -> np.uint32:
    """Removes and returns the least task of device d's heap."""
    end, i = np.uint32(length[d] - ONE), np.uint32(0)
    least, last = heap[base], heap[base + end]
    length[d] = end
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
    heap[base + i] = last
    return least


@inlined
def _write_bases(placement: Array, stride: int, base: Array) -> None:
    """Writes where each device's part of flat tables begins: its tasks, and one entry more."""
    for d in range(len(base)):
        base[d] = d * stride
    if stride == 0:
        for v in range(len(placement)):
            base[placement[v]] += ONE
        total = np.uint32(0)
        for d in range(len(base)):
            length = base[d]
            base[d] = total
            total = np.uint32(total + length + ONE)


@inlined
def _by_start(problem: NativeProblem, rows: Rows, ranked: bool, serial: bool) -> int:
    n, devices = problem.compute_s.shape
    noisy, keeps = len(rows.transfer_factor) > 0, len(rows.start_s) > 0
    handles = len(problem.handling_s) > 0
    plain = len(rows.compute_factor) == 0 and not handles
    # Out of the tuple once: in the loop each look into it would count references.
    compute_s, latency_s, per_byte = (
        problem.compute_s,
        problem.latency_s,
        problem.seconds_per_byte,
    )
    out_first, out_reader = problem.out_first, problem.out_reader
    out_tensor, out_bytes = problem.out_tensor, problem.out_bytes
    factor, links = rows.transfer_factor, _make_links(devices)
    link_free_s, sent, sent_s = links.free_s, links.sent, links.sent_s
    seconds, ready_s, missing = np.empty(n), np.empty(n), np.empty(n, np.int32)
    seen = np.full((problem.num_tensors * handles, devices), -1)
    # What waits for each device, in its part of flat tables, which begins at `base`: tasks
    # that are to become ready later than it is free, sorted by (ready, key, id) from head to
    # tail, inf behind; and in a heap those that are ready by then, if tasks are ranked.
    stride = n + 1 if (n + 1) * devices <= WIDE_TABLES else 0
    entries = (n + 1) * devices if stride else n + devices
    base, head = np.empty(devices, np.uint32), np.empty(devices, np.uint32)
    tail, length = np.empty(devices, np.uint32), np.zeros(devices, np.uint32)
    queue_s, queue = np.empty(entries), np.empty(entries, np.uint32)
    heap = np.empty(entries if ranked else 0, np.uint32)
    free_s, next_s = np.empty(devices), np.empty(devices)

    # Functions in here are inlined by Numba as they are, without a table being passed.
    def first_task(d: int) -> np.uint32:
        return heap[base[d]] if ranked and length[d] else queue[head[d]]

    def release(d: int, task: int, at_s: float, key: Array) -> None:
        """Lets a task wait for device d."""
        if ranked and at_s <= free_s[d]:
            _push_heap(heap, base[d], length, d, key, task)
            next_s[d] = free_s[d]
        else:
            # Sorted in from the end, where what became ready last belongs.
            i, front = tail[d], head[d]
            tail[d] = i + ONE
            queue_s[i + ONE] = np.inf
            while i > front:
                j = i - ONE
                ahead_s, ahead = queue_s[j], queue[j]
                if ahead_s < at_s or (
                    ahead_s == at_s
                    and (key[ahead] < key[task] or (key[ahead] == key[task] and ahead < task))
                ):
                    break
                queue_s[i] = ahead_s
                queue[i] = ahead
                i = j
            queue_s[i] = at_s
            queue[i] = task
            if not ranked or length[d] == 0:
                next_s[d] = max(free_s[d], queue_s[front])

    key = ready_s
    num_reads = np.empty(n, np.int32)
    for v in range(n):
        num_reads[v] = problem.in_first[v + 1] - problem.in_first[v]
    entry = np.flatnonzero(num_reads == 0).astype(np.uint32)
    for b in range(len(rows.placements)):
        placement = rows.placements[b]
        if ranked:
            key = rows.ranks[b if len(rows.ranks) > 1 else 0]
        if not plain:
            _write_seconds(problem, rows, b, seen, seconds)
        if keeps:
            rows.start_s[b] = np.inf
            rows.finish_s[b] = np.inf
        _write_bases(placement, stride, base)
        for d in range(devices):
            head[d] = tail[d] = base[d]
            length[d] = 0
            free_s[d] = 0.0
            next_s[d] = queue_s[base[d]] = np.inf
        _carry_inputs(problem, placement, links, serial, ready_s)
        for v in range(n):
            missing[v] = num_reads[v]
        for v in entry:
            release(placement[v], v, ready_s[v], key)
        latest_s = 0.0
        for _ in range(n):
            # The device whose next task is first by (start, key, id) of all.
            here, ties = np.uint32(0), 0
            start = next_s[0]
            for d in range(1, devices):
                earlier = next_s[d] < start  # selections: a branch could not be predicted
                ties = 0 if earlier else ties + (next_s[d] == start)
                here = np.uint32(d) if earlier else here
                start = next_s[d] if earlier else start
            if start == np.inf:  # a task that cannot run, and what waits for it
                latest_s = np.inf
                break
            if ties > 0:
                best = first_task(here)
                for d in range(here + ONE, devices):
                    if next_s[d] == start:
                        other = first_task(d)
                        if _is_before(key, other, best):
                            here, best = np.uint32(d), other
            if ranked and length[here]:
                u = _pop_heap(heap, base[here], length, here, key)
            else:
                u = queue[head[here]]
                head[here] += ONE
            finish = start + (compute_s[u, here] if plain else seconds[u])
            latest_s = max(latest_s, finish)
            free_s[here] = finish
            if keeps:
                rows.start_s[b, u], rows.finish_s[b, u] = start, finish
            if ranked:
                i = head[here]
                while queue_s[i] <= finish and queue_s[i] < np.inf:
                    _push_heap(heap, base[here], length, here, key, queue[i])
                    i = np.uint32(i + ONE)
                head[here] = i
                next_s[here] = finish if length[here] else queue_s[i]
            else:
                next_s[here] = max(finish, queue_s[head[here]])
            for e in range(out_first[u], out_first[u + ONE]):
                v = out_reader[e]
                there = placement[v]
                move_s = latency_s[here, there] + out_bytes[e] * per_byte[here, there]
                if noisy:
                    move_s *= factor[out_tensor[e], there]
                arrival_s = finish + move_s
                if serial:
                    arrival_s = finish
                    if here != there:
                        if sent[there] != out_tensor[e]:
                            sent[there] = out_tensor[e]
                            sent_s[there] = max(finish, link_free_s[here, there]) + move_s
                            link_free_s[here, there] = sent_s[there]
                        arrival_s = sent_s[there]
                latest = max(arrival_s, ready_s[v])
                ready_s[v] = latest
                left = missing[v] - np.int32(1)
                missing[v] = left
                if left == 0:
                    release(there, v, latest, key)
        rows.makespan_s[b] = latest_s
    return OK


@jit
def _fifo(problem: NativeProblem, rows: Rows, serial: bool) -> int:
    return _by_start(problem, rows, False, serial)  # without what ranks need: a quarter faster


@jit
def _ranked(problem: NativeProblem, rows: Rows, serial: bool) -> int:
    return _by_start(problem, rows, True, serial)


class Ready(NamedTuple):
    """The tasks that are ready, or under `in_order` all that have not started."""

    base: Array  # [D] uint32, where each device's part of the table begins
    table: Array  # uint32, heaps by (key, id), or tasks in order
    head: Array  # [D] uint32, where the first one is
    length: Array  # [D] uint32
    missing: Array  # [N] int32, inputs of a task that are to come
    ready_s: Array  # [N] when the last one came


class Transfers(NamedTuple):
    """Transfers, numbered as they are requested; those of a pair of devices wait in a list."""

    item: Array  # uint32, tensor or graph input
    is_tensor: Array
    first: Array  # uint32, its first edge or read
    request_s: Array
    move_s: Array
    before: Array  # int64, the one before it in its list, or -1
    behind: Array
    front: Array  # [D, D] int64, the first of each list, or -1
    back: Array  # [D, D]
    count: Array  # [D] int64, transfers that wait at each source


@inlined
def _arrives(ready: Ready, d: int, task: int, now: float, waits: bool, key: Array) -> None:
    """Notes that one of the inputs of a task came."""
    ready.missing[task] -= np.int32(1)
    if ready.missing[task] == 0:
        ready.ready_s[task] = now
        if not waits:
            _push_heap(ready.table, ready.base[d], ready.length, d, key, task)


@inlined
def _goes_first(t: Transfers, k: int, other: int) -> bool:
    """Whether transfer k goes before another by (request, graph input first, id)."""
    if t.request_s[k] != t.request_s[other]:
        return t.request_s[k] < t.request_s[other]
    if t.is_tensor[k] != t.is_tensor[other]:
        return t.is_tensor[k] < t.is_tensor[other]
    return t.item[k] < t.item[other]


@jit
def _request(
    t: Transfers,
    k: int,
    here: int,
    there: int,
    item: int,
    is_tensor: bool,
    first: int,
    now: float,
    move_s: float,
) -> None:
    """Lets transfer k wait in the list of its pair of devices, sorted in from the end."""
    t.item[k], t.is_tensor[k], t.first[k] = item, is_tensor, first
    t.request_s[k], t.move_s[k] = now, move_s
    j = t.back[here, there]
    while j >= 0 and _goes_first(t, k, j):
        j = t.before[j]
    behind = t.front[here, there] if j < 0 else t.behind[j]
    t.before[k], t.behind[k] = j, behind
    if j < 0:
        t.front[here, there] = k
    else:
        t.behind[j] = k
    if behind < 0:
        t.back[here, there] = k
    else:
        t.before[behind] = k
    t.count[here] += 1


@jit
def _by_event(problem: NativeProblem, rows: Rows, ranked: bool, waits: bool) -> int:
    n, devices = problem.compute_s.shape
    edges, reads = len(problem.out_reader), len(problem.home_reader)
    noisy, keeps = len(rows.transfer_factor) > 0, len(rows.start_s) > 0
    order, shared = np.empty(n, np.uint32), len(rows.order) > 0
    seconds, ready_s, done = np.empty(n), np.empty(n), np.empty(n, np.bool_)
    seen = np.full((problem.num_tensors * (len(problem.handling_s) > 0), devices), -1)
    ready = Ready(
        base=np.empty(devices, np.uint32),
        table=np.empty(n + devices, np.uint32),
        head=np.empty(devices, np.uint32),
        length=np.empty(devices, np.uint32),
        missing=np.empty(n, np.int32),
        ready_s=ready_s,
    )
    t = Transfers(
        item=np.empty(edges + reads, np.uint32),
        is_tensor=np.empty(edges + reads, np.bool_),
        first=np.empty(edges + reads, np.uint32),
        request_s=np.empty(edges + reads),
        move_s=np.empty(edges + reads),
        before=np.empty(edges + reads, np.int64),
        behind=np.empty(edges + reads, np.int64),
        front=np.empty((devices, devices), np.int64),
        back=np.empty((devices, devices), np.int64),
        count=np.empty(devices, np.int64),
    )
    running, end_s = np.empty(devices, np.uint32), np.empty(devices)
    busy, receives = np.empty(devices, np.bool_), np.empty(devices, np.bool_)
    sending, goal = np.empty(devices, np.int64), np.empty(devices, np.int64)
    sent_s, mark = np.empty(devices), np.empty(devices, np.int64)
    for b in range(len(rows.placements)):
        placement, key = rows.placements[b], ready_s
        if ranked:
            key = rows.ranks[b if len(rows.ranks) > 1 else 0]
        if waits and shared:
            order[:] = rows.order
        elif waits:
            _write_order(key, order)
            done[:] = False
            for v in order:
                done[v] = True
                for e in range(problem.in_first[v], problem.in_first[v + ONE]):
                    if not done[problem.in_producer[e]]:
                        return b
        _write_seconds(problem, rows, b, seen, seconds)
        if keeps:
            rows.start_s[b] = np.inf
            rows.finish_s[b] = np.inf
        _write_bases(placement, 0, ready.base)
        ready.head[:] = ready.base
        ready.length[:] = 0
        t.front[:], t.back[:], t.count[:] = -1, -1, 0
        end_s[:], sent_s[:], sending[:], mark[:] = np.inf, np.inf, -1, -1
        busy[:] = False
        receives[:] = False
        if waits:
            for v in order:
                d = placement[v]
                ready.table[ready.base[d] + ready.length[d]] = v
                ready.length[d] += ONE
        for v in range(n):
            ready.missing[v] = problem.in_first[v + 1] - problem.in_first[v]
        requests = 0
        for f in range(reads):
            here, v, i = problem.home_device[f], problem.home_reader[f], problem.home_input[f]
            there = placement[v]
            if there != here:
                ready.missing[v] += np.int32(1)
                if mark[there] != i:
                    mark[there] = i
                    move_s = _move_s(problem, here, there, problem.home_bytes[f])
                    _request(t, requests, here, there, i, False, f, 0.0, move_s)
                    requests += 1
        mark[:] = -1
        for v in range(n):
            if ready.missing[v] == 0:
                ready.missing[v] = np.int32(1)
                _arrives(ready, placement[v], np.uint32(v), 0.0, waits, key)
        now, latest_s, started = 0.0, 0.0, 0
        while now < np.inf:
            # Completions and arrivals of this instant, and the start of one transfer, until
            # there are none left; then the start of one task.
            for here in range(devices):
                if end_s[here] == now:
                    u = running[here]
                    end_s[here], busy[here] = np.inf, False
                    for e in range(problem.out_first[u], problem.out_first[u + ONE]):
                        v, x = problem.out_reader[e], problem.out_tensor[e]
                        there = placement[v]
                        if there == here:
                            _arrives(ready, there, v, now, waits, key)
                        elif mark[there] != x:
                            mark[there] = x
                            move_s = _move_s(problem, here, there, problem.out_bytes[e])
                            if noisy:
                                move_s *= rows.transfer_factor[x, there]
                            _request(t, requests, here, there, x, True, e, now, move_s)
                            requests += 1
            for here in range(devices):
                if sent_s[here] == now:
                    k, there = sending[here], goal[here]
                    sent_s[here], sending[here], receives[there] = np.inf, -1, False
                    e, end = t.first[k], np.uint32(edges if t.is_tensor[k] else reads)
                    items = problem.out_tensor if t.is_tensor[k] else problem.home_input
                    readers = problem.out_reader if t.is_tensor[k] else problem.home_reader
                    while e < end and items[e] == t.item[k]:
                        if placement[readers[e]] == there:
                            _arrives(ready, there, readers[e], now, waits, key)
                        e = np.uint32(e + ONE)
            best, here, there = -1, 0, 0
            for s in range(devices):
                if t.count[s] == 0 or sending[s] >= 0:
                    continue
                for d in range(devices):
                    k = t.front[s, d]
                    # Of equal requests of one tensor the smaller destination goes first.
                    if k >= 0 and not receives[d] and (best < 0 or _goes_first(t, k, best)):
                        best, here, there = k, s, d
            if best >= 0:
                t.front[here, there] = t.behind[best]
                if t.behind[best] < 0:
                    t.back[here, there] = -1
                else:
                    t.before[t.behind[best]] = -1
                t.count[here] -= 1
                sending[here], goal[here], receives[there] = best, there, True
                sent_s[here] = now + t.move_s[best]
                continue
            task, here = NOBODY, 0
            for d in range(devices):
                if not busy[d] and ready.length[d] > 0:
                    v = ready.table[ready.head[d]]
                    is_ready = not waits or ready.missing[v] == 0
                    if is_ready and (task == NOBODY or _is_before(key, v, task)):
                        task, here = v, d
            if task != NOBODY:
                if waits:
                    ready.head[here] += ONE
                    ready.length[here] -= ONE
                else:
                    _pop_heap(ready.table, ready.base[here], ready.length, here, key)
                started += 1
                running[here], busy[here] = task, True
                end_s[here] = now + seconds[task]
                latest_s = max(latest_s, end_s[here])
                if keeps:
                    rows.start_s[b, task], rows.finish_s[b, task] = now, end_s[here]
                continue
            now = min(end_s.min(), sent_s.min())
        rows.makespan_s[b] = latest_s if started == n else np.inf
    return OK


@jit
def run_rows(problem: NativeProblem, rows: Rows, ranked: bool, waits: bool, links: int) -> int:
    """Simulates executions one after another.

    Args:
      problem: graph and costs.
      rows: the executions; their times are written.
      ranked: see `disciplines.Discipline`.
      waits: likewise.
      links: `PARALLEL`, `SERIAL` or `DUPLEX`.

    Returns:
      `OK`, or the first row whose `in_order` ranks turn a precedence round.
    """
    if links == DUPLEX:
        return _by_event(problem, rows, ranked, waits)
    if waits:
        return _in_order(problem, rows, links == SERIAL)
    if ranked:
        return _ranked(problem, rows, links == SERIAL)
    return _fifo(problem, rows, links == SERIAL)


def warm() -> None:
    """Compiles `run_rows`, on a task, as `native.simulate_native` calls it."""
    from doppler_jax.costs.build import from_edge_delays
    from doppler_jax.simulator.native import as_devices, prepare, simulate_native

    graph, costs = from_edge_delays([1.0], [], num_devices=1)
    simulate_native(graph, prepare(graph, costs), as_devices(graph, costs, [0]))
