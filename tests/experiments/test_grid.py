"""The runner of all studies: what is kept, what is found again, what a page says."""

import dataclasses
import json
import signal
import sys
import textwrap

import jax
import numpy as np
import pytest

import doppler_jax as dj
from experiments import grid, methods
from experiments.catalogue import Problem, load_problem
from experiments.grid import Cell, Page, Records, Settings, Study, compute
from experiments.methods import MethodSettings, Spend
from experiments.tables import means_table, star_least, table
from tests.commands import assert_one_error_line, run_python

DEVICES = 4  # of tests/conftest.py


@pytest.fixture(autouse=True)
def _counting_is_listed(monkeypatch):
    monkeypatch.setitem(grid.STUDIES, "counting", "how often")


def cell(calls, **key):
    """A cell that counts its calls."""

    def make():
        calls.append(key)
        return {"makespan_s": float(len(calls))}

    return Cell(key, make)


def study(cells, **settings):
    """A study of these cells, whose page lists their makespans."""
    return Study(
        "counting",
        Settings(host_devices=DEVICES, **settings),
        lambda context: cells,
        lambda context, found: Page({"": str([r["makespan_s"] for r in found])}),
        {"only_tables": True},
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_cell_is_made_once_and_found_by_all_of_its_key(tmp_path):
    calls = []
    path = tmp_path / "records.jsonl"
    for _ in range(2):
        with Records(path) as book:
            compute(
                "x", book, [cell(calls, problem="a", seed=0), cell(calls, problem="a", seed=1)]
            )
            assert book.find({"seed": 1, "problem": "a"})["makespan_s"] == 2.0
            assert book.find({"problem": "a", "seed": 2}) is None
            assert book.find({"problem": "a"}) is None
    assert len(calls) == len(lines(path)) == 2
    assert set(lines(path)[0]["made"]) == {"commit", "date", "machine"}


def test_again_appends_and_the_newest_counts(tmp_path):
    calls = []
    with Records(tmp_path / "r.jsonl") as book:
        for again in (False, True):
            compute("x", book, [cell(calls, seed=0)], again=again)
    with Records(tmp_path / "r.jsonl") as book:
        assert book.find({"seed": 0})["makespan_s"] == 2.0
    assert len(lines(tmp_path / "r.jsonl")) == 2


def test_what_refused_is_asked_again(tmp_path):
    answers = [{"refused": "no"}, {"makespan_s": 1.0}]
    one = Cell({"seed": 0}, lambda: answers.pop(0))
    with Records(tmp_path / "r.jsonl") as book:
        compute("x", book, [one])
        assert book.find(one.key)["refused"] == "no"
        compute("x", book, [one])
        assert book.find(one.key)["makespan_s"] == 1.0


def test_two_cells_of_one_key_are_refused_before_any_work(tmp_path):
    calls = []
    with Records(tmp_path / "r.jsonl") as book, pytest.raises(ValueError, match='"seed": 0'):
        compute("x", book, [cell(calls, seed=0), cell(calls, seed=0)])
    assert not calls


@pytest.mark.parametrize("torn", [b'{"cell": {"seed"', b'{"cell": {"seed": 7}, "result": {}}'])
def test_a_torn_last_line_is_dropped_and_its_cell_made_again(tmp_path, torn):
    calls, path = [], tmp_path / "r.jsonl"
    with Records(path) as book:
        compute("x", book, [cell(calls, seed=0)])
    path.write_bytes(path.read_bytes() + torn)
    with Records(path) as book:
        assert book.find({"seed": 7}) is None
        compute("x", book, [cell(calls, seed=0), cell(calls, seed=7)])
    assert [line["cell"]["seed"] for line in lines(path)] == [0, 7]
    assert len(calls) == 2


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"cell": {}, "result": {}, "made": {}}\n{"cell"\n{}\n')
    with pytest.raises(ValueError, match=r"r\.jsonl: line 2 is no record"), Records(path):
        pass


def test_two_runs_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "r.jsonl"
    with Records(path), pytest.raises(ValueError, match="another run"), Records(path):
        pass
    with Records(path):
        pass


def test_a_kill_at_any_moment_loses_only_the_cell_at_work(tmp_path):
    script = textwrap.dedent(
        """
        import os, pathlib, signal, sys
        from experiments.grid import Cell, Records, compute

        def make(seed):
            with open("calls", "a") as calls:
                print(seed, file=calls)
            if seed == 2 and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return {"makespan_s": seed}

        cells = [Cell({"seed": s}, lambda s=s: make(s)) for s in range(4)]
        with Records(pathlib.Path("r.jsonl")) as book:
            compute("x", book, cells)
        """
    )
    codes = [run_python("-c", script, cwd=tmp_path).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, 0]
    assert (tmp_path / "calls").read_text().split() == ["0", "1", "2", "2", "3"]
    assert [line["cell"]["seed"] for line in lines(tmp_path / "r.jsonl")] == [0, 1, 2, 3]


def test_a_page_has_one_line_of_provenance_and_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["counting.py", "--runs", "my runs"])
    calls = []
    some = study([cell(calls, seed=0), cell(calls, seed=1)], runs=tmp_path)
    some.run(some.settings)
    page = (tmp_path / "counting" / "counting.md").read_text()
    assert page == capsys.readouterr().out.removesuffix("\n")
    title, _, provenance, _, text, *rest = page.splitlines()
    assert (title, text) == ("# counting: how often", "[1.0, 2.0]")
    assert not rest
    command, commit, date, machine = provenance.split("; ")
    assert command == "`python -m experiments.counting --runs 'my runs'`"
    made = lines(tmp_path / "counting" / "records.jsonl")[0]["made"]
    assert commit == f"commit {made['commit']}"
    assert (date, machine) == (made["date"], made["machine"] + ".")
    more = study([cell(calls, seed=s) for s in range(3)], runs=tmp_path, only_tables=True)
    more.run(more.settings)
    assert "Not run: 1 of 3 cells." in (tmp_path / "counting" / "counting.md").read_text()
    assert len(calls) == 2


