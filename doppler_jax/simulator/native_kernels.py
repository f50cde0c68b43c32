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
Nothing is allocated in here: without references to count, code is compiled in half the time.
Slices are filled by loops, for Numba compiles each assignment to one as a function.
"""

# NumPy scalars and Python ints are one kind to Numba.
# mypy: disable-error-code="assignment, arg-type, return-value, call-overload"

import functools
from typing import Any, NamedTuple

import numba
import numba.experimental.function_type  # knows the type of an `Entry`
import numpy as np
from numba import types

from doppler_jax.native import inlined, inner, jit

Array = np.ndarray

PARALLEL, SERIAL, DUPLEX = 0, 1, 2
"""Links, in the order of `objective.LINKS`."""

RANKED, WAITS = 1, 2
"""Bits of `Discipline.switches`."""

OK = -1
"""What `run_rows` returns if no row's ranks have a reader before its producer."""

ONE = np.uint32(1)
NOBODY = np.uint32(0xFFFFFFFF)


class NativeProblem(NamedTuple):
    """Graph and costs as contiguous arrays: N tasks, E edges, F reads of inputs with a home.

    Items are what is moved: the I graph inputs, then the tensors. Moves are what is read: the
    F reads by input, then the E edges by producer, then tensor.
    """

    compute_s: Array  # [N, D]
    latency_s: Array  # [D, D]
    seconds_per_byte: Array  # [D, D]
    num_inputs: int
    num_tensors: int
    home: Array  # [F] uint32, device
    maker: Array  # [F] uint32, task at whose device the home is instead, or NOBODY
    producer: Array  # [E] uint32, of edges in the order of moves
    first_move: Array  # [N + 1] uint32, task u makes moves first_move[u] to first_move[u + 1]
    item: Array  # [F + E] uint32
    reader: Array  # [F + E] uint32
    num_bytes: Array  # [F + E]
    # The edges again, by reader, then tensor.
    in_first: Array  # [N + 1] uint32, task v reads edges in_first[v] to in_first[v + 1]
    in_producer: Array  # [E] uint32
    in_tensor: Array  # [E] uint32
    in_bytes: Array  # [E]
    handling_s: Array  # [D], or [0] where devices spend no time on transfers
    handling_s_per_byte: Array  # [D], or [0]


class Rows(NamedTuple):
    """B executions: what they are of, and where their times are written."""

    placements: Array  # [B, N] uint32
    ranks: Array  # [B, N] or, for all rows, [1, N]; [0, 0] where no queue looks at them
    order: Array  # [B, N] or [1, N] uint32, of `in_order` alone: the tasks by (rank, id)
    compute_factor: Array  # [K, N] noise of tasks, K = 0 for none
    item_factor: Array  # [K, I + T, D] noise of transfers
    makespan_s: Array  # [B], to be written
    start_s: Array  # [B, N], to be written; [0, 0] where it is not wanted
    finish_s: Array  # likewise
    sent_s: Array  # [B, F + E], to be written: when a move's transfer starts; [0, 0] likewise
    arrival_s: Array  # likewise: when it ends


class Work(NamedTuple):
    """Room to work in, for one thread; what is in it means nothing between calls."""

    task_s: Array  # [5, N]
    task: Array  # [2, N] uint32
    device_s: Array  # [3, D]
    device: Array  # [8, D] uint32
    link_s: Array  # [D, D]
    link: Array  # [2, D, D] uint32
    queue_s: Array  # [(N + 2) D]
    queue: Array  # [2, (N + 2) D] uint32
    move_s: Array  # [F + E]
    move: Array  # [2, F + E] uint32
    seen: Array  # [I + T, D] uint32, [0, D] where devices spend no time on transfers


