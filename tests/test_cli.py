"""`python -m doppler_jax`: what it prints and writes, and one clear line for bad input."""

import json
import pathlib

import pytest

import doppler_jax as dj
import doppler_jax.__main__ as entry
from doppler_jax.policies.features import FEATURE_VERSION
from tests.commands import (
    TEXT,
    assert_one_error_line,
    assert_refused,
    graph_json,
    run,
    run_python,
    save_tiny_checkpoint,
    set_feature_version,
)


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs `python -m doppler_jax WORDS` in an empty folder; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("g.txt").write_text(TEXT)
    return lambda *words: run(monkeypatch, entry.main, entry.commands(words), *words)


@pytest.fixture
def refuse(command, capsys, tmp_path):
    """Runs a command that must end in one line with the parts, and touch no file."""
    return lambda words, *parts: assert_refused(command, words, parts, capsys, tmp_path)


# What else can be wrong in a file, `graphs/test_formats.py` knows.
BAD_GRAPHS = {
    "a cycle": (
        TEXT.replace("0, 0,\n1, 2,", "0, 1,\n1, 0,"),
        "tasks form a cycle: 0 -> 1 -> 0",
    ),
    "a negative cost in JSON": (graph_json(flops=[1.0, -2.0]), "flops[1] is -2.0"),
    "truncated JSON": (graph_json()[:60], "line 1 column", "not valid JSON"),
    "binary": (b"\x7fELF\x02\x01\x00\xff\xfe", "not a text file"),
}


@pytest.mark.parametrize("name", BAD_GRAPHS)
def test_bad_graph_files_are_refused(refuse, name):
    content, *parts = BAD_GRAPHS[name]
    path = pathlib.Path("bad graph.txt")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refuse(["place", path, "--output", "out.json"], f"error: {path}: ", *parts)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["absent.txt"], ["absent.txt: No such file or directory"]),
        (["."], [".: Is a directory"]),
        (["g.txt", "--cluster", "p1000"], ["unknown cluster 'p1000'; known: h200x8, host"]),
        (["g.txt", "--cluster", "absent.json"], ["absent.json: No such file"]),
        (["g.txt", "--links", "wireless"], ["unknown links 'wireless'; known: parallel"]),
        (["g.txt", "--method", "magic"], ["unknown method 'magic'", "critical_path"]),
        (["g.txt", "--policy", "absent"], ["absent: no checkpoint here"]),
        (["g.txt", "--policy", "g.txt"], ["g.txt: no checkpoint here"]),
        (["g.txt", "--policy", "."], ["no checkpoint here"]),
        (["g.txt", "--method", "single", "--budget-s", "nan"], ["budget_s is nan"]),
        (["g.txt", "--max-evaluations", "0"], ["max_evaluations is 0"]),
        (["g.txt", "--seed", "-1"], ["--seed is -1; expected 0 to 4294967295"]),
        (["g.txt", "--seed", "4294967296"], ["--seed is 4294967296; expected 0 to"]),
        (["g.txt", "--output", "absent/x.json"], ["absent/x.json: there is no folder absent"]),
        (["g.txt", "--output", "."], [".: exists already"]),
        (["g.txt", "--report", "absent/x.html"], ["absent/x.html: there is no folder absent"]),
        (["g.txt", "--gantt", "."], [".: is a folder"]),
        (["g.txt", "--method", "heft", "magic"], ["unknown method 'magic'"]),
        (["g.txt", "--method"], ["--method: expected at least one"]),
    ],
)
def test_bad_options_are_refused(refuse, words, parts):
    refuse(["place", *words], *parts)


# What else can be wrong in a file, `costs/test_clusters.py` knows.
@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "the file is empty"),
        ('{"format": ', "not valid JSON"),
        ("[]", "expected a JSON object, found a list"),
        (graph_json(), "field 'format': expected 'doppler_jax.cluster'"),
    ],
)
def test_bad_clusters_are_refused(refuse, content, part):
    pathlib.Path("c.json").write_text(content)
    refuse(["place", "g.txt", "--cluster", "c.json"], "error: c.json: ", part)


def test_an_existing_output_stays(refuse):
    # Its bytes are compared by the fixture; that it is refused first, by the bad graph.
    output = pathlib.Path("out.json")
    output.write_bytes(b"precious\r\n\xff")
    refuse(["place", "absent.txt", "--output", output], "out.json: exists already")


