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
Slices are filled by loops, for Numba compiles each assignment to one as a function.
"""

# NumPy scalars and Python ints are one kind to Numba.
# mypy: disable-error-code="assignment, arg-type, return-value, call-overload"

from collections.abc import Callable
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
    ranks: Array  # [B, N] float64, [1, N] for all rows, or [0, 0] under `fifo`
    order: Array  # [N] uint32, the tasks by (rank, id) if that is one for all rows; else [0]
    compute_factor: Array  # [N] noise of tasks, or [0]
    transfer_factor: Array  # [T, D] noise of transfers, or [0, 0]
    makespan_s: Array  # [B], to be written
    start_s: Array  # [B, N], to be written; [0, 0] where it is not wanted
    finish_s: Array  # likewise
    sent_s: Array  # [B, F + E], to be written: when a move's transfer starts; [0, 0] likewise
    arrival_s: Array  # likewise: when it ends


class Links(NamedTuple):
    """Serial links, and what of the item in hand has been sent."""

    free_s: Array  # [D, D] when a link has carried all that was requested
    sent: Array  # [D] int64, the item that was last sent to each device
    sent_s: Array  # [D] when its transfer started
    arrival_s: Array  # [D] and ended


@jit
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


@jit
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


@jit
def _write_move_seconds(problem: NativeProblem, rows: Rows, b: int, move_s: Array) -> None:
    """Writes how long every move takes, with noise; 0 where an item is already there."""
    placement, reads = rows.placements[b], len(problem.home)
    for k in range(len(move_s)):
        here = problem.home[k] if k < reads else placement[problem.producer[k - reads]]
        there = placement[problem.reader[k]]
        move_s[k] = _move_s(problem, here, there, problem.num_bytes[k])
    if len(rows.transfer_factor) > 0:
        for k in range(reads, len(move_s)):
            tensor = problem.item[k] - np.uint32(problem.num_inputs)
            move_s[k] *= rows.transfer_factor[tensor, placement[problem.reader[k]]]


@inlined
def _move_s(problem: NativeProblem, here: int, there: int, size: float) -> float:
    return problem.latency_s[here, there] + size * problem.seconds_per_byte[here, there]


@jit
def _make_links(devices: int) -> Links:
    square, row = np.empty((devices, devices)), np.empty(devices)
    return Links(square, np.empty(devices, np.int64), row, np.empty(devices))


@inlined
def _send(
    links: Links, serial: bool, here: int, there: int, item: int, made_s: float, move_s: float
) -> tuple[float, float]:
    """Returns when the transfer of what was made at `made_s` starts and ends.

    A serial link carries an item once to a destination, in the order of calls.
    """
    sent_s, arrival_s = made_s, made_s + move_s
    if serial and here != there:
        if links.sent[there] != item:
            links.sent[there] = item
            links.sent_s[there] = max(made_s, links.free_s[here, there])
            links.arrival_s[there] = links.sent_s[there] + move_s
            links.free_s[here, there] = links.arrival_s[there]
        sent_s, arrival_s = links.sent_s[there], links.arrival_s[there]
    return sent_s, arrival_s


@jit
def _carry_inputs(
    problem: NativeProblem, rows: Rows, b: int, links: Links, serial: bool, ready_s: Array
) -> None:
    """Frees the links; writes when graph inputs are there, which they carry first, by id."""
    for k in range(len(links.sent)):
        links.sent[k] = -1
        for j in range(len(links.sent)):
            links.free_s[k, j] = 0.0
    for v in range(len(ready_s)):
        ready_s[v] = 0.0
    for f in range(len(problem.home)):
        v, here = problem.reader[f], problem.home[f]
        there = rows.placements[b, v]
        move_s = _move_s(problem, here, there, problem.num_bytes[f])
        sent_s, arrival_s = _send(links, serial, here, there, problem.item[f], 0.0, move_s)
        ready_s[v] = max(ready_s[v], arrival_s)
        if len(rows.sent_s) > 0:
            rows.sent_s[b, f], rows.arrival_s[b, f] = sent_s, arrival_s


@jit
def _clear(rows: Rows, b: int) -> None:
    """Lets nothing start until something does."""
    if len(rows.start_s) > 0:
        for v in range(rows.start_s.shape[1]):
            rows.start_s[b, v] = rows.finish_s[b, v] = np.inf
    if len(rows.sent_s) > 0:
        for k in range(rows.sent_s.shape[1]):
            rows.sent_s[b, k] = rows.arrival_s[b, k] = np.inf


@jit
def _in_order(problem: NativeProblem, rows: Rows, serial: bool) -> int:
    n, devices = problem.compute_s.shape
    noisy, keeps, shared = (
        len(rows.transfer_factor) > 0,
        len(rows.start_s) > 0,
        len(rows.order) > 0,
    )
    handles, sends = len(problem.handling_s) > 0, len(rows.sent_s) > 0
    plain, pushes = len(rows.compute_factor) == 0 and not handles, serial or sends
    order = rows.order.copy() if shared else np.empty(n, np.uint32)
    spare = np.empty(n, np.uint32)
    done_s, seconds, free_s, ready_s = np.empty(n), np.empty(n), np.empty(devices), np.zeros(n)
    seen = np.full((problem.num_tensors * handles, devices), -1)
    links, has_inputs = _make_links(devices), len(problem.home) > 0
    for b in range(len(rows.placements)):
        placement = rows.placements[b]
        if not shared:
            _write_order(rows.ranks[b], order, spare)
        if not plain:
            _write_seconds(problem, rows, b, seen, seconds)
        if keeps or sends:
            _clear(rows, b)
        if pushes or has_inputs:
            _carry_inputs(problem, rows, b, links, serial, ready_s)
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
                    move_s = _move_s(problem, placement[u], here, problem.in_bytes[e])
                    if noisy:
                        move_s *= rows.transfer_factor[problem.in_tensor[e], here]
                    start = max(start, done_s[u] + move_s)
            finish = start + (problem.compute_s[v, here] if plain else seconds[v])
            done_s[v] = free_s[here] = finish
            latest_s = max(latest_s, finish)
            if keeps:
                rows.start_s[b, v], rows.finish_s[b, v] = start, finish
            if pushes:
                # In the order of their source's finishes: links know no other.
                for m in range(problem.first_move[v], problem.first_move[v + ONE]):
                    reader, item = problem.reader[m], problem.item[m]
                    there = placement[reader]
                    move_s = _move_s(problem, here, there, problem.num_bytes[m])
                    if noisy:
                        tensor = item - np.uint32(problem.num_inputs)
                        move_s *= rows.transfer_factor[tensor, there]
                    sent_s, arrival_s = _send(links, serial, here, there, item, finish, move_s)
                    ready_s[reader] = max(ready_s[reader], arrival_s)
                    if sends:
                        rows.sent_s[b, m], rows.arrival_s[b, m] = sent_s, arrival_s
        if least_s < 0.0:
            return b
        rows.makespan_s[b] = latest_s
    return OK


@jit
def _is_before(a: float, u: np.uint32, b: float, v: np.uint32) -> bool:
    """Whether task u with key a goes before task v with key b."""
    return a < b or (a == b and u < v)


@inlined
def _push_heap(heap: Array, base: int, length: Array, d: int, key: Array, task: int) -> None:
    """Adds a task to device d's binary heap by (key, id)."""
    i = np.uint32(length[d])
    length[d] = i + ONE
    while i > 0:
        parent = (i - ONE) >> ONE
        above = heap[base + parent]
        if _is_before(key[above], above, key[task], task):
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
        if other < end and _is_before(
            key[heap[base + other]],
            heap[base + other],
            key[heap[base + child]],
            heap[base + child],
        ):
            child = other
        if not _is_before(key[heap[base + child]], heap[base + child], key[last], last):
            break
        heap[base + i] = heap[base + child]
        i = child
    heap[base + i] = last
    return least


