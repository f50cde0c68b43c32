"""Ruin and recreate, as Numba compiles it: some tasks are freed, and placed anew.

A step frees a few tasks that are near each other in the graph. A list schedule of the whole
plan then runs the others where they are, and puts each freed task, once its producers have
started, where it ends first. What the readers of its results would wait for is weighed in, by
one of three weights. Other steps move tasks as `kernels.mutate` does or, where the queue looks
at ranks, a rank. What comes out is accepted as in simulated annealing.

Where links are `parallel` and nothing else counts, that list schedule is the plan's execution
under `fifo` or `priority`, in every bit. Elsewhere it only says where freed tasks go.

Under `in_order` the list schedule minds memory: a device starts, of its ready tasks for which
it has room, the one of least rank. The order of its starts is then what is executed.
"""

# NumPy scalars and Python ints are one kind to Numba.
# mypy: disable-error-code="assignment, arg-type, return-value, call-overload, no-any-return"

from typing import NamedTuple

import numba
import numpy as np

from doppler_jax.native import inlined, inner, jit
from doppler_jax.search.kernels import (
    BEST,
    ENERGY,
    VALUE,
    Aim,
    Trial,
    _below,
    _copy,
    _uniform,
    mutate,
    plan_worth,
)
from doppler_jax.simulator.native_kernels import (
    NOBODY,
    ONE,
    RANKED,
    Queues,
    _pop_heap,
    _push_heap,
    empty_queues,
    keep_busy,
    next_device,
    release,
    take_task,
)

Array = np.ndarray

SHIFT = 0.3
"""How often, where ranks count, a step that frees no tasks moves a rank."""

CRITICAL, TAKEN = 0.6, 4
"""How often a step begins at a task of the critical chain, and after how many accepted steps
the chain is worked out anew."""

MINDS = 0.5
"""How often, under memory limits, freed tasks go only where their resident inputs fit."""

FIRST = 100.0
"""By how much more an exceeded memory counts until a plan has fitted."""

LENGTH, AGE, WAITS = range(3)
"""Entries of `Ruins.count`: tasks of the chain, accepted steps since it was worked out, and
whether devices of a list schedule wait for room."""

TOGGLE = 0.02
"""How often, under `in_order`, a step changes that."""


class Room(NamedTuple):
    """What lies in memory while a list schedule is made under `in_order`; else all is empty.

    Of X items and M moves, stay x is the item on its maker's device, and stay X + k is the copy
    that move k brings. A copy takes its memory when its maker starts, an operand that a freed
    task reads stays where it was made, and graph inputs lie to the end: so it is at most more
    than an execution needs.
    """

    made_bytes: Array  # [N] of all that a task makes
    move: Array  # [E] uint32, which one brings what is read along an edge
    held: Array  # [D] bytes
    left: Array  # [X + M] uint32, readers that have not started
    until_s: Array  # [X + M] when those that have end
    device: Array  # [X + M] uint32
    stay: Array  # [M] uint32, which one the reader of a move holds
    ending: Array  # [X + M] uint32, a heap of those without readers left, by their end
    count: Array  # [1] uint32, of these
    last: Array  # [D] int64, the item that was last looked at on each device
    recent: Array  # [D] uint32, and its stay


class Ruins(NamedTuple):
    """A plan that is ruined and recreated again and again, and the best that it has been."""

    random: Array  # [1] uint64
    placement: Array  # [N] uint32
    rank: Array  # [N] float64
    best_placement: Array  # [N] uint32
    best_rank: Array  # [N] float64
    worth: Array  # [3] float64
    count: Array  # [3] int64
    pinned: Array  # [N] bool, whether a task can run on one device alone
    free: Array  # [N] bool, whether the list schedule is to place a task
    moved: Array  # [2, M] uint32, what was freed or moved, and where it was; M at most
    # Of the last list schedule:
    start_s: Array  # [N]
    finish_s: Array  # [N]
    before: Array  # [N] uint32, the task before it on its device, or NOBODY
    queued_s: Array  # [D] seconds of what waits for a device
    held_bytes: Array  # [D] resident inputs of placed tasks; [0] where memory has no limit
    holds: Array  # [I, D] uint32, of how many of them each device has a reader; [0, D] likewise
    passed: Array  # [N] uint32, scratch
    chain: Array  # [N] uint32, a critical chain of an accepted one
    room: Room
    trial: Trial  # of the plan, where the list schedule is not its execution
    patient: Trial  # under `in_order`, of the order of starts