def test_a_policy_that_cannot_be_used_is_refused(refuse):
    save_tiny_checkpoint(pathlib.Path("run"))
    words = ["place", "g.txt", "--policy", "run"]
    known = "'doppler', 'doppler+search', "
    alone = f"method 'single' takes no policy; only these do: {known}"
    refuse([*words, "--method", "single"], alone)
    set_feature_version(pathlib.Path("run"), 99)
    for path in ("run", "run/checkpoints", "run/checkpoints/0"):
        parts = ("run/checkpoints/0: feature version 99", f"computes {FEATURE_VERSION}")
        refuse(["place", "g.txt", "--policy", path], *parts)
    metadata = pathlib.Path("run/checkpoints/0/meta/metadata")
    metadata.write_text("{}")
    refuse(words, "not a checkpoint of this project")
    metadata.write_text('{"format": ')
    refuse(words, "run/checkpoints/0: not a checkpoint")


def test_place_writes_what_it_found(command, capsys):
    words = ["--method", "random", "--max-evaluations", "30", "--cluster", "p100x4"]
    assert (
        command("place", "g.txt", *words, "--output", "out.json", "--seed", "4294967295") == 0
    )
    out = capsys.readouterr().out
    assert "g.txt: 3 tasks on p100x4" in out
    assert "random" in out
    written = json.loads(pathlib.Path("out.json").read_text())
    graph = dj.load_graph("g.txt")
    costs = dj.make_costs(graph, dj.make_cluster("p100x4"))
    schedule = dj.simulator.simulate_oracle(graph, costs, written["placement"])
    assert written["makespan_s"] == dj.simulator.makespan_s(schedule)
    assert sorted(written["priority"]) == [0, 1, 2]
    assert written["source"] == {"graph": "g.txt", "cluster": "p100x4"}
    placed = dj.load_placed("out.json", graph, costs)
    assert placed.placement.tolist() == written["placement"]


def test_place_keeps_to_pins_and_groups(command, capsys):
    words = ("--method", "heft", "--pin", "0", "2", "--together", "[12]")
    assert command("place", "g.txt", *words) == 0
    placement = capsys.readouterr().out.splitlines()[-2].removeprefix("placement: ").split()
    assert placement[0] == "2"
    assert placement[1] == placement[2]


def test_a_published_graph_is_placed_on_a_preset_cluster(command, capsys, reference_graphs):
    path = reference_graphs / "ffnn_192nodes.txt"
    assert command("place", path, "--cluster", "p100x4", "--method", "heft") == 0
    assert "ffnn_192nodes.txt: 180 tasks on p100x4" in capsys.readouterr().out


def test_place_with_a_policy_and_a_cluster_file(command, capsys):
    save_tiny_checkpoint(pathlib.Path("run"))
    dj.clusters.save_cluster("c.json", dj.Cluster(flops_per_s=[1.0, 1.0], link_bytes_per_s=1.0))
    words = ["--policy", "run", "--max-evaluations", "4", "--cluster", "c.json"]
    words += ["--method", "doppler"]
    assert command("place", "g.txt", *words) == 0
    placement = capsys.readouterr().out.splitlines()[-2].removeprefix("placement: ")
    assert set(map(int, placement.split())) <= {0, 1}


def test_list_names_everything(command, capsys):
    assert command("list") == 0
    out = capsys.readouterr().out
    for name in [
        *dj.list_methods(),
        *dj.clusters.list_clusters(),
        *dj.workloads.list_workloads(),
    ]:
        assert name in out
    assert command("list", "--json") == 0
    names = json.loads(capsys.readouterr().out)
    assert names["methods"] == dj.list_methods()
    assert names["clusters"] == dj.clusters.list_clusters()
    assert names["workloads"] == dj.workloads.list_workloads()


