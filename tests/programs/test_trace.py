"""The tensor program: flat, live, and clear about what it does not take."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from doppler_jax import trace

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def names(program):
    return [equation.primitive.name for equation in program.equations]


def test_nested_functions_are_inlined():
    program = trace(lambda x: jax.jit(jax.nn.relu)(jax.checkpoint(jnp.sin)(x)), X)
    assert names(program) == ["sin", "max"]
    sin, relu = program.equations
    assert sin.operands == program.args
    assert relu.operands[0] is sin.results[0]
    assert program.outputs == relu.results


def test_dead_equations_are_dropped():
    def fn(x):
        jnp.sort(x)
        unused = np.ones((4, 8), np.float32) + jnp.exp(x)
        return jnp.tanh(x), unused.shape[0] + jnp.cos(x)

    program = trace(fn, X)
    assert names(program) == ["tanh", "cos", "add"]
    assert program.consts == ()


def test_constants_make_no_equation_and_are_one_copy_each():
    def fn(x):
        zeros = jnp.zeros((4, 8)) + 1.0
        return jnp.where(x > 0, jax.lax.stop_gradient(x), zeros)

    program = trace(fn, X)
    assert names(program) == ["gt", "select_n"]
    ones = program.equations[1].operands[1]
    assert ones.value == 1.0
    assert ones.aval.shape == (4, 8)
    table = np.ones((4, 8), np.float32)
    program = trace(lambda x: (x + table) * table, X)
    table[:] = 5.0
    assert len(program.consts) == 1
    np.testing.assert_array_equal(program.const_arrays[0], np.ones((4, 8)))


def test_shapes_are_enough_and_a_key_is_an_array():
    huge = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)  # 4 TiB
    program = trace(lambda a, b: a @ b, huge, huge)
    assert program.outputs[0].aval.shape == huge.shape
    assert program.arg_avals == (huge, huge)
    program = trace(lambda key: jax.random.normal(key, (4,)), jax.random.key(0))
    assert "random_bits" in names(program)


def loop(x, w):
    def body(carry, row):
        carry = jnp.tanh(carry @ w + row)
        return carry, carry * 2.0

    return jax.lax.scan(body, x[0], x, reverse=True)


def test_loops_and_branches_are_single_equations():
    def fn(x, w):
        carry, _ = loop(x, w)
        carry = jax.lax.while_loop(lambda c: c[0] < 1, lambda c: c + 1, carry)
        return jax.lax.cond(carry[0] > 0, jnp.sin, jnp.cos, carry)

    program = trace(fn, X, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    kinds = [n for n in names(program) if n in ("scan", "while", "cond", "sin")]
    assert kinds == ["scan", "while", "cond"]


def test_scans_are_unrolled_on_request():
    program = trace(loop, X, jax.ShapeDtypeStruct((8, 8), jnp.float32), unroll_scans=True)
    by_row = {"dot_general": 4, "add": 4, "tanh": 4, "mul": 4, "broadcast_in_dim": 4}
    kinds = {"squeeze": 5, "slice": 5, "concatenate": 1, **by_row}
    assert collections.Counter(names(program)) == kinds
    first = next(e for e in program.equations if e.primitive.name == "dot_general")
    assert first.scope == "loop/scan.3"  # in reverse
    empty = jax.ShapeDtypeStruct((0, 8), jnp.float32)
    program = trace(
        lambda x: jax.lax.scan(lambda c, y: (c + 1, y * c), 0.0, x), empty, unroll_scans=True
    )
    assert names(program) == ["scan"]


def test_a_function_with_references_of_its_own_is_one_equation():
    def fn(x):
        total = jax.new_ref(x)
        total[...] += 1.0
        return jax.freeze(total)

    program = trace(lambda x: jnp.exp(jax.jit(fn)(x)), X)
    assert names(program) == ["jit", "exp"]
    assert names(trace(fn, X)) == ["jit"]


def test_scopes_are_named_scopes_and_functions():
    def helper(x):
        return jnp.sin(x)

    def fn(x):
        with jax.named_scope("attn"):
            y = jax.nn.silu(x)
            with jax.named_scope("qk"):
                z = y @ y.T
        return helper(z), (lambda v: jnp.cos(v))(z)

    scopes = {e.primitive.name: e.scope for e in trace(fn, X).equations}
    assert scopes["logistic"] == "attn/silu"
    assert scopes["dot_general"] == "attn/qk"
    assert scopes["sin"] == "helper"
    assert scopes["cos"] == ""
    gradient = trace(jax.grad(lambda x: jnp.sum(fn(x)[0])), X).equations
    products = [e.scope for e in gradient if e.primitive.name == "dot_general"]
    assert products[0] == "attn/qk"
    assert products[-1] == "transpose(attn)/qk"


def test_sources_are_the_users_lines():
    def fn(x):
        return jax.nn.softmax(x)

    for equation in trace(fn, X).equations:
        assert re.fullmatch(r".*test_trace\.py:\d+:\d+ \(.*fn\)", equation.source)
    assert "test_trace.py" in trace(jnp.tanh, X).equations[0].source


def test_printing_is_kept_though_nobody_reads_it():
    def calls(x):
        jax.debug.print("{x}", x=x[0, 0])
        jax.debug.callback(lambda v: None, x)
        return x * 2.0

    def in_a_loop(x):
        jax.lax.map(lambda row: jax.debug.print("{}", row[0]), x)
        return x + 1.0

    for fn, expected in ((calls, ["debug_print", "debug_callback"]), (in_a_loop, ["scan"])):
        program = trace(lambda x, fn=fn: jax.jit(fn)(x), X)
        assert [e.primitive.name for e in program.equations if e.has_effect] == expected


def ordered(x):
    jax.debug.print("{x}", x=x, ordered=True)
    return x


def called_back(x):
    return io_callback(lambda v: v, x, x)


def called_back_in_order(x):
    return io_callback(lambda v: v, x, x, ordered=True)


def mapped(fn):
    return lambda x: jax.lax.map(fn, x)


def looped(fn):
    return lambda x: jax.lax.fori_loop(0, 3, lambda i, x: fn(x), x)


@pytest.mark.parametrize("nest", [jax.jit, mapped, looped])
@pytest.mark.parametrize(
    ("fn", "primitive", "reason"),
    [
        (ordered, "debug_print", "prints in order"),
        (called_back, "io_callback", "calls the host"),
        (called_back_in_order, "io_callback", "calls the host"),
    ],
)
def test_side_effects_are_refused_at_their_line_even_if_nested(fn, primitive, reason, nest):
    line = fn.__code__.co_firstlineno + 1
    where = rf"{primitive} at .*test_trace.py:{line}:\d+ \({fn.__name__}\)"
    with pytest.raises(ValueError, match=f"{where} has a side effect: it {reason}"):
        trace(nest(fn), X)


MESH = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
SPREAD = {"mesh": MESH, "in_specs": jax.P("x"), "out_specs": jax.P("x")}


def spread(x):
    return jax.shard_map(jnp.sin, **SPREAD)(x)


def over_devices(x):
    return jax.pmap(jnp.sin)(x.reshape(4, 8)[:2])


@pytest.mark.parametrize("nest", [lambda fn: fn, jax.jit, mapped])
@pytest.mark.parametrize("fn", [spread, over_devices])
def test_what_runs_on_a_mesh_is_refused_at_its_line_even_if_nested(fn, nest):
    line = fn.__code__.co_firstlineno + 1
    where = (
        rf"shard_map at .*test_trace.py:{line}:\d+ \(.*{fn.__name__}.*\) runs on all devices"
    )
    with pytest.raises(ValueError, match=where):
        trace(nest(fn), jax.ShapeDtypeStruct((2, 4, 8), jnp.float32) if nest is mapped else X)


def test_a_mesh_that_is_set_is_refused():
    with jax.set_mesh(MESH), pytest.raises(ValueError, match=r"a mesh is set by jax\.set_mesh"):
        trace(jnp.sin, X)


# Every one on a line of its own, which the error names.
VALUE_DEPENDENT = {
    "python branch": lambda x: x if x[0, 0] > 0 else -x,
    "boolean index": lambda x: x[x > 0],
    "counted": lambda x: jnp.nonzero(x)[0],
    "to number": lambda x: x * float(x[0, 0]),
    "to numpy": lambda x: np.sin(x),
    "sized by value": lambda x: jnp.zeros(jnp.sum(x).astype(int)),
}


@pytest.mark.parametrize("name", VALUE_DEPENDENT)
def test_dependence_on_values_names_the_users_line(name):
    fn = VALUE_DEPENDENT[name]
    line = fn.__code__.co_firstlineno
    with pytest.raises(ValueError, match=rf"test_trace.py:{line} \(<lambda>\): it depends"):
        trace(lambda x: jax.jit(fn)(x), X)


def test_errors_of_the_function_itself_are_left_alone():
    with pytest.raises(ZeroDivisionError):
        trace(lambda x: x * (1 / 0), X)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X, "a"), {}, r"args\[1\] is str 'a'; expected an array.*functools.partial"),
        (({"w": [X, "relu"]},), {}, r"args\[0\]\['w'\]\[1\] is str 'relu'.*split the tree"),
        ((X,), {"rate": object}, r"rate is type"),
        ((np.array(["a"]),), {}, r"args\[0\] is ndarray"),
    ],
)
def test_arguments_that_are_no_arrays_are_named(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        trace(lambda *args, **kwargs: args[0], *args, **kwargs)


def test_a_tree_with_functions_is_split_as_the_error_says():
    def fn(module, x):
        return module["activation"](x @ module["w"])

    module = {"w": jnp.ones((8, 2)), "activation": jax.nn.gelu}
    with pytest.raises(ValueError, match="join them with the rest inside the function"):
        trace(fn, module, X)
    arrays, rest = {"w": module["w"]}, {"activation": module["activation"]}
    program = trace(lambda arrays, x: fn({**arrays, **rest}, x), arrays, X)
    assert program.outputs[0].aval.shape == (4, 2)


@pytest.mark.parametrize(("leaf", "dtype"), [(3, "int32"), (0.5, "float32"), (True, "bool")])
def test_numbers_are_taken_with_their_weak_types(leaf, dtype):
    (aval,) = trace(lambda x: x, leaf).arg_avals
    assert (aval.dtype, aval.weak_type) == (dtype, dtype != "bool")


@pytest.mark.parametrize("leaf", [np.float32(1), np.ones(2, bool), jnp.ones(2, jnp.bfloat16)])
def test_arrays_of_any_kind_are_taken(leaf):
    assert trace(lambda x: x, leaf).arg_avals[0].dtype == leaf.dtype


def test_static_arguments_are_bound():
    def fn(x, repeats, *, reverse):
        return jnp.flip(x, 0) if reverse else jnp.tile(x, repeats)

    program = trace(functools.partial(fn, repeats=(1, 2), reverse=False), X)
    assert program.outputs[0].aval.shape == (4, 16)
