"""`place_and_compile`, and functions that go on learning."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine import automatic
from doppler_jax.training.paired import Paired
from tests.generators import free_costs
from tests.kernels.conftest import X, build


@pytest.fixture(autouse=True)
def known_host(monkeypatch):
    """The host's rates without measuring them."""
    four = dj.make_cluster("reference_x4")
    two = jax.tree.map(lambda array: array[(slice(2),) * array.ndim], four)
    monkeypatch.setattr(automatic, "measure_host", lambda devices: two)


def fn(params, x):
    return jax.nn.relu(x @ params["w"]) @ params["w"]


ARGS = (
    {"w": np.linspace(-1.0, 1.0, 256, dtype=np.float32).reshape(16, 16)},
    np.ones((8, 16), np.float32),
)


def must_not_measure(*_, **__):
    pytest.fail("measured")


SHAPE = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def compiled(args=ARGS, **options):
    options = {"devices": jax.devices()[:2], "method": "critical_path", **options}
    return dj.place_and_compile(fn, *args, **options)


def pairing(monkeypatch, ratio):
    """Makes the placement found seem `ratio` times as slow as a single device."""
    asked, found, place = [], {}, automatic.place

    def pair(candidate, incumbent, rounds):
        asked.append((candidate, incumbent))
        return Paired((ratio,) * rounds, (1.0,) * rounds)

    monkeypatch.setattr(automatic, "make_paired_measure", lambda *_: pair)

    def split(graph, costs, **options):
        found["costs"], found["budget_s"] = costs, options["budget_s"]
        placed = place(graph, costs, **options)
        object.__setattr__(placed, "placement", np.arange(graph.num_tasks) % 2)
        return placed

    monkeypatch.setattr(automatic, "place", split)
    return asked, found


def test_the_faster_of_the_placement_and_one_device_is_returned(monkeypatch):
    asked, found = pairing(monkeypatch, ratio=0.9)
    step = compiled()
    np.testing.assert_allclose(step(*ARGS), fn(*ARGS), rtol=1e-5)
    assert step.device_names == tuple(map(str, jax.devices()[:2]))
    dj.validate(step.graph, step.trace)
    ((candidate, single),) = asked
    np.testing.assert_array_equal(step.trace.placement, candidate)
    assert set(single) == {found["costs"].compute_s.sum(0).argmin()}
    pairing(monkeypatch, ratio=1.1)
    step = compiled()
    step(*ARGS)
    assert len(set(step.trace.placement)) == 1


def test_arguments_may_come_with_each_call():
    step = compiled(resident=(0,))
    assert set(step.graph.input_home) == {dj.RESIDENT, 0}
    again = (ARGS[0], 2 * ARGS[1])
    for args in (ARGS, again):
        np.testing.assert_allclose(step(*args), fn(*args), rtol=1e-5)


def test_learning_may_go_on_online():
    function = compiled(online=True)
    np.testing.assert_allclose(function(*ARGS), fn(*ARGS), rtol=1e-5)
    function.close()


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
        ({"mode": "stream", "online": True}, "mode is 'stream'"),
        ({"max_slowdown": 1.0}, "max_slowdown is 1.0; expected a number above 1"),
        ({"budget_s": 0.0}, "budget_s is 0.0; expected more than 0"),
        ({"method": "guess"}, "unknown method 'guess'"),
        ({"devices": []}, "devices is empty"),
        ({"num_shards": 3}, "num_shards is 3; expected a power of two"),
        ({"resident": ("weights",)}, "weights"),
        # What is placed is also run.
        ({"args": (ARGS[0], SHAPE)}, r"args\[1\] is ShapeDtypeStruct.* expected an array"),
    ],
)
def test_place_and_compile_refuses_before_it_measures(monkeypatch, options, message):
    monkeypatch.setattr(automatic, "measure_calibration", must_not_measure)
    with pytest.raises(ValueError, match=message):
        compiled(**options)


SHARDED = build([("spin", ["i0"]), ("spin", ["i1"]), ("mean", ["t0", "t1"])], ["t2"])
TOGETHER, APART = np.array([0, 0, 0]), np.array([0, 1, 0])


def make_costs(transfer_s):
    """Two long tasks and a short one, whose operand may have to be moved."""
    seconds = [[1.0, 1.0], [1.0, 1.0], [0.1, 0.1]]
    return free_costs(SHARDED.graph, seconds, latency_s=transfer_s * (1 - np.eye(2)))


