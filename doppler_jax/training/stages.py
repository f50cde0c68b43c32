"""The three training stages as runs in folders, which resume exactly where they stopped.

`run_stage1`, `run_stage2` and `run_stage3` take a problem; `run_stage` is the command of the
first two, which takes settings. Stage 3's command is the engine's, which measures.
"""

import dataclasses
import pathlib
from functools import partial
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from doppler_jax.budget import Budget
from doppler_jax.costs.digests import problem_digest
from doppler_jax.costs.observed import refit_costs
from doppler_jax.files import write_json_atomic
from doppler_jax.learners.doppler import policy_candidates
from doppler_jax.learners.learner import best_placements
from doppler_jax.policies.features import PolicyInputs, make_policy_inputs
from doppler_jax.policies.model import PolicyConfig, init_params
from doppler_jax.policy_files import load_policy
from doppler_jax.problems import Chosen, choose, use_host_devices
from doppler_jax.reports.tables import format_seconds
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.simulator.oracle import makespan_s
from doppler_jax.training.imitation import ImitationConfig, imitation_phase
from doppler_jax.training.loop import Phase, RunFolder, train
from doppler_jax.training.paired import Measure, MeasurementLog
from doppler_jax.training.settings import Stage1Settings, Stage2Settings, check_settings
from doppler_jax.training.sim_rl import SimConfig, sim_phase
from doppler_jax.training.state import StateT, TrainState, init_state, make_optimizer
from doppler_jax.training.system_rl import (
    Comparison,
    System,
    SystemConfig,
    begin_system,
    best_plan,
    compare,
    set_incumbent,
    system_update,
)
from doppler_jax.types import Plan, Policy


@dataclasses.dataclass(frozen=True)
class StageResult:
    """What a stage leaves: its folder, policy and best plan."""

    folder: pathlib.Path
    policy: Policy
    plan: Plan  # of stages 1 and 2 a placement, under `fifo`
    seconds: float  # of the plan: simulated by the oracle, in stage 3 measured
    comparison: Comparison | None = None  # of stage 3: with what it started from


def run_stage(settings: Stage1Settings | Stage2Settings) -> StageResult:
    """Does `doppler train stage1` or `stage2`: trains, says where the result is."""
    check_settings(settings)
    use_host_devices(settings.host_devices)
    number = 1 if isinstance(settings, Stage1Settings) else 2
    folder = settings.runs / f"stage{number}"
    chosen = choose(settings, folder)
    options: dict[str, Any] = {
        "seed": settings.seed,
        "num_updates": settings.num_updates,
        "config": settings.training,
        "save_every_s": settings.save_every_s,
    }
    if isinstance(settings, Stage1Settings):
        options["policy"] = settings.policy
        result = run_stage1(chosen, folder / chosen.name, **options)
    else:
        before = find_policy(settings.runs / "stage1" / chosen.name, "stage1")
        options["budget"] = Budget(
            episodes=settings.episodes, seconds=settings.budget_s, target_s=settings.target_s
        )
        result = run_stage2(chosen, folder / chosen.name, before, **options)
    print(f"stage {number}: {format_seconds(result.seconds, 6)} simulated, in {result.folder}")
    return result


def run_stage1(
    chosen: Chosen,
    folder: pathlib.Path,
    *,
    seed: int,
    num_updates: int,
    config: ImitationConfig,
    policy: PolicyConfig,
    save_every_s: float = 10.0,
) -> StageResult:
    """Imitates critical path, from fresh parameters.

    Raises:
      ValueError: the folder has a run with other settings.
    """
    problem = make_policy_inputs(chosen.graph, chosen.costs)
    params_key, run_key = jax.random.split(jax.random.key(seed))
    phase = imitation_phase(run_key, problem, policy, config, num_updates)
    settings = _settings(chosen, "stage1", seed, policy, config)
    with RunFolder(folder, settings, policy, save_every_s) as run:
        state = _train(run, phase, phase.begin(init_params(params_key, policy, problem)))
    return _finish(chosen, problem, folder, Policy(params=state.params, config=policy), None)


def run_stage2(
    chosen: Chosen,
    folder: pathlib.Path,
    before: Policy,
    *,
    seed: int,
    num_updates: int,
    config: SimConfig,
    budget: Budget | None = None,
    save_every_s: float = 10.0,
) -> StageResult:
    """Improves a policy by episodes in the simulator.

    Raises:
      ValueError: the folder has a run with other settings, or the counts of `config` do not
        fit together.
    """
    problem = make_policy_inputs(chosen.graph, chosen.costs)
    phase = sim_phase(jax.random.key(seed), problem, before.config, config, num_updates)
    settings = _settings(chosen, "stage2", seed, before.config, config)
    with RunFolder(folder, settings, before.config, save_every_s) as run:
        state = _train(run, phase, phase.begin(before.params), budget)
    # On no device: what follows may run on others than training did.
    policy = Policy(params=jax.device_get(state.params), config=before.config)
    found = best_placements(state, chosen.graph.num_tasks)
    return _finish(chosen, problem, folder, policy, found, config.links)