def test_publish_copies_page_and_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "PAGES", tmp_path / "docs")
    some = study([cell([], seed=0)], runs=tmp_path / "runs", publish=True)
    picture = {"bars.png": lambda path: path.write_bytes(b"picture")}
    some = dataclasses.replace(some, report=lambda context, found: Page({"": "text"}, picture))
    some.run(some.settings)
    assert (tmp_path / "docs" / "bars.png").read_bytes() == b"picture"
    assert "![bars.png](bars.png)" in (tmp_path / "docs" / "counting.md").read_text()


def test_ctrl_c_keeps_what_is_there_and_writes_its_page(tmp_path, monkeypatch, capsys):
    def stop():
        raise KeyboardInterrupt

    some = study([cell([], seed=0), Cell({"seed": 1}, stop)], runs=tmp_path)
    monkeypatch.setattr(sys, "argv", ["counting"])
    with pytest.raises(SystemExit) as ended:
        some.command()
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "stopped"
    assert "Not run: 1 of 2" in (tmp_path / "counting" / "counting.md").read_text()


def test_quick_replaces_settings(tmp_path):
    asked = []
    some = dataclasses.replace(
        study([], runs=tmp_path),
        settings=MethodSettings(host_devices=DEVICES, runs=tmp_path, quick=True, seeds=9),
        quick={"seeds": 2},
        cells=lambda context: asked.append(context.settings.seeds) or [],
    )
    some.run(some.settings)
    assert asked == [2]


@pytest.mark.parametrize(("option", "value"), [("seeds", 0), ("evaluations", (5, -1))])
def test_counts_below_one_are_refused(option, value):
    with pytest.raises(ValueError, match=f"--{option} is {min(np.ravel(value))}"):
        grid.check(MethodSettings(**{option: value}))


def test_budgets_have_names_and_keys():
    settings = MethodSettings(evaluations=(2000, 10), seconds=(5,))
    names = ["10 evaluations", "2,000 evaluations", "5 s"]
    assert list(map(str, settings.spends())) == names
    assert settings.spends()[0].key == {"evaluations": 10}
    assert settings.spends()[-1].key == {"seconds": 5}
    assert MethodSettings().spends() == [Spend()]


def test_a_table_has_means_deviations_and_the_least():
    records = [
        {
            "problem": "p",
            "method": m,
            "seed": s,
            "budget": "10 evaluations",
            "makespan_s": value,
        }
        for m, values in {"a": (1.0, 3.0), "b": (2.0, 2.0), "c": (5.0, 6.0)}.items()
        for s, value in enumerate(values)
    ]
    records += [{"problem": "q", "method": "b", "seed": 0, "refused": "no"}]
    records += [{"problem": "q", "method": "a", "seed": 0, "makespan_s": 7.0}]
    text = means_table(
        records, ("problem", "budget"), extra={"runs": lambda row: str(len(row))}
    )
    assert text.splitlines()[0] == "| problem | budget | a | b | c | runs |"
    assert text.splitlines()[2:] == [
        "| p | 10 evaluations | 2.000 ± 1.000* | 2.000* | 5.500 ± 0.500 | 6 |",
        "| q |  | 7.000* | - | - | 2 |",
    ]


