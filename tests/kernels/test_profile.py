import numpy as np
import pytest

from doppler_jax.engine.profile import dispatch_gaps_s, profile
from doppler_jax.engine.trace import CALLER, Chore, WholeCall
from doppler_jax.simulator.oracle import simulate_oracle
from doppler_jax.simulator.synchronous import simulate_synchronous
from tests.kernels.conftest import X, all_modes, build, check_whole_call, compile_on
from tests.simulator.cases import change, small_problem

# Device 0 runs tasks 0 and 1; both send 2 and 3 bytes to task 3 on device 1, behind task 2.
GRAPH, COSTS = small_problem([1, 1, 4, 1], [(0, 2, [3]), (1, 3, [3])], 2)
PLACES = [0, 0, 1, 1]
TRACE = simulate_oracle(GRAPH, COSTS, PLACES)
NAMES = ["a", "b", "c", "d"]
DEVICES = ["north", "south"]
NOTHING = []


def late(seconds):
    """The trace with a dispatch of so many seconds before tasks 1 and 3."""
    later = simulate_oracle(GRAPH, COSTS, PLACES)
    return change(
        later,
        start_s={1: 1 + seconds, 3: 5 + 2 * seconds},
        finish_s={1: 2 + seconds, 3: 6 + 2 * seconds},
        transfer_start_s={1: 2 + seconds},
        transfer_finish_s={1: 5 + seconds},
    )


def test_a_gap_begins_when_the_device_is_free_and_a_task_ready():
    assert dispatch_gaps_s(GRAPH, TRACE, NOTHING).tolist() == [0, 0, 0, 0]
    # Task 3's last input arrives at 5.5 s on a device free since 4 s.
    assert dispatch_gaps_s(GRAPH, late(0.5), NOTHING).tolist() == [0, 0.5, 0, 0.5]


def test_what_a_device_spends_on_transfers_is_no_gap():
    # Of the 0.5 s before task 1, 0.2 s; of those before task 3, all that is after its input.
    handling = [(0, 0.9, 1.1), (0, 1.3, 1.4), (1, 4.0, 4.25), (1, 5.0, 6.0)]
    gaps_s = dispatch_gaps_s(GRAPH, late(0.5), handling)
    np.testing.assert_allclose(gaps_s, [0, 0.3, 0, 0], atol=1e-12)
    found = profile(GRAPH, late(0.5), NAMES, DEVICES, [7.0, 9.0], handling)
    np.testing.assert_allclose(found.idle_ready_s, [0.3, 0.0], atol=1e-12)
    np.testing.assert_allclose(found.handling_s, [0.3, 1.25])
    assert "| 300.0 ms | 300.0 ms | 7" in " ".join(str(found).split())


def test_a_gap_counts_a_ready_task_that_runs_later():
    # The device takes task 0 first, whose input arrives at 2 s, though task 1 was ready at 0.
    graph, costs = small_problem([1, 1, 1], [(2, 1, [0])], 2)
    times = {"start_s": {0: 2.0, 1: 3.0}, "finish_s": {0: 3.0, 1: 4.0}}
    trace = change(simulate_oracle(graph, costs, [0, 0, 1]), **times)
    assert dispatch_gaps_s(graph, trace, NOTHING).tolist() == [2, 0, 0]


def test_a_barrier_is_idle_time_with_a_ready_task():
    # Task 2 reads task 0 on its own device, but must wait for task 1 and its transfer.
    graph, costs = small_problem([1, 3, 1, 1], [(0, 1, [2]), (1, 2, [3])], 3)
    places = [0, 1, 0, 2]
    assert dispatch_gaps_s(graph, simulate_oracle(graph, costs, places), NOTHING).sum() == 0
    gaps = dispatch_gaps_s(graph, simulate_synchronous(graph, costs, places), NOTHING)
    assert gaps.tolist() == [0, 0, 4, 0]


