import json

import numpy as np
import pytest

from doppler_jax.budget import Budget
from doppler_jax.training import loop
from doppler_jax.training.loop import Phase, RunFolder
from doppler_jax.training.state import TrainState
from tests.commands import snapshot
from tests.policies.cases import CONFIG
from tests.training.cases import SIM, assert_same_bits, chains_case, fresh_state

SETTINGS = {"seed": 0, "sizes": (1, 2)}


def start():
    return fresh_state(chains_case()[2], SIM, SIM.num_elites)


def advance(state: TrainState):
    """An update that takes no time, and depends on all before it."""
    value = state.best_placement[0] * 3 + state.update
    placement = state.best_placement.at[0].set(value % 1000)
    return state.replace(update=state.update + 1, best_placement=placement), {"value": value}


def interrupted_at(number, error=KeyboardInterrupt):
    def update(state):
        if int(state.update) == number:
            raise error
        return advance(state)

    return update


def train(
    folder, num_updates, update=advance, save_every_s=1000.0, budget=None, report=None, **spent
):
    with RunFolder(folder, SETTINGS, CONFIG, save_every_s) as run:
        phase = Phase(begin=None, update=update, num_updates=num_updates, **spent)
        state = run.resume(start())
        return loop.train(phase, state, budget, folder=run, report=report)[0]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_update_has_a_line_of_metrics(tmp_path):
    seen = []
    train(tmp_path / "run", 4, report=lambda state, new: seen.append((int(state.update), new)))
    assert [entry["update"] for entry in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert [entry["value"] for entry in metrics(tmp_path / "run")] == [0, 1, 5, 18]
    assert seen == [(1, {"value": 0}), (2, {"value": 1}), (3, {"value": 5}), (4, {"value": 18})]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config == {"seed": 0, "sizes": [1, 2]}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, error):
    with pytest.raises(error):
        train(tmp_path / "stopped", 9, interrupted_at(4, error))
    assert len(metrics(tmp_path / "stopped")) == 4
    resumed = train(tmp_path / "stopped", 9)
    whole = train(tmp_path / "whole", 9, save_every_s=0.0)
    assert_same_bits(resumed, whole)
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")


def test_a_finished_run_can_be_made_longer(tmp_path):
    train(tmp_path / "run", 3)
    done = train(tmp_path / "run", 3, update=interrupted_at(3))
    assert int(done.update) == 3
    longer = train(tmp_path / "run", 5)
    assert_same_bits(longer, train(tmp_path / "whole", 5))


def test_bounds_end_a_run_and_a_run_that_was_stopped_ends_there_too(tmp_path):
    def update(state):
        state, values = advance(state)
        made_s = np.float32(10 - int(state.update))
        return state.replace(episodes=state.episodes + 3, best_makespan_s=made_s), values

    for name, budget, updates in (
        ("none", None, 9),
        ("episodes", Budget(episodes=11), 3),
        ("target", Budget(target_s=4.0), 6),
        ("both", Budget(episodes=11, target_s=4.0), 3),
        ("less than an update", Budget(episodes=2), 1),
    ):
        whole = train(tmp_path / name, 9, update, budget=budget, episodes=3)
        assert int(whole.update) == updates
        assert len(metrics(tmp_path / name)) == updates
        train(tmp_path / f"{name}-stopped", min(2, updates), update)
        resumed = train(tmp_path / f"{name}-stopped", 9, update, budget=budget, episodes=3)
        assert_same_bits(resumed, whole)


def test_seconds_of_earlier_runs_count(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])

    def update(state):
        clock[0] += 5.0
        return advance(state)

    budget = Budget(seconds=18.0)
    assert int(train(tmp_path, 2, update, budget=budget).update) == 2
    clock[0] += 1000.0
    assert int(train(tmp_path, 9, update, budget=budget).update) == 4
    assert int(train(tmp_path, 9, update, budget=budget).update) == 4


@pytest.mark.parametrize("tail", ["", '{"upda', '{"update": 7, "value": 1}', '{"update": 12'])
def test_metrics_are_cut_back_to_the_checkpoint(tmp_path, tail):
    train(tmp_path, 5)
    kept = (tmp_path / "metrics.jsonl").read_text()
    later = '{"update": 6, "value": 1}\n' if tail != '{"upda' else ""
    (tmp_path / "metrics.jsonl").write_text(kept + later + tail)
    with RunFolder(tmp_path, SETTINGS, CONFIG) as run:
        state = run.resume(start())
    assert int(state.update) == 5
    assert (tmp_path / "metrics.jsonl").read_text() == kept


def test_metrics_from_before_the_first_checkpoint_are_dropped(tmp_path):
    RunFolder(tmp_path, SETTINGS, CONFIG).close()
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "value": 1}\n{"upd')
    state = train(tmp_path, 2)
    assert int(state.update) == 2
    assert [entry["value"] for entry in metrics(tmp_path)] == [0, 1]


def test_a_run_with_other_settings_is_refused_and_left_alone(tmp_path):
    train(tmp_path / "run", 2)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match="seed was 0, now 1") as error:
        RunFolder(tmp_path / "run", {"seed": 1, "sizes": [1, 2]}, CONFIG)
    assert str(error.value).startswith(f"{tmp_path / 'run' / 'config.json'} belongs to a run")
    with pytest.raises(ValueError, match="extra was None, now 3"):
        RunFolder(tmp_path / "run", {**SETTINGS, "extra": 3}, CONFIG)
    assert snapshot(tmp_path) == before


def test_metrics_that_are_not_finite_are_null(tmp_path):
    def update(state):
        state, _ = advance(state)
        return state, {"best": np.float32(np.inf), "loss": np.float32(np.nan)}

    train(tmp_path, 1, update)
    train(tmp_path, 2, update)
    nothing = {"best": None, "loss": None}
    assert metrics(tmp_path) == [{"update": 1, **nothing}, {"update": 2, **nothing}]
