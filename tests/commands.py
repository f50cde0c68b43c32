"""What the tests of the command lines share."""

import json
import os
import pathlib
import subprocess
import sys
from functools import partial

import jax
import numpy as np

import doppler_jax as dj
from doppler_jax import cli
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig, init_params
from tests.generators import random_problem

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = "4\n0,\n0, 0,\n1, 2,\n5,20\n6,24\n7,28\n"
"""A DOPPLER text: tasks 0, 1, 2, edges 0 -> 1 and 0 -> 2."""


def graph_json(**changes):
    """Two tasks and a tensor between them as `save_graph` writes it; None takes a field out."""
    graph = {
        "format": "doppler_jax.task_graph", "version": 1,
        "flops": [1.0, 2], "tensor_producer": [0], "tensor_bytes": [4.0],
        "edge_tensor": [0], "edge_reader": [1],
        "input_bytes": [], "input_home": [], "input_edge_input": [], "input_edge_reader": [],
    }  # fmt: skip
    return json.dumps({k: v for k, v in (graph | changes).items() if v is not None})


def run(monkeypatch, main, settings, *words):
    """Returns the exit code of `python -m MODULE WORDS`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["command", *map(str, words)])
    try:
        cli.run(main, settings, "A command.")
    except SystemExit as stop:
        return stop.code
    return 0


def run_python(*words, cwd=ROOT, **environment):
    """Returns how `python WORDS` ended, our packages on its path, in that folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    options = {"cwd": cwd, "env": env, "capture_output": True, "text": True, "timeout": 500}
    return subprocess.run([sys.executable, *map(str, words)], **options)


def printed(*words, **options):
    """Returns what `python WORDS` printed; it must not fail."""
    done = run_python(*words, **options)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def assert_one_error_line(stderr, *parts):
    """Standard error is one line that starts with "error:" and holds the parts."""
    assert stderr.startswith("error: "), stderr
    assert stderr.count("\n") == 1, stderr
    assert stderr.endswith("\n"), stderr
    for part in parts:
        assert str(part) in stderr


def snapshot(folder):
    """Returns path and content of every file at or below a folder, None for a folder."""
    paths = sorted(folder.rglob("*"))
    return {path: None if path.is_dir() else path.read_bytes() for path in paths}


def assert_refused(command, words, parts, capsys, folder):
    """It ends in one line with `parts`, and touches no file of the folder."""
    before = snapshot(folder)
    assert command(*words) == 2
    assert_one_error_line(capsys.readouterr().err, *parts)
    assert snapshot(folder) == before


def save_tiny_checkpoint(folder):
    """Makes a run's folder with the checkpoint of a tiny policy, its parameters all 0."""
    config = PolicyConfig(width=4, rounds=1)
    problem = make_policy_inputs(*random_problem(np.random.default_rng(0), 3, 2))
    init = partial(init_params, config=config, problem=problem)
    params = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(init, jax.random.key(0))
    )
    dj.policies.save_policy(
        folder / "checkpoints", dj.policies.Policy(params=params, config=config)
    )


def set_feature_version(folder, version):
    """Edits the checkpoints of a run's folder to claim another feature version."""
    for path in folder.glob("checkpoints/*/meta/metadata"):
        meta = json.loads(path.read_text())
        meta["policy"]["feature_version"] = version
        path.write_text(json.dumps(meta))
