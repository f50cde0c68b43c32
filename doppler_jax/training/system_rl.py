"""Stage 3: learning from measured times; few, precious episodes.

An update samples placements from the policy, and takes others from a search in the simulator,
whose costs are fitted to all that was measured so far. Each is measured in alternation with
the incumbent, so that drift of the machine cancels. The best one is measured afresh and
becomes the incumbent only if it is faster beyond doubt. The policy follows the gradient of its
own samples' times and imitates the best placements known.
"""

import dataclasses
from collections.abc import Container, Sequence
from functools import partial
from itertools import takewhile
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from chex import Array, ArrayTree, PRNGKey

from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.costs.observed import Refit, shows_handling
from doppler_jax.graphs.padded import pad_array
from doppler_jax.objective import Objective
from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import PolicyInputs, make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policies.rollout import Episode
from doppler_jax.search.anytime import run_search
from doppler_jax.search.lns import LNS
from doppler_jax.search.problem import SearchProblem
from doppler_jax.training.paired import Measurement, MeasurementLog
from doppler_jax.training.reinforce import Descent, count_batch, descend_batch
from doppler_jax.training.state import TrainState, update_elites
from doppler_jax.types import Costs, Schedule, TaskGraph

BEFORE_TRAINING = -1
"""The update that the incumbent's first measurement is logged under."""


