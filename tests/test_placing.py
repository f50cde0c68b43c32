import dataclasses
import inspect
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.baselines.fitting import fit_into_memory
from doppler_jax.baselines.heft import heft
from doppler_jax.costs.build import from_edge_delays
from doppler_jax.graphs.build import make_graph, topological_order
from doppler_jax.graphs.levels import lower_bound_s
from doppler_jax.learners import doppler as doppler_learner
from doppler_jax.learners import learner
from doppler_jax.learners.doppler import policy_candidates
from doppler_jax.learners.registry import LEARNERS
from doppler_jax.methods import DEFAULT_METHOD, METHODS, learned, list_methods, lists, searches
from doppler_jax.methods.learned import doppler
from doppler_jax.objective import Objective
from doppler_jax.placing import place
from doppler_jax.policies import apply, features, greedy
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.policies.model import PolicyConfig, init_params
from doppler_jax.search import objective as search_objective
from doppler_jax.search.objective import make_search_problem, score_padded
from doppler_jax.search.random_search import RandomSearch
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.simulator.validate import validate
from doppler_jax.training.checkpoint import Policy
from doppler_jax.types import RESIDENT
from tests.generators import random_problem
from tests.search.cases import one_size
from tests.simulator.cases import small_problem

DEVICES = 3
BOUND = 24
"""Evaluations that the searching methods may spend here: one compilation for all."""

LISTED = ("critical_path", "cpop", "etf", "heft", "peft")
SEARCHES = ("annealing", "doppler+search", "evolution", "local_search", "memetic")
COMPILED = (*SEARCHES, "doppler", "random")

ELSEWHERE = set(LEARNERS) - {"doppler"}
"""Methods whose runs are tested in tests/learners: each compiles long."""

HERE = [method for method in list_methods() if method not in ELSEWHERE]


SMALL = PolicyConfig(width=8, rounds=1)


@pytest.fixture(scope="module", autouse=True)
def _one_small_compilation():
    # Every problem of this file has one padded size, and doppler trains a small policy.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "doppler", doppler(SMALL))
        patch.setattr(searches, "POLICY_STARTS", BOUND // 4)
        patch.setattr(searches, "load_base_policy", lambda: None)
        patch.setattr(searches, "RandomSearch", lambda: RandomSearch(draws=BOUND))
        one_size(patch)
        patch.setattr(features, "bucket_size", lambda size, smallest: 64)
        yield


def pinned_problem(rng, num_tasks):
    """Unequal devices, of which all but the first cannot run many of the tasks."""
    graph, costs = random_problem(rng, num_tasks, DEVICES)
    compute_s = costs.compute_s * np.array([4.0, 1.0, 0.25])
    compute_s[:, 1:][rng.random((num_tasks, DEVICES - 1)) < 0.6] = np.inf
    return graph, costs.replace(compute_s=compute_s)


PROBLEMS = {
    "unequal": lambda rng: random_problem(rng, 12, DEVICES),
    "ties and zeros": lambda rng: random_problem(rng, 12, DEVICES, dyadic=True),
    "pinned": lambda rng: pinned_problem(rng, 12),
    "one task": lambda rng: random_problem(rng, 1, DEVICES),
    "no task": lambda rng: random_problem(rng, 0, DEVICES),
}


def make(name):
    return PROBLEMS[name](np.random.default_rng(sorted(PROBLEMS).index(name)))


def budget(method):
    """What a method may spend here; `exact` simulates nothing and proves these at once."""
    return {"budget_s": 30.0} if method == "exact" else {"max_evaluations": BOUND}


def assert_is_sound(placed, graph, costs):
    """A legal placement, worth what the oracle says, whose priorities replay its schedule."""
    n = graph.num_tasks
    assert placed.placement.dtype == placed.priority.dtype == np.int64
    assert placed.placement.shape == (n,)
    assert np.isfinite(costs.compute_s[np.arange(n), placed.placement]).all()
    np.testing.assert_array_equal(np.sort(placed.priority), np.arange(n))
    replayed = simulate_oracle(
        graph, costs, placed.placement, queue="priority", priority=placed.priority
    )
    np.testing.assert_array_equal(replayed.start_s, placed.schedule.start_s)
    assert placed.makespan_s == placed.objective_s == makespan_s(replayed)
    fifo = simulate_oracle(graph, costs, placed.placement)
    if placed.queue == "fifo":
        np.testing.assert_array_equal(placed.schedule.start_s, fifo.start_s)
        validate(graph, placed.schedule, costs)
    else:
        assert makespan_s(fifo) > placed.makespan_s
    assert lower_bound_s(graph, costs) <= placed.lower_bound_s <= placed.makespan_s * (1 + 1e-9)
    curve = placed.curve
    assert curve.makespan_s[-1] == placed.objective_s
    assert (np.diff(curve.makespan_s) < 0).all()
    assert (np.diff(curve.evaluations) >= 0).all()
    assert (np.diff(curve.seconds) >= 0).all()
    assert curve.evaluations[-1] == placed.evaluations
    assert not placed.interrupted


# Training compiles long.
CELLS = [
    pytest.param(m, name, marks=[pytest.mark.slow] * ("doppler" in m))
    for m in HERE
    for name in PROBLEMS
]


@pytest.mark.parametrize(("method", "name"), CELLS)
def test_every_method_places_every_problem(method, name):
    graph, costs = make(name)
    placed = place(graph, costs, method=method, **budget(method))
    assert placed.method == method
    if method == "random":
        assert placed.evaluations == BOUND
    elif placed.makespan_s == placed.lower_bound_s:
        assert placed.evaluations <= BOUND
    elif method in SEARCHES or method == "doppler":
        assert BOUND / 2 < placed.evaluations <= BOUND
    else:
        assert placed.evaluations == 1
    assert placed.seconds > placed.compile_s >= 0
    assert_is_sound(placed, graph, costs)


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[pytest.mark.slow] * (m in COMPILED)) for m in HERE],
)
def test_one_device_has_one_placement(method):
    graph, costs = random_problem(np.random.default_rng(0), 12, 1)
    placed = place(graph, costs, method=method, **budget(method))
    assert_is_sound(placed, graph, costs)
    np.testing.assert_array_equal(placed.placement, np.zeros(12))


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[pytest.mark.slow] * ("doppler" in m)) for m in HERE]
)
def test_the_key_decides(method):
    graph, costs = make("unequal")
    one, same = (
        place(graph, costs, method=method, key=jax.random.key(5), **budget(method))
        for _ in range(2)
    )
    np.testing.assert_array_equal(one.placement, same.placement)
    np.testing.assert_array_equal(one.priority, same.priority)
    assert one.makespan_s == same.makespan_s


