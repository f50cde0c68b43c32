"""Does a policy of one problem serve another? `python -m experiments.transfer`.

A policy is trained by stages 1 and 2 on a source, then used on a target: as it is, and after
stage 1 and some episodes of stage 2 there. Beside it stand stages 1 and 2 from scratch on the
target, in full and with as few episodes, and the paper's figures. All train with one
configuration: stage 2 as it is, local search beside the policy included.

Targets are other workloads on the same cluster, and the same workload on another topology: of 4
equal devices to 8 in two NVLink islands. There reads of tensors stay inside a device, inside an
island, or go across; shares are of bytes.

Makespans are simulated (the paper's: measured on its machine): the best placement met in
training and the policy's greedy one, whichever is shorter; after 0 episodes the greedy one.
Mean and deviation over seeds; * is the least of a row.
"""

import dataclasses
import pathlib
import re
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
from doppler_jax.training.sim_rl import SimConfig
from experiments import grid
from experiments.catalogue import WORKLOADS
from experiments.grid import Cell, Context, Page, Record, Settings, Study
from experiments.learning import learn
from experiments.methods import Spend, method_cells
from experiments.tables import means_table

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
class Asked(Settings):
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


def cells(context: Context[Asked]) -> list[Cell]:
    """Returns the cells: list schedulers, training from scratch, and what follows from it."""
    asked, pairs = context.settings, context.settings.pairs()
    fewest = min([asked.full, *(shots for shots in asked.shots if shots)])
    if not asked.shots or min(asked.shots) < 0 or fewest < asked.training.batch:
        raise ValueError(
            f"--shots {asked.shots} and --full {asked.full}: expected 0 or at least a batch of "
            f"{asked.training.batch} episodes"
        )
    for name in (*asked.source, *asked.target, *asked.islands):
        grid.check_names("workloads", [name.split("/")[0]], dj.workloads.list_workloads())
    sources, targets = ([*dict.fromkeys(pair[k] for pair in pairs)] for k in (0, 1))
    found = [
        cell.then(partial(with_shares, context, cell.key["problem"]), shares=True)
        for cell in method_cells(context, targets, LISTED, [Spend()])
    ]
    runs: list[tuple[str | None, str, int]] = [(None, name, asked.full) for name in sources]
    counts = sorted({*asked.shots, asked.full} - {0})
    runs += [(None, name, n) for name in targets for n in counts]
    runs += [(source, target, n) for source, target in pairs for n in asked.shots]
    terms = context.key("source", "target", "islands", "on", "shots", "seeds")
    for source, target, episodes in dict.fromkeys(runs):
        for seed in range(asked.seeds):
            key = {"source": source, "target": target, "episodes": episodes, "seed": seed}
            run = partial(use, context, source, target, episodes, seed)
            found.append(Cell(key | terms, run).then(partial(with_shares, context, target)))
    return found


def use(
    context: Context[Asked], source: str | None, target: str, episodes: int, seed: int
) -> Record:
    """Returns what the policy of a source makes of a target after so many episodes there.

    Stage 1 comes before them, as from scratch: it takes no episodes. Without any it is the
    policy's greedy placement. Without a source it is trained from scratch, and kept.
    """
    asked, problem, initial = context.settings, context.problem(target), None
    graph, costs = problem.graph, problem.costs
    if source is not None:
        initial = dj.load_policy(_folder(context, source, asked.full, seed))
    if initial is not None and not episodes:
        inputs = make_policy_inputs(graph, costs)
        greedy = best = policy_candidates(inputs, initial, jax.random.key(0), 1)[0]
    else:
        learner = Doppler(policy=asked.policy, simulate=asked.training)
        budget, params = dj.search.Budget(episodes=episodes), initial and initial.params
        key = jax.random.key(seed)
        trained, drawn, best = learn(
            learner, graph, costs, budget, key, samples=1, params=params
        )
        greedy = drawn[0]
    if source is None:
        folder = _folder(context, target, episodes, seed)
        shutil.rmtree(folder, ignore_errors=True)
        dj.policies.save_policy(folder, trained.policy)
    best_s, greedy_s = dj.simulate(graph, costs, np.stack([best, greedy])).makespan_s.tolist()
    return {"makespan_s": best_s, "greedy_s": greedy_s, "placement": best.tolist()}


