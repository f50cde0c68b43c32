import jax
import numpy as np
import pytest

import kernels
from kernels import ops
from kernels.plan import make_plan
from kernels.trace import Record, infer_times
from tests.kernels.conftest import build, random_program

X = np.linspace(-1.0, 1.0, 8, dtype=np.float32)


def test_measure_s_is_the_median_makespan_after_warmup(executables):
    sharded = random_program(0, 8)
    step = kernels.compile(
        sharded, np.zeros(8, int), devices=jax.devices()[:1], executables=executables
    )
    makespans = []
    runner = step._runner

    def record(job, slots):
        makespans.append(runner(job, slots))
        return makespans[-1]

    step._runner = record
    seconds = kernels.measure_s(step, X, repeats=3, warmup=2)
    assert len(makespans) == 5
    assert seconds == np.median([trace.finish_s.max() for trace in makespans[2:]])


@pytest.mark.parametrize("mode", ["stream", "work_conserving"])
def test_measure_keeps_kernels_and_blocks(monkeypatch, mode):
    sharded = random_program(5, 8)
    devices = jax.devices()[:2]
    lowered = []
    lower = ops._lower
    monkeypatch.setattr(ops, "_lower", lambda *key: lowered.append(key) or lower(*key))
    cuts = []
    cut = ops.slice_block
    monkeypatch.setattr(ops, "slice_block", lambda *a: cuts.append(a) or cut(*a))
    measure = kernels.make_measure(sharded, (X,), devices, mode, repeats=2)
    assert lowered == []
    assert measure(np.zeros(8, int), None) > 0
    assert {device for _, device in lowered} == {devices[0]}
    measure(np.ones(8, int), np.arange(8))
    assert len(lowered) == len(set(lowered)) == 2 * len(set(sharded.kernels))
    num_cuts = len(cuts)
    measure(np.arange(8) % 2, np.arange(8)[::-1])
    assert len(lowered) == 2 * len(set(sharded.kernels))
    assert len(cuts) == num_cuts <= 3


def test_longer_work_measures_longer(executables):
    one = build([("spin", ["i0"])], ["t0"])
    three = build([("spin", ["i0"]), *[("spin", [f"t{v}"]) for v in range(2)]], ["t2"])
    seconds = []
    for program in (one, three):
        measure = kernels.make_measure(
            program, (X,), jax.devices()[:1], repeats=3, executables=executables
        )
        seconds.append(measure(np.zeros(program.graph.num_tasks, int), None))
    assert seconds[1] > 1.5 * seconds[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats is 0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"mode": "eager"}, "unknown mode 'eager'"),
        ({"devices": []}, "devices is empty"),
        ({"args": (X[:7],)}, r"args\[0\] is float32\[7\]"),
    ],
)
def test_make_measure_refuses(options, message):
    arguments = {"args": (X,), "devices": jax.devices()[:1], **options}
    with pytest.raises(ValueError, match=message):
        kernels.make_measure(random_program(0, 2), **arguments)


def test_measure_refuses_a_bad_placement():
    measure = kernels.make_measure(random_program(0, 2), (X,), jax.devices()[:1])
    with pytest.raises(ValueError, match=r"placement\[1\] is 1"):
        measure([0, 1], None)


def test_inferred_times_are_what_watching_proves():
    # Tasks 0 and 2 on device 0, task 1 on device 1 reads task 0: dispatched 0, transfer, 1, 2.
    sharded = build([("make", []), ("mean", ["t0", "i0"]), ("make", [])], ["t1", "t2"])
    plan = make_plan(sharded, np.array([0, 1, 0]), None)
    assert plan.order == (0, 1, 2)
    record = Record(plan)
    record.start_s[:] = [0.0, 2.0, 3.0, 1.0]  # enqueued: tasks 0, 1, 2, then the transfer
    record.finish_s[:] = [9.0, 7.0, 5.0, 6.0]  # task 0's watcher woke last
    infer_times(record, plan)
    # Task 2 had ended at 5, so task 0 had; then the transfer began, and task 2 as well.
    assert record.finish_s == [5.0, 7.0, 5.0, 6.0]
    assert record.start_s == [0.0, 6.0, 5.0, 5.0]