def test_random_differs_by_key_and_improves_with_more():
    graph, costs = make("unequal")
    best = [
        place(graph, costs, method="random", key=jax.random.key(k), max_evaluations=BOUND)
        for k in range(4)
    ]
    assert len({tuple(placed.placement) for placed in best}) == 4
    few = np.mean([placed.makespan_s for placed in best])
    more = place(graph, costs, method="random", max_evaluations=100 * BOUND)
    assert more.evaluations == 100 * BOUND
    assert more.makespan_s < few


def test_random_proposes_something_however_little_time_there_is():
    graph, costs = make("unequal")
    placed = place(graph, costs, method="random", budget_s=1e-3)
    assert np.isfinite(placed.makespan_s)


def test_single_takes_the_device_of_least_total_compute():
    graph, costs = make("unequal")
    placed = place(graph, costs, method="single")
    fastest = int(costs.compute_s.sum(axis=0).argmin())
    np.testing.assert_array_equal(placed.placement, np.full(12, fastest))
    assert np.unique(costs.compute_s.sum(axis=0)).size == DEVICES


def test_single_needs_a_device_that_runs_everything():
    graph, costs = random_problem(np.random.default_rng(0), 3, DEVICES)
    compute_s = costs.compute_s + np.where(np.eye(DEVICES, dtype=bool), np.inf, 0.0)
    with pytest.raises(ValueError, match="'single': no device can run every task"):
        place(graph, costs.replace(compute_s=compute_s), method="single")


def test_round_robin_deals_in_topological_order():
    graph, costs = make("unequal")
    placed = place(graph, costs, method="round_robin")
    order = topological_order(graph)
    assert order.tolist() != sorted(order)
    np.testing.assert_array_equal(placed.placement[order], np.arange(12) % DEVICES)