def make_work(problem: NativeProblem) -> Work:
    """Returns room to work in. Pages of it that nothing touches take no memory."""
    n, devices = problem.compute_s.shape
    moves, handles = len(problem.reader), len(problem.handling_s) > 0
    items = problem.num_inputs + problem.num_tensors
    return Work(
        task_s=np.empty((5, n)),
        task=np.empty((2, n), np.uint32),
        device_s=np.empty((3, devices)),
        device=np.empty((8, devices), np.uint32),
        link_s=np.empty((devices, devices)),
        link=np.empty((2, devices, devices), np.uint32),
        queue_s=np.empty((n + 2) * devices),
        queue=np.empty((2, (n + 2) * devices), np.uint32),
        move_s=np.empty(moves),
        move=np.empty((2, moves), np.uint32),
        seen=np.empty((items * handles, devices), np.uint32),
    )


def make_rows(
    problem: NativeProblem,
    placements: Array,
    ranks: Array | None = None,
    order: Array | None = None,
    factors: tuple[Array, Array] | None = None,
    *,
    schedule: bool = False,
    transfers: bool = False,
) -> Rows:
    """Returns executions whose times are yet to be written."""
    (batch, n), moves, none = placements.shape, len(problem.reader), np.empty((0, 0))
    compute_factor, item_factor = factors or (none, np.empty((0, 0, 0)))
    start_s, finish_s = np.empty((2, batch * schedule, n))
    sent_s, arrival_s = np.empty((2, batch * transfers, moves))
    ranks = none if ranks is None else ranks
    order = np.empty((0, 0), np.uint32) if order is None else order
    inputs = placements, ranks, order, compute_factor, item_factor
    return Rows(*inputs, np.zeros(batch), start_s, finish_s, sent_s, arrival_s)


@inner
def sort_by_key(key: Array, order: Array, spare: Array) -> None:
    """Sorts ids `[n]`, which ascend at first, by (key, id); `spare` `[n]` is overwritten."""
    n, width = len(order), 1
    while width < n:
        for low in range(0, n, 2 * width):
            middle, high = min(low + width, n), min(low + 2 * width, n)
            i, j = low, middle
            for k in range(low, high):
                if i < middle and (j >= high or key[order[i]] <= key[order[j]]):
                    spare[k] = order[i]
                    i += 1
                else:
                    spare[k] = order[j]
                    j += 1
        for k in range(n):
            order[k] = spare[k]
        width *= 2


@inner
def _write_order(ranks: Array, order: Array, spare: Array) -> None:
    """Writes the tasks by (rank, id): scattered if ranks are a permutation, else sorted."""
    n = len(order)
    for v in range(n):
        order[v] = NOBODY
    for v in range(n):
        rank = ranks[v]
        k = np.uint32(rank) if 0.0 <= rank < n else np.uint32(n)
        if k >= n or k != rank or order[k] != NOBODY:
            for u in range(n):
                order[u] = u
            sort_by_key(ranks, order, spare)
            return
        order[k] = v


@inlined
def _home(p: NativeProblem, placement: Array, f: int) -> np.uint32:
    """Returns the device on which the graph input of a read lies at time 0."""
    return p.home[f] if p.maker[f] == NOBODY else placement[p.maker[f]]


@inner
def _write_seconds(
    p: NativeProblem, rows: Rows, work: Work, b: int, draw: int, seconds: Array
) -> None:
    """Writes how long every task takes where it is, with noise and handling.

    Transfers and their bytes are added up in the order of graph inputs, then (reader, tensor).
    """
    n, placement, seen = len(seconds), rows.placements[b], work.seen
    count, size = work.task_s[3], work.task_s[4]
    for v in range(n):
        factor = rows.compute_factor[draw, v] if draw >= 0 else 1.0
        seconds[v] = p.compute_s[v, placement[v]] * factor
        count[v] = size[v] = 0.0
    if len(p.handling_s) == 0:
        return
    for x in range(len(seen)):
        for d in range(seen.shape[1]):
            seen[x, d] = 0  # whether an item's transfer to a device was counted
    for f in range(len(p.home)):
        v, x = p.reader[f], p.item[f]
        here = placement[v]
        if _home(p, placement, f) != here and seen[x, here] == 0:
            seen[x, here] = 1
            count[v] += 1.0
            size[v] += p.num_bytes[f]
    for v in range(n):
        here = placement[v]
        for e in range(p.in_first[v], p.in_first[v + ONE]):
            x = np.uint32(p.num_inputs) + p.in_tensor[e]
            if placement[p.in_producer[e]] != here and seen[x, here] == 0:
                seen[x, here] = 1
                for u in (p.in_producer[e], np.uint32(v)):
                    count[u] += 1.0
                    size[u] += p.in_bytes[e]
    for v in range(n):
        per_byte = p.handling_s_per_byte[placement[v]]
        seconds[v] += count[v] * p.handling_s[placement[v]] + size[v] * per_byte


