"""`python -m doppler_jax train stage1` to `stage3`: resuming, refusing, and one clear line."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax import problems
from doppler_jax.engine.stage3 import stage3
from doppler_jax.problems import choose_workload, local_devices, saved_host, use_host_devices
from doppler_jax.training import sim_rl
from doppler_jax.training.settings import (
    Stage1Settings,
    Stage2Settings,
    Stage3Settings,
    check_settings,
)
from doppler_jax.training.stages import run_stage
from tests.commands import (
    TEXT,
    assert_refused,
    run,
    run_python,
    save_tiny_checkpoint,
    set_feature_version,
    snapshot,
)

STAGES = {
    1: (run_stage, Stage1Settings),
    2: (run_stage, Stage2Settings),
    3: (stage3, Stage3Settings),
}
# Of a graph file, without an update: what a checkpoint needs and little compilation.
NO_UPDATE = ["--graph", "g.txt", "--num-updates", "0"]
SMALL = {1: [*NO_UPDATE, "--policy.width", "4", "--policy.rounds", "1"], 2: NO_UPDATE}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with g.txt and the runs of stages 1 and 2 for it."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        pathlib.Path("g.txt").write_text(TEXT)
        for stage, words in SMALL.items():
            assert run(patch, *STAGES[stage], *words, "--host-devices", "4") == 0
    return folder


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs `python -m doppler_jax train stageK WORDS` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("g.txt").write_text(TEXT)

    def start(stage, *words):
        # The number of devices of this process is settled, and conftest's.
        host = [] if "--host-devices" in words else ["--host-devices", "4"]
        return run(monkeypatch, *STAGES[stage], *words, *host)

    return start


@pytest.fixture
def refuse(command, capsys, tmp_path):
    """Runs a command that must end in one line with the parts, and touch no file."""
    return lambda stage, words, *parts: assert_refused(
        command, (stage, *words), parts, capsys, tmp_path
    )


@pytest.fixture
def copied(finished, tmp_path):
    """The finished runs, to spoil."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--workload", "chain"], ["unknown workload 'chain'", "chainmm", "ffnn"]),
        (["--cluster", "p1000"], ["unknown cluster 'p1000'; known: h200x8, host"]),
        (["--cluster", "absent.json"], ["absent.json: No such file"]),
        (["--preset", "huge"], ["unknown preset 'huge' of chainmm"]),
        (["--seed", "-1"], ["--seed is -1"]),
        (["--num-updates", "-1"], ["--num-updates is -1; expected at least 0"]),
        (["--host-devices", "0"], ["--host-devices is 0; expected at least 1"]),
        (["--save-every-s", "nan"], ["--save-every-s is nan; expected a finite number"]),
        (["--training.batch", "0"], ["--training.batch is 0; expected at least 1"]),
        (["--training.learning-rate", "inf"], ["--training.learning-rate is inf"]),
    ],
)
def test_bad_options_are_refused(refuse, stage, words, parts):
    refuse(stage, words, *parts)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("path", "part"),
    [
        # What else can be wrong in a file, `graphs/test_formats.py` knows.
        ("negative.txt", "line 5: compute is '-5'"),
        ("binary.txt", "not a text file"),
        (".", "Is a directory"),
        ("absent.txt", "No such file"),
    ],
)
def test_bad_graph_files_are_refused(refuse, stage, path, part):
    pathlib.Path("negative.txt").write_text(TEXT.replace("5,20", "-5,20"))
    pathlib.Path("binary.txt").write_text("\0\1\2")
    refuse(stage, ["--graph", path], f"error: {path}: ", part)


@pytest.mark.parametrize(
    ("stage", "words", "parts"),
    [
        (1, "--policy.width 0", ["--policy.width is 0; expected at least 1"]),
        (2, "--training.minibatches 3", ["minibatches is 3; expected a divisor of batch, 256"]),
        (2, "--training.batch 64", ["num_chains is 128; expected at most batch, 64"]),
        (2, "--training.num-chains -1", ["--training.num-chains is -1; expected at least 0"]),
        (2, "--episodes 0", ["--episodes is 0; expected at least 1"]),
        (2, "--budget-s inf", ["--budget-s is inf; expected a finite number"]),
        (2, "--target-s -1", ["--target-s is -1.0; expected a finite number >= 0"]),
        # A stage wants the one before first, and stage 3 kernels to execute.
        (
            2,
            "",
            ["runs/stage1/g-p100x4: no checkpoint here", "run stage1 on the same problem fi"],
        ),
        (3, "", ["g.txt: stage 3 measures real executions", "file has no kernels to execute"]),
        (
            3,
            None,
            ["runs/stage2/chainmm-paper-p100x4: no checkpoint here", "run stage2 on the"],
        ),
    ],
)
def test_what_a_stage_cannot_do_is_refused(refuse, stage, words, parts):
    refuse(stage, [] if words is None else ["--graph", "g.txt", *words.split()], *parts)


@pytest.mark.parametrize(
    ("words", "updates"),
    [("--episodes 17", 2), ("--target-s 1e9", 1), ("--budget-s 1e-9", 1), ("", 3)],
)
def test_stage_2_ends_at_its_bounds(command, copied, monkeypatch, words, updates):
    def update(state, *_):
        done = state.replace(
            update=state.update + 1,
            episodes=state.episodes + 8,
            best_makespan_s=state.best_makespan_s.at[...].set(1.0),
        )
        return done, {"loss": 0.0}

    monkeypatch.setattr(sim_rl, "sim_update", update)
    shutil.rmtree("runs/stage2")
    small = ["--training.batch", "8", "--training.num-chains", "0"]
    assert command(2, "--graph", "g.txt", "--num-updates", "3", *small, *words.split()) == 0
    lines = (copied / "runs/stage2/g-p100x4/metrics.jsonl").read_text().splitlines()
    assert len(lines) == updates


