"""The cells of `experiments.ablation`: DOPPLER without one of its stages, run once and kept."""

import time
from functools import partial
from typing import Any

import chex
import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.budget import Budget
from doppler_jax.costs.digests import problem_digest
from doppler_jax.learners.doppler import Doppler, policy_candidates
from doppler_jax.learners.learner import train_learner
from doppler_jax.policies import model
from doppler_jax.policies.features import PolicyInputs, make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.problems import Chosen
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.training.imitation import ImitationConfig, imitation_update
from doppler_jax.training.stages import run_stage3
from doppler_jax.training.state import init_state, make_optimizer
from experiments.cells import Cells
from experiments.measured_cells import Bench, MeasuredSettings, run_in_turns, stage3_cell
from experiments.method_cells import WARM_UP_S

WITHOUT = ("without stage 1", "without stage 2")

SAMPLES = 64
"""Placements drawn from a policy in the end, of which the best counts."""


def without_cell(
    cells: Cells, chosen: Chosen, variant: str, seed: int, budget_s: float
) -> dict[str, Any]:
    """Returns what DOPPLER finds without one stage within seconds, all compiled before."""
    run = _without_stage1 if variant == WITHOUT[0] else _without_stage2

    def make() -> dict[str, Any]:
        problem = make_policy_inputs(chosen.graph, chosen.costs)
        run(problem, chosen.graph.num_tasks, jax.random.key(seed), WARM_UP_S)
        began = time.monotonic()
        found = run(problem, chosen.graph.num_tasks, jax.random.key(seed), budget_s)
        placement, schedule = best_placement(chosen.graph, chosen.costs, found)
        return {
            "makespan_s": dj.makespan_s(schedule),
            "seconds": time.monotonic() - began,
            "placement": placement.tolist(),
        }

    terms = {"problem": problem_digest(chosen.graph, chosen.costs), "budget_s": budget_s}
    words = variant.replace(" ", "_")
    record = cells.get(f"{chosen.name}-{words}-{budget_s:g}s-{seed}", terms, make)
    return record | {"method": variant, "seed": seed}


def measure_stages(settings: MeasuredSettings, bench: Bench) -> dict[str, Any]:
    """Returns measured makespans after stages 1 and 2, after all three, and after 3 alone."""
    improved = stage3_cell(settings, bench)
    alone = run_stage3(
        bench.chosen,
        bench.folder / "stage3_alone",
        *_untrained(bench.chosen, settings.seed),
        bench.measure,
        seed=settings.seed,
        num_updates=settings.num_updates,
        config=settings.training,
    )
    placements = {
        "stages 1 and 2": improved["stage2"],
        "stages 1 to 3": improved["stage3"],
        "stage 3 alone": alone.placement.tolist(),
    }
    return {
        "workload": bench.workload,
        "measured_s": run_in_turns(bench, placements, settings.rounds),
        "placements": placements,
    }


def _without_stage1(
    problem: PolicyInputs, num_tasks: int, key: chex.PRNGKey, budget_s: float
) -> np.ndarray:
    """Returns what stage 2 finds from fresh parameters, `[B, N]`."""
    del num_tasks
    init_key, train_key, draw_key = jax.random.split(key, 3)
    fresh = _fresh_policy(init_key, problem)
    trained = train_learner(
        Doppler(warm_up=0), problem, train_key, Budget(seconds=budget_s), params=fresh.params
    )
    drawn = policy_candidates(problem, trained.policy, draw_key, SAMPLES)
    return np.concatenate([trained.placements, drawn])


def _without_stage2(
    problem: PolicyInputs, num_tasks: int, key: chex.PRNGKey, budget_s: float
) -> np.ndarray:
    """Returns samples `[B, N]` of a policy that imitated for all the time there was."""
    del num_tasks
    began, config = time.monotonic(), ImitationConfig()
    init_key, train_key, draw_key = jax.random.split(key, 3)
    fresh = _fresh_policy(init_key, problem)
    optimizer = make_optimizer(config.learning_rate)
    state = init_state(train_key, fresh.params, optimizer, problem, 1)
    while int(state.update) == 0 or time.monotonic() - began < budget_s:
        state, _ = imitation_update(state, problem, fresh.config, config)
    policy = dj.Policy(params=state.params, config=fresh.config)
    return policy_candidates(problem, policy, draw_key, SAMPLES)


def _untrained(chosen: Chosen, seed: int) -> tuple[dj.Policy, np.ndarray]:
    """Returns a policy that learned nothing, and a sample `[N]` of it."""
    init_key, draw_key = jax.random.split(jax.random.key(seed))
    problem = make_policy_inputs(chosen.graph, chosen.costs)
    policy = _fresh_policy(init_key, problem)
    return policy, policy_candidates(problem, policy, draw_key, 3)[2]


def _fresh_policy(key: chex.PRNGKey, problem: PolicyInputs) -> dj.Policy:
    config = PolicyConfig()
    init = jax.jit(partial(model.init_params, config=config))
    return dj.Policy(params=init(key, problem=problem), config=config)
