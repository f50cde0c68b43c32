"""Methods that search: where they begin, when they stop, and that they are never worse."""

import contextlib
from functools import partial
from unittest import mock

import jax
import numpy as np
import pytest

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.baselines.fitting import fit_into_memory
from doppler_jax.costs.build import from_edge_delays
from doppler_jax.learners.doppler import draw_plans
from doppler_jax.methods import PolicySearch, direct, searches
from doppler_jax.methods.child import Child
from doppler_jax.objective import Objective
from doppler_jax.placing import place
from doppler_jax.policies.features import make_policy_inputs
from doppler_jax.search.drawing import RandomSearch
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.types import Policy
from tests.generators import random_problem
from tests.methods.cases import (
    BOUND,
    DEVICES,
    LISTED,
    SEARCHES,
    assert_is_sound,
    from_samples,
    make,
    tight,
)


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


def test_the_search_starts_from_the_base_policy(policy, drawn_from):
    graph, costs = make("unequal")
    placed = place(graph, costs, max_evaluations=BOUND)
    assert_is_sound(placed, graph, costs)
    assert placed.method == "doppler+search"
    assert len(drawn_from) == 1
    assert drawn_from[0] is policy


@pytest.mark.parametrize("bounds", [{"budget_s": 1.0}, {}])
def test_where_seconds_count_samples_join_the_search_as_they_come_in(monkeypatch, bounds):
    graph, costs = random_problem(np.random.default_rng(3), 40, DEVICES)
    bounds = bounds | {"queue": "fifo"}
    monkeypatch.setattr(searches, "REFINE_S", 1.0)
    monkeypatch.setattr(searches, "SAMPLING_S", 0.5)
    good = place(
        graph, costs, method="annealing", max_evaluations=20_000, queue="fifo"
    ).placement
    said, ended = iter([None, (good[None], good[None][:0])]), []

    class Child:
        def __init__(self, work, *given, keep_compiled):
            self.work = work

        def receive(self):
            for drawn in said:
                return drawn
            raise EOFError

        def __enter__(self):
            return self

        def __exit__(self, *error):
            ended.append(self.work)

    monkeypatch.setattr(searches, "Child", Child)
    placed = place(graph, costs, method=PolicySearch(RandomSearch()), **bounds)
    assert ended == [searches._send_samples]
    np.testing.assert_array_equal(placed.placement, good)
    monkeypatch.setattr(searches, "SAMPLING_TASK_S", 0.1)  # too long for 40 tasks
    place(graph, costs, method=PolicySearch(RandomSearch()), **bounds)
    assert len(ended) == 1
    given = Policy(params={}, config=None)  # is asked for, whatever the seconds
    place(graph, costs, method=PolicySearch(RandomSearch()), policy=given, **bounds)
    assert len(ended) == 2


@pytest.mark.slow
def test_a_child_draws_what_is_drawn_here(policy):
    graph, costs = make("unequal")
    key = jax.random.key(5)
    given = (graph, costs, policy, np.asarray(jax.random.key_data(key)), 6)
    drawn = []
    with Child(searches._send_samples, *given) as child, contextlib.suppress(EOFError):
        while True:
            drawn.append(child.receive(100.0))
    assert len(drawn) > 1
    expected = draw_plans(make_policy_inputs(graph, costs), policy, key, 6)
    for here, there in zip(drawn, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, here, tuple(there))


def _say_where_programs_are_kept(send):
    send(str(jax.config.values["jax_compilation_cache_dir"]))


@pytest.mark.parametrize(
    ("keep_compiled", "variable", "kept"),
    [(True, "", True), (False, "", False), (True, "off", False)],
)
def test_what_a_child_compiles_is_kept_unless_it_must_not_be(
    keep_compiled, variable, kept, monkeypatch, tmp_path
):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("DOPPLER_JAX_CACHE", variable)
    with Child(_say_where_programs_are_kept, keep_compiled=keep_compiled) as child:
        said = child.receive(100.0)
    assert said == (str(tmp_path / "doppler_jax" / "xla") if kept else "None")


@pytest.mark.slow
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
    starts = search.call_args.args[2].placements.tolist()
    assert len(drawn_from) == 1
    for method in LISTED:
        assert place(graph, costs, method=method).placement.tolist() in starts


