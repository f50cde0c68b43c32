"""Searches as Numba compiles them: moves, what a plan is worth, and many steps of each search.

A plan is a placement and an order of the tasks, which only `in_order` looks at. Two loops
cover all searches. `walk` changes one plan at a time: annealing, and iterated local search.
`breed` keeps a population: evolution, and random search. Each works on its own state without
looking at any other, so that threads may run several at once, and what comes out depends on
the states and the number of steps alone.

Under `in_order` with links whose arrivals are known when a task starts, a plan is evaluated
from the first position that its move can change; elsewhere as a whole, by the simulator.

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
    sort_by_key,
)

Array = np.ndarray

GROUP = 8
"""Tasks that move together at most."""

STRIDE = 16
"""Positions between two at which the state of an `in_order` execution is kept."""

SWAP, NEAR, TOGETHER = 0.15, 0.6, 0.25
"""How often a move is a swap; else, goes to a neighbour's device; moves several tasks."""

SHIFT = 0.5
"""How often, under `in_order`, a move is one of the order."""

PLACEMENT, ORDER, POSITION, BEST_PLACEMENT, BEST_ORDER, OLD_PLACEMENT, OLD_ORDER = range(7)
"""Rows of `Walker.plan`: the plan with its order's inverse, the best, the last optimum."""

ENERGY, BEST, OPTIMUM = range(3)
"""Entries of `Walker.worth`, seconds, of the three; the second is of what fits into memory."""

CRITICAL, CHAIN_STEPS = 0.75, 48
"""How often a move of annealing is of a task on the critical chain, and of how many steps one
works out the chain anew."""

IN_VAIN, TURN, AGE, LENGTH = range(4)
"""Entries of `Walker.count`. Of a descent: moves without gain, and the next single move; of
annealing: steps since the critical chain was worked out, and how many tasks it has."""


class Aim(NamedTuple):
    """What is to be found: the problem, and what makes one plan better than another."""

    simulate: Any  # `run_rows`
    problem: NativeProblem
    links: int
    switches: int  # of the discipline
    waits: bool  # whether that looks at the order
    is_plain: bool  # whether a plan can be evaluated from the first changed position
    is_listed: bool  # whether its execution is a list schedule (`lns_kernels`)
    rank: Array  # [N] uint32, positions in a topological order
    near_first: Array  # [2, N + 1] uint32, where a task's producers begin, and its readers
    near: Array  # [2, E] uint32
    input_s: Array  # [N, D] when graph inputs with a home are there, under `parallel` links
    out_in: Array  # [E] uint32, of an edge as producers list it the place as readers do
    in_out: Array  # [E] uint32, the other way round
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


class Walker(NamedTuple):
    """A plan that is changed step by step, and the best that it has been."""

    random: Array  # [1] uint64
    plan: Array  # [7, N] uint32
    worth: Array  # [3] float64
    count: Array  # [4] int64
    moved: Array  # [2, GROUP] uint32, what the last move moved, and from where
    # Under `in_order`, of the accepted plan and of the one that is tried:
    done_s: Array  # [2, N] finishes
    arrival_s: Array  # [2, E] by edge as readers list them, under `serial` links
    mark_s: Array  # [2, M, 1 + D (1 + D)] latest finish, devices and links, every STRIDE
    state_s: Array  # [1 + D (1 + D)], scratch
    trial: Trial  # of the plan
    timed: Rows  # the same, with its times
    chain: Array  # [N] uint32, a critical chain of the plan, as it was a few steps ago


class Population(NamedTuple):
    """Plans that live side by side."""

    random: Array  # [1] uint64
    placement: Array  # [P, N] uint32
    order: Array  # [P, N] uint32
    energy: Array  # [P] seconds, inf for what has not been looked at
    value_s: Array  # [P] inf where memory is exceeded
    moved: Array  # [2, GROUP] uint32, scratch
    trial: Trial  # of a child


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
def plan_worth(aim: Aim, trial: Trial) -> tuple[float, float]:
    """Returns a plan's value in seconds, inf if it exceeds memory, and what is made small.

    The latter, its energy, is the value, and more by as many times as peaks exceed devices.
    """
    rows, draws = trial.rows, len(trial.draws_s)
    limited, over = len(aim.capacity_bytes) > 0, 0.0
    # The last is without noise: its times count for memory.
    for draw in range(draws - 1, -2 if limited or draws == 0 else -1, -1):
        aim.simulate(aim.problem, rows, trial.work, draw, aim.switches, aim.links)
        if draw >= 0:
            trial.draws_s[draw] = rows.makespan_s[0]
    value_s = _statistic(trial.draws_s, aim.quantile) if draws else rows.makespan_s[0]
    if limited:
        peak_bytes(aim.memory, trial.memory, rows)
        peak = trial.memory.peak
        for d in range(len(peak)):
            if peak[d] > aim.capacity_bytes[d]:
                over += (peak[d] - aim.capacity_bytes[d]) / max(aim.capacity_bytes[d], 1.0)
    return (np.inf if over > 0 else value_s), value_s * (1.0 + over)


