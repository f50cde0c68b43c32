"""Loops inside programs: unrolled where that pays, and else said to hide what they hide."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import doppler_jax as dj
from tests.programs.functions.registry import SUMS, assert_same, normal

LAYERS, WIDTH, BATCH = 3, 16, 8
ARGS = (
    normal(0, LAYERS, WIDTH, 4 * WIDTH) * 0.1,
    normal(1, LAYERS, 4 * WIDTH, WIDTH) * 0.1,
    normal(2, BATCH, WIDTH),
)


def layer(x, weights):
    return x + jnp.tanh(x @ weights[0]) @ weights[1]


def scanned(ups, downs, x):
    return lax.scan(lambda x, w: (layer(x, w), None), x, (ups, downs))[0]


def rematerialised(ups, downs, x):
    return lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, (ups, downs))[0]


def by_number(ups, downs, x):
    return lax.fori_loop(0, LAYERS, lambda i, x: layer(x, (ups[i], downs[i])), x)


def mapped(ups, downs, x):
    return lax.map(lambda row: scanned(ups, downs, row[None])[0], x[:4])


def accumulated(ups, downs, x):
    """Gradients summed over micro-batches, of layers in a loop themselves."""

    def body(grads, rows):
        return jax.tree.map(jnp.add, grads, of(scanned)(ups, downs, rows)), None

    return lax.scan(body, (0 * ups, 0 * downs), x.reshape(4, 2, -1))[0]


def in_steps(ups, downs, x):
    """Two micro-batches of an optimiser that steps every other one."""
    optimizer = optax.MultiSteps(optax.sgd(0.1), 2)

    def body(state, rows):
        params, state = state
        updates, state = optimizer.update(of(scanned)(*params, rows), state, params)
        return (optax.apply_updates(params, updates), state), None

    params = ups, downs
    with jax.numpy_dtype_promotion("standard"):
        return lax.scan(body, (params, optimizer.init(params)), x.reshape(2, 4, -1))[0][0]


def of(fn):
    return jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), argnums=(0, 1))


def slow(num_devices):
    """Devices for which every iteration is much work."""
    return dj.Cluster(flops_per_s=[1e7] * num_devices, link_bytes_per_s=1e12)


LOOPS = {
    "scan": scanned,
    "fori": by_number,
    "map": mapped,
    "gradient": of(scanned),
    "gradient of remat": of(rematerialised),
    "remat of scan": of(jax.checkpoint(scanned)),
    "micro-batches": accumulated,
    "MultiSteps": in_steps,
}
NESTED = ("micro-batches", "MultiSteps")  # whose many tasks take long to evaluate


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in NESTED)) for n in LOOPS]
)
def test_loops_are_unrolled_where_that_pays(name, caplog):
    fn = LOOPS[name]
    sharded = dj.partition(dj.trace(fn, *ARGS), 2, cluster=slow(2))
    assert sharded.graph.num_tasks >= 2 * LAYERS
    assert "scan" not in {origin.primitives[0] for origin in sharded.origins}
    assert_same(dj.evaluate(sharded, *ARGS), jax.jit(fn)(*ARGS), SUMS)
    assert not caplog.records


def prints(ups, downs, x):
    def body(x, w):
        jax.debug.print("{}", x[0, 0])
        return layer(x, w), None

    return lax.scan(body, x, (ups, downs))[0]


def until(ups, downs, x):
    return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: layer(x, (ups[0], downs[0])) + 1, x)


def long(ups, downs, x):
    return lax.fori_loop(0, 1000, lambda i, x: jax.jit(layer)(x, (ups[0], downs[0])), x)


@pytest.mark.parametrize(
    ("fn", "cluster", "options"),
    [
        (scanned, dj.make_cluster("p100x4"), {}),  # which only launches here
        (scanned, slow(4), {"unroll_scans": False}),
        (prints, slow(4), {}),
        (until, slow(4), {}),
        (long, slow(4), {}),
    ],
    ids=["short work", "asked for", "prints", "while", "long"],
)
def test_a_loop_that_hides_most_of_the_work_is_named(fn, cluster, options, caplog):
    program = dj.trace(fn, *ARGS, **options)
    sharded = dj.partition(program, 4, cluster=cluster)
    dj.partition(program, 2, cluster=cluster)  # which says it no more
    (line,) = (record.getMessage() for record in caplog.records)
    kind = "while" if fn is until else "scan"
    assert line.startswith(f"{kind} at ")
    assert "test_loops.py" in line
    assert "% of the work in one task" in line
    assert line in dj.explain(sharded).summary()


def test_loops_one_after_another_are_named_together(caplog):
    def fn(ups, downs, x):
        return scanned(ups, downs, scanned(ups, downs, x))

    program = dj.trace(fn, *ARGS, unroll_scans=False)
    dj.partition(program, 4, cluster=slow(4))
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("2 loops one after another, scan at ")
    assert "hide 100% of the work in one task each" in line
    side = dj.trace(
        lambda *args: (scanned(*args), scanned(*args[:2], -args[2])), *ARGS, unroll_scans=False
    )
    dj.partition(side, 4, cluster=slow(4))
    assert len(caplog.records) == 1  # two devices can run these at once


def test_a_loop_with_little_work_stays_one_task(caplog):
    def fn(ups, downs, x):
        total = lax.fori_loop(0, LAYERS, lambda i, s: s + x[0, 0], 0.0)
        return layer(x, (ups[0], downs[0])) * total

    program = dj.trace(fn, *ARGS)
    assert not program.unrolled
    sharded = dj.partition(program, 4, cluster=slow(4))
    np.testing.assert_allclose(dj.evaluate(sharded, *ARGS), fn(*ARGS), rtol=1e-5, atol=1e-6)
    assert not caplog.records


def test_a_loop_that_runs_once_is_one_task_on_purpose():
    def fn(ups, downs, x):
        return lax.scan(lambda x, w: (layer(x, w), None), x, (ups[:1], downs[:1]))[0]

    assert dj.trace(fn, *ARGS).unrolled == ()


def test_what_was_asked_for_is_unrolled_whatever_it_costs():
    program = dj.trace(scanned, *ARGS, unroll_scans=True)
    assert not program.unrolled
    sharded = dj.partition(program, 1, cluster=dj.make_cluster("p100x4"))
    assert sharded.graph.num_tasks >= LAYERS
