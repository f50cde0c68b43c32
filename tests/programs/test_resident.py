"""Which arguments are moved with every call, from their names to the simulated schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj

W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
PARAMS = {"b": jax.ShapeDtypeStruct((8,), jnp.float32), "layers": [W, W]}
ARGS = (PARAMS, W)


def layer(params, x, *, scale):
    for w in params["layers"]:
        x = jax.nn.relu(x @ w)
    return x * scale + params["b"][None]


def names_of(resident):
    """The leaves that are resident, by short names."""
    names = ["b", "w0", "w1", "x", "scale"]
    flags = dj.trace(layer, *ARGS, scale=W, resident=resident).is_resident
    return [name for name, flag in zip(names, flags, strict=True) if flag]


@pytest.mark.parametrize(
    ("resident", "expected"),
    [
        (None, "b w0 w1 x scale"),
        ((), ""),
        (0, "b w0 w1"),
        (1, "x"),
        ([0, 1], "b w0 w1 x"),
        ("params", "b w0 w1"),
        ("params['layers']", "w0 w1"),
        ("params['layers'][1]", "w1"),
        ("args[0]['b']", "b"),
        ("args", "b w0 w1 x"),
        ("scale", "scale"),
        (["x", "args[0]['layers'][0]", 1], "w0 x"),
    ],
)
def test_names_positions_and_paths(resident, expected):
    assert names_of(resident) == expected.split()


@pytest.mark.parametrize(
    ("resident", "message"),
    [
        (2, r"resident names 2, but no array .* there are: args\[0\]\['b'\], .*, scale$"),
        (-1, "resident names -1, but no array"),
        ("weights", "resident names 'weights', but no array"),
        ("para", "resident names 'para', but no array"),
        ("args[0]['layer", "but no array"),
        ("", "resident names '', but no array"),
        (["params", "y"], "resident names 'y', but no array"),
        (True, "resident names True; expected positions, names or paths"),
        (0.0, "resident names 0.0; expected positions"),
        ([None], "resident names None; expected positions"),
    ],
)
def test_what_names_no_argument_is_refused(resident, message):
    with pytest.raises(ValueError, match=message):
        names_of(resident)
    # A long list of arguments is cut short.
    with pytest.raises(ValueError, match=r"args\[11\], and 8 more$"):
        dj.trace(lambda *args: args[0], *[W] * 20, resident="x")


def test_functions_without_names_and_with_bound_arguments():
    assert dj.trace(jnp.add, W, W, resident="args[1]").is_resident == (False, True)
    bound = functools.partial(layer, scale=2.0)
    program = dj.trace(bound, *ARGS, resident="x")
    assert program.is_resident == (False, False, False, True)
    # A parameter called `args` is not the tuple of all arguments.
    program = dj.trace(lambda args, x: x + args, W, W, resident="args[1]")
    assert program.is_resident == (False, True)


def traced(**options):
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda aval: rng.normal(size=aval.shape).astype(np.float32), ARGS)
    const = jnp.arange(8, dtype=jnp.float32)
    fn = lambda params, x: layer(params, x, scale=const[:, None])  # noqa: E731
    return fn, args, dj.partition(dj.trace(fn, *args, **options), 4, strategy="uniform")


def test_only_blocks_of_other_arguments_have_a_home():
    fn, args, sharded = traced(resident="params")
    moved = [block.source == 3 for block in sharded.inputs]  # b, w0, w1, x, const
    assert 0 < sum(moved) < len(moved)
    homes = np.where(moved, 0, dj.graphs.RESIDENT)
    np.testing.assert_array_equal(sharded.graph.input_home, homes)
    np.testing.assert_allclose(dj.evaluate(sharded, *args), fn(*args), rtol=1e-4, atol=1e-5)
    assert (traced()[2].graph.input_home == dj.graphs.RESIDENT).all()


def test_all_that_takes_graphs_takes_these():
    _, _, sharded = traced(resident="params")
    graph, cluster = sharded.graph, dj.make_cluster("p100x4")
    costs = dj.make_costs(graph, cluster)
    placed = dj.place(graph, costs, method="critical_path")
    schedule = placed.schedule
    dj.simulator.validate(graph, schedule, costs)
    inputs = schedule.transfer_tensor < 0
    reads = np.stack([graph.input_edge_input, placed.placement[graph.input_edge_reader]], 1)
    read = {(~i, d) for i, d in reads.tolist() if graph.input_home[i] == 0 and d != 0}
    pairs = np.stack([schedule.transfer_tensor, schedule.transfer_destination], 1)[inputs]
    assert set(map(tuple, pairs.tolist())) == read != set()
    assert (schedule.transfer_start_s[inputs] == 0).all()


def test_the_makespan_counts_the_transfers_of_inputs():
    _, _, resident = traced()
    _, _, moved = traced(resident="params")
    costs = dj.make_costs(moved.graph, dj.make_cluster("p100x4"))
    far = np.full(moved.graph.num_tasks, 1)
    slow = costs.replace(latency_s=1.0 - np.eye(4))
    assert dj.simulator.simulate_oracle(resident.graph, slow, far).finish_s.max() < 1.0
    makespan_s = dj.simulator.simulate_oracle(moved.graph, slow, far).finish_s.max()
    assert makespan_s > 1.0
    found = dj.simulate(moved.graph, slow, far[None]).makespan_s
    np.testing.assert_allclose(found, makespan_s, rtol=1e-6)
    # At home nothing moves.
    near = np.zeros_like(far)
    assert dj.simulator.simulate_oracle(moved.graph, slow, near).finish_s.max() < 1.0
