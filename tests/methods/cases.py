"""Problems for methods, and what any placement must be."""

import dataclasses

import numpy as np

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.graphs.bounds import lower_bound_s
from doppler_jax.learners.registry import LEARNERS
from doppler_jax.methods import PolicySearch, list_methods
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.search.lns import LNS
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.validate import validate
from tests.generators import random_problem

DEVICES = 3
BOUND = 24
"""Evaluations that the searching methods may spend here: one compilation for all."""

LISTED = ("critical_path", "cpop", "etf", "heft", "peft")
SEARCHES = ("annealing", "doppler+search", "lns")
COMPILED = (*SEARCHES, "doppler", "random")

ELSEWHERE = set(LEARNERS) - {"doppler"}
"""Methods whose runs are tested in tests/learners: each compiles long."""

HERE = [method for method in list_methods() if method not in ELSEWHERE]


SMALL = PolicyConfig(width=8, rounds=1)


def pinned_problem(rng, num_tasks):
    """Unequal devices, of which all but the first cannot run many of the tasks."""
    graph, costs = random_problem(rng, num_tasks, DEVICES)
    compute_s = costs.compute_s * np.array([4.0, 1.0, 0.25])
    compute_s[:, 1:][rng.random((num_tasks, DEVICES - 1)) < 0.6] = np.inf
    return graph, costs.replace(compute_s=compute_s)


PROBLEMS = {
    "unequal": lambda rng: random_problem(rng, 12, DEVICES),
    "ties and zeros": lambda rng: random_problem(rng, 12, DEVICES, dyadic=True),
    "pinned": lambda rng: pinned_problem(rng, 12),
    "one task": lambda rng: random_problem(rng, 1, DEVICES),
    "no task": lambda rng: random_problem(rng, 0, DEVICES),
}


def make(name):
    return PROBLEMS[name](np.random.default_rng(sorted(PROBLEMS).index(name)))


def from_samples(policy):
    """The default method with few samples of a policy, in place of the one that ships."""
    return PolicySearch(LNS(), samples=BOUND // 4, default_policy=lambda: policy)


def budget(method):
    """What a method may spend here; `exact` simulates nothing and proves these at once."""
    return {"budget_s": 30.0} if method == "exact" else {"max_evaluations": BOUND}


def assert_is_sound(placed, graph, costs):
    """A legal plan, worth what the oracle says, whose ranks replay its schedule."""
    n = graph.num_tasks
    assert placed.placement.dtype == placed.priority.dtype == np.int64
    assert placed.placement.shape == (n,)
    assert np.isfinite(costs.compute_s[np.arange(n), placed.placement]).all()
    np.testing.assert_array_equal(np.sort(placed.priority), np.arange(n))
    replays = {"in_order"} if placed.queue == "in_order" else {"in_order", placed.queue}
    for queue in replays:
        ranks = {"priority": None if queue == "fifo" else placed.priority, "queue": queue}
        replayed = simulate_oracle(graph, costs, placed.placement, **ranks)
        np.testing.assert_array_equal(replayed.start_s, placed.schedule.start_s)
        validate(graph, placed.schedule, costs, **ranks)
    assert placed.makespan_s == placed.objective_s == makespan_s(placed.schedule)
    assert lower_bound_s(graph, costs) <= placed.lower_bound_s <= placed.makespan_s * (1 + 1e-9)
    curve = placed.curve
    assert curve.makespan_s[-1] == placed.objective_s
    assert (np.diff(curve.makespan_s) < 0).all()
    assert (np.diff(curve.evaluations) >= 0).all()
    assert (np.diff(curve.seconds) >= 0).all()
    assert curve.evaluations[-1] == placed.evaluations
    assert not placed.interrupted


def tight(graph, costs, share):
    """The costs with each device's memory a share of what critical path uses of it."""
    schedule = simulate_oracle(graph, costs, critical_path(graph, costs))
    peak = peak_memory_bytes(graph, costs, schedule)
    return dataclasses.replace(costs, capacity_bytes=share * peak.max() * np.ones(DEVICES))
