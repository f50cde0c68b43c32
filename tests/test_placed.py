"""Placements in files: what is read back, what is refused, and `place(cache=...)`.

A request is searched for once, and what is kept is not trusted.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from doppler_jax.costs.digests import problem_digest, tree_digest
from doppler_jax.methods import METHODS
from doppler_jax.methods.request import Candidates
from doppler_jax.objective import Objective
from doppler_jax.placed import load_placed
from doppler_jax.placing import place
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.types import Policy
from tests.generators import random_problem

DEVICES = 3


@pytest.fixture
def problem():
    return random_problem(np.random.default_rng(0), 12, DEVICES)


@pytest.fixture
def searches(monkeypatch):
    """The requests that were searched for: each finds another single device."""
    requests = []

    def search(request):
        requests.append(request)
        n, d = request.costs.compute_s.shape
        request.curve.add(5, 0.1, 1e9)
        found = np.full((1, n), len(requests) % d)
        return Candidates(found, 7)

    for name in ("random", "annealing"):
        monkeypatch.setitem(METHODS, name, search)
    return requests


def assert_same(found, expected):
    for field in dataclasses.fields(expected):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        jax.tree.map(np.testing.assert_array_equal, vars_of(a), vars_of(b))


def vars_of(value):
    """A tree of a field: dataclasses as dictionaries."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


@pytest.mark.parametrize(
    ("method", "objective"),
    [("heft", Objective("serial")), ("exact", Objective()), ("etf", Objective(num_noise=2))],
)
def test_what_is_saved_is_loaded(tmp_path, method, objective):
    problem = random_problem(np.random.default_rng(3), 8, 2, homes=False)
    placed = place(*problem, method=method, objective=objective)
    placed.save(tmp_path / "a.json", {"graph": "three"})
    assert_same(load_placed(tmp_path / "a.json", *problem), placed)
    assert json.loads((tmp_path / "a.json").read_text())["source"] == {"graph": "three"}


def edited(edit):
    def write(path):
        data = json.loads(path.read_text())
        edit(data)
        path.write_text(json.dumps(data))

    return write


def entry(name, key, value):
    return edited(lambda data: data[name].__setitem__(key, value))


def field(name, value):
    return edited(lambda data: data.__setitem__(name, value))


