import numpy as np
import pytest

from doppler_jax.reports.schedules import SHOWN, explain_schedule
from doppler_jax.simulator.oracle import simulate_oracle
from tests.simulator.cases import small_problem, with_transfers

# Device 0 runs tasks 0 and 1, and sends tensors of 3 bytes, 1 to 4 s and 4 to 7 s, to device 1,
# which sends graph input 0 back, 0 to 0.5 s.
GRAPH, COSTS = small_problem([1, 1, 1, 1, 1], [(0, 3, [2]), (1, 3, [3])], 2, [(1, 0.5, [1])])
SCHEDULE = simulate_oracle(GRAPH, COSTS, [0, 0, 1, 1, 1], links="serial")


def test_numbers():
    found = explain_schedule(GRAPH, COSTS, SCHEDULE)
    assert found.makespan_s == 8
    assert found.busy_s.tolist() == [2, 3]
    assert found.utilisation.tolist() == [2 / 8, 3 / 8]
    assert found.link_busy_s.tolist() == [[0, 6], [0.5, 0]]
    assert found.link_utilisation.tolist() == [[0, 6 / 8], [0.5 / 8, 0]]
    assert found.moved_bytes.tolist() == [[0, 6], [0.5, 0]]
    assert found.peak_bytes.tolist() == [6.5, 6]
    assert [link.item for link in found.chain] == [0, 0, 1, 3]
    assert found.chain_seconds.queueing_s == 2
    schedule = simulate_oracle(GRAPH, COSTS, [0, 0, 1, 1, 1])  # 1 to 4 s and 2 to 5 s
    found = explain_schedule(GRAPH, COSTS, schedule)
    assert found.link_busy_s.tolist() == [[0, 4], [0.5, 0]]


def test_text():
    costs = COSTS.replace(capacity_bytes=np.array([6.0, np.inf]))
    text = str(explain_schedule(GRAPH, costs, SCHEDULE, names=["a", "b", "c", "d", "e"]))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "makespan 8.000 s; 6.5 bytes moved",
        "| 0 | 2.000 s | 25% | 6.5 | 6, exceeded |",
        "| 1 | 3.000 s | 38% | 6 | unlimited |",
        "| 0 to 1 | 6.000 s | 75% | 6 |",
        "| 1 to 0 | 500.0 ms | 6% | 0.5 |",
        "critical chain: 2 tasks, 2 transfers: compute 2.000 s (25%), transfer 4.000 s (50%), "
        "queueing 2.000 s (25%), idle 0 s (0%)",
        "| a | 0 | 0 s | 1.000 s | nothing |",
        "| tensor 1 | 0 to 1 | 4.000 s | 3.000 s | link |",
        "| d | 1 | 7.000 s | 1.000 s | input |",
    ):
        assert line in lines
    planned = str(explain_schedule(GRAPH, costs, SCHEDULE, queue="in_order"))
    assert planned.startswith("makespan 8.000 s under 'in_order'; 6.5 bytes moved")


def test_a_long_chain_is_cut_to_its_longest_links():
    n = SHOWN + 5
    graph, costs = small_problem(1.0 + np.arange(n), [], 1)
    found = explain_schedule(graph, costs, simulate_oracle(graph, costs, np.zeros(n, int)))
    assert len(found.chain) == n
    lines = str(found).splitlines()
    assert lines[-1] == "and 5 shorter ones"
    assert not any(line.startswith("| task 4 ") for line in lines)
    shown = [line.split()[2] for line in lines if line.startswith("| task")]
    assert shown == [str(v) for v in range(5, n)]


def test_an_empty_schedule():
    graph, costs = small_problem([], [], 2)
    found = explain_schedule(graph, costs, simulate_oracle(graph, costs, np.zeros(0, int)))
    assert found.utilisation.tolist() == [0, 0]
    assert "makespan 0 s" in str(found)


def test_refuses_wrong_names_and_illegal_schedules():
    with pytest.raises(ValueError, match="names has 1 entries, expected 5"):
        explain_schedule(GRAPH, COSTS, SCHEDULE, names=["a"])
    with pytest.raises(ValueError, match="tensor 0 has no transfer to device 1"):
        explain_schedule(GRAPH, COSTS, with_transfers(SCHEDULE))