def _make_by_start(ranked: bool) -> Callable[[NativeProblem, Rows, bool], int]:
    """Returns the loop over starts; under `fifo` without what ranks need: an eighth faster."""

    @jit
    def by_start(problem: NativeProblem, rows: Rows, serial: bool) -> int:
        n, devices = problem.compute_s.shape
        keeps, sends = len(rows.start_s) > 0, len(rows.sent_s) > 0
        noisy, handles = len(rows.transfer_factor) > 0, len(problem.handling_s) > 0
        plain = len(rows.compute_factor) == 0 and not handles
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
        links, seconds, ready_s = _make_links(devices), np.empty(n), np.empty(n)
        last, last_s, free_link_s = links.sent, links.sent_s, links.free_s
        seen = np.full((problem.num_tensors * handles, devices), -1)
        num_reads, missing = np.empty(n, np.int32), np.empty(n, np.int32)
        # Per device: tasks that wait, by (ready time, key, id), from head to tail, -inf before
        # and inf behind; under ranks a heap of those that are ready when it is idle, too.
        # Pages of these tables that nothing touches take no memory.
        stride = n + 2
        queue_s, queue = np.empty(stride * devices), np.empty(stride * devices, np.uint32)
        heap = np.empty(stride * devices if ranked else 0, np.uint32)
        head, tail = np.empty(devices, np.uint32), np.empty(devices, np.uint32)
        length = np.empty(devices, np.uint32)
        free_s, next_s = np.empty(devices), np.empty(devices)  # when idle, when next busy
        key = ready_s

        # Functions in here are inlined by Numba as they are, without a table being passed.
        def first_task(d: int) -> np.uint32:
            return heap[d * stride] if ranked and length[d] else queue[head[d]]

        def release(d: int, task: int, at_s: float, key: Array) -> None:
            """Lets a task wait for device d."""
            next_s[d] = min(next_s[d], max(free_s[d], at_s))
            if ranked and at_s <= free_s[d]:
                _push_heap(heap, d * stride, length, d, key, task)
            else:
                # Sorted in from the end, where what became ready last belongs.
                i = tail[d]
                tail[d] = i + ONE
                queue_s[i + ONE] = np.inf
                while True:
                    ahead_s, ahead = queue_s[i - ONE], queue[i - ONE]
                    if ahead_s < at_s or (
                        ahead_s == at_s and _is_before(key[ahead], ahead, key[task], task)
                    ):
                        break
                    queue_s[i], queue[i] = ahead_s, ahead
                    i -= ONE
                queue_s[i], queue[i] = at_s, task

        for v in range(n):
            num_reads[v] = problem.in_first[v + 1] - problem.in_first[v]
        for b in range(len(rows.placements)):
            placement = rows.placements[b]
            if ranked:
                key = rows.ranks[b if len(rows.ranks) > 1 else 0]
            if not plain:
                _write_seconds(problem, rows, b, seen, seconds)
            if keeps or sends:
                _clear(rows, b)
            if serial or len(problem.home) > 0:
                _carry_inputs(problem, rows, b, links, serial, ready_s)
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
                missing[v] = num_reads[v]
                if num_reads[v] == 0:
                    release(placement[v], np.uint32(v), ready_s[v], key)
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
                    best = first_task(here)
                    for d in range(here + ONE, devices):
                        if next_s[d] == start:
                            v = first_task(d)
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
                    if noisy:
                        tensor = item[k] - np.uint32(problem.num_inputs)
                        move_s *= rows.transfer_factor[tensor, there]
                    sent, arrival = finish, finish + move_s
                    if serial and here != there:  # what `_send` does, which is slower here
                        if last[there] != item[k]:
                            last[there] = item[k]
                            last_s[there] = max(finish, free_link_s[here, there])
                            free_link_s[here, there] = last_s[there] + move_s
                        sent, arrival = last_s[there], free_link_s[here, there]
                    if sends:
                        rows.sent_s[b, k], rows.arrival_s[b, k] = sent, arrival
                    at_s = max(ready_s[v], arrival)
                    ready_s[v] = at_s
                    left = missing[v] - np.int32(1)
                    missing[v] = left
                    if left == 0:
                        release(there, v, at_s, key)
            rows.makespan_s[b] = latest_s
        return OK

    return by_start