def test_critical_path_by_hand():
    # 0 -> 1 and 0 -> 2, then 3 reads both. Cheap transfers: 1 and 2 run side by side; the
    # longer one, 2, is placed first and stays with 0. Dear ones: all stay together.
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    for delay, expected, makespan in ((0.5, [0, 1, 0, 0], 6.0), (9.0, [0, 0, 0, 0], 8.0)):
        graph, costs = from_edge_delays([1, 2, 4, 1], [(*edge, delay) for edge in edges], 2)
        placed = place(graph, costs, method="critical_path")
        assert placed.placement.tolist() == expected
        assert placed.makespan_s == makespan


@pytest.mark.slow
def test_doppler_without_a_policy_is_never_worse_than_its_teacher():
    gains = []
    for name in PROBLEMS:
        graph, costs = make(name)
        taught = makespan_s(simulate_oracle(graph, costs, critical_path(graph, costs)))
        gains.append(
            taught - place(graph, costs, method="doppler", max_evaluations=BOUND).makespan_s
        )
    assert min(gains) >= 0
    assert max(gains) > 0  # its samples are worth something


@pytest.mark.slow
def test_the_teacher_competes_when_training_finds_nothing_better(monkeypatch):
    graph, costs = make("unequal")
    worst = np.full((1, 12), int(costs.compute_s.sum(axis=0).argmax()))
    monkeypatch.setattr(learner, "best_placements", lambda state, num_tasks: worst)
    placed = place(graph, costs, method="doppler", max_evaluations=BOUND)
    np.testing.assert_array_equal(placed.placement, critical_path(graph, costs))


@pytest.mark.slow
def test_doppler_stops_at_the_first_bound():
    graph, costs = make("unequal")
    placed = place(graph, costs, method="doppler", budget_s=1e-9, max_evaluations=BOUND)
    assert placed.evaluations == 1 + (BOUND - 1) // 3  # the teacher, and one update of three
    only_teacher = place(graph, costs, method="doppler", max_evaluations=1)
    assert only_teacher.evaluations == 1
    np.testing.assert_array_equal(only_teacher.placement, critical_path(graph, costs))


@pytest.mark.slow
@pytest.mark.parametrize("bound", [5, 128, 300])
def test_doppler_never_simulates_more_than_allowed(bound):
    graph, costs = make("unequal")
    placed = place(graph, costs, method="doppler", max_evaluations=bound)
    assert bound / 2 < placed.evaluations <= bound
    assert_is_sound(placed, graph, costs)


@pytest.fixture(scope="module")
def policy():
    """Untrained: any parameters must place legally."""
    init = jax.jit(partial(init_params, config=SMALL))
    problem = make_policy_inputs(*make("one task"))
    return Policy(params=init(jax.random.key(1), problem=problem), config=SMALL)


@pytest.mark.parametrize("name", PROBLEMS)
def test_doppler_with_a_policy_returns_its_best_sample(policy, name):
    graph, costs = make(name)
    options = {"policy": policy, "key": jax.random.key(3), "max_evaluations": BOUND}
    placed = place(graph, costs, method="doppler", **options)
    assert_is_sound(placed, graph, costs)
    assert placed.evaluations == BOUND
    _, key = jax.random.split(jax.random.key(3))
    drawn = policy_candidates(make_policy_inputs(graph, costs), policy, key, BOUND)
    best = min(makespan_s(simulate_oracle(graph, costs, p)) for p in drawn)
    assert placed.makespan_s == best


def test_the_first_two_candidates_of_a_policy_are_greedy_in_two_orders(policy):
    problem = make_policy_inputs(*make("unequal"))
    one, other = (
        policy_candidates(problem, policy, jax.random.key(k), BOUND) for k in range(2)
    )
    np.testing.assert_array_equal(one[:2], other[:2])
    assert (one[2:] != other[2:]).any()
    for count in (1, 2):
        few = policy_candidates(problem, policy, jax.random.key(0), count)
        np.testing.assert_array_equal(few, one[:count])
    given = dataclasses.replace(policy.config, select="b_level")
    for expected, config in zip(one, (policy.config, given), strict=False):
        tables = apply(policy.params, config, problem)
        found = greedy(problem, tables).placement[: one.shape[1]]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("count", [6, 8, 11])