def test_stage_3_refuses_an_unknown_preset(refuse):
    save_tiny_checkpoint(pathlib.Path("runs/stage2/chainmm-paper-p100x4"))
    refuse(3, ["--measured-preset", "tiny"], "unknown preset 'tiny' of chainmm")


def test_a_file_in_the_place_of_the_runs_is_refused(refuse):
    pathlib.Path("runs").write_text("mine")
    refuse(1, SMALL[1], "runs")


def test_runs_leave_their_files(finished):
    graph = dj.load_graph(finished / "g.txt")
    costs = dj.make_costs(graph, dj.make_cluster("p100x4"))
    for stage in SMALL:
        folder = finished / "runs" / f"stage{stage}" / "g-p100x4"
        config = json.loads((folder / "config.json").read_text())
        assert (config["stage"], config["seed"]) == (f"stage{stage}", 0)
        found = json.loads((folder / "placement.json").read_text())
        schedule = dj.simulator.simulate_oracle(graph, costs, found["placement"])
        assert found["makespan_s"] == dj.simulator.makespan_s(schedule)
        assert dj.load_policy(folder).config.width == 4


@pytest.mark.parametrize("stage", SMALL)
def test_a_finished_run_is_resumed_as_it_is(command, copied, stage):
    before = snapshot(copied)
    assert command(stage, *SMALL[stage]) == 0
    assert snapshot(copied) == before


@pytest.mark.parametrize(
    ("stage", "words", "part"),
    [
        (1, ["--seed", "1"], "seed was 0, now 1"),
        (1, ["--training.batch", "16"], "training was"),
        (1, ["--policy.width", "8"], "policy was"),
        (2, ["--seed", "1"], "seed was 0, now 1"),
        (2, ["--training.entropy-weight", "0.5"], "training was"),
    ],
)
def test_other_settings_are_refused_on_resumption(refuse, copied, stage, words, part):
    path = f"runs/stage{stage}/g-p100x4/config.json"
    refuse(stage, [*SMALL[stage], *words], f"{path} belongs to a run with other settings", part)


def test_a_policy_of_other_features_is_refused(refuse, copied):
    set_feature_version(copied / "runs/stage1/g-p100x4", 99)
    shutil.rmtree(copied / "runs/stage2")
    refuse(2, SMALL[2], "runs/stage1/g-p100x4/checkpoints/0: feature version 99")


def test_host_is_measured_once_per_folder(tmp_path, monkeypatch):
    cluster = dj.make_cluster("reference_x4")
    monkeypatch.setattr(problems, "measure_host", lambda devices: cluster)
    saved_host(tmp_path / "new")
    monkeypatch.setattr(problems, "measure_host", lambda devices: pytest.fail("again"))
    found = saved_host(tmp_path / "new")
    np.testing.assert_array_equal(found.flops_per_s, cluster.flops_per_s)
    dj.clusters.save_cluster(tmp_path / "new" / "host.json", dj.make_cluster("v100x8"))
    with pytest.raises(ValueError, match=r"host\.json describes 8 devices.* has 4; remove"):
        saved_host(tmp_path / "new")


def test_workloads_are_cut_for_the_next_power_of_two():
    cluster = dj.make_cluster("reference_x4")
    three = jax.tree.map(lambda array: array[(slice(3),) * array.ndim], cluster)
    chosen = choose_workload("ffnn", "small", three, "three", "uniform")
    assert chosen.name == "ffnn-small-uniform-three"
    assert chosen.costs.num_devices == 3
    four = choose_workload("ffnn", "small", cluster, "four", "uniform")
    assert chosen.graph.num_tasks == four.graph.num_tasks
    looped = choose_workload("ffnn_train", "small", cluster, "four", carry=(0,))
    assert looped.name == "ffnn_train-small-carry0-four"
    assert (looped.graph.input_maker >= 0).any()


def test_host_devices_and_the_default_settings_are_legal():
    with pytest.raises(ValueError, match="host devices: 0; expected at least 1"):
        use_host_devices(0)
    assert len(local_devices()) == len(jax.devices()) == 4
    for _, settings in STAGES.values():
        check_settings(settings())


@pytest.mark.slow
def test_all_three_stages_as_processes(tmp_path, refuse, capsys):
    """One update each, on a workload; then stage 3 again, and with other settings."""
    words = ["--preset", "small", "--num-updates", "1", "--host-devices", "4"]
    local = [*words, "--backend", "local", "--training.proposal-evaluations", "256"]

    def start(stage, *words):
        return run_python("-m", "doppler_jax", "train", f"stage{stage}", *words, cwd=tmp_path)

    small = [*words, "--policy.width", "8", "--policy.rounds", "1"]
    runs = ((1, small, "simulated"), (2, words, "simulated"), (3, local, "measured"))
    for stage, options, what in runs:
        done = start(stage, *options)
        assert done.returncode == 0, done.stderr
        assert f"stage {stage}: " in done.stdout
        assert what in done.stdout
    folder = tmp_path / "runs/stage3/chainmm-small-local-after-p100x4"
    assert (folder / "placement.json").exists()
    before = snapshot(tmp_path)
    assert start(3, *local).returncode == 0
    assert snapshot(tmp_path) == before  # nothing is measured or trained again
    for changed, part in (
        (["--seed", "1"], "seed was 0, now 1"),
        (["--max-slowdown", "3"], "3x"),
    ):
        capsys.readouterr()
        refuse(3, [*local, *changed], "belongs to a run with other settings", part)
