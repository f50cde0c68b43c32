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
    transfer_factor: Array  # [K, T, D] noise of transfers
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
    move_s: Array  # [2, F + E]
    move: Array  # [2, F + E] uint32
    seen: Array  # [T, D] uint32, [0, D] where devices spend no time on transfers


def make_work(problem: NativeProblem) -> Work:
    """Returns room to work in. Pages of it that nothing touches take no memory."""
    n, devices = problem.compute_s.shape
    moves, handles = len(problem.reader), len(problem.handling_s) > 0
    return Work(
        task_s=np.empty((5, n)),
        task=np.empty((2, n), np.uint32),
        device_s=np.empty((3, devices)),
        device=np.empty((8, devices), np.uint32),
        link_s=np.empty((devices, devices)),
        link=np.empty((2, devices, devices), np.uint32),
        queue_s=np.empty((n + 2) * devices),
        queue=np.empty((2, (n + 2) * devices), np.uint32),
        move_s=np.empty((2, moves)),
        move=np.empty((2, moves), np.uint32),
        seen=np.empty((problem.num_tensors * handles, devices), np.uint32),
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
    none, (batch, n), moves = np.empty((0, 0)), placements.shape, len(problem.reader)
    start_s, finish_s, sent_s, arrival_s = (
        np.empty((batch, size) if wanted else (0, 0))
        for wanted, size in (*[(schedule, n)] * 2, *[(transfers, moves)] * 2)
    )
    compute_factor, transfer_factor = factors or (none, np.empty((0, 0, 0)))
    return Rows(
        placements=placements,
        ranks=none if ranks is None else ranks,
        order=np.empty((0, 0), np.uint32) if order is None else order,
        compute_factor=compute_factor,
        transfer_factor=transfer_factor,
        makespan_s=np.zeros(batch),
        start_s=start_s,
        finish_s=finish_s,
        sent_s=sent_s,
        arrival_s=arrival_s,
    )


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


@inner
def _write_seconds(
    problem: NativeProblem, rows: Rows, work: Work, b: int, draw: int, seconds: Array
) -> None:
    """Writes how long every task takes where it is, with noise and handling.

    Transfers and their bytes are added up in the order (reader, tensor).
    """
    placement, seen = rows.placements[b], work.seen
    for v in range(len(seconds)):
        factor = rows.compute_factor[draw, v] if draw >= 0 else 1.0
        seconds[v] = problem.compute_s[v, placement[v]] * factor
    if len(problem.handling_s) == 0:
        return
    count, size = work.task_s[3], work.task_s[4]
    for x in range(len(seen)):
        for d in range(seen.shape[1]):
            seen[x, d] = 0  # whether a tensor's transfer to a device was counted
    for v in range(len(seconds)):
        count[v] = size[v] = 0.0
    for v in range(len(seconds)):
        here = placement[v]
        for e in range(problem.in_first[v], problem.in_first[v + ONE]):
            u, x = problem.in_producer[e], problem.in_tensor[e]
            if placement[u] != here and seen[x, here] == 0:
                seen[x, here] = 1
                count[u] += 1.0
                size[u] += problem.in_bytes[e]
                count[v] += 1.0
                size[v] += problem.in_bytes[e]
    for v in range(len(seconds)):
        each_s = problem.handling_s[placement[v]]
        per_byte = problem.handling_s_per_byte[placement[v]]
        seconds[v] += count[v] * each_s + size[v] * per_byte


@inner
def _write_move_seconds(
    problem: NativeProblem, rows: Rows, b: int, draw: int, move_s: Array
) -> None:
    """Writes how long every move takes, with noise; 0 where an item is already there."""
    placement, reads = rows.placements[b], len(problem.home)
    for k in range(len(move_s)):
        here = problem.home[k] if k < reads else placement[problem.producer[k - reads]]
        there = placement[problem.reader[k]]
        per_byte = problem.seconds_per_byte[here, there]
        move_s[k] = problem.latency_s[here, there] + problem.num_bytes[k] * per_byte
        if draw >= 0 and k >= reads:
            tensor = problem.item[k] - np.uint32(problem.num_inputs)
            move_s[k] *= rows.transfer_factor[draw, tensor, there]


@inner
def _send(
    last: Array,
    sent_s: Array,
    link_s: Array,
    here: np.uint32,
    there: np.uint32,
    item: np.uint32,
    made_s: float,
    move_s: float,
) -> None:
    """Lets a serial link carry an item that was made at `made_s`, once to a destination.

    `last` `[D]` holds the item that was last sent to each device, `sent_s` `[D]` when that
    began, and `link_s` `[D, D]` when a link has carried all that it was given.
    """
    if last[there] != item:
        last[there] = item
        sent_s[there] = max(made_s, link_s[here, there])
        link_s[here, there] = sent_s[there] + move_s


@inner
def _carry_inputs(
    problem: NativeProblem, rows: Rows, work: Work, b: int, serial: bool, ready_s: Array
) -> None:
    """Frees the links; writes when graph inputs are there, which they carry first, by id."""
    last, last_s, link_s = work.device[0], work.device_s[0], work.link_s
    for k in range(len(last)):
        last[k] = NOBODY
        for j in range(len(last)):
            link_s[k, j] = 0.0
    for v in range(len(ready_s)):
        ready_s[v] = 0.0
    for f in range(len(problem.home)):
        v, here = problem.reader[f], problem.home[f]
        there = rows.placements[b, v]
        per_byte = problem.seconds_per_byte[here, there]
        sent_s, arrival_s = (
            0.0,
            problem.latency_s[here, there] + problem.num_bytes[f] * per_byte,
        )
        if serial and here != there:
            _send(last, last_s, link_s, here, there, problem.item[f], 0.0, arrival_s)
            sent_s, arrival_s = last_s[there], link_s[here, there]
        ready_s[v] = max(ready_s[v], arrival_s)
        if len(rows.sent_s) > 0:
            rows.sent_s[b, f], rows.arrival_s[b, f] = sent_s, arrival_s


@inner
def _clear(rows: Rows, b: int) -> None:
    """Lets nothing start until something does."""
    if len(rows.start_s) > 0:
        for v in range(rows.start_s.shape[1]):
            rows.start_s[b, v] = rows.finish_s[b, v] = np.inf
    if len(rows.sent_s) > 0:
        for k in range(rows.sent_s.shape[1]):
            rows.sent_s[b, k] = rows.arrival_s[b, k] = np.inf


@inner
def _in_order(problem: NativeProblem, rows: Rows, work: Work, draw: int, serial: bool) -> int:
    n, devices = problem.compute_s.shape
    keeps, sends = len(rows.start_s) > 0, len(rows.sent_s) > 0
    plain, pushes = draw < 0 and len(problem.handling_s) == 0, serial or sends
    compute_s, latency_s, per_byte = (
        problem.compute_s,
        problem.latency_s,
        problem.seconds_per_byte,
    )
    done_s, ready_s, seconds = work.task_s[0], work.task_s[1], work.task_s[2]
    last, last_s, link_s, free_s = (
        work.device[0],
        work.device_s[0],
        work.link_s,
        work.device_s[1],
    )
    for v in range(n):
        ready_s[v] = 0.0
    for b in range(len(rows.placements)):
        placement, order = rows.placements[b], rows.order[b if len(rows.order) > 1 else 0]
        if len(rows.ranks) > 0:
            _write_order(rows.ranks[b], order, work.task[0])
        if not plain:
            _write_seconds(problem, rows, work, b, draw, seconds)
        if keeps or sends:
            _clear(rows, b)
        if pushes or len(problem.home) > 0:
            _carry_inputs(problem, rows, work, b, serial, ready_s)
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
                if not pushes:
                    source = placement[u]
                    move_s = (
                        latency_s[source, here] + problem.in_bytes[e] * per_byte[source, here]
                    )
                    if draw >= 0:
                        move_s *= rows.transfer_factor[draw, problem.in_tensor[e], here]
                    start = max(start, done_s[u] + move_s)
            finish = start + (compute_s[v, here] if plain else seconds[v])
            done_s[v] = free_s[here] = finish
            latest_s = max(latest_s, finish)
            if keeps:
                rows.start_s[b, v], rows.finish_s[b, v] = start, finish
            if pushes:
                # In the order of their source's finishes: links know no other.
                for m in range(problem.first_move[v], problem.first_move[v + ONE]):
                    reader, item = problem.reader[m], problem.item[m]
                    there = placement[reader]
                    move_s = (
                        latency_s[here, there] + problem.num_bytes[m] * per_byte[here, there]
                    )
                    if draw >= 0:
                        tensor = item - np.uint32(problem.num_inputs)
                        move_s *= rows.transfer_factor[draw, tensor, there]
                    sent, arrival = finish, finish + move_s
                    if serial and here != there:
                        _send(last, last_s, link_s, here, there, item, finish, move_s)
                        sent, arrival = last_s[there], link_s[here, there]
                    ready_s[reader] = max(ready_s[reader], arrival)
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
def _first_task(q: Queues, d: int, ranked: bool) -> np.uint32:
    return q.heap[d * q.stride] if ranked and q.length[d] else q.task[q.head[d]]


@inlined
def _release(
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
    problem: NativeProblem, rows: Rows, work: Work, draw: int, serial: bool, ranked: bool
) -> int:
    n, devices = problem.compute_s.shape
    keeps, sends = len(rows.start_s) > 0, len(rows.sent_s) > 0
    plain = draw < 0 and len(problem.handling_s) == 0
    # Locals, for the loop over moves is slower where it reads tuples.
    compute_s, latency_s, per_byte = (
        problem.compute_s,
        problem.latency_s,
        problem.seconds_per_byte,
    )
    first_move, item, reader, num_bytes = (
        problem.first_move,
        problem.item,
        problem.reader,
        problem.num_bytes,
    )
    ready_s, seconds, missing = work.task_s[0], work.task_s[1], work.task[0]
    last, last_s, link_s = work.device[0], work.device_s[0], work.link_s
    stride, queue_s, queue, heap = n + 2, work.queue_s, work.queue[0], work.queue[1]
    head, tail, length = work.device[1], work.device[2], work.device[3]
    free_s, next_s, key = work.device_s[1], work.device_s[2], ready_s
    q = Queues(stride, queue_s, queue, heap, head, tail, length, free_s, next_s)
    for b in range(len(rows.placements)):
        placement = rows.placements[b]
        if ranked:
            key = rows.ranks[b if len(rows.ranks) > 1 else 0]
        if not plain:
            _write_seconds(problem, rows, work, b, draw, seconds)
        if keeps or sends:
            _clear(rows, b)
        if serial or len(problem.home) > 0:
            _carry_inputs(problem, rows, work, b, serial, ready_s)
        else:
            for v in range(n):
                ready_s[v] = 0.0
        for d in range(devices):
            head[d] = tail[d] = d * stride + 1
            length[d] = 0
            free_s[d] = 0.0
            next_s[d] = queue_s[head[d]] = np.inf
            queue_s[head[d] - ONE] = -np.inf
        for v in range(n):
            missing[v] = problem.in_first[v + 1] - problem.in_first[v]
            if missing[v] == 0:
                _release(q, placement[v], np.uint32(v), ready_s[v], key, ranked)
        latest_s = 0.0
        for _ in range(n):
            # The device whose next task is first by (start, key, id) of all. Without
            # branches, for they could not be predicted.
            here, start, second = np.uint32(0), next_s[0], np.inf
            for d in range(1, devices):
                here = np.uint32(d) if next_s[d] < start else here
                second = min(second, max(start, next_s[d]))
                start = min(start, next_s[d])
            if start == second:
                if start == np.inf:  # a task that cannot run, and what waits for it
                    latest_s = np.inf
                    break
                best = _first_task(q, here, ranked)
                for d in range(here + ONE, devices):
                    if next_s[d] == start:
                        v = _first_task(q, d, ranked)
                        if _is_before(key[v], v, key[best], best):
                            here, best = np.uint32(d), v
            i = head[here]
            if ranked and length[here]:
                u = _pop_heap(heap, here * stride, length, here, key)
            else:
                u = queue[i]
                queue_s[i] = -np.inf
                i += ONE
            finish = start + (compute_s[u, here] if plain else seconds[u])
            latest_s = max(latest_s, finish)
            free_s[here] = finish
            if ranked:
                while queue_s[i] <= finish and queue_s[i] < np.inf:
                    _push_heap(heap, here * stride, length, here, key, queue[i])
                    i += ONE
            head[here] = i
            next_s[here] = finish if ranked and length[here] else max(finish, queue_s[i])
            if keeps:
                rows.start_s[b, u], rows.finish_s[b, u] = start, finish
            for k in range(first_move[u], first_move[u + ONE]):
                v = reader[k]
                there = placement[v]
                move_s = latency_s[here, there] + num_bytes[k] * per_byte[here, there]
                if draw >= 0:
                    tensor = item[k] - np.uint32(problem.num_inputs)
                    move_s *= rows.transfer_factor[draw, tensor, there]
                sent, arrival = finish, finish + move_s
                if serial and here != there:
                    _send(last, last_s, link_s, here, there, item[k], finish, move_s)
                    sent, arrival = last_s[there], link_s[here, there]
                if sends:
                    rows.sent_s[b, k], rows.arrival_s[b, k] = sent, arrival
                at_s = max(ready_s[v], arrival)
                ready_s[v] = at_s
                left = np.uint32(missing[v] - ONE)
                missing[v] = left
                if left == 0:
                    _release(q, there, v, at_s, key, ranked)
        rows.makespan_s[b] = latest_s
    return OK


class Waiting(NamedTuple):
    """Transfers, named by their first move; those of a pair of devices wait in a list."""

    request_s: Array  # [F + E]
    item: Array  # [F + E] uint32
    before: Array  # [F + E] uint32, the one before it in its list, or NOBODY
    behind: Array  # [F + E] uint32
    front: Array  # [D, D] uint32, the first of each list, or NOBODY
    back: Array  # [D, D] uint32


@inner
def _goes_first(wait: Waiting, k: np.uint32, other: np.uint32) -> bool:
    """Whether a transfer goes before another by (request, item), graph inputs first."""
    return _is_before(wait.request_s[k], wait.item[k], wait.request_s[other], wait.item[other])


@inner
def _request(
    wait: Waiting, k: np.uint32, here: np.uint32, there: np.uint32, now: float
) -> None:
    """Lets a transfer wait in the list of its pair of devices, sorted in from the end."""
    wait.request_s[k] = now
    j, behind = wait.back[here, there], NOBODY
    while j != NOBODY and _goes_first(wait, k, j):
        behind = j
        j = wait.before[j]
    wait.before[k], wait.behind[k] = j, behind
    if j == NOBODY:
        wait.front[here, there] = k
    else:
        wait.behind[j] = k
    if behind == NOBODY:
        wait.back[here, there] = k
    else:
        wait.before[behind] = k


class Ready(NamedTuple):
    """What tasks still miss, and per device a heap of those that are ready, by (key, id)."""

    placement: Array  # [N] uint32
    missing: Array  # [N] uint32
    ready_s: Array  # [N]
    table: Array
    length: Array  # [D] uint32


@inner
def _arrive(r: Ready, waits: bool, v: np.uint32, now: float, key: Array) -> None:
    """Lets a task miss one input less."""
    r.missing[v] -= ONE
    if r.missing[v] == 0 and not waits:
        r.ready_s[v] = now
        d = r.placement[v]
        _push_heap(r.table, d * (len(r.missing) + 1), r.length, d, key, v)


@inner
def _by_event(
    problem: NativeProblem, rows: Rows, work: Work, draw: int, ranked: bool, waits: bool
) -> int:
    n, devices = problem.compute_s.shape
    moves, reads, stride = len(problem.reader), len(problem.home), n + 1
    item, reader, first_move = problem.item, problem.reader, problem.first_move
    keeps, sends = len(rows.start_s) > 0, len(rows.sent_s) > 0
    ready_s, seconds, position = work.task_s[0], work.task_s[1], work.task_s[2]
    missing, move_s = work.task[0], work.move_s[0]  # inputs to come
    # Per device: a heap of the ready tasks, or under `in_order` all that have not started.
    table, head, length = work.queue[0], work.device[0], work.device[1]
    running, end_s, busy = work.device[2], work.device_s[0], work.device[3]
    wait = Waiting(work.move_s[1], item, work.move[0], work.move[1], work.link[0], work.link[1])
    front, back = wait.front, wait.back
    sending, goal, receives = work.device[4], work.device[5], work.device[6]
    last = work.device[7]  # the item that was last requested for each device
    began_s, sent_s = work.device_s[1], work.device_s[2]
    for b in range(len(rows.placements)):
        placement, key = rows.placements[b], ready_s
        if ranked and not waits:
            key = rows.ranks[b if len(rows.ranks) > 1 else 0]
        for d in range(devices):
            head[d] = d * stride
            length[d] = busy[d] = receives[d] = 0
            end_s[d] = sent_s[d] = np.inf
            sending[d] = last[d] = NOBODY
            for there in range(devices):
                front[d, there] = back[d, there] = NOBODY
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
        _write_seconds(problem, rows, work, b, draw, seconds)
        _write_move_seconds(problem, rows, b, draw, move_s)
        if keeps or sends:
            _clear(rows, b)

        ready = Ready(placement, missing, ready_s, table, length)
        now, latest_s, started = 0.0, 0.0, 0
        for v in range(n):
            missing[v] = ONE + problem.in_first[v + 1] - problem.in_first[v]
            for e in range(problem.in_first[v], problem.in_first[v + ONE]):
                if waits and position[problem.in_producer[e]] > position[v]:
                    return b
        for k in range(reads):
            here, there = problem.home[k], placement[reader[k]]
            if there != here:
                missing[reader[k]] += ONE
                if last[there] != item[k]:
                    last[there] = item[k]
                    _request(wait, np.uint32(k), here, there, 0.0)
        for v in range(n):
            _arrive(ready, waits, np.uint32(v), 0.0, key)
        while now < np.inf:
            # Completions and arrivals of this instant, and the start of one transfer, until
            # there are none left; then the start of one task.
            for d in range(devices):
                here = np.uint32(d)
                if end_s[here] == now:
                    u = running[here]
                    end_s[here], busy[here] = np.inf, 0
                    for k in range(first_move[u], first_move[u + ONE]):
                        there = placement[reader[k]]
                        if there == here:
                            _arrive(ready, waits, reader[k], now, key)
                        elif last[there] != item[k]:
                            last[there] = item[k]
                            _request(wait, np.uint32(k), here, there, now)
                if sent_s[here] == now:
                    k, there = sending[here], goal[here]
                    x = item[k]
                    sent_s[here], sending[here], receives[there] = np.inf, NOBODY, 0
                    while k < moves and item[k] == x:
                        if placement[reader[k]] == there:
                            if sends:
                                rows.sent_s[b, k], rows.arrival_s[b, k] = began_s[here], now
                            _arrive(ready, waits, reader[k], now, key)
                        k += ONE
            # Of equal requests of one item that with the smaller destination goes first.
            best, here, to = NOBODY, 0, 0
            for d in range(devices):
                for there in range(devices):
                    k = front[d, there]
                    can_start = k != NOBODY and sending[d] == NOBODY and not receives[there]
                    if can_start and (best == NOBODY or _goes_first(wait, k, best)):
                        best, here, to = k, d, there
            if best != NOBODY:
                behind = wait.behind[best]
                front[here, to] = behind
                if behind == NOBODY:
                    back[here, to] = NOBODY
                else:
                    wait.before[behind] = NOBODY
                sending[here], goal[here], receives[to] = best, to, 1
                began_s[here], sent_s[here] = now, now + move_s[best]
                continue
            task = NOBODY
            for d in range(devices):
                if not busy[d] and length[d] > 0:
                    v = table[head[d]]
                    is_ready = not waits or missing[v] == 0
                    if is_ready and (task == NOBODY or _is_before(key[v], v, key[task], task)):
                        task, here = v, d
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
    ranked: bool,
    waits: bool,
    links: int,
) -> int:
    """Simulates executions one after another.

    Args:
      problem: graph and costs.
      rows: the executions; their times are written, and their order where they have ranks.
      work: see `make_work`.
      draw: of noise, -1 for none.
      ranked: see `disciplines.Discipline`.
      waits: likewise.
      links: `PARALLEL`, `SERIAL` or `DUPLEX`.

    Returns:
      `OK`, or the first row whose `in_order` ranks turn a precedence round.
    """
    if links == DUPLEX:
        return _by_event(problem, rows, work, draw, ranked, waits)
    if waits:
        return _in_order(problem, rows, work, draw, links == SERIAL)
    if ranked:
        return _by_start(problem, rows, work, draw, links == SERIAL, ranked)
    return _by_start(problem, rows, work, draw, links == SERIAL, ranked)


@functools.cache
def entry_signature() -> Any:
    """Returns the types of `run_rows`, which are the same for all graphs."""
    from doppler_jax.costs.build import from_edge_delays
    from doppler_jax.simulator.native import prepare

    problem = prepare(*from_edge_delays([1.0], [], num_devices=1))
    rows = make_rows(problem, np.zeros((1, 1), np.uint32))
    arrays = map(numba.typeof, (problem, rows, make_work(problem)))
    return types.int64(*arrays, types.int64, types.boolean, types.boolean, types.int64)


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
