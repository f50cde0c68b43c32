"""`place_and_compile`: from a function to a callable, in one call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine import automatic
from doppler_jax.training.paired import Paired

pytestmark = pytest.mark.usefixtures("known_host")


def fn(params, x):
    return jax.nn.relu(x @ params["w"]) @ params["w"]


ARGS = (
    {"w": np.linspace(-1.0, 1.0, 256, dtype=np.float32).reshape(16, 16)},
    np.ones((8, 16), np.float32),
)


def compiled(args=ARGS, **options):
    options = {"devices": jax.devices()[:2], "method": "critical_path", **options}
    return dj.engine.place_and_compile(fn, *args, **options)


def pairing(monkeypatch, ratio):
    """Makes the placement found seem `ratio` times as slow as a single device."""
    asked, found, place = [], {}, automatic.place

    def pair(candidate, incumbent, rounds):
        asked.append((candidate, incumbent))
        return Paired((ratio,) * rounds, (1.0,) * rounds)

    monkeypatch.setattr(automatic, "make_paired_measure", lambda *_, **__: pair)

    def split(graph, costs, **options):
        found["costs"], found["budget_s"] = costs, options["budget_s"]
        placed = place(graph, costs, **options)
        object.__setattr__(placed, "placement", np.arange(graph.graph.num_tasks) % 2)
        return placed

    monkeypatch.setattr(automatic, "place", split)
    return asked, found


def test_the_faster_of_the_placement_and_one_device_is_returned(monkeypatch):
    asked, found = pairing(monkeypatch, ratio=0.9)
    step = compiled()
    np.testing.assert_allclose(step(*ARGS), fn(*ARGS), rtol=1e-5)
    assert step.device_names == tuple(map(str, jax.devices()[:2]))
    dj.simulator.validate(step.graph, step.schedule)
    ((candidate, single),) = asked
    np.testing.assert_array_equal(step.schedule.placement, candidate.placement)
    assert set(single.placement) == {found["costs"].compute_s.sum(0).argmin()}
    pairing(monkeypatch, ratio=1.1)
    step = compiled()
    step(*ARGS)
    assert len(set(step.schedule.placement)) == 1


def test_arguments_may_come_with_each_call():
    step = compiled(resident=(0,))
    assert set(step.graph.input_home) == {dj.graphs.RESIDENT, 0}
    again = (ARGS[0], 2 * ARGS[1])
    for args in (ARGS, again):
        np.testing.assert_allclose(step(*args), fn(*args), rtol=1e-5)


def test_a_function_without_work_gets_a_plan_too():
    x = jnp.arange(4.0)
    step = dj.engine.place_and_compile(lambda x: (x, {"same": x}), x, devices=jax.devices()[:2])
    first, second = step(x)
    np.testing.assert_array_equal(first, x)
    np.testing.assert_array_equal(second["same"], x)


def test_placing_gets_what_calibration_leaves(monkeypatch):
    _, found = pairing(monkeypatch, ratio=1.0)
    compiled(budget_s=1e-3)
    assert found["budget_s"] == automatic._LEAST_PLACING_S
    compiled(budget_s=1000.0)
    assert 500 < found["budget_s"] < 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ["remote"]}, r"devices\[0\] is 'remote'; expected a JAX device"),
        ({"mode": "lazy"}, "unknown mode 'lazy'"),
        ({"budget_s": 0.0}, "budget_s is 0.0; expected more than 0"),
        ({"method": "guess"}, "unknown method 'guess'"),
        ({"devices": []}, "devices is empty"),
        ({"num_shards": 3}, "num_shards is 3; expected a power of two"),
        ({"resident": ("weights",)}, "weights"),
        # What is placed is also run.
        (
            {"args": (ARGS[0], jax.eval_shape(jnp.array, ARGS[1]))},
            r"args\[1\] is ShapeDtypeStruct.* expected an array",
        ),
    ],
)
def test_place_and_compile_refuses_before_it_measures(monkeypatch, options, message):
    monkeypatch.setattr(
        automatic, "measure_calibration", lambda *_, **__: pytest.fail("measured")
    )
    with pytest.raises(ValueError, match=message):
        compiled(**options)


def test_pins_are_kept_to_and_forbid_a_single_device():
    def fn(x, w):
        with jax.named_scope("first"):
            y = jnp.tanh(x @ w)
        with jax.named_scope("last"):
            return y @ w

    x = jnp.ones((8, 8))
    options = {"devices": jax.devices()[:2], "method": "heft", "budget_s": 1.0, "num_shards": 1}
    step = dj.engine.place_and_compile(fn, x, w=x, pin={"first": 1, "last": 0}, **options)
    assert dict(zip(step.names, step.plan.placement, strict=True)) == {
        name: int(name.startswith("first")) for name in step.names
    }
    np.testing.assert_allclose(step(x, w=x), fn(x, x), rtol=1e-6)
