import json

import jax
import pytest

import doppler_jax as dj
from doppler_jax.learned import training_config
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training import sim_rl, train
from experiments import search_ablation
from experiments.search_ablation import VARIANTS, AblationSettings
from tests.policies.cases import CONFIG
from tests.training.cases import SIM

GRAPH = "chain_mm_112nodes"


@pytest.fixture
def tiny(monkeypatch):
    problem = dj.from_edge_delays([1.0, 2.0, 3.0], [(0, 1, 1.0)], num_devices=2)
    monkeypatch.setattr(search_ablation, "load_problem", lambda reference, name: problem)
    monkeypatch.setattr(search_ablation, "BEST_KNOWN_S", {GRAPH: 3.0})
    monkeypatch.setattr(search_ablation, "resolve", lambda settings: {"small": (CONFIG, SIM)})
    monkeypatch.setattr(search_ablation, "VARIANTS", {"small": ({}, {})})
    update = jax.jit(sim_rl.update_on, static_argnames=("policy", "config", "shards"))
    monkeypatch.setattr(
        train, "sim_update", lambda s, p, c, k: update(s, p, policy=c, config=k, shards=1)
    )
    monkeypatch.setattr(train, "WARM_UP", 2)
    return problem


@pytest.mark.slow
def test_a_cell_is_computed_once_and_its_placement_is_worth_what_is_said(
    tiny, tmp_path, monkeypatch
):
    settings = AblationSettings(
        variants=("small",), graphs=(GRAPH,), seeds=1, evaluations=100, host_devices=4,
        runs=tmp_path,
    )  # fmt: skip
    search_ablation.main(settings)
    folder = tmp_path / "search_ablation"
    (cell,) = json.loads((folder / "search_ablation.json").read_text())["results"]
    assert (
        dj.makespan_s(dj.simulate_oracle(*tiny, cell["placement"])) == cell["makespan_s"] == 3
    )
    assert cell["greedy_s"] >= 3
    assert 50 < cell["evaluations"] <= 100
    text = (folder / "search_ablation.md").read_text()
    assert f"| {GRAPH} | small | 1.0000 | 1.0000 | " in text
    assert "within 100 simulated executions, 1 seeds" in text
    monkeypatch.setattr(search_ablation, "train_policy", None)
    search_ablation.main(settings)
    assert (folder / "search_ablation.md").read_text() == text


@pytest.mark.parametrize(
    ("bound", "absent"),
    [
        ({"budget_s": 60.0}, {"all local search"}),
        ({"evaluations": 1_000_000}, {"all local search"}),
        ({"evaluations": 100_000}, {"no local search", "neither"}),
    ],
)
def test_every_variant_differs_from_the_default_in_what_its_name_says(bound, absent):
    variants = search_ablation.resolve(AblationSettings(**bound))
    assert set(variants) == set(VARIANTS) - absent
    policy, config = variants["as it is"]
    assert policy == PolicyConfig()
    assert config == training_config("parallel", bound.get("evaluations"))
    assert len(set(variants.values())) == len(variants)
    for changed_policy, changed in variants.values():
        assert changed.batch // changed.minibatches == config.batch // config.minibatches
        assert (changed_policy == policy) or (changed == config)
        assert not changed.num_chains or changed.num_chains == min(128, changed.batch)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"variants": ("no policy",)}, "--variants: unknown 'no policy'; known: as it is, "),
        ({"graphs": ("ffnn",)}, "--graphs: unknown 'ffnn'; known: chain_mm_112nodes, "),
        ({"seeds": 0}, "--seeds is 0; expected at least 1"),
    ],
)
def test_what_does_not_exist_is_refused(wrong, message, tmp_path):
    with pytest.raises(ValueError, match=f"^{message}"):
        search_ablation.main(AblationSettings(runs=tmp_path, **wrong))
    assert not list(tmp_path.iterdir())
