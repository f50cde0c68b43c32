"""What docs/how/policies.md shows works in a process of its own, with other devices."""

import ast
import json
import pathlib

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.learners.doppler import policy_candidates
from doppler_jax.policies import FEATURE_VERSION, PolicyConfig, init_params, make_policy_inputs
from tests.commands import printed
from tests.generators import random_params, random_problem
from tests.test_readme import ROOT, read_blocks

_, EXAMPLE, USE = (
    code for _, code in read_blocks(ROOT / "docs" / "how" / "policies.md", {"python"})
)
CONFIG = PolicyConfig(width=4, rounds=1, features="coparent")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the checkpoint `policy`, its parameters random, beside nothing else."""
    folder = tmp_path_factory.mktemp("embedding")
    problem = make_policy_inputs(*random_problem(np.random.default_rng(0), 3, 2))
    params = random_params(lambda key, p: init_params(key, CONFIG, p), problem)
    params = jax.device_put(params, jax.devices()[-1])  # one that others need not have
    dj.policies.save_policy(
        folder / "policy", dj.policies.Policy(params=params, config=CONFIG), {"seed": 7}
    )
    return folder


def test_the_example_imports_jax_orbax_and_our_functions_alone():
    modules = set()
    for node in ast.walk(ast.parse(EXAMPLE)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    assert modules == {"pathlib", "jax", "orbax.checkpoint", "doppler_jax.policies"}
    lines = [line for line in EXAMPLE.splitlines() if line and "import" not in line]
    assert len(lines) <= 10


@pytest.mark.parametrize("devices", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_it_places_as_the_library_does_on_any_devices(folder, devices):
    configure = f"import jax\njax.config.update('jax_num_cpu_devices', {devices})\n"
    report = f"import json\nassert len(jax.devices()) == {devices}\n"
    report += "print(json.dumps([best.tolist(), drawn.tolist()]))\n"
    code = configure + EXAMPLE + USE + report
    lines = printed("-c", code, cwd=folder, JAX_PLATFORMS="cpu").splitlines()
    best, drawn = json.loads(lines[-1])
    graph, costs = dj.from_edge_delays(
        [2.0, 3.0, 3.0, 1.0], [(0, 1, 1.0), (0, 2, 1.0), (1, 3, 2.0), (2, 3, 2.0)], 2
    )
    policy = dj.load_policy(folder / "policy")
    expected = policy_candidates(make_policy_inputs(graph, costs), policy, jax.random.key(0), 1)
    assert best[:4] == expected[0].tolist()
    assert np.shape(drawn) == (64, len(best))
    assert len({tuple(row[:4]) for row in drawn}) > 1


def test_meta_says_what_the_checkpoint_is(folder):
    (path,) = pathlib.Path(folder / "policy").glob("*/meta/metadata")
    meta = json.loads(path.read_text())
    assert meta["format"] == "doppler_jax.checkpoint"
    assert meta["policy"]["feature_version"] == FEATURE_VERSION
    assert (meta["policy"]["features"], meta["policy"]["width"]) == ("coparent", 4)
    assert (meta["seed"], meta["method"]) == (7, "doppler")


def test_another_feature_version_is_refused_here_too():
    with pytest.raises(ValueError, match=r"^a policy of feature version 99; this library comp"):
        PolicyConfig(feature_version=99)