def test_samples_keep_the_orders_that_the_policy_placed_tasks_in(drawn_from, monkeypatch):
    graph, costs = make("unequal")
    search = mock.Mock(wraps=searches.run_search)
    monkeypatch.setattr(searches, "run_search", search)
    draw, drawn = searches._draw, []
    monkeypatch.setattr(searches, "_draw", lambda *given: drawn.extend(draw(*given)) or drawn)
    place(graph, costs, max_evaluations=BOUND)
    ranks = np.concatenate([plans.ranks for plans in drawn])
    np.testing.assert_array_equal(search.call_args.args[2].ranks[: len(ranks)], ranks)
    assert len(drawn_from) == 1
    place(graph, costs, max_evaluations=BOUND, queue="fifo")
    assert not len(search.call_args.args[2].ranks)


def test_a_given_policy_is_taken_in_place_of_the_base_policy(policy, drawn_from):
    graph, costs = make("unequal")
    other = Policy(params=policy.params, config=policy.config)
    place(graph, costs, policy=other, max_evaluations=BOUND)
    assert len(drawn_from) == 1
    assert drawn_from[0] is other


def test_without_a_base_policy_the_search_starts_from_lists(drawn_from):
    graph, costs = make("unequal")
    placed = place(graph, costs, method=from_samples(None), max_evaluations=BOUND)
    assert not drawn_from
    assert placed.makespan_s <= place(graph, costs, method="heft").makespan_s


@pytest.mark.parametrize("method", ["annealing", "doppler+search"])
def test_searches_start_from_placements_made_to_fit(drawn_from, monkeypatch, method):
    graph, costs = make("unequal")
    costs = tight(graph, costs, 0.95)
    refused = mock.Mock(side_effect=ValueError)
    monkeypatch.setattr(direct, "m_etf_schedule", refused)
    search = mock.Mock(wraps=searches.run_search)
    monkeypatch.setattr(searches, "run_search", search)
    place(graph, costs, method=method, max_evaluations=BOUND)
    began = search.call_args.args[2].placements.tolist()
    exceeding = [critical_path(graph, costs)]
    if drawn_from:
        exceeding.append(np.array(began[0]))  # the greedy placement
    for placement in exceeding:
        peak = peak_memory_bytes(graph, costs, simulate_oracle(graph, costs, placement))
        assert (peak > costs.capacity_bytes).any()
        assert fit_into_memory(graph, costs, placement).tolist() in began
    assert refused.called
    assert bool(drawn_from) == (method == "doppler+search")


@pytest.mark.parametrize("method", [m for m in SEARCHES if "doppler" not in m])
def test_limits_that_plans_stay_far_from_are_kept(method):
    graph, costs = random_problem(np.random.default_rng(4), 30, DEVICES)
    total = np.sum(costs.tensor_bytes) + np.sum(costs.input_bytes)
    costs = costs.replace(capacity_bytes=np.full(DEVICES, 0.99 * total))
    for queue in ("fifo", "in_order"):
        bound = {"method": method, "max_evaluations": 20 * BOUND, "queue": queue}
        placed = place(graph, costs, **bound)
        peak = peak_memory_bytes(graph, costs, placed.schedule)
        assert (peak <= costs.capacity_bytes).all()
        assert placed.makespan_s < place(graph, costs, method="heft", queue=queue).makespan_s
        assert_is_sound(placed, graph, costs)


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
    for module, name in ((searches, "run_search"), (searches, "Child"), (direct, "exact")):
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

    search = partial(searches.run_search, on_chunk=stop)
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
        for rule in ("critical_path", "heft"):
            assert placed.makespan_s <= place(graph, costs, method=rule).makespan_s


@pytest.mark.parametrize(
    ("method", "links", "least_s"),
    [("annealing", "parallel", 3.4), ("annealing", "duplex", 3.5)],
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
    best = np.array([0, 1, 2, 0, 0])
    placed = place(
        graph,
        costs,
        method=method,
        max_evaluations=256,
        objective=Objective(links),
        queue="fifo",
    )
    np.testing.assert_array_equal(placed.placement, best)
    np.testing.assert_allclose(placed.makespan_s, least_s)
    assert placed.curve.makespan_s.min() == placed.makespan_s