def test_several_methods_stand_in_one_table_and_the_best_is_kept(command, capsys):
    words = ["place", "g.txt", "--cluster", "p100x4", "--method", "single", "heft", "random"]
    pictures = ["--report", "x.html", "--gantt", "x.png", "--output", "best.json"]
    assert command(*words, "--max-evaluations", "5", "--explain", *pictures) == 0
    out = capsys.readouterr().out
    rows = [line.split()[1] for line in out.splitlines() if line.startswith("│")]
    assert rows == ["single", "heft", "random"]
    assert "critical chain: " in out
    assert "<title>g.txt on p100x4</title>" in pathlib.Path("x.html").read_text()
    assert pathlib.Path("x.png").read_bytes()[1:4] == b"PNG"
    assert command(*words, "--max-evaluations", "5", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["graph"], said["cluster"]) == ("g.txt", "p100x4")
    assert [plan["method"] for plan in said["plans"]] == rows
    best = json.loads(pathlib.Path("best.json").read_text())
    assert best["makespan_s"] == min(plan["makespan_s"] for plan in said["plans"])
    assert sorted(said["plans"][0]["priority"]) == [0, 1, 2]


def test_written_plans_are_compared_and_shown(command, capsys, tmp_path):
    for name, *words in [("a.json", "single"), ("b.json", "heft"), ("c.json", "heft", "--pin")]:
        pins = ["0", "1"] if "--pin" in words else []
        assert command("place", "g.txt", "--method", *words, *pins, "--output", name) == 0
    capsys.readouterr()
    assert command("compare", "a.json", "b.json", "--report", "x.html") == 0
    assert "makespan" in capsys.readouterr().out
    assert "<title>a.json and b.json</title>" in pathlib.Path("x.html").read_text()
    assert command("compare", "a.json", "b.json", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    plans = [json.loads(pathlib.Path(name).read_text()) for name in ("a.json", "b.json")]
    for place, plan in zip(("first", "second"), plans, strict=True):
        assert said[place]["makespan_s"] == plan["makespan_s"]
    for plan in ("a.json", "c.json"):
        assert command("report", plan, "y.html") == 0
        assert f"<title>{plan}</title>" in pathlib.Path("y.html").read_text()
    pathlib.Path("g.txt").rename("h.txt")
    assert command("report", "a.json", "z.html", "--graph", "h.txt") == 0
    assert command("report", "a.json", "z.html") == 2
    assert_one_error_line(capsys.readouterr().err.splitlines(True)[-1], "g.txt: No such file")
    plan = plans[0] | {"source": {"graph": "h.txt"}}
    pathlib.Path("d.json").write_text(json.dumps(plan))
    assert_refused(
        command, ["compare", "d.json", "a.json"],
        ["d.json: does not say its cluster; give it by --cluster"], capsys, tmp_path,
    )  # fmt: skip


@pytest.mark.parametrize("words", [["--help"], ["train", "stage2", "--help"]])
def test_help_comes_from_every_depth(command, capsys, words):
    assert command(*words) == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [[], ["play"], ["place"], ["place", "g.txt", "--color", "red"],
              ["place", "g.txt", "--seed", "many"]],
)  # fmt: skip
def test_wrong_usage_ends_with_2(command, capsys, words):
    assert command(*words) == 2
    error = capsys.readouterr()
    assert "Traceback" not in error.err + error.out


def test_errors_become_one_line(monkeypatch, capsys):
    def main(error):
        def raise_it(_):
            raise error

        return raise_it

    assert run(monkeypatch, main(ValueError("one\n  two")), entry.List) == 2
    assert capsys.readouterr().err == "error: one two\n"
    denied = PermissionError(13, "Permission denied", "a")
    assert run(monkeypatch, main(denied), entry.List) == 2
    assert_one_error_line(capsys.readouterr().err, "Permission denied: 'a'")
    assert run(monkeypatch, main(KeyboardInterrupt()), entry.List) == 130
    assert capsys.readouterr().err == "stopped\n"
    with pytest.raises(ZeroDivisionError):  # a fault of ours keeps its traceback
        run(monkeypatch, main(ZeroDivisionError()), entry.List)


def test_as_a_process(tmp_path):
    (tmp_path / "g.txt").write_text(TEXT)
    (tmp_path / "bad.txt").write_text(TEXT[:9])

    def start(path, method="single"):
        words = ("-m", "doppler_jax", "place", path, "--method", method)
        return run_python(*words, cwd=tmp_path)

    done = start("g.txt")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2:] == ["placement: 0 0 0", "order: 0 1 2"]
    refused = start("bad.txt")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert_one_error_line(refused.stderr, "bad.txt: ")
    own = "import atexit\natexit.register(print, 'over')\ndef alone(request): return [0] * 3"
    (tmp_path / "mine.py").write_text(own)
    done = start("g.txt", "mine:alone")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "over")
