"""Problems by their names."""

import json
import pathlib
import re

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.graphs.families import HELD_OUT
from experiments import catalogue
from experiments.catalogue import PUBLISHED, SIZED, load_problem
from tests.commands import TEXT


@pytest.fixture
def shared(reference_graphs, neutral_graphs):
    """The folder of published graphs."""
    return reference_graphs.parent


@pytest.mark.parametrize(
    ("name", "num_tasks", "num_devices"),
    [
        ("chain_mm_112nodes", 76, 4),
        ("chain_mm_112nodes@2", 76, 2),
        ("8gpu_transformer_block@8", 302, 8),
        ("stg50/rand0000@16", 52, 16),
        ("layers-64@3", 64, 3),
        ("layers4-64", 64, 4),
    ],
)
def test_published_and_generated_graphs(shared, name, num_tasks, num_devices):
    problem = load_problem(name, shared)
    dj.costs.check_costs(problem.graph, problem.costs)
    assert problem.name == name
    assert (problem.graph.num_tasks, problem.costs.num_devices) == (num_tasks, num_devices)


def test_what_is_known_of_a_graph_comes_with_it(shared):
    known_s = load_problem("ffnn_192nodes", shared).best_known_s
    assert 0 < known_s <= 56.6963
    assert load_problem("ffnn_192nodes@2", shared).best_known_s is None
    stg = load_problem("stg50/rand0000@2", shared)
    assert 0 < stg.bound_s <= stg.best_known_s


def test_networks_have_memory_limits(shared):
    limits = load_problem("dnn/bert24_inference", shared).costs.capacity_bytes
    assert np.isfinite(limits).any()


@pytest.mark.parametrize(
    "name", ["tiny-3", "islands-2", f"{HELD_OUT[0]}-5", f"{HELD_OUT[1]}-0", "lu-3~20"]
)
def test_random_problems_are_the_same_every_time(name):
    first = load_problem(name)
    load_problem.cache_clear()
    again = load_problem(name)
    np.testing.assert_array_equal(first.costs.compute_s, again.costs.compute_s)
    np.testing.assert_array_equal(first.graph.edge_reader, again.graph.edge_reader)
    dj.costs.check_costs(first.graph, first.costs)


def test_held_out_graphs_are_on_every_kind_of_cluster():
    numbers = range(0, 16, 4)
    devices = [load_problem(f"{HELD_OUT[0]}-{n}").costs.num_devices for n in numbers]
    assert devices == [int(catalogue.held_out_cluster(n)[0]) for n in numbers] == [4, 4, 8, 8]


def test_a_cut_is_of_its_cluster_unless_it_says_how_many_blocks():
    tasks = {
        cut: load_problem(f"chainmm/small:p100x4{cut}").graph.num_tasks
        for cut in ("", ":planner", ":uniform", ":uniform4", ":uniform2")
    }
    assert tasks[""] == tasks[":planner"]
    assert tasks[":uniform"] == tasks[":uniform4"] > tasks[":uniform2"]
    problem = load_problem("chainmm/small:p100x4:uniform")
    assert problem.sharded.graph is problem.graph
    assert problem.cluster.num_devices == 4


def test_a_file_on_a_cluster_is_known_by_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my.txt"
    path.write_text(TEXT)
    assert load_problem("my.txt:p100x4").graph.num_tasks == 3
    before = catalogue.file_digest("my.txt:p100x4")
    assert before == catalogue.file_digest(f"{path}:v100x8")
    path.write_text(TEXT.replace("7,28", "8,28"))
    assert catalogue.file_digest("my.txt:p100x4") != before
    dj.clusters.save_cluster("c.json", dj.make_cluster("p100x4"))
    assert catalogue.file_digest("my.txt:c.json") != catalogue.file_digest("my.txt:p100x4")
    assert catalogue.file_digest("chain_mm_112nodes") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "unknown problem 'none'"),
        ("chainmm:nowhere", "unknown cluster 'nowhere'"),
        ("chain:p100x4", "unknown workload 'chain'"),
        ("chainmm/huge:p100x4", "huge"),
        ("chainmm:p100x4:halves", "unknown cut 'halves'"),
    ],
)
def test_unknown_names_are_refused(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_problem(name)


@pytest.mark.parametrize("line", ["a.stg,2", "a.stg,2,x", "a.stg,2,1,2,3"])
def test_a_line_that_is_no_optimum_is_named(tmp_path, line):
    path = tmp_path / "Case50_2_OPT.csv"
    path.write_text(f"b.stg,2,5\nx/c.stg,2,4,6\n{line}\n")
    with pytest.raises(ValueError, match=r"OPT\.csv: line 3: expected file, devices"):
        catalogue.load_optima(path)
    path.write_text("b.stg,2,5\nx/c.stg,2,4,6\n")
    assert catalogue.load_optima(path) == {"b": (5.0, 5.0), "c": (4.0, 6.0)}


@pytest.mark.parametrize("name", [name for name in SIZED if name != "llama_32"])
def test_sized_problems_have_about_as_many_tasks_as_they_say(name):
    problem = load_problem(name)
    expected = {"1k": 1000, "4k": 4000, "_8": 2000}[name[-2:]]
    assert abs(problem.graph.num_tasks / expected - 1) < 0.05
    assert problem.costs.num_devices == (8 if name.endswith("4k") else 4)


def test_placements_found_here_are_worth_what_is_said(shared):
    kept = json.loads(pathlib.Path(catalogue.BEST_PLACEMENTS).read_text())
    assert set(kept["fifo"]) == set(PUBLISHED)
    assert set(kept["in_order"]) == {*PUBLISHED, "8gpu_transformer_block@8", "llama_8"}
    for queue, plans in kept.items():
        for name, entry in plans.items():
            problem = load_problem(name, shared)
            assert problem.costs.num_devices == entry["num_devices"]
            ranks = {"queue": queue, "priority": entry.get("priority")}
            schedule = dj.simulator.simulate_oracle(
                problem.graph, problem.costs, np.array(entry["placement"]), **ranks
            )
            dj.simulator.validate(problem.graph, schedule, problem.costs, **ranks)
            assert dj.simulator.makespan_s(schedule) == pytest.approx(
                entry["makespan_s"], rel=1e-12
            )
            if queue == "in_order" and name in kept["fifo"]:
                assert entry["makespan_s"] <= kept["fifo"][name]["makespan_s"] * (1 + 1e-12)
