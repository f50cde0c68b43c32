import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.baselines.heft import heft
from doppler_jax.costs.digests import problem_digest
from doppler_jax.graphs.families import HELD_OUT
from doppler_jax.learners.doppler import policy_candidates
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.training.checkpoint import Policy
from experiments import zero_shot, zero_shot_cells, zero_shot_tables
from experiments.cells import Cells
from experiments.zero_shot import ZeroShotSettings
from experiments.zero_shot_cells import Run, Study
from tests.commands import save_tiny_checkpoint
from tests.generators import random_problem

DEVICES = 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Of a saved checkpoint, its parameters all 0."""
    folder = tmp_path_factory.mktemp("policy")
    save_tiny_checkpoint(folder)
    return dj.load_policy(folder)


@pytest.fixture
def study(policy, tmp_path):
    return Study(Cells(tmp_path / "cells"), policy, tmp_path)


@pytest.fixture
def asked(monkeypatch):
    """What `place` was asked for; it answers with HEFT's placement."""
    requests = []

    def place(graph, costs, *, key, **options):
        requests.append(options)
        return proper(graph, costs, method="heft")

    proper = dj.place
    monkeypatch.setattr(dj, "place", place)
    return requests


def test_problems_are_the_same_every_time_and_differ_by_number(tmp_path):
    names = [f"{family}-{number}" for family in HELD_OUT for number in (0, 1, 4, 8, 12)]
    problems = [zero_shot_cells.load_problem(tmp_path, name) for name in names]
    zero_shot_cells._held_out.cache_clear()
    again = [zero_shot_cells.load_problem(tmp_path, name) for name in names]
    digests = [problem_digest(*problem) for problem in problems]
    assert digests == [problem_digest(*problem) for problem in again]
    assert len(set(digests)) == len(names)
    assert {costs.num_devices for _, costs in problems} == {4, 8}
    unequal = [bool((np.ptp(costs.compute_s, axis=1) > 0).any()) for _, costs in problems]
    assert unequal == [False, False, True, False, True] * len(HELD_OUT)


def test_a_run_is_asked_for_once_with_its_budget_and_policy(study, asked):
    name = f"{HELD_OUT[0]}-0"
    runs = [
        Run("greedy"), Run("two greedy"), Run("doppler", 256), Run("doppler+search", 1000),
        Run("annealing", 1000),
    ]  # fmt: skip
    for _ in range(2):
        for run in runs:
            zero_shot_cells.method_cell(study, name, run, 0)
    policy = study.policy
    assert asked == [
        {"method": "doppler", "max_evaluations": 1, "budget_s": None, "policy": policy},
        {"method": "doppler", "max_evaluations": 2, "budget_s": None, "policy": policy},
        {"method": "doppler", "max_evaluations": 256, "budget_s": None, "policy": policy},
        {"method": "doppler+search", "max_evaluations": 1000, "budget_s": None,
         "policy": policy},
        {"method": "annealing", "max_evaluations": 1000, "budget_s": None, "policy": None},
    ]  # fmt: skip


def test_seconds_begin_after_a_run_that_compiles(study, asked):
    record = zero_shot_cells.method_cell(
        study, f"{HELD_OUT[0]}-0", Run("annealing", None, 5), 0
    )
    first, second = asked
    assert first["max_evaluations"] == zero_shot_cells.WARM_UP_EVALUATIONS
    assert (second["max_evaluations"], second["budget_s"]) == (None, 5)
    graph, costs = zero_shot_cells.load_problem(study.reference, f"{HELD_OUT[0]}-0")
    assert record["placement"] == heft(graph, costs).tolist()
    assert record["problem"] == problem_digest(graph, costs)


def test_another_policy_makes_its_own_cells(study, asked):
    name = f"{HELD_OUT[0]}-0"
    params = jax.tree.map(lambda leaf: leaf + 1, study.policy.params)
    other = dataclasses.replace(study, policy=Policy(params, study.policy.config))
    for which in (study, other, other):
        for run in (Run("heft"), Run("greedy")):
            zero_shot_cells.method_cell(which, name, run, 0)
    assert [options["method"] for options in asked] == ["heft", "doppler", "doppler"]


