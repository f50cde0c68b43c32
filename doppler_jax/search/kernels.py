"""Annealing as Numba compiles it: moves, what a plan is worth, and many steps.

A plan is a placement and an order of the tasks, which only `in_order` looks at. A search's
loop, such as `walk` of annealing, works on its own state without looking at any other, so that
threads may run several at once, and what comes out depends on the states and the number of
steps alone.

Under `in_order` with links whose arrivals are known when a task starts, a plan is evaluated
from the first position that its move can change; elsewhere as a whole, by the simulator. Under
`parallel` links that may end early. Behind the last position that is changed, each task's tail
(the seconds from its start to the end) is as it was: by the tails a move may take too long. And
once all that later tasks wait for is as it was, so is the makespan.

Rows are copied by loops, for Numba compiles each assignment to a slice as a function.
"""

# NumPy scalars and Python ints are one kind to Numba.
# mypy: disable-error-code="assignment, arg-type, return-value, call-overload, no-any-return"

from typing import Any, NamedTuple

import numba
import numpy as np

from doppler_jax.native import inner, jit
from doppler_jax.simulator.memory_kernels import MemoryProblem, MemoryWork, peak_bytes
from doppler_jax.simulator.native_kernels import (
    NOBODY,
    ONE,
    SERIAL,
    NativeProblem,
    Rows,
    Work,
)

Array = np.ndarray

GROUP = 8
"""Tasks that move together at most."""

STRIDE = 16
"""Positions between two at which the state of an `in_order` execution is kept."""

OFTEN = 0.35
"""Share of moves that are taken, above which to keep tails up takes longer than they save."""

MANY = 64
"""Tasks that end at another time, after which nothing is looked for that is as it was."""

SWAP, NEAR, TOGETHER = 0.15, 0.6, 0.25
"""How often a move is a swap; else, goes to a neighbour's device; moves several tasks."""

SHIFT, NEXT = 0.5, 0.7
"""How often, under `in_order`, a move is one of the order; and of these, just past the next
tasks of the same device."""

CRITICAL, TAKEN = 0.6, 16
"""How often, under `in_order`, a move is of a task of the critical chain, and after how many
accepted moves that is worked out anew."""

ENERGY, VALUE, BEST = range(3)
"""Entries of a state's `worth`, seconds: two of its plan, and the value of the best."""


class Aim(NamedTuple):
    """What is to be found: the problem, and what makes one plan better than another."""

    simulate: Any  # `run_rows`
    problem: NativeProblem
    links: int
    switches: int  # of the discipline
    waits: bool  # whether that looks at the order
    is_plain: bool  # whether a plan can be evaluated from the first changed position
    is_listed: bool  # whether a list schedule (`lns_kernels`) is its execution, or as long
    near_first: Array  # [2, N + 1] uint32, where a task's producers begin, and its readers
    near: Array  # [2, E] uint32
    input_s: Array  # [N, D] when graph inputs with a home are there, under `parallel` links
    out_in: Array  # [E] uint32, of an edge as producers list it the place as readers do
    compute_factor: Array  # [K, N] noise, K = 0 for none
    item_factor: Array  # [K, I + T, D]
    quantile: float  # of the K makespans; nan for their mean
    memory: MemoryProblem
    capacity_bytes: Array  # [D], or [0] where everything fits everywhere


class Trial(NamedTuple):
    """A plan that is executed as a whole, and room to do so."""

    rows: Rows  # of one row
    work: Work
    memory: MemoryWork
    draws_s: Array  # [K] makespans under noise
    switches: int  # of the discipline under which it is executed


class Walker(NamedTuple):
    """A plan that is changed step by step, and the best that it has been."""

    random: Array  # [1] uint64
    placement: Array  # [N] uint32
    rank: Array  # [N] uint32, positions in the order
    order: Array  # [N] uint32, the tasks by rank
    best_placement: Array  # [N] uint32
    best_rank: Array  # [N] uint32
    worth: Array  # [3] float64
    moved: Array  # [2, GROUP] uint32, what the last move moved, and from where
    # Under `in_order`, of the accepted plan and of the one that is tried:
    done_s: Array  # [2, N] finishes
    arrival_s: Array  # [2, E] by edge as readers list them, under `serial` links
    mark_s: Array  # [2, M, S] latest finish, devices and `serial` links, every STRIDE
    state_s: Array  # [S], scratch
    taken: Array  # [1] float64, share of the last moves; where it is small there are tails:
    tail_s: Array  # [N] seconds from a start to the end, of the accepted plan
    next_one: Array  # [M + 1, D] uint32, each device's first task from a mark on, or NOBODY
    chain: Array  # [N] uint32, a critical chain of an accepted plan
    before: Array  # [N] uint32, scratch: the task before each on its device
    count: Array  # [2] int64: tasks of the chain, moves accepted since it was worked out
    trial: Trial  # of the plan


