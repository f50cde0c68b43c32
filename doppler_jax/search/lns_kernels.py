"""Ruin and recreate, as Numba compiles it: some tasks are freed, and placed anew.

A step frees a few tasks that are near each other in the graph. A list schedule of the whole
plan then runs the others where they are, and puts each freed task, once its producers have
started, where it ends first. What the readers of its results would wait for is weighed in, by
one of three weights. Other steps move tasks as `kernels.mutate` does or, where the queue looks
at ranks, a rank. What comes out is accepted as in simulated annealing.

Where links are `parallel` and nothing else counts, that list schedule is the plan's execution
under `fifo` or `priority`, in every bit. Elsewhere it only says where freed tasks go.
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

LENGTH, AGE = range(2)
"""Entries of `Ruins.count`: tasks of the chain, and accepted steps since it was worked out."""


class Ruins(NamedTuple):
    """A plan that is ruined and recreated again and again, and the best that it has been."""

    random: Array  # [1] uint64
    placement: Array  # [N] uint32
    rank: Array  # [N] float64
    best_placement: Array  # [N] uint32
    best_rank: Array  # [N] float64
    worth: Array  # [3] float64
    count: Array  # [2] int64
    free: Array  # [N] bool, whether the list schedule is to place a task
    moved: Array  # [2, M] uint32, what was freed or moved, and where it was; M at most
    # Of the last list schedule:
    start_s: Array  # [N]
    finish_s: Array  # [N]
    before: Array  # [N] uint32, the task before it on its device, or NOBODY
    queued_s: Array  # [D] seconds of what waits for a device
    held_bytes: Array  # [D] resident inputs of placed tasks; [0] where memory has no limit
    holds: Array  # [I, D] uint32, of how many of them each device has a reader; [0, D] likewise
    chain: Array  # [N] uint32, a critical chain of an accepted one
    trial: Trial  # of the plan, where the list schedule is not its execution
    patient: Trial  # under `in_order`, to try where memory is exceeded


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

    If it minds memory, that is where its resident inputs fit.
    """
    p, least_s = aim.problem, np.inf
    for d in range(len(free_s)):
        if p.compute_s[v, d] == np.inf:
            continue
        if minds and r.held_bytes[d] + _needs(aim, r, v, d, False) > aim.capacity_bytes[d]:
            continue
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
def list_schedule(aim: Aim, r: Ruins, weight: float, ranked: bool, minds: bool) -> float:
    """Makes a list schedule, by which freed tasks get their devices; returns its makespan.

    As in the simulator (`native_kernels._by_start`), starts come in the order of time.
    """
    p, work = aim.problem, r.trial.work
    n, ready_s, missing = len(p.compute_s), work.task_s[0], work.task[0]
    key, last, q = ready_s, work.device[4], empty_queues(work, n)
    if ranked:
        key = r.rank
    for d in range(len(last)):
        r.queued_s[d] = 0.0
        last[d] = NOBODY
    if minds:
        _empty(r)
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
    latest_s = 0.0
    for _ in range(n):
        here, start = next_device(q, key, ranked)
        if start == np.inf:
            return np.inf
        u = take_task(q, here, key, ranked)
        finish = start + p.compute_s[u, here]
        latest_s = max(latest_s, finish)
        keep_busy(q, here, finish, key, ranked)
        r.queued_s[here] -= p.compute_s[u, here]
        r.start_s[u], r.finish_s[u] = start, finish
        r.before[u], last[here] = last[here], u
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
                _enter(aim, r, q, key, ranked, v, ready_s[v])
    return latest_s


@inner
def write_order(aim: Aim, rank: Array, trial: Trial) -> None:
    """Writes the order of a trial: of the tasks whose producers are there, by (rank, id)."""
    p, work, order = aim.problem, trial.work, trial.rows.order[0]
    heap, missing, length = work.queue[1], work.task[1], work.device[3]
    length[0] = 0
    for v in range(len(order)):
        missing[v] = p.in_first[v + 1] - p.in_first[v]
        if missing[v] == 0:
            _push_heap(heap, 0, length, 0, rank, np.uint32(v))
    for k in range(len(order)):
        u = _pop_heap(heap, 0, length, 0, rank)
        order[k] = u
        for e in range(p.first_move[u], p.first_move[u + ONE]):
            v = p.reader[e]
            missing[v] = np.uint32(missing[v] - ONE)
            if missing[v] == 0:
                _push_heap(heap, 0, length, 0, rank, v)


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
    aim: Aim, r: Ruins, steps: int, hot: float, cold: float, ruins: float, target_s: float
) -> int:
    """Makes `steps` evaluations, nearly all of a change each; returns how many it made.

    Args:
      aim: the problem.
      r: the plan, which is changed; energy inf: it has not been evaluated.
      steps: how many.
      hot: temperature at the first, a share of the makespan for each task.
      cold: and at the last, geometrically between.
      ruins: share of steps that free tasks.
      target_s: seconds of a plan after which it stops.
    """
    random, placement, worth, moved = r.random, r.placement, r.worth, r.moved
    n, ranked = len(placement), (aim.switches & RANKED) != 0
    temperature, fall = hot / n, (cold / hot) ** (1.0 / max(steps, 1))
    for step in range(steps):
        if worth[BEST] <= target_s:
            return step
        temperature *= fall
        is_new, ruined, changed, other = worth[ENERGY] == np.inf, 0, 0, NOBODY
        weight, old_rank, swaps, minds = 0.0, 0.0, False, False
        v = _below(random, n)
        if r.count[LENGTH] and _uniform(random) < CRITICAL:
            v = r.chain[_below(random, r.count[LENGTH])]
        if is_new:
            pass
        elif _uniform(random) < ruins:
            ruined = changed = _ruin(aim, r, v)
            weight = 0.5 * _below(random, 3)
            minds = len(r.held_bytes) > 0 and _uniform(random) < MINDS
        elif ranked and _uniform(random) < SHIFT:
            other, old_rank, swaps = _below(random, n), r.rank[v], _uniform(random) < 0.5
            r.rank[v] = r.rank[other]
            if swaps:
                r.rank[other] = old_rank
            else:  # just before or behind it
                r.rank[v] += (_uniform(random) - 0.5) * 1e-6
        else:
            changed = mutate(aim, random, placement, moved, v)
        is_listed = aim.is_listed or ruined > 0 or is_new
        energy = value_s = list_schedule(aim, r, weight, ranked, minds) if is_listed else 0.0
        for k in range(ruined):
            r.free[moved[0, k]] = False
        if not aim.is_listed:
            penalty = FIRST if worth[BEST] == np.inf else 1.0
            value_s, energy = plan_worth(aim, r.trial, penalty)
            if aim.waits and value_s == np.inf:  # devices that wait may hold less
                write_order(aim, r.rank, r.patient)
                patient_s, patient_energy = plan_worth(aim, r.patient, penalty)
                if patient_s < np.inf or patient_energy < energy:
                    value_s, energy = patient_s, patient_energy
        before = worth[ENERGY]
        limit = before * (1.0 - temperature * np.log(1.0 - _uniform(random)))
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
        else:
            for k in range(changed - 1, -1, -1):
                placement[moved[0, k]] = moved[1, k]
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
    example = (problem.aim, make_ruins(problem, np.zeros(2), 0, 8), 4, 0.5, 0.1, 0.5, 0.0)
    recreate.compile(tuple(map(numba.typeof, example)))
