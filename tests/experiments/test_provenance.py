import jax

from experiments import provenance


def test_provenance_without_git(monkeypatch):
    found = provenance.provenance()
    assert found["jax"] == jax.__version__
    assert found["devices"] == "4 x cpu"
    assert found["commit"]
    monkeypatch.setenv("PATH", "")
    assert provenance.provenance() == {**found, "commit": "unknown"}