@jit
def score_rows(
    aim: Aim, trial: Trial, placements: Array, value_s: Array, energy: Array
) -> None:
    """Writes what placements `[B, N]` are worth, in the order of the trial."""
    for b in range(len(placements)):
        _copy(placements[b], trial.rows.placements[0])
        value_s[b], energy[b] = plan_worth(aim, trial)


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
def _move_task(plan: Array, source: int, goal: int) -> None:
    """Moves the task at position `source` to `goal`; those between move up or down by one."""
    v = plan[ORDER, source]
    step = 1 if goal > source else -1
    k = source
    while k != goal:
        plan[ORDER, k] = plan[ORDER, k + step]
        plan[POSITION, plan[ORDER, k]] = k
        k += step
    plan[ORDER, goal] = v
    plan[POSITION, v] = goal


@inner
def shift(aim: Aim, random: Array, plan: Array) -> tuple[int, int]:
    """Moves a random task to a random position between its producers and its readers.

    Returns its position before and after; they are equal where it cannot move.
    """
    low, high = 0, plan.shape[1] - 1
    v = _below(random, plan.shape[1])
    for e in range(aim.near_first[0, v], aim.near_first[0, v + ONE]):
        low = max(low, int(plan[POSITION, aim.near[0, e]]) + 1)
    for e in range(aim.near_first[1, v], aim.near_first[1, v + ONE]):
        high = min(high, int(plan[POSITION, aim.near[1, e]]) - 1)
    source, goal = int(plan[POSITION, v]), low + int(_below(random, high - low + 1))
    _move_task(plan, source, goal)
    return source, goal


@inner
def first_changed(aim: Aim, plan: Array, moved: Array, count: int) -> int:
    """Returns the first position whose times the last `count` moves of devices can change."""
    first = plan.shape[1]
    for k in range(count):
        v = moved[0, k]
        first = min(first, int(plan[POSITION, v]))
        if aim.links == SERIAL:  # its operands are sent elsewhere, and others behind them
            for e in range(aim.near_first[0, v], aim.near_first[0, v + ONE]):
                first = min(first, int(plan[POSITION, aim.near[0, e]]))
    return first


