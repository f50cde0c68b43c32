"""`place`: one door to every placement method, and their registry."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial

import chex
import jax
import numpy as np

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.baselines.simple import random_placements, round_robin, single
from doppler_jax.costs.build import check_costs
from doppler_jax.graphs.build import check_graph, topological_order
from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import Problem, make_problem
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.simulator.finalists import best_placement, start_order
from doppler_jax.simulator.oracle import makespan_s
from doppler_jax.training.checkpoint import Policy
from doppler_jax.training.imitation import ImitationConfig, imitation_update
from doppler_jax.training.sim_rl import SimConfig, sim_update
from doppler_jax.training.state import TrainState, init_state, make_optimizer
from doppler_jax.types import Costs, Schedule, TaskGraph

SAMPLES = 1000
"""Placements that `random`, and `doppler` with a policy, draw unless told otherwise."""

TRAIN_S = 60.0
"""Seconds that `doppler` trains for unless told otherwise."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """A placement and what it is worth."""

    placement: np.ndarray  # [N] int64 device of each task
    priority: np.ndarray  # [N] int64 simulated start order, replays the schedule
    makespan_s: float  # by the float64 oracle, queue `fifo`
    schedule: Schedule  # the oracle's
    method: str
    evaluations: int  # placements simulated by the search
    seconds: float  # spent searching, compilation included


@dataclasses.dataclass(frozen=True)
class Request:
    """What a method is asked for."""

    graph: TaskGraph
    costs: Costs
    key: chex.PRNGKey
    policy: Policy | None
    budget_s: float | None
    max_evaluations: int | None


Method = Callable[[Request], tuple[np.ndarray, int]]
"""Returns candidate placements `[B, N]` and how many placements it simulated."""


def list_methods() -> list[str]:
    """Returns the names that `place` knows."""
    return sorted(_METHODS)


def place(
    graph: TaskGraph,
    costs: Costs,
    *,
    method: str = "doppler",
    policy: Policy | None = None,
    key: chex.PRNGKey | None = None,
    budget_s: float | None = None,
    max_evaluations: int | None = None,
) -> Placed:
    """Places a task graph on devices so that it finishes soon.

    Args:
      graph: the task graph.
      costs: its costs, seconds; links are `parallel`, queues `fifo`.
      method: one of `list_methods()`. `doppler` samples from `policy`; without one it
        trains a policy for this problem first, by stages 1 and 2.
      policy: from `load_policy`; for `doppler` only.
      key: of what is random, by default `jax.random.key(0)`; it is consumed.
      budget_s: seconds for training; `doppler` without a policy stops at the update
        that passes it (60 if no bound is given).
      max_evaluations: placements that may be simulated; for `random` and `doppler`
        (1000 samples if no bound is given).

    Returns:
      The best placement found, judged by the float64 oracle.

    Raises:
      ValueError: the graph, its costs, the method or a bound is none.
    """
    if method not in _METHODS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(list_methods())}")
    if policy is not None and method != "doppler":
        raise ValueError(f"method {method!r} takes no policy; only 'doppler' does")
    for name, bound in (("budget_s", budget_s), ("max_evaluations", max_evaluations)):
        if bound is not None and not bound > 0:
            raise ValueError(f"{name} is {bound}; expected more than 0")
    check_graph(graph)
    check_costs(graph, costs)
    key = jax.random.key(0) if key is None else key
    began = time.monotonic()
    candidates, evaluations = _METHODS[method](
        Request(graph, costs, key, policy, budget_s, max_evaluations)
    )
    placement, schedule = best_placement(graph, costs, candidates)
    rank = np.empty(graph.num_tasks, np.int64)
    rank[topological_order(graph)] = np.arange(graph.num_tasks)
    return Placed(
        placement=placement.astype(np.int64),
        priority=start_order(schedule, rank),
        makespan_s=makespan_s(schedule),
        schedule=schedule,
        method=method,
        evaluations=evaluations,
        seconds=time.monotonic() - began,
    )


def policy_candidates(
    problem: Problem, policy: Policy, key: chex.PRNGKey, count: int
) -> np.ndarray:
    """Returns the greedy placement and `count - 1` samples of a policy, `[count, N]`."""
    drawn = _draw(policy.params, problem, jax.random.split(key, count), policy.config)
    return np.asarray(drawn)[:, : int(problem.instance.num_tasks)]


@partial(jax.jit, static_argnames="config")
def _draw(
    params: chex.ArrayTree, problem: Problem, keys: chex.PRNGKey, config: PolicyConfig
) -> chex.Array:
    tables = model.apply(params, config, problem)
    sampled = jax.vmap(rollout.sample, in_axes=(0, None, None))(keys, problem, tables)
    likeliest = rollout.greedy(problem, tables)
    return sampled.placement.at[0].set(likeliest.placement)


def _doppler(request: Request) -> tuple[np.ndarray, int]:
    problem = make_problem(request.graph, request.costs)
    if request.policy is not None:
        count = request.max_evaluations or SAMPLES
        return policy_candidates(problem, request.policy, request.key, count), count
    # The teacher's placement competes: the result is never worse than what was imitated.
    taught = critical_path(request.graph, request.costs)[None]
    if request.max_evaluations == 1:
        return taught, 1
    state = _train(problem, request)
    found = elite_placements(state, request.graph.num_tasks)
    return np.concatenate([found, taught]), int(state.episodes) + 1


def elite_placements(state: TrainState, num_tasks: int) -> np.ndarray:
    """Returns the best placement of a training state and its elites, `[B, N]`."""
    task, device = (
        np.asarray(a) for a in (state.elites.actions.task, state.elites.actions.device)
    )
    placements = [np.asarray(state.best_placement)[:num_tasks]]
    for row in np.flatnonzero(np.isfinite(np.asarray(state.elites.makespan_s))):
        placement = np.zeros(num_tasks, np.int64)
        placement[task[row, :num_tasks]] = device[row, :num_tasks]
        placements.append(placement)
    return np.stack(placements)


def _train(problem: Problem, request: Request, warm_up: int = 100) -> TrainState:
    """Runs stages 1 (`warm_up` updates) and 2 from scratch, within the request's bounds."""
    config, imitate, simulate = PolicyConfig(), ImitationConfig(), SimConfig()
    bound: float = np.inf
    if request.max_evaluations is not None:
        bound = request.max_evaluations - 1  # the teacher's placement is simulated too
        simulate = SimConfig(batch=min(simulate.batch, request.max_evaluations - 1))
    params_key, first_key, second_key = jax.random.split(request.key, 3)
    params = model.init_params(params_key, config, problem)
    budget_s = request.budget_s
    if budget_s is None and request.max_evaluations is None:
        budget_s = TRAIN_S
    began = time.monotonic()

    def in_time() -> bool:
        return budget_s is None or time.monotonic() - began < budget_s

    optimizer = make_optimizer(imitate.learning_rate)
    state = init_state(first_key, params, optimizer, problem, 1)
    while int(state.update) < warm_up and in_time():
        state, _ = imitation_update(state, problem, config, imitate)
    optimizer = make_optimizer(simulate.learning_rate)
    state = init_state(second_key, state.params, optimizer, problem, simulate.num_elites)
    # One update at least: the best placement comes from its episodes.
    while int(state.update) == 0 or (
        in_time() and int(state.episodes) + simulate.batch <= bound
    ):
        state, _ = sim_update(state, problem, config, simulate)
    return state


def _random(request: Request) -> tuple[np.ndarray, int]:
    count = request.max_evaluations or SAMPLES
    seed = jax.random.bits(request.key, (2,)).tolist()
    placements = random_placements(request.costs, np.random.default_rng(seed), count)
    return placements, count


def _deterministic(rule: Callable[[TaskGraph, Costs], np.ndarray]) -> Method:
    def method(request: Request) -> tuple[np.ndarray, int]:
        return rule(request.graph, request.costs)[None], 1

    return method


_METHODS: dict[str, Method] = {
    "critical_path": _deterministic(critical_path),
    "doppler": _doppler,
    "random": _random,
    "round_robin": _deterministic(round_robin),
    "single": _deterministic(single),
}
