"""Stage 3 on measurements that nobody can repeat: arguments GRAPH FOLDER UPDATES MODE.

MODE is `measure`, or `replay`, where all must be in the log.
"""

import os
import pathlib
import sys
import time

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig, init_params
from doppler_jax.problems import choose_graph
from doppler_jax.training.paired import Paired
from doppler_jax.training.stages import run_stage3
from doppler_jax.training.system_rl import SystemConfig


def measure(candidate, incumbent, rounds):
    time.sleep(0.005)
    graph, costs = measure.problem
    times = 1.0 + np.frombuffer(os.urandom(8 * rounds), np.uint32) / 2**32
    pairs = map(tuple, times.reshape(2, rounds).tolist())
    return Paired(*pairs, trace=dj.simulate_oracle(graph, costs, candidate))


def refuse(*args):
    raise AssertionError("the log must hold every measurement")


def main(graph, folder, num_updates, mode):
    chosen = choose_graph(pathlib.Path(graph), dj.make_cluster("reference_x4"), "reference_x4")
    config = PolicyConfig(width=8, rounds=1)
    problem = make_policy_inputs(chosen.graph, chosen.costs)
    measure.problem = chosen.graph, chosen.costs
    policy = dj.Policy(params=init_params(jax.random.key(1), config, problem), config=config)
    sizes = {"batch": 4, "proposals": 2, "pairs": 1, "num_elites": 3}
    run_stage3(
        chosen,
        pathlib.Path(folder),
        policy,
        np.zeros(chosen.graph.num_tasks, int),
        {"measure": measure, "replay": refuse}[mode],
        seed=0,
        num_updates=int(num_updates),
        config=SystemConfig(proposal_evaluations=256, **sizes),
        save_every_s=0.2,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
