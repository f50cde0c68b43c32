"""`distribute`: a plan runs where its whole calls beat `jit`, and else `jit` does."""

from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine import distributed as distribute

ARGS = {"w": jnp.linspace(-1.0, 1.0, 256).reshape(16, 16)}, jnp.ones((8, 16))


def fn(params, x, *, scale=1.0):
    return scale * jax.nn.relu(x @ params["w"]) @ params["w"]


pytestmark = pytest.mark.usefixtures("known_host")


@pytest.fixture
def planned(monkeypatch):
    """Records what is planned."""
    spy = mock.Mock(wraps=distribute.place_and_compile)
    spy.__kwdefaults__ = distribute.place_and_compile.__kwdefaults__
    monkeypatch.setattr(distribute, "place_and_compile", spy)
    return spy


def choosing(monkeypatch, wanted):
    def compare(rivals, args, kwargs, until_s):
        name = next(name for name in rivals if name.startswith(wanted))
        return distribute.Compared(dict.fromkeys(rivals, (1.0,)), name)

    monkeypatch.setattr(distribute, "compare_calls", compare)


def distributed(**options):
    return dj.distribute(
        fn, devices=jax.devices()[:2], method="critical_path", budget_s=5.0, **options
    )


@pytest.mark.parametrize("wanted", ["plan", "jit"])
def test_what_wins_runs_and_returns_what_the_function_does(
    wanted, planned, monkeypatch, capsys
):
    choosing(monkeypatch, wanted)
    fast = distributed()
    for k in range(3):
        x = ARGS[1] * k
        np.testing.assert_allclose(fast(ARGS[0], x), fn(ARGS[0], x), rtol=1e-5, atol=1e-6)
    assert planned.call_count == 1
    said = capsys.readouterr().err
    assert said.startswith("doppler_jax: fn: " + wanted)
    assert said.count("\n") == 1
    assert fast.compared.chosen.startswith(wanted)
    assert (fast.plan is None) == (wanted == "jit")
    if wanted == "plan":
        assert len(fast.profile().device_names) == 2
    else:
        with pytest.raises(ValueError, match="no plan runs"):
            fast.profile()


def test_other_shapes_and_keywords_are_planned_anew(planned, monkeypatch):
    choosing(monkeypatch, "plan")
    fast = distributed()
    longer = jnp.ones((12, 16))
    for args, kwargs in (
        (ARGS, {}),
        ((ARGS[0], longer), {}),
        (ARGS, {"scale": 2.0}),
        (ARGS, {}),
    ):
        np.testing.assert_allclose(
            fast(*args, **kwargs), fn(*args, **kwargs), rtol=1e-5, atol=1e-6
        )
    assert planned.call_count == 3


def test_it_really_compares_whole_calls():
    fast = distributed()
    np.testing.assert_allclose(fast(*ARGS), fn(*ARGS), rtol=1e-5, atol=1e-6)
    names = set(fast.compared.call_s)
    assert names == {"plan", f"jit on {jax.devices()[0]}"}
    assert all(min(times) > 0 for times in fast.compared.call_s.values())


@pytest.mark.parametrize(
    ("plan_s", "jit_s", "chosen"),
    [(1.0, [2.0], "plan"), (2.0, [1.0], "a"), (1.0, [1.0], "a"), (1.0, [3.0, 0.5], "b")],
)
def test_a_plan_has_to_be_faster_beyond_doubt(plan_s, jit_s, chosen, monkeypatch):
    clock, rng = SimpleNamespace(now=0.0), np.random.default_rng(0)
    monkeypatch.setattr(distribute.time, "perf_counter", lambda: clock.now)

    def taking(seconds):
        def call():
            clock.now += seconds * rng.uniform(0.9, 1.1)

        return call

    rivals = {"plan": taking(plan_s), **dict(zip("ab", map(taking, jit_s), strict=False))}
    found = distribute.compare_calls(rivals, (), {}, np.inf)
    assert found.chosen == chosen
    assert {len(times) for times in found.call_s.values()} == {distribute.ROUNDS}
    # Too few calls to be sure.
    assert distribute.compare_calls(rivals, (), {}, -np.inf).chosen != "plan"


def test_under_transformations_it_is_the_function(planned):
    fast = distributed()
    loss = lambda f: lambda x: f(ARGS[0], x).sum()  # noqa: E731
    found = jax.jit(jax.grad(loss(fast)))(ARGS[1])
    np.testing.assert_allclose(found, jax.grad(loss(fn))(ARGS[1]), rtol=1e-5, atol=1e-6)
    assert not planned.called


def test_one_device_effects_and_pins_are_not_compared(planned, capsys):
    alone = dj.distribute(fn, devices=jax.devices()[:1])
    np.testing.assert_allclose(alone(*ARGS), fn(*ARGS), rtol=1e-5, atol=1e-6)
    assert "nothing to distribute" in capsys.readouterr().err

    @dj.distribute(devices=jax.devices()[:2])
    def printing(x):
        jax.debug.print("seen")
        return 2 * x

    np.testing.assert_array_equal(printing(ARGS[1]), 2 * ARGS[1])
    jax.effects_barrier()
    printed = capsys.readouterr()
    assert printed.out.count("seen") == 1
    assert "has effects" in printed.err
    assert not planned.called
    pinned = distributed(pin={"*": 1})
    pinned(*ARGS)
    assert set(pinned.plan.placement.tolist()) == {1}
    assert "held to its pins" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": 2}, r"unknown options \['shards'\]; expected some of \['budget_s'"),
        ({"budget_s": 0.0}, "budget_s is 0.0; expected more than 0"),
        ({"devices": []}, "devices"),
    ],
)
def test_bad_options_are_refused_before_a_call(options, message):
    with pytest.raises(ValueError, match=message):
        dj.distribute(fn, **options)


def test_a_keyword_that_is_an_option_is_refused():
    fast = dj.distribute(lambda x, mode: x * mode, devices=jax.devices()[:2], mode="in_order")
    with pytest.raises(ValueError, match="which are options"):
        fast(ARGS[1], mode=jnp.ones(()))