@inlined
def _move_s(
    p: NativeProblem, rows: Rows, draw: int, k: int, here: np.uint32, there: np.uint32
) -> float:
    """Returns how long a move takes, with noise."""
    move_s = p.latency_s[here, there] + p.num_bytes[k] * p.seconds_per_byte[here, there]
    if draw >= 0:
        move_s *= rows.item_factor[draw, p.item[k], there]
    return move_s


class Links(NamedTuple):
    """Serial links."""

    free_s: Array  # [D, D] when a link has carried all that it was given
    last: Array  # [D] uint32, the item that was last sent to each device
    sent_s: Array  # [D] when that began


@inlined
def _send(
    p: NativeProblem,
    links: Links,
    serial: bool,
    k: int,
    here: np.uint32,
    there: np.uint32,
    made_s: float,
    move_s: float,
) -> tuple[float, float]:
    """Returns when the transfer of what was made at `made_s` starts and ends.

    A serial link carries an item once to a destination, in the order of calls.
    """
    if not serial or here == there:
        return made_s, made_s + move_s
    if links.last[there] != p.item[k]:
        links.last[there] = p.item[k]
        links.sent_s[there] = max(made_s, links.free_s[here, there])
        links.free_s[here, there] = links.sent_s[there] + move_s
    return links.sent_s[there], links.free_s[here, there]


@inner
def _begin(
    p: NativeProblem,
    rows: Rows,
    b: int,
    draw: int,
    links: Links,
    serial: bool,
    ready_s: Array,
) -> None:
    """Lets nothing start yet; frees the links, which carry graph inputs first, by id.

    Writes when a task's graph inputs are there.
    """
    if len(rows.start_s) > 0:
        for v in range(len(ready_s)):
            rows.start_s[b, v] = rows.finish_s[b, v] = np.inf
    if len(rows.sent_s) > 0:
        for k in range(len(p.reader)):
            rows.sent_s[b, k] = rows.arrival_s[b, k] = np.inf
    if serial:
        for d in range(len(links.last)):
            links.last[d] = NOBODY
            for there in range(len(links.last)):
                links.free_s[d, there] = 0.0
    for v in range(len(ready_s)):
        ready_s[v] = 0.0
    for f in range(len(p.home)):
        v, here = p.reader[f], _home(p, rows.placements[b], f)
        there = rows.placements[b, v]
        move_s = _move_s(p, rows, draw, f, here, there)
        sent_s, arrival_s = _send(p, links, serial, f, here, there, 0.0, move_s)
        ready_s[v] = max(ready_s[v], arrival_s)
        if len(rows.sent_s) > 0:
            rows.sent_s[b, f], rows.arrival_s[b, f] = sent_s, arrival_s


