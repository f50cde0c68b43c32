"""The cells of `experiments.scaling`: a learned method on one graph, timed once and kept."""

import dataclasses
from functools import partial
from typing import Any

import jax

import doppler_jax as dj
from doppler_jax.learned import LEARNERS
from doppler_jax.learners.learner import EpisodeLearner
from doppler_jax.policies import model
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.sim_rl import SimConfig
from experiments.bench_training import update_call
from experiments.cells import Cells
from experiments.method_cells import finished
from experiments.yardsticks.layered import layered_problem
from experiments.yardsticks.turns import Call, take_turns


@dataclasses.dataclass(frozen=True)
class Subject:
    """A method on a problem, ready to be timed."""

    update: Call
    evaluations: int  # executions that an update simulates
    policy: dj.Policy  # of fresh parameters
    proposal: int  # executions that one proposal takes, its judgement included


def scaling_cell(
    cells: Cells, method: str, num_tasks: int, num_devices: int, batch: int, repeats: int
) -> dict[str, Any]:
    """Returns seconds of an update of a method, and of placing a graph with its policy."""

    def make() -> dict[str, Any]:
        graph, costs = layered_problem(num_tasks, num_devices)
        make_subject = _doppler if method == "doppler" else partial(_learner, method)
        subject = make_subject(graph, costs, batch)

        def place() -> dj.Placed:
            return finished(
                dj.place(
                    graph,
                    costs,
                    method=method,
                    policy=subject.policy,
                    max_evaluations=subject.proposal,
                )
            )

        timings = take_turns({"update": subject.update, "place": Call(1, place)}, repeats)
        update, placing = timings["update"], timings["place"]
        return {
            "method": method,
            "tasks": num_tasks,
            "batch": batch,
            "evaluations": subject.evaluations,
            "update_s": batch * update.placement_s,
            "place_s": placing.placement_s,
            "compile_s": update.compile_s,
            "place_compile_s": placing.compile_s,
        }

    terms = {"devices": num_devices, "batch": batch, "repeats": repeats}
    return cells.get(f"{method}-{num_tasks}", terms, make)


def _doppler(graph: dj.TaskGraph, costs: dj.Costs, batch: int) -> Subject:
    usual = SimConfig()
    config = dataclasses.replace(
        usual,
        batch=batch,
        minibatches=1,
        num_elites=min(usual.num_elites, batch),
        num_chains=min(usual.num_chains, batch),
    )
    policy = PolicyConfig()
    init = jax.jit(partial(model.init_params, config=policy))
    return Subject(
        update=update_call(graph, costs, config),
        evaluations=config.evaluations,
        policy=dj.Policy(
            init(jax.random.key(0), problem=make_policy_inputs(graph, costs)), policy
        ),
        proposal=1,
    )


def _learner(method: str, graph: dj.TaskGraph, costs: dj.Costs, batch: int) -> Subject:
    usual = LEARNERS[method]
    assert isinstance(usual, EpisodeLearner)
    settings = dataclasses.replace(usual, batch=batch, minibatches=1)
    problem = make_policy_inputs(graph, costs)
    padded = problem.padded.padded_tasks
    params_key, (phase,) = settings.phases(jax.random.key(0), problem, "parallel")
    state = phase.begin(jax.jit(settings.init)(params_key, problem))
    return Subject(
        update=Call(
            batch,
            lambda: jax.block_until_ready(phase.update(state)),
        ),
        evaluations=settings.evaluations(padded),
        policy=dj.Policy(state.params, usual, method),
        proposal=usual.proposal_evaluations(padded) + 1,
    )
