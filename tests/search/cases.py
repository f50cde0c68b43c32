"""Small problems of one padded size, and what brute force says about them."""

import itertools

import numpy as np

from doppler_jax.graphs import padded as padded_module
from doppler_jax.simulator.simulate import simulate
from tests.generators import random_problem

DEVICES = 3
SIZE = 16
"""Padded number of tasks, and every other padded size but that of edges."""


def one_size(patch):
    """Makes every padded of at most 16 tasks the same size: one compilation for all."""
    sizes = {16: 256}  # edges
    patch.setattr(
        padded_module, "bucket_size", lambda size, smallest: sizes.get(smallest, SIZE)
    )


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
    makespans = simulate(graph, costs, able_placements(costs)).makespan_s
    return makespans.min()
