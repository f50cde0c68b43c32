"""Does a policy of one problem serve another? `python -m experiments.transfer`.

A policy is trained by stages 1 and 2 on a source, then used on a target: as it is, and after
stage 1 and some episodes of stage 2 there. Beside it stand stages 1 and 2 from scratch on the
target, in full and with as few episodes, and the paper's figures. All train with one
configuration: stage 2 as it is, local search beside the policy included.

Targets are other workloads on the same cluster, and the same workload on another topology: of
4 equal devices to 8 in two NVLink islands. There reads of tensors stay inside a device, inside
an island, or go across; shares are of bytes.
"""

import dataclasses
import pathlib
import shutil
from functools import partial

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.graphs.build import task_edges
from doppler_jax.learners.doppler import Doppler, policy_candidates
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.reports.pictures import plot_placements
from doppler_jax.reports.tables import format_table
from doppler_jax.training.checkpoint import Checkpoints
from doppler_jax.training.sim_rl import SimConfig
from experiments import grid
from experiments.catalogue import WORKLOADS, Problem
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.learning import learn
from experiments.methods import Spend, method_cells
from experiments.tables import by, format_spread, table

SHOTS = (0, 2000, 4000)
"""Episodes that the paper fine-tunes for."""

PAPER_MS = {
    ("ffnn", "llama_block"): (251.0, 165.3, 159.4, 160.3),
    ("chainmm", "llama_block"): (242.3, 184.9, 174.0, 160.3),
    ("ffnn", "llama_layer"): (206.1, 158.2, 155.8, 150.6),
    ("chainmm", "llama_layer"): (338.2, 164.4, 156.4, 150.6),
}
"""The paper's makespans on 4 GPUs by (source, target): after `SHOTS` episodes, and in full."""

PAPER_INSIDE = {0: 0.827, 2000: 0.947}
"""The paper's: of the traffic on 8 devices in two islands, what stays inside an island, by
episodes there."""

LISTED = ("critical_path", "heft")

EQUAL_ON, ISLANDS_ON = "p100x4:uniform4", "v100x8:uniform4"
"""Clusters and cut of what goes from 4 equal devices to 8 in two islands."""


@dataclasses.dataclass(frozen=True)
class TransferSettings(Settings):
    """What to train on, and what to use it for."""

    source: tuple[str, ...] = ("ffnn", "chainmm")
    """Workloads to train on."""
    target: tuple[str, ...] = ("llama_block", "llama_layer")
    """Workloads to place then; each source serves each target."""
    on: str = "p100x4:uniform"
    """Cluster and cut of these; the planner's cuts leave the sources little to learn."""
    islands: tuple[str, ...] = WORKLOADS
    """Workloads that are learned on 4 equal devices and placed on 8 in two islands."""
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

    def pairs(self) -> list[tuple[str, str]]:
        """Returns (source, target), names of problems."""
        return [
            *((f"{s}:{self.on}", f"{t}:{self.on}") for s in self.source for t in self.target),
            *((f"{name}:{EQUAL_ON}", f"{name}:{ISLANDS_ON}") for name in self.islands),
        ]


def cells(context: Context[TransferSettings]) -> list[Cell]:
    """Returns the cells: list schedulers, training from scratch, and what follows from it."""
    asked = context.settings
    fewest = min([asked.full, *(shots for shots in asked.shots if shots)])
    if not asked.shots or min(asked.shots) < 0 or fewest < asked.training.batch:
        raise ValueError(
            f"--shots {asked.shots} and --full {asked.full}: expected 0 or at least a batch of "
            f"{asked.training.batch} episodes"
        )
    for name in (*asked.source, *asked.target, *asked.islands):
        grid.check_names("workloads", [name.split("/")[0]], dj.list_workloads())
    terms = context.key("source", "target", "islands", "on", "shots", "full", "seeds")
    sources, targets = (dict.fromkeys(pair[k] for pair in asked.pairs()) for k in (0, 1))
    found = method_cells(context, list(targets), LISTED, [Spend()])
    alone = [(name, asked.full) for name in sources]
    alone += [(name, n) for name in targets for n in sorted({*asked.shots, asked.full} - {0})]
    for target, episodes in dict.fromkeys(alone):
        for seed in range(asked.seeds):
            key = {"target": target, "episodes": episodes, "seed": seed, **terms}
            found.append(Cell(key, partial(train, context, target, episodes, seed)))
    for source, target in asked.pairs():
        for shots, seed in ((n, seed) for n in asked.shots for seed in range(asked.seeds)):
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
    problem = context.problem(target)
    inputs = make_policy_inputs(problem.graph, problem.costs)
    return _greedy(problem, policy_candidates(inputs, policy, jax.random.key(0), 1)[0])


def train(
    context: Context[TransferSettings],
    target: str,
    episodes: int,
    seed: int,
    initial: dj.Policy | None = None,
) -> Record:
    """Returns the best placement of training and of its greedy policy, which is kept."""
    asked, problem = context.settings, context.problem(target)
    learned = learn(
        Doppler(policy=asked.policy, simulate=asked.training),
        problem.graph,
        problem.costs,
        dj.Budget(episodes=episodes),
        jax.random.key(seed),
        samples=1,
        params=None if initial is None else initial.params,
    )
    if initial is None:
        folder = _folder(context, target, episodes, seed)
        shutil.rmtree(folder, ignore_errors=True)
        checkpoints = Checkpoints(folder)
        checkpoints.save(learned.trained.state, learned.policy.config, {})
        checkpoints.close()
    best = {"makespan_s": learned.makespan_s, "placement": learned.placement.tolist()}
    spent = {"evaluations_spent": int(learned.trained.state.evaluations) + 1}
    return _greedy(problem, learned.drawn[0]) | best | spent


