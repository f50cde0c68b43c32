"""What users are promised is there, under those names and with those arguments."""

import doctest
import inspect
import io

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

import doppler_jax as dj
from tests.commands import ROOT, run_python

NO_DEFAULT = inspect.Parameter.empty


def test_every_public_name_exists_once():
    assert len(set(dj.__all__)) == len(dj.__all__) <= 30
    assert {*dj.__all__, *dj.MODULES} < set(dir(dj))
    homes = [dj, *(getattr(dj, module) for module in dj.MODULES)]
    for home in homes:
        assert home.__all__
        for name in home.__all__:
            assert getattr(home, name) is not None, f"{home.__name__}.{name}"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("no_such_name", r"$"),
        ("load_polcy", "; the nearest: dj.load_policy"),
        ("save_graph", r"; the nearest: dj.graphs.save_graph$"),
        ("measure_s", r"; the nearest: dj.engine.measure_s$"),
    ],
)
def test_an_unknown_name_is_answered_with_where_it_is(name, hint):
    with pytest.raises(AttributeError, match=f"'doppler_jax' has no attribute '{name}'{hint}"):
        getattr(dj, name)


@pytest.mark.parametrize("name", [name for name in dj.__all__ if name != "ray_devices"])
def test_public_names_are_described_and_their_examples_run(name, tmp_path, monkeypatch):
    thing = getattr(dj, name)
    text = inspect.getdoc(thing)
    assert text
    if inspect.isclass(thing):
        return
    assert "Example:" in text
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("doppler_jax.methods.registry.OWN", {})
    given = {"dj": dj, "jax": jax, "jnp": jnp, "np": np, "nx": nx}
    example = doctest.DocTestParser().get_doctest(text, given, name, None, 0)
    assert example.examples
    said = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    assert not runner.run(example, out=said.write).failed, said.getvalue()


@pytest.mark.slow
def test_the_example_of_ray_devices_runs():
    pytest.importorskip("ray")
    run = "doctest.run_docstring_examples(dj.ray_devices, {'dj': dj, 'jnp': jax.numpy})"
    done = run_python("-c", f"import doctest, jax; import doppler_jax as dj; {run}")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# Positional arguments, then those given by name with their defaults.
SURFACE = [
    (dj.trace, ["fn"], {}),
    (dj.partition, ["program"], {"num_shards": 4}),
    (dj.load_graph, ["path"], {}),
    (dj.graphs.save_graph, ["path", "graph"], {}),
    (dj.from_networkx, ["nx_graph"], {}),
    (dj.make_cluster, ["name"], {}),
    (dj.load_cluster, ["path"], {}),
    (dj.make_costs, ["graph", "cluster"], {}),
    (dj.reference_costs, ["graph"], {"num_devices": 4}),
    (dj.pin, ["graph", "costs", "pins"], {}),
    (dj.from_edge_delays, ["weights", "edges"], {"num_devices": 4}),
    (dj.simulate, ["graph", "costs", "placements"], {}),
    (dj.load_policy, ["path"], {}),
    (dj.policies.save_policy, ["path", "policy"], {"meta": None}),
    (
        dj.place,
        ["graph", "costs"],
        {"method": "doppler+search", "objective": dj.Objective()}
        | dict.fromkeys(("policy", "key", "cache", "pin"))
        | {"together": ()},
    ),
    (dj.list_methods, [], {}),
    (dj.compile, ["sharded", "plan"], {"devices": NO_DEFAULT, "mode": None}),
]


@pytest.mark.parametrize(
    ("function", "positional", "named"), SURFACE, ids=[entry[0].__name__ for entry in SURFACE]
)
def test_signatures_are_as_promised(function, positional, named):
    parameters = inspect.signature(function).parameters
    assert list(parameters)[: len(positional)] == positional
    for name in positional:
        assert parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY
    for name, default in named.items():
        assert parameters[name].default == default, name
    # Whatever else there is may be left out.
    for name in set(parameters) - {*positional, *named}:
        kind = parameters[name].kind
        optional = kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        assert optional or parameters[name].default is not NO_DEFAULT, name
    assert inspect.getdoc(function)


def test_results_have_the_promised_fields():
    graph, costs = dj.from_edge_delays([1.0, 2.0], [(0, 1, 1.0)], num_devices=2)
    placed = dj.place(graph, costs, method="critical_path")
    assert placed.placement.shape == placed.priority.shape == (2,)
    assert (placed.makespan_s, placed.method) == (3.0, "critical_path")
    result = dj.simulate(graph, costs, [[0, 0], [0, 1]])
    assert result.makespan_s.tolist() == [3.0, 4.0]
    assert result.start_s.tolist() == [[0.0, 1.0], [0.0, 2.0]]
    assert result.finish_s.tolist() == [[1.0, 3.0], [1.0, 4.0]]
    cluster = dj.make_cluster("p100x4")
    assert isinstance(cluster, dj.Cluster)
    promised = {"critical_path", "doppler", "random", "round_robin", "single"}
    assert set(dj.list_methods()) >= promised


def test_what_there_is_prints_within_a_screen():
    program = dj.partition(dj.trace(jax.numpy.dot, np.ones((4, 4)), np.ones((4, 4))), 4)
    costs = dj.make_costs(program, dj.make_cluster("p100x4"))
    placed = dj.place(program.graph, costs, method="heft")
    for thing in (program, program.graph, costs, placed, placed.schedule):
        assert repr(thing).startswith(type(thing).__name__)
        assert len(repr(thing).splitlines()) <= 12
        assert max(map(len, repr(thing).splitlines())) <= 130
    assert "2 arguments, 1 outputs" in repr(program)


CHECK = """
import sys
import doppler_jax as dj
slow = ("jax", "chex", "flax", "networkx", "matplotlib", "tyro", "rich", "bokeh", "experiments")
print([name for name in slow if name in sys.modules])
print("doppler_jax.engine" in sys.modules, "compile" in dir(dj))
dj.compile
print("doppler_jax.engine" in sys.modules)
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
dj.make_cluster("p100x4")
graph, costs = dj.from_edge_delays([3.0, 3.0, 2.0, 2.0, 2.0], [], num_devices=2)
print(dj.place(graph, costs, method="annealing", max_evaluations=1000, key=3).makespan_s)
print(xla_bridge.backends_are_initialized())
import jax
jax.devices()
print(xla_bridge.backends_are_initialized())
"""


def test_importing_and_searching_start_no_backend_and_load_nothing_slow():
    done = run_python("-W", "error", "-c", CHECK)
    assert done.stderr == ""
    said = ["[]", "False True", "True", "False", "6.0", "False", "True"]
    assert done.stdout.splitlines() == said


PLACE = """
import pathlib, sys
from doppler_jax.__main__ import Place, place
from doppler_jax.graphs.build import make_graph
from doppler_jax.graphs.formats import save_graph
graph = make_graph(flops=[1e9] * 6)
save_graph(sys.argv[1], graph)
place(Place(graph=pathlib.Path(sys.argv[1]), budget_s=1.0, json=True))
print("jax" in sys.modules)
import doppler_jax as dj
dj.place
import jax
print(len(jax.tree.leaves(graph)))
"""


def test_the_command_line_places_without_jax_and_its_data_are_pytrees_later(tmp_path):
    done = run_python("-W", "error", "-c", PLACE, str(tmp_path / "graph.json"))
    assert done.stdout.splitlines()[1:] == ["False", "11"], done.stderr
