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
from doppler_jax.learners.doppler import Doppler, policy_candidates
from doppler_jax.learners.learner import train_learner
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.reports.tables import format_table
from doppler_jax.simulator.finalists import best_placement
from doppler_jax.training.checkpoint import Checkpoints
from doppler_jax.training.sim_rl import SimConfig
from experiments import grid
from experiments.catalogue import Problem
from experiments.grid import Cell, Context, Page, Record, Settings, Study

SHOTS = (0, 2000, 4000)
"""Episodes that the paper fine-tunes for."""

PAPER_MS = {
    ("ffnn", "llama_block"): (251.0, 165.3, 159.4, 160.3),
    ("chainmm", "llama_block"): (242.3, 184.9, 174.0, 160.3),
    ("ffnn", "llama_layer"): (206.1, 158.2, 155.8, 150.6),
    ("chainmm", "llama_layer"): (338.2, 164.4, 156.4, 150.6),
}
"""The paper's makespans on 4 GPUs by (source, target): after `SHOTS` episodes, and in full."""

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
    shots: tuple[int, ...] = SHOTS
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
    known = dj.list_workloads()
    for option, names in (("--source", asked.source), ("--target", asked.target)):
        grid.check_names(option, [name.split("/")[0] for name in names], known)
    terms = context.key("source", "target", "shots", "full", "seeds")
    targets, seeds = [f"{name}:{asked.on}" for name in asked.target], range(asked.seeds)
    found = grid.method_cells(context, targets, LISTED, [grid.Spend()])
    counts = sorted({*asked.shots, asked.full} - {0})
    alone = [(name, asked.full) for name in asked.source]
    alone += [(name, n) for name in asked.target for n in counts if (name, n) not in alone]
    for target, episodes in alone:
        for seed in seeds:
            key = {"target": target, "episodes": episodes, "seed": seed, **terms}
            found.append(Cell(key, partial(train, context, target, episodes, seed)))
    for source, target in ((s, t) for s in asked.source for t in asked.target):
        for shots, seed in ((n, seed) for n in asked.shots for seed in seeds):
            key = {"source": source, "target": target, "episodes": shots, "seed": seed}
            run = partial(use, context, source, target, shots, seed)
            found.append(Cell({**key, "source_episodes": asked.full, **terms}, run))
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
    found = _greedy(context.problem(f"{target}:{context.settings.on}"), policy)
    return found | {"greedy_s": found["makespan_s"]}


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
        dj.Budget(episodes=episodes),
        params=None if initial is None else initial.params,
    )
    if trained.interrupted:
        raise KeyboardInterrupt
    if initial is None:
        folder = _folder(context, target, episodes, seed)
        shutil.rmtree(folder, ignore_errors=True)
        checkpoints = Checkpoints(folder)
        checkpoints.save(trained.state, trained.policy.config, {})
        checkpoints.close()
    greedy = _greedy(problem, trained.policy)
    candidates = np.concatenate([trained.placements, [greedy["placement"]]])
    placement, schedule = best_placement(problem.graph, problem.costs, candidates)
    return {
        "makespan_s": dj.makespan_s(schedule),
        "greedy_s": greedy["makespan_s"],
        "evaluations_spent": int(trained.state.evaluations) + 1,
        "placement": placement.tolist(),
    }


def _greedy(problem: Problem, policy: dj.Policy) -> Record:
    inputs = make_policy_inputs(problem.graph, problem.costs)
    placement = policy_candidates(inputs, policy, jax.random.key(0), 1)[0]
    schedule = dj.simulate_oracle(problem.graph, problem.costs, placement)
    return {"makespan_s": dj.makespan_s(schedule), "placement": placement.tolist()}


def _folder(
    context: Context[TransferSettings], workload: str, episodes: int, seed: int
) -> pathlib.Path:
    words = (*workload.split("/"), *context.settings.on.split(":"), episodes, seed)
    return context.folder / "policies" / "-".join(pathlib.Path(str(w)).stem for w in words)


def report(context: Context[TransferSettings], records: list[Record]) -> Page:
    """Returns the best makespans and the policies' greedy ones, the paper's beside them."""
    asked = context.settings
    best, greedy = [], []

    def row(value: str, source: str | None, target: str) -> list[str]:
        """Spreads after each number of shots, and of training from scratch in full."""
        wanted = [*((source, target, n) for n in asked.shots), (None, target, asked.full)]
        names = ("source", "target", "episodes")
        return [
            grid.format_spread(
                np.array([1e3 * r[value] for r in records if tuple(map(r.get, names)) == one])
            )
            for one in wanted
        ]

    for target in asked.target:
        listed = {r["method"]: f"{1e3 * r['makespan_s']:.1f}" for r in records
                  if r.get("problem") == f"{target}:{asked.on}"}  # fmt: skip
        for source in asked.source:
            pair = f"{source} to {target}"
            names = [listed.get(method, "-") for method in LISTED]
            best.append([pair, "ours", *row("makespan_s", source, target), *names])
            best.append([pair, "without transfer", *row("makespan_s", None, target), "-", "-"])
            if asked.shots == SHOTS and (source, target) in PAPER_MS:
                figures = [f"{ms:.1f}" for ms in PAPER_MS[source, target]]
                best.append([pair, "paper", *figures, "-", "-"])
            greedy.append([pair, *row("greedy_s", source, target)])
    heads = (*(f"{shots:,} episodes" for shots in asked.shots), f"full, {asked.full:,}")
    return Page(
        f"Makespans in ms on {asked.on}, simulated (the paper's: measured on its machine): the "
        "best placement met in training and the policy's greedy one, whichever is shorter; "
        "after 0 episodes the greedy one. Mean and deviation over seeds.\n\n"
        f"{format_table(('transfer', 'whose', *heads, *LISTED), best)}\n"
        "The policies' greedy placements at the end, ms:\n\n"
        f"{format_table(('transfer', *heads), greedy)}"
    )


QUICK = {
    "seeds": 1, "shots": (0, 256), "full": 512, "target": ("llama_block",),
}  # fmt: skip

STUDY = Study("transfer", TransferSettings(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