def test_greedy_placements_do_not_depend_on_padding(study):
    problems = [
        random_problem(np.random.default_rng(k), 12 + k, d) for k, d in ((0, 2), (1, 3))
    ]
    made = [make_policy_inputs(*problem) for problem in problems]
    found = zero_shot_cells.drawn_placements(study.policy, made)
    for placements, problem, (graph, costs) in zip(found, made, problems, strict=True):
        assert placements.shape == (2 + zero_shot_cells.SAMPLES, graph.num_tasks)
        assert placements.max() < costs.num_devices
        assert len(np.unique(placements, axis=0)) > 1
        alone = policy_candidates(problem, study.policy, jax.random.key(0), 2)
        np.testing.assert_array_equal(placements[:2], alone)


def test_islands_are_compared_with_heft(study, monkeypatch):
    monkeypatch.setattr(
        zero_shot_cells,
        "drawn_placements",
        lambda policy, problems: [
            np.arange(3)[:, None].repeat(int(p.padded.num_tasks), 1) for p in problems
        ],
    )
    found = zero_shot_cells.island_cell(study, 3)
    graph, costs = zero_shot_cells._island_problem(1)
    assert costs.num_devices == 8
    assert len(np.unique(costs.seconds_per_byte)) == 3  # none, within islands, between them
    alone_s = costs.compute_s[:, :3].sum(0)
    assert found["greedy_s"][1] == pytest.approx(alone_s[0], rel=1e-9)
    assert found["two_greedy_s"][1] == pytest.approx(alone_s[:2].min(), rel=1e-9)
    assert found["best_s"][1] == pytest.approx(alone_s.min(), rel=1e-9)
    schedule = dj.simulate_oracle(graph, costs, heft(graph, costs))
    assert found["heft_s"][1] == dj.makespan_s(schedule)
    assert len(set(found["families"])) == 3


def table_rows(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if "|" in line]


def test_ratios_are_to_the_best_known_of_each_problem():
    found = {
        "a": {"best_s": 2.0, "makespan_s": {"heft": 3.0, "greedy": 2.0}},
        "b-0": {"best_s": 1.0, "makespan_s": {"heft": 1.0, "greedy": 2.0}},
        "c-0": {"best_s": 4.0, "makespan_s": {"heft": 5.0, "greedy": 4.0}},
    }
    groups = {"published": ["a"], "b": ["b-0"], "c": ["c-0"], "absent": []}
    clusters = {"4 equal": ["c-0", "b-0"]}
    text = zero_shot_tables.tabulate_quality(groups, clusters, found)
    by_group, by_cluster, by_graph = (table_rows(text.split("\n\n")[k]) for k in (1, 3, 5))
    head, _, heft_row, greedy_row = by_group
    assert head == ["method", "published (1)", "b (1)", "c (1)", "held out (2)"]
    assert heft_row[1] == "1.5000"
    assert heft_row[4] == "1.1250 (1.2500)"
    assert greedy_row[4] == "1.5000 (2.0000)"
    assert by_cluster[0] == ["method", "4 equal (2)"]
    assert by_cluster[2] == ["heft", "1.1250 (1.2500)"]
    assert by_graph[0] == ["method", "a"]
    assert by_graph[2] == ["heft", "1.5000"]
    without = zero_shot_tables.tabulate_quality({**groups, "published": []}, clusters, found)
    assert len(table_rows(without)) == 8


def test_clusters_are_named_for_what_they_are():
    names = [zero_shot_cells.cluster_name(number) for number in (0, 5, 8, 15, 16)]
    islands = ["8 equal in 2 islands", "8 unequal in 2 islands"]
    assert names == ["4 equal", "4 unequal", *islands, "4 equal"]


def test_shares_at_or_below_heft_by_family(tmp_path):
    greedy = np.array([0.9, 1.0, 1.1, 1.3])
    ratios = {"greedy": greedy, "best": greedy - 0.1}
    text = zero_shot_tables.tabulate_clusters(ratios, ["x", "x", "y", "x"])
    rows = {tuple(row[:2]): row[2:] for row in table_rows(text)}
    assert rows["greedy", "all"][:2] == ["4", "50"]
    assert rows["greedy", "x"][:2] == ["3", "67"]
    assert rows["greedy", "y"] == ["1", "0", "1.100", "1.100", "1.100", "1.100"]
    assert rows["best", "all"][:2] == ["4", "75"]
    zero_shot_tables.plot_ratios(tmp_path / "ratios.png", ratios)
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_known_is_the_least_of_everything(study, asked, monkeypatch, tmp_path):
    settings = ZeroShotSettings(instances=1, reference=tmp_path, runs=tmp_path)
    name = f"{HELD_OUT[0]}-0"
    monkeypatch.setattr(zero_shot, "_known_s", lambda asked: 1e-9 if asked == name else np.inf)
    found, _ = zero_shot.quality(settings, study)
    assert list(found) == [f"{family}-0" for family in HELD_OUT]
    assert found[name]["best_s"] == 1e-9
    other = found[f"{HELD_OUT[1]}-0"]
    assert other["best_s"] == other["makespan_s"]["heft"]
    assert set(other["makespan_s"]) == {run.label for run in zero_shot.RUNS}
    budgets = {options["max_evaluations"] for options in asked}
    assert {1, 2, 256, 1000, 10_000, 1_000_000} <= budgets


