"""The commands that `make` would run, without running them."""

import os
import shlex
import subprocess

import pytest

from tests.commands import ROOT


def run_make(*words, cwd=ROOT):
    # Not as a child of the `make test` that may be running this, nor with its environment.
    given = ("MAKE", "MFLAGS", "VENV", "CONSTRAINTS", "PYTHON")
    env = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    command = ["make", "-f", ROOT / "Makefile", *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def dry_run(*words):
    """Returns the words of the last command of `make --dry-run WORDS`."""
    done = run_make("--dry-run", *words)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("stage", ["stage1", "stage2", "stage3"])
def test_stage_defaults(stage):
    expected = f"-m doppler_jax train {stage} --workload chainmm --cluster p100x4"
    assert dry_run(stage)[1:] == expected.split()


def test_pretraining_takes_no_problem():
    words = dry_run("pretrain", "ARGS=--seed 3")
    assert words[1:] == ["-m", "doppler_jax", "train", "pretrain", "--seed", "3"]


@pytest.mark.parametrize(
    ("target", "extras"), [("demo", "cluster,exact,report"), ("test", "dev"), ("setup", "dev")]
)
def test_a_new_environment_gets_what_its_target_needs(target, extras, tmp_path):
    venv = f"VENV={tmp_path}/new"
    assert f"-e '.[{extras}]'" in run_make("--dry-run", target, venv).stdout
    cuda = run_make("--dry-run", target, venv, "CUDA=1").stdout
    assert f"-e '.[{extras},cuda]'" in cuda
    (tmp_path / "new").mkdir()
    (tmp_path / "new/.installed").touch()  # all of it is there
    assert "pip install" not in run_make("--dry-run", target, venv).stdout


@pytest.mark.parametrize("name", ["my graph.txt", "it's.txt", "a;b $$HOME.txt"])
def test_graph_reaches_the_command_as_one_word(name):
    words = dry_run("stage1", f"GRAPH={name}", "CLUSTER=v100x8", "ARGS=--out 'a b'")
    assert words[3:] == [
        "train",
        "stage1",
        "--graph",
        name,
        "--cluster",
        "v100x8",
        "--out",
        "a b",
    ]


def test_environment_does_not_choose_and_two_problems_are_refused(monkeypatch):
    monkeypatch.setenv("WORKLOAD", "ffnn")
    monkeypatch.setenv("GRAPH", "file")
    assert "chainmm" in dry_run("stage2")
    done = run_make("--dry-run", "stage1", "GRAPH=a.txt", "WORKLOAD=ffnn")
    assert done.returncode != 0
    assert "give GRAPH=file or WORKLOAD=name, not both" in done.stderr


def test_old_python_is_refused_in_one_line(tmp_path):
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\n[ $# = 1 ] && echo Python 3.10.1\nexit 1\n")
    old.chmod(0o755)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    done = run_make("setup", f"PYTHON={old}", cwd=tmp_path)
    assert done.returncode != 0
    assert f"Python 3.11 or newer is needed, but {old} is Python 3.10.1" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".venv").exists()
