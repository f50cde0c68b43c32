"""The exact solver beside the default search: what it is asked, and that both end together."""

import importlib.util

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.budget import Budget, CurveRecorder
from doppler_jax.methods.beside import MOST_TASKS, Beside, is_solvable
from doppler_jax.methods.request import Candidates, Request
from doppler_jax.objective import Objective
from doppler_jax.search.problem import make_search_problem
from tests.generators import random_problem

pytest.importorskip("ortools.sat.python.cp_model", reason="OR-Tools is not installed")

ENDLESS_S = 1e6


def request_of(graph, costs, seconds=ENDLESS_S, **changes):
    objective = changes.get("objective", Objective())
    noiseless = Objective(links=objective.links)
    given = {
        "graph": graph, "costs": costs, "objective": objective, "random": 0, "policy": None,
        "problem": make_search_problem(graph, costs, noiseless), "queue": "in_order",
        "budget": Budget(seconds=seconds), "lower_bound_s": 0.0, "curve": CurveRecorder(),
    }  # fmt: skip
    return Request(**(given | changes))


def problem(num_tasks=12, seed=1, devices=3):
    graph, costs = random_problem(np.random.default_rng(seed), num_tasks, devices)
    return graph, costs.replace(capacity_bytes=np.full(devices, np.inf))


@pytest.mark.parametrize("seed", range(4))
def test_the_default_method_solves_small_graphs_and_says_so(seed):
    graph, costs = problem(seed=seed)
    placed = dj.place(graph, costs, budget_s=60.0, queue="in_order")
    dj.simulator.validate(
        graph, placed.schedule, costs, queue="in_order", priority=placed.priority
    )
    assert "optimal (queue 'in_order')" in repr(placed)
    exact = dj.place(graph, costs, method="exact", budget_s=60.0, queue="in_order")
    assert placed.makespan_s == pytest.approx(exact.makespan_s, rel=1e-6)


def test_it_is_asked_where_its_schedule_is_what_is_executed():
    graph, costs = problem()
    assert is_solvable(request_of(graph, costs))
    zero = np.zeros(3)
    for changes in (
        {"queue": "fifo"},
        {"budget": Budget(evaluations=100)},
        {"objective": Objective(links="serial")},
        {"objective": Objective(num_noise=4)},
        {"costs": costs.replace(handling_s=zero, handling_s_per_byte=zero)},
    ):
        assert not is_solvable(request_of(graph, **({"costs": costs} | changes)))
    assert not is_solvable(request_of(*problem(MOST_TASKS + 1)))
    free = dj.from_edge_delays(np.ones(MOST_TASKS + 1), [(0, 1, 0.0)], num_devices=2)
    assert is_solvable(request_of(*free))
    made, costs = random_problem(np.random.default_rng(0), 8, 2, makers=True)
    assert (made.input_maker >= 0).any()
    assert not is_solvable(request_of(made, costs.replace(capacity_bytes=np.full(2, np.inf))))


def test_memory_is_minded_and_what_surely_fits_nowhere_leaves_the_search_alone():
    chain = [(v, v + 1, 6.0) for v in range(4)]
    graph, costs = dj.from_edge_delays([1, 1, 1, 1, 1, 3, 3, 2, 2, 2], chain, num_devices=2)
    costs = costs.replace(capacity_bytes=np.full(2, 24.0))
    placed = dj.place(graph, costs, budget_s=60.0, queue="in_order")
    assert placed.proven
    assert (dj.simulator.peak_memory_bytes(graph, costs, placed.schedule) <= 24).all()
    request = request_of(graph, costs.replace(capacity_bytes=np.full(2, 11.0)))
    with Beside(request) as solver:
        solver._thread.join()
    found = Candidates(placed.placement[None], 1, priority=placed.priority[None])
    assert solver.join(found).placements is found.placements


def test_without_the_solver_there_is_the_search(monkeypatch):
    monkeypatch.delitem(dj.methods.beside.sys.modules, "ortools.sat.python.cp_model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not is_solvable(request_of(*problem()))


def test_the_solver_ends_with_the_search_however_early():
    request = request_of(*problem(MOST_TASKS, devices=4))
    with Beside(request) as solver:
        assert solver.target_s() < np.inf
    nothing = np.zeros((1, MOST_TASKS), int)
    joined = solver.join(Candidates(nothing, 1, priority=nothing))
    assert len(joined.placements) == len(joined.priority) == 2
    assert joined.lower_bound_s > 0


def test_with_a_proof_the_search_may_stop_whatever_it_has():
    with Beside(request_of(*problem())) as solver:
        solver._thread.join()
    assert solver.target_s() == np.inf
