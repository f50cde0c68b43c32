"""Every method by its name: legal placements, decided by the key, and clear refusals."""

import inspect

import jax
import numpy as np
import pytest

from doppler_jax.graphs.build import make_graph
from doppler_jax.learners.registry import LEARNERS
from doppler_jax.methods import DEFAULT_METHOD, list_methods
from doppler_jax.methods.registry import LEARNED
from doppler_jax.placing import place
from tests.generators import random_problem
from tests.methods.cases import (
    BOUND,
    COMPILED,
    DEVICES,
    HERE,
    PROBLEMS,
    SEARCHES,
    assert_is_sound,
    budget,
    make,
)

# Training compiles long.
CELLS = [
    pytest.param(m, name, marks=[pytest.mark.slow] * ("doppler" in m))
    for m in HERE
    for name in PROBLEMS
]


@pytest.mark.parametrize(("method", "name"), CELLS)
def test_every_method_places_every_problem(method, name):
    graph, costs = make(name)
    fifo = place(graph, costs, method=method, queue="fifo", **budget(method))
    assert_is_sound(fifo, graph, costs)
    assert fifo.queue in {"fifo", "priority" if method == "exact" else "fifo"}
    placed = place(graph, costs, method=method, **budget(method))
    assert placed.queue == "in_order"
    assert placed.method == method
    if placed.proven:
        assert placed.evaluations <= BOUND
    elif method == "random":
        assert placed.evaluations == BOUND
    elif method in SEARCHES or method == "doppler":
        assert BOUND / 2 < placed.evaluations <= BOUND
    else:
        assert placed.evaluations == 1
    assert placed.seconds > 0
    assert_is_sound(placed, graph, costs)


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[pytest.mark.slow] * (m in COMPILED)) for m in HERE],
)
def test_one_device_has_one_placement(method):
    graph, costs = random_problem(np.random.default_rng(0), 12, 1)
    placed = place(graph, costs, method=method, **budget(method))
    assert_is_sound(placed, graph, costs)
    np.testing.assert_array_equal(placed.placement, np.zeros(12))


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[pytest.mark.slow] * ("doppler" in m)) for m in HERE]
)
def test_the_key_decides(method):
    graph, costs = make("unequal")
    one, same = (
        place(graph, costs, method=method, key=jax.random.key(5), **budget(method))
        for _ in range(2)
    )
    np.testing.assert_array_equal(one.placement, same.placement)
    np.testing.assert_array_equal(one.priority, same.priority)
    assert one.makespan_s == same.makespan_s


@pytest.mark.parametrize("method", list_methods())
def test_bad_problems_are_refused(method):
    graph, costs = random_problem(np.random.default_rng(2), 4, DEVICES)
    chain = make_graph(
        flops=[1, 1], tensor_producer=[0, 1], tensor_bytes=[0, 0], edge_tensor=[0],
        edge_reader=[1],
    )  # fmt: skip
    cyclic = chain.replace(edge_tensor=np.array([0, 1]), edge_reader=np.array([1, 0]))
    with pytest.raises(ValueError, match="tasks form a cycle: 0 -> 1 -> 0"):
        place(cyclic, costs, method=method)
    for bad, message in ((np.nan, "nan"), (-1.0, "-1.0")):
        compute_s = costs.compute_s.copy()
        compute_s[2, 1] = bad
        with pytest.raises(ValueError, match=rf"compute_s\[2, 1\] is {message}"):
            place(graph, costs.replace(compute_s=compute_s), method=method)
    with pytest.raises(ValueError, match=r"compute_s has shape \(4, 3\); expected \(2, 3\)"):
        place(chain, costs, method=method)


@pytest.mark.parametrize("method", list_methods())
def test_what_no_placement_fits_is_refused_before_searching(method):
    graph, costs = make("unequal")
    small = costs.replace(capacity_bytes=np.full(DEVICES, 1e-3))
    with pytest.raises(ValueError, match=r"task \d+ needs .* largest device that can run it"):
        place(graph, small, method=method)


def test_methods_are_sorted_names_and_doppler_with_search_is_the_default():
    assert list_methods() == sorted(set(list_methods()))
    default = inspect.signature(place).parameters["method"].default
    assert default == DEFAULT_METHOD == "doppler+search"
    assert default in list_methods()
    assert sorted(LEARNED) == sorted(LEARNERS)