def test_candidates_do_not_depend_on_how_many_are_drawn_at_once(policy, monkeypatch, count):
    problem = make_policy_inputs(*make("unequal"))
    expected = policy_candidates(problem, policy, jax.random.key(5), count)
    monkeypatch.setattr(doppler_learner, "DRAWN_STEPS", 1)
    monkeypatch.setattr(doppler_learner, "LEAST_DRAWN", 3)
    found = policy_candidates(problem, policy, jax.random.key(5), count)
    np.testing.assert_array_equal(found, expected)
    asked = iter([False, True])
    some = policy_candidates(problem, policy, jax.random.key(5), count, lambda: next(asked))
    np.testing.assert_array_equal(some, expected[:8])
    least = policy_candidates(problem, policy, jax.random.key(5), count, lambda: True)
    np.testing.assert_array_equal(least, expected[:5])


def test_samples_take_a_share_of_the_seconds_at_most(policy, drawn_from, monkeypatch):
    graph, costs = make("unequal")
    monkeypatch.setattr(doppler_learner, "DRAWN_STEPS", 1)
    monkeypatch.setattr(doppler_learner, "LEAST_DRAWN", 2)
    drawn = []
    sample = doppler_learner._sample
    monkeypatch.setattr(doppler_learner, "_sample", lambda *a: drawn.append(1) or sample(*a))
    monkeypatch.setattr(searches, "REFINE_S", 1e-3)
    for bounds, blocks in (
        ({"max_evaluations": BOUND}, 2),  # all of them, where no seconds are given
        ({"budget_s": 1e-3}, 1),
        ({"budget_s": 1000, "max_evaluations": BOUND}, 2),
        ({}, 1),
    ):
        place(graph, costs, **bounds)
        assert len(drawn) == blocks
        del drawn[:]


@pytest.fixture
def drawn_from(monkeypatch, policy):
    """The policies that placements were drawn from; the base policy is the untrained one."""
    policies = []

    def candidates(problem, policy, *rest):
        policies.append(policy)
        return policy_candidates(problem, policy, *rest)

    monkeypatch.setattr(searches, "policy_candidates", candidates)
    monkeypatch.setattr(searches, "load_base_policy", lambda: policy)
    return policies


def test_the_search_starts_from_the_base_policy(policy, drawn_from, monkeypatch):
    graph, costs = make("unequal")
    monkeypatch.setattr(searches, "REFINE_S", 1e-3)
    for bounds in ({}, {"max_evaluations": BOUND}, {"budget_s": 1e-3}):
        placed = place(graph, costs, **bounds)
        assert_is_sound(placed, graph, costs)
        assert placed.method == "doppler+search"
    assert len(drawn_from) == 3
    assert all(drawn is policy for drawn in drawn_from)


def test_no_list_scheduler_beats_the_search_however_small_its_budget(drawn_from):
    winners = set()
    for seed in range(8):
        graph, costs = random_problem(np.random.default_rng(seed), 12, DEVICES)
        listed = {m: place(graph, costs, method=m).makespan_s for m in LISTED}
        assert place(graph, costs, max_evaluations=1).makespan_s <= min(listed.values())
        winners.add(min(listed, key=listed.get))
    assert winners & {"cpop", "etf", "peft"}
    assert len(drawn_from) == 8


def test_the_search_starts_from_list_schedules_beside_the_samples(drawn_from, monkeypatch):
    graph, costs = make("unequal")
    search = mock.Mock(wraps=searches.run_search)
    monkeypatch.setattr(searches, "run_search", search)
    place(graph, costs, max_evaluations=BOUND)
    starts = search.call_args.args[3].tolist()
    assert len(drawn_from) == 1
    for method in LISTED:
        assert place(graph, costs, method=method).placement.tolist() in starts


def test_a_given_policy_is_taken_in_place_of_the_base_policy(policy, drawn_from):
    graph, costs = make("unequal")
    other = Policy(params=policy.params, config=policy.config)
    place(graph, costs, policy=other, max_evaluations=BOUND)
    assert len(drawn_from) == 1
    assert drawn_from[0] is other


def test_without_a_base_policy_the_search_starts_from_lists(drawn_from, monkeypatch):
    graph, costs = make("unequal")
    monkeypatch.setattr(searches, "load_base_policy", lambda: None)
    placed = place(graph, costs, max_evaluations=BOUND)
    assert not drawn_from
    assert placed.makespan_s <= place(graph, costs, method="heft").makespan_s