_fifo, _ranked = _make_by_start(False), _make_by_start(True)


class Waiting(NamedTuple):
    """Transfers, named by their first move; those of a pair of devices wait in a list."""

    request_s: Array  # [F + E]
    before: Array  # [F + E] int64, the one before it in its list, or -1
    behind: Array  # [F + E]
    front: Array  # [D, D] int64, the first of each list, or -1
    back: Array  # [D, D]


@inlined
def _goes_first(wait: Waiting, item: Array, k: int, other: int) -> bool:
    """Whether a transfer goes before another by (request, item), graph inputs first."""
    return (wait.request_s[k] < wait.request_s[other]) | (
        (wait.request_s[k] == wait.request_s[other]) & (item[k] < item[other])
    )


@jit
def _request(
    wait: Waiting, item: Array, k: np.int64, here: np.int64, there: np.int64, now: float
) -> None:
    """Lets a transfer wait in the list of its pair of devices, sorted in from the end."""
    wait.request_s[k] = now
    j = wait.back[here, there]
    while j >= 0 and _goes_first(wait, item, k, j):
        j = wait.before[j]
    behind = wait.front[here, there] if j < 0 else wait.behind[j]
    wait.before[k], wait.behind[k] = j, behind
    if j < 0:
        wait.front[here, there] = k
    else:
        wait.behind[j] = k
    if behind < 0:
        wait.back[here, there] = k
    else:
        wait.before[behind] = k