@inlined
def _arrival_s(aim: Aim, r: Ruins, v: int, device: int) -> float:
    """Returns when all that task v reads is on a device."""
    p, there_s = aim.problem, aim.input_s[v, device]
    for e in range(p.in_first[v], p.in_first[v + ONE]):
        u = p.in_producer[e]
        source = r.placement[u]
        move_s = p.in_bytes[e] * p.seconds_per_byte[source, device]
        there_s = max(there_s, r.finish_s[u] + (p.latency_s[source, device] + move_s))
    return there_s


@inner
def _needs(aim: Aim, r: Ruins, v: int, d: int, holds: bool) -> float:
    """Returns the bytes of resident inputs that a task adds to a device; and lets them lie."""
    m, more = aim.memory, 0.0
    for k in range(m.own_first[v], m.own_first[v + ONE]):
        if r.holds[m.own[k], d] == 0:
            more += m.item_bytes[m.own[k]]
        if holds:
            r.holds[m.own[k], d] += ONE
    if holds:
        r.held_bytes[d] += more
    return more


@inner
def _empty(r: Ruins) -> None:
    """Lets no device hold anything."""
    for d in range(len(r.held_bytes)):
        r.held_bytes[d] = 0.0
        for i in range(len(r.holds)):
            r.holds[i, d] = 0


@inner
def _settle(aim: Aim, r: Ruins, v: int, free_s: Array, weight: float, minds: bool) -> None:
    """Places a freed task, whose producers have started.

    If it minds memory, that is where its resident inputs fit; and where there is room now for
    its results, too, if devices wait for room and it can.
    """
    p, least_s, has_room = aim.problem, np.inf, False
    waits = minds and aim.waits and r.count[WAITS] == 1
    for d in range(len(free_s)):
        if p.compute_s[v, d] == np.inf:
            continue
        more = r.held_bytes[d] + _needs(aim, r, v, d, False) if minds else 0.0
        if minds and more > aim.capacity_bytes[d]:
            continue
        if waits:
            fits = r.room.held[d] + r.room.made_bytes[v] + more <= aim.capacity_bytes[d]
            if has_room and not fits:
                continue
            if fits and not has_room:
                has_room, least_s = True, np.inf
        end_s = max(_arrival_s(aim, r, v, d), free_s[d] + r.queued_s[d]) + p.compute_s[v, d]
        if weight > 0.0:
            longest_s = 0.0
            for k in range(p.first_move[v], p.first_move[v + ONE]):
                if not r.free[p.reader[k]]:
                    there = r.placement[p.reader[k]]
                    move_s = p.num_bytes[k] * p.seconds_per_byte[d, there]
                    longest_s = max(longest_s, p.latency_s[d, there] + move_s)
            end_s += weight * longest_s
        end_s *= 1.0 + 1e-9 * _uniform(r.random)  # ties are broken at random
        if end_s < least_s:
            least_s, r.placement[v] = end_s, d
    if minds:
        _needs(aim, r, v, r.placement[v], True)


@inlined
def _enter(
    aim: Aim, r: Ruins, q: Queues, key: Array, ranked: bool, v: int, at_s: float
) -> None:
    """Lets a task wait for its device."""
    d = r.placement[v]
    r.queued_s[d] += aim.problem.compute_s[v, d]
    release(q, d, np.uint32(v), at_s, key, ranked)