def test_inputs_that_are_moved_are_waited_for():
    graph, costs = small_problem([1, 1], [], 2, [(0, 3, [1])])
    trace = simulate_oracle(graph, costs, [0, 1])
    assert dispatch_gaps_s(graph, trace, NOTHING).tolist() == [0, 0]
    later = change(trace, start_s={1: 3.25}, finish_s={1: 4.25})
    assert dispatch_gaps_s(graph, later, NOTHING).tolist() == [0, 0.25]


def test_numbers():
    found = profile(GRAPH, late(0.5), NAMES, DEVICES, [7.0, 9.0])
    assert found.makespan_s == 7
    assert found.explanation.utilisation.tolist() == [2 / 7, 5 / 7]
    assert found.idle_ready_s.tolist() == [0.5, 0.5]
    assert found.idle_ready_share == 1 / 14
    assert found.gap_s(0.5) == 0.25
    assert found.gap_s(1.0) == 0.5
    assert (found.num_transfers, found.transfer_s) == (2, 5)
    # 1 to 3 s behind task 2, which ends at 4 s; 2.5 to 5.5 s.
    assert found.overlapped_s == 3.5
    assert found.peak_bytes.tolist() == [7, 9]
    assert [link.item for link in found.explanation.chain] == [0, 1, 1, 3]


def test_the_bound_is_of_the_tasks_as_they_ran():
    assert profile(GRAPH, TRACE, NAMES, DEVICES, [7.0, 9.0]).lower_bound_s == 4  # task 2
    slow = change(TRACE, finish_s={3: 10.0})  # 5 s in place of 1 s
    assert profile(GRAPH, slow, NAMES, DEVICES, [7.0, 9.0]).lower_bound_s == 6  # tasks 1 and 3
    alone = simulate_oracle(GRAPH, COSTS, [0, 0, 0, 0])
    assert profile(GRAPH, alone, NAMES, DEVICES[:1], [7.0]).lower_bound_s == 7  # all of them


def test_text():
    text = str(profile(GRAPH, late(0.5), NAMES, DEVICES, [7.0, 9.0]))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "makespan 7.000 s, 4 tasks on 2 devices; with tasks as fast as here none below 4.000 s",
        "idle with a ready task: 1.000 s (7.1% of the devices' time); before a task 250 ms "
        "(median), 500 ms (99th percentile)",
        "transfers: 2, 5 bytes, 5.000 s together, 70% of it while the receiver computed",
        "| 0 (north) | 2.000 s | 29% | 500.0 ms | 0 s | 7 |",
        "| 1 (south) | 5.000 s | 71% | 500.0 ms | 0 s | 9 |",
        "| 0 to 1 | 4.500 s | 64% | 5 |",
        "| c | 4.000 s | 57.1% |",
        "critical chain: 3 tasks, 1 transfers: compute 2.000 s (29%), transfer 3.000 s (43%), "
        "queueing 1.000 s (14%), idle 1.000 s (14%)",
    ):
        assert line in lines
    assert lines.index("| c | 4.000 s | 57.1% |") < lines.index("| a | 1.000 s | 14.3% |")


def test_nothing_at_all():
    graph, costs = small_problem([], [], 2)
    trace = simulate_oracle(graph, costs, np.zeros(0, int))
    found = profile(graph, trace, [], DEVICES, [0, 0])
    assert found.idle_ready_share == found.gap_s(0.99) == found.overlapped_s == 0
    assert "makespan 0 s" in str(found)


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"peak_bytes has shape \(1,\), expected \(2,\)"):
        profile(GRAPH, TRACE, NAMES, DEVICES, [7.0])
    with pytest.raises(ValueError, match="names has 1 entries, expected 4"):
        profile(GRAPH, TRACE, ["a"], DEVICES, [7.0, 9.0])
    early = change(TRACE, start_s={3: 0.0}, finish_s={3: 1.0})
    with pytest.raises(ValueError, match="task 3"):
        profile(GRAPH, early, NAMES, DEVICES, [7.0, 9.0])


