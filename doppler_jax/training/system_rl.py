"""Stage 3: learning from measured times; few, precious episodes.

An update samples plans from the policy, whose order is SEL's, and takes others from a search in
the simulator, whose costs are fitted to all that was measured so far. Each is measured in
alternation with the incumbent, so that drift of the machine cancels. The best one is measured
afresh and becomes the incumbent only if it is faster beyond doubt. The policy follows the
gradient of its own samples' times and imitates the placements of the best plans known.
"""

import dataclasses
from collections.abc import Container, Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from chex import Array, ArrayTree, PRNGKey

from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.costs.observed import Refit, shows_handling
from doppler_jax.graphs.build import topological_order
from doppler_jax.graphs.padded import pad_array
from doppler_jax.objective import Objective
from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import PolicyInputs, make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policies.rollout import Episode
from doppler_jax.search.anytime import run_search
from doppler_jax.search.lns import LNS
from doppler_jax.search.problem import SearchProblem
from doppler_jax.simulator.disciplines import rank_order
from doppler_jax.simulator.finalists import start_order
from doppler_jax.simulator.oracle import makespan_s, simulate_plan
from doppler_jax.training.paired import Measurement, MeasurementLog
from doppler_jax.training.reinforce import Descent, count_batch, descend_batch
from doppler_jax.training.state import TrainState, update_elites
from doppler_jax.types import Costs, Plan, Plans, Schedule, TaskGraph, pytree

BEFORE_TRAINING = -1
"""The update that the incumbent's first measurement is logged under."""


@dataclasses.dataclass(frozen=True)
class SystemConfig(Descent):
    """Settings of stage 3. An update measures at most batch + proposals + 1 plans."""

    batch: int = 8  # episodes sampled per update
    proposals: int = 4  # plans found by search per update
    pairs: int = 3  # runs of each, and as many of the incumbent
    confirm_pairs: int = 15  # runs of the update's best, before it becomes the incumbent
    final_pairs: int = 15  # runs of the last incumbent against the first, at the end
    proposal_evaluations: int = 50_000  # plans simulated per search
    links: Literal["parallel", "serial", "duplex"] = "serial"  # in the search's simulator
    num_elites: int = 4


@dataclasses.dataclass(frozen=True)
class System:
    """What stage 3 trains on: a placement problem, and the log that measures."""

    graph: TaskGraph
    refit: Refit  # costs, given all that was measured so far
    policy: PolicyConfig
    config: SystemConfig
    log: MeasurementLog


