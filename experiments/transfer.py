"""Does a policy of one graph serve another? `python -m experiments.transfer`.

A policy is trained by stages 1 and 2 on a source, then used on a target: as it is, and after
stage 1 and some episodes of stage 2 there. Beside it stand stages 1 and 2 from scratch on the
target, in full and with as few episodes, and the paper's figures. All train with one
configuration: stage 2 as it is, local search beside the policy included.
"""

import dataclasses
import pathlib
import shutil
from functools import partial

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.budget import Budget
from doppler_jax.learners.doppler import Doppler, policy_candidates
from doppler_jax.learners.learner import train_learner
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.reports.tables import format_table
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.training.checkpoint import Checkpoints
from doppler_jax.training.sim_rl import SimConfig
from experiments.catalogue import Problem
from experiments.grid import (
    Cell,
    Context,
    Page,
    Record,
    Settings,
    Spend,
    Study,
    check_names,
    format_spread,
    method_cells,
)

PAPER_MS = {
    ("ffnn", "llama_block"): (251.0, 165.3, 159.4, 160.3),
    ("chainmm", "llama_block"): (242.3, 184.9, 174.0, 160.3),
    ("ffnn", "llama_layer"): (206.1, 158.2, 155.8, 150.6),
    ("chainmm", "llama_layer"): (338.2, 164.4, 156.4, 150.6),
}
"""The paper's makespans on 4 GPUs, ms: after 0, 2,000 and 4,000 episodes, and in full."""

PAPER_SHOTS = (0, 2000, 4000)

LISTED = ("critical_path", "heft")


@dataclasses.dataclass(frozen=True)
class TransferSettings(Settings):
    """What to train on, and what to use it for."""

    source: tuple[str, ...] = ("ffnn", "chainmm")
    """Workloads to train on."""
    target: tuple[str, ...] = ("llama_block", "llama_layer")
    """Workloads to place then; each source serves each target."""
    on: str = "p100x4:uniform"
    """Cluster and cut of all; the planner's cuts leave the sources little to learn."""
    shots: tuple[int, ...] = PAPER_SHOTS
    """Episodes of stage 2 on the target."""
    full: int = 8000
    """Episodes of stage 2 on a source, and on the target from scratch."""
    seeds: int = 5
    policy: PolicyConfig = dataclasses.field(
        # Positions in a topological order, a default feature, mean nothing on another graph.
        default_factory=lambda: PolicyConfig(features="coparent")
    )
    training: SimConfig = dataclasses.field(default_factory=SimConfig)


def cells(context: Context[TransferSettings]) -> list[Cell]:
    """Returns the cells: list schedulers, training from scratch, and what follows from it."""
    asked = context.settings
    fewest = min([asked.full, *(shots for shots in asked.shots if shots)])
    if not asked.shots or min(asked.shots) < 0 or fewest < asked.training.batch:
        raise ValueError(
            f"--shots {asked.shots} and --full {asked.full}: expected 0 or at least a batch of "
            f"{asked.training.batch} episodes"
        )
    for option, names in (("--source", asked.source), ("--target", asked.target)):
        check_names(option, names, dj.list_workloads())
    terms = {
        "on": asked.on,
        "policy": dataclasses.asdict(asked.policy),
        "training": dataclasses.asdict(asked.training),
    }
    seeds, counts = range(asked.seeds), sorted({*asked.shots, asked.full} - {0})
    alone = {(name, asked.full): None for name in asked.source}
    alone |= {(target, count): None for target in asked.target for count in counts}
    found = method_cells(context, [f"{t}:{asked.on}" for t in asked.target], LISTED, [Spend()])
    for target, episodes in alone:
        for seed in seeds:
            key = {"target": target, "episodes": episodes, "seed": seed, **terms}
            found.append(Cell(key, partial(train, context, target, episodes, seed)))
    for source in asked.source:
        for target in asked.target:
            for shots in asked.shots:
                for seed in seeds:
                    key = {"source": source, "target": target, "episodes": shots}
                    key |= {"source_episodes": asked.full, "seed": seed, **terms}
                    run = partial(use, context, source, target, shots, seed)
                    found.append(Cell(key, run))
    return found


def use(
    context: Context[TransferSettings], source: str, target: str, shots: int, seed: int
) -> Record:
    """Returns what the policy of a source makes of a target after so many episodes there.

    Stage 1 comes before them, as from scratch: it takes no episodes. Without any it is the
    policy's greedy placement.
    """
    policy = dj.load_policy(_folder(context, source, context.settings.full, seed))
    if shots:
        return train(context, target, shots, seed, policy)
    problem = context.problem(f"{target}:{context.settings.on}")
    greedy = _greedy(problem, policy)
    found_s = _makespan_s(problem, greedy)
    return {"makespan_s": found_s, "greedy_s": found_s, "placement": greedy.tolist()}