@inner
def _in_order(p: NativeProblem, rows: Rows, work: Work, draw: int, serial: bool) -> int:
    n, devices = p.compute_s.shape
    keeps, sends = len(rows.start_s) > 0, len(rows.sent_s) > 0
    plain, pushes = draw < 0 and len(p.handling_s) == 0, serial or sends
    done_s, ready_s, seconds = work.task_s[0], work.task_s[1], work.task_s[2]
    links, free_s = Links(work.link_s, work.device[0], work.device_s[0]), work.device_s[1]
    for b in range(len(rows.placements)):
        placement, order = rows.placements[b], rows.order[b if len(rows.order) > 1 else 0]
        if len(rows.ranks) > 0:
            _write_order(rows.ranks[b], order, work.task[0])
        if not plain:
            _write_seconds(p, rows, work, b, draw, seconds)
        _begin(p, rows, b, draw, links, serial, ready_s)
        for d in range(devices):
            free_s[d] = 0.0
        for v in range(n):
            done_s[v] = -1.0
        latest_s, least_s = 0.0, 0.0
        for k in range(n):
            v = order[k]
            here = placement[v]
            start = max(free_s[here], ready_s[v])
            for e in range(p.in_first[v], p.in_first[v + ONE]):
                u = p.in_producer[e]
                least_s = min(least_s, done_s[u])  # -1 if the producer is still to come
                if not pushes:
                    source = placement[u]
                    move_s = p.in_bytes[e] * p.seconds_per_byte[source, here]
                    move_s = p.latency_s[source, here] + move_s
                    if draw >= 0:
                        item = np.uint32(p.num_inputs) + p.in_tensor[e]
                        move_s *= rows.item_factor[draw, item, here]
                    start = max(start, done_s[u] + move_s)
            finish = start + (p.compute_s[v, here] if plain else seconds[v])
            done_s[v] = free_s[here] = finish
            latest_s = max(latest_s, finish)
            if keeps:
                rows.start_s[b, v], rows.finish_s[b, v] = start, finish
            if pushes:
                # In the order of their source's finishes: links know no other.
                for m in range(p.first_move[v], p.first_move[v + ONE]):
                    u = p.reader[m]
                    there = placement[u]
                    move_s = _move_s(p, rows, draw, m, here, there)
                    sent, arrival = _send(p, links, serial, m, here, there, finish, move_s)
                    ready_s[u] = max(ready_s[u], arrival)
                    if sends:
                        rows.sent_s[b, m], rows.arrival_s[b, m] = sent, arrival
        if least_s < 0.0:
            return b
        rows.makespan_s[b] = latest_s
    return OK


@inner
def _is_before(a: float, u: np.uint32, b: float, v: np.uint32) -> bool:
    """Whether task u with key a goes before task v with key b."""
    return a < b or (a == b and u < v)


@inner
def _push_heap(
    heap: Array, base: int, length: Array, d: int, key: Array, task: np.uint32
) -> None:
    """Adds a task to device d's binary heap by (key, id)."""
    i = length[d]
    length[d] = i + ONE
    while i > 0:
        parent = np.uint32((i - ONE) >> ONE)
        above = heap[base + parent]
        if _is_before(key[above], above, key[task], task):
            break
        heap[base + i] = above
        i = parent
    heap[base + i] = task


@inner
def _pop_heap(heap: Array, base: int, length: Array, d: int, key: Array) -> np.uint32:
    """Removes and returns the least task of device d's heap."""
    end, i = np.uint32(length[d] - ONE), np.uint32(0)
    least, last = heap[base], heap[base + end]
    length[d] = end
    while True:
        j = np.uint32(2 * i + ONE)
        if j >= end:
            break
        child, other = heap[base + j], heap[base + j + ONE]
        if j + ONE < end and _is_before(key[other], other, key[child], child):
            child, j = other, np.uint32(j + ONE)
        if not _is_before(key[child], child, key[last], last):
            break
        heap[base + i] = child
        i = j
    heap[base + i] = last
    return least


class Queues(NamedTuple):
    """What waits for each device.

    By (ready time, key, id), from head to tail, -inf before and inf behind; under ranks in a
    heap what is ready when the device is idle, too.
    """

    stride: int  # entries of a device
    ready_s: Array  # [D stride]
    task: Array  # [D stride] uint32
    heap: Array  # [D stride] uint32
    head: Array  # [D] uint32
    tail: Array  # [D] uint32
    length: Array  # [D] uint32, of the heap
    free_s: Array  # [D] when it is idle
    next_s: Array  # [D] when it is next busy