@pytree
class SystemState(TrainState):
    """State of stage 3: the best placement is that of a plan."""

    best_rank: Array  # [N] int32 padded, of the best plan; below 0 where its queue is `fifo`


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The last incumbent against the first, measured afresh at the end."""

    plan: Plan  # the better of the two
    seconds: float  # median of its calls
    first_s: float  # the same of the first incumbent
    ratio: float  # median of the pairs' ratios, last over first
    interval: tuple[float, float]  # of 95% confidence


def begin_system(state: TrainState) -> SystemState:
    """Returns a state for stage 3, whose best plan is yet to be set."""
    return SystemState(**vars(state), best_rank=jnp.full_like(state.best_placement, -1))


def set_incumbent(state: SystemState, system: System, plan: Plan) -> SystemState:
    """Returns a new state with the plan to beat, measured."""
    plan, pairs = plain_plan(plan), system.config.confirm_pairs
    found = system.log.take(BEFORE_TRAINING, 0, plan, plan, None, pairs)
    # What two runs of one plan differ by is noise: it is worth its median.
    return _with_best(state, plan, float(np.median(found.paired.candidate_s)))


def plain_plan(plan: Plan) -> Plan:
    """Returns a plan whose ranks are positions: 0 to N - 1, each once; none under `fifo`."""
    placement = np.asarray(plan.placement, np.int64)
    if plan.queue == "fifo":
        return Plan(placement)
    return Plan(placement, np.argsort(rank_order(np.asarray(plan.priority))), plan.queue)


def best_plan(state: SystemState, num_tasks: int) -> Plan:
    """Returns the best plan of a state."""
    placement = np.asarray(state.best_placement, np.int64)[:num_tasks]
    rank = np.asarray(state.best_rank, np.int64)[:num_tasks]
    return Plan(placement) if (rank < 0).any() else Plan(placement, rank, "in_order")


def _with_best(state: SystemState, plan: Plan, seconds: float) -> SystemState:
    size = len(state.best_placement)
    rank = np.full(len(plan.placement), -1) if plan.priority is None else plan.priority
    return dataclasses.replace(
        state,
        best_placement=jnp.asarray(pad_array(plan.placement.astype(np.int32), size)),
        best_rank=jnp.asarray(pad_array(rank.astype(np.int32), size)),
        best_makespan_s=jnp.float32(seconds),
    )


def system_update(state: SystemState, system: System) -> tuple[SystemState, dict[str, Array]]:
    """Does one update of stage 3; a function of the state and the log."""
    update, config = int(state.update), system.config
    before = system.log.before(update)
    traces = [m.paired.trace for m in before if m.paired.trace is not None]
    costs = system.refit(traces)
    problem = make_policy_inputs(system.graph, costs)
    sample_key, search_key = jax.random.split(jax.random.fold_in(state.key, update))
    episodes = _sample(state.params, problem, sample_key, system.policy, config.batch)
    samples = episode_plans(episodes, system.graph.num_tasks)
    worth_s = _Worth(state, system, before)
    starts = [worth_s.incumbent, *samples, *worth_s.measured()]
    proposals = propose(system.graph, costs, traces, starts, worth_s.known, search_key, config)
    for plan in [*proposals, *samples]:
        worth_s.measure(plan)
    worth_s.confirm_best()
    measured_s = jnp.asarray([worth_s.known[plan] for plan in samples], jnp.float32)
    state = worth_s.remember(state)
    one_batch = jax.tree.map(lambda array: array[None], (episodes, measured_s))
    state, loss = _descend(state, problem, *one_batch, policy=system.policy, settings=config)
    state = count_batch(state, episodes=config.batch, evaluations=worth_s.num_measured)
    metrics = {
        "best_measured_s": state.best_makespan_s,
        "measured_mean_s": measured_s.mean(),
        "loss": loss,
        "num_measured": state.evaluations,
    }
    return state, metrics


def episode_plans(episodes: Episode, num_tasks: int) -> list[Plan]:
    """Returns the plans of episodes `[B, ...]`: devices by PLC, in the order of SEL."""
    plans = []
    for placement, order in zip(
        np.asarray(episodes.placement, np.int64), np.asarray(episodes.actions.task), strict=True
    ):
        rank = np.argsort(order[order < num_tasks])
        plans.append(Plan(placement[:num_tasks], rank, "in_order"))
    return plans


class _Worth:
    """What plans are worth, in seconds of the machine as it first was, in one update."""

    def __init__(self, state: SystemState, system: System, before: list[Measurement]) -> None:
        self._system, self._update = system, int(state.update)
        self._new: list[Plan] = []
        self.incumbent = best_plan(state, system.graph.num_tasks)
        self.incumbent_s = float(state.best_makespan_s)
        self.num_measured = 0
        # A later measurement of a plan is its confirmation.
        self.known = {m.candidate: m.worth_s for m in before}
        self.known[self.incumbent] = self.incumbent_s

    def measured(self) -> list[Plan]:
        """Returns all plans that were measured, the shortest first."""
        return sorted(self.known, key=self.known.__getitem__)

    def measure(self, plan: Plan) -> None:
        """Measures a plan, unless it is known."""
        if plan not in self.known:
            self._take(plan, self._system.config.pairs)
            self._new.append(plan)

    def confirm_best(self) -> None:
        """Makes the best new plan the incumbent, if fresh runs leave no doubt.

        The shortest of many noisy times flatters: what was measured before does not count.
        """
        best = min(self._new, key=self.known.__getitem__, default=None)
        if best is None or self.known[best] >= self.incumbent_s:
            return
        found = self._take(best, self._system.config.confirm_pairs)
        if not found.paired.is_aborted and found.paired.interval()[1] < 1:
            self.incumbent, self.incumbent_s = best, found.worth_s

    def remember(self, state: SystemState) -> SystemState:
        """Returns the state with the incumbent, and the elites among what is new.

        What was not confirmed is worth no more than the incumbent. Elites are imitated in the
        policy's own order, so their placements are all that is kept.
        """
        plans = [self.incumbent, *self._new]
        worth_s = [max(self.known[plan], self.incumbent_s) for plan in plans]
        placements = np.stack([plan.placement for plan in plans])
        padding = state.best_placement.shape[0] - placements.shape[1]
        padded = jnp.asarray(np.pad(placements, ((0, 0), (0, padding))), jnp.int32)
        state = _with_best(state, self.incumbent, self.incumbent_s)
        elites = update_elites(state.elites, padded, jnp.asarray(worth_s, jnp.float32))
        return dataclasses.replace(state, elites=elites)

    def _take(self, plan: Plan, pairs: int) -> Measurement:
        found = self._system.log.take(
            self._update, self.num_measured, plan, self.incumbent, self.incumbent_s, pairs
        )
        self.num_measured += 1
        self.known[plan] = found.worth_s
        return found


def compare(system: System, update: int, first: Plan, last: Plan) -> Comparison:
    """Returns the last of two plans if most pairs find it faster, else the first.

    Where the two are one plan, its pairs differ by noise alone, and the ratio is 1.
    """
    first, last = plain_plan(first), plain_plan(last)
    found = system.log.take(update, 0, last, first, None, system.config.final_pairs).paired
    first_s = float(np.median(found.incumbent_s))
    if first == last:
        return Comparison(first, first_s, first_s, 1.0, (1.0, 1.0))
    if found.is_aborted or found.ratio >= 1:
        return Comparison(first, first_s, first_s, found.ratio, found.interval())
    seconds = float(np.median(found.candidate_s))
    return Comparison(last, seconds, first_s, found.ratio, found.interval())


@partial(jax.jit, static_argnames=("policy", "batch"))
def _sample(
    params: ArrayTree, problem: PolicyInputs, key: PRNGKey, policy: PolicyConfig, batch: int
) -> Episode:
    tables = model.apply(params, policy, problem)
    keys = jax.random.split(key, batch)
    return jax.vmap(rollout.sample, in_axes=(0, None, None))(keys, problem, tables)


_descend = jax.jit(descend_batch, static_argnames=("policy", "settings", "shards"))


def propose(
    graph: TaskGraph,
    costs: Costs,
    traces: Sequence[Schedule],
    starts: Sequence[Plan],
    known: Container[Plan],
    key: PRNGKey,
    config: SystemConfig,
) -> list[Plan]:
    """Returns plans with an order, best first, that simulate better than the first start.

    The search begins at the best of all that was measured, by the re-fitted costs: one for each
    of its members. What no measured run tells of moving tensors is taken to be free: the search
    then proposes plans that move some, and their runs tell what it costs.

    Args:
      graph: the task graph.
      costs: as re-fitted to `traces`.
      traces: what was measured so far.
      starts: plans from whose placements to start, the incumbent first; if scoring them all
        took more than an eighth of the evaluations, the last ones are left out.
      known: plans that are not to be proposed.
      key: of the search; it is consumed.
      config: how many plans to return at most, and what the search may simulate.
    """
    if not config.proposals:
        return []
    costs, objective = _with_unknowns_free(costs, traces), Objective(links=config.links)
    most = max(1, config.proposal_evaluations // 8)
    placements = np.stack([plan.placement for plan in starts[:most]])
    found = run_search(
        LNS(members=2 * config.proposals),
        SearchProblem(graph, costs, objective, queue="priority"),
        Plans(placements, placements[:0]),
        int(jax.random.bits(key)),
        Budget(evaluations=config.proposal_evaluations),
        CurveRecorder(),
    )
    least_s = makespan_s(simulate_plan(graph, costs, starts[0], config.links))
    topological, proposed = np.argsort(topological_order(graph)), []
    for placement, rank in zip(found.placements, found.ranks, strict=True):
        run = simulate_plan(graph, costs, Plan(placement, rank, "priority"), config.links)
        plan = Plan(placement, start_order(run, topological), "in_order")  # does the same
        if makespan_s(run) < least_s and plan not in known:
            proposed.append(plan)
    return proposed[: config.proposals]


def _with_unknowns_free(costs: Costs, traces: Sequence[Schedule]) -> Costs:
    """Returns the costs without what runs that move more would tell.

    That is the links' while nothing was moved, and what a device spends on transfers itself
    while its numbers of them were too much alike.
    """
    if not any(len(trace.transfer_tensor) for trace in traces):
        free = np.zeros_like(np.asarray(costs.latency_s, np.float64))
        costs = dataclasses.replace(costs, latency_s=free, seconds_per_byte=free)
    if costs.handling_s is None or costs.handling_s_per_byte is None:
        return costs
    known = np.array([shows_handling(traces, d) for d in range(costs.num_devices)])
    return dataclasses.replace(
        costs,
        handling_s=np.where(known, costs.handling_s, 0.0),
        handling_s_per_byte=np.where(known, costs.handling_s_per_byte, 0.0),
    )