@all_modes
def test_of_a_real_call(mode, local):
    tasks = [("spin", ["i0"]), ("spin", ["i1"]), ("mean", ["t0", "t1"]), ("spin", ["t2"])]
    step = compile_on(build(tasks, ["t3"]), [0, 1, 1, 0], local, mode=mode)
    with pytest.raises(ValueError, match="call the function first"):
        step.profile()
    step(X)
    found = step.profile()
    assert found.makespan_s == step.schedule.finish_s.max()
    assert found.num_transfers == 2
    assert 0 < found.lower_bound_s <= found.makespan_s * (1 + 1e-9)
    # Two of the loops may run at once, the third waits for both.
    assert found.lower_bound_s >= (found.task_s[3] + found.task_s[:2].max()) * (1 - 1e-9)
    assert found.peak_bytes.tolist() == step.peak_bytes.tolist()
    assert not found.handling_s.any()
    assert f"| 1 ({step.device_names[1]}) |" in str(found)
    assert "| spin3 |" in str(found)
    assert "critical chain" in str(found)


def test_the_rest_of_a_call_is_what_nothing_else_covers():
    # The trace is from 0 to 6 s.
    chores = (Chore("lay", CALLER, -3.0, -1.0), Chore("lay", 1, -2.0, -0.5))
    chores += (Chore("join", CALLER, 5.0, 7.0), Chore("join", CALLER, 7.25, 8.0))
    found = profile(GRAPH, TRACE, NAMES, DEVICES, [7.0, 9.0], [], WholeCall(-3.5, 8.5, chores))
    assert TRACE.finish_s.max() == 6
    assert found.rest_s == 0.5 + 0.5 + 0.25 + 0.5
    text = " ".join(str(found).split())
    assert "call, 12.00 s" in text
    assert "| lay | the caller | 2.000 s | 16.7% |" in text
    assert "| join | the caller | 2.750 s | 22.9% |" in text
    assert "| tasks and transfers | all | 6.000 s | 50.0% |" in text
    assert "| rest: threads or processes wake | | 1.750 s | 14.6% |" in text


def test_a_thread_that_wakes_late_is_rest_and_no_part_of_the_tasks():
    # The trace is from 2 to 8 s, and something was done until 0.5 s.
    moved = simulate_oracle(GRAPH, COSTS, PLACES)
    names = "start_s", "finish_s", "transfer_start_s", "transfer_finish_s"
    moved = moved.replace(**{name: getattr(moved, name) + 2 for name in names})
    whole = WholeCall(-1.0, 9.0, (Chore("dispatch", CALLER, -1.0, 0.5),))
    found = profile(GRAPH, moved, NAMES, DEVICES, [7.0, 9.0], [], whole)
    assert (found.traced_s, found.rest_s) == (6.0, 1.5 + 1.0)
    text = " ".join(str(found).split())
    assert "| tasks and transfers | all | 6.000 s | 60.0% |" in text
    assert "| rest: threads or processes wake | | 2.500 s | 25.0% |" in text


HERE = {"take arguments", "lay arguments", "assemble outputs"}


@all_modes
def test_everything_that_a_call_does_counts(local, mode):
    sharded = build([("mean", ["i0", "i1"]), ("spin", ["t0"]), ("mean", ["t1", "i1"])], ["t2"])
    step = compile_on(sharded, [0, 1, 0], local, mode=mode)
    for _ in range(3):
        check_whole_call(step, HERE | {"dispatch"})


def test_everything_that_a_call_of_processes_does_counts(ray_pair):
    sharded = build([("mean", ["i0", "i1"]), ("spin", ["t0"]), ("mean", ["t1", "i1"])], ["t2"])
    step = compile_on(sharded, [0, 1, 0], ray_pair)
    there = {"send the call", "set up", "hand over outputs", "receive outputs"}
    for _ in range(3):
        check_whole_call(step, HERE | there)
        assert {chore.device for chore in step.whole_call.chores} == {CALLER, 0, 1}
