import contextlib
import json
import pathlib
import shutil

import jax
import pytest

from doppler_jax.policy_files import load_policy
from doppler_jax.training.checkpoint import Checkpoints
from doppler_jax.types import Policy
from tests.commands import printed, snapshot
from tests.policies.cases import CONFIG
from tests.training.cases import (
    SIM,
    assert_same_bits,
    chains_case,
    fresh_state,
    plain,
    trained_state,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder whose newest checkpoint is `trained_state()`, after 3 updates.

    It is saved from a device that other processes need not have.
    """
    folder = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(folder / "checkpoints")
    for updates in (1, 2, 3):
        state = jax.device_put(trained_state(updates), jax.devices()[-1])
        checkpoints.save(Policy(state.params, CONFIG), {"seed": 0}, state)
    checkpoints.close()
    return folder


def test_states_come_back_bit_for_bit_and_the_newest_two_are_kept(run, tmp_path):
    like = fresh_state(chains_case()[2], SIM, SIM.num_elites, seed=5)
    with contextlib.closing(Checkpoints(run / "checkpoints")) as checkpoints:
        assert checkpoints.latest() == 3
        restored = checkpoints.restore(like)
    assert_same_bits(restored, trained_state())
    assert restored.key.dtype == trained_state().key.dtype
    folders = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert folders == ["2", "3"]
    state = fresh_state(chains_case()[2], SIM, 0, num_chains=0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Policy(state.params, CONFIG), {}, state)
    assert_same_bits(checkpoints.restore(state), state)
    checkpoints.close()


def test_states_of_other_shapes_and_versions_are_refused_but_not_their_policies(run, tmp_path):
    other = fresh_state(chains_case()[2], SIM, SIM.num_elites + 1)
    with (
        contextlib.closing(Checkpoints(run / "checkpoints")) as checkpoints,
        pytest.raises(ValueError, match=f"{run}.*cannot resume"),
    ):
        checkpoints.restore(other)
    copy = shutil.copytree(run, tmp_path / "copy")
    path = copy / "checkpoints" / "3" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    del meta["state_version"]  # as before there were versions
    path.write_text(json.dumps(meta))
    checkpoints = Checkpoints(copy / "checkpoints")
    with pytest.raises(ValueError, match=f"{copy}.*cannot resume: a state of version 1, this"):
        checkpoints.restore(fresh_state(chains_case()[2], SIM, SIM.num_elites))
    checkpoints.close()
    assert load_policy(copy).config == CONFIG


@pytest.mark.parametrize(
    ("below", "updates"),
    [(".", 3), ("checkpoints", 3), ("checkpoints/3", 3), ("checkpoints/2", 2)],
)
def test_a_policy_is_found_in_its_run(run, below, updates):
    policy = load_policy(f"{run}/{below}")
    assert policy.config == CONFIG
    assert_same_bits(policy.params, plain(trained_state(updates).params))


PLAIN_RESTORE = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
import numpy as np
import orbax.checkpoint as ocp
assert len(jax.devices()) == int(sys.argv[2])
tree = ocp.StandardCheckpointer().restore(sys.argv[1])
assert not {"doppler_jax", "flax", "optax"} & set(sys.modules), "must not be needed"
def describe(tree):
    if type(tree) is dict:
        return {name: describe(value) for name, value in tree.items()}
    array = np.asarray(tree)
    return [str(array.dtype), array.shape, array.tobytes().hex()]
print(json.dumps(describe(tree)))
"""


@pytest.mark.parametrize("num_devices", [1, 3])
def test_orbax_alone_restores_the_parameters(run, num_devices, tmp_path):
    arguments = run / "checkpoints" / "3" / "params", num_devices
    found = printed("-c", PLAIN_RESTORE, *arguments, cwd=tmp_path)
    expected = jax.tree.map(
        lambda leaf: [str(leaf.dtype), list(leaf.shape), leaf.tobytes().hex()],
        plain(trained_state().params),
    )
    assert json.loads(found) == expected


@pytest.mark.parametrize("name", ["absent", "empty", "file", "7"])
def test_what_is_no_checkpoint_is_refused(tmp_path, name):
    for folder in ("empty", "7/checkpoints", "7/params"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "file").write_text("text")
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path / name}: no.* checkpoint") as error:
        load_policy(tmp_path / name)
    assert "\n" not in str(error.value)
    assert snapshot(tmp_path) == before


def test_another_projects_checkpoint_is_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    meta = copy / "checkpoints" / "3" / "meta" / "metadata"
    meta.write_text(json.dumps({"format": "another"}))
    with pytest.raises(ValueError, match=f"^{copy}.*not a checkpoint of this project$"):
        load_policy(copy)


LOAD = """
import sys
from doppler_jax.policy_files import load_policy
for path in sys.argv[1:]:
    try:
        load_policy(path)
    except ValueError as error:
        print(str(error).replace("\\n", "NEWLINE"))
    else:
        print("loaded")
"""


def test_damaged_checkpoints_are_refused(run, tmp_path):
    """In a process of its own: TensorStore's threads report to a loop that is gone."""
    folder = pathlib.Path("checkpoints") / "3"
    (data,) = (run / folder / "params" / "d").iterdir()
    files = ["meta/metadata"]
    files += [f"params/{name}" for name in ("_METADATA", "manifest.ocdbt", f"d/{data.name}")]
    copies = []
    for file in files:
        for spoil in (lambda b: b[: len(b) // 2], lambda b: bytes(reversed(b)), None):
            copies.append(shutil.copytree(run, tmp_path / f"{len(copies)}"))
            path = copies[-1] / folder / file
            content = path.read_bytes()
            path.unlink()
            if spoil:
                path.write_bytes(spoil(content))
    lines = printed("-c", LOAD, *copies).splitlines()
    assert len(lines) == len(copies)
    for line, copy in zip(lines, copies, strict=True):
        assert line.startswith(f"{copy / folder}: not a checkpoint")
        assert "NEWLINE" not in line
        assert len(line) < 500