def test_the_least_counts_up_to_what_simulators_agree_to():
    assert star_least(["a", "b", "c"], [1.0, 1.0 + 5e-6, np.nan]) == ["a*", "b*", "c"]
    assert star_least(["a"], [np.nan]) == ["a"]


def test_a_cold_call_compiles_what_was_compiled_before():
    traces = []

    @jax.jit
    def double(x):
        traces.append(x)
        return x + x

    double(1.0)
    double(1.0)
    with methods.cold():
        double(1.0)
        assert not jax.config.jax_enable_compilation_cache
    double(1.0)
    assert len(traces) == 2


def test_a_search_that_was_stopped_is_no_result(monkeypatch):
    problem = dj.from_edge_delays([1.0, 2.0, 3.0], [(0, 1, 1.0)], num_devices=2)
    placed = dj.place(*problem, method="heft")
    stopped = dataclasses.replace(placed, interrupted=True)
    monkeypatch.setattr(dj, "place", lambda *p, **o: stopped)
    with pytest.raises(KeyboardInterrupt):
        methods.place_cell(Problem("p", *problem), "annealing", Spend(evaluations=5), 0)


def test_a_method_that_refuses_is_no_run():
    problem = dj.from_edge_delays([1.0] * 30, [], num_devices=4)
    refused = methods.place_cell(Problem("p", *problem), "brute_force", Spend(10), 0)
    assert set(refused) == {"budget", "refused"}


OWN = """
import numpy as np

def alternate(request):
    assert request.budget.evaluations == 7
    return np.arange(request.graph.num_tasks) % request.costs.num_devices
"""


def test_a_method_of_a_users_own_from_outside_the_repository(tmp_path, monkeypatch, capsys):
    from experiments.search import STUDY

    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    words = ("--problems", "tiny-1", "--links", "parallel", "--evaluations", 7, "--seconds")
    words += ("--seeds", 1, "--host-devices", DEVICES, "--method", "mine:alternate")

    def command(*more):
        monkeypatch.setattr(sys, "argv", ["search.py", *map(str, (*words, *more))])
        try:
            STUDY.command()
        except SystemExit as stop:
            return stop.code
        return 0

    assert command() == 0
    graph, costs = load_problem("tiny-1").graph, load_problem("tiny-1").costs
    placement = np.arange(graph.num_tasks) % costs.num_devices
    makespan_s = dj.simulator.makespan_s(dj.simulator.simulate_oracle(graph, costs, placement))
    record = lines(tmp_path / "runs" / "search" / "records.jsonl")[-1]
    assert record["result"]["makespan_s"] == makespan_s
    assert record["cell"]["method"] == "mine:alternate"
    # Another version of the module is another method.
    (tmp_path / "mine.py").write_text(OWN.replace("% request", "* 0 % request"))
    del sys.modules["mine"]
    assert command() == 0
    again = lines(tmp_path / "runs" / "search" / "records.jsonl")[-1]
    assert again["result"]["placement"] == [0] * graph.num_tasks
    capsys.readouterr()
    assert command("mine:absent") == 2
    assert_one_error_line(capsys.readouterr().err, "'mine:absent' cannot be imported")
    assert command("nothing") == 2
    assert_one_error_line(capsys.readouterr().err, "--method: unknown 'nothing'", "annealing")


def test_provenance_without_git(monkeypatch):
    found = grid.provenance()
    assert jax.__version__ in found["machine"]
    assert found["commit"] != "unknown"
    grid._commit.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert grid.provenance() == {**found, "commit": "unknown"}
    grid._commit.cache_clear()


def test_a_studys_own_settings_are_keys_but_those_that_do_not_matter(tmp_path):
    context = grid.Context(MethodSettings(seeds=3, runs=tmp_path), tmp_path, None)
    assert context.key("problems", "method", "links") == {
        "queue": "fifo", "evaluations": (), "seconds": (), "seeds": 3,
    }  # fmt: skip


def test_a_tables_values_have_their_units():
    rows = [{"what": "a", "spent_s": 0.5, "tasks": 1000, "ratio": 1.0}]
    rows += [{"what": "b", "spent_s": None, "tasks": 7, "ratio": None}]
    assert table(rows).splitlines()[2:] == [
        "| a | 500 ms | 1,000 | 1.000 |",
        "| b | - | 7 | - |",
    ]
    assert table(rows).splitlines()[0] == "| what | spent | tasks | ratio |"
