"""How long zero-shot placement takes on one core: the child process of `zero_shot`.

`python -m experiments.zero_shot_times CORE POLICY GRAPH` prints JSON: for the graph of the
file and for a layered one of 10,000 tasks, on 4 devices, the seconds of making the features
and of the two greedy placements, compiled beforehand. Medians.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

REPEATS = 9
LARGE = 10_000


def main(core: int, policy_path: str, graph_path: str) -> None:
    """Measures and prints; the core is set before JAX starts its threads."""
    os.sched_setaffinity(0, [core])
    import jax

    import doppler_jax as dj
    from doppler_jax.graphs.families import make_family
    from doppler_jax.learners.doppler import policy_candidates
    from doppler_jax.policies.features import make_policy_inputs

    policy = dj.load_policy(policy_path)
    graphs = {
        "published": (dj.load_graph(graph_path), REPEATS),
        "large": (make_family("layered", np.random.default_rng(0), LARGE), 3),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (graph, repeats) in graphs.items():
        costs = dj.reference_costs(graph, num_devices=4)
        problem = make_policy_inputs(graph, costs)
        greedy = partial(policy_candidates, problem, policy, jax.random.key(0), 2)
        began = time.perf_counter()
        greedy()
        found[name] = {
            "tasks": graph.num_tasks,
            "first_s": time.perf_counter() - began,
            "features_s": _median_s(repeats, partial(make_policy_inputs, graph, costs)),
            "greedy_s": _median_s(repeats, greedy),
        }
    print(json.dumps(found))


def _median_s(repeats: int, call: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