class Step:
    """Stands for a placed function: its calls take what the simulator says."""

    def __init__(self, placement, costs, fails):
        self.placement, self.fails = placement, fails
        self.trace = dj.simulate_oracle(SHARDED.graph, costs, placement, links="serial")

    def __call__(self, x):
        if self.fails(self.placement):
            raise dj.TaskError("task 0", 0, 0, MemoryError("out of it"))
        return tuple(self.placement.tolist())


@pytest.fixture
def learner(monkeypatch):
    """Makes an `OnlineFunction` whose devices are simulated, at costs that it need not know."""
    made = []

    def make(true, believed, start, fails=lambda placement: False, max_slowdown=10.0):
        monkeypatch.setattr(automatic, "load", lambda s, p, *_: Step(p, true, fails))
        monkeypatch.setattr(automatic, "_EVALUATIONS", 256)
        devices = dj.LocalDevices(jax.devices()[:2])
        made.append(dj.OnlineFunction(SHARDED, believed, devices, start, max_slowdown))
        return made[-1]

    yield make
    for function in made:
        function.close()


def call_until(function, is_enough, most_s=120):
    """Calls until something is so, and returns where each call ran."""
    ran, began = [], time.monotonic()
    while not is_enough():
        ran.append(function(X))
        assert time.monotonic() - began < most_s  # the search has to be compiled
        time.sleep(1e-3)
    return ran


def is_over(function):
    found = function._next
    return found is not None and found.done() and found.result() is None


def test_calls_find_the_better_placement_though_it_was_believed_worse(learner):
    function = learner(make_costs(0.1), make_costs(9.0), TOGETHER)
    ran = call_until(function, lambda: is_over(function))
    assert dj.makespan_s(function.step.trace) == pytest.approx(1.2)
    assert function.placement[0] != function.placement[1]
    assert ran[0] == tuple(TOGETHER)
    assert function(X) == tuple(function.placement)
    taken = [placement.tolist() for _, placement, is_taken in function.history if is_taken]
    assert taken[-1] == function.placement.tolist()


def test_the_incumbent_stays_where_nothing_is_faster(learner):
    function = learner(make_costs(9.0), make_costs(0.1), TOGETHER)
    ran = call_until(function, lambda: is_over(function))
    np.testing.assert_array_equal(function.placement, TOGETHER)
    assert function.history
    assert not any(taken for _, _, taken in function.history)
    # A candidate that is slower each time has a call that warms it up and as few as show it.
    tried = len(ran) - ran.count(tuple(TOGETHER))
    assert tried <= (1 + automatic._LOOK) * len(function.history)


def test_a_candidate_beyond_the_limit_has_one_call(learner):
    function = learner(make_costs(9.0), make_costs(0.1), TOGETHER, max_slowdown=1.5)
    ran = call_until(function, lambda: is_over(function))
    slow = {tuple(p.tolist()) for _, p, _ in function.history if 0 < p.sum() < 3}
    assert slow
    for placement in slow:
        assert ran.count(placement) == 1


def test_a_call_that_fails_on_a_candidate_is_run_on_the_incumbent(learner):
    def fails(placement):
        return not np.array_equal(placement, TOGETHER)

    function = learner(make_costs(0.1), make_costs(0.1), TOGETHER, fails)
    assert set(call_until(function, lambda: is_over(function))) == {tuple(TOGETHER)}
    assert function.history


def test_a_call_that_fails_on_the_incumbent_raises(learner):
    function = learner(make_costs(0.1), make_costs(0.1), TOGETHER, lambda placement: True)
    with pytest.raises(dj.TaskError, match="out of it"):
        function(X)


def test_an_online_function_runs_on_devices():
    devices = dj.LocalDevices(jax.devices()[:2])
    function = dj.OnlineFunction(SHARDED, make_costs(0.1), devices, APART)
    step = dj.compile(SHARDED, TOGETHER, devices=jax.devices()[:2])
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, function(X), step(X))
    np.testing.assert_array_equal(function.step.trace.placement, APART)
    function.close()
    function(X)


def test_a_limit_must_leave_room(learner):
    with pytest.raises(ValueError, match=r"max_slowdown is 1.0; expected a number above 1"):
        learner(make_costs(1.0), make_costs(1.0), TOGETHER, max_slowdown=1.0)


def test_trials_alternate_which_runs_first():
    trial = automatic._Trial(step=None, placement=APART, is_warm=True)
    order = []
    for _ in range(4):
        mine = trial.is_candidates_turn
        order.append("new" if mine else "old")
        (trial.candidate_s if mine else trial.incumbent_s).append(1.0)
    assert order == ["old", "new", "new", "old"]
    assert dataclasses.replace(trial, is_warm=False).is_candidates_turn
