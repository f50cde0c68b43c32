"""Runs killed at any moment and resumed end as if nobody had touched them."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import doppler_jax as dj
from doppler_jax.graphs.formats import save_graph
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig, init_params
from doppler_jax.problems import choose_graph
from doppler_jax.simulator.oracle import simulate_plan
from doppler_jax.training.paired import Paired
from doppler_jax.training.stages import run_stage3
from doppler_jax.training.system_rl import SystemConfig
from tests.commands import ROOT
from tests.generators import random_problem

UPDATES = {"stage1": 200, "stage2": 120, "stage3": 40}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    path = tmp_path_factory.mktemp("graph") / "random.json"
    save_graph(path, random_problem(np.random.default_rng(0), 24, 4, homes=False)[0])
    return path


def stage_command(stage, graph, runs, save_every_s=0.2):
    command = [sys.executable, "-m", "doppler_jax", "train", stage, "--graph", str(graph)]
    command += ["--cluster", "reference_x4", "--runs", str(runs)]
    command += ["--num-updates", str(UPDATES[stage]), "--save-every-s", str(save_every_s)]
    if stage == "stage1":
        return [*command, "--policy.width", "8", "--policy.rounds", "1"]
    return [*command, "--training.batch", "32", "--training.num-chains", "32"]


def stage3_command(graph, folder, mode):
    arguments = map(str, (graph, folder, UPDATES["stage3"], mode))
    return [sys.executable, "-m", "tests.training.test_resume", *arguments]


def run_to_the_end(command):
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_and_kill(command, progress, enough, pause_s):
    """Starts a run and kills it `pause_s` after its file `progress` has `enough` lines."""
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while lines(progress) < enough and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(pause_s)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "the run had ended before it was killed"


def run_with_kills(command, progress, total, seed, shares):
    """Runs to the end with kills in between, soon after shares of its progress."""
    rng = random.Random(seed)
    for share in shares:
        enough = max(lines(progress), int(total * (share + 0.15 * rng.random()))) + 1
        run_and_kill(command, progress, enough, 0.25 * rng.random())
        assert not progress.with_name("placement.json").exists()
    run_to_the_end(command)


def final_state(folder, num_updates):
    """The newest checkpoint as plain NumPy arrays, by path."""
    (newest,) = [p for p in (folder / "checkpoints").iterdir() if p.name == str(num_updates)]
    found = {}
    for item in ("params", "train"):
        tree = ocp.StandardCheckpointer().restore(newest / item)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            found[item + jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found


def assert_same_run(folder, expected, num_updates):
    found, wanted = final_state(folder, num_updates), final_state(expected, num_updates)
    assert found.keys() == wanted.keys()
    assert any("params" in name for name in wanted)
    assert any("elites" in name for name in wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)
    for name in ("metrics.jsonl", "placement.json", "config.json"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    updates = [json.loads(line)["update"] for line in metrics]
    assert updates == list(range(1, num_updates + 1))


@pytest.fixture(scope="module")
def undisturbed(graph, tmp_path_factory):
    """Folder of runs of stages 1 and 2 that were left alone, and saved at other times."""
    runs = tmp_path_factory.mktemp("undisturbed")
    for stage in ("stage1", "stage2"):
        run_to_the_end(stage_command(stage, graph, runs, save_every_s=60))
    return runs


@pytest.mark.parametrize(("stage", "shares"), [("stage1", (0.3,)), ("stage2", (0.05, 0.5))])
def test_simulated_stages_resume_bit_for_bit(graph, undisturbed, tmp_path, stage, shares):
    name = "random-reference_x4"
    if stage == "stage2":
        shutil.copytree(undisturbed / "stage1", tmp_path / "stage1")
    progress = tmp_path / stage / name / "metrics.jsonl"
    command = stage_command(stage, graph, tmp_path)
    run_with_kills(command, progress, UPDATES[stage], stage, shares)
    assert_same_run(progress.parent, undisturbed / stage / name, UPDATES[stage])


def test_stage_3_resumes_from_its_measurements(graph, tmp_path):
    folder = tmp_path / "killed" / "stage3" / "run"
    log = folder / "measurements.jsonl"
    # Times are random: almost every update measures its four samples, a proposal or two, and
    # one plan again.
    total = 5 * UPDATES["stage3"]
    run_with_kills(stage3_command(graph, folder, "measure"), log, total, "stage3", (0.3,))
    assert total < lines(log) <= 7 * UPDATES["stage3"] + 2

    replayed = tmp_path / "replayed" / "stage3" / "run"
    replayed.mkdir(parents=True)
    shutil.copy(log, replayed)
    run_to_the_end(stage3_command(graph, replayed, "replay"))
    assert (replayed / "measurements.jsonl").read_bytes() == log.read_bytes()
    assert_same_run(folder, replayed, UPDATES["stage3"])


def measure(candidate, incumbent, rounds):
    """Times that nobody can repeat."""
    time.sleep(0.005)
    graph, costs = measure.problem
    times = 1.0 + np.frombuffer(os.urandom(8 * rounds), np.uint32) / 2**32
    pairs = map(tuple, times.reshape(2, rounds).tolist())
    return Paired(*pairs, trace=simulate_plan(graph, costs, candidate))


def refuse(*args):
    raise AssertionError("the log must hold every measurement")


def main(graph, folder, num_updates, mode):
    """Stage 3 in a process that is killed; in mode `replay`, all must be in the log."""
    chosen = choose_graph(pathlib.Path(graph), dj.make_cluster("reference_x4"), "reference_x4")
    config = PolicyConfig(width=8, rounds=1)
    problem = make_policy_inputs(chosen.graph, chosen.costs)
    measure.problem = chosen.graph, chosen.costs
    policy = dj.policies.Policy(
        params=init_params(jax.random.key(1), config, problem), config=config
    )
    sizes = {"batch": 4, "proposals": 2, "pairs": 1, "num_elites": 3}
    run_stage3(
        chosen,
        pathlib.Path(folder),
        policy,
        dj.Plan(np.zeros(chosen.graph.num_tasks, int)),
        {"measure": measure, "replay": refuse}[mode],
        seed=0,
        num_updates=int(num_updates),
        config=SystemConfig(proposal_evaluations=256, **sizes),
        save_every_s=0.2,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