def tight(graph, costs, share):
    """The costs with each device's memory a share of what critical path uses of it."""
    schedule = simulate_oracle(graph, costs, critical_path(graph, costs))
    peak = peak_memory_bytes(graph, costs, schedule)
    return dataclasses.replace(costs, capacity_bytes=share * peak.max() * np.ones(DEVICES))


def test_what_is_returned_fits_into_memory():
    graph, costs = make("unequal")
    costs = tight(graph, costs, 0.95)
    with pytest.raises(
        ValueError, match="'critical_path' found no placement that fits: device"
    ):
        place(graph, costs, method="critical_path")
    placed = place(graph, costs, method="annealing", max_evaluations=40 * BOUND)
    assert (peak_memory_bytes(graph, costs, placed.schedule) <= costs.capacity_bytes).all()
    assert np.isfinite(placed.objective_s)


@pytest.mark.parametrize("method", ["local_search", "doppler+search"])
def test_searches_start_from_placements_made_to_fit(drawn_from, monkeypatch, method):
    graph, costs = make("unequal")
    costs = tight(graph, costs, 0.95)
    refused = mock.Mock(side_effect=ValueError)
    monkeypatch.setattr(lists, "m_etf", refused)
    search = mock.Mock(wraps=searches.run_search)
    monkeypatch.setattr(searches, "run_search", search)
    place(graph, costs, method=method, max_evaluations=BOUND)
    began = search.call_args.args[3].tolist()
    exceeding = [critical_path(graph, costs)]
    if drawn_from:
        exceeding.append(np.array(began[0]))  # the greedy placement
    for placement in exceeding:
        peak = peak_memory_bytes(graph, costs, simulate_oracle(graph, costs, placement))
        assert (peak > costs.capacity_bytes).any()
        assert fit_into_memory(graph, costs, placement).tolist() in began
    assert refused.called
    assert bool(drawn_from) == (method == "doppler+search")


@pytest.mark.parametrize(
    "objective", [Objective("serial"), Objective(num_noise=3, noise_sigma=0.5, quantile=0.9)]
)
def test_objectives_are_what_is_minimised_and_reported(objective):
    graph, costs = make("unequal")
    listed = place(graph, costs, method="critical_path", objective=objective)
    placed = place(
        graph, costs, method="random", max_evaluations=100 * BOUND, objective=objective
    )
    assert 95 * BOUND < placed.evaluations <= 100 * BOUND
    assert placed.objective_s < listed.objective_s
    links = objective.links
    schedule = simulate_oracle(graph, costs, placed.placement, links=links)
    assert placed.makespan_s == makespan_s(schedule)
    assert (placed.objective_s == placed.makespan_s) == (not objective.num_noise)
    replayed = simulate_oracle(
        graph, costs, placed.placement, links=links, queue="priority", priority=placed.priority
    )
    np.testing.assert_array_equal(replayed.start_s, schedule.start_s)


def test_doppler_makes_what_it_finds_fit(policy, monkeypatch):
    graph, costs = make("unequal")
    costs = tight(graph, costs, 0.95)
    listed = critical_path(graph, costs)[None]
    found = mock.Mock(
        placements=listed, interrupted=False, state=mock.Mock(evaluations=BOUND - 1)
    )
    learn = mock.Mock(return_value=found)
    monkeypatch.setattr(learned, "train_learner", learn)
    for given, bound in ((policy, BOUND), (None, 1), (None, BOUND)):
        placed = place(graph, costs, method="doppler", policy=given, max_evaluations=bound)
        assert (peak_memory_bytes(graph, costs, placed.schedule) <= costs.capacity_bytes).all()
    assert learn.call_count == 1


def test_where_nothing_fits_nothing_is_returned():
    # Three weights of 6 bytes on two devices of 10: any one fits, two do not.
    weights = [(RESIDENT, 6, [v]) for v in range(3)]
    graph, costs = small_problem([1, 1, 1], [], 2, weights)
    costs = costs.replace(capacity_bytes=np.full(2, 10.0))
    with pytest.raises(ValueError, match=r"found no placement that fits: device \d needs 12"):
        place(graph, costs, method="annealing", max_evaluations=40 * BOUND)