def run_stage3(
    chosen: Chosen,
    folder: pathlib.Path,
    before: Policy,
    incumbent: Plan,
    measure: Measure,
    *,
    seed: int,
    num_updates: int,
    config: SystemConfig,
    save_every_s: float = 10.0,
) -> StageResult:
    """Improves a policy by measured episodes; never ends worse than the incumbent measured.

    Args:
      chosen: the problem; where its program is known, costs are re-fitted to what is measured.
      folder: of the run, with all its measurements.
      before: the policy to go on from.
      incumbent: the plan to beat, of queue `fifo` or `in_order`.
      measure: runs two plans in turns.
      seed: of everything random but the measurements.
      num_updates: when to stop.
      config: settings of the stage.
      save_every_s: seconds between checkpoints.

    Raises:
      ValueError: the incumbent's queue is another one, the folder has a run with other
        settings, or a measured time is invalid.
    """
    if incumbent.queue not in ("fifo", "in_order"):
        raise ValueError(f"the incumbent's queue is {incumbent.queue!r}; expected in_order")
    start = begin_system(
        init_state(
            jax.random.key(seed),
            before.params,
            make_optimizer(config.learning_rate),
            make_policy_inputs(chosen.graph, chosen.costs),
            config.num_elites,
        )
    )
    settings = _settings(chosen, "stage3", seed, before.config, config)
    settings["incumbent"] = plan_record(incumbent)
    with RunFolder(folder, settings, before.config, save_every_s) as run:
        system = System(
            graph=chosen.graph,
            # Without a program nothing says which tasks compute the same.
            refit=partial(refit_costs, chosen.sharded, chosen.costs)
            if chosen.sharded is not None
            else lambda traces: chosen.costs,
            policy=before.config,
            config=config,
            log=MeasurementLog(folder / "measurements.jsonl", measure),
        )
        phase = Phase(
            begin=lambda params: set_incumbent(start, system, incumbent),
            update=partial(system_update, system=system),
            num_updates=num_updates,
        )
        state = _train(run, phase, phase.begin(before.params) if run.is_new else start)
    best = best_plan(state, chosen.graph.num_tasks)
    found = compare(system, int(state.update), incumbent, best)
    policy = Policy(state.params, before.config)
    result = StageResult(folder, policy, found.plan, found.seconds, found)
    _write(
        result,
        "measured_s",
        first_s=found.first_s,
        ratio=found.ratio,
        interval=[bound if np.isfinite(bound) else None for bound in found.interval],
    )
    return result


def find_policy(folder: pathlib.Path, stage: str) -> Policy:
    """Returns the policy of an earlier stage's run.

    Raises:
      ValueError: that stage has not been run.
    """
    try:
        return load_policy(folder)
    except ValueError as error:
        raise ValueError(f"{error}; run {stage} on the same problem first") from error


def _settings(
    chosen: Chosen, stage: str, seed: int, policy: PolicyConfig, config: Any
) -> dict[str, Any]:
    """Everything that decides the numbers of a run."""
    return {
        "problem": chosen.name,
        "num_tasks": chosen.graph.num_tasks,
        "num_devices": chosen.costs.num_devices,
        "graph_and_costs": problem_digest(chosen.graph, chosen.costs),
        "stage": stage,
        "seed": seed,
        "policy": dataclasses.asdict(policy),
        "training": dataclasses.asdict(config),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def _train(
    run: RunFolder, phase: Phase[StateT], start: StateT, budget: Budget | None = None
) -> StateT:
    """Returns the last state of a phase, from the newest checkpoint or the start.

    On a terminal, a bar shows where it is, with the latest metrics beside it.
    """
    state = run.resume(start)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} updates"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[latest]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        total, done = phase.num_updates, int(state.update)
        bar = progress.add_task(
            run.folder.parent.name, total=total, completed=done, latest="compiling"
        )

        def report(state: TrainState, metrics: dict[str, float]) -> None:
            latest = "  ".join(f"{k} {v:.4g}" for k, v in list(metrics.items())[:2])
            progress.update(bar, completed=int(state.update), latest=latest)

        return train(phase, state, budget, folder=run, report=report)[0]


def _finish(
    chosen: Chosen,
    problem: PolicyInputs,
    folder: pathlib.Path,
    policy: Policy,
    found: np.ndarray | None,
    links: str = "parallel",
) -> StageResult:
    """Ranks what training found and the policy's own choices by the oracle, and writes it."""
    drawn = policy_candidates(problem, policy, jax.random.key(0), 64)
    candidates = drawn if found is None else np.concatenate([found, drawn])
    placement, schedule = best_placement(chosen.graph, chosen.costs, candidates, links)
    result = StageResult(folder, policy, Plan(placement), makespan_s(schedule))
    _write(result, "makespan_s")
    return result


def _write(result: StageResult, kind: str, **more: Any) -> None:
    write_json_atomic(
        result.folder / "placement.json",
        {**plan_record(result.plan), kind: result.seconds, **more},
    )


def plan_record(plan: Plan) -> dict[str, Any]:
    """Returns a plan for JSON, as fields of `dj.Plan`."""
    priority = None if plan.priority is None else np.asarray(plan.priority).tolist()
    placement = np.asarray(plan.placement).tolist()
    return {"placement": placement, "priority": priority, "queue": plan.queue}