@inner
def _begin_room(aim: Aim, r: Ruins) -> None:
    """Lets nothing lie in memory but graph inputs with a home, there and by their readers."""
    m, room = aim.memory, r.room
    room.count[0] = 0
    for d in range(len(room.held)):
        room.held[d], room.last[d] = 0.0, -1
    for x in range(aim.problem.num_inputs):
        if m.home[x] >= 0 and m.first[x] < m.end[x]:
            room.held[m.home[x]] += m.item_bytes[x]
            room.last[m.home[x]] = x
            for k in range(m.first[x], m.end[x]):
                here = r.placement[m.reader[k]]
                if not r.free[m.reader[k]] and room.last[here] != x:
                    room.held[here] += m.item_bytes[x]
                    room.last[here] = x


@inner
def _join(aim: Aim, r: Ruins, k: int, here: int) -> None:
    """Lets the reader of move k hold what it reads on a device."""
    m, room, x = aim.memory, r.room, aim.problem.item[k]
    items, stay = len(m.item_bytes), int(x)
    if room.device[x] != here:
        if room.last[here] != x or room.left[room.recent[here]] == 0:
            room.last[here], room.recent[here] = x, items + k
            for j in range(m.first[x], m.end[x]):
                if room.left[items + j] > 0 and room.device[items + j] == here:
                    room.recent[here] = items + j
        stay = int(room.recent[here])
        if room.left[stay] == 0:
            room.until_s[stay], room.device[stay] = 0.0, here
            room.held[here] += m.item_bytes[x]
    room.left[stay] += ONE
    room.stay[k] = stay


@inner
def _leave(r: Ruins, q: Queues, stay: int, until_s: float) -> None:
    """Lets one who holds a stay do so no longer than until a time."""
    room = r.room
    room.until_s[stay] = max(room.until_s[stay], until_s)
    room.left[stay] -= ONE
    if room.left[stay] == 0:
        _push_heap(room.ending, 0, room.count, 0, room.until_s, np.uint32(stay))
        d = room.device[stay]
        if q.length[d]:  # what waits there for room may look again
            q.next_s[d] = min(q.next_s[d], max(q.free_s[d], room.until_s[stay]))


@inner
def _hold(aim: Aim, r: Ruins, q: Queues, u: int) -> None:
    """Enters what task u, which starts, makes and no longer needs."""
    p, m, room, here = aim.problem, aim.memory, r.room, r.placement[u]
    items, finish = len(m.item_bytes), r.finish_s[u]
    room.held[here] += room.made_bytes[u]
    for k in range(p.first_move[u], p.first_move[u + ONE]):
        x, v = p.item[k], p.reader[k]
        if k == m.first[x]:
            room.left[x], room.until_s[x], room.device[x] = 1, finish, here  # of its own
            for j in range(k, m.end[x]):
                room.left[items + j] = 0
        there = here if r.free[v] else r.placement[v]
        _join(aim, r, k, there)
        if there != here:
            move_s = p.num_bytes[k] * p.seconds_per_byte[here, there]
            arrival_s = finish + (p.latency_s[here, there] + move_s)
            room.until_s[x] = max(room.until_s[x], arrival_s)
        if k + 1 == m.end[x]:
            _leave(r, q, x, finish)
    for e in range(p.in_first[u], p.in_first[u + ONE]):
        _leave(r, q, room.stay[room.move[e]], finish)


@inner
def _settle_stays(aim: Aim, r: Ruins, q: Queues, v: int) -> None:
    """Enters where a task that was free reads its operands."""
    p, room, here = aim.problem, r.room, r.placement[v]
    for e in range(p.in_first[v], p.in_first[v + ONE]):
        k = room.move[e]
        source = room.device[p.item[k]]
        if source != here:
            _join(aim, r, k, here)
            move_s = p.in_bytes[e] * p.seconds_per_byte[source, here]
            move_s += p.latency_s[source, here]
            _leave(r, q, p.item[k], r.finish_s[p.in_producer[e]] + move_s)


