from types import SimpleNamespace

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine import measure as measure_module
from doppler_jax.engine import memory
from doppler_jax.engine.agenda import make_agenda
from doppler_jax.engine.stream import infer_times
from doppler_jax.engine.trace import Record
from doppler_jax.graphs.build import topological_order
from tests.kernels.conftest import X, build, compile_on, random_program, spin_chain


def test_measure_s_is_the_median_whole_call_after_warmup(local, monkeypatch):
    sharded = random_program(0, 8)
    step = dj.compile(sharded, np.zeros(8, int), devices=local[:1])
    calls, call = [], type(step).__call__

    def record(step, *args):
        outputs = call(step, *args)
        calls.append((step.whole_call.seconds, step.schedule.finish_s.max()))
        return outputs

    monkeypatch.setattr(type(step), "__call__", record)
    seconds = dj.engine.measure_s(step, X, repeats=3, warmup=2)
    assert len(calls) == 5
    assert seconds == np.median([whole_s for whole_s, _ in calls[2:]])
    assert all(whole_s > makespan_s for whole_s, makespan_s in calls)


@pytest.mark.parametrize("mode", ["in_order", "work_conserving"])
def test_pairs_keep_kernels_and_blocks(monkeypatch, mode):
    sharded = random_program(5, 8)
    cuts, cut = [], memory.slice_block
    monkeypatch.setattr(memory, "slice_block", lambda *a: cuts.append(a) or cut(*a))
    devices = dj.engine.LocalDevices(jax.devices()[:2])
    compiled = devices.executables
    measure = dj.engine.make_paired_measure(sharded, (X,), devices, mode, max_slowdown=1e3)
    assert len(compiled) == len(cuts) == 0
    zeros, ones = np.zeros(8, int), np.ones(8, int)
    measure(ones, zeros, 2)
    before = len(compiled), len(cuts)
    assert before[1] <= 2 * 3  # inputs, once for each device
    measure(zeros, ones, 2)
    assert (len(compiled), len(cuts)) == before


def test_longer_work_measures_longer(local, least):
    steps = [
        dj.compile(program, np.zeros(program.graph.num_tasks, int), devices=local[:1])
        for program in (spin_chain(1), spin_chain(3))
    ]
    seconds = [np.inf, np.inf]

    def share():
        # Other work on the cores only lengthens: the least of all takes is compared.
        for k, step in enumerate(steps):
            seconds[k] = min(seconds[k], dj.engine.measure_s(step, X, repeats=3))
        return seconds[0] / seconds[1]

    least(share, 1 / 1.5)
    with pytest.raises(ValueError, match="repeats is 0"):
        dj.engine.measure_s(steps[0], X, repeats=0)
    with pytest.raises(ValueError, match="warmup is -1"):
        dj.engine.measure_s(steps[0], X, warmup=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "eager"}, "unknown mode 'eager'"),
        ({"devices": []}, "devices is empty"),
        ({"max_slowdown": 1.0}, "max_slowdown is 1.0; expected a numb"),
        ({"warmup": -1}, "warmup is -1"),
        ({"args": (X[:7],)}, r"args\[0\] is float32\[7\]"),
    ],
)
def test_what_measures_is_not_made_of_bad_arguments(options, message):
    arguments = {"args": (X,), "devices": jax.devices()[:1], **options}
    with pytest.raises(ValueError, match=message):
        dj.engine.make_paired_measure(random_program(0, 2), **arguments)


def test_measure_refuses_a_bad_placement():
    measure = dj.engine.make_paired_measure(random_program(0, 2), (X,), jax.devices()[:1])
    with pytest.raises(ValueError, match="puts task 1 on device 1"):
        measure(np.array([0, 1]), np.array([0, 1]), 1)


class Step:
    """Stands for a plan's calls: they take the seconds it is told, in their order."""

    mode, starts_are_inferred = "work_conserving", False

    def __init__(self, name, calls, times):
        self.name, self.calls, self.times, self.step = name, calls, times, self

    def seconds(self):
        self.calls.append(self.name)
        seconds = next(self.times)
        if isinstance(seconds, Exception):
            raise seconds
        self.schedule = SimpleNamespace(finish_s=[seconds])
        return seconds

    loop = seconds


class Bench:
    """Loads placement [0] as "old" and [1] as "new"."""

    def __init__(self, old, new):
        self.calls, self.loads = [], []
        self.seconds = {"old": iter(old), "new": iter(new)}

    def load(self, plan, timeout_s=None):
        name = ["old", "new"][plan.placement[0]]
        self.loads.append((name, timeout_s))
        return Step(name, self.calls, self.seconds[name])


OLD, NEW = np.array([0]), np.array([1])