@inlined
def empty_queues(work: Work, n: int) -> Queues:
    """Returns queues without tasks, of devices that are idle."""
    head, tail, length = work.device[1], work.device[2], work.device[3]
    free_s, next_s, tables = work.device_s[1], work.device_s[2], work.queue
    q = Queues(n + 2, work.queue_s, tables[0], tables[1], head, tail, length, free_s, next_s)
    for d in range(len(head)):
        head[d] = tail[d] = d * q.stride + 1
        length[d] = 0
        free_s[d] = 0.0
        next_s[d] = q.ready_s[head[d]] = np.inf
        q.ready_s[head[d] - ONE] = -np.inf
    return q


@inlined
def _first_task(q: Queues, d: int, ranked: bool) -> np.uint32:
    return q.heap[d * q.stride] if ranked and q.length[d] else q.task[q.head[d]]


@inlined
def next_device(q: Queues, key: Array, ranked: bool) -> tuple[np.uint32, float]:
    """Returns the device whose next task is first by (start, key, id) of all, and that start.

    It is inf where none can run. Without branches, for they could not be predicted.
    """
    here, start, ties = np.uint32(0), q.next_s[0], 0
    for d in range(1, len(q.next_s)):
        earlier = q.next_s[d] < start
        ties = 0 if earlier else ties + (q.next_s[d] == start)
        here = np.uint32(d) if earlier else here
        start = q.next_s[d] if earlier else start
    if ties > 0 and start < np.inf:
        best = _first_task(q, here, ranked)
        for d in range(here + ONE, len(q.next_s)):
            if q.next_s[d] == start:
                v = _first_task(q, d, ranked)
                if _is_before(key[v], v, key[best], best):
                    here, best = np.uint32(d), v
    return here, start


@inlined
def take_task(q: Queues, d: np.uint32, key: Array, ranked: bool) -> np.uint32:
    """Removes and returns the next task of device d."""
    if ranked and q.length[d]:
        return _pop_heap(q.heap, d * q.stride, q.length, d, key)
    i = q.head[d]
    q.ready_s[i] = -np.inf
    q.head[d] = i + ONE
    return q.task[i]


@inlined
def keep_busy(q: Queues, d: np.uint32, until_s: float, key: Array, ranked: bool) -> None:
    """Lets device d run a task until a time."""
    i = q.head[d]
    if ranked:
        while q.ready_s[i] <= until_s and q.ready_s[i] < np.inf:
            _push_heap(q.heap, d * q.stride, q.length, d, key, q.task[i])
            i += ONE
        q.head[d] = i
    q.free_s[d] = until_s
    q.next_s[d] = until_s if ranked and q.length[d] else max(until_s, q.ready_s[i])


@inlined
def release(
    q: Queues, d: np.uint32, task: np.uint32, at_s: float, key: Array, ranked: bool
) -> None:
    """Lets a task wait for device d."""
    q.next_s[d] = min(q.next_s[d], max(q.free_s[d], at_s))
    if ranked and at_s <= q.free_s[d]:
        _push_heap(q.heap, d * q.stride, q.length, d, key, task)
        return
    # Sorted in from the end, where what became ready last belongs.
    i = q.tail[d]
    q.tail[d] = i + ONE
    q.ready_s[i + ONE] = np.inf
    while True:
        ahead_s, ahead = q.ready_s[i - ONE], q.task[i - ONE]
        if ahead_s < at_s or (
            ahead_s == at_s and _is_before(key[ahead], ahead, key[task], task)
        ):
            break
        q.ready_s[i], q.task[i] = ahead_s, ahead
        i -= ONE
    q.ready_s[i], q.task[i] = at_s, task