@pytest.mark.parametrize("method", [m for m in SEARCHES if "doppler" not in m])
def test_searches_stop_at_the_lower_bound(method):
    # List schedulers pair the two long tasks with short ones, which takes 7 seconds.
    graph, costs = from_edge_delays([3, 3, 2, 2, 2], [], num_devices=2)
    assert place(graph, costs, method="heft").makespan_s == 7.0
    placed, again = (
        place(graph, costs, method=method, max_evaluations=1_000_000) for _ in range(2)
    )
    assert placed.makespan_s == placed.lower_bound_s == 6.0
    assert placed.evaluations == again.evaluations < 10_000


@pytest.mark.parametrize("method", [*SEARCHES, "exact"])
def test_nothing_is_searched_where_a_list_schedule_meets_the_bound(method, monkeypatch):
    for module, name in (
        (searches, "run_search"), (searches, "policy_candidates"), (lists, "exact"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, mock.Mock(side_effect=AssertionError))
    graph, costs = from_edge_delays([1.0, 2.0], [(0, 1, 1.0)], num_devices=2)
    assert place(graph, costs, method=method).makespan_s == 3.0


def test_noise_has_no_lower_bound_to_stop_at():
    graph, costs = from_edge_delays([1.0, 2.0], [(0, 1, 1.0)], num_devices=2)
    objective = Objective(num_noise=3)
    placed = place(
        graph, costs, method="annealing", objective=objective, max_evaluations=3 * BOUND
    )
    assert placed.makespan_s == placed.lower_bound_s == 3.0
    assert placed.evaluations > BOUND


def test_ctrl_c_returns_the_best_so_far(monkeypatch):
    def stop(evaluations):
        raise KeyboardInterrupt

    search = partial(searches.run_search, on_block=stop)
    monkeypatch.setattr(searches, "run_search", search)
    graph, costs = make("unequal")
    placed = place(graph, costs, method="annealing", max_evaluations=BOUND)
    assert placed.interrupted
    assert 0 < placed.evaluations < BOUND
    taught = makespan_s(simulate_oracle(graph, costs, critical_path(graph, costs)))
    assert placed.makespan_s <= taught


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[pytest.mark.slow] * ("doppler" in m)) for m in SEARCHES]
)
def test_searches_are_never_worse_than_what_they_start_from(method):
    for seed in range(10):
        graph, costs = random_problem(np.random.default_rng(seed), 12, DEVICES)
        placed = place(graph, costs, method=method, max_evaluations=BOUND)
        for rule in (critical_path, heft):
            start = makespan_s(simulate_oracle(graph, costs, rule(graph, costs)))
            assert placed.makespan_s <= start


@pytest.mark.parametrize(
    ("method", "links", "least_s"),
    [("annealing", "parallel", 3.4), ("local_search", "duplex", 3.5)],
)
def test_float32_that_swaps_two_events_does_not_mislead_a_search(method, links, least_s):
    # Where C and D run, D's input is there first, which float32 cannot tell: then C, which E
    # awaits, comes after D. So D belongs elsewhere, which float32 takes to be longer.
    graph, costs = from_edge_delays(
        [1.0] * 5, [(0, 2, 0.0), (1, 3, 1.1), (2, 4, 0.0)], num_devices=DEVICES
    )
    seconds = {
        (0, 0): 1 + 1e-9,
        (1, 1): 1.0,
        (2, 2): 1.0,
        (3, 2): 1.0,
        (3, 0): 0.4,
        (4, 0): 1.0,
    }
    compute_s = np.full((5, DEVICES), np.inf)
    compute_s[*zip(*seconds, strict=True)] = list(seconds.values())
    seconds_per_byte = np.zeros((DEVICES, DEVICES))
    seconds_per_byte[1, 0] = 1.0
    costs = costs.replace(compute_s=compute_s, seconds_per_byte=seconds_per_byte)
    misleading, best = np.array([[0, 1, 2, 2, 0], [0, 1, 2, 0, 0]])
    rough = make_search_problem(graph, costs, Objective(), jax.random.key(0))
    padded = np.pad([misleading, best], ((0, 0), (0, rough.padded.padded_tasks - 5)))
    believed_s = score_padded(Objective(), rough, padded, 2).value_s
    np.testing.assert_allclose(believed_s, [3.0, 3.4], rtol=1e-6)
    placed = place(graph, costs, method=method, max_evaluations=256, objective=Objective(links))
    np.testing.assert_array_equal(placed.placement, best)
    np.testing.assert_allclose(placed.makespan_s, least_s)
    assert placed.curve.makespan_s.min() == placed.makespan_s