@inner
def _take_fitting(aim: Aim, r: Ruins, q: Queues, d: int, now_s: float) -> np.uint32:
    """Removes and returns the ready task of least rank for which device d has room.

    If it has room for none it returns NOBODY, and the device looks again when something is
    ready, or no longer needed.
    """
    room, base, passed, i = r.room, d * q.stride, 0, q.head[d]
    while q.ready_s[i] <= now_s:
        _push_heap(q.heap, base, q.length, d, r.rank, q.task[i])
        q.ready_s[i] = -np.inf
        i += ONE
    q.head[d] = i
    while room.count[0] and room.until_s[room.ending[0]] <= now_s:
        stay = _pop_heap(room.ending, 0, room.count, 0, room.until_s)
        items = len(aim.memory.item_bytes)
        x = stay if stay < items else aim.problem.item[stay - items]
        room.held[room.device[stay]] -= aim.memory.item_bytes[x]
    u = NOBODY
    while q.length[d]:
        u = _pop_heap(q.heap, base, q.length, d, r.rank)
        if room.held[d] + r.held_bytes[d] + room.made_bytes[u] <= aim.capacity_bytes[d]:
            break
        r.passed[passed] = u
        passed += 1
        u = NOBODY
    for k in range(passed):
        _push_heap(q.heap, base, q.length, d, r.rank, r.passed[k])
    if u == NOBODY:
        q.next_s[d] = q.ready_s[i]
        if room.count[0]:
            q.next_s[d] = min(q.next_s[d], room.until_s[room.ending[0]])
    return u


@inner
def _blocked_device(r: Ruins, q: Queues) -> np.uint32:
    """Returns the device where the task of least rank waits for room, NOBODY if none does."""
    here, best = NOBODY, np.inf
    for d in range(len(q.length)):
        if q.length[d] and (here == NOBODY or r.rank[q.heap[d * q.stride]] < best):
            here, best = np.uint32(d), r.rank[q.heap[d * q.stride]]
    return here


@inner
def list_schedule(aim: Aim, r: Ruins, weight: float, ranked: bool, minds: bool) -> float:
    """Makes a list schedule, by which freed tasks get their devices; returns its makespan.

    As in the simulator (`native_kernels._by_start`), starts come in the order of time. Under
    `in_order` they are the patient's order; where all wait for room, one starts without it.
    """
    p, work = aim.problem, r.trial.work
    n, ready_s, missing = len(p.compute_s), work.task_s[0], work.task[0]
    key, last, q = ready_s, work.device[4], empty_queues(work, n)
    waits = aim.waits and len(r.held_bytes) > 0 and r.count[WAITS] == 1
    if ranked:
        key = r.rank
    for d in range(len(last)):
        r.queued_s[d] = 0.0
        last[d] = NOBODY
    if minds:
        _empty(r)
    if waits:
        _begin_room(aim, r)
    for v in range(n):
        if minds and not r.free[v]:
            _needs(aim, r, v, r.placement[v], True)
        missing[v] = p.in_first[v + 1] - p.in_first[v]
        ready_s[v] = aim.input_s[v, r.placement[v]]
        r.start_s[v] = r.finish_s[v] = np.inf
    for v in range(n):
        if missing[v] == 0:
            if r.free[v]:
                _settle(aim, r, v, q.free_s, weight, minds)
                ready_s[v] = aim.input_s[v, r.placement[v]]
            _enter(aim, r, q, key, ranked, v, ready_s[v])
    latest_s, now_s, count = 0.0, 0.0, 0
    while count < n:
        here, start = next_device(q, key, ranked)
        if start == np.inf:
            here = _blocked_device(r, q) if waits else NOBODY
            if here == NOBODY:
                return np.inf
            start = max(now_s, q.free_s[here])
            u = take_task(q, here, key, ranked)
        elif waits:
            u, now_s = _take_fitting(aim, r, q, here, start), start
            if u == NOBODY:
                continue
        else:
            u = take_task(q, here, key, ranked)
        finish = start + p.compute_s[u, here]
        latest_s = max(latest_s, finish)
        keep_busy(q, here, finish, key, ranked)
        r.queued_s[here] -= p.compute_s[u, here]
        r.start_s[u], r.finish_s[u] = start, finish
        r.before[u], last[here] = last[here], u
        if ranked:
            r.patient.rows.order[0, count] = u
        if waits:
            _hold(aim, r, q, u)
        count += 1
        for k in range(p.first_move[u], p.first_move[u + ONE]):
            v = p.reader[k]
            if not r.free[v]:
                there = r.placement[v]
                move_s = p.num_bytes[k] * p.seconds_per_byte[here, there]
                ready_s[v] = max(ready_s[v], finish + (p.latency_s[here, there] + move_s))
            left = np.uint32(missing[v] - ONE)
            missing[v] = left
            if left == 0:
                if r.free[v]:
                    _settle(aim, r, v, q.free_s, weight, minds)
                    ready_s[v] = _arrival_s(aim, r, v, r.placement[v])
                    if waits:
                        _settle_stays(aim, r, q, v)
                _enter(aim, r, q, key, ranked, v, ready_s[v])
    return latest_s


