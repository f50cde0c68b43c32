"""Where tensors go on another topology: `python -m experiments.topology`.

A policy learns on 4 equal devices and then places the same graphs on 8 devices in two NVLink
islands, as it is (zero-shot) and after 2,000 episodes there. Reads of tensors stay inside a
device, inside an island, or go across; shares are of bytes.
"""

import dataclasses
from functools import partial

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.graphs.build import task_edges
from doppler_jax.learners.doppler import Doppler, policy_candidates
from doppler_jax.learners.learner import train_learner
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.reports.pictures import plot_placements
from doppler_jax.simulator.finalists import best_placement
from experiments import grid
from experiments.catalogue import WORKLOADS
from experiments.grid import Cell, Context, Page, Record, Settings, Study

PAPER_INSIDE = {"zero-shot": 0.827, "fine-tuned": 0.947}
"""The paper's: of the traffic on 8 devices in two islands, what stays inside an island."""

CUT = "uniform4"
"""Of all graphs, on either cluster."""


@dataclasses.dataclass(frozen=True)
class TopologySettings(Settings):
    """What to compare."""

    workloads: tuple[str, ...] = WORKLOADS
    source: str = "p100x4"
    """Cluster that the policy learns on."""
    target: str = "v100x8"
    """Cluster in islands that it is used on."""
    evaluations: int = 200_000
    """Placements that learning on the source simulates."""
    episodes: int = 2000
    """Of fine-tuning on the target."""
    samples: int = 256
    """Placements drawn from a policy, of which the best counts."""
    seeds: int = 5


def cells(context: Context[TopologySettings]) -> list[Cell]:
    """Returns a cell per workload and seed."""
    asked = context.settings
    grid.check_names(
        "--workloads", [w.split("/")[0] for w in asked.workloads], dj.list_workloads()
    )
    key = context.key("workloads", "seeds")
    return [
        Cell({"workload": name, "seed": seed, **key}, partial(place, context, name, seed))
        for name in asked.workloads
        for seed in range(asked.seeds)
    ]


def place(context: Context[TopologySettings], workload: str, seed: int) -> Record:
    """Returns placements on the target by who placed, their makespans and traffic."""
    asked = context.settings
    source = context.problem(f"{workload}:{asked.source}:{CUT}")
    target = context.problem(f"{workload}:{asked.target}:{CUT}")
    graph, costs = target.graph, target.costs
    learn_key, tune_key, *draw_keys = jax.random.split(jax.random.key(seed), 4)
    learned = train_learner(
        Doppler(),
        make_policy_inputs(source.graph, source.costs),
        learn_key,
        dj.Budget(evaluations=asked.evaluations),
    ).policy
    inputs = make_policy_inputs(graph, costs)
    tuned = train_learner(
        Doppler(warm_up=0),
        inputs,
        tune_key,
        dj.Budget(episodes=asked.episodes),
        params=learned.params,
    )
    draw = partial(policy_candidates, inputs, count=asked.samples)
    listed = dj.place(graph, costs, method="critical_path").placement
    candidates = {
        "critical path": listed[None],
        "zero-shot": draw(learned, key=draw_keys[0]),
        "fine-tuned": np.concatenate([tuned.placements, draw(tuned.policy, key=draw_keys[1])]),
    }
    assert target.cluster is not None
    by_placer = {}
    for placer, found in candidates.items():
        placement, schedule = best_placement(graph, costs, found)
        by_placer[placer] = {
            "makespan_s": dj.makespan_s(schedule),
            "shares": traffic_shares(graph, target.cluster, placement).tolist(),
            "placement": placement.tolist(),
        }
    return {"by_placer": by_placer}


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


def report(context: Context[TopologySettings], records: list[Record]) -> Page:
    """Returns means over the seeds, a row per workload and placer, and placements drawn."""
    asked, rows, panels = context.settings, [], []
    for workload in dict.fromkeys(r["workload"] for r in records):
        runs = [r["by_placer"] for r in records if r["workload"] == workload]
        graph = context.problem(f"{workload}:{asked.target}:{CUT}").graph
        for placer in runs[0]:
            makespan_ms = np.array([1e3 * run[placer]["makespan_s"] for run in runs])
            shares = np.array([run[placer]["shares"] for run in runs]).mean(axis=0)
            row = {"workload": workload, "placement": placer}
            row |= {"makespan (ms)": grid.format_spread(makespan_ms)}
            where = ("inside a device", "inside an island", "across")
            row |= {w: f"{share:.1%}" for w, share in zip(where, shares, strict=True)}
            paper = PAPER_INSIDE.get(placer)
            inside = f"{shares[:2].sum():.1%}" + (f" ({paper:.1%})" if paper else "")
            rows.append(row | {"not across (paper's)": inside})
            panels.append((f"{workload}, {placer}", graph, runs[0][placer]["placement"]))
    num_devices = dj.make_cluster(asked.target).num_devices
    return Page(
        f"Placements on {asked.target}, by a policy that learned on {asked.source}; reads of "
        f"tensors by where they go, in bytes.\n\n{grid.table(rows)}",
        {"topology.png": partial(plot_placements, panels=panels, num_devices=num_devices)},
    )


QUICK = {
    "workloads": WORKLOADS[:2], "evaluations": 20_000, "seeds": 1,
}  # fmt: skip

STUDY = Study("topology", TopologySettings(), cells, report, QUICK)

if __name__ == "__main__":
    STUDY.command()
