"""`place`: one door to every placement method; `methods/registry.py` has the default."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pathlib
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.costs.build import check_costs
from doppler_jax.costs.digests import problem_digest, tree_digest
from doppler_jax.costs.pins import Pins, Together, find_groups
from doppler_jax.costs.pins import pin as pinned
from doppler_jax.files import PathLike
from doppler_jax.graphs.bounds import lower_bound_s
from doppler_jax.graphs.build import check_graph, topological_order
from doppler_jax.memory_maps import free_memory_maps
from doppler_jax.methods.own import Proposer, proposer
from doppler_jax.methods.registry import (
    DEFAULT_METHOD,
    find_method,
    is_ours,
    list_methods,
    policy_of,
)
from doppler_jax.methods.request import Candidates, Method, Request, key_words
from doppler_jax.methods.together import keep_together
from doppler_jax.objective import Objective
from doppler_jax.placed import FORMAT, Placed, load_placed
from doppler_jax.search.problem import Judgement, make_search_problem
from doppler_jax.simulator.finalists import NUM_FINALISTS, start_order
from doppler_jax.simulator.memory import check_capacity
from doppler_jax.simulator.simulate import simulate
from doppler_jax.types import Costs, Policy, ShardedProgram, TaskGraph

if TYPE_CHECKING:
    import chex

MOST_JUDGED = 24
"""Candidates that the oracle judges without a choice among them: those of any search."""

ROUNDING = 1e-9
"""Relative, by which a makespan may be above the lower bound and end the search."""

PLANNED = ("fifo", "in_order", "priority")
"""Queues that plans are made for."""


def place(
    graph: TaskGraph | ShardedProgram,
    costs: Costs,
    *,
    method: str | Method = DEFAULT_METHOD,
    policy: Policy | None = None,
    key: chex.PRNGKey | int | None = None,
    budget_s: float | None = None,
    max_evaluations: int | None = None,
    objective: Objective = Objective(),  # noqa: B008, frozen
    queue: str | None = None,
    cache: PathLike | None = None,
    keep_compiled: bool = True,
    pin: Pins | None = None,
    together: Together = (),
) -> Placed:
    """Plans where and when the tasks of a graph run, so that it finishes soon.

    Searches and training can be stopped by Ctrl-C at any time and return the best so far;
    without noise they stop as well once a placement is as short as the lower bound.
    With `max_evaluations` alone the result is a function of the arguments. In a process that
    has compiled so much that it comes near the system's bound on memory maps, what JAX has
    compiled is dropped first, other functions' programs included.

    Example:
      >>> graph, costs = dj.from_edge_delays([2.0, 3.0, 3.0], [(0, 1, 1.0), (0, 2, 1.0)])
      >>> placed = dj.place(graph, costs, max_evaluations=100)
      >>> placed.makespan_s, placed.proven
      (6.0, True)

    Args:
      graph: the task graph, or the program, which knows the names of its tasks.
      costs: its costs, seconds. Where memory is limited only placements that fit are
        returned; what no placement can fit is refused before the search.
      method: one of `list_methods()`; or a method itself, such as an ablation, or a function
        of your own (`register_method` says what it returns), which can also be named as
        `module:function`. `doppler` samples from `policy`; without one it
        trains a policy for this problem first, by stages 1 and 2. `doppler+search` starts
        a search from samples and list schedules, and is never worse than the latter. Without
        a policy it takes samples of the base policy, if one ships; or, where the graph is small
        (`methods/beside.py`) and OR-Tools is there, asks the exact solver beside the search.
      policy: from `load_policy`, of this method; `doppler+search` takes one of `doppler`.
      key: of what is random, consumed; or a seed below 2^32, by default 0: the same as
        `jax.random.key(seed)`, but JAX need not be started for it.
      budget_s: seconds, at which searches stop and training is given up (on an accelerator
        it ends with the update). If no bound is given it is 60 s for training and `exact`,
        10 s for searches, and 5 s for `doppler+search`.
      max_evaluations: executions that may be simulated, a placement under noise counting
        once per draw; never exceeded. `random`, and `doppler` with a policy, simulate
        1000 placements if no bound is given.
      objective: what is minimised: the links, and the noise and its statistic, if any.
      queue: that the plan is for: `in_order`, under which devices keep to its order;
        `priority`, under which they start what is ready by it; or `fifo`, the paper's
        runtime, under which they take what is ready first. By default `in_order`, and where
        the objective has noise the better of `in_order` and `priority`. Searches look for
        orders, list schedulers and `exact` keep their own, `doppler` has SEL's, and the
        placements of others get that of their execution under `fifo`.
      cache: a folder of placements found before. Where one was found for the same graph,
        costs and other arguments, it is returned as it was, once the oracle has confirmed
        what it is worth; otherwise what is found now is kept there, unless by Ctrl-C.
      keep_compiled: whether what JAX compiles in a process beside this one is kept in the
        user's cache folder, for later ones (`DOPPLER_JAX_CACHE` names another, or is `off`).
      pin: devices, one or several, by a pattern of the names of tasks, or of their scopes:
        `{"*embed*": 0}`. `dj.pin` is the same on costs, and says more; what is returned is of
        those costs.
      together: patterns, each of tasks that share a device, whichever that is:
        `["*attn.0*"]`; an entry may be several patterns. Every method keeps to that. Where
        the groups go is chosen first, in a third of the budget: groups move as a whole, and
        short searches mend the rest (`methods/together.py`). The method plans for that choice
        alone. So
        a plan may be worse than the best that keeps to the groups, and `proven` holds only
        where no plan at all is shorter.

    Returns:
      The best plan found, judged by the float64 oracle.

    Raises:
      ValueError: the graph, its costs, the method, a bound or the objective is invalid, a
        pattern fits no task or leaves one without a device, no
        placement can fit into memory (`check_capacity`), or none that fits was found.
    """
    began = time.monotonic()
    key = 0 if key is None else key
    propose = find_method(method)
    _check_request(propose, _name_of(method), policy, key, budget_s, max_evaluations, objective)
    if queue not in (None, *PLANNED):
        raise ValueError(f"queue is {queue!r}; expected None or one of {', '.join(PLANNED)}")
    program, graph = graph, graph.graph if isinstance(graph, ShardedProgram) else graph
    check_graph(graph)
    check_costs(graph, costs)
    costs = pinned(program, costs, pin) if pin else costs
    groups = find_groups(program, costs, together)
    check_capacity(graph, costs)
    if policy is None and cache is not None and hasattr(propose, "default_policy"):
        policy = propose.default_policy()  # which decides the result
    queues = (queue,) if queue else ("in_order", "priority")[: 1 + (objective.num_noise > 0)]
    bounds = (budget_s, max_evaluations, queues)
    problem, path = problem_digest(graph, costs), None
    if cache is not None:
        words = key_words(key).tolist()
        held = *bounds, *(group.tolist() for group in groups)
        path = _request_path(cache, method, policy, problem, objective, words, held)
    noise_key = None
    if objective.num_noise:  # else JAX need not be loaded
        import jax

        noise_key, key = jax.random.split(jax.random.key(key) if isinstance(key, int) else key)
    bound_s = lower_bound_s(graph, costs)
    # Noise may take a makespan below the bound, so nothing is known to be the best then.
    target_s = None if objective.num_noise else bound_s * (1 + ROUNDING)
    request = Request(
        graph=graph,
        costs=costs,
        objective=objective,
        problem=make_search_problem(graph, costs, objective, noise_key),
        random=key,
        policy=policy,
        budget=Budget(
            evaluations=max_evaluations, seconds=budget_s, target_s=target_s, began=began
        ),
        lower_bound_s=bound_s,
        queue=queues[0],
        curve=CurveRecorder(),
        keep_compiled=keep_compiled,
    )
    placed = None if path is None else _recall(path, request)
    if placed is None:
        proposing = proposer(propose, _name_of(method))
        if groups:
            proposing = partial(keep_together, proposing, groups=groups)
        placed = _find(proposing, _name_of(method), problem, request, queues)
        if path is not None and not placed.interrupted:
            path.parent.mkdir(parents=True, exist_ok=True)
            placed.save(path)
    names = program.names if isinstance(program, ShardedProgram) else None
    return placed if names is None else dataclasses.replace(placed, names=tuple(names))


def _find(
    propose: Proposer, name: str, problem: str, request: Request, queues: Sequence[str]
) -> Placed:
    """Returns the best of what a method proposes, for the best of the queues."""
    graph = request.graph
    free_memory_maps()
    candidates = propose(request)
    placement, judgement, queue = _best(candidates, request)
    rank = np.argsort(topological_order(graph))
    priority = start_order(judgement.schedule, rank)
    if request.orders and not judgement.overflow:
        judgement, queue = _in_order(placement, priority, request, queues)
    if judgement.overflow:
        raise ValueError(f"method {name!r} found no placement that fits: {judgement.overflow}")
    seconds = request.budget.seconds_spent()
    return Placed(
        graph=graph,
        costs=request.costs,
        placement=placement.astype(np.int64),
        priority=priority,
        makespan_s=judgement.makespan_s,
        objective_s=judgement.value_s,
        lower_bound_s=max(request.lower_bound_s, candidates.lower_bound_s),
        schedule=judgement.schedule,
        queue=queue,
        method=name,
        objective=request.objective,
        problem=problem,
        evaluations=candidates.evaluations,
        seconds=seconds,
        curve=request.curve.finish(candidates.evaluations, seconds, judgement.value_s),
        interrupted=candidates.interrupted,
    )


def is_told_apart(method: str | Method) -> bool:
    """Returns whether a method says what it is in any process: by our name, or its settings."""
    return is_ours(method) if isinstance(method, str) else dataclasses.is_dataclass(method)


def _request_path(
    folder: PathLike, method: str | Method, policy: Policy | None, *others: Any
) -> pathlib.Path:
    """Returns the file of a request: its name is a digest of all that decides the result."""
    if not is_told_apart(method):
        raise ValueError(
            "a cache needs a method whose settings tell it apart: a name of ours or a "
            f"dataclass, not {method!r}"
        )
    given = () if policy is None else (policy.config, tree_digest(policy.params))
    digest = hashlib.sha256(repr((FORMAT, method, *given, *others)).encode()).hexdigest()[:32]
    return pathlib.Path(folder) / f"{digest}.json"


def _recall(path: pathlib.Path, request: Request) -> Placed | None:
    """Returns what a file keeps, None where the oracle does not confirm its worth."""
    if not path.exists():
        return None
    try:
        placed = load_placed(path, request.graph, request.costs)
    except ValueError:
        return None
    ranked = () if placed.queue == "fifo" else (placed.priority, placed.queue)
    value_s = request.judge(placed.placement, *ranked).value_s
    return placed if math.isclose(value_s, placed.objective_s, rel_tol=1e-9) else None


def _name_of(method: str | Method) -> str:
    """Returns what a result says of its method."""
    if isinstance(method, str):
        return method
    name = getattr(method, "takes", None) or getattr(method, "__name__", None)
    return name or type(method).__name__


def _check_request(
    propose: Method,
    name: str,
    policy: Policy | None,
    key: chex.PRNGKey | int,
    budget_s: float | None,
    max_evaluations: int | None,
    objective: Objective,
) -> None:
    wanted = policy_of(propose)
    if policy is not None and wanted is None:
        takers = ", ".join(repr(m) for m in list_methods() if policy_of(m))
        raise ValueError(f"method {name!r} takes no policy; only these do: {takers}")
    if policy is not None and policy.method != wanted:
        raise ValueError(
            f"method {name!r} takes a policy of {wanted!r}; this one is of {policy.method!r}"
        )
    if isinstance(key, int) and not 0 <= key < 2**32:
        raise ValueError(f"key is the seed {key}; expected 0 to {2**32 - 1}")
    for what, bound in (("budget_s", budget_s), ("max_evaluations", max_evaluations)):
        if bound is not None and not bound > 0:
            raise ValueError(f"{what} is {bound}; expected more than 0")
    if not isinstance(objective, Objective):
        raise ValueError(f"objective is {objective!r}; expected a doppler_jax.Objective")


def _best(candidates: Candidates, request: Request) -> tuple[np.ndarray, Judgement, str]:
    """Returns the best candidate, the oracle's word on it, and the queue that it is for.

    Of more than `MOST_JUDGED` the simulator chooses the finalists, of those that fit into
    memory first; ties go to the earlier one.
    """
    placements, queue, ranks = candidates.placements, "priority", candidates.priority
    ranks = np.empty((0, 0)) if ranks is None else ranks
    ranked = list(zip(placements[::-1], ranks[::-1], strict=False))
    if request.orders:  # what has an order is judged by that alone
        placements = placements[: len(placements) - len(ranked)]
        queue = request.queue
    if len(ranked) > MOST_JUDGED and not request.problem.is_limited:
        ranked = _finalists(ranked, request)
    if len(placements) > MOST_JUDGED:
        value_s, energy = request.problem.score(request.problem.ordered(placements))
        order = np.lexsort((energy, np.isinf(value_s)))
        placements = placements[np.sort(order[:NUM_FINALISTS])]
    judged = [(p, request.judge(p), "fifo") for p in placements]
    judged += [(p, request.judge(p, rank, queue), queue) for p, rank in ranked]
    return min(judged, key=lambda entry: entry[1].value_s)


def _finalists(
    ranked: list[tuple[np.ndarray, np.ndarray]], request: Request
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the best of plans, devices and ranks, by the simulator."""
    placements, ranks = map(np.stack, zip(*ranked, strict=True))
    found = simulate(
        request.graph, request.costs, placements, objective=request.objective,
        queue=request.queue, priority=ranks, factors=request.problem.factors,
    )  # fmt: skip
    value_s = request.objective.statistic(found.makespan_s)
    return [ranked[k] for k in np.sort(np.argsort(value_s, kind="stable")[:NUM_FINALISTS])]


def _in_order(
    placement: np.ndarray, priority: np.ndarray, request: Request, queues: Sequence[str]
) -> tuple[Judgement, str]:
    """Returns what an order of starts is worth, and the queue that is best for it.

    Without noise `in_order` replays the schedule that it comes from. Under noise a device that
    takes what is ready may do better.
    """
    judged = [(request.judge(placement, priority, queue), queue) for queue in queues]
    return min(judged, key=lambda entry: entry[0].value_s)