@inlined
def _by_start(
    p: NativeProblem, rows: Rows, work: Work, draw: int, serial: bool, ranked: bool
) -> int:
    n = len(p.compute_s)
    keeps, sends = len(rows.start_s) > 0, len(rows.sent_s) > 0
    plain = draw < 0 and len(p.handling_s) == 0
    ready_s, seconds, missing = work.task_s[0], work.task_s[1], work.task[0]
    links, key = Links(work.link_s, work.device[0], work.device_s[0]), ready_s
    entry, entries = work.task[1], 0  # tasks that read no tensor
    for v in range(n):
        if p.in_first[v] == p.in_first[v + 1]:
            entry[entries] = v
            entries += 1
    for b in range(len(rows.placements)):
        placement = rows.placements[b]
        if ranked:
            key = rows.ranks[b if len(rows.ranks) > 1 else 0]
        if not plain:
            _write_seconds(p, rows, work, b, draw, seconds)
        _begin(p, rows, b, draw, links, serial, ready_s)
        q = empty_queues(work, n)
        for v in range(n):
            missing[v] = p.in_first[v + 1] - p.in_first[v]
        for k in range(entries):
            v = entry[k]
            release(q, placement[v], v, ready_s[v], key, ranked)
        latest_s = 0.0
        for _ in range(n):
            here, start = next_device(q, key, ranked)
            if start == np.inf:  # a task that cannot run, and what waits for it
                latest_s = np.inf
                break
            u = take_task(q, here, key, ranked)
            finish = start + (p.compute_s[u, here] if plain else seconds[u])
            latest_s = max(latest_s, finish)
            keep_busy(q, here, finish, key, ranked)
            if keeps:
                rows.start_s[b, u], rows.finish_s[b, u] = start, finish
            for k in range(p.first_move[u], p.first_move[u + ONE]):
                v = p.reader[k]
                there = placement[v]
                move_s = _move_s(p, rows, draw, k, here, there)
                sent, arrival = _send(p, links, serial, k, here, there, finish, move_s)
                if sends:
                    rows.sent_s[b, k], rows.arrival_s[b, k] = sent, arrival
                at_s = max(ready_s[v], arrival)
                ready_s[v] = at_s
                left = np.uint32(missing[v] - ONE)
                missing[v] = left
                if left == 0:
                    release(q, there, v, at_s, key, ranked)
        rows.makespan_s[b] = latest_s
    return OK


class Waiting(NamedTuple):
    """Tasks by what they miss; transfers that wait for a pair of devices, in a list each.

    Transfers are named by their first move.
    """

    placement: Array  # [N] uint32
    missing: Array  # [N] uint32, inputs
    ready_s: Array  # [N]
    ready: Array  # [D (N + 2)] uint32, a heap for each device, by (key, id)
    length: Array  # [D] uint32
    item: Array  # [F + E] uint32
    request_s: Array  # [F + E]
    before: Array  # [F + E] uint32, the one before it in its list, or NOBODY
    behind: Array  # [F + E] uint32
    front: Array  # [D, D] uint32, the first of each list, or NOBODY
    back: Array  # [D, D] uint32
    last: Array  # [D] uint32, the item that was last requested for each device


@inner
def _arrive(w: Waiting, waits: bool, v: np.uint32, now: float, key: Array) -> None:
    """Lets a task miss one input less."""
    w.missing[v] -= ONE
    if w.missing[v] == 0 and not waits:
        w.ready_s[v] = now
        d = w.placement[v]
        _push_heap(w.ready, d * (len(w.missing) + 2), w.length, d, key, v)


@inner
def _goes_first(w: Waiting, k: np.uint32, other: np.uint32) -> bool:
    """Whether a transfer goes before another by (request, item), graph inputs first."""
    return _is_before(w.request_s[k], w.item[k], w.request_s[other], w.item[other])


@inner
def _request(w: Waiting, k: np.uint32, here: np.uint32, there: np.uint32, now: float) -> None:
    """Requests a transfer once, which waits in its list, sorted in from the end."""
    if w.last[there] == w.item[k]:
        return
    w.last[there], w.request_s[k] = w.item[k], now
    j, behind = w.back[here, there], NOBODY
    while j != NOBODY and _goes_first(w, k, j):
        behind = j
        j = w.before[j]
    w.before[k], w.behind[k] = j, behind
    if j == NOBODY:
        w.front[here, there] = k
    else:
        w.behind[j] = k
    if behind == NOBODY:
        w.back[here, there] = k
    else:
        w.before[behind] = k


