"""Layered graphs of bounded width, for the growth of costs with the number of tasks."""

import numpy as np

import doppler_jax as dj

WIDTH = 16
"""Tasks of a layer unless said otherwise."""


def layered_problem(
    num_tasks: int, num_devices: int, width: int = WIDTH
) -> tuple[dj.TaskGraph, dj.Costs]:
    """Returns a graph of layers of `width` tasks, on equal devices.

    A task reads its counterpart in the layer above and up to two others there, so that
    `width` chains hold all tasks. Run times and delays are lognormal, of equal means.
    """
    rng = np.random.default_rng(num_tasks)
    edges = []
    for v in range(width, num_tasks):
        above = v - v % width - width
        others = above + rng.choice(width, int(rng.integers(0, 3)), replace=False)
        for u in sorted({v - width, *others.tolist()}):
            edges.append((u, v, float(rng.lognormal())))
    return dj.from_edge_delays(rng.lognormal(size=num_tasks), edges, num_devices)
