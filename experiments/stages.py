"""The three training stages as runs in folders; the entry points and the demo call these."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import doppler_jax as dj
from doppler_jax.costs.observed import Refit, refit_costs
from doppler_jax.files import write_json_atomic
from doppler_jax.learned import policy_candidates, state_candidates
from doppler_jax.policies.features import PolicyInputs, make_policy_inputs
from doppler_jax.policies.model import PolicyConfig, init_params
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.training.imitation import ImitationConfig, imitation_update
from doppler_jax.training.paired import Measure, MeasurementLog
from doppler_jax.training.run import Bounds, Report, Run
from doppler_jax.training.sim_rl import SimConfig, init_sim_state, sim_update
from doppler_jax.training.state import TrainState, init_state, make_optimizer
from doppler_jax.training.system_rl import (
    Comparison,
    System,
    SystemConfig,
    compare,
    set_incumbent,
    system_update,
)
from experiments.problems import Chosen


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a stage leaves: its folder, last state and best placement."""

    folder: pathlib.Path
    policy: dj.Policy
    placement: np.ndarray  # [N]
    seconds: float  # of the placement: simulated by the oracle, in stage 3 measured
    comparison: Comparison | None = None  # of stage 3: with what it started from


def run_stage1(
    chosen: Chosen,
    folder: pathlib.Path,
    *,
    seed: int,
    num_updates: int,
    config: ImitationConfig,
    policy: PolicyConfig,
    save_every_s: float = 10.0,
) -> Trained:
    """Imitates critical path, from fresh parameters."""
    problem = make_policy_inputs(chosen.graph, chosen.costs)
    params_key, run_key = jax.random.split(jax.random.key(seed))
    start = init_state(
        run_key,
        init_params(params_key, policy, problem),
        make_optimizer(config.learning_rate),
        problem,
        num_elites=1,
    )
    update = partial(imitation_update, problem=problem, policy=policy, config=config)
    settings = _settings(chosen, "stage1", seed, policy, config)
    state = _train(folder, settings, policy, start, update, num_updates, save_every_s)
    return _finish(chosen, problem, folder, dj.Policy(params=state.params, config=policy), None)


def run_stage2(
    chosen: Chosen,
    folder: pathlib.Path,
    before: dj.Policy,
    *,
    seed: int,
    num_updates: int,
    config: SimConfig,
    bounds: Bounds | None = None,
    save_every_s: float = 10.0,
) -> Trained:
    """Improves a policy by episodes in the simulator."""
    problem = make_policy_inputs(chosen.graph, chosen.costs)
    start = init_sim_state(jax.random.key(seed), before.params, problem, config)
    update = partial(sim_update, problem=problem, policy=before.config, config=config)
    settings = _settings(chosen, "stage2", seed, before.config, config)
    state = _train(
        folder, settings, before.config, start, update, num_updates, save_every_s, bounds
    )
    # On no device: what follows may run on others than training did.
    policy = dj.Policy(params=jax.device_get(state.params), config=before.config)
    found = state_candidates(state, chosen.graph.num_tasks)
    return _finish(chosen, problem, folder, policy, found, config.links)


def run_stage3(
    chosen: Chosen,
    folder: pathlib.Path,
    before: dj.Policy,
    incumbent: np.ndarray,
    measure: Measure,
    *,
    seed: int,
    num_updates: int,
    config: SystemConfig,
    save_every_s: float = 10.0,
) -> Trained:
    """Improves a policy by measured episodes; never ends worse than the incumbent measured."""
    start = init_state(
        jax.random.key(seed),
        before.params,
        make_optimizer(config.learning_rate),
        make_policy_inputs(chosen.graph, chosen.costs),
        config.num_elites,
    )
    settings = _settings(chosen, "stage3", seed, before.config, config)
    settings["incumbent"] = [int(device) for device in incumbent]
    run = Run(folder, settings, before.config)
    system = System(
        graph=chosen.graph,
        refit=_refit(chosen),
        policy=before.config,
        config=config,
        log=MeasurementLog(folder / "measurements.jsonl", measure),
    )
    state = run.resume(start)
    if not np.isfinite(state.best_makespan_s):
        state = set_incumbent(state, system, incumbent)
    with progress_bar(folder.parent.name, num_updates, int(state.update)) as report:
        state = run.train(
            state,
            partial(system_update, system=system),
            num_updates,
            save_every_s=save_every_s,
            report=report,
        )
    run.close()
    best = np.asarray(state.best_placement)[: chosen.graph.num_tasks]
    found = compare(system, int(state.update), incumbent, best)
    policy = dj.Policy(state.params, before.config)
    trained = Trained(folder, policy, found.placement, found.seconds, found)
    _write(
        trained,
        "measured_s",
        first_s=found.first_s,
        ratio=found.ratio,
        interval=[bound if np.isfinite(bound) else None for bound in found.interval],
    )
    return trained


