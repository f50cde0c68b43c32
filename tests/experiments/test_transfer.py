import dataclasses
import json

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.imitation import ImitationConfig
from doppler_jax.training.sim_rl import SimConfig
from doppler_jax.training.state import init_state, make_optimizer
from doppler_jax.training.train import Trained
from experiments import transfer, transfer_cells
from experiments.transfer import PAPER_MS, Row, TransferSettings
from experiments.transfer_cells import Loaded
from tests.commands import save_tiny_checkpoint
from tests.training.cases import chains_case

CONFIG = PolicyConfig(width=4, rounds=1)
SIM = SimConfig(batch=8, minibatches=2, num_elites=2, num_chains=0)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Two seeds of tiny training, where every workload is the same two chains."""
    monkeypatch.setattr(transfer, "use_host_devices", lambda count: None)
    monkeypatch.setattr(transfer_cells, "_load", lambda *_: Loaded(*chains_case()))
    return TransferSettings(
        source=("ffnn",), target=("llama_block",), shots=(0, 16), full=24, seeds=2,
        policy=CONFIG, training=SIM, runs=tmp_path,
    )  # fmt: skip


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What training was asked for; it returns zeros and all tasks on device 1."""
    requests = []
    save_tiny_checkpoint(tmp_path / "tiny")
    params = dj.load_policy(tmp_path / "tiny").params

    def train_policy(problem, key, **options):
        requests.append({"key": jax.random.key_data(key).tolist(), **options})
        state = init_state(key, params, make_optimizer(1e-3), problem, 1)
        state = dataclasses.replace(
            state,
            update=state.update + 1,
            episodes=state.episodes + options["max_episodes"],
            best_placement=state.best_placement + 1,
        )
        return Trained(state=state, policy=CONFIG, interrupted=False)

    monkeypatch.setattr(transfer_cells, "train_policy", train_policy)
    return requests


def table_rows(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if "|" in line]


def test_sources_and_rows_from_scratch_are_trained_once_and_fine_tuning_goes_on(
    settings, asked, tmp_path
):
    transfer.main(settings)
    # By seed: from scratch on the target, in full and in short; on the source; from there.
    assert [options["max_episodes"] for options in asked] == [24, 24, 16, 16, 24, 24, 16, 16]
    scratch, tuned = asked[:6], asked[6:]
    assert all(options["initial"] is None for options in scratch)
    assert all(options["initial"].config == CONFIG for options in tuned)
    assert all(options["simulate"] == SIM for options in asked)
    assert all(options["imitate"] == ImitationConfig() for options in asked)
    assert len({tuple(options["key"]) for options in scratch[:2]}) == 2
    report = json.loads((tmp_path / "transfer" / "transfer.json").read_text())
    (row,) = report["rows"]
    graph, costs, _ = chains_case()
    alone_s = dj.makespan_s(dj.simulate_oracle(graph, costs, np.ones(graph.num_tasks, int)))
    assert row["full_s"] == [alone_s] * 2
    assert row["shots_s"][1] == row["scratch_s"][1] == [alone_s] * 2
    assert row["scratch_s"][0] == [None, None]
    assert row["shots_s"][0] == row["greedy_s"][0]
    transfer.main(settings)
    assert len(asked) == 8  # all cells were kept


def test_other_settings_train_their_own_source(settings, asked):
    transfer.main(settings)
    count = len(asked)
    other = dataclasses.replace(SIM, learning_rate=1e-4)
    transfer.main(dataclasses.replace(settings, training=other, quick=True))
    assert [options["simulate"] for options in asked[count:]] == [other] * 4


def test_a_source_is_the_policy_that_was_trained_there(settings, asked):
    settings = dataclasses.replace(settings, quick=True)
    transfer.main(settings)
    (tuned,) = (options for options in asked if options["initial"] is not None)
    leaves = jax.tree.leaves(tuned["initial"].params)
    assert leaves
    assert all((np.asarray(leaf) == 0).all() for leaf in leaves)  # as trained, above


