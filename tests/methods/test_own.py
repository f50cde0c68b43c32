"""Methods of a user's own: what they may return, and how `score` holds them to the budget."""

import itertools

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.methods import registry
from doppler_jax.simulator.native import simulate_one
from tests.methods.cases import DEVICES, assert_is_sound, make


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    monkeypatch.setattr(registry, "OWN", {})


@pytest.fixture
def problem():
    return make("unequal")


def heft_plan(request):
    return dj.place(request.graph, request.costs, method="heft").plan


RETURNED = {
    "plan": heft_plan,
    "placed": lambda request: dj.place(request.graph, request.costs, method="heft"),
    "placement": lambda request: heft_plan(request).placement,
    "placements": lambda request: np.stack([np.full(12, 1), heft_plan(request).placement]),
    "list": lambda request: heft_plan(request).placement.tolist(),
    "scored": lambda request: request.score(heft_plan(request).placement) and None,
    "scored order": lambda request: request.score(*in_order(request)) and None,
    "any order": lambda request: dj.Plan(
        heft_plan(request).placement, -np.arange(12), "priority"
    ),
    "candidates": lambda request: dj.methods.Candidates(np.zeros((1, 12), int), 1),
}


def in_order(request):
    plan = heft_plan(request)
    return plan.placement, plan.priority if request.orders else None


@pytest.mark.parametrize("queue", ["in_order", "priority", "fifo"])
@pytest.mark.parametrize("form", RETURNED)
def test_whatever_form_a_plan_has_it_is_judged(form, queue, problem):
    placed = dj.place(*problem, method=RETURNED[form], queue=queue)
    assert_is_sound(placed, *problem)
    assert placed.evaluations == 1
    assert placed.queue == queue
    if form in ("plan", "placed", "scored order") and queue == "in_order":
        assert placed.makespan_s == dj.place(*problem, method="heft").makespan_s


def endless(batch):
    def draw(request):
        rng = np.random.default_rng(request.seed)
        while True:
            found = request.score(rng.integers(DEVICES, size=(batch, 12)))
            assert found.shape == (batch,)

    return draw


@pytest.mark.parametrize("noise", [0, 2])
@pytest.mark.parametrize("batch", [1, 7])
def test_scoring_ends_with_the_budget_and_the_best_is_returned(problem, batch, noise):
    objective = dj.Objective(num_noise=noise)
    placed, same = (
        dj.place(
            *problem, method=endless(batch), max_evaluations=50, objective=objective, key=1
        )
        for _ in range(2)
    )
    assert placed.evaluations == 50
    np.testing.assert_array_equal(placed.placement, same.placement)
    assert (np.diff(placed.curve.makespan_s) < 0).all()
    assert placed.curve.makespan_s[-1] == placed.objective_s
    if not noise:
        rng = np.random.default_rng(1 << 32)  # the seed 1, as a key's words
        drawn = [rng.integers(DEVICES, size=(batch, 12)) for _ in range(0, 50, batch)]
        first_s = dj.simulate(*problem, np.concatenate(drawn)[:50]).makespan_s.min()
        np.testing.assert_allclose(placed.makespan_s, first_s, rtol=1e-6)


def test_seconds_the_bound_and_ctrl_c_end_it_too(problem, monkeypatch):
    assert dj.place(*problem, method=endless(3), budget_s=0.2).evaluations > 3
    alone = dj.from_edge_delays([1.0] * 12, [], num_devices=12)
    evenly = lambda request: [request.score(np.arange(12)) for _ in itertools.count()]  # noqa: E731
    placed = dj.place(*alone, method=evenly)
    assert (placed.evaluations, placed.proven) == (1, True)

    def stopped(request):
        request.score(np.zeros(12, int))
        raise KeyboardInterrupt

    placed = dj.place(*problem, method=stopped)
    assert placed.interrupted
    assert set(placed.placement) == {0}


def test_before_the_native_code_is_there_the_oracle_scores(problem, monkeypatch):
    for name in ("is_compiled", "wait_until_compiled"):
        monkeypatch.setattr(f"doppler_jax.methods.request.{name}", lambda *_: False)
    placed = dj.place(*problem, method=endless(2), max_evaluations=6)
    assert placed.evaluations == 6
    schedule = simulate_one(*problem, placed.placement)
    assert dj.simulator.makespan_s(schedule) >= placed.makespan_s


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda request: None, r"'<lambda>' returned nothing and scored nothing"),
        (
            lambda request: np.zeros(3, int),
            r"'<lambda>' returned ndarray, which is no plan: .*12",
        ),
        (lambda request: np.full(12, DEVICES), r"on device 3; devices are 0 to 2"),
        (lambda request: request.score(np.full(12, -1)), r"on device -1; devices are 0 to 2"),
        (lambda request: "plan", r"returned str, which is no plan"),
        (
            lambda request: request.score(np.zeros(12, int), -request.problem.rank),
            r"in_order",
        ),
    ],
)
def test_what_is_no_plan_is_refused_by_name(method, message, problem):
    with pytest.raises(ValueError, match=message):
        dj.place(*problem, method=method)


def test_pins_groups_and_devices_that_cannot_run_a_task_hold(problem):
    placed = dj.place(
        *problem, method=endless(4), max_evaluations=400, pin={"0": 1}, together=[["3", "4"]]
    )
    assert placed.placement[0] == 1
    assert placed.placement[3] == placed.placement[4]
    assert placed.evaluations <= 400
    with pytest.raises(ValueError, match="puts task 0 on device 0, which cannot run it"):
        dj.place(*problem, method=lambda request: np.zeros(12, int), pin={"0": 1})


def test_names_are_registered_imported_or_refused(problem, tmp_path, monkeypatch):
    dj.register_method("mine", heft_plan)
    assert "mine" in dj.list_methods()
    assert dj.place(*problem, method="mine").method == "mine"
    with pytest.raises(ValueError, match="a cache needs a method whose settings tell it apart"):
        dj.place(*problem, method="mine", cache=tmp_path)
    (tmp_path / "of_mine.py").write_text("def first(request): return [0] * 12")
    monkeypatch.chdir(tmp_path)
    placed = dj.place(*problem, method="of_mine:first")
    assert (placed.method, set(placed.placement)) == ("of_mine:first", {0})
    with pytest.raises(ValueError, match="'of_mine:second' cannot be imported"):
        dj.place(*problem, method="of_mine:second")
    for name in ("heft", "doppler", "", "a:b", 3):
        with pytest.raises(ValueError, match=r"name is .*; expected a word that names none"):
            dj.register_method(name, heft_plan)
    with pytest.raises(ValueError, match="method 'other' is 'heft'; expected a function"):
        dj.register_method("other", "heft")