def test_published_placements_count_as_known():
    kept = json.loads(zero_shot.BEST_PLACEMENTS.read_text())
    for name, best_s in zero_shot.BEST_KNOWN_S.items():
        assert zero_shot._known_s(name) == min(
            best_s, kept.get(name, {"makespan_s": np.inf})["makespan_s"]
        )
    assert zero_shot._known_s("cholesky-0") == np.inf


def test_the_whole_command_writes_what_it_found(asked, policy, tmp_path, monkeypatch):
    save_tiny_checkpoint(tmp_path / "run")
    monkeypatch.setattr(zero_shot, "use_host_devices", lambda count: None)
    times = {"g": {"tasks": 229, "features_s": 0.01, "greedy_s": 0.02, "first_s": 3.0}}
    timed = times, zero_shot_tables.tabulate_times(times)
    monkeypatch.setattr(zero_shot, "times", lambda *_: timed)
    monkeypatch.setattr(
        zero_shot_cells, "drawn_placements", lambda policy, problems: [
            np.zeros((2, int(p.padded.num_tasks)), int) for p in problems
        ],
    )  # fmt: skip
    settings = ZeroShotSettings(
        policy=tmp_path / "run", quick=True, reference=tmp_path, runs=tmp_path / "runs"
    )
    zero_shot.main(settings)
    folder = tmp_path / "runs" / "zero_shot"
    text = (folder / "zero_shot.md").read_text()
    assert "| 229 | 10.0 ms | 20.0 ms | 30.0 ms | 3.00 s |" in text
    assert "| all | 24 |" in text
    assert (folder / "clusters.png").exists()
    results = json.loads((folder / "zero_shot.json").read_text())["results"]
    assert len(results["quality"]) == 2 * len(HELD_OUT)


def test_what_ctrl_c_ended_is_not_kept(study, monkeypatch):
    proper = dj.place

    def place(graph, costs, **_):
        return dataclasses.replace(proper(graph, costs, method="heft"), interrupted=True)

    monkeypatch.setattr(dj, "place", place)
    with pytest.raises(KeyboardInterrupt):
        zero_shot_cells.method_cell(study, f"{HELD_OUT[0]}-0", Run("annealing", 1000), 0)
    assert not study.cells.folder.exists()


@pytest.mark.slow
def test_the_command_runs_with_the_policy_that_ships(tmp_path):
    command = "-m experiments.zero_shot --parts clusters --num-clusters 2 --runs"
    root = zero_shot.BEST_PLACEMENTS.parents[1]
    subprocess.run([sys.executable, *command.split(), tmp_path], check=True, cwd=root)
    assert "| all | 2 |" in (tmp_path / "zero_shot" / "zero_shot.md").read_text()


def test_no_policy_and_no_graph_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(zero_shot, "FOLDERS", (tmp_path / "none",))
    with pytest.raises(ValueError, match=r"no base policy at .*none; give --policy"):
        zero_shot.main(ZeroShotSettings(runs=tmp_path))
    with pytest.raises(ValueError, match=r"there is no full_transformer_layer_261nodes\.txt"):
        zero_shot.times(ZeroShotSettings(reference=tmp_path), tmp_path)


@pytest.mark.slow
def test_times_are_measured_in_a_process_of_its_own(tmp_path, reference_graphs, monkeypatch):
    monkeypatch.chdir(zero_shot.BEST_PLACEMENTS.parents[1])
    monkeypatch.delenv("XLA_FLAGS")  # ten thousand tasks are long to run, not to compile
    save_tiny_checkpoint(tmp_path)
    found, text = zero_shot.times(ZeroShotSettings(reference=reference_graphs), tmp_path)
    assert (found["published"]["tasks"], found["large"]["tasks"]) == (229, 10_000)
    assert all(0 < t["greedy_s"] < t["first_s"] for t in found.values())
    assert "| 229 |" in text


def test_the_config_is_part_of_the_terms(study):
    other = dataclasses.replace(study, policy=Policy(study.policy.params, PolicyConfig()))
    assert other.policy_terms != study.policy_terms
