"""What two plans for one problem differ in."""

import dataclasses

import numpy as np
import pytest

import doppler_jax as dj
from tests.simulator.cases import small_problem

# A chain 0 to 1 to 2 of 1 s each, a transfer 3 s, and task 3 of 2 s alone; devices are alike.
GRAPH, COSTS = small_problem([1, 1, 1, 2], [(0, 3, [1]), (1, 3, [2])], 2)
NAMES = ["first", "second", "third", "alone"]


def planned(placement, priority=(0, 1, 2, 3), method="heft", costs=COSTS):
    """A plan as `place` returns it."""
    placed = dj.place(GRAPH, costs, method="heft")
    placement, priority = np.array(placement), np.array(priority)
    schedule = dj.simulator.simulate_oracle(
        GRAPH, costs, placement, queue="in_order", priority=priority
    )
    return dataclasses.replace(
        placed, placement=placement, priority=priority, schedule=schedule, method=method,
        makespan_s=dj.simulator.makespan_s(schedule), queue="in_order",
    )  # fmt: skip


def test_what_moved_and_why():
    found = dj.compare(planned([0, 1, 1, 0]), planned([1, 1, 1, 0], method="good"), NAMES)
    # With names of devices as they are the first plan differs by task 0 alone.
    assert found.renamed.tolist() == [0, 1]
    assert found.moved.tolist() == [0]
    assert found.reordered.tolist() == []
    lines = [" ".join(line.split()) for line in str(found).splitlines()]
    for line in (
        "good is 50.0% shorter than heft, by 3.000 s: along the critical chain there is 3.00 s "
        "less transfer. Its devices idle 1.000 s together, those of heft 7.000 s.",
        "| makespan | 6.000 s | 3.000 s | -50.0% |",
        "| chain: compute | 3.000 s | 3.000 s | |",
        "| chain: transfer | 3.000 s | 0 s | -100.0% |",
        "| moved between devices | 3 B | 0 B | -100.0% |",
        "1 of 4 tasks are on another device, 1 of them in the critical chain of heft; 0 others "
        "start in another order.",
        "| first | 0 to 1 | 0 s | 0 s |",
    ):
        assert line in lines, line
    back = str(dj.compare(found.second, found.first))
    assert back.startswith("heft is 100.0% longer than good, by 3.000 s: along the critical")
    assert "3.00 s more transfer" in back


def test_names_of_devices_that_are_alike_do_not_count():
    one, other = planned([0, 0, 0, 1]), planned([1, 1, 1, 0])
    found = dj.compare(one, other)
    assert found.renamed.tolist() == [1, 0]
    assert not found.moved.size
    assert "and heft (second) take the same time: 3.000 s." in str(found)
    assert "of heft (second), 0 is called 1, 1 is called 0 here" in str(found)
    unequal = COSTS.replace(capacity_bytes=np.array([np.inf, 100.0]))
    found = dj.compare(
        planned([0, 0, 0, 1], costs=unequal), planned([1, 1, 1, 0], costs=unequal)
    )
    assert found.renamed.tolist() == [0, 1]
    assert found.moved.tolist() == [0, 1, 2, 3]


def test_another_order_on_the_same_devices_is_told():
    found = dj.compare(planned([0] * 4), planned([0] * 4, [1, 2, 3, 0]))
    assert not found.moved.size
    assert found.reordered.tolist() == [0, 1, 2, 3]


def test_both_are_on_one_page(tmp_path):
    found = dj.compare(planned([0, 1, 1, 0]), planned([0, 0, 0, 1], method="good"), NAMES)
    found.report(tmp_path / "x.html", title="Both")
    text = (tmp_path / "x.html").read_text()
    assert '"heft: 6.000 s"' in text
    assert '"good: 3.000 s"' in text


def test_plans_of_different_problems_are_refused():
    graph, costs = small_problem([1, 2], [], 2)
    with pytest.raises(ValueError, match="of different graphs, or of different costs"):
        dj.compare(planned([0] * 4), dj.place(graph, costs, method="heft"))
    with pytest.raises(ValueError, match="names has 1 entries, expected 4"):
        dj.compare(planned([0] * 4), planned([0] * 4), ["a"])
