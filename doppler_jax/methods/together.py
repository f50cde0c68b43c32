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
from doppler_jax.search.anytime import run_search
from doppler_jax.search.lns import LNS
from doppler_jax.types import Costs, Plans

MOST_TRIED, TRIED_TASKS = 16, 16_000
"""Choices of devices that are searched a little, and tasks of all of them."""

STEPS, STEP_TASKS = 1000, 1_000_000
"""Plans that each of those searches may simulate, and tasks of all of them."""

SWEEPS = 2
"""How often each group is moved to every device, to find the choices that are tried."""

SHARE = 4
"""Of a bound, the part (1 in so many) that may go on choosing."""

Choice = tuple[int, ...]
"""A device for each group."""


def keep_together(
    propose: Proposer, request: Request, groups: Sequence[np.ndarray]
) -> Candidates:
    """Returns what a method proposes where each group of tasks `[...]` has one device.

    A few choices of devices are tried by a short search each (all choices, if they are few),
    and the method is asked for the best one alone. What it proves is about that choice, so no
    bound is taken from it.
    """
    held, spent = _choose(request, groups)
    budget = request.budget
    if budget.evaluations is not None:
        budget = dataclasses.replace(budget, evaluations=budget.evaluations - spent)
    found = propose(dataclasses.replace(held, budget=budget))
    return dataclasses.replace(found, evaluations=found.evaluations + spent, lower_bound_s=0.0)


def _choose(request: Request, groups: Sequence[np.ndarray]) -> tuple[Request, int]:
    """Returns the request where each group has its device, and the executions simulated."""
    seconds, bound = request.budget.seconds, request.budget.evaluations
    until_s = None if seconds is None else request.budget.began + seconds
    is_ready = wait_until_compiled(until_s)
    choices, spent = _likely(request, groups, is_ready)
    steps = min(STEPS, STEP_TASKS // request.graph.num_tasks)
    if bound is not None:
        steps = min(steps, (bound // SHARE - spent) // len(choices))
    best, best_s = _hold(request, groups, choices[0]), math.inf
    if len(choices) == 1 or steps < request.objective.simulations or not is_ready:
        return best, spent
    for choice in choices:
        held = _hold(request, groups, choice)
        problem, start = held.problem_for(LNS.queue), _heft(request, held.costs)[None]
        budget = Budget(evaluations=steps)
        found = run_search(LNS(), problem, Plans(start, start[:0]), 0, budget, CurveRecorder())
        spent += found.evaluations
        if len(found.placements):
            plans = Plans(found.placements, request.orders_of(found))
            if (value_s := request.judge_plan(plans).value_s) < best_s:
                best, best_s = held, value_s
        if seconds is not None and request.budget.seconds_spent() * SHARE > seconds:
            break
    return best, spent


def _likely(
    request: Request, groups: Sequence[np.ndarray], is_ready: bool
) -> tuple[list[Choice], int]:
    """Returns choices to try, and the executions simulated.

    If there are many: HEFT's schedule says where most of a group's work goes. Then each group
    is moved to every device, all else where it is, and stays where `fifo` execution is
    shortest; the next sweep begins with HEFT's schedule for what has come out.
    """
    costs, spent = request.costs, 0
    able = [np.flatnonzero(np.isfinite(costs.compute_s[g]).all(axis=0)) for g in groups]
    most = max(1, min(MOST_TRIED, TRIED_TASKS // request.graph.num_tasks))
    if math.prod(map(len, able)) <= most:
        return [tuple(map(int, each)) for each in itertools.product(*able)], 0
    placement = _heft(request, costs)
    work_s = np.where(np.isfinite(costs.compute_s), costs.compute_s, 0.0)
    devices = []
    for group, may in zip(groups, able, strict=True):
        there = placement[group]
        share_s = np.bincount(there, work_s[group, there], costs.num_devices)
        devices.append(int(may[np.argmax(share_s[may])]))
    seen: dict[Choice, tuple[float, float]] = {tuple(devices): (math.inf, math.inf)}
    a_sweep, bound = request.objective.simulations * sum(map(len, able)), math.inf
    if request.budget.evaluations is not None:
        bound = request.budget.evaluations // (2 * SHARE)
    for _ in range(SWEEPS):
        if spent + a_sweep > bound or not is_ready:
            break
        spent += a_sweep
        placement = _heft(request, _hold(request, groups, devices).costs)
        for k, (group, may) in enumerate(zip(groups, able, strict=True)):
            trials = np.tile(placement, (len(may), 1))
            trials[:, group] = may[:, None]
            scored = request.problem.score(request.problem.ordered(trials))
            scores = zip(*(part.tolist() for part in scored), strict=True)
            for device, score in zip(may.tolist(), scores, strict=True):
                choice = (*devices[:k], device, *devices[k + 1 :])
                seen[choice] = min(score, seen.get(choice, score))
            devices[k] = min(
                may.tolist(), key=lambda d: seen[(*devices[:k], d, *devices[k + 1 :])]
            )
            placement[group] = devices[k]
    return sorted(seen, key=lambda choice: seen[choice])[:most], spent


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
