"""Graphs of the Standard Task Graph set: published optima that nothing may undercut."""

import numpy as np
import pytest

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.costs.build import from_edge_delays
from doppler_jax.graphs.formats import load_stg
from doppler_jax.graphs.levels import lower_bound_s
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.simulate import simulate
from experiments.catalogue import load_optima

DEVICES = (2, 4, 8, 16)


def candidates(rng, graph, costs):
    """Critical path's placement, 63 neighbours of it, and 64 random ones."""
    listed = critical_path(graph, costs)
    random = rng.integers(0, costs.num_devices, (127, graph.num_tasks))
    near = np.where(rng.random((63, graph.num_tasks)) < 0.05, random[:63], listed)
    return np.concatenate([listed[None], near, random[63:]])


@pytest.mark.parametrize("num_devices", DEVICES)
def test_nothing_is_simulated_below_the_published_optimum(neutral_graphs, num_devices):
    rng = np.random.default_rng(num_devices)
    folder = neutral_graphs / "stg50"
    optima = load_optima(folder / f"Case50_{num_devices}_OPT.csv")
    num_met = 0
    paths = sorted(folder.glob("*.stg"))
    assert len(paths) == 40
    for path in paths:
        graph, costs = from_edge_delays(*load_stg(path), num_devices=num_devices)
        assert graph.num_tasks == 52
        placements = candidates(rng, graph, costs)
        makespans = np.asarray(simulate(graph, costs, placements).makespan_s)
        # Task times are whole numbers, so that the simulator is exact.
        bound_s, best_s = optima[path.stem]
        assert makespans.min() >= bound_s, path.name
        assert 0 < lower_bound_s(graph, costs) <= best_s
        for b in (0, 1, 127):
            assert makespan_s(simulate_oracle(graph, costs, placements[b])) == makespans[b]
        num_met += makespans.min() == best_s
    assert num_met > 0  # otherwise the bounds were never near
