import pytest

import doppler_jax as dj
from doppler_jax import base_policy
from doppler_jax.base_policy import load_base_policy
from tests.commands import save_tiny_checkpoint, set_feature_version


@pytest.fixture(autouse=True)
def afresh():
    """What earlier calls loaded is forgotten, here and afterwards."""
    load_base_policy.cache_clear()
    yield
    load_base_policy.cache_clear()


def test_it_is_loaded_once_from_the_first_folder_there_is(tmp_path, monkeypatch):
    folders = tuple(tmp_path / name for name in ("checkout", "installation", "third"))
    monkeypatch.setattr(base_policy, "FOLDERS", folders)
    for folder in folders[1:]:
        save_tiny_checkpoint(folder)
    loaded = []

    def load(folder):
        loaded.append(folder)
        return proper(folder)

    proper = base_policy.load_policy
    monkeypatch.setattr(base_policy, "load_policy", load)
    policy = load_base_policy()
    assert load_base_policy() is policy
    assert loaded == [folders[1]]
    assert isinstance(policy, dj.Policy)


def test_none_where_none_ships(tmp_path, monkeypatch):
    monkeypatch.setattr(base_policy, "FOLDERS", (tmp_path / "none",))
    assert load_base_policy() is None


def test_what_is_no_policy_of_this_version_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"^{tmp_path}: no checkpoint here"):
        load_base_policy(tmp_path)
    save_tiny_checkpoint(tmp_path)
    set_feature_version(tmp_path, 99)
    with pytest.raises(ValueError, match="feature version 99, this library computes"):
        load_base_policy(tmp_path)


def test_the_one_that_ships_sees_nothing_that_is_of_one_graph():
    policy = load_base_policy()
    if policy is None:
        pytest.skip("no base policy ships yet")
    assert policy.method == "doppler"
    assert policy.config.features != "position"  # which means nothing on another graph
