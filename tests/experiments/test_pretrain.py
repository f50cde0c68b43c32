"""The pretraining command on a handful of problems: it ends, resumes, and writes a policy."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.graphs.padded import Sizes
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policy_files import read_policy
from doppler_jax.training.stream import Bucket
from experiments import pretraining
from experiments.pretrain import PretrainSettings
from experiments.pretraining import Pretraining

pytestmark = pytest.mark.slow


TINY = PretrainSettings(
    budget_s=100.0,
    problems=4,
    held_out=2,
    searches=1,
    group=2,
    batch=4,
    policy=PolicyConfig(width=8, rounds=1, features="general"),
)


@pytest.fixture
def settings(monkeypatch):
    bucket = Bucket(Sizes(24, 64, 12, 12, 16, 3), least_tasks=12, share=1.0)
    monkeypatch.setattr(pretraining, "BUCKETS", {bucket.name: bucket})
    monkeypatch.setattr(pretraining, "TRAINED", ("layered", "fork_join"))
    return dataclasses.replace(TINY, buckets=(bucket.name,))


def begin(settings, folder):
    training = Pretraining(settings, folder)
    training.prepare()
    return training


def params(training):
    return jax.tree.leaves(jax.device_get(training._learning.params))


def test_a_run_resumes_and_exports(settings, tmp_path):
    training = begin(settings, tmp_path / "run")
    training.update()
    training.save()
    resumed = begin(settings, tmp_path / "run")
    for one in (training, resumed):
        one.update()
        one.validate()
    for ours, theirs in zip(params(training), params(resumed), strict=True):
        np.testing.assert_array_equal(ours, theirs)

    with pytest.raises(ValueError, match="a run with other settings: batch"):
        Pretraining(dataclasses.replace(settings, batch=8), tmp_path / "run")

    folder = resumed.export()
    policy = dj.load_policy(folder)
    assert policy.config == settings.policy
    assert read_policy(folder)[1]["command"].startswith("python -m experiments.pretrain")
    graph, costs = dj.from_edge_delays([1.0, 2.0, 3.0], [(0, 2, 1.0)], num_devices=5)
    placed = dj.place(
        graph, costs, method="doppler", policy=policy, max_evaluations=4, key=jax.random.key(0)
    )
    assert placed.makespan_s == 4.0
    line = json.loads(resumed.validate())
    assert line["updates"] == 2
    assert line["best of 64"]["buckets"][0] <= line["greedy"]["buckets"][0]


def test_unknown_buckets_are_refused(settings, tmp_path):
    with pytest.raises(ValueError, match=r"unknown buckets \['9x9'\]; known: \['24x3'\]"):
        Pretraining(dataclasses.replace(settings, buckets=("9x9",)), tmp_path)


def test_problems_with_serial_links_can_be_trained_on(tmp_path):
    training = begin(dataclasses.replace(TINY, buckets=("128x4s",)), tmp_path)
    before = params(training)
    training.update()
    line = json.loads(training.validate())
    assert line["best of 64"]["buckets"][0] <= line["greedy"]["buckets"][0]
    assert any((a != b).any() for a, b in zip(before, params(training), strict=True))


def test_a_run_goes_on_from_a_policy(settings, tmp_path):
    first = begin(settings, tmp_path / "first")
    first.update()
    first.validate()
    initial = first.export()
    second = begin(dataclasses.replace(settings, initial=initial), tmp_path / "second")
    for ours, theirs in zip(params(first), params(second), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    other = dataclasses.replace(settings, initial=initial, policy=PolicyConfig(width=4))
    with pytest.raises(ValueError, match=r"first.base: PolicyConfig\(.* expected PolicyConfig"):
        begin(other, tmp_path / "third")
