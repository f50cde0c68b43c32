"""Small problems, and what brute force says about them."""

import itertools

import numpy as np

from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.simulate import simulate
from tests.generators import random_problem

DEVICES = 3


def pinned_problem(seed, num_tasks):
    """Unequal devices, of which all but one per task may be unable to run it."""
    rng = np.random.default_rng(seed)
    graph, costs = random_problem(rng, num_tasks, DEVICES)
    compute_s = costs.compute_s * np.array([1.0, 2.0, 0.5])
    able = rng.random((num_tasks, DEVICES)) < 0.6
    able[np.arange(num_tasks), rng.integers(0, DEVICES, num_tasks)] = True
    return graph, costs.replace(compute_s=np.where(able, compute_s, np.inf))


def able_placements(costs):
    """All placements `[B, N]` that the devices can run."""
    choices = [np.flatnonzero(np.isfinite(row)) for row in costs.compute_s]
    return np.array(list(itertools.product(*choices)))


def optimum_s(graph, costs):
    """Seconds of the best placement under `fifo`, by brute force."""
    return simulate(graph, costs, able_placements(costs)).makespan_s.min()


def seconds(graph, costs, placements, **options):
    """The oracle's makespans `[B]`."""
    return np.array(
        [makespan_s(simulate_oracle(graph, costs, p, **options)) for p in placements]
    )
