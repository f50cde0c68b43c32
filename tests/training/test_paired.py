import json

import numpy as np
import pytest

from doppler_jax.simulator.oracle import simulate_oracle
from doppler_jax.training.paired import MeasurementLog, Paired, median_interval
from doppler_jax.types import Plan
from tests.training.cases import chains_case

OLD, NEW = Plan(np.array([0, 2])), Plan(np.array([1, 2]), np.array([0.5, 0.1]), "in_order")


def take(log, update=0, episode=0, candidate=NEW, incumbent_s=None):
    return log.take(update, episode, candidate, OLD, incumbent_s, 1)


def taking(*candidate_s):
    times = iter(candidate_s)
    return lambda candidate, incumbent, rounds: Paired((next(times),), (0.5,))


def test_the_ratio_is_the_median_of_the_pairs():
    """Half as fast a machine in the second pair, an outlier in the third."""
    paired = Paired((1.0, 2.0, 9.0), (2.0, 4.0, 3.0))
    assert paired.ratio == 0.5


@pytest.mark.parametrize(
    ("count", "bounds"), [(5, (-np.inf, np.inf)), (6, (0, 5)), (9, (1, 7)), (15, (3, 11))]
)
def test_intervals_are_those_of_the_sign_test(count, bounds):
    """Known from tables: order statistics 1 and 6 of 6, 2 and 8 of 9, 4 and 12 of 15."""
    values = np.random.default_rng(0).permutation(count).astype(float)
    assert median_interval(values) == bounds


def test_intervals_cover_the_median_as_often_as_they_say():
    draws = np.random.default_rng(1).lognormal(size=(2000, 15))
    covers = [low <= 1 <= high for low, high in map(median_interval, draws)]
    assert 0.95 <= np.mean(covers) <= 0.985  # 96.5%


def test_measurements_are_logged_before_they_are_used(tmp_path):
    path = tmp_path / "log.jsonl"
    found = take(MeasurementLog(path, taking(0.25)), update=3, episode=1, incumbent_s=8.0)
    assert found.worth_s == 4.0
    (line,) = path.read_text().splitlines()
    asked = {"update": 3, "episode": 1, "rounds": 1}
    asked["candidate"] = {"placement": [1, 2], "priority": [0.5, 0.1], "queue": "in_order"}
    asked["incumbent"] = {"placement": [0, 2], "priority": None, "queue": "fifo"}
    seconds = {"candidate_s": [0.25], "incumbent_s": [0.5]}
    paired = {**seconds, "is_aborted": False, "trace": None}
    assert json.loads(line) == {**asked, "worth_s": 4.0, "paired": paired}


def test_traces_come_back_from_the_log_exactly(tmp_path):
    graph, costs, _ = chains_case()
    trace = simulate_oracle(graph, costs, np.array([0, 1, 0, 1, 2, 0, 2]), links="serial")
    assert len(trace.transfer_tensor)
    path = tmp_path / "log"
    take(MeasurementLog(path, lambda *args: Paired((1.0,), (1.0,), trace=trace)))
    found = take(MeasurementLog(path, taking())).paired.trace
    for name, array in vars(trace).items():
        np.testing.assert_array_equal(getattr(found, name), array)


def test_a_logged_measurement_is_not_repeated(tmp_path):
    path = tmp_path / "log.jsonl"
    log = MeasurementLog(path, taking(0.1, 0.2))
    assert take(log).worth_s == take(log).worth_s == 0.1  # without an incumbent's, its own
    assert take(log, episode=1).worth_s == 0.2
    again = MeasurementLog(path, taking(0.3))
    assert take(again).worth_s == 0.1
    assert take(again, episode=1).worth_s == 0.2
    assert take(again, update=1).worth_s == 0.3
    assert len(path.read_text().splitlines()) == 3
    assert [(m.update, m.episode) for m in again.before(1)] == [(0, 0), (0, 1)]


def test_a_line_cut_off_is_measured_again(tmp_path):
    path = tmp_path / "log.jsonl"
    log = MeasurementLog(path, taking(0.5, 0.75))
    take(log)
    whole = path.read_text()
    take(log, episode=1)
    path.write_text(path.read_text()[:-4])
    log = MeasurementLog(path, taking(0.25))
    assert path.read_text() == whole
    assert take(log).worth_s == 0.5
    assert take(log, episode=1).worth_s == 0.25


@pytest.mark.parametrize("change", ["candidate", "incumbent", "rounds"])
def test_the_log_of_another_run_is_refused(tmp_path, change):
    path = tmp_path / "log.jsonl"
    asked = {"candidate": NEW, "incumbent": OLD, "rounds": 1}
    rest = {"update": 2, "episode": 5, "incumbent_s": None}
    MeasurementLog(path, taking(1.0)).take(**asked, **rest)
    asked[change] = 2 if change == "rounds" else Plan(np.array([1, 2]))
    with pytest.raises(ValueError, match=f"^{path}: update 2, episode 5 .* another run"):
        MeasurementLog(path, taking()).take(**asked, **rest)


@pytest.mark.parametrize("seconds", [0.0, -1.0, np.inf, np.nan])
def test_impossible_times_are_refused(tmp_path, seconds):
    path = tmp_path / "log.jsonl"
    with pytest.raises(ValueError, match="update 0, episode 0: measured"):
        take(MeasurementLog(path, taking(seconds)))
    assert not path.exists()
