import json

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.training.system_rl import MeasurementLog, SystemConfig, confirm, set_incumbent
from experiments.problems import Chosen
from experiments.stages import run_stage3
from tests.policies.cases import CONFIG, params
from tests.training.cases import chains_case, fresh_state

SYSTEM = SystemConfig(batch=16, learning_rate=3e-2)
POOR = np.array([0, 1, 0, 1, 2, 0, 2])  # every tensor has to move


def simulated(placement):
    graph, costs, _ = chains_case()
    return makespan_s(simulate_oracle(graph, costs, placement))


def train(folder, measure, num_updates, incumbent=POOR):
    graph, costs, _ = chains_case()
    policy = dj.Policy(params=jax.tree.map(jax.numpy.asarray, params()), config=CONFIG)
    cluster = dj.make_cluster("reference_x4")
    return run_stage3(
        Chosen(name="chains", cluster=cluster, graph=graph, costs=costs),
        folder,
        policy,
        incumbent,
        measure,
        seed=0,
        num_updates=num_updates,
        config=SYSTEM,
    )


def log_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_measured_episodes_improve_on_the_incumbent(tmp_path):
    trained = train(tmp_path / "stage3" / "run", simulated, num_updates=36)
    assert trained.seconds == simulated(trained.placement) < 0.5 * simulated(POOR)
    entries = log_lines(trained.folder / "measurements.jsonl")
    # The incumbent, the episodes, and five rounds between the two finalists.
    assert len(entries) == 1 + 36 * SYSTEM.batch + 5 * 2
    episodes = [entry for entry in entries if entry["episode"] >= 0]
    early, late = (
        np.mean([e["seconds"] for e in episodes if e["update"] in updates])
        for updates in (range(5), range(31, 36))
    )
    assert late < 0.75 * early
    written = json.loads((trained.folder / "placement.json").read_text())
    assert written == {
        "placement": trained.placement.tolist(),
        "measured_s": trained.seconds,
    }


def test_one_lucky_measurement_does_not_displace_the_incumbent(tmp_path):
    """All others are slower, but seem faster when they are measured first."""
    seen = set()

    def flattering(placement):
        if (placement == POOR).all():
            return 10.0
        first = tuple(placement) not in seen
        seen.add(tuple(placement))
        return 1.0 if first else 11.0

    trained = train(tmp_path / "stage3" / "run", flattering, num_updates=1)
    np.testing.assert_array_equal(trained.placement, POOR)
    assert trained.seconds == 10.0


def test_a_finished_stage_measures_nothing_again(tmp_path):
    first = train(tmp_path / "stage3" / "run", simulated, num_updates=1)

    def never(placement):
        raise AssertionError("all of this is in the log")

    again = train(tmp_path / "stage3" / "run", never, num_updates=1)
    assert again.seconds == first.seconds
    np.testing.assert_array_equal(again.placement, first.placement)


def test_another_incumbent_is_another_run(tmp_path):
    train(tmp_path / "stage3" / "run", simulated, num_updates=0)
    with pytest.raises(ValueError, match="incumbent was"):
        train(tmp_path / "stage3" / "run", simulated, 0, incumbent=np.zeros(7, int))


def test_measurements_are_logged_before_they_are_used(tmp_path):
    path = tmp_path / "log.jsonl"
    log = MeasurementLog(path, lambda placement: 0.25)
    assert log.seconds(3, 1, np.array([0, 2])) == 0.25
    assert log_lines(path) == [
        {"update": 3, "episode": 1, "placement": [0, 2], "seconds": 0.25}
    ]


def test_a_logged_measurement_is_not_repeated(tmp_path):
    taken = iter([0.1, 0.2, 0.3])
    path = tmp_path / "log.jsonl"
    log = MeasurementLog(path, lambda placement: next(taken))
    assert log.seconds(0, 0, np.array([1])) == 0.1
    assert log.seconds(0, 0, np.array([1])) == 0.1
    assert log.seconds(0, 1, np.array([1])) == 0.2
    again = MeasurementLog(path, lambda placement: next(taken))
    assert again.seconds(0, 0, np.array([1])) == 0.1
    assert again.seconds(0, 1, np.array([1])) == 0.2
    assert again.seconds(1, 0, np.array([1])) == 0.3
    assert len(log_lines(path)) == 3


def test_a_line_cut_off_is_measured_again(tmp_path):
    path = tmp_path / "log.jsonl"
    whole = '{"update": 0, "episode": 0, "placement": [1], "seconds": 0.5}\n'
    path.write_text(whole + whole.replace('"episode": 0', '"episode": 1')[:-4])
    log = MeasurementLog(path, lambda placement: 0.75)
    assert path.read_text() == whole
    assert log.seconds(0, 0, np.array([1])) == 0.5
    assert log.seconds(0, 1, np.array([1])) == 0.75
    assert [entry["seconds"] for entry in log_lines(path)] == [0.5, 0.75]


def test_the_log_of_another_run_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    MeasurementLog(path, lambda placement: 1.0).seconds(2, 5, np.array([0, 1]))
    other = MeasurementLog(path, lambda placement: 1.0)
    with pytest.raises(ValueError, match=f"^{path}: update 2, episode 5 .* another run"):
        other.seconds(2, 5, np.array([1, 0]))


def test_the_incumbent_is_the_first_best(tmp_path):
    problem = chains_case()[2]
    state = fresh_state(problem, SYSTEM, SYSTEM.num_elites)
    log = MeasurementLog(tmp_path / "log.jsonl", lambda placement: 4.5)
    state = set_incumbent(state, problem, POOR, log)
    assert state.best_makespan_s == 4.5
    assert state.best_placement.tolist() == [*POOR, 0]


@pytest.mark.parametrize(
    ("second", "best"),
    [([9, 1, 1, 1, 9], 1), ([1, 9, 9, 1, 9], 0), ([2, 2, 2, 2, 2], 0)],
)
def test_finalists_are_compared_by_medians_measured_in_turn(tmp_path, second, best):
    times = {0: iter([2, 2, 2, 2, 2]), 1: iter(second)}
    order = []

    def measure(placement):
        order.append(int(placement[0]))
        return next(times[order[-1]])

    log = MeasurementLog(tmp_path / "log.jsonl", measure)
    placement, seconds = confirm(log, 7, [np.array([0]), np.array([1])])
    assert placement.tolist() == [best]
    assert seconds == (2 if best == 0 else 1)
    assert order == [0, 1] * 5
