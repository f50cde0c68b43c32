"""Which arguments are what the last call returned, from their names to the task graph."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj

W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
STATE = {"w": [W, W], "n": jax.ShapeDtypeStruct((), jnp.int32)}


def step(state, x):
    """Layers whose weights move, a count, and what it makes of its input."""
    for w in state["w"]:
        x = jnp.tanh(x @ w)
    return {"w": [w - x for w in state["w"]], "n": state["n"] + 1}, x


def pairs(carry, fn=step, args=(STATE, W), **options):
    return dj.trace(fn, *args, carry=carry, **options).carried


@pytest.mark.parametrize(
    ("carry", "expected"),
    [
        (None, ()),
        ((), ()),
        (0, ((0, 0), (1, 1), (2, 2))),
        ("state", ((0, 0), (1, 1), (2, 2))),
        ({0: 0}, ((0, 0), (1, 1), (2, 2))),
        ({"x": 1}, ((3, 3),)),
        ({"x": "out[1]"}, ((3, 3),)),
        ({"args[0]['w']": "out[0]['w']"}, ((1, 1), (2, 2))),
        ([0, "x"], ((0, 0), (1, 1), (2, 2), (3, 3))),
    ],
)
def test_pairs_arguments_with_outputs(carry, expected):
    assert pairs(carry) == expected


def test_pairs_all_that_is_returned_keywords_and_parts_by_name():
    assert pairs(0, lambda x: 2 * x, (W,)) == ((0, 0),)
    assert pairs("x", lambda *, x: (1.0, 2 * x), (), x=W) == ((0, 1),)
    named = lambda a, b: {"b": b + 1, "a": a.astype("int32")}  # noqa: E731
    assert pairs("b", named, (W, W)) == ((1, 1),)
    assert pairs({"b": 1}, named, (W, W)) == ((1, 1),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"carry": 2}, r"carry names 2, but no array .* there are: args\[0\]\['n'\], .*"),
        ({"carry": 1.5}, "carry names 1.5; expected positions, names or paths"),
        ({"carry": "args[0]['n']"}, r"no output is like it: out\[1\] is float.* where args"),
        ({"carry": {0: 2}}, r"carry pairs 0 with 2; expected the position or"),
        ({"carry": {0: "out[0]['v']"}}, r"as they are: out\[0\]\['n'\], out\[0\]\['w'\]\[0\]"),
        ({"carry": {0: 1}}, r"carry pairs 0 with out\[1\], but out\[1\] has another tree"),
        ({"carry": {"x": "out[0]['n']"}}, r"out\[0\]\['n'\] is int32\[\] where args\[1\] is"),
        ({"carry": ["state", 0]}, r"carry names args\[0\]\['n'\] twice"),
        ({"carry": {"x": 1, "args[0]['w'][0]": 1}}, r"carry names out\[1\] twice"),
        ({"carry": 0, "resident": "state"}, r"args\[0\]\['n'\] is resident and carried"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        dj.trace(step, STATE, W, **options)


def test_refuses_several_that_are_alike_and_weak_types():
    with pytest.raises(ValueError, match=r"which out\[0\] and out\[1\] are like; .*\{0: 0\}"):
        pairs(0, lambda x: (x + 1, x + 2), (W,))
    with pytest.raises(ValueError, match=r"out\[0\] is float32\[\], of a weak type where args"):
        pairs({0: 0}, lambda n: (jnp.sin(1.0), n), (jnp.float32(0),))


def test_carried_inputs_are_the_outputs_blocks():
    args = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), (STATE, W))
    for num_shards, strategy in ((1, "planner"), (4, "planner"), (4, "uniform")):
        program = dj.trace(step, *args, carry="state")
        sharded = dj.partition(program, num_shards, strategy=strategy)
        graph, wanted = sharded.graph, dict(sharded.carried)
        made = np.flatnonzero(graph.input_maker >= 0)
        assert {sharded.inputs[i].source for i in made} == {0, 1, 2}
        for i, block in enumerate(sharded.inputs):
            if block.source not in wanted:
                assert graph.input_maker[i] == -1
                continue
            output = sharded.outputs[wanted[block.source]]
            size = np.array(output.aval.shape) // output.grid
            np.testing.assert_array_equal(np.subtract(block.limit, block.start), size)
            index = np.array(block.start) // np.maximum(size, 1)
            position = np.ravel_multi_index(index, output.grid) if size.size else 0
            tensor = output.blocks[position].tensor
            assert graph.input_maker[i] == graph.tensor_producer[tensor]
        found, expected = dj.evaluate(sharded, *args), step(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, expected)


def test_readers_that_are_cut_otherwise_get_tasks_that_form_blocks():
    fn = lambda w, x: (w + 1, x @ w)  # noqa: E731
    program = dj.trace(fn, W, W, carry={0: 0})
    cuts = {"add": (4, 1), "dot_general": (1, 4)}
    sharded = dj.partition(program, 4, strategy=cuts)
    formed = [name for name in sharded.names if ".carried0.form[" in name]
    assert len(formed) == 4
    assert len(set(sharded.names)) == len(sharded.names)
    assert sorted(sharded.graph.input_maker[sharded.graph.input_maker >= 0]) == [0, 1, 2, 3]


def test_an_array_that_is_returned_unchanged_stays_resident():
    program = dj.trace(lambda s: {**s, "n": s["n"] + 1}, {"n": W, "table": W}, carry=0)
    sharded = dj.partition(program, 2)
    of_table = [i for i, block in enumerate(sharded.inputs) if block.source == 1]
    assert of_table
    assert sharded.graph.is_resident[of_table].all()