@inner
def note_chain(aim: Aim, r: Ruins) -> None:
    """Works out a chain of tasks that the last list schedule's makespan waited for."""
    p, n, v = aim.problem, len(r.placement), 0
    for u in range(n):
        if r.finish_s[u] > r.finish_s[v]:
            v = u
    r.count[LENGTH] = 0
    while r.count[LENGTH] < n:
        r.chain[r.count[LENGTH]] = v
        r.count[LENGTH] += 1
        here, start_s, next_one = r.placement[v], r.start_s[v], NOBODY
        if start_s == 0.0:
            return
        for e in range(p.in_first[v], p.in_first[v + 1]):
            u = p.in_producer[e]
            source = r.placement[u]
            move_s = p.in_bytes[e] * p.seconds_per_byte[source, here]
            if r.finish_s[u] + (p.latency_s[source, here] + move_s) == start_s:
                next_one = u
        if next_one == NOBODY:
            next_one = r.before[v]
            if next_one == NOBODY or r.finish_s[next_one] != start_s:
                return
        v = int(next_one)


@inner
def _ruin(aim: Aim, r: Ruins, v: int) -> int:
    """Frees task v and some about it, from neighbour to neighbour; returns how many."""
    near_first = aim.near_first
    most = 2 + int(_below(r.random, r.moved.shape[1] - 1))
    r.moved[0, 0], r.moved[1, 0], r.free[v] = v, r.placement[v], True
    count = 1
    for _ in range(4 * most):
        if count == most:
            break
        u = r.moved[0, _below(r.random, count)]
        producers = near_first[0, u + ONE] - near_first[0, u]
        both = producers + near_first[1, u + ONE] - near_first[1, u]
        if both == 0:
            break
        k = _below(r.random, both)
        if k < producers:
            other = aim.near[0, near_first[0, u] + k]
        else:
            other = aim.near[1, near_first[1, u] + k - producers]
        if not r.free[other]:
            r.moved[0, count], r.moved[1, count] = other, r.placement[other]
            r.free[other] = True
            count += 1
    return count