def with_shares(context: Context[Asked], name: str, result: Record) -> Record:
    """Returns a result with the shares of bytes by where they are read."""
    problem = context.problem(name)
    assert problem.cluster is not None
    placement = np.array(result["placement"])
    shares = traffic_shares(problem.graph, problem.cluster, placement)
    return result | {"shares": shares.tolist()}


def _folder(context: Context[Asked], problem: str, episodes: int, seed: int) -> pathlib.Path:
    """Returns where a policy is kept."""
    return context.folder / "policies" / re.sub(r"\W+", "-", f"{problem}-{episodes}-{seed}")


def islands(cluster: dj.Cluster) -> np.ndarray:
    """Returns the island of each device, `[D]`: its first device over the fastest links."""
    rate = np.asarray(cluster.link_bytes_per_s)
    fastest = rate[~np.eye(len(rate), dtype=bool)].max(initial=0.0)
    return (rate >= fastest).argmax(axis=1)


def traffic_shares(
    graph: dj.graphs.TaskGraph, cluster: dj.Cluster, placement: np.ndarray
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


def report(context: Context[Asked], records: list[Record]) -> Page:
    """Returns the best makespans and the policies' greedy ones, and what crosses islands."""
    asked, runs, where, panels = context.settings, [], [], []
    ordered = sorted(records, key=lambda r: r.get("episodes", -1))  # list schedulers first
    for source, target in asked.pairs():
        (name, _, on), (other, _, there) = (end.partition(":") for end in (source, target))
        pair = f"{name} to {other}" if on == there else f"{name} to {there.split(':')[0]}"
        mine = [
            r | {"transfer": pair, "after": r.get("method") or _after(r["episodes"])}
            | {"whose": "ours" if r.get("source") else "without transfer"}
            for r in ordered
            if r.get("target", r.get("problem")) == target
            and r.get("source") in (None, source)
        ]  # fmt: skip
        runs += mine
        if on == there and asked.shots == SHOTS:
            paper = zip((*SHOTS, asked.full), PAPER_MS.get((name, other), ()), strict=False)
            row = {"transfer": pair, "whose": "paper"}
            runs += [row | {"after": _after(n), "makespan_s": 1e-3 * ms} for n, ms in paper]
        if on == there:
            continue
        for r in (r for r in mine if r.get("source") or r.get("method") == LISTED[0]):
            kinds = ("inside a device", "inside an island", "across")
            shares = dict(zip(kinds, r["shares"], strict=True))
            shares["not across, the paper's"] = PAPER_INSIDE.get(r.get("episodes", -1))
            where += [r | {"where": w, "share": s} for w, s in shares.items() if s is not None]
            if not r["seed"]:
                graph = context.problem(target).graph
                panels.append((f"{pair}, {r['after']}", graph, r["placement"]))
    texts = {"Makespans (ms)": means_table(runs, ("transfer", "whose"), "after", scale=1e3)}
    greedy = [r for r in runs if "greedy_s" in r and r["whose"] == "ours"]
    heading = "The policies' greedy placements at the end (ms)"
    texts[heading] = means_table(greedy, ("transfer",), "after", "greedy_s", 1e3)
    heading = "Reads of tensors on 8 devices in two islands, by where they go (%)"
    texts[heading] = means_table(where, ("transfer", "after"), "where", "share", 100)
    draw = partial(plot_placements, panels=panels, num_devices=8)
    return Page(texts, {"islands.png": draw} if panels else {})


def _after(episodes: int) -> str:
    return f"{episodes:,} episodes"


QUICK = {"seeds": 1, "shots": (0, 256), "full": 512, "target": ("llama_block",), "islands": ()}

STUDY = Study("transfer", Asked(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
