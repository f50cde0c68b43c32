"""Learned methods as `place` runs them: given a policy they propose, without one they train."""

import dataclasses

import jax
import numpy as np

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.baselines.fitting import fit_some
from doppler_jax.costs.handling import as_transfers
from doppler_jax.learned import learn_placements, policy_candidates
from doppler_jax.learners.learner import Learner, propose_placements, train_learner
from doppler_jax.policies.features import PolicyInputs, make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.request import SAMPLES, Candidates, Method, Request
from doppler_jax.training.train import LEAST_EVALUATIONS

TRAINING_S = 60.0
"""Seconds that methods train if nothing bounds them."""

TRAINING_SHARE = 0.95
"""Of the seconds of a learner; its proposals take the rest."""

NUM_PROPOSALS = 32
"""Placements that a learner proposes after training, of a quarter of the budget at most."""


def doppler(config: PolicyConfig) -> Method:
    """Returns DOPPLER, or an ablation of it, as a method."""

    def method(request: Request) -> Candidates:
        if request.policy is not None:
            count = (request.budget.evaluations or SAMPLES) // request.objective.simulations
            problem = make_policy_inputs(request.graph, request.costs)
            drawn = policy_candidates(problem, request.policy, request.key, max(count, 1))
            spent = max(count, 1) * request.objective.simulations
            return Candidates(_with_fitting(request, drawn), spent)
        # The teacher's placement competes: the result is never worse than what was imitated.
        taught = critical_path(request.graph, as_transfers(request.costs))[None]
        evaluations = request.budget.evaluations
        if evaluations is not None and evaluations < len(taught) + LEAST_EVALUATIONS:
            return Candidates(_with_fitting(request, taught), 1)
        return _learn_doppler(request, taught, config)

    return method


def _learn_doppler(request: Request, taught: np.ndarray, config: PolicyConfig) -> Candidates:
    """Trains within the budget; returns `taught` with what was found."""
    evaluations, seconds = request.budget.evaluations, None
    if request.budget.seconds is not None or evaluations is None:
        seconds = request.seconds_left(TRAINING_S)
    if evaluations is not None:
        evaluations -= len(taught)
    learned = learn_placements(
        make_policy_inputs(request.graph, request.costs),
        request.graph.num_tasks,
        request.key,
        config=config,
        budget_s=seconds,
        max_evaluations=evaluations,
        links=request.objective.guide_links,
        record=lambda spent, best_s: request.record(spent + len(taught), best_s),
    )
    return dataclasses.replace(
        learned,
        placements=_with_fitting(request, np.concatenate([taught, learned.placements])),
        evaluations=learned.evaluations + len(taught),
    )


def _with_fitting(request: Request, placements: np.ndarray) -> np.ndarray:
    """Returns placements, and where memory is short what some of them become to fit."""
    if request.problem.memory is None:
        return placements
    return np.concatenate([placements, fit_some(request.graph, request.costs, placements)])


def learner(name: str, settings: Learner) -> Method:
    """Returns a learner as a method; nothing competes that it did not find itself."""

    def method(request: Request) -> Candidates:
        problem = make_policy_inputs(request.graph, request.costs)
        each = _proposal_cost(request, problem, settings)
        if request.policy is None:
            return _learn(request, problem, name, settings)
        count = (request.budget.evaluations or SAMPLES) // each
        if not count:
            raise ValueError(
                f"max_evaluations is {request.budget.evaluations}; a proposal of {name!r} "
                f"needs {each}"
            )
        links = request.objective.guide_links
        drawn = propose_placements(
            request.policy.config, request.policy.params, problem, request.key, count, links
        )
        return Candidates(drawn, count * each)

    return method


def _learn(request: Request, problem: PolicyInputs, name: str, settings: Learner) -> Candidates:
    """Trains within the budget; returns the best found on the way, and proposals."""
    learn_key, propose_key = jax.random.split(request.key)
    evaluations, seconds = request.budget.evaluations, None
    if request.budget.seconds is not None or evaluations is None:
        seconds = TRAINING_SHARE * request.seconds_left(TRAINING_S)
    each, count = _proposal_cost(request, problem, settings), NUM_PROPOSALS
    if evaluations is not None:
        count = _num_proposals(name, settings, problem, each, evaluations)
        evaluations -= count * each
    links = request.objective.guide_links
    trained = train_learner(
        settings,
        problem,
        learn_key,
        budget_s=seconds,
        max_evaluations=evaluations,
        links=links,
        record=request.record,
    )
    if trained.interrupted:
        return Candidates(trained.placements, trained.evaluations, interrupted=True)
    drawn = propose_placements(settings, trained.params, problem, propose_key, count, links)
    return Candidates(
        placements=np.concatenate([trained.placements, drawn]),
        evaluations=trained.evaluations + count * each,
    )


def _proposal_cost(request: Request, problem: PolicyInputs, settings: Learner) -> int:
    """Returns the executions that a proposal takes, its judgement included."""
    walked = settings.proposal_evaluations(problem.padded.padded_tasks)
    return walked + request.objective.simulations


def _num_proposals(
    name: str, settings: Learner, problem: PolicyInputs, each: int, evaluations: int
) -> int:
    """Returns how many proposals a bound allows beside an update of one episode or more."""
    smallest = dataclasses.replace(settings, batch=1, minibatches=1)
    update = smallest.evaluations(problem.padded.padded_tasks)
    if evaluations < update + each:
        raise ValueError(
            f"max_evaluations is {evaluations}; method {name!r} needs {update + each} on this "
            "graph"
        )
    within = min(max(evaluations // 4, each), evaluations - update)
    return min(NUM_PROPOSALS, within // each)