@inner
def _bits(random: Array) -> np.uint64:
    """Draws 64 bits (SplitMix64, Steele et al. 2014)."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    z = random[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@inner
def _uniform(random: Array) -> float:
    """Draws from [0, 1)."""
    return np.float64(_bits(random) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@inner
def _below(random: Array, count: int) -> np.uint32:
    """Draws an index below `count`, which is at least 1."""
    high = _bits(random) >> np.uint64(32)
    return np.uint32((high * np.uint64(count)) >> np.uint64(32))


@inner
def _copy(source: Array, goal: Array) -> None:
    for k in range(len(source)):
        goal[k] = source[k]


@inner
def _statistic(draws_s: Array, quantile: float) -> float:
    """Returns the mean, or a quantile between the two draws next to it."""
    if np.isnan(quantile):
        total = 0.0
        for seconds in draws_s:
            total += seconds
        return total / len(draws_s)
    for k in range(1, len(draws_s)):  # sorts: they are few
        i, seconds = k, draws_s[k]
        while i and draws_s[i - 1] > seconds:
            draws_s[i] = draws_s[i - 1]
            i -= 1
        draws_s[i] = seconds
    at = quantile * (len(draws_s) - 1)
    low = min(int(at), max(len(draws_s) - 2, 0))
    high = min(low + 1, len(draws_s) - 1)
    return draws_s[low] + (at - low) * (draws_s[high] - draws_s[low])


@inner
def plan_worth(aim: Aim, trial: Trial, penalty: float) -> tuple[float, float]:
    """Returns a plan's value in seconds, inf if it exceeds memory, and what is made small.

    The latter, its energy, is the value, and more by `penalty` for each time that peaks exceed
    devices.
    """
    rows, draws = trial.rows, len(trial.draws_s)
    limited, over = len(aim.capacity_bytes) > 0, 0.0
    # The last is without noise: its times count for memory.
    for draw in range(draws - 1, -2 if limited or draws == 0 else -1, -1):
        aim.simulate(aim.problem, rows, trial.work, draw, trial.switches, aim.links)
        if draw >= 0:
            trial.draws_s[draw] = rows.makespan_s[0]
    value_s = _statistic(trial.draws_s, aim.quantile) if draws else rows.makespan_s[0]
    if limited:
        peak_bytes(aim.memory, trial.memory, rows)
        peak = trial.memory.peak
        for d in range(len(peak)):
            if peak[d] > aim.capacity_bytes[d]:
                over += (peak[d] - aim.capacity_bytes[d]) / max(aim.capacity_bytes[d], 1.0)
    return (np.inf if over > 0 else value_s), value_s * (1.0 + penalty * over)


@jit
def score_rows(
    aim: Aim,
    trial: Trial,
    placements: Array,
    ranks: Array,
    orders: Array,
    value_s: Array,
    energy: Array,
) -> None:
    """Writes what plans are worth: devices, ranks, and tasks by rank, `[B, N]` each.

    The last may be `[B, 0]` where the discipline does not look at it.
    """
    for b in range(len(placements)):
        _copy(placements[b], trial.rows.placements[0])
        _copy(orders[b], trial.rows.order[0])
        if len(trial.rows.ranks):
            _copy(ranks[b], trial.rows.ranks[0])
        value_s[b], energy[b] = plan_worth(aim, trial, 1.0)


@inner
def _adjacent(aim: Aim, random: Array, v: int, side: int) -> np.uint32:
    """Returns a random producer of v, or reader if `side` is 1; v if there is none."""
    first = aim.near_first[side, v]
    count = aim.near_first[side, v + ONE] - first
    if count == 0:
        return np.uint32(v)
    return aim.near[side, first + _below(random, count)]


@inner
def mutate(aim: Aim, random: Array, placement: Array, moved: Array, v: int) -> int:
    """Makes a random move of task v, and writes what it moved and from where.

    It takes the task to another device at random or to that of a neighbour (a producer, a
    reader, another producer of a reader, another reader of a producer), at times with a path
    of its producers or readers or several of them; or it swaps the devices of two tasks. What
    cannot run where it would go stays. Returns how many tasks it moved.
    """
    compute_s = aim.problem.compute_s
    n, devices = compute_s.shape
    mine = goal = placement[v]
    more, is_swap = 0, _uniform(random) < SWAP
    side, is_path = 0, False
    last = v
    if is_swap:
        more, last = 1, _below(random, n)
        goal = placement[last]
        if compute_s[v, goal] == np.inf or compute_s[last, mine] == np.inf:
            return 0
    else:
        if _uniform(random) < NEAR:
            side = int(_below(random, 2))
            other = _adjacent(aim, random, v, side)
            if _uniform(random) < 0.5:
                other = _adjacent(aim, random, other, 1 - side)
            goal = placement[other]
        if goal == mine and devices > 1:
            goal = np.uint32((mine + ONE + _below(random, devices - 1)) % devices)
        if _uniform(random) < TOGETHER:
            more, side = 1 + int(_below(random, GROUP - 1)), int(_below(random, 2))
            is_path = _uniform(random) < 0.5
    count, task = 0, v
    for k in range(more + 1):
        if k and is_swap:
            task, goal = last, mine
        elif k:
            task = _adjacent(aim, random, task if is_path else v, side)
        if placement[task] != goal and compute_s[task, goal] < np.inf:
            moved[0, count], moved[1, count] = task, placement[task]
            placement[task] = goal
            count += 1
    return count


@inner
def _move_task(order: Array, rank: Array, source: int, goal: int) -> None:
    """Moves the task at position `source` to `goal`; those between move up or down by one."""
    v = order[source]
    step = 1 if goal > source else -1
    k = source
    while k != goal:
        order[k] = order[k + step]
        rank[order[k]] = k
        k += step
    order[goal] = v
    rank[v] = goal


@inner
def shift(
    aim: Aim, random: Array, placement: Array, order: Array, rank: Array, v: int
) -> tuple[int, int]:
    """Moves task v to a random position between its producers and its readers.

    At times that is just past the next few tasks of its device. Returns its position before and
    after; they are equal where it cannot move.
    """
    low, high = 0, len(order) - 1
    for e in range(aim.near_first[0, v], aim.near_first[0, v + ONE]):
        low = max(low, int(rank[aim.near[0, e]]) + 1)
    for e in range(aim.near_first[1, v], aim.near_first[1, v + ONE]):
        high = min(high, int(rank[aim.near[1, e]]) - 1)
    source = goal = int(rank[v])
    if _uniform(random) < NEXT:
        past, step = 1, 1 if _uniform(random) < 0.5 else -1
        while _uniform(random) < 0.5:
            past += 1
        k = source + step
        while past > 0 and low <= k <= high:
            if placement[order[k]] == placement[v]:
                past, goal = past - 1, k
            k += step
    else:
        goal = low + int(_below(random, high - low + 1))
    _move_task(order, rank, source, goal)
    return source, goal


@inner
def changed_positions(
    aim: Aim, rank: Array, moved: Array, count: int
) -> tuple[int, int, int, int]:
    """Returns positions about the last `count` moves of devices.

    The first whose times they can change; the last that is moved; and the first of their
    producers' and the last of their readers', if these are before and behind.
    """
    first, last = len(rank), 0
    for k in range(count):
        first, last = min(first, int(rank[moved[0, k]])), max(last, int(rank[moved[0, k]]))
    low, high = first, last
    for k in range(count):
        v = moved[0, k]
        for e in range(aim.near_first[0, v], aim.near_first[0, v + ONE]):
            low = min(low, int(rank[aim.near[0, e]]))
        for e in range(aim.near_first[1, v], aim.near_first[1, v + ONE]):
            high = max(high, int(rank[aim.near[1, e]]))
    if aim.links == SERIAL:  # operands are sent elsewhere, and others behind them
        first = low
    return first, last, low, high


@inner
def _note_tails(aim: Aim, w: Walker, first: int, last: int, low: int) -> None:
    """Works out the tails of an accepted plan, which moves changed from `first` to `last`.

    Behind these they are as they were; and before, as soon as none of `low` or less is of a
    task that has before it what is not as it was.
    """
    p, placement, work = aim.problem, w.placement, w.trial.work
    next_one, is_new = work.device[0], work.device[1]
    end = min((last // STRIDE + 1) * STRIDE, len(w.order))
    for d in range(len(next_one)):
        next_one[d], is_new[d] = w.next_one[(end - 1) // STRIDE + 1, d], 0
    for k in range(end - 1, -1, -1):
        v = w.order[k]
        here, longest_s = placement[v], 0.0
        if next_one[here] != NOBODY:
            longest_s = w.tail_s[next_one[here]]
        for e in range(p.first_move[v], p.first_move[v + ONE]):
            there = placement[p.reader[e]]
            move_s = p.num_bytes[e] * p.seconds_per_byte[here, there]
            move_s = p.latency_s[here, there] + move_s
            longest_s = max(longest_s, move_s + w.tail_s[p.reader[e]])
        next_one[here], is_new[here] = v, 0
        if w.tail_s[v] != p.compute_s[v, here] + longest_s:
            w.tail_s[v], is_new[here] = p.compute_s[v, here] + longest_s, 1
            for e in range(p.in_first[v], p.in_first[v + ONE]):
                low = min(low, int(w.rank[p.in_producer[e]]))
        if k % STRIDE == 0:
            same = k <= first and k <= low
            for d in range(len(next_one)):
                same = same and is_new[d] == 0 and w.next_one[k // STRIDE, d] == next_one[d]
                w.next_one[k // STRIDE, d] = next_one[d]
            if same:
                return


@inner
def _least_s(aim: Aim, w: Walker, first: int, last: int, free_s: Array) -> float:
    """Returns what a plan takes at least that has been executed up to position `last`."""
    p, placement, seen, least_s = aim.problem, w.placement, w.trial.work.device[0], 0.0
    for d in range(len(free_s)):
        seen[d] = w.next_one[last // STRIDE + 1, d]
    for k in range(min((last // STRIDE + 1) * STRIDE, len(w.order)) - 1, last, -1):
        seen[placement[w.order[k]]] = w.order[k]
    for d in range(len(free_s)):
        if seen[d] != NOBODY:
            least_s = max(least_s, free_s[d] + w.tail_s[seen[d]])
    for k in range(first, last + 1):
        v = w.order[k]
        here, done_s = placement[v], w.done_s[1, v]
        for e in range(p.first_move[v], p.first_move[v + ONE]):
            if w.rank[p.reader[e]] > last:
                there = placement[p.reader[e]]
                move_s = p.num_bytes[e] * p.seconds_per_byte[here, there]
                move_s = p.latency_s[here, there] + move_s
                least_s = max(least_s, done_s + move_s + w.tail_s[p.reader[e]])
    return least_s


@inner
def pass_from(
    aim: Aim, w: Walker, first: int, last: int, high: int, limit_s: float
) -> tuple[float, int]:
    """Executes a plan from position `first` on; returns its makespan and how far it came.

    Before it everything is as it was, and behind position `last` the plan is. If it takes
    longer than the limit it is given up there, and the makespan is inf. It also ends where all
    is as in the accepted plan again, behind `high` at least. Times are those of the simulator,
    in every bit.
    """
    p, serial, devices = aim.problem, aim.links == SERIAL, aim.input_s.shape[1]
    placement, order, state = w.placement, w.order, w.state_s
    done_s, arrival_s, marks = w.done_s[1], w.arrival_s[1], w.mark_s[1]
    sent, sent_s = w.trial.work.device[0], w.trial.work.device_s[0]
    begin, changed = first // STRIDE * STRIDE, 0
    for i in range(len(state)):
        state[i] = marks[begin // STRIDE, i]
    for d in range(devices):
        sent[d] = NOBODY
    free_s, link_s, latest_s = state[1 : 1 + devices], state[1 + devices :], state[0]
    for k in range(begin, len(order)):
        if k % STRIDE == 0:
            state[0], same = latest_s, k > high
            for i in range(len(state)):
                marks[k // STRIDE, i] = state[i]
                same = same and state[i] == w.mark_s[0, k // STRIDE, i]
            if same:
                return w.worth[ENERGY], k
        v = order[k]
        here = placement[v]
        start = max(free_s[here], aim.input_s[v, here])
        for e in range(p.in_first[v], p.in_first[v + ONE]):
            if serial:
                start = max(start, arrival_s[e])
            else:
                u = p.in_producer[e]
                there = placement[u]
                move_s = p.in_bytes[e] * p.seconds_per_byte[there, here]
                start = max(start, done_s[u] + (p.latency_s[there, here] + move_s))
        finish = start + p.compute_s[v, here]
        if high < len(order) and k >= first and finish != w.done_s[0, v]:
            changed += 1
            if changed > MANY:
                high = len(order)
            for e in range(p.first_move[v], p.first_move[v + ONE]):
                high = max(high, int(w.rank[p.reader[e]]))
        done_s[v] = free_s[here] = finish
        latest_s = max(latest_s, finish)
        if serial:
            for e in range(p.first_move[v], p.first_move[v + ONE]):
                x, there, arrives_s = p.item[e], placement[p.reader[e]], finish
                if there != here:
                    if sent[there] != x:
                        link = here * devices + there
                        move_s = p.num_bytes[e] * p.seconds_per_byte[here, there]
                        move_s = p.latency_s[here, there] + move_s
                        sent[there] = x
                        sent_s[there] = link_s[link] = max(finish, link_s[link]) + move_s
                    arrives_s = sent_s[there]
                arrival_s[aim.out_in[e]] = arrives_s
        # Sums in another order may round otherwise.
        if k == last and _least_s(aim, w, first, last, free_s) > limit_s * (1.0 + 1e-12):
            return np.inf, k + 1
    return latest_s, len(order)


@inner
def _copy_between(aim: Aim, w: Walker, first: int, end: int, source: int) -> None:
    """Copies the times of positions from `first` on between accepted (0) and tried (1)."""
    goal, block = 1 - source, first // STRIDE
    for k in range(block * STRIDE, end):
        v = w.order[k]
        w.done_s[goal, v] = w.done_s[source, v]
        if w.arrival_s.size:
            for e in range(aim.problem.first_move[v], aim.problem.first_move[v + ONE]):
                w.arrival_s[goal, aim.out_in[e]] = w.arrival_s[source, aim.out_in[e]]
    for k in range(block + 1, (end - 1) // STRIDE + 1):
        for i in range(w.mark_s.shape[2]):
            w.mark_s[goal, k, i] = w.mark_s[source, k, i]


@inner
def note_chain(aim: Aim, w: Walker) -> None:
    """Works out a chain of tasks that the accepted plan's makespan waited for."""
    p, n, v, last = aim.problem, len(w.order), 0, w.trial.work.device[1]
    done_s, placement = w.done_s[0], w.placement
    for d in range(len(last)):
        last[d] = NOBODY
    for k in range(n):
        u = w.order[k]
        w.before[u] = last[placement[u]]
        last[placement[u]] = u
        if done_s[u] > done_s[v]:
            v = int(u)
    length = 0
    while length < n:
        w.chain[length] = v
        length += 1
        here, next_one = placement[v], w.before[v]
        latest_s = aim.input_s[v, here]
        if next_one != NOBODY and done_s[next_one] >= latest_s:
            latest_s = done_s[next_one]
        else:
            next_one = NOBODY
        for e in range(p.in_first[v], p.in_first[v + ONE]):
            u = p.in_producer[e]
            there = placement[u]
            if aim.links == SERIAL:
                there_s = w.arrival_s[0, e]
            else:
                move_s = p.in_bytes[e] * p.seconds_per_byte[there, here]
                there_s = done_s[u] + (p.latency_s[there, here] + move_s)
            if there_s > latest_s:
                latest_s, next_one = there_s, u
        if next_one == NOBODY:
            break
        v = int(next_one)
    w.count[0] = length


