"""The cells of `experiments.transfer`: a policy trained or used once, its record kept."""

import dataclasses
import pathlib
import shutil
from functools import cache
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.learned import policy_candidates, state_candidates
from doppler_jax.policies.features import PolicyInputs, make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policy_files import load_policy
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.training.checkpoint import Checkpoints, Policy
from doppler_jax.training.imitation import ImitationConfig
from doppler_jax.training.sim_rl import SimConfig
from doppler_jax.training.train import Trained, train_policy
from experiments.cells import Cells
from experiments.config import Strategy
from experiments.problems import choose_workload

IMITATION = ImitationConfig()
"""Stage 1, from scratch and before the few episodes of a transferred policy."""


@dataclasses.dataclass(frozen=True)
class Study:
    """What all cells of a study share."""

    cells: Cells
    cluster: str
    preset: str
    strategy: Strategy
    policy: PolicyConfig
    training: SimConfig

    @property
    def terms(self) -> dict[str, Any]:
        return {
            "preset": self.preset,
            "strategy": self.strategy,
            "policy": dataclasses.asdict(self.policy),
            "training": dataclasses.asdict(self.training),
            "imitation": dataclasses.asdict(IMITATION),
        }

    def load(self, workload: str) -> "Loaded":
        """Returns a workload on the cluster."""
        return _load(workload, self.preset, self.cluster, self.strategy)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A placement problem as simulators and as policies take it."""

    graph: dj.TaskGraph
    costs: dj.Costs
    problem: PolicyInputs


@cache
def _load(workload: str, preset: str, cluster: str, strategy: Strategy) -> Loaded:
    make = dj.load_cluster if cluster.endswith(".json") else dj.make_cluster
    label = pathlib.Path(cluster).stem
    chosen = choose_workload(workload, preset, make(cluster), label, strategy)
    return Loaded(chosen.graph, chosen.costs, make_policy_inputs(chosen.graph, chosen.costs))


def listed_cell(study: Study, target: str, method: str) -> dict[str, Any]:
    """Returns what a list scheduler makes of a workload."""

    def make() -> dict[str, Any]:
        loaded = study.load(target)
        placed = dj.place(loaded.graph, loaded.costs, method=method)
        return {"makespan_s": placed.makespan_s, "tasks": loaded.graph.num_tasks}

    terms = {"preset": study.preset, "strategy": study.strategy}
    return study.cells.get(_name(study, "listed", method, target), terms, make)


def scratch_cell(study: Study, target: str, episodes: int, seed: int) -> dict[str, Any]:
    """Returns what stages 1 and 2 from scratch make of a workload; the policy is kept."""

    def make() -> dict[str, Any]:
        return _train(study, target, episodes, seed, None)

    name = _scratch_name(study, target, episodes, seed)
    return study.cells.get(name, study.terms, make)


def shot_cell(
    study: Study, source: str, target: str, shots: int, episodes: int, seed: int
) -> dict[str, Any]:
    """Returns what the policy of a source makes of a target after so many episodes there.

    Stage 1 comes before them, as from scratch: it takes no episodes. Without any it is the
    policy's greedy placement.
    """

    def make() -> dict[str, Any]:
        scratch_cell(study, source, episodes, seed)
        policy = load_policy(_folder(study, source, episodes, seed))
        if shots:
            return _train(study, target, shots, seed, policy)
        loaded = study.load(target)
        greedy_s = _makespan_s(loaded, _greedy(loaded, policy))
        return {"makespan_s": greedy_s, "greedy_s": greedy_s, "evaluations": 1}

    terms = study.terms | {"source_episodes": episodes}
    name = _name(study, "shots", source, target, str(shots), str(seed))
    return study.cells.get(name, terms, make)


def _train(
    study: Study, target: str, episodes: int, seed: int, initial: Policy | None
) -> dict[str, Any]:
    loaded = study.load(target)
    trained = train_policy(
        loaded.problem,
        jax.random.key(seed),
        max_episodes=episodes,
        initial=initial,
        policy=study.policy,
        imitate=IMITATION,
        simulate=study.training,
    )
    if initial is None:
        _save(_folder(study, target, episodes, seed), trained, study.terms)
    policy = Policy(params=jax.device_get(trained.state.params), config=trained.policy)
    greedy = _greedy(loaded, policy)
    found = state_candidates(trained.state, loaded.graph.num_tasks)
    placement, schedule = best_placement(
        loaded.graph, loaded.costs, np.concatenate([found, greedy[None]])
    )
    return {
        "makespan_s": dj.makespan_s(schedule),
        "greedy_s": _makespan_s(loaded, greedy),
        "episodes": int(trained.state.episodes),
        "evaluations": int(trained.state.evaluations) + 1,
        "placement": placement.tolist(),
    }


def _save(folder: pathlib.Path, trained: Trained, terms: dict[str, Any]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    checkpoints = Checkpoints(folder)
    checkpoints.save(trained.state, trained.policy, {"terms": terms})
    checkpoints.close()


def _greedy(loaded: Loaded, policy: Policy) -> np.ndarray:
    return policy_candidates(loaded.problem, policy, jax.random.key(0), 1)[0]


def _makespan_s(loaded: Loaded, placement: np.ndarray) -> float:
    return dj.makespan_s(dj.simulate_oracle(loaded.graph, loaded.costs, placement))


def _folder(study: Study, workload: str, episodes: int, seed: int) -> pathlib.Path:
    return (
        study.cells.folder.parent / "policies" / _scratch_name(study, workload, episodes, seed)
    )


def _scratch_name(study: Study, workload: str, episodes: int, seed: int) -> str:
    return _name(study, "scratch", workload, str(episodes), str(seed))


def _name(study: Study, *parts: str) -> str:
    return "-".join((*parts, pathlib.Path(study.cluster).stem))
