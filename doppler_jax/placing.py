"""`place`: one door to every placement method."""

import dataclasses
import math
import pathlib
import time

import chex
import jax
import numpy as np

from doppler_jax import placement_cache
from doppler_jax.budget import Budget, Curve, CurveRecorder
from doppler_jax.costs.build import check_costs
from doppler_jax.files import PathLike
from doppler_jax.graphs.build import check_graph, topological_order
from doppler_jax.graphs.levels import lower_bound_s
from doppler_jax.memory_maps import free_memory_maps
from doppler_jax.methods import METHODS, default_policy, list_methods, policy_of
from doppler_jax.objective import Objective
from doppler_jax.request import Candidates, Request
from doppler_jax.search.objective import (
    Judgement,
    make_search_problem,
    score_padded,
)
from doppler_jax.simulator.finalists import NUM_FINALISTS, start_order
from doppler_jax.simulator.memory import check_capacity
from doppler_jax.training.checkpoint import Policy
from doppler_jax.types import Costs, Schedule, TaskGraph

MOST_JUDGED = 24
"""Candidates that the oracle judges without a choice among them: those of any search."""

ROUNDING = 1e-9
"""Relative, by which a makespan may be above the lower bound and still count as the best."""

_WIDTH = 128
"""Candidates that are simulated together."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """A placement and what it is worth."""

    placement: np.ndarray  # [N] int64 device of each task
    priority: np.ndarray  # [N] int64 simulated start order, replays the schedule
    makespan_s: float  # by the float64 oracle, without noise
    objective_s: float  # what was minimised, by the oracle: under noise its mean or quantile
    lower_bound_s: float  # no placement has a smaller makespan
    schedule: Schedule  # the oracle's, without noise
    queue: str  # of the schedule: `fifo`, or `priority` where that is shorter (`exact`)
    method: str
    evaluations: int  # executions simulated by the search
    seconds: float  # spent, compilation included
    compile_s: float  # of these, on compiling the search (that of training is not told apart)
    curve: Curve  # of the search, float32 but where that misled it; the last is the oracle's
    interrupted: bool  # by Ctrl-C; the best until then


def place(
    graph: TaskGraph,
    costs: Costs,
    *,
    method: str = "doppler+search",
    policy: Policy | None = None,
    key: chex.PRNGKey | None = None,
    budget_s: float | None = None,
    max_evaluations: int | None = None,
    objective: Objective = Objective(),  # noqa: B008, frozen
    cache: PathLike | None = None,
) -> Placed:
    """Places a task graph on devices so that it finishes soon.

    Searches and training can be stopped by Ctrl-C at any time and return the best so far;
    without noise they stop as well once a placement is as short as the lower bound.
    With `max_evaluations` alone the result is a function of the arguments. In a process that
    has compiled so much that it comes near the system's bound on memory maps, what JAX has
    compiled is dropped first, other functions' programs included.

    Args:
      graph: the task graph.
      costs: its costs, seconds; queues are `fifo`. Where memory is limited only placements
        that fit are returned; what no placement can fit is refused before the search.
      method: one of `list_methods()`. `doppler` samples from `policy`; without one it
        trains a policy for this problem first, by stages 1 and 2. `doppler+search` starts
        a search from samples and list schedules, and is never worse than the latter. Without
        a policy it takes samples of the base policy (`base_policy.py`), if one ships.
      policy: from `load_policy`, of this method; `doppler+search` takes one of `doppler`.
      key: of what is random, by default `jax.random.key(0)`; it is consumed.
      budget_s: seconds; methods that search stop at the first block of about 0.2 s that
        passes them, training at the update. If no bound is given it is 60 s for training
        and `exact`, 10 s for searches, and 5 s for the search of `doppler+search`, which
        begin when the samples are there.
      max_evaluations: executions that may be simulated, a placement under noise counting
        once per draw; never exceeded. `random`, and `doppler` with a policy, simulate
        1000 placements if no bound is given.
      objective: what is minimised: the links, and the noise and its statistic, if any.
      cache: a folder of placements found before. Where one was found for the same graph,
        costs and other arguments, it is returned as it was, once the oracle has confirmed
        what it is worth; otherwise what is found now is kept there, unless by Ctrl-C.

    Returns:
      The best placement found, judged by the float64 oracle.

    Raises:
      ValueError: the graph, its costs, the method, a bound or the objective is invalid, no
        placement can fit into memory (`check_capacity`), or none that fits was found.
    """
    began = time.monotonic()
    _check_request(method, policy, budget_s, max_evaluations, objective)
    check_graph(graph)
    check_costs(graph, costs)
    check_capacity(graph, costs)
    key = jax.random.key(0) if key is None else key
    policy = default_policy(method) if policy is None else policy
    path = None
    if cache is not None:
        asked = {"budget_s": budget_s, "max_evaluations": max_evaluations}
        path = placement_cache.request_path(
            cache, graph, costs, objective, method, policy, key, asked
        )
    noise_key, key = jax.random.split(key)
    problem = make_search_problem(graph, costs, objective, noise_key)
    bound_s = lower_bound_s(graph, costs)
    # Noise may take a makespan below the bound, so nothing is known to be the best then.
    target_s = None if objective.num_noise else bound_s * (1 + ROUNDING)
    request = Request(
        graph=graph,
        costs=costs,
        objective=objective,
        problem=problem,
        key=key,
        policy=policy,
        budget=Budget(
            evaluations=max_evaluations, seconds=budget_s, target_s=target_s, began=began
        ),
        lower_bound_s=bound_s,
        curve=CurveRecorder(),
    )
    placed = None if path is None else _recall(path, method, request)
    if placed is None:
        placed = _find(method, request)
        if path is not None and not placed.interrupted:
            _keep(path, placed)
    return placed


def _find(method: str, request: Request) -> Placed:
    """Returns the best of what a method proposes."""
    graph = request.graph
    free_memory_maps()
    candidates = METHODS[method](request)
    placement, judgement, queue = _best(candidates, request)
    if judgement.overflow:
        raise ValueError(
            f"method {method!r} found no placement that fits: {judgement.overflow}"
        )
    rank = np.empty(graph.num_tasks, np.int64)
    rank[topological_order(graph)] = np.arange(graph.num_tasks)
    seconds = request.budget.seconds_spent()
    return Placed(
        placement=placement.astype(np.int64),
        priority=start_order(judgement.schedule, rank),
        makespan_s=judgement.makespan_s,
        objective_s=judgement.value_s,
        lower_bound_s=max(request.lower_bound_s, candidates.lower_bound_s),
        schedule=judgement.schedule,
        queue=queue,
        method=method,
        evaluations=candidates.evaluations,
        seconds=seconds,
        compile_s=candidates.compile_s,
        curve=request.curve.finish(candidates.evaluations, seconds, judgement.value_s),
        interrupted=candidates.interrupted,
    )


def _recall(path: pathlib.Path, method: str, request: Request) -> Placed | None:
    """Returns what a file keeps, None where the oracle does not confirm its worth."""
    kept = placement_cache.find(path, request.graph, request.costs)
    if kept is None:
        return None
    priority = kept.priority if kept.queue == "priority" else None
    judgement = request.judge(kept.placement, priority)
    if not math.isclose(judgement.value_s, kept.objective_s, rel_tol=1e-9):
        return None
    return Placed(
        **{field.name: getattr(kept, field.name) for field in dataclasses.fields(kept)},
        makespan_s=judgement.makespan_s,
        schedule=judgement.schedule,
        method=method,
        interrupted=False,
    )


def _keep(path: pathlib.Path, placed: Placed) -> None:
    names = [field.name for field in dataclasses.fields(placement_cache.Kept)]
    kept = placement_cache.Kept(**{name: getattr(placed, name) for name in names})
    placement_cache.keep(path, kept)


def _check_request(
    method: str,
    policy: Policy | None,
    budget_s: float | None,
    max_evaluations: int | None,
    objective: Objective,
) -> None:
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(list_methods())}")
    wanted = policy_of(method)
    if policy is not None and wanted is None:
        takers = ", ".join(repr(m) for m in list_methods() if policy_of(m))
        raise ValueError(f"method {method!r} takes no policy; only these do: {takers}")
    if policy is not None and policy.method != wanted:
        raise ValueError(
            f"method {method!r} takes a policy of {wanted!r}; this one is of {policy.method!r}"
        )
    for name, bound in (("budget_s", budget_s), ("max_evaluations", max_evaluations)):
        if bound is not None and not bound > 0:
            raise ValueError(f"{name} is {bound}; expected more than 0")
    if not isinstance(objective, Objective):
        raise ValueError(f"objective is {objective!r}; expected a doppler_jax.Objective")


def _best(candidates: Candidates, request: Request) -> tuple[np.ndarray, Judgement, str]:
    """Returns the best candidate, the oracle's word on it, and the queue that it is for.

    Of more than `MOST_JUDGED` the vectorised simulator chooses the finalists, of those that
    fit into memory first; ties go to the earlier one.
    """
    placements, problem = candidates.placements, request.problem
    if len(placements) > MOST_JUDGED:
        padding = ((0, 0), (0, problem.padded.padded_tasks - placements.shape[1]))
        padded = np.pad(placements, padding)
        parts = [
            score_padded(request.objective, problem, padded[first : first + _WIDTH], _WIDTH)
            for first in range(0, len(padded), _WIDTH)
        ]
        exceeds = np.isinf(np.concatenate([part.value_s for part in parts]))
        order = np.lexsort((np.concatenate([part.energy for part in parts]), exceeds))
        placements = placements[np.sort(order[:NUM_FINALISTS])]
    judged = [(p, request.judge(p), "fifo") for p in placements]
    if candidates.priority is not None:
        first = candidates.placements[0]
        judged.append((first, request.judge(first, candidates.priority), "priority"))
    return min(judged, key=lambda entry: entry[1].value_s)