@jit
def walk(aim: Aim, w: Walker, steps: int, hot: float, cold: float, enough_s: np.ndarray) -> int:
    """Makes `steps` evaluations, nearly all of a move each; returns how many it made.

    Args:
      aim: the problem.
      w: the walker, which is changed; energy inf: its plan has not been evaluated.
      steps: how many.
      hot: temperature at the first, a share of the makespan for each task.
      cold: and at the last, geometrically between.
      enough_s: `[1]` seconds of a plan after which it stops; another thread may change it.
    """
    random, placement, order, rank = w.random, w.placement, w.order, w.rank
    worth, moved = w.worth, w.moved
    n, devices = aim.problem.compute_s.shape
    temperature, fall = hot / n, (cold / hot) ** (1.0 / max(steps, 1))
    has_times = aim.waits and aim.is_listed and len(w.trial.rows.finish_s) > 0
    for step in range(steps):
        if worth[BEST] <= enough_s[0]:
            return step
        temperature *= fall
        changed, source, goal, first, last, low, high = 0, 0, 0, 0, n - 1, 0, n
        is_new = worth[ENERGY] == np.inf
        v = _below(random, n)
        if w.count[0] and _uniform(random) < CRITICAL:
            v = w.chain[_below(random, w.count[0])]
        if is_new:
            for u in range(n):
                order[rank[u]] = u
        elif aim.waits and (devices == 1 or _uniform(random) < SHIFT):
            source, goal = shift(aim, random, placement, order, rank, v)
            low = first = min(source, goal)
            high = last = max(source, goal)
        else:
            changed = mutate(aim, random, placement, moved, v)
            first, last, low, high = changed_positions(aim, rank, moved, changed)
        if not is_new and changed == 0 and source == goal:
            continue
        limit, end = worth[ENERGY] * (1.0 - temperature * np.log(1.0 - _uniform(random))), n
        if aim.is_plain:
            if aim.links == SERIAL:
                high = n
            stop = last if w.taken[0] < OFTEN and high < n else n
            value_s, end = pass_from(aim, w, first, stop, high, limit)
            energy = value_s
        else:
            value_s, energy = plan_worth(aim, w.trial, 1.0)
        is_taken = is_new or energy <= limit
        if aim.is_plain:
            _copy_between(aim, w, first, end, int(is_taken))
        if is_taken:
            worth[ENERGY], worth[VALUE] = energy, value_s
            w.count[1] += 1
            if (aim.is_plain or has_times) and w.count[1] >= TAKEN:
                if has_times:
                    _copy(w.trial.rows.finish_s[0], w.done_s[0])
                note_chain(aim, w)
                w.count[1] = 0
            if value_s < worth[BEST]:
                worth[BEST] = value_s
                _copy(placement, w.best_placement)
                _copy(rank, w.best_rank)
        else:
            for k in range(changed - 1, -1, -1):
                placement[moved[0, k]] = moved[1, k]
            if source != goal:
                _move_task(order, rank, goal, source)
        if aim.is_plain and aim.links != SERIAL:
            is_tailed = not is_new and w.taken[0] < OFTEN
            w.taken[0] += (int(is_taken) - w.taken[0]) / 32.0
            if w.taken[0] < OFTEN and not is_tailed:
                _note_tails(aim, w, 0, n - 1, 0)
            elif w.taken[0] < OFTEN and is_taken:
                _note_tails(aim, w, first, last, low)
    return steps


def warm() -> None:
    """Compiles all, as a search on a graph of two tasks calls it."""
    from doppler_jax.costs.build import from_edge_delays
    from doppler_jax.objective import Objective
    from doppler_jax.search.problem import make_search_problem
    from doppler_jax.search.walks import make_walker

    graph, costs = from_edge_delays([1.0, 1.0], [(0, 1, 1.0)], num_devices=2)
    problem = make_search_problem(graph, costs, Objective())
    aim, start = problem.aim, np.zeros((1, 2), np.uint32)
    walker = make_walker(problem, start[0], problem.rank, 0)
    for function, *example in (
        (walk, aim, walker, 4, 0.5, 0.1, np.zeros(1)),
        (score_rows, aim, walker.trial, start, problem.rank[None], start, *np.zeros((2, 1))),
    ):
        function.compile(tuple(map(numba.typeof, example)))