def _greedy(problem: Problem, placement: np.ndarray) -> Record:
    """Returns the record of a policy's greedy placement."""
    seconds = dj.makespan_s(dj.simulate_oracle(problem.graph, problem.costs, placement))
    return {"makespan_s": seconds, "greedy_s": seconds, "placement": placement.tolist()}


def _folder(
    context: Context[TransferSettings], problem: str, episodes: int, seed: int
) -> pathlib.Path:
    """Returns where a policy is kept."""
    words = (*problem.replace("/", ":").split(":"), episodes, seed)
    return context.folder / "policies" / "-".join(pathlib.Path(str(w)).stem for w in words)


def islands(cluster: dj.Cluster) -> np.ndarray:
    """Returns the island of each device, `[D]`: its first device over the fastest links."""
    rate = np.asarray(cluster.link_bytes_per_s)
    fastest = rate[~np.eye(len(rate), dtype=bool)].max(initial=0.0)
    return (rate >= fastest).argmax(axis=1)


def traffic_shares(
    graph: dj.TaskGraph, cluster: dj.Cluster, placement: np.ndarray
) -> np.ndarray:
    """Returns the shares `[3]` of the bytes read: inside a device, inside an island, across.

    Every read of a tensor by a task counts; where nothing is read all are 0.
    """
    senders, readers = task_edges(graph)
    read_bytes = np.asarray(graph.tensor_bytes, np.float64)[graph.edge_tensor]
    source, destination = placement[senders], placement[readers]
    island = islands(cluster)
    kind = (source != destination).astype(np.int64)
    kind += island[source] != island[destination]
    return np.bincount(kind, read_bytes, 3) / max(float(read_bytes.sum()), 1e-300)


def report(context: Context[TransferSettings], records: list[Record]) -> Page:
    """Returns the best makespans and the policies' greedy ones, and what crosses islands."""
    asked, best, greedy = context.settings, [], []
    runs, listed = by(records, "source", "target", "episodes"), by(records, "problem", "method")

    def row(value: str, source: str | None, target: str) -> list[str]:
        """Spreads after each number of shots, and of training from scratch in full."""
        wanted = [*((source, target, n) for n in asked.shots), (None, target, asked.full)]
        return [_spread_ms(runs.get(one, []), value) for one in wanted]

    for source, target in asked.pairs():
        ends = [name.partition(":") for name in (source, target)]
        pair = " to ".join(name if ends[0][2] == ends[1][2] else f"{name}:{on.split(':')[0]}"
                           for name, _, on in ends)  # fmt: skip
        names = [_spread_ms(listed.get((target, m), []), "makespan_s") for m in LISTED]
        best.append([pair, "ours", *row("makespan_s", source, target), *names])
        best.append([pair, "without transfer", *row("makespan_s", None, target), "-", "-"])
        paper = PAPER_MS.get((ends[0][0], ends[1][0]))
        if asked.shots == SHOTS and paper:
            best.append([pair, "paper", *(f"{ms:.1f}" for ms in paper), "-", "-"])
        greedy.append([pair, *row("greedy_s", source, target)])
    heads = (*(f"{shots:,} episodes" for shots in asked.shots), f"full, {asked.full:,}")
    text = (
        "Simulated makespans in ms (the paper's: measured on its machine): the best placement "
        "met in training and the policy's greedy one, whichever is shorter; after 0 episodes "
        "the greedy one. Mean and deviation over seeds.\n\n"
        f"{format_table(('transfer', 'whose', *heads, *LISTED), best)}\n"
        "The policies' greedy placements at the end, ms:\n\n"
        f"{format_table(('transfer', *heads), greedy)}"
    )
    rows, panels = [], []
    for name in asked.islands:
        problem = context.problem(f"{name}:{ISLANDS_ON}")
        placed: dict[str, tuple[list[Record], float | None]] = {}
        placed["critical path"] = listed.get((problem.name, LISTED[0]), []), None
        for shots in asked.shots:
            found = runs.get((f"{name}:{EQUAL_ON}", problem.name, shots), [])
            placed[f"after {shots:,} episodes"] = found, PAPER_INSIDE.get(shots)
        for what, (found, inside) in placed.items():
            if found:
                row_of = {"workload": name, "placement": what}
                rows.append(row_of | _traffic(problem, found, inside))
                panels.append((f"{name}, {what}", problem.graph, found[0]["placement"]))
    if not rows:
        return Page(text)
    draw = partial(plot_placements, panels=panels, num_devices=8)
    text += (
        f"\nOn 8 devices in two islands, reads of tensors by where they go:\n\n{table(rows)}"
    )
    return Page(text, {"islands.png": draw})


def _spread_ms(records: list[Record], value: str) -> str:
    return format_spread(np.array([1e3 * record[value] for record in records]))


def _traffic(problem: Problem, records: list[Record], paper: float | None) -> Record:
    """Returns the columns of placements: makespan, and means of shares of what is read."""
    assert problem.cluster is not None
    placements = [np.array(record["placement"]) for record in records]
    each = [traffic_shares(problem.graph, problem.cluster, p) for p in placements]
    device, island, across = np.mean(each, axis=0)
    inside = f"{device + island:.1%}" + (f" ({paper:.1%})" if paper else "")
    return {
        "makespan (ms)": _spread_ms(records, "makespan_s"),
        "inside a device": f"{device:.1%}",
        "inside an island": f"{island:.1%}",
        "across": f"{across:.1%}",
        "not across (paper's)": inside,
    }


QUICK = {
    "seeds": 1, "shots": (0, 256), "full": 512, "target": ("llama_block",), "islands": (),
}  # fmt: skip

STUDY = Study("transfer", TransferSettings(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