def pairing(bench):
    pairing = measure_module._Pairing(bench.load, 2.0, warmup=1)
    return pairing.measure


def test_pairs_alternate_and_the_order_changes():
    bench = Bench(old=[9, 1, 4, 5, 6], new=[9, 7, 8, 9])
    measure = pairing(bench)
    paired = measure(NEW, OLD, 3)
    warm = ["old", "old", "new"]
    assert bench.calls == [*warm, "old", "new", "new", "old", "old", "new"]
    assert paired.incumbent_s == (4, 5, 6)
    assert paired.candidate_s == (7, 8, 9)


def test_the_incumbent_stays_loaded():
    bench = Bench(old=[9, *[1] * 9], new=[9, 1, 9, 1])
    measure = pairing(bench)
    for _ in range(2):
        assert measure(NEW, OLD, 1).ratio == 1
    assert [name for name, _ in bench.loads] == ["old", "new", "new"]
    assert measure(OLD, OLD, 1).candidate_s == (1,)
    assert len(bench.loads) == 3


def test_a_slow_candidate_is_run_once_and_the_trace_is_of_the_median_run():
    bench = Bench(old=[1] * 9, new=[9, 1.25, 1.75, 1.5])
    assert pairing(bench)(NEW, OLD, 3).trace.finish_s == [1.5]
    bench = Bench(old=[1, 1, 1.0], new=[1, 2.5])
    paired = pairing(bench)(NEW, OLD, 9)
    assert paired.is_aborted
    assert (paired.candidate_s, paired.incumbent_s) == ((2.5,), (1.0,))


def test_a_candidate_that_seems_endless_is_cut_short_and_other_errors_pass():
    error = dj.engine.TaskError("call", 0, 0, TimeoutError("too long"))
    bench = Bench(old=[1, 1], new=[error])
    paired = pairing(bench)(NEW, OLD, 9)
    ((_, first_limit), (_, limit_s)) = bench.loads
    assert first_limit is None
    assert paired.is_aborted
    assert paired.candidate_s == (limit_s,)
    assert limit_s > 2
    assert paired.trace is None
    error = dj.engine.TaskError("task", 0, 0, MemoryError("out of it"))
    with pytest.raises(dj.engine.TaskError, match="out of it"):
        pairing(Bench(old=[1, 1], new=[error]))(NEW, OLD, 9)


def test_a_call_out_of_time_is_recognised(local):
    """What `_Pairing` looks for is what the engine raises."""
    step = compile_on(spin_chain(2), np.zeros(2, int), local, 1, timeout_s=1e-4)
    with pytest.raises(dj.engine.TaskError) as caught:
        jax.block_until_ready(step(X))
    assert isinstance(caught.value.__cause__, TimeoutError)


@pytest.mark.parametrize("queue", ["fifo", "in_order"])
def test_plans_are_measured_in_pairs_on_devices(local, queue):
    sharded = random_program(3, 8)
    measure = dj.engine.make_paired_measure(sharded, (X,), local[:2], max_slowdown=1e3)
    split = np.arange(8) % 2
    ranks = np.argsort(topological_order(sharded.graph, np.arange(8)[::-1]))
    paired = measure(dj.Plan(split, ranks, queue), dj.Plan(np.zeros(8, int)), 3)
    assert len(paired.candidate_s) == len(paired.incumbent_s) == 3
    assert min(*paired.candidate_s, *paired.incumbent_s) > 0
    assert 0 < paired.trace.finish_s.max() < np.median(paired.candidate_s)
    np.testing.assert_array_equal(paired.trace.placement, split)
    order = {"queue": queue, "priority": None if queue == "fifo" else ranks}
    dj.simulator.validate(sharded.graph, paired.trace, **order)


def test_inferred_times_are_what_watching_proves():
    # Tasks 0 and 2 on device 0, task 1 on device 1 reads task 0: dispatched 0, transfer, 1, 2.
    sharded = build([("make", []), ("mean", ["t0", "i0"]), ("make", [])], ["t1", "t2"])
    agenda = make_agenda(sharded, dj.Plan(np.array([0, 1, 0])))
    assert agenda.order == (0, 1, 2)
    record = Record(agenda)
    record.start_s[:] = [0.0, 2.0, 3.0, 1.0]  # enqueued: tasks 0, 1, 2, then the transfer
    record.finish_s[:] = [9.0, 7.0, 5.0, 6.0]  # task 0's watcher woke last
    infer_times(record, agenda)
    # Task 2 had ended at 5, so task 0 had; then the transfer began, and task 2 as well.
    assert record.finish_s == [5.0, 7.0, 5.0, 6.0]
    assert record.start_s == [0.0, 6.0, 5.0, 5.0]
