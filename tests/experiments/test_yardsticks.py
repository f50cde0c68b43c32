"""The yardsticks simulate what the oracle simulates, so that their times may be compared."""

import json

import numba
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.baselines.simple import random_placements
from doppler_jax.graphs.chains import chain_cover
from experiments import bench_simulator
from experiments.bench_simulator import SimulatorSettings
from experiments.yardsticks import numba_model, simpy_model, turns
from experiments.yardsticks.layered import WIDTH, layered_problem
from experiments.yardsticks.turns import Call, Timing
from tests.generators import random_problem

SIZES = ((0, 1), (1, 1), (1, 3), (2, 1), (3, 5), (12, 2), (40, 3), (90, 4))


def cases(seed):
    """Small problems with four placements each; dyadic ones, where ties are exact, and not."""
    for num_tasks, num_devices in SIZES:
        for dyadic in (True, True, False):
            rng = np.random.default_rng([seed, num_tasks, num_devices, dyadic])
            seed += 1
            graph, costs = random_problem(rng, num_tasks, num_devices, dyadic=dyadic)
            yield graph, costs, random_placements(costs, rng, 4)


def judged(graph, costs, placements, links="parallel"):
    return [
        dj.makespan_s(dj.simulate_oracle(graph, costs, placement, links=links))
        for placement in placements
    ]


def test_simpy_agrees_with_the_oracle():
    for graph, costs, placements in cases(0):
        makespans = [simpy_model.makespan_s(graph, costs, p) for p in placements]
        assert makespans == judged(graph, costs, placements)


@pytest.mark.parametrize("links", ["parallel", "serial"])
def test_numba_agrees_with_the_oracle(links):
    for graph, costs, placements in cases(100):
        makespans = numba_model.makespans_s(graph, costs, placements, links=links)
        assert makespans.dtype == np.float64
        assert makespans.tolist() == judged(graph, costs, placements, links)


def test_the_tie_rule_decides():
    # At 1 s devices 0 and 1 are idle, tasks 2 and 3 ready there. Task 2 takes no time and
    # makes task 1 ready on device 1 within the instant, before task 3, which was ready too.
    graph, costs = dj.from_edge_delays(
        [1.0, 2.0, 0.0, 4.0, 8.0],
        [(0, 2, 0.0), (0, 3, 0.0), (2, 1, 0.0), (1, 4, 0.0)],
        num_devices=3,
    )
    placement = np.array([0, 1, 0, 1, 2])
    assert judged(graph, costs, [placement]) == [11.0]  # 1 + 2 + 8; 15 if task 3 went first
    assert simpy_model.makespan_s(graph, costs, placement) == 11.0
    assert numba_model.makespans_s(graph, costs, placement[None]).tolist() == [11.0]


def test_a_task_that_cannot_run_never_ends():
    graph, costs = dj.from_edge_delays([1.0, 1.0], [(0, 1, 1.0)], num_devices=2)
    costs.compute_s[0, 1] = np.inf
    placements = np.array([[0, 0], [1, 0], [0, 1], [1, 1]])
    expected = [2.0, np.inf, 3.0, np.inf]
    assert judged(graph, costs, placements) == expected
    assert [simpy_model.makespan_s(graph, costs, p) for p in placements] == expected
    assert numba_model.makespans_s(graph, costs, placements).tolist() == expected


def test_threads_share_a_batch():
    rng = np.random.default_rng(7)
    graph, costs = random_problem(rng, 30, 3, dyadic=True)
    placements = random_placements(costs, rng, 101)
    expected = judged(graph, costs, placements)
    for batch in (0, 1, 31, 32, 101):
        for threads in {1, numba.get_num_threads()}:
            makespans = numba_model.makespans_s(graph, costs, placements[:batch], threads)
            assert makespans.tolist() == expected[:batch]


