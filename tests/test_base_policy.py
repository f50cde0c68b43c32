from unittest import mock

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax import policy_files
from doppler_jax.learners.doppler import policy_candidates
from doppler_jax.policies.features import FEATURE_VERSION, NORMALISATION, make_policy_inputs
from doppler_jax.policy_files import FOLDERS, load_base_policy, read_policy
from experiments.catalogue import PUBLISHED, best_known_s
from tests.commands import save_tiny_checkpoint


@pytest.fixture(autouse=True)
def afresh():
    """What earlier calls loaded is forgotten, here and afterwards."""
    load_base_policy.cache_clear()
    yield
    load_base_policy.cache_clear()


def test_it_is_loaded_once_from_the_first_folder_there_is(tmp_path, monkeypatch):
    folders = tuple(tmp_path / name for name in ("checkout", "installation", "third"))
    monkeypatch.setattr(policy_files, "FOLDERS", folders)
    for folder in folders[1:]:
        save_tiny_checkpoint(folder)
    load = mock.Mock(wraps=policy_files.load_policy)
    monkeypatch.setattr(policy_files, "load_policy", load)
    policy = load_base_policy()
    assert load_base_policy() is policy
    load.assert_called_once_with(folders[1])
    assert isinstance(policy, dj.policies.Policy)


def test_none_where_none_ships_and_a_folder_without_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_files, "FOLDERS", (tmp_path / "none",))
    assert load_base_policy() is None
    load_base_policy.cache_clear()
    monkeypatch.setattr(policy_files, "FOLDERS", (tmp_path,))
    with pytest.raises(ValueError, match=f"^{tmp_path}: no checkpoint here"):
        load_base_policy()


def test_the_policy_that_ships_says_what_it_is():
    policy = load_base_policy()
    assert policy.method == "doppler"
    assert policy.config.features != "position"  # which means nothing on another graph
    _, meta = read_policy(FOLDERS[0])
    assert meta["policy"]["feature_version"] == FEATURE_VERSION
    assert meta["normalisation"] == NORMALISATION
    assert meta["settings"]["seed"] == 0
    assert meta["command"].startswith("python -m experiments.pretrain")
    scores = {name: meta["held_out"][name]["held-out families"] for name in ("greedy", "HEFT")}
    assert scores["greedy"] < scores["HEFT"]


@pytest.mark.slow
def test_the_policy_that_ships_places_graphs_that_it_never_saw(reference_graphs):
    greedy, sampled = [], []
    for name in PUBLISHED:
        graph = dj.load_graph(reference_graphs / f"{name}.txt")
        costs = dj.reference_costs(graph, num_devices=4)
        problem = make_policy_inputs(graph, costs)
        drawn = policy_candidates(problem, load_base_policy(), jax.random.key(0), 256)
        makespans_s = dj.simulate(graph, costs, drawn).makespan_s
        greedy.append(makespans_s[0] / best_known_s(name))
        sampled.append(makespans_s.min() / best_known_s(name))
    assert len(greedy) == 4
    assert np.mean(greedy) <= 1.15
    assert np.mean(sampled) <= 1.06
