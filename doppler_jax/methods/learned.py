"""Learned methods as `place` runs them: given a policy they propose, without one they train."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.baselines.fitting import fit_some
from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.costs.handling import as_transfers
from doppler_jax.learners.doppler import Doppler
from doppler_jax.learners.learner import Learner, train_learner
from doppler_jax.methods.child import Child, can_be_sent
from doppler_jax.methods.direct import FEW_STARTS, listed_starts
from doppler_jax.methods.request import SAMPLES, Candidates, Request, key_words
from doppler_jax.objective import Objective
from doppler_jax.policies.features import PolicyInputs, make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.search.problem import SearchProblem
from doppler_jax.training.state import TrainState
from doppler_jax.types import Costs, Plans, Policy, TaskGraph

Tell = Callable[[Any], None]

ROUNDING = 1e-6
"""Relative, above the error of a makespan in float32, in which training simulates."""

TRAINING_S = 60.0
"""Seconds that methods train if nothing bounds them."""

TRAINING_SHARE = 0.95
"""Of the seconds where proposals come after training; they take the rest."""


@dataclasses.dataclass(frozen=True)
class Learned:
    """A learned method, and any ablation of one: its settings say which."""

    learner: Learner

    @property
    def takes(self) -> str:
        """Whose policies it takes."""
        return self.learner.name

    def __call__(self, request: Request) -> Candidates:
        """Returns what the policy that is given proposes, or what training one finds.

        Where seconds are bounded, a process beside this one does it and is given up at the
        bound: XLA compiles longer than many bounds are. Not on an accelerator, whose memory
        is this process's.
        """
        is_bounded = request.budget.seconds is not None or not request.budget.is_bounded
        if is_bounded and jax.default_backend() == "cpu" and can_be_sent(self):
            return self._beside(request.within(TRAINING_S))
        return self._work(request, None)

    def _work(self, request: Request, tell: Tell | None) -> Candidates:
        """Does the work, and tells of the best after each update."""
        problem = make_policy_inputs(request.graph, request.costs)
        if request.policy is None:
            found = self._train(request, problem, tell)
        else:
            found = self._propose(request, problem)
        return dataclasses.replace(found, placements=_with_fitting(request, found.placements))

    def _beside(self, request: Request) -> Candidates:
        """Lets a child do the work; returns what it has at the bound, and a list schedule."""
        listed = listed_starts(request, FEW_STARTS)
        if (optimum := request.optimum(listed)) is not None:
            return optimum
        found = Candidates(listed.placements[:0], 1)
        given = (
            *(self, request.graph, request.costs, request.objective, request.policy),
            *(request.budget, key_words(request.random)),
        )
        with Child(_work_in_child, *given, keep_compiled=request.keep_compiled) as child:
            try:
                while (left_s := request.seconds_left(0.0)) > 2e-3:
                    said = child.receive(left_s)
                    if isinstance(said, Candidates):
                        found = said
                    elif said is not None:
                        evaluations, makespan_s, placement = said
                        request.record(evaluations, makespan_s)
                        found = Candidates(placement[None], evaluations)
            except EOFError:
                pass
            except KeyboardInterrupt:
                found = dataclasses.replace(found, interrupted=True)
        ranks = [listed.ranks] if found.priority is None else [found.priority, listed.ranks]
        return dataclasses.replace(
            found,
            placements=np.concatenate([found.placements, listed.placements]),
            priority=np.concatenate(ranks),
        )

    def _propose(self, request: Request, problem: PolicyInputs) -> Candidates:
        """Returns as many placements of the given policy as the bound allows."""
        policy, bound = request.policy, request.budget.evaluations
        assert policy is not None
        learner = self.learner.with_settings(policy.config)
        each = self._proposal_cost(request, problem)
        count = (bound or SAMPLES) // each
        if not count:
            raise ValueError(
                f"max_evaluations is {bound}; a proposal of {self.takes!r} needs {each}"
            )
        links = request.objective.guide_links
        drawn = learner.propose(policy.params, problem, request.key, count, links)
        return Candidates(drawn.placements, count * each, priority=_ranks(request, drawn))

    def _train(self, request: Request, problem: PolicyInputs, tell: Tell | None) -> Candidates:
        """Trains within the budget; returns the best met, proposals, and what was imitated."""
        learner, bound = self.learner, request.budget.evaluations
        # The teacher's placement competes: the result is never worse than what was imitated.
        taught = learner.teacher(request.graph, as_transfers(request.costs))
        if (optimum := request.optimum(Plans(taught, taught[:0]))) is not None:
            return optimum
        padded_tasks = problem.padded.padded_tasks
        each, count = self._proposal_cost(request, problem), learner.num_proposals
        if bound is not None:
            rest = bound - len(taught)
            least = learner.least_evaluations(padded_tasks) + (each if count else 0)
            if rest < least:
                if len(taught):
                    return Candidates(taught, len(taught))
                raise ValueError(
                    f"max_evaluations is {bound}; method {self.takes!r} needs {least} on this "
                    "graph"
                )
            within = min(max(rest // 4, each), rest - least + each)
            count = min(count, within // each)
            bound = rest - count * each
        learn_key, propose_key = request.key, request.key
        if count:
            learn_key, propose_key = jax.random.split(request.key)
        links = request.objective.guide_links

        def report(state: TrainState) -> None:
            spent, best_s = int(state.evaluations) + len(taught), float(state.best_makespan_s)
            request.record(spent, best_s)
            if tell is not None:
                best = np.asarray(state.best_placement)[: request.graph.num_tasks]
                tell((spent, best_s, best))

        trained = train_learner(
            learner,
            problem,
            learn_key,
            self._training_budget(request, bound),
            links=links,
            report=report,
        )
        found = Candidates(
            placements=np.concatenate([taught, trained.placements]),
            evaluations=int(trained.state.evaluations) + len(taught),
            interrupted=trained.interrupted,
        )
        if trained.interrupted or not count:
            return found
        drawn = learner.propose(trained.policy.params, problem, propose_key, count, links)
        return dataclasses.replace(
            found,
            placements=np.concatenate([found.placements, drawn.placements]),
            priority=_ranks(request, drawn),
            evaluations=found.evaluations + count * each,
        )

    def _training_budget(self, request: Request, evaluations: int | None) -> Budget:
        seconds = None
        if request.budget.seconds is not None or evaluations is None:
            share = TRAINING_SHARE if self.learner.num_proposals else 1.0
            seconds = share * request.seconds_left(TRAINING_S)
        target_s = request.budget.target_s
        if target_s is not None:
            target_s *= 1 + ROUNDING  # training simulates in float32
        return Budget(evaluations=evaluations, seconds=seconds, target_s=target_s)

    def _proposal_cost(self, request: Request, problem: PolicyInputs) -> int:
        """Returns the executions that a proposal takes, its judgement included."""
        walked = self.learner.proposal_evaluations(problem.padded.padded_tasks)
        return walked + request.objective.simulations


def _work_in_child(
    send: Callable[[Any], None],
    learned: Learned,
    graph: TaskGraph,
    costs: Costs,
    objective: Objective,
    policy: Policy | None,
    budget: Budget,
    key_data: np.ndarray,
) -> None:
    """Sends the best after each update, and in the end all candidates."""
    request = Request(
        graph=graph,
        costs=costs,
        objective=objective,
        problem=SearchProblem(graph, costs, objective),
        random=jax.random.wrap_key_data(jnp.asarray(key_data)),
        policy=policy,
        budget=budget,
        lower_bound_s=0.0,
        curve=CurveRecorder(),
    )
    send(learned._work(request, send))


def doppler(config: PolicyConfig | None = None) -> Learned:
    """Returns DOPPLER as a method of `place`.

    Args:
      config: of its networks; an ablation has one of its two policies replaced by the
        teacher's rule, by `select="b_level"` or `place="earliest"`.
    """
    return Learned(Doppler(policy=config or PolicyConfig()))


def _with_fitting(request: Request, placements: np.ndarray) -> np.ndarray:
    """Returns placements, and where memory is short what some of them become to fit."""
    if not request.problem.is_limited:
        return placements
    # Before the others, the last of which have an order.
    return np.concatenate([fit_some(request.graph, request.costs, placements), placements])


def _ranks(request: Request, drawn: Plans) -> np.ndarray:
    """Returns the orders of plans, none where the queue heeds none."""
    return drawn.ranks[: None if request.orders else 0]