@inlined
def _next_transfer(
    wait: Waiting, item: Array, sending: Array, receives: Array
) -> tuple[int, int, int]:
    """Returns the transfer that starts next, or -1, and from where to where it goes.

    Of equal requests of one item that with the smaller destination goes first.
    """
    best, source, goal = -1, 0, 0
    for here in range(len(sending)):
        for there in range(len(sending)):
            k = wait.front[here, there]
            can_start = k >= 0 and sending[here] < 0 and not receives[there]
            if can_start and (best < 0 or _goes_first(wait, item, k, best)):
                best, source, goal = k, here, there
    return best, source, goal


@jit
def _by_event(problem: NativeProblem, rows: Rows, ranked: bool, waits: bool) -> int:
    n, devices = problem.compute_s.shape
    moves, reads, stride = len(problem.reader), len(problem.home), n + 1
    item, reader, first_move = problem.item, problem.reader, problem.first_move
    keeps, sends, shared = len(rows.start_s) > 0, len(rows.sent_s) > 0, len(rows.order) > 0
    seen = np.full((problem.num_tensors * (len(problem.handling_s) > 0), devices), -1)
    seconds, move_s = np.empty(n), np.empty(moves)
    missing, ready_s = np.empty(n, np.int32), np.empty(n)  # inputs to come; last arrival
    done, fresh = np.empty(n, np.bool_), np.empty(n, np.uint32)  # tasks that became ready now
    order, spare = np.empty(n, np.uint32), np.empty(n, np.uint32)
    # Per device: a heap of the ready tasks, or under `in_order` all that have not started.
    table = np.empty(stride * devices, np.uint32)
    head, length = np.empty(devices, np.uint32), np.empty(devices, np.uint32)
    running, end_s = np.empty(devices, np.uint32), np.empty(devices)
    wait = Waiting(
        np.empty(moves),
        np.empty(moves, np.int64),
        np.empty(moves, np.int64),
        np.empty((devices, devices), np.int64),
        np.empty((devices, devices), np.int64),
    )
    sending, goal = np.empty(devices, np.int64), np.empty(devices, np.int64)
    receives, busy = np.empty(devices, np.bool_), np.empty(devices, np.bool_)
    last = np.empty(devices, np.int64)  # the item that was last requested for each device
    began_s, sent_s = np.empty(devices), np.empty(devices)
    for b in range(len(rows.placements)):
        placement, key = rows.placements[b], ready_s
        if ranked:
            key = rows.ranks[b if len(rows.ranks) > 1 else 0]
        for d in range(devices):
            head[d] = d * stride
            length[d] = 0
            end_s[d] = sent_s[d] = np.inf
            sending[d] = last[d] = -1
            receives[d] = busy[d] = False
            for there in range(devices):
                wait.front[d, there] = wait.back[d, there] = -1
        if waits:
            if shared:
                for k in range(n):
                    order[k] = rows.order[k]
            else:
                _write_order(key, order, spare)
            for v in range(n):
                done[v] = False
            for k in range(n):
                v = order[k]
                done[v] = True
                for e in range(problem.in_first[v], problem.in_first[v + ONE]):
                    if not done[problem.in_producer[e]]:
                        return b
                d = placement[v]
                table[head[d] + length[d]] = v
                length[d] += ONE
        _write_seconds(problem, rows, b, seen, seconds)
        _write_move_seconds(problem, rows, b, move_s)
        if keeps or sends:
            _clear(rows, b)
        for v in range(n):
            missing[v] = problem.in_first[v + 1] - problem.in_first[v]
        count, now, latest_s, started = 0, 0.0, 0.0, 0
        for k in range(reads):
            here, there = np.int64(problem.home[k]), np.int64(placement[reader[k]])
            if there != here:
                missing[reader[k]] += np.int32(1)
                if last[there] != item[k]:
                    last[there] = item[k]
                    _request(wait, item, np.int64(k), here, there, 0.0)
        for v in range(n):
            if missing[v] == 0:
                fresh[count] = v
                count += 1
        while now < np.inf:
            # Completions and arrivals of this instant, and the start of one transfer, until
            # there are none left; then the start of one task.
            for here in range(devices):
                if end_s[here] == now:
                    u = running[here]
                    end_s[here], busy[here] = np.inf, False
                    for m in range(first_move[u], first_move[u + ONE]):
                        v = reader[m]
                        there = np.int64(placement[v])
                        if there == here:
                            missing[v] -= np.int32(1)
                            if missing[v] == 0:
                                fresh[count] = v
                                count += 1
                        elif last[there] != item[m]:
                            last[there] = item[m]
                            _request(wait, item, np.int64(m), np.int64(here), there, now)
                if sent_s[here] == now:
                    k, there = sending[here], goal[here]
                    x = item[k]
                    sent_s[here], sending[here], receives[there] = np.inf, -1, False
                    while k < moves and item[k] == x:
                        v = reader[k]
                        if placement[v] == there:
                            if sends:
                                rows.sent_s[b, k], rows.arrival_s[b, k] = began_s[here], now
                            missing[v] -= np.int32(1)
                            if missing[v] == 0:
                                fresh[count] = v
                                count += 1
                        k += 1
            for j in range(count):
                v = fresh[j]
                d = placement[v]
                ready_s[v] = now
                if not waits:
                    _push_heap(table, d * stride, length, d, key, v)
            count = 0
            k, here, there = _next_transfer(wait, item, sending, receives)
            if k >= 0:
                behind = wait.behind[k]
                wait.front[here, there] = behind
                if behind < 0:
                    wait.back[here, there] = -1
                else:
                    wait.before[behind] = -1
                sending[here], goal[here], receives[there] = k, there, True
                began_s[here], sent_s[here] = now, now + move_s[k]
                continue
            task, here = NOBODY, 0
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
                running[here], busy[here] = task, True
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
