"""Workers that give a device its next task before it has ended the last."""

import time

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.simulator.validate import validate
from tests.kernels.conftest import (
    FAILING,
    build,
    compile_on,
    num_threads,
    random_program,
    run_plainly,
)
from tests.kernels.test_failure import FAILING_PROGRAM
from tests.kernels.test_inputs import at_home

X = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
blocking_modes = pytest.mark.parametrize("mode", ["bulk_synchronous", "work_conserving"])


@pytest.fixture(autouse=True)
def run_ahead_on_cpu(monkeypatch):
    for module in ("local", "threads"):
        monkeypatch.setattr(f"doppler_jax.engine.{module}.run_ahead", lambda device: 1)


@blocking_modes
@pytest.mark.parametrize("num_tasks", [1, 8, 40])
def test_runs_random_programs(local, num_tasks, mode):
    rng = np.random.default_rng(num_tasks)
    for seed in range(10):
        sharded = at_home(random_program(seed, num_tasks), (0, -1, -1))
        placement = rng.integers(0, 3, num_tasks)
        step = compile_on(sharded, placement, local, 3, mode=mode)
        np.testing.assert_allclose(step(X)["out"], run_plainly(sharded, X)["out"], rtol=1e-5)
        validate(sharded.graph, step.trace, tolerance=0)


class Late:
    """What a device that takes its time gives at once."""

    def __init__(self, array, now, seen):
        self.array, self.now, self.seen = array, now, seen

    def block_until_ready(self):
        time.sleep(0.02)
        self.seen.append(len(self.now))
        self.now.pop()


def test_a_device_has_one_task_waiting_and_no_more(local, monkeypatch):
    # A chain: what follows on the same device is enqueued before its operand is there.
    tasks = [("make", []), *[("mean", [f"t{v}", "i0"]) for v in range(5)]]
    step = compile_on(build(tasks, ["t5"]), [0] * 6, local, 1)
    now, seen = [], []
    job = step._loaded

    def later(*_):
        now.append(0)
        return (Late(None, now, seen),)

    object.__setattr__(job, "executables", (later,) * 5 + (job.executables[0],))
    monkeypatch.setattr("doppler_jax.engine.memory.Buffers.operands", lambda self, v: [])
    step(X)
    assert max(seen) == 2
    assert seen[:4] == [2] * 4  # the device never waited for the host
    assert (np.diff(step.trace.finish_s) >= 0).all()
    assert (step.trace.start_s[1:] >= step.trace.finish_s[:-1]).all()


@blocking_modes
def test_the_first_to_fail_is_named_and_the_next_call_works(local, mode, monkeypatch):
    step = compile_on(FAILING_PROGRAM, [0, 1, 1, 1, 1, 0], local, mode=mode)
    threads = num_threads()
    for fails in (True, False, True):
        monkeypatch.setitem(FAILING, "now", fails)
        if fails:
            with pytest.raises(dj.TaskError, match=r"^task 2 \(boom2\) .* device 1"):
                step(X)
        else:
            expected = run_plainly(FAILING_PROGRAM, X)["out"]
            np.testing.assert_allclose(step(X)["out"], expected, rtol=1e-4)
        assert num_threads() == threads