def test_what_only_the_oracle_finds_too_large_does_not_spoil_the_curve(monkeypatch):
    graph, costs = random_problem(np.random.default_rng(3), 12, DEVICES)
    fits = heft(graph, costs)
    peak = peak_memory_bytes(graph, costs, simulate_oracle(graph, costs, fits))
    costs = costs.replace(capacity_bytes=peak + 1.0)
    jax.clear_caches()  # what is patched may have been traced
    nothing = lambda table, padded, placements, *times: jnp.zeros(len(placements))  # noqa: E731
    monkeypatch.setattr(search_objective, "excess", nothing)
    placed = place(graph, costs, method="local_search", max_evaluations=256)
    jax.clear_caches()
    assert_is_sound(placed, graph, costs)
    assert np.isfinite(placed.curve.makespan_s).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "heft9"}, "unknown method 'heft9'; known: annealing, cpop"),
        ({"method": "single", "policy": "given"}, "method 'single' takes no policy"),
        ({"budget_s": 0.0}, "budget_s is 0.0; expected more than 0"),
        ({"budget_s": float("nan")}, "budget_s is nan"),
        ({"max_evaluations": 0}, "max_evaluations is 0; expected more than 0"),
        ({"max_evaluations": -3}, "max_evaluations is -3"),
        ({"objective": "serial"}, "objective is 'serial'; expected a doppler_jax.Objective"),
        (
            {"method": "exact", "objective": Objective(num_noise=2)},
            "'exact' knows links 'parallel' without noise",
        ),
    ],
)
def test_bad_requests_are_refused(policy, changes, message):
    if "policy" in changes:
        changes = changes | {"policy": policy}
    with pytest.raises(ValueError, match=message):
        place(*make("unequal"), **changes)


@pytest.mark.parametrize("method", list_methods())
def test_bad_problems_are_refused(method):
    graph, costs = random_problem(np.random.default_rng(2), 4, DEVICES)
    chain = make_graph(
        flops=[1, 1], tensor_producer=[0, 1], tensor_bytes=[0, 0], edge_tensor=[0],
        edge_reader=[1],
    )  # fmt: skip
    cyclic = chain.replace(edge_tensor=np.array([0, 1]), edge_reader=np.array([1, 0]))
    with pytest.raises(ValueError, match="tasks form a cycle: 0 -> 1 -> 0"):
        place(cyclic, costs, method=method)
    for bad, message in ((np.nan, "nan"), (-1.0, "-1.0")):
        compute_s = costs.compute_s.copy()
        compute_s[2, 1] = bad
        with pytest.raises(ValueError, match=rf"compute_s\[2, 1\] is {message}"):
            place(graph, costs.replace(compute_s=compute_s), method=method)
    with pytest.raises(ValueError, match=r"compute_s has shape \(4, 3\); expected \(2, 3\)"):
        place(chain, costs, method=method)


@pytest.mark.parametrize("method", list_methods())
def test_what_no_placement_fits_is_refused_before_searching(method):
    graph, costs = make("unequal")
    small = costs.replace(capacity_bytes=np.full(DEVICES, 1e-3))
    with pytest.raises(ValueError, match=r"task \d+ needs .* largest device that can run it"):
        place(graph, small, method=method)


def test_methods_are_sorted_names_and_doppler_with_search_is_the_default():
    assert list_methods() == sorted(set(list_methods()))
    default = inspect.signature(place).parameters["method"].default
    assert default == DEFAULT_METHOD == "doppler+search"
    assert default in list_methods()


@pytest.mark.parametrize(
    ("links", "guide"), [("parallel", "parallel"), ("serial", "serial"), ("duplex", "serial")]
)
def test_training_simulates_the_links_that_are_asked_for(links, guide, monkeypatch):
    asked = []

    def phase(key, problem, policy, config):
        asked.append(config.links)
        raise KeyboardInterrupt

    monkeypatch.setattr(doppler_learner, "sim_phase", phase)
    with pytest.raises(KeyboardInterrupt):
        place(
            *from_edge_delays([1.0, 2.0], [(0, 1, 1.0)], num_devices=2),
            method="doppler",
            objective=Objective(links),
            max_evaluations=100,
        )
    assert asked == [guide]