def train(
    context: Context[TransferSettings],
    target: str,
    episodes: int,
    seed: int,
    initial: dj.Policy | None = None,
) -> Record:
    """Returns the best placement of training and of its greedy policy, which is kept."""
    asked = context.settings
    problem = context.problem(f"{target}:{asked.on}")
    trained = train_learner(
        Doppler(policy=asked.policy, simulate=asked.training),
        make_policy_inputs(problem.graph, problem.costs),
        jax.random.key(seed),
        Budget(episodes=episodes),
        params=None if initial is None else initial.params,
    )
    if initial is None:
        folder = _folder(context, target, episodes, seed)
        shutil.rmtree(folder, ignore_errors=True)
        checkpoints = Checkpoints(folder)
        checkpoints.save(trained.state, trained.policy.config, {})
        checkpoints.close()
    greedy = _greedy(problem, trained.policy)
    candidates = np.concatenate([trained.placements, greedy[None]])
    placement, schedule = best_placement(problem.graph, problem.costs, candidates)
    return {
        "makespan_s": dj.makespan_s(schedule),
        "greedy_s": _makespan_s(problem, greedy),
        "evaluations_spent": int(trained.state.evaluations) + 1,
        "placement": placement.tolist(),
    }


def report(context: Context[TransferSettings], records: list[Record]) -> Page:
    """Returns the best makespans and the policies' greedy ones, the paper's beside them."""
    asked = context.settings
    heads = (*(f"{shots:,} episodes" for shots in asked.shots), f"full, {asked.full:,}")
    best: list[tuple[str, ...]] = []
    greedy: list[tuple[str, ...]] = []

    def row(value: str, source: str | None, target: str) -> list[str]:
        """Spreads after each number of shots, and of training from scratch in full."""
        runs = [
            [
                1e3 * r[value]
                for r in records
                if (r.get("source"), r.get("target"), r.get("episodes")) == (who, target, n)
            ]
            for who, n in [*((source, n) for n in asked.shots), (None, asked.full)]
        ]
        return [format_spread(np.array(found)) for found in runs]

    for target in asked.target:
        at = f"{target}:{asked.on}"
        listed = [
            "-" if not (found := [r for r in records if r.get("problem") == at
                                  and r["method"] == method])
            else f"{1e3 * found[0]['makespan_s']:.1f}"
            for method in LISTED
        ]  # fmt: skip
        for source in asked.source:
            pair = f"{source} to {target}"
            best.append((pair, "ours", *row("makespan_s", source, target), *listed))
            best.append((pair, "without transfer", *row("makespan_s", None, target), "-", "-"))
            paper = PAPER_MS.get((source, target))
            if paper is not None and asked.shots == PAPER_SHOTS:
                best.append((pair, "paper", *(f"{ms:.1f}" for ms in paper), "-", "-"))
            greedy.append((pair, *row("greedy_s", source, target)))
    return Page(
        f"Makespans in ms on {asked.on}, simulated (the paper's: measured on its machine): the "
        "best placement met in training and the policy's greedy one, whichever is shorter; "
        "after 0 episodes the greedy one. Mean and deviation over seeds.\n\n"
        f"{format_table(('transfer', 'whose', *heads, *LISTED), best)}\n"
        "The policies' greedy placements at the end, ms:\n\n"
        f"{format_table(('transfer', *heads), greedy)}"
    )


def _greedy(problem: Problem, policy: dj.Policy) -> np.ndarray:
    inputs = make_policy_inputs(problem.graph, problem.costs)
    return policy_candidates(inputs, policy, jax.random.key(0), 1)[0]


def _makespan_s(problem: Problem, placement: np.ndarray) -> float:
    return dj.makespan_s(dj.simulate_oracle(problem.graph, problem.costs, placement))


def _folder(
    context: Context[TransferSettings], workload: str, episodes: int, seed: int
) -> pathlib.Path:
    on = "-".join(pathlib.Path(part).stem for part in context.settings.on.split(":"))
    return context.folder / "policies" / f"{workload}-{on}-{episodes}-{seed}"


STUDY = Study(
    name="transfer",
    title="Does a policy of one graph serve another?",
    settings=TransferSettings(),
    cells=cells,
    report=report,
    quick={"seeds": 1, "shots": (0, 256), "full": 512, "target": ("llama_block",)},
)

if __name__ == "__main__":
    STUDY.command()