def row(source="ffnn", target="llama_block"):
    return Row(
        source=source, target=target, listed_s=(0.25, 0.5),
        shots_s=np.array([[0.3, 0.3], [0.1, 0.3], [0.2, 0.2]]),
        greedy_s=np.array([[0.3, 0.3], [0.4, 0.4], [0.2, 0.2]]),
        scratch_s=np.array([[np.nan] * 2, [0.4, 0.4], [0.3, 0.3]]),
        full_s=np.array([0.2, 0.2]), full_greedy_s=np.array([0.25, 0.25]),
    )  # fmt: skip


def test_the_table_sets_the_papers_figures_beside_ours():
    text = transfer.tabulate(TransferSettings(), [row(), row("resnet")])
    head, _, ours, alone, paper, other = table_rows(text)[:6]
    assert head[2:6] == ["0 episodes", "2,000 episodes", "4,000 episodes", "full, 8,000"]
    assert ours[:6] == [
        "ffnn to llama_block", "ours", "300.0 ± 0.0", "200.0 ± 100.0", "200.0 ± 0.0",
        "200.0 ± 0.0",
    ]  # fmt: skip
    assert ours[6:] == ["+50.0", "+0.0", "+0.0", "250.0", "500.0"]
    assert alone[1:5] == ["without transfer", "-", "400.0 ± 0.0", "300.0 ± 0.0"]
    assert paper == [
        "ffnn to llama_block", "paper", "251.0", "165.3", "159.4", "160.3",
        "+56.6", "+3.1", "-0.6", "-", "-",
    ]  # fmt: skip
    assert other[0] == "resnet to llama_block"
    greedy = table_rows(text)[-1]
    assert greedy[1:] == ["300.0 ± 0.0", "400.0 ± 0.0", "200.0 ± 0.0", "250.0 ± 0.0"]


def test_the_papers_figures_stand_beside_its_own_shots_alone():
    other = dataclasses.replace(TransferSettings(), shots=(0, 64, 128))
    assert "paper" not in [cells[1] for cells in table_rows(transfer.tabulate(other, [row()]))]


def test_the_default_runs_are_the_papers():
    defaults = TransferSettings()
    assert {(s, t) for s in defaults.source for t in defaults.target} == set(PAPER_MS)
    assert (defaults.shots, defaults.full, defaults.seeds) == ((0, 2000, 4000), 8000, 5)
    assert defaults.training == SimConfig()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"source": ("none",)}, "--source: unknown 'none'; known: "),
        ({"target": ()}, "--target names no workload"),
        ({"shots": ()}, r"--shots are \(\); expected counts of episodes"),
        ({"shots": (-1,)}, r"--shots are \(-1,\)"),
        ({"shots": (0, 63)}, "63 episodes are fewer than a batch of 256"),
        ({"full": 10}, "10 episodes are fewer than a batch of 256"),
        ({"seeds": 0}, "--seeds is 0; expected at least 1"),
    ],
)
def test_what_cannot_be_is_refused(option, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        transfer.main(TransferSettings(**option, runs=tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_cells_hold_what_training_found(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("doppler_jax.training.train.WARM_UP", 2)
    monkeypatch.setattr(
        "doppler_jax.training.train.ImitationConfig", lambda: ImitationConfig(batch=8)
    )
    transfer.main(dataclasses.replace(settings, quick=True))
    graph, costs, _ = chains_case()
    for path in (tmp_path / "transfer" / "cells").glob("*.json"):
        cell = json.loads(path.read_text())
        if "placement" in cell:
            schedule = dj.simulate_oracle(graph, costs, np.array(cell["placement"]))
            assert cell["makespan_s"] == dj.makespan_s(schedule) <= cell["greedy_s"]
            assert cell["episodes"] in (16, 24)
            assert cell["evaluations"] == cell["episodes"] + 1