@jit
def recreate(
    aim: Aim, r: Ruins, steps: int, hot: float, cold: float, ruins: float, enough_s: np.ndarray
) -> int:
    """Makes `steps` evaluations, nearly all of a change each; returns how many it made.

    Args:
      aim: the problem.
      r: the plan, which is changed; energy inf: it has not been evaluated.
      steps: how many.
      hot: temperature at the first, a share of the makespan for each task.
      cold: and at the last, geometrically between.
      ruins: share of steps that free tasks.
      enough_s: `[1]` seconds of a plan after which it stops; another thread may change it.
    """
    random, placement, worth, moved = r.random, r.placement, r.worth, r.moved
    n, ranked = len(placement), aim.waits or (aim.switches & RANKED) != 0
    temperature, fall = hot / n, (cold / hot) ** (1.0 / max(steps, 1))
    for step in range(steps):
        if worth[BEST] <= enough_s[0]:
            return step
        temperature *= fall
        is_new, ruined, changed, other = worth[ENERGY] == np.inf, 0, 0, NOBODY
        weight, old_rank, swaps, toggled, minds = 0.0, 0.0, False, False, False
        v = _below(random, n)
        if r.count[LENGTH] and _uniform(random) < CRITICAL:
            v = r.chain[_below(random, r.count[LENGTH])]
        is_pinned = ranked and r.pinned[v]
        if is_new:
            pass
        elif aim.waits and _uniform(random) < TOGGLE:
            toggled = True
            r.count[WAITS] = 1 - r.count[WAITS]
        elif not is_pinned and _uniform(random) < ruins:
            ruined = changed = _ruin(aim, r, v)
            weight = 0.5 * _below(random, 3)
            minds = len(r.held_bytes) > 0 and _uniform(random) < MINDS
        elif is_pinned or (ranked and _uniform(random) < SHIFT):
            other, old_rank, swaps = _below(random, n), r.rank[v], _uniform(random) < 0.5
            r.rank[v] = r.rank[other]
            if swaps:
                r.rank[other] = old_rank
            else:  # just before or behind it
                r.rank[v] += (_uniform(random) - 0.5) * 1e-6
        else:
            changed = mutate(aim, random, placement, moved, v)
        minds = minds or (aim.waits and len(r.held_bytes) > 0 and r.count[WAITS] == 1)
        is_listed = aim.is_listed or aim.waits or ruined > 0 or is_new
        energy = value_s = list_schedule(aim, r, weight, ranked, minds) if is_listed else 0.0
        for k in range(ruined):
            r.free[moved[0, k]] = False
        before = worth[ENERGY]
        limit = before * (1.0 - temperature * np.log(1.0 - _uniform(random)))
        # In order it is as long at most, so what is too long need not be executed.
        if not aim.is_listed or (aim.waits and (is_new or energy <= limit)):
            penalty = FIRST if worth[BEST] == np.inf else 1.0
            trial = r.patient if aim.waits else r.trial
            value_s, energy = plan_worth(aim, trial, penalty)
        if is_new or energy <= limit:
            worth[ENERGY], worth[VALUE] = energy, value_s
            r.count[AGE] += 1
            if is_listed and r.count[AGE] >= TAKEN:
                note_chain(aim, r)
                r.count[AGE] = 0
            if value_s < worth[BEST]:
                worth[BEST] = value_s
                _copy(placement, r.best_placement)
                _copy(r.rank, r.best_rank)
                if aim.waits or (ranked and aim.is_listed):  # replayed, it is as long
                    for k in range(n):
                        r.best_rank[r.patient.rows.order[0, k]] = k
        else:
            for k in range(changed - 1, -1, -1):
                placement[moved[0, k]] = moved[1, k]
            if toggled:
                r.count[WAITS] = 1 - r.count[WAITS]
            if other != NOBODY:
                if swaps:
                    r.rank[other] = r.rank[v]
                r.rank[v] = old_rank
    return steps


def warm() -> None:
    """Compiles all, as a search on a graph of two tasks calls it."""
    from doppler_jax.costs.build import from_edge_delays
    from doppler_jax.objective import Objective
    from doppler_jax.search.lns import make_ruins
    from doppler_jax.search.problem import make_search_problem

    graph, costs = from_edge_delays([1.0, 1.0], [(0, 1, 1.0)], num_devices=2)
    problem = make_search_problem(graph, costs, Objective())
    ruins = make_ruins(problem, np.zeros(2), problem.rank, 0, 8)
    example = (problem.aim, ruins, 4, 0.5, 0.1, 0.5, np.zeros(1))
    recreate.compile(tuple(map(numba.typeof, example)))
