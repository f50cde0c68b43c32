"""The planner: least cost by brute force, the parallelism asked for, never behind uniform."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.programs.cut_costs import (
    Limits,
    edge_cost,
    find_links,
    group_cost,
    list_choices,
    make_network,
    make_rates,
    make_units,
)
from doppler_jax.programs.elimination import minimize
from doppler_jax.programs.fuse import fuse
from doppler_jax.programs.planner import default_cluster, simulated_s

# Two devices, round numbers: a launch or a latency is 1 s, rates are 1 per second.
RATES = make_rates(dj.Cluster(flops_per_s=[1, 1], launch_s=1, latency_s=1, link_bytes_per_s=1))


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def residual(a, b, c):
    h = jnp.tanh(a @ b)
    return jnp.sum(h @ c + h, axis=0)


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


PROGRAMS = {
    "chain": (lambda a, b, c: (a @ b) @ c, [shaped(8, 8)] * 3),
    "residual": (residual, [shaped(8, 8)] * 3),
    "transposes": (lambda a: (a @ a.T, jnp.exp(a).T @ a), [shaped(8, 8)]),
    "attention": (attention, [shaped(8, 4)] * 3),
}


def total_s(cost, weight):
    seconds, moved_bytes = cost
    shared = weight * moved_bytes * RATES.seconds_per_byte / RATES.num_devices
    return float((seconds + shared).sum())


def brute_force_s(groups, limits, weight):
    """Least cost over all combinations of choices, from the cost functions alone."""
    links = find_links(groups)
    units = make_units(groups, links)
    choices = [list_choices(unit, limits, RATES, {}) for unit in units]
    assert all(len(own) <= 24 for own in choices)  # or the network would leave some out

    def rows(choice):
        return np.array([choice]).reshape(1, -1)

    alone = [
        {choice: total_s(group_cost(unit, rows(choice), RATES), weight) for choice in own}
        for unit, own in zip(units, choices, strict=True)
    ]
    best = math.inf
    for picks in itertools.product(*choices):
        cost = sum(alone[g][pick] for g, pick in enumerate(picks))
        for link in links:
            if cost >= best:
                break
            labels = list(units[link.producer].results[link.result])
            stored = rows(picks[link.producer])[:, labels]
            reader = rows(picks[link.reader])
            made = edge_cost(units[link.reader], link.operand, reader, stored, RATES)
            cost += total_s(made, weight)
        best = min(best, cost)
    return best


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("name", ["chain", "transposes", "residual"])
def test_plan_is_the_cheapest_of_all(name, weight):
    fn, args = PROGRAMS[name]
    groups = fuse(dj.trace(fn, *args))
    limits = Limits(2, 2, 0.0)
    network = make_network(groups, limits, RATES, {})
    # The plan's own cost, by allowing each group nothing else.
    pinned = dict(enumerate(network.solve(weight)))
    network = make_network(groups, Limits(1, 1, 0.0), RATES, pinned)
    assert all(len(choices) == 1 for choices in network.choices)
    found = sum(total_s(c, weight) for c in [*network.alone, *network.pairs.values()])
    assert found == pytest.approx(brute_force_s(groups, limits, weight), rel=1e-12)


def test_known_costs_of_a_product():
    (group,) = fuse(dj.trace(jnp.matmul, shaped(4, 8), shaped(8, 4)))
    (unit,) = make_units([group], [])
    i, k = group.labelling.operands[0]
    choices = np.ones((3, len(unit.max_counts)), int)
    choices[1, i] = choices[2, k] = 2
    seconds, moved_bytes = group_cost(unit, choices, RATES).tolist()
    # 2 * 4 * 8 * 4 operations in one task; in two at once; in two at once, whose partial
    # results of 64 bytes are sent (1 + 64 s) and added by a third (1 + 16 s).
    assert seconds == [1 + 256, 1 + 128, 1 + 128 + 1 + 64 + 1 + 16]
    assert moved_bytes == [0, 0, 64]


def test_known_costs_of_an_operand():
    groups = fuse(dj.trace(lambda a: jnp.tanh(a @ a) @ a, shaped(4, 4)))
    unit = make_units(groups, find_links(groups))[1]
    i = groups[1].labelling.operands[0][0]
    choices = np.ones((2, len(unit.max_counts)), int)
    choices[1, i] = 2
    stored = np.array([[1, 1], [2, 1], [1, 2]])
    seconds, moved_bytes = edge_cost(unit, 0, choices, stored, RATES).tolist()
    # Rows: stored whole, by rows, by columns. Columns: read whole, by rows. A formation
    # task takes 1 s; 64 bytes whole and 32 in a half take 1 s more than that to move.
    moved = 1 + 1 + 32
    assert seconds == [[0, moved], [moved, 0], [moved, moved]]
    assert moved_bytes == [[0, 32], [32, 0], [32, 64]]


def test_choices_keep_limits_and_pins():
    groups = fuse(dj.trace(jnp.matmul, shaped(8, 8), shaped(8, 8)))
    (unit,) = make_units(groups, [])
    i = groups[0].labelling.operands[0][0]
    choices = list_choices(unit, Limits(4, 8, 0.0), RATES, {})
    assert len(set(choices)) == len(choices) == 6 + 10  # 4 and 8 blocks along three labels
    assert {math.prod(choice) for choice in choices} == {4, 8}
    pinned = list_choices(unit, Limits(4, 8, 0.0), RATES, {i: 2})
    assert {choice[i] for choice in pinned} == {2}
    assert {math.prod(choice) for choice in pinned} == {4, 8}
    # 1024 operations take 1024 s on one device; tasks of 300 s are too short for four.
    coarse = list_choices(unit, Limits(4, 8, 300.0), RATES, {})
    assert min(math.prod(choice) for choice in coarse) == 1


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PROGRAMS)
def test_asked_parallelism_is_reached(name, num_shards):
    fn, args = PROGRAMS[name]
    program = dj.trace(fn, *args)
    sharded = dj.partition(program, num_shards)
    limits = Limits(num_shards, num_shards, 0.0)
    groups = fuse(program)
    units = make_units(groups, find_links(groups))
    assert len({origin.group for origin in sharded.origins}) == len(groups)
    for number, (group, unit) in enumerate(zip(groups, units, strict=True)):
        tasks = sum(
            origin.group == number and origin.primitives[0] == group.root.primitive.name
            for origin in sharded.origins
        )
        attainable = max(map(math.prod, list_choices(unit, limits, RATES, {})))
        assert attainable <= tasks <= 4 * num_shards


def test_small_groups_stay_whole_and_none_is_no_task():
    program = dj.trace(jnp.sum, shaped(16, 16))
    sharded = dj.partition(program, 4, cluster=dj.make_cluster("p100x4"))
    assert sharded.graph.num_tasks == 1
    assert sharded.tensors[0].reason.startswith("1: too little work to share out")
    assert dj.partition(program, 4).graph.num_tasks >= 5
    assert dj.partition(dj.trace(lambda x: x, shaped(8)), 4).graph.num_tasks == 0


def test_planned_twice_is_planned_alike():
    workload, cluster = dj.workloads.make_workload("llama_block"), dj.make_cluster("v100x8")
    programs = [dj.trace(workload.fn, *workload.args) for _ in range(2)]
    first, second = (dj.partition(program, 8, cluster=cluster) for program in programs)
    assert first.names == second.names
    assert first.tensors == second.tensors


@pytest.mark.slow
@pytest.mark.parametrize("workload", dj.workloads.list_workloads())
def test_never_behind_uniform(workload):
    made = dj.workloads.make_workload(workload)
    program = dj.trace(made.fn, *made.args)
    ratios = {}
    for name in set(dj.clusters.list_clusters()) - {"host"}:
        cluster = dj.make_cluster(name)
        options = {"num_shards": cluster.num_devices, "cluster": cluster}
        planner_s, uniform_s = (
            simulated_s(dj.partition(program, strategy=strategy, **options).graph, cluster)
            for strategy in ("planner", "uniform")
        )
        ratios[name] = planner_s / uniform_s
    assert max(ratios.values()) <= 1.02, ratios
    assert min(ratios.values()) <= 0.8, ratios


def test_default_cluster_is_like_the_preset():
    preset, same = dj.make_cluster("p100x4"), default_cluster(4)
    for field in ("flops_per_s", "launch_s", "latency_s", "link_bytes_per_s"):
        np.testing.assert_array_equal(getattr(preset, field), getattr(same, field))
    assert default_cluster(1).num_devices == 1


def test_reasons_are_readable():
    def fn(a, b):
        h = jnp.tanh(a @ b)
        return h @ b, jnp.sort(h, axis=0)

    program = dj.trace(fn, shaped(1024, 1024), shaped(1024, 1024))
    # One row of blocks, so that the sort can follow and the second product cannot.
    sharded = dj.partition(program, 4, strategy={"fn.dot_general": (1, 4)})
    reasons = {tensor.name: tensor.reason for tensor in sharded.tensors}
    first = reasons["fn.dot_general"]
    assert first.startswith("1x4: given as 'fn.dot_general'; contracted dimensions ")
    assert reasons["fn.sort.sort"].startswith("1x4: follows fn.dot_general")
    # The first product is left in columns; a task of the second reads rows.
    second = reasons["fn.dot_general_1"]
    assert "fn.dot_general is cut again, 1x4 to " in second
    uniform = dj.partition(program, 4, strategy="uniform")
    assert uniform.tensors[0].reason == "2x2: uniform"


def cut(strategy):
    def fn(a, b):
        with jax.named_scope("one"):
            h = jnp.tanh(a @ b)
        with jax.named_scope("two"):
            return h @ b

    return dj.partition(dj.trace(fn, shaped(16, 16), shaped(16, 16)), 4, strategy=strategy)


def test_counts_can_be_given_by_name_or_pattern():
    grids = {tensor.name: tensor.grid for tensor in cut({"one.dot_general": (8, 2)}).tensors}
    assert grids["one.dot_general"] == (8, 2)
    assert math.prod(grids["two.dot_general"]) >= 2
    grids = [tensor.grid for tensor in cut({"*.dot_general": (1, 2)}).tensors]
    assert grids == [(1, 2), (1, 2)]
    # A group's own name goes before a pattern that fits it too.
    both = {"*": (1, 2), "two.dot_general": (2, 1)}
    assert [tensor.grid for tensor in cut(both).tensors] == [(1, 2), (2, 1)]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("best", "unknown strategy 'best'; known: planner, uniform"),
        ({"three*": (2, 2)}, r"'three\*', which fits none of: one.dot_general, two.dot_gen"),
        ({"one.*": (2,)}, r"'one\.\*'.* its result \[16, 16\] has 2 dimensions"),
        ({"one.*": (2, 3)}, r"'one\.\*'.* 3 is not a power of two"),
        ({"one.*": (0, 2)}, r"'one\.\*'.* 0 is not a power of two"),
        ({"one.*": (2.0, 2)}, r"'one\.\*'.* 2.0 is not a power of two"),
        ({"one.*": (32, 1)}, r"'one\.\*'.* size 16 can be cut into 16 blocks at most, not 32"),
    ],
)
def test_wrong_strategies_are_refused(strategy, message):
    with pytest.raises(ValueError, match=message):
        cut(strategy)


def total_cost(costs, pairs, states):
    """Returns the cost of one choice of states."""
    alone = sum(float(table[states[v]]) for v, table in enumerate(costs))
    return alone + sum(float(t[states[a], states[b]]) for (a, b), t in pairs.items())


def random_problem(rng, num_variables, density):
    sizes = rng.integers(1, 5, num_variables)
    costs = [rng.random(size) for size in sizes]
    pairs = {
        (a, b): rng.random((sizes[a], sizes[b]))
        for a, b in itertools.combinations(range(num_variables), 2)
        if rng.random() < density
    }
    return costs, pairs


def least(costs, pairs):
    choices = itertools.product(*(range(table.size) for table in costs))
    return min(total_cost(costs, pairs, states) for states in choices)


@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("num_variables", [0, 1, 2, 6])
def test_equals_brute_force(num_variables, density):
    rng = np.random.default_rng(num_variables)
    for _ in range(10):
        costs, pairs = random_problem(rng, num_variables, density)
        found = total_cost(costs, pairs, minimize(costs, pairs))
        assert found == pytest.approx(least(costs, pairs), abs=1e-12)


def test_small_tables_give_a_local_optimum():
    rng = np.random.default_rng(0)
    for _ in range(20):
        costs, pairs = random_problem(rng, 6, 1.0)
        states = minimize(costs, pairs, limit=8)
        found = total_cost(costs, pairs, states)
        for v, table in enumerate(costs):
            for state in range(table.size):
                other = [*states[:v], state, *states[v + 1 :]]
                assert total_cost(costs, pairs, other) >= found - 1e-12


def test_a_long_chain_is_solved_exactly():
    # States alternate for free, and the last one is forced: the first must give way.
    switch = np.array([[1.0, 0.0], [0.0, 1.0]])
    n = 3001
    costs = [np.zeros(2) for _ in range(n)]
    costs[0], costs[-1] = np.array([0.0, 0.5]), np.array([9.0, 0.0])
    states = minimize(costs, {(v, v + 1): switch for v in range(n - 1)})
    assert states == [(v + 1) % 2 for v in range(n)]


def test_ties_go_to_smaller_states():
    pairs = {(0, 1): np.zeros((3, 3)), (1, 2): np.zeros((3, 3))}
    assert minimize([np.zeros(3)] * 3, pairs) == [0, 0, 0]
