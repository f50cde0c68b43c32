"""`place`: what is minimised, reported and refused; placements in files, and `cache=`.

A request is searched for once, and what is kept is not trusted.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.baselines.critical_path import critical_path_schedule
from doppler_jax.baselines.etf import etf_schedule
from doppler_jax.baselines.heft import heft_schedule
from doppler_jax.costs.digests import problem_digest, tree_digest
from doppler_jax.methods import METHODS, Candidates, doppler, searched
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig, init_params
from doppler_jax.search.walks import Annealing
from doppler_jax.types import Policy
from tests.generators import random_problem
from tests.methods.cases import BOUND, SMALL, make, tight
from tests.simulator.cases import small_problem


@pytest.mark.parametrize(
    "objective",
    [dj.Objective("serial"), dj.Objective(num_noise=3, noise_sigma=0.5, quantile=0.9)],
)
def test_objectives_are_what_is_minimised_and_reported(objective):
    graph, costs = make("unequal")
    listed = dj.place(graph, costs, method="critical_path", objective=objective)
    placed = dj.place(
        graph, costs, method="random", max_evaluations=100 * BOUND, objective=objective
    )
    assert 95 * BOUND < placed.evaluations <= 100 * BOUND
    assert placed.objective_s < listed.objective_s
    links = objective.links
    schedule = dj.simulator.simulate_oracle(graph, costs, placed.placement, links=links)
    assert placed.makespan_s == dj.simulator.makespan_s(schedule)
    assert (placed.objective_s == placed.makespan_s) == (not objective.num_noise)
    replayed = dj.simulator.simulate_oracle(
        graph, costs, placed.placement, links=links, queue="priority", priority=placed.priority
    )
    np.testing.assert_array_equal(replayed.start_s, schedule.start_s)


@pytest.mark.parametrize("links", ["parallel", "serial", "duplex"])
@pytest.mark.parametrize("method", ["heft", "annealing", "lns"])
def test_devices_keep_to_the_order_of_a_plan(method, links):
    gains = []
    for seed in range(3):
        graph, costs = random_problem(np.random.default_rng(seed), 30, 3)
        options = {"method": method, "objective": dj.Objective(links), "max_evaluations": 4000}
        fifo = dj.place(graph, costs, queue="fifo", **options)
        plan = dj.place(graph, costs, **options)
        assert (fifo.queue, plan.queue) == ("fifo", "in_order")
        schedule = dj.simulator.simulate_oracle(
            graph, costs, plan.placement, links=links, queue="in_order", priority=plan.priority
        )
        np.testing.assert_array_equal(schedule.start_s, plan.schedule.start_s)
        assert plan.makespan_s == plan.objective_s == dj.simulator.makespan_s(schedule)
        by_fifo = dj.simulator.simulate_oracle(graph, costs, plan.placement, links=links)
        gains.append(dj.simulator.makespan_s(by_fifo) - plan.makespan_s)
    assert method == "heft" or sum(gains) > 0  # searches look for orders, too


@pytest.mark.parametrize(
    ("method", "schedule"),
    [("heft", heft_schedule), ("critical_path", critical_path_schedule), ("etf", etf_schedule)],
)
def test_list_schedulers_keep_their_own_order(method, schedule):
    differs = 0
    for seed in range(5):
        graph, costs = random_problem(np.random.default_rng(seed), 30, 3)
        planned = schedule(graph, costs)
        plan = dj.place(graph, costs, method=method)
        np.testing.assert_array_equal(plan.schedule.start_s, planned.start_s)
        fifo = dj.place(graph, costs, method=method, queue="fifo")
        assert (fifo.queue, plan.queue) == ("fifo", "in_order")
        np.testing.assert_array_equal(fifo.placement, plan.placement)
        differs += fifo.makespan_s != plan.makespan_s
    assert differs


def test_an_optimum_that_no_queue_executes_is_a_plan():
    # Device 0 waits from 1 to 2 for the urgent task 2: any queue begins the long task 1 at 1.
    graph, costs = small_problem([1, 5, 1, 9], [(0, 0, [2]), (2, 0, [3])], 2, [(1, 2, [2])])
    compute_s = np.where([[1, 0], [1, 0], [1, 0], [0, 1]], costs.compute_s, np.inf)
    costs = costs.replace(compute_s=compute_s)
    plan = dj.place(graph, costs, method="exact", budget_s=20)
    assert plan.makespan_s == plan.lower_bound_s == 12
    assert plan.queue == "in_order"
    assert plan.proven
    assert "12, optimal (queue 'in_order')" in repr(plan)
    fifo = dj.place(graph, costs, method="exact", budget_s=20, queue="fifo")
    assert (fifo.makespan_s, fifo.lower_bound_s, fifo.proven) == (16, 12, False)
    assert "16, at least 12 (queue 'fifo')" in repr(fifo)


@pytest.mark.slow
def test_under_noise_a_plan_is_for_the_queue_that_is_better():
    queues = set()
    for seed in range(8):
        graph, costs = random_problem(np.random.default_rng(seed), 20, 3)
        objective = dj.Objective(num_noise=8, noise_sigma=0.5)
        plan = dj.place(
            graph, costs, method="lns", max_evaluations=800, objective=objective,
            key=seed,
        )  # fmt: skip
        queues.add(plan.queue)
        noise_key, _ = jax.random.split(jax.random.key(seed))
        factors = dj.simulator.draw_factors(noise_key, graph, 3, 8, 0.5, 0.5)
        options = {"factors": factors, "priority": plan.priority}
        values_s = {
            queue: dj.simulate(graph, costs, plan.placement, queue=queue, **options).makespan_s
            for queue in ("in_order", "priority")
        }
        values_s = {queue: draws_s.mean() for queue, draws_s in values_s.items()}
        np.testing.assert_allclose(plan.objective_s, min(values_s.values()), rtol=1e-12)
        np.testing.assert_allclose(plan.objective_s, values_s[plan.queue], rtol=1e-12)
    assert queues == {"in_order", "priority"}


def test_what_is_returned_fits_into_memory():
    graph, costs = make("unequal")
    costs = tight(graph, costs, 0.95)
    with pytest.raises(ValueError, match="'single' found no placement that fits: device"):
        dj.place(graph, costs, method="single")
    placed = dj.place(graph, costs, method="annealing", max_evaluations=40 * BOUND)
    assert (
        dj.simulator.peak_memory_bytes(graph, costs, placed.schedule) <= costs.capacity_bytes
    ).all()
    assert np.isfinite(placed.objective_s)


def test_where_nothing_fits_nothing_is_returned():
    # Three weights of 6 bytes on two devices of 10: any one fits, two do not.
    weights = [(dj.graphs.RESIDENT, 6, [v]) for v in range(3)]
    graph, costs = small_problem([1, 1, 1], [], 2, weights)
    costs = costs.replace(capacity_bytes=np.full(2, 10.0))
    with pytest.raises(ValueError, match=r"found no placement that fits: device \d needs 12"):
        dj.place(graph, costs, method="annealing", max_evaluations=40 * BOUND)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "heft9"}, "unknown method 'heft9'; known: annealing, cpop"),
        (
            {"method": "single", "policy": dj.policies.Policy(params={}, config=SMALL)},
            "method 'single' takes no policy",
        ),
        ({"budget_s": 0.0}, "budget_s is 0.0; expected more than 0"),
        ({"budget_s": float("nan")}, "budget_s is nan"),
        ({"max_evaluations": 0}, "max_evaluations is 0; expected more than 0"),
        ({"max_evaluations": -3}, "max_evaluations is -3"),
        ({"objective": "serial"}, "objective is 'serial'; expected a doppler_jax.Objective"),
        ({"queue": "lifo"}, "queue is 'lifo'; expected None or one of fifo, in_order"),
        (
            {"method": "exact", "objective": dj.Objective(num_noise=2)},
            "'exact' knows links 'parallel' without noise",
        ),
    ],
)
def test_bad_requests_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dj.place(*make("unequal"), **changes)


def test_a_method_may_be_given_in_place_of_its_name():
    def mine(request):
        return Candidates(np.ones((1, request.graph.num_tasks), int), evaluations=5)

    graph, costs = make("unequal")
    placed = dj.place(graph, costs, method=mine)
    assert (placed.method, placed.evaluations, set(placed.placement)) == ("mine", 5, {1})
    annealed = dj.place(graph, costs, method=searched(Annealing()), max_evaluations=BOUND)
    named = dj.place(graph, costs, method="annealing", max_evaluations=BOUND)
    np.testing.assert_array_equal(annealed.placement, named.placement)


def test_ablations_are_settings_and_take_policies_of_their_method():
    graph, costs = make("unequal")
    config = dataclasses.replace(SMALL, select="b_level")
    params = init_params(jax.random.key(1), config, make_policy_inputs(graph, costs))
    policy = dj.policies.Policy(params=params, config=config)
    placed = dj.place(graph, costs, method=doppler(config), policy=policy, max_evaluations=4)
    assert (placed.method, placed.evaluations) == ("doppler", 4)
    assert not {"doppler_sel", "doppler_plc", "placeto_once"} & set(dj.list_methods())


@pytest.mark.parametrize(
    "objective", [dj.Objective(), dj.Objective(num_noise=2, noise_sigma=0.2)]
)
def test_a_seed_is_what_its_key_is(objective):
    graph, costs = make("unequal")
    options = {"method": "random", "max_evaluations": 10, "objective": objective}
    first, second, third, other = (
        dj.place(graph, costs, key=key, **options).placement
        for key in (7, jax.random.key(7), None, 0)
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(third, other)
    assert (first != other).any()
    with pytest.raises(ValueError, match=r"key is the seed -1; expected 0 to 4294967295"):
        dj.place(graph, costs, key=-1)


NUM_DEVICES = 3


@pytest.fixture
def problem():
    return random_problem(np.random.default_rng(0), 12, NUM_DEVICES)


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
    [
        ("heft", dj.Objective("serial")),
        ("exact", dj.Objective()),
        ("etf", dj.Objective(num_noise=2)),
    ],
)
@pytest.mark.parametrize("queue", ["fifo", "in_order"])
def test_what_is_saved_is_loaded(tmp_path, method, objective, queue):
    problem = random_problem(np.random.default_rng(3), 8, 2, homes=False)
    placed = dj.place(*problem, method=method, objective=objective, queue=queue)
    placed.save(tmp_path / "a.json", {"graph": "three"})
    assert_same(dj.load_placed(tmp_path / "a.json", *problem), placed)
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
    (entry("placement", 0, NUM_DEVICES), "placement puts task 0 on device 3"),
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
    dj.place(*problem, method="random").save(path)
    damage(path)
    with pytest.raises(ValueError, match=f"a.json: .*{message}"):
        dj.load_placed(path, *problem)


def test_a_placement_of_another_problem_is_refused(problem, tmp_path):
    graph, costs = problem
    dj.place(graph, costs, method="heft").save(tmp_path / "a.json")
    for other in (changed(costs, "compute_s"), changed(costs, "latency_s")):
        with pytest.raises(ValueError, match="a placement of another graph, or of other costs"):
            dj.load_placed(tmp_path / "a.json", graph, other)


def test_a_request_is_searched_for_once(problem, searches, tmp_path):
    cache = tmp_path / "new" / "folder"
    first = dj.place(*problem, method="random", cache=cache)
    again = dj.place(*problem, method="random", cache=str(cache))
    assert len(searches) == 1
    assert_same(again, first)
    assert again.evaluations == 7
    assert again.curve.evaluations.tolist() == [5, 7]
    dj.place(*problem, method="random")  # without a cache
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
        {"queue": "fifo"},
        {"objective": dj.Objective("serial")},
        {"objective": dj.Objective(num_noise=2)},
        {"objective": dj.Objective(num_noise=1, noise_sigma=0.2)},
        {"objective": dj.Objective(num_noise=1, quantile=0.5)},
    ],
)
def test_whatever_decides_the_result_makes_another_request(
    problem, searches, tmp_path, options
):
    for others in ({}, {"objective": dj.Objective(num_noise=1)}, options):
        dj.place(*problem, **({"method": "random"} | others), cache=tmp_path)
    assert len(searches) == 3


@pytest.mark.parametrize("name", ["compute_s", "tensor_bytes", "latency_s"])
def test_the_slightest_change_of_a_cost_makes_another_request(
    problem, searches, tmp_path, name
):
    graph, costs = problem
    dj.place(graph, costs, method="random", cache=tmp_path)
    dj.place(graph, changed(costs, name), method="random", cache=tmp_path)
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
        dj.place(*problem, method=Toy(), **options, cache=tmp_path)
    assert len(searches) == 2


def test_unknown_methods_and_interrupted_searches_are_not_kept(problem, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="a cache needs a method whose settings"):
        dj.place(*problem, method=lambda request: None, cache=tmp_path)

    def search(request):
        found = np.zeros((1, request.graph.num_tasks), np.int64)
        return Candidates(found, 7, interrupted=True)

    monkeypatch.setitem(METHODS, "random", search)
    assert dj.place(*problem, method="random", cache=tmp_path).interrupted
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [d for d, _ in DAMAGED] + [field("objective_s", 1e-3)])
def test_what_the_oracle_does_not_confirm_is_searched_for_again(
    problem, searches, tmp_path, damage
):
    first = dj.place(*problem, method="random", cache=tmp_path)
    (path,) = tmp_path.iterdir()
    damage(path)
    again = dj.place(*problem, method="random", cache=tmp_path)
    assert len(searches) == 2
    assert again.placement[0] != first.placement[0]
    assert_same(dj.place(*problem, method="random", cache=tmp_path), again)
    assert len(searches) == 2


def test_a_device_that_cannot_run_a_task_is_not_recalled(problem, searches, tmp_path):
    graph, costs = problem
    dj.place(graph, costs, method="random", cache=tmp_path)
    (path,) = tmp_path.iterdir()
    compute_s = costs.compute_s.copy()
    compute_s[3, 1] = np.inf  # where the first search puts everything
    unable = costs.replace(compute_s=compute_s)
    other = dj.place(graph, unable, method="random", cache=tmp_path / "other")
    (other_path,) = (tmp_path / "other").iterdir()
    other_path.write_text(path.read_text())
    again = dj.place(graph, unable, method="random", cache=tmp_path / "other")
    assert (other.placement != 1).all()
    assert (again.placement != 1).all()
    assert len(searches) == 3


def test_priorities_replay_what_was_kept(tmp_path):
    graph, costs = random_problem(np.random.default_rng(3), 8, 2, homes=False)
    for queue, of_plan in (("fifo", "priority"), (None, "in_order"), ("priority", "priority")):
        options = {"method": "exact", "budget_s": 30.0, "queue": queue, "cache": tmp_path}
        first = dj.place(graph, costs, **options)
        assert first.queue == of_plan
        assert_same(dj.place(graph, costs, **options), first)


def test_digests_mind_values_shapes_and_names_but_not_widths(problem):
    graph, costs = problem
    digest = problem_digest(graph, costs)
    narrow = graph.replace(edge_tensor=np.asarray(graph.edge_tensor, np.int32))
    assert problem_digest(narrow, costs) == digest
    assert problem_digest(graph, changed(costs, "compute_s")) != digest
    ones = np.ones(4)
    trees = [{"a": ones}, {"b": ones}, {"a": ones.reshape(2, 2)}, {"a": ones.astype(int)}]
    assert len({tree_digest(tree) for tree in trees}) == 4