def test_numba_refuses_what_it_cannot_index():
    graph, costs = dj.from_edge_delays([1.0, 1.0], [], num_devices=2)
    for wrong, message in (
        ([[0, 2]], "a device outside 0 to 1"),
        ([[-1, 0]], "a device outside 0 to 1"),
        ([0, 1], r"shape \(2,\)"),
        ([[0, 1, 0]], r"shape \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            numba_model.makespans_s(graph, costs, np.array(wrong))
    good = np.array([[0, 1]])
    with pytest.raises(ValueError, match="unknown links 'engine'; known: parallel, serial"):
        numba_model.makespans_s(graph, costs, good, links="duplex")
    with pytest.raises(ValueError, match="number of threads must be"):
        numba_model.makespans_s(graph, costs, good, 0)
    assert numba_model.makespans_s(graph, costs, good).tolist() == [1.0]


def test_competitors_take_turns(monkeypatch):
    clock, played = [0.0], []

    def play(what, seconds):
        played.append(what)
        clock[0] += seconds

    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(turns.time, "sleep", lambda _: None)
    slow, fast = iter((9.0, 4.0, 40.0, 4.0)), iter((5.0, 1.0, 10.0, 3.0))
    timings = turns.take_turns(
        {
            "slow": Call(1, lambda: play("slow", next(slow)), compiles=False),
            "fast": Call(10, lambda: play("fast", next(fast))),
        },
        3,
    )
    assert played == ["slow", "fast"] * 4
    assert timings["slow"] == Timing(1, 0.0, (4.0, 40.0, 4.0))
    assert timings["fast"] == Timing(10, 2.0, (1.0, 10.0, 3.0))
    assert timings["fast"].placement_s == 0.3
    # Per round, so that the second, slow for both, does not count: 40, 40 and 40 / 3.
    assert timings["fast"].times_as_fast_as(timings["slow"]) == pytest.approx(40.0)


def test_layered_graphs_have_bounded_width():
    for num_tasks in (1, 17, 300):
        graph, costs = layered_problem(num_tasks, 3)
        assert (graph.num_tasks, costs.num_devices) == (num_tasks, 3)
        assert len(chain_cover(graph)) == min(num_tasks, WIDTH)
    assert graph.num_edges > 1.5 * num_tasks


@pytest.mark.slow
def test_the_benchmark_is_written(tmp_path, capsys):
    graph, costs = random_problem(np.random.default_rng(0), 5, 2)
    settings = SimulatorSettings(batch=3, batches=(2,), sizes=(6, 8), growth_batch=4, repeats=2)
    bench_simulator.bench("tiny", graph, costs, settings, tmp_path)
    text = (tmp_path / "bench_simulator.md").read_text()
    assert text in capsys.readouterr().out
    result = json.loads((tmp_path / "bench_simulator.json").read_text())
    assert result["provenance"]["platform"] == "cpu"
    assert {"oracle", "SimPy", "numba, 1 thread", *bench_simulator.VARIANTS} < set(
        result["compared"]
    )
    for what, timing in result["compared"].items():
        assert f"| {what} | {timing['batch']} | " in text
        assert len(timing["seconds"]) == 2
    assert [timings["numba"]["batch"] for timings in result["by_batch"]] == [2]
    assert [timings["tasks"] for timings in result["by_size"]] == [6, 8]
    peaks = result["peak_bytes"]
    assert 0 < peaks["before"] < peaks["makespans"] <= peaks["schedules"]


def test_slopes_are_those_of_powers():
    by_size = {
        n: {"square": Timing(2, 0.0, (4.0 * n**2,)), "line": Timing(1, 0.0, (n, n, 9.0 * n))}
        for n in (4, 16, 64)
    }
    assert bench_simulator.slopes(by_size) == pytest.approx({"square": 2.0, "line": 1.0})


@pytest.mark.parametrize("wrong", [{"batches": ()}, {"batches": (0, 1)}, {"sizes": (8,)}])
def test_counts_that_say_nothing_are_refused(wrong, tmp_path):
    graph, costs = random_problem(np.random.default_rng(0), 5, 2)
    with pytest.raises(ValueError, match=f"--simulator.{next(iter(wrong))} are "):
        bench_simulator.bench("tiny", graph, costs, SimulatorSettings(**wrong), tmp_path)