@inner
def pass_from(aim: Aim, w: Walker, first: int) -> float:
    """Executes a plan from position `first` on; returns its makespan.

    Before it everything is as it was. Times are those of the simulator, in every bit.
    """
    p, serial, devices = aim.problem, aim.links == SERIAL, aim.input_s.shape[1]
    placement, order, state = w.plan[PLACEMENT], w.plan[ORDER], w.state_s
    done_s, arrival_s, marks = w.done_s[1], w.arrival_s[1], w.mark_s[1]
    sent, sent_s = w.trial.work.device[0], w.trial.work.device_s[0]
    begin = first // STRIDE * STRIDE
    for i in range(len(state)):
        state[i] = marks[begin // STRIDE, i]
    for d in range(devices):
        sent[d] = NOBODY
    free_s, link_s, latest_s = state[1 : 1 + devices], state[1 + devices :], state[0]
    for k in range(begin, len(order)):
        if k % STRIDE == 0:
            state[0] = latest_s
            for i in range(len(state)):
                marks[k // STRIDE, i] = state[i]
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
    return latest_s


@inner
def _copy_from(aim: Aim, w: Walker, first: int, source: int) -> None:
    """Copies the times of positions from `first` on between accepted (0) and tried (1)."""
    goal, block = 1 - source, first // STRIDE
    for k in range(block * STRIDE, w.plan.shape[1]):
        v = w.plan[ORDER, k]
        w.done_s[goal, v] = w.done_s[source, v]
        if w.arrival_s.size:
            for e in range(aim.problem.first_move[v], aim.problem.first_move[v + ONE]):
                w.arrival_s[goal, aim.out_in[e]] = w.arrival_s[source, aim.out_in[e]]
    for k in range(block + 1, w.mark_s.shape[1]):
        for i in range(w.mark_s.shape[2]):
            w.mark_s[goal, k, i] = w.mark_s[source, k, i]


@inner
def _return_to_optimum(plan: Array, worth: Array) -> None:
    """Ends a descent: keeps the better optimum, and makes it the plan."""
    if worth[ENERGY] < worth[OPTIMUM]:
        worth[OPTIMUM] = worth[ENERGY]
        _copy(plan[PLACEMENT], plan[OLD_PLACEMENT])
        _copy(plan[ORDER], plan[OLD_ORDER])
    _copy(plan[OLD_PLACEMENT], plan[PLACEMENT])
    _copy(plan[OLD_ORDER], plan[ORDER])
    for k in range(plan.shape[1]):
        plan[POSITION, plan[ORDER, k]] = k


@inner
def critical_chain(aim: Aim, rows: Rows, work: Work, chain: Array) -> int:
    """Writes a chain of tasks that the makespan waited for, last first; returns how many.

    Each started when the next one ended on its device, or when what that had made arrived.
    """
    order, ahead, last = work.task[0], work.task[1], work.device[0]
    p, placement = aim.problem, rows.placements[0]
    start_s, finish_s = rows.start_s[0], rows.finish_s[0]
    n, reads, v = len(placement), len(p.home), 0
    for u in range(n):
        order[u] = u
        if finish_s[u] > finish_s[v]:
            v = u
    sort_by_key(start_s, order, ahead)
    for d in range(len(last)):
        last[d] = NOBODY
    for k in range(n):  # the task that ran before each on its device
        ahead[order[k]] = last[placement[order[k]]]
        last[placement[order[k]]] = order[k]
    for count in range(n):
        chain[count] = v
        before = n
        for e in range(p.in_first[v], p.in_first[v + 1]):
            if rows.arrival_s[0, reads + aim.in_out[e]] == start_s[v]:
                before = int(p.in_producer[e])
        if before == n and ahead[v] != NOBODY and finish_s[ahead[v]] == start_s[v]:
            before = int(ahead[v])
        if before == n or start_s[v] == 0.0:
            return count + 1
        v = before
    return n


@jit
def walk(
    aim: Aim, w: Walker, steps: int, hot: float, cold: float, kicks: int, target_s: float
) -> int:
    """Makes `steps` evaluations, nearly all of a move each; returns how many it made.

    Args:
      aim: the problem.
      w: the walker, which is changed; energy inf: its plan has not been evaluated.
      steps: how many.
      hot: temperature at the first, a share of the makespan for each task.
      cold: and at the last, geometrically between.
      kicks: 0 for annealing. Else it descends (temperatures are not looked at), and once a
        local optimum is reached so many random moves begin the next descent.
      target_s: seconds of a plan after which it stops.
    """
    random, plan, worth, count, moved = w.random, w.plan, w.worth, w.count, w.moved
    compute_s = aim.problem.compute_s
    n, devices = compute_s.shape
    temperature, fall = 0.0, 1.0
    if kicks == 0:
        temperature, fall = hot / n, (cold / hot) ** (1.0 / max(steps, 1))
    moves = n * (devices - 1)
    for step in range(steps):
        if worth[BEST] <= target_s:
            return step
        temperature *= fall
        shifts = aim.waits and (moves == 0 or _uniform(random) < SHIFT)
        changed, source, goal = 0, 0, 0
        is_new = worth[ENERGY] == np.inf
        if kicks and count[IN_VAIN] >= moves:
            _return_to_optimum(plan, worth)
            for _ in range(kicks):
                mutate(aim, random, plan[PLACEMENT], moved, _below(random, n))
                if shifts:
                    shift(aim, random, plan)
            is_new = True
        elif is_new:
            pass
        elif shifts:
            source, goal = shift(aim, random, plan)
        elif kicks and moves and step % 2:
            v, turn = np.uint32(count[TURN] // (devices - 1)), count[TURN] % (devices - 1)
            count[TURN] = (count[TURN] + 1) % moves
            moved[0, 0], moved[1, 0] = v, plan[PLACEMENT, v]
            to = np.uint32((plan[PLACEMENT, v] + ONE + np.uint32(turn)) % devices)
            if compute_s[v, to] < np.inf:
                plan[PLACEMENT, v] = to
                changed = 1
        elif kicks == 0 and not aim.is_plain and count[AGE] % CHAIN_STEPS == 0:
            aim.simulate(aim.problem, w.timed, w.trial.work, -1, aim.switches, aim.links)
            count[LENGTH], count[AGE] = critical_chain(aim, w.timed, w.trial.work, w.chain), 1
            continue
        else:
            v = _below(random, n)
            if count[LENGTH] and _uniform(random) < CRITICAL:
                v = w.chain[_below(random, count[LENGTH])]
            count[AGE] += 1
            changed = mutate(aim, random, plan[PLACEMENT], moved, v)
        if is_new:
            worth[ENERGY], count[IN_VAIN] = np.inf, 0
        elif changed == 0 and source == goal:
            count[IN_VAIN] += 1
            continue
        first = 0 if is_new else min(source, goal)
        if changed:
            first = first_changed(aim, plan, moved, changed)
        if aim.is_plain:
            value_s = energy = pass_from(aim, w, first)
        else:
            value_s, energy = plan_worth(aim, w.trial)
        before = worth[ENERGY]
        limit = before
        if kicks == 0 and not is_new:
            limit = before * (1.0 - temperature * np.log(1.0 - _uniform(random)))
        is_gain = energy < before
        is_taken = is_new or is_gain or (kicks == 0 and energy <= limit)
        if aim.is_plain:
            _copy_from(aim, w, first, int(is_taken))
        count[IN_VAIN] = 0 if is_gain else count[IN_VAIN] + 1
        if is_taken:
            worth[ENERGY] = energy
            if value_s < worth[BEST]:
                worth[BEST] = value_s
                _copy(plan[PLACEMENT], plan[BEST_PLACEMENT])
                _copy(plan[ORDER], plan[BEST_ORDER])
        else:
            for k in range(changed - 1, -1, -1):
                plan[PLACEMENT, moved[0, k]] = moved[1, k]
            if source != goal:
                _move_task(plan, goal, source)
    return steps


@inner
def _draw(compute_s: Array, random: Array, placement: Array) -> None:
    """Places each task uniformly on a device that can run it."""
    for v in range(len(placement)):
        able = 0
        for d in range(compute_s.shape[1]):
            if compute_s[v, d] < np.inf:
                able += 1
                if _below(random, able) == 0:
                    placement[v] = d


@inner
def _cross(rank: Array, random: Array, child: Array, second: Array) -> None:
    """Takes some tasks' devices from a second parent: half of them, or a stretch of order."""
    low, high = _below(random, len(child) + 1), _below(random, len(child) + 1)
    low, high = min(low, high), max(low, high)
    is_stretch = _uniform(random) < 0.5
    for v in range(len(child)):
        takes = _uniform(random) < 0.5
        if is_stretch:
            takes = low <= rank[v] < high
        if takes:
            child[v] = second[v]


@jit
def breed(
    aim: Aim,
    pool: Population,
    steps: int,
    mutations: int,
    crossover: float,
    fresh: bool,
    target_s: float,
) -> int:
    """Makes `steps` children, of which each costs an evaluation and may replace the worst.

    It returns how many it made. Those of a makespan that is there already, which are nearly
    always relabellings, do not replace any.

    Args:
      aim: the problem.
      pool: the population, which is changed; members of energy inf are evaluated first.
      steps: how many.
      mutations: random moves that change a child, at most.
      crossover: share of children with two parents.
      fresh: whether children are drawn at random instead.
      target_s: seconds of a plan after which it stops.
    """
    random, energy, compute_s = pool.random, pool.energy, aim.problem.compute_s
    size = len(pool.placement)
    child, order = pool.trial.rows.placements[0], pool.trial.rows.order[0]
    for step in range(steps):
        worst = 0
        for k in range(1, size):  # one of those that do not fit, if there are any
            is_out, was_out = pool.value_s[k] == np.inf, pool.value_s[worst] == np.inf
            if (energy[k] > energy[worst] and is_out == was_out) or (is_out and not was_out):
                worst = k
        is_known = energy[worst] < np.inf
        mother = int(_below(random, size)) if is_known else worst
        _copy(pool.order[mother], order)
        _copy(pool.placement[mother], child)
        if fresh:
            _draw(compute_s, random, child)
        elif is_known:
            if _uniform(random) < crossover:
                _cross(aim.rank, random, child, pool.placement[_below(random, size)])
            for _ in range(1 + _below(random, mutations)):
                mutate(aim, random, child, pool.moved, _below(random, len(child)))
        value_s, cost = plan_worth(aim, pool.trial)
        # What fits is not driven out by what does not.
        is_better = cost < energy[worst] and (value_s < np.inf or pool.value_s[worst] == np.inf)
        for k in range(size):
            is_better = is_better and energy[k] != cost
        if is_better or not is_known:
            _copy(child, pool.placement[worst])
            _copy(order, pool.order[worst])
            energy[worst], pool.value_s[worst] = cost, value_s
            if value_s <= target_s:
                return step + 1
    return steps


def warm() -> None:
    """Compiles all, as a search on a graph of two tasks calls it."""
    from doppler_jax.costs.build import from_edge_delays
    from doppler_jax.objective import Objective
    from doppler_jax.search.populations import make_population
    from doppler_jax.search.problem import make_search_problem
    from doppler_jax.search.walks import make_walker

    graph, costs = from_edge_delays([1.0, 1.0], [(0, 1, 1.0)], num_devices=2)
    problem = make_search_problem(graph, costs, Objective())
    aim, start = problem.aim, np.zeros((1, 2), np.uint32)
    walker, pool = make_walker(problem, start[0], 0), make_population(problem, start, 0)
    for function, *example in (
        (walk, aim, walker, 4, 0.5, 0.1, 1, 0.0),
        (breed, aim, pool, 4, 1, 0.5, False, 0.0),
        (score_rows, aim, walker.trial, start, np.zeros(1), np.zeros(1)),
    ):
        function.compile(tuple(map(numba.typeof, example)))
