"""Groups of tasks that share a device, for any method.

List schedulers and policies place a task at a time, and none of them knows of groups. But all
methods keep to pins. So the devices of groups are chosen first, and pinned.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from doppler_jax.baselines.heft import heft_schedule
from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.costs.handling import as_transfers
from doppler_jax.methods.own import Proposer
from doppler_jax.methods.request import Candidates, Request
from doppler_jax.native import wait_until_compiled
from doppler_jax.search.anytime import Found, run_search
from doppler_jax.search.lns import LNS
from doppler_jax.types import Costs, Plans

TRIES = 200
"""Choices of devices that are searched a little."""

STEPS, STEP_TASKS = 500, 1_000_000
"""Plans that each of those searches may simulate, and tasks of all of them."""

FEW, LEAST = 50, 20
"""Of such searches, for which there has to be room where evaluations are bounded; and plans
that each simulates in any case."""

MOST_SWAPPED = 50
"""Groups, above which none swap: of pairs there are too many."""

SHARE, DEFAULT_S = 3, 5.0
"""Of a bound, the part (1 in so many) that may go on choosing; and seconds if there is none."""

Choice = tuple[int, ...]
"""A device for each group."""


def keep_together(
    propose: Proposer, request: Request, groups: Sequence[np.ndarray]
) -> Candidates:
    """Returns what a method proposes where each group of tasks `[...]` has one device.

    Choices of devices are tried by a short search each, and the method is asked for the best
    one alone. What it proves is about that choice, so no bound is taken from it.
    """
    held, spent, stopped = _choose(request, groups)
    if stopped is not None:
        return Candidates(stopped[None], spent, interrupted=True)
    budget = request.budget
    if budget.evaluations is not None:
        budget = dataclasses.replace(budget, evaluations=budget.evaluations - spent)
    found = propose(dataclasses.replace(held, budget=budget))
    return dataclasses.replace(found, evaluations=found.evaluations + spent, lower_bound_s=0.0)


def _choose(
    request: Request, groups: Sequence[np.ndarray]
) -> tuple[Request, int, np.ndarray | None]:
    """Returns the request where each group has its device, and the executions simulated.

    It begins with the devices where HEFT's schedule has most of a group's work. Then single
    groups move as a whole, or two swap their devices, from the best plan so far; a short
    search mends the rest, and says whether it stays so. After Ctrl-C the third result is the
    best plan's devices `[N]`, if there is any.
    """
    costs, bound = request.costs, request.budget.evaluations
    able = [np.flatnonzero(np.isfinite(costs.compute_s[g]).all(axis=0)) for g in groups]
    seconds = request.budget.seconds
    is_ready = wait_until_compiled(None if seconds is None else request.budget.began + seconds)
    if seconds is None and bound is None:
        seconds = DEFAULT_S
    steps = min(STEPS, STEP_TASKS // request.graph.num_tasks)
    if bound is not None:
        steps = min(steps, bound // SHARE // FEW)
    steps = max(steps, LEAST * request.objective.simulations)
    choice = _by_work(request, groups, able)
    best = _hold(request, groups, choice)
    if max(map(len, able)) == 1 or not is_ready:
        return best, 0, None
    random, best_s, placement, spent = np.random.default_rng(0), math.inf, None, 0
    untried = [choice]
    for _ in range(TRIES):
        if bound is not None and (spent + steps) * SHARE > bound:
            break
        tried = untried.pop() if untried else tuple(int(random.choice(may)) for may in able)
        held = _hold(request, groups, tried)
        starts = [_heft(held, held.costs)]
        if placement is not None:
            starts.append(placement.copy())
            for group, device in zip(groups, tried, strict=True):
                starts[-1][group] = device
        found = _search_a_little(held, np.stack(starts), steps)
        spent += found.evaluations
        value_s = math.inf
        if len(found.placements):
            plans = Plans(found.placements, held.orders_of(found))
            value_s = held.judge_plan(plans).value_s
        if value_s < best_s:
            best, best_s, placement = held, value_s, found.placements[0]
            untried = _near(tried, able)
            random.shuffle(untried)
        if found.interrupted:
            return best, spent, placement
        if seconds is not None and request.budget.seconds_spent() * SHARE > seconds:
            break
    return best, spent, None


def _by_work(
    request: Request, groups: Sequence[np.ndarray], able: Sequence[np.ndarray]
) -> Choice:
    """Returns where HEFT's schedule has most of each group's work."""
    costs, placement = request.costs, _heft(request, request.costs)
    work_s = np.where(np.isfinite(costs.compute_s), costs.compute_s, 0.0)
    devices = []
    for group, may in zip(groups, able, strict=True):
        there = placement[group]
        share_s = np.bincount(there, work_s[group, there], costs.num_devices)
        devices.append(int(may[np.argmax(share_s[may])]))
    return tuple(devices)


def _near(choice: Choice, able: Sequence[np.ndarray]) -> list[Choice]:
    """Returns the choices in which one group is elsewhere, or two have swapped devices."""
    near = {(*choice[:k], int(d), *choice[k + 1 :]) for k, may in enumerate(able) for d in may}
    swapping = range(len(choice) if len(choice) <= MOST_SWAPPED else 0)
    for j, k in itertools.combinations(swapping, 2):
        if choice[k] in able[j] and choice[j] in able[k]:
            swapped = list(choice)
            swapped[j], swapped[k] = choice[k], choice[j]
            near.add(tuple(swapped))
    return sorted(near - {choice})


def _search_a_little(held: Request, starts: np.ndarray, steps: int) -> Found:
    problem, budget = held.problem_for(LNS.queue), Budget(evaluations=steps)
    return run_search(LNS(), problem, Plans(starts, starts[:0]), 0, budget, CurveRecorder())


def _heft(request: Request, costs: Costs) -> np.ndarray:
    return heft_schedule(request.graph, as_transfers(costs)).placement


def _hold(request: Request, groups: Sequence[np.ndarray], devices: Sequence[int]) -> Request:
    """Returns the request with each group pinned to its device."""
    costs, compute_s = request.costs, request.costs.compute_s.copy()
    for group, device in zip(groups, devices, strict=True):
        compute_s[np.ix_(group, np.arange(costs.num_devices) != device)] = np.inf
    costs = dataclasses.replace(costs, compute_s=compute_s)
    problem = dataclasses.replace(request.problem, costs=costs)
    return dataclasses.replace(request, costs=costs, problem=problem)