@inner
def _by_event(
    p: NativeProblem, rows: Rows, work: Work, draw: int, serial: bool, ranked: bool, waits: bool
) -> int:
    n, devices = p.compute_s.shape
    moves, reads, stride = len(p.reader), len(p.home), n + 2
    keeps, sends = len(rows.start_s) > 0, len(rows.sent_s) > 0
    ready_s, seconds, position = work.task_s[0], work.task_s[1], work.task_s[2]
    missing, last, links = work.task[0], work.device[7], work.link_s
    # Per device the ready tasks, or under `in_order` all that have not started.
    table, head, length = work.queue[0], work.device[0], work.device[1]
    running, end_s, busy = work.device[2], work.device_s[0], work.device[3]
    sending, goal, receives = work.device[4], work.device[5], work.device[6]
    began_s, sent_s = work.device_s[1], work.device_s[2]
    lists = work.move_s, work.move[0], work.move[1], work.link[0], work.link[1]
    for b in range(len(rows.placements)):
        placement, key = rows.placements[b], ready_s
        w = Waiting(placement, missing, ready_s, table, length, p.item, *lists, last)
        _write_seconds(p, rows, work, b, draw, seconds)
        _begin(p, rows, b, draw, Links(links, last, began_s), serial, ready_s)
        for d in range(devices):
            head[d] = d * stride
            length[d] = busy[d] = receives[d] = 0
            end_s[d] = sent_s[d] = np.inf
            sending[d] = last[d] = NOBODY
            for there in range(devices):
                w.front[d, there] = w.back[d, there] = NOBODY
        if waits:
            key, order = position, rows.order[b if len(rows.order) > 1 else 0]
            if len(rows.ranks) > 0:
                _write_order(rows.ranks[b], order, work.task[1])
            for k in range(n):
                v = order[k]
                d = placement[v]
                position[v] = k
                table[head[d] + length[d]] = v
                length[d] += ONE
        elif ranked:
            key = rows.ranks[b if len(rows.ranks) > 1 else 0]
        for v in range(n):
            missing[v] = ONE + p.in_first[v + 1] - p.in_first[v]
            for e in range(p.in_first[v], p.in_first[v + ONE]):
                if waits and position[p.in_producer[e]] > position[v]:
                    return b
        for k in range(reads):
            v, here = p.reader[k], _home(p, placement, k)
            if placement[v] != here:
                missing[v] += ONE
                _request(w, np.uint32(k), here, placement[v], 0.0)
        for v in range(n):
            _arrive(w, waits, np.uint32(v), 0.0, key)
        now, latest_s, started = 0.0, 0.0, 0
        while now < np.inf:
            # Completions and arrivals of this instant, and the start of one transfer, until
            # there are none left; then the start of one task.
            for d in range(devices):
                here = np.uint32(d)
                if end_s[here] == now:
                    u = running[here]
                    end_s[here], busy[here] = np.inf, 0
                    for k in range(p.first_move[u], p.first_move[u + ONE]):
                        v = p.reader[k]
                        if placement[v] == here:
                            _arrive(w, waits, v, now, key)
                        else:
                            _request(w, np.uint32(k), here, placement[v], now)
                if sent_s[here] == now:
                    k, there = sending[here], goal[here]
                    x = p.item[k]
                    sent_s[here], sending[here], receives[there] = np.inf, NOBODY, 0
                    while k < moves and p.item[k] == x:
                        if placement[p.reader[k]] == there:
                            if sends:
                                rows.sent_s[b, k], rows.arrival_s[b, k] = began_s[here], now
                            _arrive(w, waits, p.reader[k], now, key)
                        k += ONE
            # Of equal requests of one item that with the smaller destination goes first.
            best, here, to = NOBODY, np.uint32(0), np.uint32(0)
            for d in range(devices):
                for there in range(devices):
                    k = w.front[d, there]
                    can_start = k != NOBODY and sending[d] == NOBODY and not receives[there]
                    if can_start and (best == NOBODY or _goes_first(w, k, best)):
                        best, here, to = k, np.uint32(d), np.uint32(there)
            if best != NOBODY:
                behind = w.behind[best]
                w.front[here, to] = behind
                if behind == NOBODY:
                    w.back[here, to] = NOBODY
                else:
                    w.before[behind] = NOBODY
                sending[here], goal[here], receives[to] = best, to, 1
                move_s = _move_s(p, rows, draw, best, here, to)
                began_s[here], sent_s[here] = now, now + move_s
                continue
            task = NOBODY
            for d in range(devices):
                if not busy[d] and length[d] > 0:
                    v = table[head[d]]
                    is_ready = not waits or missing[v] == 0
                    if is_ready and (task == NOBODY or _is_before(key[v], v, key[task], task)):
                        task, here = v, np.uint32(d)
            if task != NOBODY:
                if waits:
                    head[here] += ONE
                    length[here] -= ONE
                else:
                    _pop_heap(table, here * stride, length, here, key)
                started += 1
                running[here], busy[here] = task, 1
                end_s[here] = now + seconds[task]
                latest_s = max(latest_s, end_s[here])
                if keeps:
                    rows.start_s[b, task], rows.finish_s[b, task] = now, end_s[here]
                continue
            now = np.inf
            for d in range(devices):
                now = min(now, end_s[d], sent_s[d])
        rows.makespan_s[b] = latest_s if started == n else np.inf
    return OK


