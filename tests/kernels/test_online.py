import dataclasses
import time

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine import automatic
from doppler_jax.types import Costs
from tests.kernels.conftest import build

X = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
SHARDED = build([("spin", ["i0"]), ("spin", ["i1"]), ("mean", ["t0", "t1"])], ["t2"])
TOGETHER, APART = np.array([0, 0, 0]), np.array([0, 1, 0])


def make_costs(transfer_s):
    """Two long tasks and a short one, whose operand may have to be moved."""
    return Costs(
        compute_s=np.array([[1.0, 1.0], [1.0, 1.0], [0.1, 0.1]]),
        tensor_bytes=SHARDED.graph.tensor_bytes,
        input_bytes=SHARDED.graph.input_bytes,
        latency_s=transfer_s * (1 - np.eye(2)),
        seconds_per_byte=np.zeros((2, 2)),
        capacity_bytes=np.full(2, np.inf),
    )


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
        monkeypatch.setattr(
            automatic, "load", lambda s, placement, *_: Step(placement, true, fails)
        )
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