@dataclasses.dataclass(frozen=True)
class SystemConfig(Descent):
    """Settings of stage 3. An update measures at most batch + proposals + 1 placements."""

    batch: int = 8  # episodes sampled per update
    proposals: int = 4  # placements found by search per update
    pairs: int = 3  # runs of each, and as many of the incumbent
    confirm_pairs: int = 15  # runs of the update's best, before it becomes the incumbent
    final_pairs: int = 15  # runs of the last incumbent against the first, at the end
    proposal_evaluations: int = 50_000  # placements simulated per search
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


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The last incumbent against the first, measured afresh at the end."""

    placement: np.ndarray  # [N] the better of the two
    seconds: float  # median makespan
    first_s: float  # the same of the first incumbent
    ratio: float  # median of the pairs' ratios, last over first
    interval: tuple[float, float]  # of 95% confidence


def set_incumbent(state: TrainState, system: System, placement: np.ndarray) -> TrainState:
    """Returns a new state with the placement `[N]` to beat, measured."""
    placement = np.asarray(placement, np.int64)
    pairs = system.config.confirm_pairs
    found = system.log.take(BEFORE_TRAINING, 0, placement, placement, None, pairs)
    padded = pad_array(placement.astype(np.int32), len(state.best_placement))
    # What two runs of one placement differ by is noise: it is worth its median.
    seconds = jnp.float32(np.median(found.paired.candidate_s))
    return dataclasses.replace(
        state, best_placement=jnp.asarray(padded), best_makespan_s=seconds
    )


def system_update(state: TrainState, system: System) -> tuple[TrainState, dict[str, Array]]:
    """Does one update of stage 3; a function of the state and the log."""
    update, config = int(state.update), system.config
    before = system.log.before(update)
    traces = [m.paired.trace for m in before if m.paired.trace is not None]
    costs = system.refit(traces)
    problem = make_policy_inputs(system.graph, costs)
    sample_key, search_key = jax.random.split(jax.random.fold_in(state.key, update))
    episodes = _sample(state.params, problem, sample_key, system.policy, config.batch)
    samples = np.asarray(episodes.placement, np.int64)[:, : system.graph.num_tasks]
    worth_s = _Worth(state, system, before)
    starts = np.concatenate([worth_s.incumbent[None], samples, worth_s.measured()])
    proposals = propose(system.graph, costs, traces, starts, worth_s.known, search_key, config)
    for placement in [*proposals, *samples]:
        worth_s.measure(placement)
    worth_s.confirm_best()
    measured_s = jnp.asarray([worth_s.known[p.tobytes()] for p in samples], jnp.float32)
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


class _Worth:
    """What placements are worth, in seconds of the machine as it first was, in one update."""

    def __init__(self, state: TrainState, system: System, before: list[Measurement]) -> None:
        self._system, self._update = system, int(state.update)
        self._new: list[np.ndarray] = []
        self.incumbent = np.asarray(state.best_placement, np.int64)[: system.graph.num_tasks]
        self.incumbent_s = float(state.best_makespan_s)
        self.num_measured = 0
        # A later measurement of a placement is its confirmation.
        self.known = {np.array(m.candidate, np.int64).tobytes(): m.worth_s for m in before}
        self.known[self.incumbent.tobytes()] = self.incumbent_s

    def measured(self) -> np.ndarray:
        """Returns all placements `[K, N]` that were measured, the shortest first."""
        ordered = sorted(self.known, key=self.known.__getitem__)
        return np.stack([np.frombuffer(placement, np.int64) for placement in ordered])

    def measure(self, placement: np.ndarray) -> None:
        """Measures a placement, unless it is known."""
        if placement.tobytes() not in self.known:
            self._take(placement, self._system.config.pairs)
            self._new.append(placement)

    def confirm_best(self) -> None:
        """Makes the best new placement the incumbent, if fresh runs leave no doubt.

        The shortest of many noisy times flatters: what was measured before does not count.
        """
        best = min(self._new, key=lambda p: self.known[p.tobytes()], default=None)
        if best is None or self.known[best.tobytes()] >= self.incumbent_s:
            return
        found = self._take(best, self._system.config.confirm_pairs)
        if not found.paired.is_aborted and found.paired.interval()[1] < 1:
            self.incumbent, self.incumbent_s = best, found.worth_s

    def remember(self, state: TrainState) -> TrainState:
        """Returns the state with the incumbent, and the elites among what is new.

        What was not confirmed is worth no more than the incumbent.
        """
        placements = np.stack([self.incumbent, *self._new])
        worth_s = [max(self.known[p.tobytes()], self.incumbent_s) for p in placements]
        padding = state.best_placement.shape[0] - placements.shape[1]
        padded = jnp.asarray(np.pad(placements, ((0, 0), (0, padding))), jnp.int32)
        return dataclasses.replace(
            state,
            elites=update_elites(state.elites, padded, jnp.asarray(worth_s, jnp.float32)),
            best_placement=padded[0],
            best_makespan_s=jnp.float32(self.incumbent_s),
        )

    def _take(self, placement: np.ndarray, pairs: int) -> Measurement:
        found = self._system.log.take(
            self._update,
            self.num_measured,
            placement,
            self.incumbent,
            self.incumbent_s,
            pairs,
        )
        self.num_measured += 1
        self.known[placement.tobytes()] = found.worth_s
        return found


def compare(system: System, update: int, first: np.ndarray, last: np.ndarray) -> Comparison:
    """Returns the last of two placements `[N]` if most pairs find it faster, else the first.

    Where the two are one placement, its pairs differ by noise alone, and the ratio is 1.
    """
    first, last = np.asarray(first, np.int64), np.asarray(last, np.int64)
    found = system.log.take(update, 0, last, first, None, system.config.final_pairs).paired
    first_s = float(np.median(found.incumbent_s))
    if np.array_equal(first, last):
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
    starts: np.ndarray,
    known: Container[bytes],
    key: PRNGKey,
    config: SystemConfig,
) -> list[np.ndarray]:
    """Returns placements `[N]`, best first, that simulate better than the first start.

    The search begins at the best of all that was measured, by the re-fitted costs: one for each
    of its members. What no measured run tells of moving tensors is taken to be free: the search
    then proposes placements that move some, and their runs tell what it costs.

    Args:
      graph: the task graph.
      costs: as re-fitted to `traces`.
      traces: what was measured so far.
      starts: `[S, N]` placements to start from, the incumbent first; if scoring them all took
        more than an eighth of the evaluations, the last ones are left out.
      known: placements, as int64 bytes, that are not to be proposed.
      key: of the search; it is consumed.
      config: how many placements to return at most, and what the search may simulate.
    """
    if not config.proposals:
        return []
    costs = _with_unknowns_free(costs, traces)
    starts = np.asarray(starts, np.int64)[: max(1, config.proposal_evaluations // 8)]
    found = run_search(
        LNS(members=2 * config.proposals),
        SearchProblem(graph, costs, Objective(links=config.links)),
        starts,
        int(jax.random.bits(key)),
        Budget(evaluations=config.proposal_evaluations),
        CurveRecorder(),
    )
    better = takewhile(lambda p: not np.array_equal(p, starts[0]), found.placements)
    return [p for p in better if p.tobytes() not in known][: config.proposals]


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
