"""The cells of `experiments.topology`: one policy taken from one cluster to another."""

from functools import partial
from typing import Any

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.budget import Budget
from doppler_jax.costs.digests import problem_digest
from doppler_jax.graphs.build import task_edges
from doppler_jax.learners.doppler import Doppler, policy_candidates
from doppler_jax.learners.learner import train_learner
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.simulator.finalists import best_placement
from experiments.cells import Cells
from experiments.problems import Chosen

PLACERS = ("critical path", "zero-shot", "fine-tuned")


def topology_cell(
    cells: Cells,
    source: Chosen,
    target: Chosen,
    *,
    seed: int,
    evaluations: int,
    episodes: int,
    samples: int,
) -> dict[str, Any]:
    """Returns placements on the target by `PLACERS`, their makespans and traffic.

    Args:
      cells: where it is kept.
      source: what the policy learns on.
      target: the same graph on the cluster that it is used on.
      seed: of training and sampling.
      evaluations: placements that learning on the source simulates.
      episodes: of fine-tuning on the target.
      samples: drawn from the policy, of which the best counts.
    """

    def make() -> dict[str, Any]:
        learn_key, tune_key, *draw_keys = jax.random.split(jax.random.key(seed), 4)
        learned = train_learner(
            Doppler(),
            make_policy_inputs(source.graph, source.costs),
            learn_key,
            Budget(evaluations=evaluations),
        ).policy
        problem = make_policy_inputs(target.graph, target.costs)
        tuned = train_learner(
            Doppler(warm_up=0),
            problem,
            tune_key,
            Budget(episodes=episodes),
            params=learned.params,
        )
        draw = partial(policy_candidates, problem, count=samples)
        candidates = {
            "critical path": dj.place(
                target.graph, target.costs, method="critical_path"
            ).placement[None],
            "zero-shot": draw(learned, key=draw_keys[0]),
            "fine-tuned": np.concatenate(
                [tuned.placements, draw(tuned.policy, key=draw_keys[1])]
            ),
        }
        best = {
            placer: best_placement(target.graph, target.costs, found)
            for placer, found in candidates.items()
        }
        return {
            "placements": {placer: found[0].tolist() for placer, found in best.items()},
            "makespan_s": {placer: dj.makespan_s(found[1]) for placer, found in best.items()},
            "shares": {
                placer: traffic_shares(target.graph, target.cluster, found[0]).tolist()
                for placer, found in best.items()
            },
        }

    terms = {
        "source": problem_digest(source.graph, source.costs),
        "target": problem_digest(target.graph, target.costs),
        "evaluations": evaluations,
        "episodes": episodes,
        "samples": samples,
    }
    return cells.get(f"{source.name}-{target.name}-{seed}", terms, make)


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