@jit
def run_rows(
    problem: NativeProblem,
    rows: Rows,
    work: Work,
    draw: int,
    switches: int,
    links: int,
) -> int:
    """Simulates executions one after another.

    Args:
      problem: graph and costs.
      rows: the executions; their times are written, and their order where they have ranks.
      work: see `make_work`.
      draw: of noise, -1 for none.
      switches: of a `disciplines.Discipline`.
      links: `PARALLEL`, `SERIAL` or `DUPLEX`.

    Returns:
      `OK`, or the first row whose `in_order` ranks turn a precedence round.
    """
    serial = links == SERIAL
    ranked, waits = (switches & RANKED) != 0, (switches & WAITS) != 0
    if links == DUPLEX:
        return _by_event(problem, rows, work, draw, serial, ranked, waits)
    if waits:
        return _in_order(problem, rows, work, draw, serial)
    # Copied in three times, each of which knows what it need not ask: `fifo` is faster so.
    if ranked:
        return _by_start(problem, rows, work, draw, serial, ranked)
    if serial or draw >= 0:
        return _by_start(problem, rows, work, draw, serial, ranked)
    return _by_start(problem, rows, work, -1, False, False)


@functools.cache
def entry_signature() -> Any:
    """Returns the types of `run_rows`, which are the same for all graphs."""
    from doppler_jax.costs.build import from_edge_delays
    from doppler_jax.simulator.native import prepare

    problem = prepare(*from_edge_delays([1.0], [], num_devices=1))
    rows = make_rows(problem, np.zeros((1, 1), np.uint32))
    arrays = map(numba.typeof, (problem, rows, make_work(problem)))
    return types.int64(*arrays, types.int64, types.int64, types.int64)


class Entry(types.WrapperAddressProtocol):
    """`run_rows` for other compiled code, which calls it where it is and holds no copy."""

    def signature(self) -> Any:
        """Returns its types."""
        return entry_signature()

    def __wrapper_address__(self) -> int:
        """Returns where it is."""
        compiled = run_rows.get_compile_result(entry_signature())
        name = compiled.fndesc.llvm_cfunc_wrapper_name
        return compiled.library.get_pointer_to_function(name)


def warm() -> None:
    """Compiles `run_rows`."""
    run_rows.compile(entry_signature().args)