def _refit(chosen: Chosen) -> Refit:
    if chosen.sharded is None:  # then nothing says which tasks compute the same
        return lambda traces: chosen.costs
    return partial(refit_costs, chosen.sharded, chosen.costs)


def find_policy(folder: pathlib.Path, stage: str) -> dj.Policy:
    """Returns the policy of an earlier stage's run.

    Raises:
      ValueError: that stage has not been run.
    """
    try:
        return dj.load_policy(folder)
    except ValueError as error:
        raise ValueError(f"{error}; run {stage} on the same problem first") from error


@contextmanager
def progress_bar(title: str, total: int, done: int) -> Iterator[Report]:
    """Shows a bar, on a terminal, with the latest metrics beside it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} updates"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[latest]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total, completed=done, latest="compiling")

        def report(update: int, metrics: dict[str, float]) -> None:
            latest = "  ".join(f"{k} {v:.4g}" for k, v in list(metrics.items())[:2])
            progress.update(task, completed=update, latest=latest)

        yield report


def _settings(
    chosen: Chosen, stage: str, seed: int, policy: PolicyConfig, config: Any
) -> dict[str, Any]:
    """Everything that decides the numbers of a run."""
    return {
        "problem": chosen.name,
        "num_tasks": chosen.graph.num_tasks,
        "num_devices": chosen.costs.num_devices,
        "graph_and_costs": _digest((chosen.graph, chosen.costs)),
        "stage": stage,
        "seed": seed,
        "policy": dataclasses.asdict(policy),
        "training": dataclasses.asdict(config),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def _digest(arrays: Any) -> str:
    """Returns a fingerprint of a pytree's numbers: a file edited in place is noticed."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(arrays):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def _train(
    folder: pathlib.Path,
    settings: dict[str, Any],
    policy: PolicyConfig,
    start: TrainState,
    update: Callable[[TrainState], tuple[TrainState, dict[str, Any]]],
    num_updates: int,
    save_every_s: float,
    bounds: Bounds | None = None,
) -> TrainState:
    run = Run(folder, settings, policy)
    state = run.resume(start)
    with progress_bar(folder.parent.name, num_updates, int(state.update)) as report:
        state = run.train(
            state,
            update,
            num_updates,
            bounds=bounds,
            save_every_s=save_every_s,
            report=report,
        )
    run.close()
    return state


def _finish(
    chosen: Chosen,
    problem: PolicyInputs,
    folder: pathlib.Path,
    policy: dj.Policy,
    found: np.ndarray | None,
    links: str = "parallel",
) -> Trained:
    """Ranks what training found and the policy's own choices by the oracle, and writes it."""
    drawn = policy_candidates(problem, policy, jax.random.key(0), 64)
    candidates = drawn if found is None else np.concatenate([found, drawn])
    placement, schedule = best_placement(chosen.graph, chosen.costs, candidates, links)
    trained = Trained(folder, policy, placement, dj.makespan_s(schedule))
    _write(trained, "makespan_s")
    return trained


def _write(trained: Trained, kind: str, **more: Any) -> None:
    write_json_atomic(
        trained.folder / "placement.json",
        {"placement": trained.placement.tolist(), kind: trained.seconds, **more},
    )