DAMAGED = [
    (entry("placement", 0, DEVICES), "placement puts task 0 on device 3"),
    (entry("placement", 0, -1), "placement puts task 0 on device -1"),
    (entry("placement", 0, 2), "the oracle"),  # legal, worth another
    (edited(lambda data: data["placement"].pop()), r"placement has shape \(\d+,\), expected"),
    (field("makespan_s", 1e-3), "makespan_s is 0.001; the oracle"),
    (field("evaluations", None), "a field is not what it"),
    (entry("priority", 0, 1), "expected the priorities of"),
    (field("version", 2), "field 'version': expected 1, found 2"),
    (edited(lambda data: data.pop("queue")), "field 'queue' is missing"),
    (edited(lambda data: data.pop("curve")), "field 'curve' is missing"),
    (edited(lambda data: data["curve"].pop()), "curve has shape"),
    (entry("objective", "links", "air"), "unknown links 'air'"),
    (entry("objective", "noise", 1), "a field is not what it"),
    (lambda path: path.write_text(path.read_text()[:40]), "not valid JSON"),
    (lambda path: path.write_bytes(b"\xff\x00"), "not a text file"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_files_that_hold_no_placement_are_refused(problem, searches, tmp_path, damage, message):
    path = tmp_path / "a.json"
    place(*problem, method="random").save(path)
    damage(path)
    with pytest.raises(ValueError, match=f"a.json: .*{message}"):
        load_placed(path, *problem)


def test_a_placement_of_another_problem_is_refused(problem, tmp_path):
    graph, costs = problem
    place(graph, costs, method="heft").save(tmp_path / "a.json")
    for other in (changed(costs, "compute_s"), changed(costs, "latency_s")):
        with pytest.raises(ValueError, match="a placement of another graph, or of other costs"):
            load_placed(tmp_path / "a.json", graph, other)


def test_a_request_is_searched_for_once(problem, searches, tmp_path):
    cache = tmp_path / "new" / "folder"
    first = place(*problem, method="random", cache=cache)
    again = place(*problem, method="random", cache=str(cache))
    assert len(searches) == 1
    assert_same(again, first)
    assert again.evaluations == 7
    assert again.curve.evaluations.tolist() == [5, 7]
    place(*problem, method="random")  # without a cache
    assert len(searches) == 2
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def changed(costs, name):
    values = np.array(getattr(costs, name))
    values.flat[1] *= 1 + 1e-12
    return costs.replace(**{name: values})


@pytest.mark.parametrize(
    "options",
    [
        {"method": "annealing"},
        {"key": jax.random.key(1)},
        {"budget_s": 2.0},
        {"max_evaluations": 2},
        {"objective": Objective("serial")},
        {"objective": Objective(num_noise=2)},
        {"objective": Objective(num_noise=1, noise_sigma=0.2)},
        {"objective": Objective(num_noise=1, quantile=0.5)},
    ],
)
def test_whatever_decides_the_result_makes_another_request(
    problem, searches, tmp_path, options
):
    for others in ({}, {"objective": Objective(num_noise=1)}, options):
        place(*problem, **({"method": "random"} | others), cache=tmp_path)
    assert len(searches) == 3


@pytest.mark.parametrize("name", ["compute_s", "tensor_bytes", "latency_s"])
def test_the_slightest_change_of_a_cost_makes_another_request(
    problem, searches, tmp_path, name
):
    graph, costs = problem
    place(graph, costs, method="random", cache=tmp_path)
    place(graph, changed(costs, name), method="random", cache=tmp_path)
    assert len(searches) == 2


@pytest.mark.parametrize("given", [True, False])
def test_policies_are_told_apart_by_their_parameters(problem, searches, tmp_path, given):
    # A method's own policy counts as one that is given does.
    @dataclasses.dataclass(frozen=True)
    class Toy:
        takes: str = "doppler"

        def default_policy(self):
            return policy

        def __call__(self, request):
            return METHODS["random"](request)

    for scale in (1.0, 1.0, 2.0):
        policy = Policy(params={"w": np.full(2, scale, np.float32)}, config=PolicyConfig())
        options = {"policy": policy} if given else {}
        place(*problem, method=Toy(), **options, cache=tmp_path)
    assert len(searches) == 2


def test_unknown_methods_and_interrupted_searches_are_not_kept(problem, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="a cache needs a method whose settings"):
        place(*problem, method=lambda request: None, cache=tmp_path)

    def search(request):
        found = np.zeros((1, request.graph.num_tasks), np.int64)
        return Candidates(found, 7, interrupted=True)

    monkeypatch.setitem(METHODS, "random", search)
    assert place(*problem, method="random", cache=tmp_path).interrupted
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [d for d, _ in DAMAGED] + [field("objective_s", 1e-3)])
def test_what_the_oracle_does_not_confirm_is_searched_for_again(
    problem, searches, tmp_path, damage
):
    first = place(*problem, method="random", cache=tmp_path)
    (path,) = tmp_path.iterdir()
    damage(path)
    again = place(*problem, method="random", cache=tmp_path)
    assert len(searches) == 2
    assert again.placement[0] != first.placement[0]
    assert_same(place(*problem, method="random", cache=tmp_path), again)
    assert len(searches) == 2


def test_a_device_that_cannot_run_a_task_is_not_recalled(problem, searches, tmp_path):
    graph, costs = problem
    place(graph, costs, method="random", cache=tmp_path)
    (path,) = tmp_path.iterdir()
    compute_s = costs.compute_s.copy()
    compute_s[3, 1] = np.inf  # where the first search puts everything
    unable = costs.replace(compute_s=compute_s)
    other = place(graph, unable, method="random", cache=tmp_path / "other")
    (other_path,) = (tmp_path / "other").iterdir()
    other_path.write_text(path.read_text())
    again = place(graph, unable, method="random", cache=tmp_path / "other")
    assert (other.placement != 1).all()
    assert (again.placement != 1).all()
    assert len(searches) == 3


def test_priorities_replay_what_was_kept(tmp_path):
    graph, costs = random_problem(np.random.default_rng(3), 8, 2, homes=False)
    first = place(graph, costs, method="exact", budget_s=30.0, cache=tmp_path)
    assert first.queue == "priority"
    assert_same(place(graph, costs, method="exact", budget_s=30.0, cache=tmp_path), first)


def test_digests_mind_values_shapes_and_names_but_not_widths(problem):
    graph, costs = problem
    digest = problem_digest(graph, costs)
    narrow = graph.replace(edge_tensor=np.asarray(graph.edge_tensor, np.int32))
    assert problem_digest(narrow, costs) == digest
    assert problem_digest(graph, changed(costs, "compute_s")) != digest
    ones = np.ones(4)
    trees = [{"a": ones}, {"b": ones}, {"a": ones.reshape(2, 2)}, {"a": ones.astype(int)}]
    assert len({tree_digest(tree) for tree in trees}) == 4
