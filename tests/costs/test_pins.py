"""Pins and groups by the names of tasks, in `dj.pin` and `dj.place`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from tests.generators import random_problem
from tests.methods.cases import DEVICES, HERE, assert_is_sound, budget


def layers(x, weights):
    for i, w in enumerate(weights[:3]):
        with jax.named_scope(f"encoder_{i}"):
            x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return x @ weights[3]


W = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 4
PROGRAM = dj.partition(dj.trace(layers, jax.ShapeDtypeStruct((8, 16), jnp.float32), W), 2)
COSTS = dj.make_costs(PROGRAM, dj.make_cluster("p100x4"))


def tasks(start):
    return [v for v, name in enumerate(PROGRAM.names) if name.startswith(start)]


@pytest.mark.parametrize("method", ["doppler+search", "heft"])
def test_scopes_are_pinned_by_name(method):
    pins = {"encoder_*": 0, "head": 3}
    placed = dj.place(PROGRAM, COSTS, method=method, max_evaluations=500, pin=pins)
    assert set(placed.placement[tasks("encoder")]) == {0}
    assert set(placed.placement[tasks("head")]) == {3}
    costs = dj.pin(PROGRAM, COSTS, pins)
    same = dj.place(PROGRAM.graph, costs, method=method, max_evaluations=500)
    assert (same.problem, same.makespan_s) == (placed.problem, placed.makespan_s)


@pytest.mark.parametrize(
    ("pins", "name", "able"),
    [
        ({"encoder_1": [1, 2]}, "encoder_1", [1, 2]),
        ({"encoder_1": [1, 2], "*encoder*": (2, 3)}, "encoder_1", [2]),
        ({PROGRAM.names[0]: 1}, PROGRAM.names[0], [1]),  # brackets and all
        ({"*.dot_general[[]*": 2}, "head.dot_general", [2]),
    ],
)
def test_what_is_pinned_runs_nowhere_else(pins, name, able):
    costs = dj.pin(PROGRAM, COSTS, pins)
    v = tasks(name)[0]
    assert np.flatnonzero(np.isfinite(costs.compute_s[v])).tolist() == able
    finite = np.isfinite(costs.compute_s)
    np.testing.assert_array_equal(costs.compute_s[finite], COSTS.compute_s[finite])
    free = np.setdiff1d(np.arange(len(finite)), tasks("encoder") + tasks("head"))
    assert finite[free].all()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"pin": {"encoder": 0}}, r"pin names 'encoder', which fits no task; .* encoder_\d"),
        ({"together": ["*atn*"]}, r"together names '\*atn\*', which fits no task; .* head"),
        ({"pin": {3: 0}}, r"pin names 3; expected a pattern"),
        ({"together": [[]]}, r"together has an entry without patterns"),
        ({"together": [["head", 1]]}, r"together names 1; expected a pattern"),
        ({"pin": {"head": 4}}, r"pin\['head'\] is 4; expected devices from 0 to 3"),
        ({"pin": {"head": []}}, r"pin\['head'\] is \[\]; expected devices"),
        ({"pin": {"head": 1.0}}, r"pin\['head'\] is 1.0; expected devices"),
        (
            {"pin": {"head": 1, "*head*": 2}},
            r"pin\['\*head\*'\] is 2, which leaves no device .*head",
        ),
        (
            {"pin": {"head": 1, "encoder_0": 2}, "together": [["head", "encoder_0"]]},
            r"no device can run all \d tasks of a group \(encoder_0",
        ),
    ],
)
def test_what_cannot_be_kept_to_is_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        dj.place(PROGRAM, COSTS, method="heft", **asked)


CELLS = [
    pytest.param(m, marks=[pytest.mark.slow] * (m in ("doppler", "exact")))
    for m in HERE
    if m != "single"
]


@pytest.mark.parametrize("method", CELLS)
def test_every_method_keeps_to_pins_and_groups(method):
    graph, costs = random_problem(np.random.default_rng(7), 12, DEVICES)
    asked = {"pin": {"3": 2, "[45]": (0, 1)}, "together": [["0", "7"], "1?", ["7", "8"]]}
    for queue in ("fifo", None):
        placed = dj.place(graph, costs, method=method, queue=queue, **asked, **budget(method))
        assert_is_sound(placed, graph, dj.pin(graph, costs, asked["pin"]))
        at = placed.placement
        assert at[3] == 2
        assert set(at[[4, 5]]) <= {0, 1}
        assert at[0] == at[7] == at[8]
        assert at[10] == at[11]
        if "max_evaluations" in budget(method):
            assert placed.evaluations <= budget(method)["max_evaluations"]


@pytest.mark.parametrize("method", ["annealing", "exact", "heft", "lns"])
def test_groups_go_where_they_end_first(method):
    """Two groups of independent tasks, each faster on a device of its own, and a heavy one."""
    graph, costs = dj.from_edge_delays([1.0] * 7, [], num_devices=3)
    seconds = np.full((7, 3), 4.0)
    seconds[[0, 1, 2], 1] = seconds[[3, 4, 5], 2] = 1.0
    seconds[6] = [3.0, 9.0, 9.0]
    costs = costs.replace(compute_s=seconds)
    together = [["0", "1", "2"], ["3", "4", "5"]]
    placed = dj.place(
        graph, costs, method=method, max_evaluations=400, budget_s=20.0, together=together
    )
    assert placed.placement.tolist() == [1, 1, 1, 2, 2, 2, 0]
    assert placed.makespan_s == 3.0


@pytest.mark.parametrize("seed", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_groups_go_about_where_they_go_best(seed):
    """Compared with a search for every choice of three devices for three groups."""
    graph, costs = random_problem(np.random.default_rng(seed), 24, 3)
    order = np.random.default_rng(seed).permutation(24).astype(str).tolist()
    together = [order[:4], order[4:8], order[8:12]]
    options = {"method": "lns", "max_evaluations": 2000}
    best = min(
        dj.place(
            graph,
            costs,
            pin={v: d for group, d in zip(together, at, strict=True) for v in group},
            **options,
        ).makespan_s
        for at in itertools.product(range(3), repeat=3)
    )
    assert dj.place(graph, costs, together=together, **options).makespan_s <= 1.1 * best


@pytest.mark.slow
def test_a_bound_is_not_that_of_the_groups():
    """Four equal tasks in one group take four seconds; apart they take two."""
    graph, costs = dj.from_edge_delays([1.0] * 4, [], num_devices=2)
    placed = dj.place(graph, costs, method="exact", budget_s=20.0, together="*")
    assert (placed.makespan_s, placed.lower_bound_s, placed.proven) == (4.0, 2.0, False)


def test_groups_and_pins_are_part_of_what_is_cached(tmp_path):
    graph, costs = dj.from_edge_delays([1.0] * 4, [], num_devices=2)
    options = {"method": "lns", "max_evaluations": 100, "cache": tmp_path}
    found = [
        dj.place(graph, costs, **options, **asked).makespan_s
        for asked in ({}, {"together": "*"}, {"pin": {"[012]": 0}}, {"together": "*"}, {})
    ]
    assert found == [2.0, 4.0, 3.0, 4.0, 2.0]
    assert len(list(tmp_path.iterdir())) == 3
